//! What every engine shares: the queue, the times of what is in flight, the answers.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::queue::ClassQueue;
use super::{EngineLoad, IoDone, IoRequest, LentDone, LentRequest, Op, SlotsDone, SlotsRequest};
use crate::buf::{Lent, SlotBuf, Watch};
use crate::io::{BLOCK, Device};

/// Takes requests in, hands them to the engine's threads, keeps count.
pub(super) struct Desk {
    device: String,
    size: u64,
    state: Mutex<State>,
    work: Condvar,
    left: Condvar,
}

struct State {
    queue: ClassQueue<Request>,
    /// When the request of each place was given to the device.
    since: Vec<Option<Instant>>,
    free_places: Vec<usize>,
    threads: usize,
    asleep: bool,
    closed: bool,
}

/// A request on its way to the device, and its place in the table of what is in flight.
pub(super) struct Job {
    pub place: usize,
    pub request: Request,
}

/// What the engines move.
pub(super) struct Request {
    pub op: Op,
    pub offset: u64,
    pub len: usize,
    pub memory: Memory,
}

/// Where to or from, and who takes the answer.
pub(super) enum Memory {
    Slot(SlotBuf, IoDone),
    Slots(Vec<SlotBuf>, SlotsDone),
    Lent(Lent, LentDone),
}

impl Memory {
    fn len(&self) -> usize {
        match self {
            Memory::Slot(slot, _) => slot.len(),
            Memory::Slots(slots, _) => slots.iter().map(|slot| slot.len()).sum(),
            Memory::Lent(lent, _) => lent.len(),
        }
    }

    /// To be called when the device gets the request. False when there is no memory any more.
    pub fn enter(&mut self) -> bool {
        match self {
            Memory::Slot(..) | Memory::Slots(..) => true,
            Memory::Lent(lent, _) => lent.enter(),
        }
    }

    /// Who is told of the bytes as they pass.
    pub fn take_watch(&mut self) -> Option<Watch> {
        match self {
            Memory::Slot(..) | Memory::Slots(..) => None,
            Memory::Lent(lent, _) => lent.take_watch(),
        }
    }

    /// The bytes from `position` on, as far as they lie together, after [`Memory::enter`].
    fn piece(&mut self, position: usize) -> &mut [u8] {
        match self {
            Memory::Slot(slot, _) => &mut slot[position..],
            Memory::Slots(slots, _) => {
                let bytes = slots[0].len();
                &mut slots[position / bytes][position % bytes..]
            }
            Memory::Lent(lent, _) => lent.piece(position),
        }
    }
}

impl Request {
    /// The bytes from `position` of the request on, as far as they lie together; its memory must have been entered.
    pub fn piece(&mut self, position: usize) -> &mut [u8] {
        let rest = self.len - position;
        let piece = self.memory.piece(position);
        let len = piece.len().min(rest);
        &mut piece[..len]
    }
}

impl From<IoRequest> for Request {
    fn from(IoRequest { op, offset, len, buf, done }: IoRequest) -> Self {
        Self { op, offset, len, memory: Memory::Slot(buf, done) }
    }
}

impl From<SlotsRequest> for Request {
    fn from(SlotsRequest { op, offset, len, slots, done }: SlotsRequest) -> Self {
        Self { op, offset, len, memory: Memory::Slots(slots, done) }
    }
}

impl From<LentRequest> for Request {
    fn from(LentRequest { op, offset, memory, done }: LentRequest) -> Self {
        Self { op, offset, len: memory.len(), memory: Memory::Lent(memory, done) }
    }
}

impl Desk {
    /// A desk for `device` with `depth` requests in flight, served by `threads` threads; each must call
    /// [`Desk::leave`] at its end.
    pub fn new(device: &dyn Device, depth: usize, threads: usize) -> Self {
        Self {
            device: device.name().into(),
            size: device.size(),
            state: Mutex::new(State {
                queue: ClassQueue::new(depth),
                since: vec![None; depth],
                free_places: (0..depth).rev().collect(),
                threads,
                asleep: false,
                closed: false,
            }),
            work: Condvar::new(),
            left: Condvar::new(),
        }
    }

    /// Queues a request. True when the engine's thread sleeps and must be woken ([`Desk::sleep_or_take`]).
    pub fn submit(&self, request: impl Into<Request>) -> bool {
        let request: Request = request.into();
        if let Err(error) = self.check(&request) {
            request.answer(Err(error));
            return false;
        }
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            request.answer(Err(self.closed()));
            return false;
        }
        state.queue.push(request.op, request);
        let wake = std::mem::take(&mut state.asleep);
        drop(state);
        self.work.notify_one();
        wake
    }

    fn check(&self, request: &Request) -> io::Result<()> {
        let block = BLOCK as u64;
        let len = request.len as u64;
        let whole = request.offset.is_multiple_of(block) && len.is_multiple_of(block) && len > 0;
        let inside = request.offset.checked_add(len).is_some_and(|end| end <= self.size);
        if whole && inside && request.len <= request.memory.len() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "{}: {:?} of {len} bytes at {} is not in whole blocks of {BLOCK}, or outside of the buffer ({} bytes) \
                 or drive ({} bytes)",
                self.device,
                request.op,
                request.offset,
                request.memory.len(),
                self.size
            ),
        ))
    }

    fn closed(&self) -> io::Error {
        io::Error::new(io::ErrorKind::BrokenPipe, format!("{}: the store is closed", self.device))
    }

    /// Waits for the next request; none when the desk is closed.
    pub fn take(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.take() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    /// Takes what may be given to the device now, without waiting. With nothing to take, the next submit says that
    /// the thread must be woken. The second value is true when the desk is closed.
    pub fn sleep_or_take(&self, jobs: &mut Vec<Job>) -> bool {
        let mut state = self.state.lock();
        jobs.extend(std::iter::from_fn(|| state.take()));
        state.asleep = true;
        state.closed
    }

    /// The device is done with these requests; they are answered next.
    pub fn retire(&self, jobs: impl IntoIterator<Item = (usize, Op)>) {
        let mut state = self.state.lock();
        state.asleep = false;
        let mut any = false;
        for (place, op) in jobs {
            state.since[place] = None;
            state.free_places.push(place);
            state.queue.finish(op);
            any = true;
        }
        // A write that finishes may let several reads, or a held-back write, go.
        if any && state.has_waiting() {
            drop(state);
            self.work.notify_all();
        }
    }

    /// Whether requests wait for the device.
    pub fn has_waiting(&self) -> bool {
        self.state.lock().has_waiting()
    }

    /// What is queued and in flight.
    pub fn load(&self) -> EngineLoad {
        let state = self.state.lock();
        EngineLoad {
            queued_reads: state.queue.reads(),
            queued_writes: state.queue.writes(),
            in_flight: state.since.len() - state.free_places.len(),
            oldest: state.since.iter().flatten().min().copied(),
        }
    }

    /// Takes no more requests, answers those that wait.
    pub fn close(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.closed = true;
            state.queue.drain()
        };
        self.work.notify_all();
        for request in waiting {
            request.answer(Err(self.closed()));
        }
    }

    /// A thread of the engine ends: nothing of it is in flight or unanswered.
    pub fn leave(&self) {
        self.state.lock().threads -= 1;
        self.left.notify_all();
    }

    /// Waits up to `patience` for all threads to end.
    pub fn await_empty(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.threads > 0 {
            if self.left.wait_until(&mut state, deadline).timed_out() {
                return state.threads == 0;
            }
        }
        true
    }
}

impl State {
    fn has_waiting(&self) -> bool {
        self.queue.reads() + self.queue.writes() > 0
    }

    fn take(&mut self) -> Option<Job> {
        let (_, request) = self.queue.pop()?;
        let place = self.free_places.pop().expect("the queue keeps to the depth");
        self.since[place] = Some(Instant::now());
        Some(Job { place, request })
    }
}

impl Request {
    /// Gives the memory back, and the outcome. A panic of who takes it is logged and ends there, since other requests
    /// depend on this thread.
    pub fn answer(self, outcome: io::Result<()>) {
        let answered = catch_unwind(AssertUnwindSafe(|| match self.memory {
            Memory::Slot(slot, done) => done(slot, outcome),
            Memory::Slots(slots, done) => done(slots, outcome),
            Memory::Lent(lent, done) => {
                drop(lent);
                done(outcome);
            }
        }));
        if let Err(panic) = answered {
            tracing::error!("an I/O completion panicked: {}", panic_text(&*panic));
        }
    }
}

/// The text of a panic.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text")
}
