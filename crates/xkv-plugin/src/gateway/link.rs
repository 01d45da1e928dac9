//! One session in use: its questions, its drives, and the objects being read and written through it.
//!
//! Slots, readings and transactions hold the link that they came from, and use no other: once its session has ended
//! they answer with errors.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use xkv_session::entry::{DRIVE_BITS, FOLLOWS, MAX_RUN, MOST_DRIVES, Operation, Place, Reply, Status};
use xkv_session::{Answer, Call, Session, SessionError};
use xkv_store::io::BLOCK;
use xkv_store::io::engine::{EngineLoad, IoDone};
use xkv_store::{DriveReader, Error, ErrorKind, FragmentSums, Lent, RUN_BYTES, Result, Run, SlotBuf};

use super::question::{Heard, Question, Unanswered};
use super::straight::Drives;
use crate::backend::{Done, ReadDone, Reading, StraightDone, Transaction, UNREACHABLE, unreachable};

/// Slots for questions: one part in so many of a session's, within these bounds.
const ASIDE_PART: usize = 16;
const ASIDE_MOST: usize = 64;
/// Fewest slots that a session is of use with: one for questions, one for fragments.
pub const FEWEST_SLOTS: u32 = 2;

/// Takes questions that their session could not take.
pub type Unsent = Box<dyn Fn(Question) + Send + Sync>;

/// A session in use.
pub struct Link {
    pub session: Session,
    /// The gateway's drives, as far as this process reads them itself.
    own_drives: Drives,
    /// Slots that fragments leave free for questions.
    aside: usize,
    waiting: Mutex<Waiting>,
    drives: Box<[Drive]>,
    /// Calls that the session's end answered, and that the gateway may have taken.
    lost: AtomicU64,
    unsent: Unsent,
}

#[derive(Default)]
struct Waiting {
    /// Questions that found no slot. Lookups go first.
    lookups: VecDeque<Question>,
    others: VecDeque<Question>,
    ended: bool,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.lookups.is_empty() && self.others.is_empty()
    }
}

impl Link {
    /// Uses `session`, which must have at least [`FEWEST_SLOTS`], and its drives; questions that it cannot take go to `unsent`.
    pub fn new(session: Session, own_drives: Drives, unsent: Unsent) -> Arc<Self> {
        let slots = session.pool().slots();
        // The ring names drives by seven bits.
        let drives = session.welcome().drives.clamp(1, MOST_DRIVES as u32);
        Arc::new(Self {
            aside: (slots / ASIDE_PART).clamp(1, ASIDE_MOST),
            waiting: Mutex::default(),
            drives: (0..drives).map(|_| Drive::default()).collect(),
            lost: AtomicU64::new(0),
            unsent,
            own_drives,
            session,
        })
    }

    /// Slots for fragments.
    pub fn slots(&self) -> usize {
        self.session.pool().slots() - self.aside
    }

    pub fn drives(&self) -> usize {
        self.drives.len()
    }

    pub fn fragment_bytes(&self) -> usize {
        self.session.pool().slot_bytes()
    }

    /// Of each drive: what is in flight.
    pub fn load(&self) -> Vec<EngineLoad> {
        let loads = self.drives.iter().enumerate().map(|(drive, calls)| {
            let (asked, own) = (calls.load(), self.own_drives.load(drive));
            EngineLoad {
                in_flight: asked.in_flight + own.in_flight,
                oldest: asked.oldest.into_iter().chain(own.oldest).min(),
                ..own
            }
        });
        loads.collect()
    }

    /// Whether the session ended with something in flight.
    pub fn lost_something(&self) -> bool {
        self.lost.load(Ordering::SeqCst) > 0
    }

    /// Asks a question; it waits for a slot if there is none.
    pub fn ask(self: &Arc<Self>, question: Question) {
        if !question.fits(self.fragment_bytes()) {
            return question.answer(Err(Unanswered::TooLong));
        }
        let mut waiting = self.waiting.lock();
        if waiting.ended {
            drop(waiting);
            return (self.unsent)(question);
        }
        // Under the lock, so that a slot that comes back now is seen here or finds the question waiting.
        let slot = if waiting.is_empty() { self.session.pool().try_take() } else { None };
        match slot {
            Some(slot) => {
                drop(waiting);
                self.send(question, slot);
            }
            None if question.operation() == Operation::Lookup => waiting.lookups.push_back(question),
            None => waiting.others.push_back(question),
        }
    }

    fn send(self: &Arc<Self>, question: Question, mut slot: SlotBuf) {
        question.fill(&mut slot);
        let (operation, argument) = (question.operation(), question.argument());
        let link = self.clone();
        let done = move |Answer { reply, mut slots }: Answer| {
            match (reply, slots.pop()) {
                (Ok(reply), Some(slot)) => question.answer(Ok(Heard { link: link.clone(), reply, slot })),
                (Err(error), slot) if error.is_unsent() => {
                    drop(slot);
                    (link.unsent)(question);
                }
                (_, slot) => {
                    drop(slot);
                    link.lost.fetch_add(1, Ordering::SeqCst);
                    question.answer(Err(Unanswered::Lost));
                }
            }
            link.serve_waiting();
        };
        let sums = FragmentSums::default();
        let call = Call { operation, slots: vec![slot], handle: 0, argument, sums };
        self.session.call(call, Box::new(done));
    }

    /// Gives slots that came back to questions that wait. Fragments leave `aside` slots alone, so that whenever a
    /// question waits another one is in flight, whose answer comes here.
    fn serve_waiting(self: &Arc<Self>) {
        loop {
            let mut waiting = self.waiting.lock();
            if waiting.is_empty() || !self.session.is_open() {
                return;
            }
            let Some(slot) = self.session.pool().try_take() else { return };
            let question = waiting.lookups.pop_front().or_else(|| waiting.others.pop_front());
            drop(waiting);
            if let Some(question) = question {
                self.send(question, slot);
            }
        }
    }

    /// The session has ended: no question waits for it any longer.
    pub fn ended(&self) {
        let Waiting { lookups, others, .. } =
            std::mem::replace(&mut *self.waiting.lock(), Waiting { ended: true, ..Waiting::default() });
        lookups.into_iter().chain(others).for_each(|question| (self.unsent)(question));
    }

    fn take_slot(&self) -> Option<SlotBuf> {
        // Only the reactor takes slots for fragments: what it sees free here can only be taken by questions meanwhile.
        let pool = self.session.pool();
        if pool.free() > self.aside { pool.try_take() } else { None }
    }

    /// Moves fragments between their drive and slots.
    fn transfer(
        self: &Arc<Self>,
        drive: usize,
        call: Call,
        done: Box<dyn FnOnce(Vec<SlotBuf>, io::Result<Reply>) + Send>,
    ) {
        let link = self.clone();
        let number = self.drives[drive].started();
        let answered = move |Answer { reply, slots }: Answer| {
            link.drives[drive].ended(number);
            let outcome = link.heard(reply).and_then(|reply| match reply.status {
                Status::Done => Ok(reply),
                status => Err(failed(status, reply.value)),
            });
            done(slots, outcome);
        };
        self.session.call(call, Box::new(answered));
    }

    fn heard(&self, reply: std::result::Result<Reply, SessionError>) -> io::Result<Reply> {
        reply.map_err(|_| {
            self.lost.fetch_add(1, Ordering::SeqCst);
            unreachable()
        })
    }

    /// Lets go of a lease or transaction; of a lease, after so many bytes were read straight.
    fn close(&self, handle: u64, read: u64) {
        self.tell(Operation::Close, handle, read);
    }

    /// A call whose answer is of no interest.
    fn tell(&self, operation: Operation, handle: u64, argument: u64) {
        let (slots, sums) = (Vec::new(), FragmentSums::default());
        let call = Call { operation, slots, handle, argument, sums };
        self.session.call(call, Box::new(|_| ()));
    }
}

/// What is in flight to a drive.
#[derive(Default)]
struct Drive(Mutex<Busy>);

#[derive(Default)]
struct Busy {
    next: u64,
    since: BTreeMap<u64, Instant>,
    /// Latest answer: requests of others go before ours, so age alone is no sign of a stall.
    answered: Option<Instant>,
}

impl Drive {
    fn started(&self) -> u64 {
        let mut busy = self.0.lock();
        let number = busy.next;
        busy.next += 1;
        busy.since.insert(number, Instant::now());
        number
    }

    fn ended(&self, number: u64) {
        let mut busy = self.0.lock();
        busy.since.remove(&number);
        busy.answered = Some(Instant::now());
    }

    fn load(&self) -> EngineLoad {
        let busy = self.0.lock();
        let oldest = busy.since.values().next().map(|&since| busy.answered.map_or(since, |at| at.max(since)));
        EngineLoad { in_flight: busy.since.len(), oldest, ..EngineLoad::default() }
    }
}

/// How an object lies on the gateway's drives.
struct Shape {
    size: u64,
    fragment_bytes: usize,
    drives: usize,
    /// The byte of each fragment, as far as a slot reaches.
    places: Box<[u8]>,
}

impl Shape {
    fn new(link: &Link, size: u64, slot: &[u8]) -> Self {
        let (fragment_bytes, drives) = (link.fragment_bytes(), link.drives());
        let mut shape = Self { size, fragment_bytes, drives, places: Box::default() };
        shape.places = slot[..slot.len().min(shape.fragments() as usize)].into();
        shape
    }

    fn fragments(&self) -> u32 {
        u32::try_from(self.size.div_ceil(self.fragment_bytes as u64)).unwrap_or(u32::MAX)
    }

    fn fragment_len(&self, index: u32) -> usize {
        let start = u64::from(index) * self.fragment_bytes as u64;
        self.size.saturating_sub(start).min(self.fragment_bytes as u64) as usize
    }

    fn drive(&self, index: u32) -> usize {
        let index = index as usize;
        // Beyond the slot: striped as at the start, as long as the allocator finds room.
        let place = self.places.get(index).map(|&place| usize::from(place & DRIVE_BITS));
        place.unwrap_or_else(|| {
            self.places.first().map_or(0, |&first| usize::from(first & DRIVE_BITS)) + index
        }) % self.drives
    }

    /// All fragments, in runs of up to `most` for one request each.
    fn runs(&self, most: u32) -> Vec<Run> {
        // Where a fragment follows the one before it on its drive is all that is known of slots: numbers to that effect.
        let mut slots = [0; DRIVE_BITS as usize + 1];
        let place = |index: u32| {
            let byte = *self.places.get(index as usize)?;
            let slot = &mut slots[usize::from(byte & DRIVE_BITS)];
            *slot += if byte & FOLLOWS != 0 { 1 } else { 2 };
            Some((usize::from(byte & DRIVE_BITS), *slot))
        };
        let places: Vec<_> = (0..self.fragments()).map(place).collect();
        xkv_store::runs(places.into_iter(), most as usize, slots.len())
    }
}

/// An object being read.
pub struct Leased {
    link: Arc<Link>,
    handle: u64,
    shape: Shape,
    /// Where each fragment is, if some can be read straight.
    on_drives: Option<Box<[Place]>>,
    /// Bytes read straight.
    read: Arc<AtomicU64>,
    discarded: AtomicBool,
}

impl Leased {
    pub fn new(heard: Heard) -> Self {
        let Heard { link, reply, slot } = heard;
        let shape = Shape::new(&link, reply.value, &slot);
        let fragments = shape.fragments() as usize;
        let on_drives = link.own_drives.any().then(|| Place::take(&slot, fragments)).flatten();
        let (handle, read, discarded) = (reply.handle, Arc::default(), AtomicBool::new(false));
        Self { link, handle, shape, on_drives, read, discarded }
    }

    /// The reader of fragment `index` and where it is on its drive, where it can be read straight.
    fn straight(&self, index: u32) -> Option<(&DriveReader, Place)> {
        let place = *self.on_drives.as_ref()?.get(index as usize)?;
        let whole = self.shape.fragment_len(index).is_multiple_of(BLOCK);
        let reader = self.link.own_drives.get(self.drive(index))?;
        whole.then_some((reader, place))
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        if !self.discarded.load(Ordering::Relaxed) {
            self.link.close(self.handle, self.read.load(Ordering::Relaxed));
        }
    }
}

impl Reading for Leased {
    fn size(&self) -> u64 {
        self.shape.size
    }

    fn fragments(&self) -> u32 {
        self.shape.fragments()
    }

    fn drive(&self, index: u32) -> usize {
        self.shape.drive(index)
    }

    fn take_slot(&self) -> Option<SlotBuf> {
        self.link.take_slot()
    }

    fn slots_at_once(&self) -> u32 {
        // Few enough that they are found free while a stalled drive has its share.
        let most = (self.link.slots() / 16).min(RUN_BYTES / self.shape.fragment_bytes);
        most.clamp(1, MAX_RUN) as u32
    }

    fn runs(&self) -> Vec<Run> {
        if self.on_drives.is_none() {
            return self.shape.runs(self.slots_at_once());
        }
        let place = |index| self.straight(index).map(|(_, place)| (self.drive(index), place.slot));
        let places: Vec<_> = (0..self.fragments()).map(place).collect();
        let most = (RUN_BYTES / self.shape.fragment_bytes).max(1);
        xkv_store::runs(places.into_iter(), most, self.link.drives())
    }

    fn goes_straight(&self, index: u32) -> bool {
        self.straight(index).is_some()
    }

    fn read_straight(&self, run: Run, memory: Lent, done: StraightDone) {
        let (reader, Place { slot, .. }) =
            self.straight(run.first).expect("asked before whether it goes straight");
        let places = self.on_drives.as_ref().expect("as above");
        let sums = run.fragments().map(|index| places[index as usize].sums).collect();
        let (read, bytes) = (self.read.clone(), memory.len() as u64);
        // Not held: a drive that does not let go of what it reads keeps nothing else of a session that is over.
        let link = Arc::downgrade(&self.link);
        let done = move |outcome: io::Result<()>| {
            if !link.upgrade().is_some_and(|link| link.session.holds_leases()) {
                // Its slots may hold something else by now.
                return done(Err(unreachable()));
            }
            done(match outcome {
                Ok(()) => {
                    read.fetch_add(bytes, Ordering::Relaxed);
                    Ok(sums)
                }
                // What keeps this process from the drive may not keep the gateway from it, which knows more of it, too.
                Err(error) => Err(io::Error::new(io::ErrorKind::Unsupported, error)),
            });
        };
        reader.read(slot, memory, Box::new(done));
    }

    fn read(&self, run: Run, slots: Vec<SlotBuf>, done: ReadDone) {
        let count = slots.len();
        let step = if count > 1 { run.step } else { 0 };
        let argument = u64::from(run.first) | u64::from(step) << 32;
        let len: u64 = run.fragments().map(|index| self.shape.fragment_len(index) as u64).sum();
        let (operation, handle, sums) = (Operation::Read, self.handle, FragmentSums::default());
        let call = Call { operation, slots, handle, argument, sums };
        let done = move |slots, outcome: io::Result<Reply>| {
            let outcome = outcome.and_then(|reply| match reply.value {
                value if value == len => Ok(reply.sums[..count].to_vec()),
                value => Err(io::Error::other(format!("the gateway read {value} of {len} bytes"))),
            });
            done(slots, outcome);
        };
        self.link.transfer(self.drive(run.first), call, Box::new(done));
    }

    fn discard(&self) {
        // Ends the lease. The gateway believes its own reading alone.
        if !self.discarded.swap(true, Ordering::Relaxed) {
            self.link.tell(Operation::Discard, self.handle, 0);
        }
    }
}

/// An object being written.
pub struct Writing {
    link: Arc<Link>,
    handle: u64,
    shape: Shape,
    committed: bool,
}

impl Writing {
    /// Of an object of `size` bytes.
    pub fn new(heard: Heard, size: u64) -> Self {
        let Heard { link, reply, slot } = heard;
        let shape = Shape::new(&link, size, &slot);
        Self { shape, handle: reply.handle, link, committed: false }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.committed {
            self.link.close(self.handle, 0);
        }
    }
}

impl Transaction for Writing {
    fn fragments(&self) -> u32 {
        self.shape.fragments()
    }

    fn drive(&self, index: u32) -> usize {
        self.shape.drive(index)
    }

    fn take_slot(&self) -> Option<SlotBuf> {
        self.link.take_slot()
    }

    fn write(&mut self, index: u32, slot: SlotBuf, sums: FragmentSums, done: IoDone) {
        let (operation, argument) = (Operation::Write, u64::from(index));
        let call = Call { operation, slots: vec![slot], handle: self.handle, argument, sums };
        let done = move |mut slots: Vec<SlotBuf>, outcome: io::Result<Reply>| {
            let slot = slots.pop().expect("the call had a slot, which comes back");
            done(slot, outcome.map(drop));
        };
        self.link.transfer(self.shape.drive(index), call, Box::new(done));
    }

    fn commit(mut self: Box<Self>, done: Done<Result<()>>) {
        self.committed = true;
        let (operation, sums) = (Operation::Commit, FragmentSums::default());
        let call = Call { operation, slots: Vec::new(), handle: self.handle, argument: 0, sums };
        let link = self.link.clone();
        let answered = move |answer: Answer| {
            done(match link.heard(answer.reply) {
                Ok(reply) if reply.status == Status::Done => Ok(()),
                Ok(reply) => Err(refused(reply.status, reply.value)),
                Err(_) => Err(lost()),
            });
        };
        self.link.session.call(call, Box::new(answered));
    }
}

fn failed(status: Status, value: u64) -> io::Error {
    match (status, i32::try_from(value)) {
        (Status::Io, Ok(errno @ 1..4096)) => io::Error::from_raw_os_error(errno),
        _ => io::Error::other(format!("the gateway answers {status:?}")),
    }
}

/// The error of a commit or removal that the gateway refuses.
pub fn refused(status: Status, value: u64) -> Error {
    match status {
        Status::Removed => Error::new(ErrorKind::Removed, "the object was removed while it was being stored"),
        Status::ReadOnly => Error::new(ErrorKind::ReadOnly, "the gateway's store takes no changes"),
        _ => Error::io("the gateway", failed(status, value)),
    }
}

/// The error of a commit or removal without a gateway.
pub fn lost() -> Error {
    Error::new(ErrorKind::Unreachable, UNREACHABLE)
}
