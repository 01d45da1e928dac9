//! The store engine in this process, as a backend: slots of private memory, answers at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use xkv_store::io::engine::IoDone;
use xkv_store::{
    Begin, FragmentSums, Lease, ObjectKey, Result, SlotBuf, SlotPool, Store, StoreConfig,
    StoreStats, Txn,
};

use crate::backend::{Backend, Begun, Done, DriveSet, Reading, Transaction};

/// A store in this process.
pub struct Embedded {
    store: Store,
    slots: SlotPool,
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
            Ok(slots) => Ok(Self { store, slots }),
            Err(error) => {
                store.close(Duration::from_secs(1));
                Err(error)
            }
        }
    }
}

impl Backend for Embedded {
    fn fragment_bytes(&self) -> usize {
        self.store.fragment_bytes()
    }

    fn drives(&self) -> usize {
        self.store.drives()
    }

    fn slots(&self) -> usize {
        self.slots.slots()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    fn take_slot(&self) -> Option<SlotBuf> {
        self.slots.try_take()
    }

    fn answers_at_once(&self) -> bool {
        true
    }

    fn lookup(&self, keys: &[ObjectKey], done: Done<Vec<Option<DriveSet>>>) {
        done(keys.iter().map(|key| self.store.drives_of(key)).collect());
    }

    fn open(&self, key: &ObjectKey, done: Done<Option<Box<dyn Reading>>>) {
        let lease = self.store.lease(key);
        done(lease.map(|lease| {
            Box::new(Leased {
                store: self.store.clone(),
                lease,
            }) as Box<dyn Reading>
        }));
    }

    fn begin(&self, key: &ObjectKey, size: u64, done: Done<Begun>) {
        done(match self.store.begin(key, size) {
            Begin::Txn(txn) => Begun::Open(Box::new(txn)),
            Begin::Present => Begun::Present,
            Begin::Busy => Begun::Busy,
            Begin::Wait => Begun::Wait,
            Begin::NoSpace => Begun::NoSpace,
            Begin::ReadOnly => Begun::ReadOnly,
        });
    }

    fn remove(&self, key: &ObjectKey, done: Done<Result<bool>>) {
        self.store.remove(key, done);
    }

    fn on_space(&self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.store.on_space(waker);
    }

    fn oldest_io(&self) -> Vec<Option<Instant>> {
        self.store
            .stats()
            .drives
            .iter()
            .map(|drive| drive.oldest)
            .collect()
    }

    fn free_slots(&self) -> (usize, usize) {
        (self.slots.free(), self.slots.low_water())
    }

    fn stats(&self) -> StoreStats {
        self.store.stats()
    }

    fn close(&self, patience: Duration) {
        self.store.close(patience);
    }
}

impl Transaction for Txn {
    fn fragments(&self) -> u32 {
        Txn::fragments(self)
    }

    fn fragment_len(&self, index: u32) -> usize {
        Txn::fragment_len(self, index)
    }

    fn drive(&self, index: u32) -> usize {
        Txn::drive(self, index)
    }

    fn write(&self, index: u32, slot: SlotBuf, done: IoDone) {
        Txn::write(self, index, slot, done);
    }

    fn commit(self: Box<Self>, sums: Vec<FragmentSums>, done: Done<Result<()>>) {
        Txn::commit(*self, sums, done);
    }
}

struct Leased {
    store: Store,
    lease: Lease,
}

impl Reading for Leased {
    fn size(&self) -> u64 {
        self.lease.size()
    }

    fn fragments(&self) -> u32 {
        self.lease.fragments()
    }

    fn fragment_len(&self, index: u32) -> usize {
        self.lease.fragment_len(index)
    }

    fn drive(&self, index: u32) -> usize {
        self.lease.drive(index)
    }

    fn sums(&self, index: u32) -> FragmentSums {
        self.lease.sums(index)
    }

    fn read(&self, index: u32, slot: SlotBuf, done: IoDone) {
        self.lease.read(index, slot, done);
    }

    fn discard(&self) {
        self.store.discard(&self.lease);
    }
}
