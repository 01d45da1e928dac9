//! Removal of many objects at once: those of a namespace, of a model, or all.

use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::unbounded;

use crate::Store;
use crate::check::open_for_reading;
use crate::commit::{closed, log_failed};
use crate::config::StoreConfig;
use crate::error::Result;
use crate::io::Device;
use crate::set;
use crate::usage::Selection;

/// Longest wait for the store's threads once everything is removed.
const CLOSING: Duration = Duration::from_secs(60);

/// What was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Store {
    /// Removes every object that `selection` means; returns once all of it is committed. Objects whose store is under
    /// way are not seen. A crash half-way leaves each object either there, whole, or removed.
    ///
    /// # Errors
    /// The log's: what was not committed by then is there again after the next opening.
    pub fn clear(&self, selection: &Selection) -> Result<Cleared> {
        let inner = &self.0.inner;
        if inner.closed.load(Ordering::SeqCst) {
            return Err(closed());
        }
        if inner.read_only() {
            return Err(log_failed());
        }
        let (sender, outcomes) = unbounded();
        let mut cleared = Cleared::default();
        let Ok(()) = inner.index.for_each_shard::<Infallible>(|entries| {
            for entry in entries.into_iter().filter(|entry| selection.has(&entry.key)) {
                let sender = sender.clone();
                let done = Box::new(move |outcome: Result<()>| _ = sender.send(outcome));
                if inner.take_out(&entry, |_| true, done) {
                    inner.counters.removed.fetch_add(1, Ordering::Relaxed);
                    cleared.objects += 1;
                    cleared.bytes += entry.size;
                }
            }
            Ok(())
        });
        drop(sender);
        outcomes.iter().collect::<Result<()>>()?;
        Ok(cleared)
    }
}

/// [`Store::clear`] on the store on `config.paths`, which nobody has open.
///
/// # Errors
/// No store at the paths, and those of [`Store::open`] and [`Store::clear`].
pub fn clear(config: &StoreConfig, selection: &Selection) -> Result<Cleared> {
    {
        let devices = open_for_reading(config)?;
        let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device).collect();
        set::recognise_store(&refs, config.fragment_bytes)?;
    }
    let store = Store::open(config)?;
    let cleared = store.clear(selection);
    store.close(CLOSING);
    cleared
}
