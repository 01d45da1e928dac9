//! The committer: one thread that turns commits and removals into log records, a group at a time. While a group is
//! written the next gathers.
//!
//! A group takes two turns: its fragments are flushed, then its records are written and flushed. One flush does the second
//! for a group and the first for the next one, so that under load there is one for each group.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, ErrorKind, Result};
use crate::index::Entry;
use crate::inner::Inner;
use crate::key::Digest;
use crate::log::Log;
use crate::record;
use crate::set;
use crate::txn::TxnInner;

/// How often uses are written to the log when nothing else is, and how often a failed log is tried again.
const TICK: Duration = Duration::from_secs(5);
/// Uses remembered for the log at most; more are forgotten, which only blurs the order of eviction after a restart.
pub(crate) const MAX_TOUCHED: usize = 65_536;

/// Takes the outcome of a commit or removal, on the store's committer thread. Must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// Work for the committer.
pub(crate) enum Op {
    /// Make an object durable, then visible.
    Commit {
        /// Holds the key until the object is published.
        txn: Arc<TxnInner>,
        entry: Arc<Entry>,
        done: Done<()>,
    },
    /// Make a removal durable.
    Remove {
        digest: Digest,
        /// Keeps the slots until the removal is committed.
        entry: Option<Arc<Entry>>,
        done: Done<()>,
    },
    /// Answer when everything queued before is durable.
    Barrier { done: Done<()> },
}

impl Op {
    fn bytes(&self) -> usize {
        match self {
            Op::Commit { entry, .. } => entry.slots.manifest_bytes() as usize,
            Op::Remove { .. } => record::HEADER + 32,
            Op::Barrier { .. } => 0,
        }
    }

    fn fail(self, error: Error) -> Option<Arc<Entry>> {
        match self {
            Op::Commit { entry, done, txn } => {
                txn.release();
                done(Err(error));
                Some(entry)
            }
            Op::Remove { entry, done, .. } => {
                done(Err(error));
                entry
            }
            Op::Barrier { done } => {
                done(Err(error));
                None
            }
        }
    }
}

#[derive(Default)]
struct State {
    ops: VecDeque<Op>,
    closing: bool,
    ended: bool,
    /// Since when the committer's turn is.
    busy: Option<Instant>,
}

/// The committer's queue.
#[derive(Default)]
pub(crate) struct Commits {
    state: Mutex<State>,
    wake: Condvar,
}

impl Commits {
    /// Queues an operation. After the end it comes back, for [`refuse`].
    #[must_use]
    pub(crate) fn queue(&self, op: Op) -> Option<Op> {
        let mut state = self.state.lock();
        if state.ended {
            return Some(op);
        }
        state.ops.push_back(op);
        self.wake.notify_one();
        None
    }

    /// Queues an operation; after the end it is answered at once.
    pub(crate) fn push(&self, op: Op) {
        refuse(self.queue(op));
    }

    /// Calls `done` once everything queued so far is durable: at once when nothing is, and the store is not `read_only`.
    pub(crate) fn barrier(&self, read_only: impl FnOnce() -> bool, done: Done<()>) {
        let state = self.state.lock();
        // Asked last: a group that fails turns the store read-only before it is no longer busy.
        let idle = state.ops.is_empty() && state.busy.is_none() && !state.ended && !read_only();
        drop(state);
        if idle { done(Ok(())) } else { self.push(Op::Barrier { done }) }
    }

    /// Asks the committer to finish what is queued and end.
    pub(crate) fn close(&self) {
        self.state.lock().closing = true;
        self.wake.notify_all();
    }

    /// Operations queued, and for how long the group being written has been.
    pub(crate) fn load(&self) -> (usize, Option<Duration>) {
        let state = self.state.lock();
        (state.ops.len(), state.busy.map(|since| since.elapsed()))
    }

    /// The next group: operations of up to `limit` bytes, at least one. Empty after a tick, and at once when there is none
    /// and the caller has something to do (`idle` is false). None: end.
    fn next(&self, limit: usize, idle: bool) -> Option<Vec<Op>> {
        let mut state = self.state.lock();
        state.busy = None;
        if idle && state.ops.is_empty() && !state.closing {
            self.wake.wait_for(&mut state, TICK);
        }
        if idle && state.ops.is_empty() && state.closing {
            state.ended = true;
            return None;
        }
        let mut bytes = 0;
        let mut group = Vec::new();
        while let Some(op) = state.ops.front() {
            bytes += op.bytes();
            if bytes > limit && !group.is_empty() {
                break;
            }
            group.extend(state.ops.pop_front());
        }
        state.busy = Some(Instant::now());
        Some(group)
    }
}

/// Answers an operation that came too late. Not under a lock that its answer may want.
pub(crate) fn refuse(op: Option<Op>) {
    if let Some(op) = op {
        op.fail(closed());
    }
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::ReadOnly, "the store is closed")
}

pub(crate) fn log_failed() -> Error {
    Error::new(ErrorKind::ReadOnly, "the store is read-only since its manifest log failed")
}

/// What runs on the committer's thread.
pub(crate) struct Committer {
    pub(crate) inner: Arc<Inner>,
    pub(crate) log: Log,
    /// The group whose fragments are durable, and whose records are not written yet.
    flushed: Vec<Op>,
    /// Entries of a failed group: the log may still name their slots, so they stay taken until the next snapshot.
    pub(crate) limbo: Vec<Arc<Entry>>,
    pub(crate) tried: Instant,
}

impl Committer {
    pub(crate) fn new(inner: Arc<Inner>, log: Log) -> Self {
        Self { inner, log, flushed: Vec::new(), limbo: Vec::new(), tried: Instant::now() }
    }

    pub(crate) fn run(mut self) {
        // Half, since removals that a turn finds out about come on top.
        let limit = self.inner.group_limit / 2;
        while let Some(group) = self.inner.commits.next(limit, self.flushed.is_empty()) {
            if self.inner.read_only() && self.tried.elapsed() >= TICK {
                self.restart_log();
            }
            if self.inner.read_only() {
                for op in group {
                    self.limbo.extend(op.fail(log_failed()));
                }
            } else {
                self.turn(group);
            }
        }
        if !self.inner.read_only() {
            self.turn(Vec::new());
        }
    }

    /// Takes a group whose fragments are written. Its records follow a turn later, behind the flush of its fragments; the
    /// flush of the records is the next group's too. Uses are written along.
    fn turn(&mut self, group: Vec<Op>) {
        let (group, orphans): (Vec<Op>, Vec<Op>) = group.into_iter().partition(|op| match op {
            Op::Commit { txn, .. } => txn.holds_key(),
            Op::Remove { .. } | Op::Barrier { .. } => true,
        });
        for op in orphans {
            op.fail(removed());
        }
        let flushed = std::mem::take(&mut self.flushed);
        let stores = group.iter().any(|op| matches!(op, Op::Commit { .. }));
        let records = self.records(&flushed, group.is_empty());
        let logged = if records.is_empty() { Ok(()) } else { self.append(&records) };
        if let Err(error) = logged {
            return self.log_fails(&error, flushed.into_iter().chain(group));
        }
        // Without stores it is for the records alone, and other drives need not be waited for.
        let failures = match (stores, records.is_empty()) {
            (true, _) => self.inner.flush(&self.inner.drives),
            (false, false) => self.inner.flush(&self.inner.drives[..1]),
            (false, true) => Vec::new(),
        };
        let why = failures.first().map(|(_, error)| error.to_string());
        if let Some((_, error)) = failures.into_iter().find(|(drive, _)| *drive == 0 && !records.is_empty()) {
            return self.log_fails(&error, flushed.into_iter().chain(group));
        }
        self.inner.counters.groups.fetch_add(u64::from(!records.is_empty()), Ordering::Relaxed);
        let mut next: Vec<Op> = flushed.into_iter().filter_map(|op| self.apply(op)).collect();
        let (lost, kept): (Vec<Op>, Vec<Op>) = group.into_iter().partition(|op| match op {
            Op::Commit { txn, .. } => txn.generation != self.inner.flush_failures.load(Ordering::SeqCst),
            Op::Remove { .. } | Op::Barrier { .. } => false,
        });
        for op in lost {
            let text = match &why {
                Some(error) => format!("the drive could not be flushed: {error}"),
                None => "an earlier flush of the drive failed while the object was being written".to_owned(),
            };
            op.fail(Error::new(ErrorKind::Io, text));
        }
        next.extend(kept);
        self.flushed = next;
    }

    /// The records of a group, and of uses; of uses alone when there is nothing else to do.
    fn records(&self, group: &[Op], idle: bool) -> Vec<u8> {
        let mut records = Vec::new();
        let mut stored = HashSet::new();
        for op in group {
            match op {
                Op::Commit { entry, .. } => {
                    stored.insert(*entry.key.digest());
                    record::put_commit(&mut records, &entry.manifest());
                }
                // A removal may be queued late, behind a newer object of its key: that one's record has done its work.
                Op::Remove { digest, entry, .. }
                    if stored.contains(digest) || self.replaced(digest, entry) => {}
                Op::Remove { digest, .. } => record::put_remove(&mut records, digest),
                Op::Barrier { .. } => {}
            }
        }
        if !records.is_empty() || idle {
            let limit = self.inner.group_limit.saturating_sub(records.len());
            self.inner.put_touched(&mut records, limit);
        }
        records
    }

    /// Whether there is a newer object in place of the one that is being removed (none: a transaction).
    fn replaced(&self, digest: &Digest, removed: &Option<Arc<Entry>>) -> bool {
        let newer = |there: &Arc<Entry>| !removed.as_ref().is_some_and(|entry| Arc::ptr_eq(there, entry));
        self.inner.index.with_digest(digest, newer).unwrap_or(false)
    }

    /// Turns the store read-only, and answers `ops` so.
    fn log_fails(&mut self, error: &io::Error, ops: impl Iterator<Item = Op>) {
        // Before any entry is let go, so that no new transaction gets slots the log may still name.
        self.inner.set_read_only(error);
        self.tried = Instant::now();
        for op in ops {
            self.limbo.extend(op.fail(log_failed()));
        }
    }

    /// Makes a group's operation visible. What is to be logged next of it, before everything that was queued since.
    fn apply(&self, op: Op) -> Option<Op> {
        match op {
            Op::Commit { txn, entry, done } => {
                if self.inner.index.publish(&txn.token, &entry) {
                    self.inner.counters.committed.fetch_add(1, Ordering::Relaxed);
                    drop((txn, entry));
                    self.inner.signals.changed();
                    done(Ok(()));
                    None
                } else {
                    // Removed while its record was being written. The log must hear of it before the slots are free.
                    let digest = *entry.key.digest();
                    drop(txn);
                    done(Err(removed()));
                    Some(Op::Remove { digest, entry: Some(entry), done: Box::new(|_| ()) })
                }
            }
            Op::Remove { entry, done, .. } => {
                drop(entry);
                done(Ok(()));
                None
            }
            Op::Barrier { done } => {
                done(Ok(()));
                None
            }
        }
    }

    fn append(&mut self, records: &[u8]) -> io::Result<()> {
        if !self.log.fits(records.len()) {
            self.snapshot()?;
        }
        self.inner.drives[0].dirty.store(true, Ordering::SeqCst);
        self.log.append(records)
    }

    /// Writes all live manifests to the other area.
    pub(crate) fn snapshot(&mut self) -> io::Result<()> {
        let index = &self.inner.index;
        let written = self.log.snapshot(|put| {
            let (mut records, mut count) = (Vec::new(), 0);
            index.for_each_shard(|entries| {
                records.clear();
                for entry in &entries {
                    record::put_commit(&mut records, &entry.manifest());
                }
                count += entries.len() as u64;
                put(&records)
            })?;
            records.clear();
            record::put_snapshot_end(&mut records, count);
            put(&records)
        });
        // A flush that failed may have lost what others wrote, and is told once.
        written.inspect_err(|_| self.inner.flush_failed(0))?;
        self.limbo.clear();
        let first = &self.inner.drives[0];
        let header = self.log.next_header();
        if let Err(error) = set::write(&*first.device, &header) {
            self.inner.flush_failed(0);
            // The header's epoch is only a lower bound; the areas themselves say which is newer.
            tracing::warn!(drive = first.device.name(), %error, "cannot write the superblock");
        }
        Ok(())
    }

    fn restart_log(&mut self) {
        self.tried = Instant::now();
        match self.snapshot() {
            Ok(()) => {
                self.inner.set_writable();
                tracing::info!(
                    drive = self.inner.drives[0].device.name(),
                    "the manifest log works again; the store takes changes"
                );
            }
            Err(error) => {
                tracing::debug!(drive = self.inner.drives[0].device.name(), %error, "the manifest log still fails");
            }
        }
    }
}

fn removed() -> Error {
    Error::new(ErrorKind::Removed, "the object was removed while it was being stored")
}
