//! The store engine in this process, as a backend: slots of private memory, answers at once.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use xkv_store::io::engine::{IoDone, LentDone};
use xkv_store::{
    Begin, Error, ErrorKind, FragmentSums, Lease, Lent, ObjectKey, RUN_BYTES, Result, Run, SlotBuf, SlotPool,
    Store, StoreConfig, StoreStats, Txn,
};

use crate::backend::{Backend, Begun, Done, DriveSet, ReadDone, Reading, StraightDone, Transaction};

/// Runs under way that keep a drive busy: as many as its engine gives it at once. More would only spread over more memory
/// than the CPU's caches hold, and stand in the way of what comes next.
const RUNS_PER_DRIVE: usize = 32;

/// A store in this process, until it is closed.
pub struct Embedded {
    store: RwLock<Option<Store>>,
    slots: SlotPool,
    drives: usize,
    /// What was counted when it closed.
    last: Mutex<StoreStats>,
}

impl Embedded {
    /// Opens the store, with `slots` fragments in flight at most.
    ///
    /// # Errors
    /// Those of [`Store::open`], and memory for the slots that cannot be had.
    pub fn open(config: &StoreConfig, slots: usize) -> Result<Self> {
        Self::on(Store::open(config)?, slots)
    }

    /// Takes a store that is open already.
    ///
    /// # Errors
    /// Memory for the slots cannot be had; the store is closed then.
    pub fn on(store: Store, slots: usize) -> Result<Self> {
        match SlotPool::new(slots.max(1), store.fragment_bytes()) {
            Ok(slots) => Ok(Self {
                drives: store.drives(),
                store: RwLock::new(Some(store)),
                slots,
                last: Mutex::default(),
            }),
            Err(error) => {
                store.close(Duration::from_secs(1));
                Err(error)
            }
        }
    }

    /// What `ask` gets from the store; none once closed.
    fn ask<T>(&self, ask: impl FnOnce(&Store) -> T) -> Option<T> {
        self.store.read().as_ref().map(ask)
    }
}

impl Backend for Embedded {
    fn fragment_bytes(&self) -> usize {
        self.slots.slot_bytes()
    }

    fn drives(&self) -> usize {
        self.drives
    }

    fn slots(&self) -> usize {
        self.slots.slots()
    }

    fn describe(&self) -> String {
        self.ask(Store::describe).unwrap_or_default()
    }

    fn answers_at_once(&self) -> bool {
        true
    }

    fn lookup(&self, keys: &[ObjectKey], done: Done<Vec<Option<DriveSet>>>) {
        let places = self.ask(|store| keys.iter().map(|key| store.drives_of(key)).collect());
        done(places.unwrap_or_else(|| vec![None; keys.len()]));
    }

    fn open(&self, key: &ObjectKey, done: Done<io::Result<Option<Box<dyn Reading>>>>) {
        let leased = self.ask(|store| {
            let lease = store.lease(key)?;
            let (store, slots) = (store.clone(), self.slots.clone());
            Some(Box::new(Leased { store, slots, lease }) as Box<dyn Reading>)
        });
        done(Ok(leased.flatten()));
    }

    fn begin(&self, key: &ObjectKey, size: u64, done: Done<Begun>) {
        let begun = self.ask(|store| match store.begin(key, size) {
            Begin::Txn(txn) => {
                let sums = vec![FragmentSums::default(); txn.fragments() as usize];
                Begun::Open(Box::new(Writing { slots: self.slots.clone(), sums, txn }))
            }
            Begin::Present => Begun::Present,
            Begin::Busy => Begun::Busy,
            Begin::Wait => Begun::Wait,
            Begin::NoSpace => Begun::NoSpace,
            Begin::ReadOnly => Begun::ReadOnly,
        });
        done(begun.unwrap_or(Begun::ReadOnly));
    }

    fn remove(&self, key: &ObjectKey, done: Done<Result<bool>>) {
        // Not asked under the lock: `done` may be called at once.
        match self.ask(Store::clone) {
            Some(store) => store.remove(key, done),
            None => done(Err(Error::new(ErrorKind::ReadOnly, "the store is closed"))),
        }
    }

    fn on_space(&self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.ask(|store| store.on_space(waker));
    }

    fn oldest_io(&self) -> Vec<Option<Instant>> {
        let drives = self.stats().drives;
        drives.iter().map(|drive| drive.oldest).collect()
    }

    fn useful_in_flight(&self) -> usize {
        RUNS_PER_DRIVE * (RUN_BYTES / self.fragment_bytes()).max(1) * self.drives
    }

    fn free_slots(&self) -> (usize, usize) {
        (self.slots.free(), self.slots.low_water())
    }

    fn stats(&self) -> StoreStats {
        self.ask(Store::stats).unwrap_or_else(|| self.last.lock().clone())
    }

    fn close(&self, patience: Duration) {
        // Taken out, so that the drives are free for the next one that opens them.
        let store = self.store.write().take();
        if let Some(store) = store {
            store.close(patience);
            *self.last.lock() = store.stats();
        }
    }
}

struct Writing {
    slots: SlotPool,
    txn: Txn,
    sums: Vec<FragmentSums>,
}

impl Transaction for Writing {
    fn fragments(&self) -> u32 {
        self.txn.fragments()
    }

    fn drive(&self, index: u32) -> usize {
        self.txn.drive(index)
    }

    fn take_slot(&self) -> Option<SlotBuf> {
        self.slots.try_take()
    }

    fn write(&mut self, index: u32, slot: SlotBuf, sums: FragmentSums, done: IoDone) {
        self.sums[index as usize] = sums;
        self.txn.write(index, slot, done);
    }

    fn runs(&self) -> Vec<Run> {
        self.txn.runs()
    }

    fn goes_straight(&self, index: u32) -> bool {
        self.txn.goes_straight(index)
    }

    fn write_straight(&mut self, run: Run, memory: Lent, done: LentDone) {
        self.txn.write_straight(run, memory, done);
    }

    fn summed(&mut self, run: Run, sums: Vec<FragmentSums>) {
        for (index, sums) in run.fragments().zip(sums) {
            self.sums[index as usize] = sums;
        }
    }

    fn watches(&self, index: u32) -> bool {
        self.txn.watches(index)
    }

    fn commit(self: Box<Self>, done: Done<Result<()>>) {
        self.txn.commit(self.sums, done);
    }
}

struct Leased {
    store: Store,
    slots: SlotPool,
    lease: Lease,
}

impl Reading for Leased {
    fn size(&self) -> u64 {
        self.lease.size()
    }

    fn fragments(&self) -> u32 {
        self.lease.fragments()
    }

    fn drive(&self, index: u32) -> usize {
        self.lease.drive(index)
    }

    fn take_slot(&self) -> Option<SlotBuf> {
        self.slots.try_take()
    }

    fn read(&self, run: Run, slots: Vec<SlotBuf>, done: ReadDone) {
        let sums = run.fragments().map(|index| self.lease.sums(index)).collect();
        self.lease.read_slots(run, slots, Box::new(move |slots, read| done(slots, read.map(|()| sums))));
    }

    fn runs(&self) -> Vec<Run> {
        self.lease.runs()
    }

    fn goes_straight(&self, index: u32) -> bool {
        self.lease.goes_straight(index)
    }

    fn read_straight(&self, run: Run, memory: Lent, done: StraightDone) {
        let sums = run.fragments().map(|index| self.lease.sums(index)).collect();
        self.lease.read_straight(run, memory, Box::new(move |read| done(read.map(|()| sums))));
    }

    fn discard(&self) {
        self.store.discard(&self.lease);
    }
}
