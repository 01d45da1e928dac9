//! An object being read.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::buf::{Lent, SlotBuf};
use crate::checksum::FragmentSums;
use crate::index::Entry;
use crate::inner::Inner;
use crate::io::Op as IoOp;
use crate::io::engine::{IoDone, LentDone, SlotsDone};
use crate::key::ObjectKey;
use crate::run::Run;

/// An object being read: while it lives the object is not evicted and its slots are not reused.
pub struct Lease {
    store: Arc<Inner>,
    pub(crate) entry: Arc<Entry>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.entry.leases.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.store.signals.changed();
        }
    }
}

impl Lease {
    pub(crate) fn new(store: Arc<Inner>, entry: Arc<Entry>) -> Self {
        Self { store, entry }
    }

    /// The object's key.
    pub fn key(&self) -> &ObjectKey {
        &self.entry.key
    }

    /// Bytes of the object.
    pub fn size(&self) -> u64 {
        self.entry.size
    }

    /// Number of fragments.
    pub fn fragments(&self) -> u32 {
        self.entry.sums.len() as u32
    }

    /// Bytes of fragment `index`.
    pub fn fragment_len(&self, index: u32) -> usize {
        self.store.fragment_len(self.entry.size, index)
    }

    /// Drive that fragment `index` is on.
    pub fn drive(&self, index: u32) -> usize {
        self.place(index).0
    }

    /// The checksums of fragment `index`.
    pub fn sums(&self, index: u32) -> FragmentSums {
        self.entry.sums[index as usize]
    }

    /// Reads fragment `index` into the start of `buf` (whole blocks; bytes beyond the fragment are undefined).
    /// The object's slots stay reserved until `done` was called, even when the lease is dropped before.
    pub fn read(&self, index: u32, buf: SlotBuf, done: IoDone) {
        let (entry, store) = (self.entry.clone(), self.store.clone());
        let slot = entry.slots.numbers()[index as usize];
        let done = Box::new(move |buf, outcome| {
            store.counters.io.fetch_add(1, Ordering::Relaxed);
            drop((entry, store));
            done(buf, outcome);
        });
        self.store.io(IoOp::Read, slot, self.fragment_len(index), buf, done);
    }

    /// Drive of fragment `index`, and its slot there.
    pub fn place(&self, index: u32) -> (usize, u32) {
        self.store.allocator.place(self.entry.slots.numbers()[index as usize])
    }

    /// As [`Lease::read`], of fragments that lie one behind another on a drive, each into the start of its slot.
    ///
    /// # Panics
    /// They do not lie like that ([`Lease::place`]), or there is not a slot for each.
    pub fn read_slots(&self, run: Run, slots: Vec<SlotBuf>, done: SlotsDone) {
        assert_eq!(slots.len(), run.count as usize, "a slot for each fragment");
        let (entry, store) = (self.entry.clone(), self.store.clone());
        let len = run.fragments().map(|index| self.fragment_len(index)).sum();
        let done = Box::new(move |slots, outcome| {
            store.counters.io.fetch_add(1, Ordering::Relaxed);
            drop((entry, store));
            done(slots, outcome);
        });
        self.store.read_slots(self.entry.slots.numbers(), run, len, slots, done);
    }

    /// Whether fragment `index` can be read straight into memory of somebody else that starts at a whole block.
    pub fn goes_straight(&self, index: u32) -> bool {
        self.store.goes_straight(self.entry.slots.numbers()[index as usize], self.fragment_len(index))
    }

    /// The object in runs: fragments to be read in one go where they go straight, the others one by one.
    pub fn runs(&self) -> Vec<Run> {
        self.store.runs(self.entry.slots.numbers(), self.entry.size)
    }

    /// Reads a run of [`Lease::runs`] into memory of exactly its length, see [`Lease::goes_straight`]. The memory is given
    /// back before `done` is called.
    pub fn read_straight(&self, run: Run, memory: Lent, done: LentDone) {
        let (entry, store) = (self.entry.clone(), self.store.clone());
        let done = Box::new(move |outcome| {
            store.counters.io.fetch_add(1, Ordering::Relaxed);
            drop((entry, store));
            done(outcome);
        });
        self.store.io_straight(IoOp::Read, self.entry.slots.numbers(), run, memory, done);
    }
}
