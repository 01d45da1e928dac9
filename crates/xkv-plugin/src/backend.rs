//! What the connector needs of a store, wherever it lives.
//!
//! Every question is answered through a callback, exactly once, on whatever thread knows the answer; an embedded store
//! answers before the call returns, a gateway a round trip later. Calls and callbacks never block.

use std::sync::Arc;
use std::time::{Duration, Instant};

use xkv_store::io::engine::IoDone;
use xkv_store::{FragmentSums, ObjectKey, Result, SlotBuf, StoreStats};

/// Takes an answer.
pub type Done<T> = Box<dyn FnOnce(T) + Send>;

/// Drives that an object has fragments on: drive 0 is bit 0, drives from 63 on share bit 63.
pub type DriveSet = u64;

/// The set of drive `drive` alone.
pub fn drive_set(drive: usize) -> DriveSet {
    1 << drive.min(63)
}

/// Answer of [`Backend::begin`]; see [`xkv_store::Begin`].
pub enum Begun {
    /// Space is reserved.
    Open(Box<dyn Transaction>),
    /// The object is there already.
    Present,
    /// The key is being written or removed; ask again when woken.
    Busy,
    /// Room is being made; ask again when woken.
    Wait,
    /// The object cannot fit.
    NoSpace,
    /// The store takes no changes.
    ReadOnly,
}

/// A store of objects, seen from the connector.
pub trait Backend: Send + Sync + 'static {
    /// Bytes of a fragment.
    fn fragment_bytes(&self) -> usize;
    /// Number of drives.
    fn drives(&self) -> usize;
    /// Number of slots.
    fn slots(&self) -> usize;
    /// One line for the log.
    fn describe(&self) -> String;
    /// A free slot, or none at once.
    fn take_slot(&self) -> Option<SlotBuf>;
    /// Whether [`Backend::lookup`] answers before it returns.
    fn answers_at_once(&self) -> bool;
    /// Where each object lies; none for an absent one.
    fn lookup(&self, keys: &[ObjectKey], done: Done<Vec<Option<DriveSet>>>);
    /// Opens an object for reading; none when absent.
    fn open(&self, key: &ObjectKey, done: Done<Option<Box<dyn Reading>>>);
    /// Starts storing an object of `size` bytes.
    fn begin(&self, key: &ObjectKey, size: u64, done: Done<Begun>);
    /// Removes an object; `done` gets whether there was one.
    fn remove(&self, key: &ObjectKey, done: Done<Result<bool>>);
    /// Sets the function that is called when asking [`Backend::begin`] again may help.
    fn on_space(&self, waker: Arc<dyn Fn() + Send + Sync>);
    /// For every drive, when its oldest I/O in flight was given to it.
    fn oldest_io(&self) -> Vec<Option<Instant>>;
    /// Free slots, and the fewest seen so far.
    fn free_slots(&self) -> (usize, usize);
    /// The store's own counters.
    fn stats(&self) -> StoreStats;
    /// Ends it, within `patience`; what comes later is answered with errors.
    fn close(&self, patience: Duration);
}

/// An object being written; dropping it leaves nothing behind.
pub trait Transaction: Send {
    /// Number of fragments.
    fn fragments(&self) -> u32;
    /// Bytes of fragment `index`.
    fn fragment_len(&self, index: u32) -> usize;
    /// Drive that fragment `index` goes to.
    fn drive(&self, index: u32) -> usize;
    /// Writes fragment `index`, once.
    fn write(&self, index: u32, slot: SlotBuf, done: IoDone);
    /// Makes the object visible and durable.
    fn commit(self: Box<Self>, sums: Vec<FragmentSums>, done: Done<Result<()>>);
}

/// An object being read; dropping it lets the object be evicted again.
pub trait Reading: Send {
    /// Bytes of the object.
    fn size(&self) -> u64;
    /// Number of fragments.
    fn fragments(&self) -> u32;
    /// Bytes of fragment `index`.
    fn fragment_len(&self, index: u32) -> usize;
    /// Drive that fragment `index` is on.
    fn drive(&self, index: u32) -> usize;
    /// Checksums of fragment `index`.
    fn sums(&self, index: u32) -> FragmentSums;
    /// Reads fragment `index` into the start of `slot`.
    fn read(&self, index: u32, slot: SlotBuf, done: IoDone);
    /// Removes the object as damaged.
    fn discard(&self);
}
