//! What is in a store that nobody has open, off its manifest log. Nothing is changed.

use std::sync::Arc;

use crate::check::open_for_reading;
use crate::config::StoreConfig;
use crate::error::Result;
use crate::io::Device;
use crate::log::Log;
use crate::recover::recover;
use crate::set;
use crate::usage::{Count, Usage};

/// A store's contents.
#[derive(Clone, Debug)]
pub struct Listing {
    /// Identity of the store, hexadecimal.
    pub store: String,
    /// Bytes of a fragment and of a slot.
    pub fragment_bytes: u32,
    /// Slots in all.
    pub slots_total: u64,
    /// By namespace and model, most bytes first.
    pub usage: Vec<Usage>,
}

/// Lists the store on `config.paths`, which it locks meanwhile.
///
/// # Errors
/// No store at the paths, and those of [`crate::Store::open`].
pub fn list(config: &StoreConfig) -> Result<Listing> {
    let devices = open_for_reading(config)?;
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device).collect();
    let headers = set::recognise_store(&refs, config.fragment_bytes)?;
    let (first, at) = &headers[0];
    let slots_total: u64 = headers.iter().map(|(header, _)| header.slots).sum();
    let mut log = Log::new(Arc::clone(&devices[*at]), first.clone())?;
    let recovery = recover(&mut log, slots_total as usize, first.fragment_bytes as usize)?;
    let mut count = Count::default();
    for live in &recovery.live {
        count.add(&live.key, live.manifest.size, live.manifest.fragments.len(), live.manifest.recency);
    }
    Ok(Listing {
        store: first.set.iter().map(|byte| format!("{byte:02x}")).collect(),
        fragment_bytes: first.fragment_bytes,
        slots_total,
        usage: count.sorted(),
    })
}
