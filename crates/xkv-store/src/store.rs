//! The store's face: open, begin, write, commit, read, remove.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::buf::SlotBuf;
use crate::checksum::FragmentSums;
use crate::error::Result;
use crate::io::engine::IoDone;
use crate::io::{Device, DirectIo, EngineKind, EngineLoad};
use crate::key::ObjectKey;

/// How to open a store.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Block devices, store files, or folders (made when missing) that get a store file each.
    pub paths: Vec<PathBuf>,
    /// Size of all files together, bytes; block devices are used whole. Only used when a store is made.
    pub file_bytes: u64,
    /// Bytes per fragment; none takes the store's own, 131,072 for a new one. Another value than the store's is refused.
    pub fragment_bytes: Option<u32>,
    /// How bytes move.
    pub engine: EngineKind,
    /// Whether the page cache is bypassed.
    pub direct: DirectIo,
    /// Requests in flight per drive.
    pub depth: usize,
    /// Overwrite foreign content and other stores.
    pub force: bool,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            paths: Vec::new(),
            file_bytes: 16 << 30,
            fragment_bytes: None,
            engine: EngineKind::Auto,
            direct: DirectIo::Auto,
            depth: 32,
            force: false,
        }
    }
}

/// Answer of [`Store::begin`].
pub enum Begin {
    /// Space is reserved: write every fragment, then commit. Dropping it gives the space back.
    Txn(Txn),
    /// The object is there already, whatever its size.
    Present,
    /// Another transaction writes this key (or its commit or removal is on the way); ask again later.
    Busy,
    /// Eviction is making room; ask again when the waker of [`Store::on_space`] was called.
    Wait,
    /// The object cannot fit: larger than the store allows, or everything else is being read.
    NoSpace,
    /// The store takes no changes (its log failed, or it is closed).
    ReadOnly,
}

/// Takes the outcome of a commit or removal, on the store's committer thread. Must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// A store. Cheap to clone; the last clone closes it.
#[derive(Clone)]
pub struct Store;

/// An object being written.
pub struct Txn;

/// An object being read: while it lives the object is not evicted and its slots are not reused.
pub struct Lease;

/// Counters and gauges of a store.
#[derive(Clone, Debug, Default)]
pub struct StoreStats {
    /// Objects present.
    pub objects: u64,
    /// Slots of live objects, transactions, and removals not yet committed.
    pub slots_used: u64,
    /// Slots in all.
    pub slots_total: u64,
    /// Bytes of a fragment and of a slot.
    pub fragment_bytes: u32,
    /// Objects evicted since opening.
    pub evicted: u64,
    /// Objects committed since opening.
    pub committed: u64,
    /// Objects removed on request since opening.
    pub removed: u64,
    /// Objects dropped as damaged since opening (by a failed load or a recovery).
    pub discarded: u64,
    /// Groups of commits since opening.
    pub commit_groups: u64,
    /// True when the log failed and nothing can be stored.
    pub read_only: bool,
    /// What each drive's engine has to do.
    pub drives: Vec<EngineLoad>,
}

impl Store {
    /// Opens the store on `config.paths`, makes one where the drives are blank.
    ///
    /// # Errors
    /// See [`crate::ErrorKind`]; every text names the path, the value and the cure.
    pub fn open(config: &StoreConfig) -> Result<Store> {
        let _ = config;
        todo!()
    }

    /// Does every check of [`Store::open`] and changes nothing.
    pub fn probe(config: &StoreConfig) -> Result<()> {
        let _ = config;
        todo!()
    }

    /// Opens a store on devices made by the caller (tests).
    pub fn open_on(devices: Vec<Arc<dyn Device>>, config: &StoreConfig) -> Result<Store> {
        let _ = (devices, config);
        todo!()
    }

    /// Bytes of a fragment.
    pub fn fragment_bytes(&self) -> usize {
        todo!()
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        todo!()
    }

    /// One line for the log: drives, capacity, engine, direct or buffered, objects found.
    pub fn describe(&self) -> String {
        todo!()
    }

    /// Whether the object is present. In memory, no I/O, no waiting. Does not count as use.
    pub fn contains(&self, key: &ObjectKey) -> bool {
        let _ = key;
        todo!()
    }

    /// Drives that the object has fragments on, as a bit set (drive 0 is bit 0; drives beyond 63 share bit 63); none when absent. In memory.
    pub fn drives_of(&self, key: &ObjectKey) -> Option<u64> {
        let _ = key;
        todo!()
    }

    /// Starts storing an object of `size` bytes (at least 1).
    pub fn begin(&self, key: &ObjectKey, size: u64) -> Begin {
        let _ = (key, size);
        todo!()
    }

    /// Opens an object for reading and counts it as used. None: absent, or another key with the same digest.
    pub fn lease(&self, key: &ObjectKey) -> Option<Lease> {
        let _ = key;
        todo!()
    }

    /// Removes an object and ends a transaction on it. `done` gets whether there was one, once the removal is
    /// committed: no store begun before becomes visible after that.
    pub fn remove(&self, key: &ObjectKey, done: Done<bool>) {
        let _ = (key, done);
        todo!()
    }

    /// Removes a damaged object, unless another one has taken its place since.
    pub fn discard(&self, lease: &Lease) {
        let _ = lease;
        todo!()
    }

    /// Sets the function that is called when [`Begin::Wait`] or [`Begin::Busy`] may have become something else. Must not block.
    pub fn on_space(&self, waker: Arc<dyn Fn() + Send + Sync>) {
        let _ = waker;
        todo!()
    }

    /// Counters and gauges.
    pub fn stats(&self) -> StoreStats {
        todo!()
    }

    /// Ends the store: commits what was asked for, then refuses everything. Waits at most `patience`.
    pub fn close(&self, patience: Duration) {
        let _ = patience;
        todo!()
    }
}

impl Txn {
    /// Number of fragments.
    pub fn fragments(&self) -> u32 {
        todo!()
    }

    /// Bytes of fragment `index`.
    pub fn fragment_len(&self, index: u32) -> usize {
        let _ = index;
        todo!()
    }

    /// Drive that fragment `index` goes to.
    pub fn drive(&self, index: u32) -> usize {
        let _ = index;
        todo!()
    }

    /// Writes fragment `index`, once. The bytes of `buf` beyond the fragment's length are zeroed up to the next block.
    pub fn write(&self, index: u32, buf: SlotBuf, done: IoDone) {
        let _ = (index, buf, done);
        todo!()
    }

    /// Makes the object visible and durable; `sums` has one entry per fragment. All writes must have succeeded.
    pub fn commit(self, sums: Vec<FragmentSums>, done: Done<()>) {
        let _ = (sums, done);
        todo!()
    }
}

impl Lease {
    /// Bytes of the object.
    pub fn size(&self) -> u64 {
        todo!()
    }

    /// Number of fragments.
    pub fn fragments(&self) -> u32 {
        todo!()
    }

    /// Bytes of fragment `index`.
    pub fn fragment_len(&self, index: u32) -> usize {
        let _ = index;
        todo!()
    }

    /// Drive that fragment `index` is on.
    pub fn drive(&self, index: u32) -> usize {
        let _ = index;
        todo!()
    }

    /// The checksums of fragment `index`.
    pub fn sums(&self, index: u32) -> FragmentSums {
        let _ = index;
        todo!()
    }

    /// Reads fragment `index` into the start of `buf` (whole blocks; bytes beyond the fragment are undefined).
    /// The object's slots stay reserved until `done` was called, even when the lease is dropped before.
    pub fn read(&self, index: u32, buf: SlotBuf, done: IoDone) {
        let _ = (index, buf, done);
        todo!()
    }
}
