//! What the connector needs of a store, wherever it lives.
//!
//! Every question is answered through a callback, exactly once, on whatever thread knows the answer; an embedded store
//! answers before the call returns, a gateway a round trip later. Calls and callbacks never block. Whoever answers may go
//! on with what comes next, and so holds no lock that another call takes; only [`Backend::on_space`]'s function may be
//! called with locks held.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use xkv_store::io::engine::{IoDone, LentDone};
use xkv_store::{FragmentSums, Lent, ObjectKey, Result, Run, SlotBuf, StoreStats};

/// Takes an answer.
pub type Done<T> = Box<dyn FnOnce(T) + Send>;

/// Takes slots back, each with a fragment, and the fragments' checksums.
pub type ReadDone = Box<dyn FnOnce(Vec<SlotBuf>, io::Result<Vec<FragmentSums>>) + Send>;

/// As [`ReadDone`], of a run read straight into memory that was given back before.
pub type StraightDone = Box<dyn FnOnce(io::Result<Vec<FragmentSums>>) + Send>;

/// Drives that an object has fragments on: drive 0 is bit 0, drives from 63 on share bit 63.
pub type DriveSet = u64;

/// Where an object lies that its store could not be asked about: on no drive.
pub const UNKNOWN: DriveSet = 0;

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
    /// The store cannot be reached.
    Unreachable,
}

/// What people read when a store cannot be reached.
pub const UNREACHABLE: &str = "the gateway cannot be reached, or was lost meanwhile";

/// The error of an I/O whose store cannot be reached any more.
pub fn unreachable() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, UNREACHABLE)
}

/// Whether an I/O failed because its store cannot be reached any more.
pub fn is_unreachable(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotConnected
}

/// A store of objects, seen from the connector.
///
/// A store that cannot be reached answers at once: nothing is there, nothing can be stored.
pub trait Backend: Send + Sync + 'static {
    /// Bytes of a fragment; the same for all objects that are ever opened or begun.
    fn fragment_bytes(&self) -> usize;
    /// Number of drives; may change while the store cannot be reached.
    fn drives(&self) -> usize;
    /// Number of slots for fragments; may change as well.
    fn slots(&self) -> usize;
    /// One line for the log.
    fn describe(&self) -> String;
    /// Whether [`Backend::lookup`] answers before it returns.
    fn answers_at_once(&self) -> bool;
    /// Where each object lies; none for an absent one, [`UNKNOWN`] where the store cannot be reached.
    fn lookup(&self, keys: &[ObjectKey], done: Done<Vec<Option<DriveSet>>>);
    /// Opens an object for reading; none when absent. Fails only when the store cannot be reached.
    fn open(&self, key: &ObjectKey, done: Done<io::Result<Option<Box<dyn Reading>>>>);
    /// Starts storing an object of `size` bytes.
    fn begin(&self, key: &ObjectKey, size: u64, done: Done<Begun>);
    /// Removes an object; `done` gets whether there was one.
    fn remove(&self, key: &ObjectKey, done: Done<Result<bool>>);
    /// Sets the function that is called when asking [`Backend::begin`] again may help.
    fn on_space(&self, waker: Arc<dyn Fn() + Send + Sync>);
    /// For every drive, when its oldest I/O in flight was given to it.
    fn oldest_io(&self) -> Vec<Option<Instant>>;
    /// Fragments that are worth having under way at once.
    fn useful_in_flight(&self) -> usize {
        self.slots()
    }
    /// Free slots, and the fewest seen so far.
    fn free_slots(&self) -> (usize, usize);
    /// The store's own counters.
    fn stats(&self) -> StoreStats;
    /// Whether there is a way to the store at the moment.
    fn reachable(&self) -> bool {
        true
    }
    /// State and history of the way to the store, for statistics; none where there is nothing between.
    fn session(&self) -> Option<Value> {
        None
    }
    /// Ends it, within `patience`; what comes later is answered with errors.
    fn close(&self, patience: Duration);
}

/// An object being written; dropping it leaves nothing behind.
pub trait Transaction: Send {
    /// Number of fragments.
    fn fragments(&self) -> u32;
    /// Drive that fragment `index` goes to.
    fn drive(&self, index: u32) -> usize;
    /// A free slot for one of its fragments, or none at once.
    fn take_slot(&self) -> Option<SlotBuf>;
    /// Writes fragment `index`, once.
    fn write(&mut self, index: u32, slot: SlotBuf, sums: FragmentSums, done: IoDone);
    /// All fragments, in runs: those of several fragments go straight.
    fn runs(&self) -> Vec<Run> {
        (0..self.fragments()).map(Run::one).collect()
    }
    /// Whether fragment `index` can be written straight from memory that starts at a whole block.
    fn goes_straight(&self, _index: u32) -> bool {
        false
    }
    /// Writes a run from memory of its length, once, where [`Transaction::goes_straight`].
    fn write_straight(&mut self, _run: Run, memory: Lent, done: LentDone) {
        drop(memory);
        done(Err(io::ErrorKind::Unsupported.into()));
    }
    /// Takes the checksums of a run that is written straight, of each fragment; before the commit.
    fn summed(&mut self, _run: Run, _sums: Vec<FragmentSums>) {}
    /// Whether watches of the memory of fragment `index` are called when it is written straight ([`Lent::watched`]).
    fn watches(&self, _index: u32) -> bool {
        false
    }
    /// Makes the object visible and durable. Every fragment must have been written.
    fn commit(self: Box<Self>, done: Done<Result<()>>);
}

/// An object being read; dropping it lets the object be evicted again.
pub trait Reading: Send {
    /// Bytes of the object.
    fn size(&self) -> u64;
    /// Number of fragments.
    fn fragments(&self) -> u32;
    /// Drive that fragment `index` is on.
    fn drive(&self, index: u32) -> usize;
    /// A free slot for one of its fragments, or none at once.
    fn take_slot(&self) -> Option<SlotBuf>;
    /// Fragments of a run that can be read into slots at once.
    fn slots_at_once(&self) -> u32 {
        1
    }
    /// Reads a run of up to so many fragments, each into the start of a slot.
    fn read(&self, run: Run, slots: Vec<SlotBuf>, done: ReadDone);
    /// All fragments, in runs that can be read in one go.
    fn runs(&self) -> Vec<Run> {
        (0..self.fragments()).map(Run::one).collect()
    }
    /// Whether fragment `index` can be read straight into memory that starts at a whole block.
    fn goes_straight(&self, _index: u32) -> bool {
        false
    }
    /// Reads a run into memory of its length, where [`Reading::goes_straight`]. The error `Unsupported`: it may be read into slots
    /// all the same.
    fn read_straight(&self, _run: Run, memory: Lent, done: StraightDone) {
        drop(memory);
        done(Err(io::ErrorKind::Unsupported.into()));
    }
    /// Removes the object as damaged.
    fn discard(&self);
}
