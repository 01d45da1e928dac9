//! How bytes move: one engine per drive, fed with requests, answering through their callbacks.

mod desk;
mod pool;
mod queue;
#[allow(unsafe_code)]
mod uring;

use std::cell::Cell;
use std::io;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use super::Device;
use crate::buf::{Lent, SlotBuf};
use crate::error::Result;

/// Which engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring where the kernel allows it, the thread pool otherwise; said once, with the cure. The pool on tmpfs.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads that call pread and pwrite.
    Pool,
}

/// What a request does. Reads serve loads and go first; writes serve stores and are never starved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Device to buffer.
    Read,
    /// Buffer to device.
    Write,
}

/// Called exactly once with the buffer and the outcome, on a thread of the engine (or, for what the engine refuses, on
/// the thread that calls `submit` or `shutdown`). Must not block.
pub type IoDone = Box<dyn FnOnce(SlotBuf, io::Result<()>) + Send>;

/// One I/O of up to a slot.
pub struct IoRequest {
    /// Direction.
    pub op: Op,
    /// Position on the device, a multiple of [`super::BLOCK`].
    pub offset: u64,
    /// Bytes, a multiple of [`super::BLOCK`], at most the buffer's length.
    pub len: usize,
    /// The memory; it comes back with the completion.
    pub buf: SlotBuf,
    /// Takes the answer.
    pub done: IoDone,
}

/// As [`IoDone`]; the memory was given back before.
pub type LentDone = Box<dyn FnOnce(io::Result<()>) + Send>;

/// One I/O straight into memory of somebody else, or out of it.
pub struct LentRequest {
    /// Direction.
    pub op: Op,
    /// Position on the device, a multiple of [`super::BLOCK`].
    pub offset: u64,
    /// All of it is moved, a multiple of [`super::BLOCK`].
    pub memory: Lent,
    /// Takes the answer.
    pub done: LentDone,
}

/// As [`IoDone`], of several slots.
pub type SlotsDone = Box<dyn FnOnce(Vec<SlotBuf>, io::Result<()>) + Send>;

/// One I/O of several slots, in their order.
pub struct SlotsRequest {
    /// Direction.
    pub op: Op,
    /// Position on the device, a multiple of [`super::BLOCK`].
    pub offset: u64,
    /// Bytes, a multiple of [`super::BLOCK`]: all slots but the last are moved whole.
    pub len: usize,
    /// The memory, of equal size and at least one; it comes back with the completion.
    pub slots: Vec<SlotBuf>,
    /// Takes the answer.
    pub done: SlotsDone,
}

/// The error of a transfer whose memory its owner took back before the device got it.
pub(crate) fn taken_back() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "its memory was taken back")
}

thread_local! {
    static HAS_TIME: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread, inside of a completion, has time for the bytes that came: no other request waits for it.
pub fn has_time() -> bool {
    HAS_TIME.get()
}

/// What an engine has to do at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Reads and writes waiting for their turn.
    pub queued_reads: usize,
    /// Writes waiting for their turn.
    pub queued_writes: usize,
    /// Requests given to the device and not answered yet.
    pub in_flight: usize,
    /// When the oldest of those was given to the device.
    pub oldest: Option<Instant>,
}

/// Moves requests to and from one device.
pub trait IoEngine: Send + Sync + 'static {
    /// Queues a request; never blocks. After [`IoEngine::shutdown`] it is answered at once with an error.
    fn submit(&self, request: IoRequest);
    /// As [`IoEngine::submit`], for several slots.
    fn submit_slots(&self, request: SlotsRequest);
    /// As [`IoEngine::submit`], for memory of somebody else.
    fn submit_lent(&self, request: LentRequest);
    /// Whether watches of lent memory are called ([`crate::Lent::watched`]).
    fn watches(&self) -> bool;
    /// What is queued and in flight.
    fn load(&self) -> EngineLoad;
    /// Short name for messages: `io_uring` or `pool`.
    fn name(&self) -> &'static str;
    /// Answers what is queued with an error, waits up to `patience` for what is in flight. True when nothing is left;
    /// otherwise the rest keeps its buffers and is answered when the device comes back.
    fn shutdown(&self, patience: Duration) -> bool;
}

/// Starts an engine for `device` with up to `depth` requests in flight (the pool: one thread each, 16 at most).
///
/// # Errors
/// `Invalid` or `Io` when io_uring is asked for and cannot be had; `Io` when the system refuses threads.
pub fn start(device: Arc<dyn Device>, kind: EngineKind, depth: usize) -> Result<Arc<dyn IoEngine>> {
    static SAID: Once = Once::new();
    if kind == EngineKind::Auto && device.in_memory() {
        // Every transfer is a copy: as many at once as there are CPUs, on threads that go on with what they copied.
        let cpus = std::thread::available_parallelism().map_or(2, |n| n.get());
        return Ok(Arc::new(pool::Pool::start(device, depth.min(cpus.max(2)))?));
    }
    if kind == EngineKind::Uring || (kind == EngineKind::Auto && device.fd().is_some()) {
        match uring::Uring::start(device.clone(), depth) {
            Ok(engine) => return Ok(Arc::new(engine)),
            Err(error) if kind == EngineKind::Uring => return Err(error),
            Err(error) => SAID.call_once(|| tracing::warn!("{error}; using threads instead")),
        }
    }
    Ok(Arc::new(pool::Pool::start(device, depth)?))
}
