//! The reactor: owns every operation, hands out slots and answers at deadlines, on whatever thread has a turn
//! (`inbox.rs`). Turns are short: they wait for no drive and copy no fragments.
//!
//! Loads and stores are its two halves (`loads.rs`, `stores.rs`); here is what they share: the turn, batches and their
//! deadlines, stalled drives, lookups and deletes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use tracing::Level;
use xkv_store::{Digest, ObjectKey, Result, SlotBuf};

use crate::backend::{Backend, DriveSet, UNREACHABLE, drive_set};
use crate::connector::{CLOSED, Shared};
use crate::copy::CopyJob;
use crate::inbox::{Inbox, Work};
use crate::stats::{Miss, Outcome};
use crate::task::{Batch, Class, Completion, LoadKey, Message, Operation, Piece, Question, StoreKey};
use crate::window::Window;

/// How long drives are waited for that read straight into buffers, when the connector closes.
const STRAIGHT_PATIENCE: Duration = Duration::from_millis(800);

/// Age of a load at which LMCache is about to hand its memory on: short of its write lock on L1, 600 s.
const LAST_MOMENT: Duration = Duration::from_secs(570);

/// Fragments under way at most.
fn in_flight(backend: &dyn Backend) -> usize {
    backend.slots().min(backend.useful_in_flight())
}

/// What there is for a piece that does not go straight.
enum Room {
    /// A slot for each fragment.
    Slots(Vec<SlotBuf>),
    /// It is too long: so many fragments at once.
    Apart(u32),
    /// Too few slots are free.
    Full,
    /// Its object was answered meanwhile.
    Answered,
}

pub struct Reactor {
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Arc<Inbox<Reactor>>,
    pub(crate) copies: Sender<CopyJob>,
    pub(crate) batches: HashMap<u64, Batch>,
    pub(crate) loads: HashMap<u64, LoadKey>,
    pub(crate) stores: HashMap<u64, StoreKey>,
    /// The store of each key that is being stored.
    pub(crate) storing: HashMap<Digest, u64>,
    /// Loads and stores that the backend was not asked about yet.
    pub(crate) waiting: [VecDeque<u64>; 2],
    /// Number of those that it was asked about and has not answered.
    pub(crate) asked: [usize; 2],
    /// Stores that it put off, and whether for lack of room.
    pub(crate) parked: Vec<u64>,
    pub(crate) no_room: bool,
    pub(crate) window: Window,
    pub(crate) stalled: DriveSet,
    /// Drives that may be about to stall: nothing goes straight between them and L1.
    pub(crate) slow: DriveSet,
    space: Arc<AtomicBool>,
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    next_tick: Instant,
    next_ticket: u64,
}

impl Reactor {
    pub fn new(shared: Arc<Shared>, inbox: Arc<Inbox<Reactor>>, copies: Sender<CopyJob>) -> Self {
        let window = Window::new(in_flight(&*shared.backend), shared.backend.drives());
        let space = Arc::new(AtomicBool::new(false));
        let waker = {
            let (space, inbox) = (space.clone(), inbox.clone());
            move || {
                if !space.swap(true, Ordering::AcqRel) {
                    // Not posted: it may be called with locks of the store held.
                    inbox.leave(Message::Space);
                }
            }
        };
        shared.backend.on_space(Arc::new(waker));
        Self {
            shared,
            inbox,
            copies,
            batches: HashMap::new(),
            loads: HashMap::new(),
            stores: HashMap::new(),
            storing: HashMap::new(),
            waiting: Default::default(),
            asked: [0; 2],
            parked: Vec::new(),
            no_room: false,
            window,
            stalled: 0,
            slow: 0,
            space,
            deadlines: BinaryHeap::new(),
            next_tick: Instant::now(),
            next_ticket: 0,
        }
    }

    /// Runs until the connector closes.
    pub fn run(self) {
        let inbox = self.inbox.clone();
        let mut reactor = inbox.serve(self);
        // What was submitted before is to be answered, too.
        while let Some(message) = inbox.wait(Instant::now()) {
            reactor.guarded(|reactor| reactor.react(message));
        }
        reactor.abandon();
        reactor.guarded(Self::await_drives);
        drop(reactor);
        inbox.end();
    }

    /// Does some work; should that panic, everything in progress is answered.
    fn guarded(&mut self, work: impl FnOnce(&mut Self)) {
        if catch_unwind(AssertUnwindSafe(|| work(self))).is_err() {
            let text = "internal error in the reactor: all operations in progress are answered as failed";
            self.shared.log.say(Level::ERROR, text.into());
            self.abandon();
        }
    }

    fn work(&mut self, messages: &mut dyn Iterator<Item = Message>) {
        messages.for_each(|message| self.react(message));
        let now = Instant::now();
        loop {
            self.expire(now);
            if self.ticking() && now >= self.next_tick {
                self.tick(now);
            }
            self.pump();
            // The first look at the drives after a quiet time is due at once: no wish for it then.
            if self.wake_at().is_none_or(|at| at > now) {
                break;
            }
        }
        for (gauge, keys) in self.shared.live_keys.iter().zip([self.loads.len(), self.stores.len()]) {
            gauge.store(keys as u64, Ordering::Relaxed);
        }
    }

    fn react(&mut self, message: Message) {
        match message {
            Message::Get(submission) => self.take_get(submission),
            Message::Set(submission) => self.take_set(submission),
            Message::Exists(question) => self.take_exists(question),
            Message::Delete(question) => self.take_delete(question),
            Message::Found { id, places } => self.found(id, &places),
            Message::Opened { ticket, reading } => self.opened(ticket, reading),
            Message::Scattered { piece, outcome } => self.scattered(piece, outcome),
            Message::Begun { ticket, begun } => self.begun(ticket, begun),
            Message::Gathered { piece, outcome } => self.gathered(piece, outcome),
            Message::Written { piece, straight, result } => self.written(piece, straight, result),
            Message::Committed { ticket, result } => self.committed(ticket, result),
            Message::Removed { id, index, result } => self.removed(id, index, result),
            Message::Space => {
                self.space.store(false, Ordering::Release);
                self.retry_parked();
            }
        }
    }

    /// Gives free slots to fragments, and keeps enough objects open to fill them.
    fn pump(&mut self) {
        self.window.fit(in_flight(&*self.shared.backend), self.shared.backend.drives());
        while let Some(piece) = self.window.next() {
            let straight = match piece.class {
                Class::Load => self.read_straight(piece),
                Class::Store => self.write_straight(piece),
            };
            if straight {
                continue;
            }
            match self.room(piece) {
                Room::Slots(slots) if piece.class == Class::Load => self.read(piece, slots),
                Room::Slots(mut slots) => slots.drain(..).for_each(|slot| self.gather(piece, slot)),
                Room::Apart(most) => self.window.split(piece, most),
                Room::Answered => self.window.landed(&piece),
                Room::Full => self.window.put_back(piece),
            }
        }
        let ahead = in_flight(&*self.shared.backend).min(self.shared.backend.slots() / 4).clamp(16, 1024);
        while self.asked[0] + self.window.ready(Class::Load) < ahead && self.open_next() {}
        while !self.no_room && self.asked[1] + self.window.ready(Class::Store) < ahead && self.begin_next() {}
    }

    /// Slots for a piece, from where its object is: a slot of one session is of no use in another.
    fn room(&self, piece: Piece) -> Room {
        let loading =
            || self.loads.get(&piece.ticket).filter(|load| load.ending.is_none())?.reading.as_deref();
        let storing = || self.stores.get(&piece.ticket)?.txn.as_deref();
        let count = piece.run.count;
        let slots: Vec<SlotBuf> = match piece.class {
            Class::Load => match loading() {
                None => return Room::Answered,
                Some(reading) if count > reading.slots_at_once() => {
                    return Room::Apart(reading.slots_at_once());
                }
                Some(reading) => (0..count).map_while(|_| reading.take_slot()).collect(),
            },
            Class::Store => match storing() {
                None => return Room::Answered,
                Some(_) if count > 1 => return Room::Apart(1),
                Some(txn) => txn.take_slot().into_iter().collect(),
            },
        };
        if slots.len() == count as usize { Room::Slots(slots) } else { Room::Full }
    }

    pub(crate) fn new_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    pub(crate) fn add_batch(&mut self, id: u64, batch: Batch) {
        self.deadlines.push(Reverse((batch.deadline, id)));
        self.batches.insert(id, batch);
    }

    /// Whether a key of an operation has no answer yet.
    pub(crate) fn is_open(&self, id: u64, index: usize) -> bool {
        let batch = self.batches.get(&id);
        batch.is_some_and(|batch| batch.answers[index].is_none())
    }

    /// Answers an open key of an operation, and the operation with its last key. Count first: whoever drains the answer
    /// must see it counted.
    pub(crate) fn answer(&mut self, id: u64, index: usize, ok: bool, error: impl FnOnce() -> String) {
        let Some(batch) = self.batches.get_mut(&id) else {
            return;
        };
        if batch.answers[index].is_some() {
            return;
        }
        batch.answers[index] = Some(ok);
        batch.open -= 1;
        if !ok && batch.error.is_empty() {
            batch.error = error();
        }
        if batch.open == 0
            && let Some(batch) = self.batches.remove(&id)
        {
            let answers = batch.answers.into_iter().map(|answer| answer == Some(true)).collect();
            self.shared.stores_answered(batch.bytes);
            self.shared.stats.answered(batch.operation, batch.submitted);
            self.shared.complete(Completion::new(id, batch.operation, answers, batch.error, batch.owner));
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        let deadline = self.deadlines.peek().map(|Reverse((at, _))| *at);
        let tick = self.ticking().then_some(self.next_tick);
        deadline.into_iter().chain(tick).min()
    }

    /// Answers what is too old.
    fn expire(&mut self, now: Instant) {
        while let Some(Reverse((at, id))) = self.deadlines.peek().copied()
            && (at <= now || !self.batches.contains_key(&id))
        {
            self.deadlines.pop();
            self.give_up(id);
        }
    }

    /// Answers what is open of an operation as failed: too old, or closed.
    fn give_up(&mut self, id: u64) {
        let Some(batch) = self.batches.get(&id) else {
            return;
        };
        let operation = batch.operation;
        let open: Vec<(usize, u64)> = (0..batch.answers.len())
            .filter(|&i| batch.answers[i].is_none())
            .map(|i| (i, batch.tickets[i]))
            .collect();
        let closing = self.shared.closing.load(Ordering::Acquire);
        let (miss, outcome, why) = if closing {
            (Miss::Refused, Outcome::Failed, CLOSED)
        } else if self.shared.backend.reachable() {
            (Miss::Deadline, Outcome::TooOld, "no answer before its deadline")
        } else {
            (Miss::Unreachable, Outcome::Unreachable, UNREACHABLE)
        };
        for (index, ticket) in open {
            match operation {
                Operation::Get => self.fail_load(ticket, miss, || why.into()),
                Operation::Set if ticket != 0 => self.settle(ticket, outcome, || why.into()),
                Operation::Set => self.account_store(id, index, outcome, 0, || why.into()),
                Operation::Exists | Operation::Delete => {
                    if operation == Operation::Exists {
                        self.shared.stats.lookup_missed(miss, 1);
                    }
                    if !closing {
                        self.shared
                            .log
                            .failed(operation.name(), 1, || format!("{}: {why}", operation.name()));
                    }
                    self.answer(id, index, false, || why.into());
                }
            }
        }
    }

    /// Waits for drives that read straight into buffers, as the connector closes. What they still have in the end is
    /// never given back: the exports of those buffers are leaked.
    fn await_drives(&mut self) {
        let deadline = Instant::now() + STRAIGHT_PATIENCE;
        while self.loads.values().any(|load| load.ending.is_some()) {
            match self.inbox.wait(deadline) {
                Some(Message::Scattered { piece, outcome }) => self.scattered(piece, outcome),
                Some(_) => {}
                None => {
                    let held = self.loads.len();
                    let text = format!("closing while a drive has not let go of {held} buffers of L1");
                    self.shared.log.say(Level::ERROR, text);
                    std::mem::forget(std::mem::take(&mut self.batches));
                    return;
                }
            }
        }
    }

    /// Ends the process before L1 hands on memory that a drive has not let go of: nothing takes it from the drive, and
    /// what it brings late would be somebody else's bytes.
    fn watch_drives(&self, now: Instant) {
        for ending in self.loads.values().filter_map(|load| load.ending.as_ref()) {
            if now.saturating_duration_since(ending.submitted) > LAST_MOMENT {
                tracing::error!(
                    "a drive has held memory of L1 for {LAST_MOMENT:?}; LMCache is about to hand it on, and what the \
                     drive brings late would be wrong bytes: ending the process"
                );
                std::process::abort();
            }
        }
    }

    /// Answers everything that is open.
    fn abandon(&mut self) {
        let ids: Vec<u64> = self.batches.keys().copied().collect();
        for id in ids {
            // Whatever is wrong with one operation, the others are answered.
            let _ = catch_unwind(AssertUnwindSafe(|| self.give_up(id)));
        }
    }

    fn ticking(&self) -> bool {
        // A slot that something else than a fragment had comes back without a message.
        let short_of_slots = self.window.ready(Class::Load) + self.window.ready(Class::Store) > 0;
        self.stalled != 0 || self.window.in_flight() > 0 || short_of_slots || !self.parked.is_empty()
    }

    /// Looks for drives that stopped answering, or answer again.
    fn tick(&mut self, now: Instant) {
        self.watch_drives(now);
        let patience = self.shared.config.wait_timeout;
        self.next_tick = now + (patience / 8).clamp(Duration::from_millis(1), Duration::from_millis(250));
        let (mut stalled, mut slow) = (0, 0);
        for (drive, oldest) in self.shared.backend.oldest_io().into_iter().enumerate() {
            let silent = oldest.is_some_and(|since| now.saturating_duration_since(since) > patience);
            let was = self.stalled & drive_set(drive) != 0;
            if oldest.is_some_and(|since| now.saturating_duration_since(since) > patience / 4) {
                slow |= drive_set(drive);
            }
            if silent {
                stalled |= drive_set(drive);
            }
            if silent && !was {
                self.window.clear(drive);
                let text = format!(
                    "drive {drive} has not answered for {patience:?}: until it does, its objects are misses and stores \
                     that need it are refused"
                );
                self.shared.log.say(Level::WARN, text);
            } else if was && !silent {
                self.shared.log.say(Level::WARN, format!("drive {drive} answers again"));
            }
        }
        let newly = stalled & !self.stalled;
        self.stalled = stalled;
        self.slow = slow;
        self.shared.stalled.store(stalled, Ordering::Relaxed);
        if newly != 0 {
            let needs = |left: &crate::task::Outstanding| left.needs(newly);
            let loads: Vec<u64> =
                self.loads.iter().filter(|(_, key)| needs(&key.left)).map(|(t, _)| *t).collect();
            let stores: Vec<u64> =
                self.stores.iter().filter(|(_, key)| needs(&key.left)).map(|(t, _)| *t).collect();
            for ticket in loads {
                self.fail_load(ticket, Miss::Stalled, || "its drive does not answer".into());
            }
            for ticket in stores {
                self.settle(ticket, Outcome::Stalled, || "its drive does not answer".into());
            }
        }
        self.retry_parked();
    }

    fn take_exists(&mut self, question: Question) {
        let id = question.id;
        self.add_batch(id, self.question_batch(Operation::Exists, &question));
        let inbox = self.inbox.clone();
        let done = move |places| {
            inbox.post(Message::Found { id, places });
        };
        self.shared.backend.lookup(&question.keys, Box::new(done));
    }

    fn found(&mut self, id: u64, places: &[Option<DriveSet>]) {
        for (index, place) in places.iter().enumerate() {
            let miss = self.shared.lookup_miss(*place);
            if self.is_open(id, index) {
                match miss {
                    Some(miss) => self.shared.stats.lookup_missed(miss, 1),
                    None => self.shared.stats.hit(Operation::Exists, 1, 0),
                }
            }
            self.answer(id, index, miss.is_none(), String::new);
        }
    }

    fn take_delete(&mut self, question: Question) {
        let id = question.id;
        self.add_batch(id, self.question_batch(Operation::Delete, &question));
        for (index, key) in question.keys.iter().enumerate() {
            if let Some(&ticket) = self.storing.get(key.digest()) {
                self.settle(ticket, Outcome::Deleted, || "deleted meanwhile".into());
            }
            let inbox = self.inbox.clone();
            let done = move |result| {
                inbox.post(Message::Removed { id, index, result });
            };
            self.shared.backend.remove(key, Box::new(done));
        }
    }

    fn removed(&mut self, id: u64, index: usize, result: Result<bool>) {
        match result {
            // Gone is gone: LMCache ends its bookkeeping of keys that were answered with true.
            Ok(_) => {
                if self.is_open(id, index) {
                    self.shared.stats.hit(Operation::Delete, 1, 0);
                }
                self.answer(id, index, true, String::new);
            }
            Err(error) => {
                self.shared.log.failed("delete", 1, || format!("delete: {error}"));
                self.answer(id, index, false, || error.to_string());
            }
        }
    }

    fn question_batch(&self, operation: Operation, question: &Question) -> Batch {
        Batch {
            operation,
            submitted: question.submitted,
            deadline: question.submitted + self.shared.config.wait_timeout,
            answers: vec![None; question.keys.len()],
            open: question.keys.len(),
            tickets: vec![0; question.keys.len()],
            owner: None,
            bytes: 0,
            error: String::new(),
        }
    }
}

impl Work for Reactor {
    type Message = Message;

    fn turn(&mut self, messages: &mut dyn Iterator<Item = Message>) -> Option<Instant> {
        self.guarded(|reactor| reactor.work(messages));
        self.wake_at()
    }
}

/// A key for people: text where it is text, cut where it is long.
pub(crate) fn show(key: &ObjectKey) -> String {
    let text = String::from_utf8_lossy(key.key());
    let mut shown: String = text.chars().take(120).flat_map(char::escape_debug).collect();
    if text.chars().nth(120).is_some() {
        shown.push_str("...");
    }
    shown
}
