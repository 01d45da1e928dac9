//! The gateway's side of one session's ring: takes requests, asks the store, sends replies.
//!
//! Whatever the client writes is copied once, then checked. A client that breaks the rules loses its session.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use xkv_store::{
    Begin, Digest, ErrorKind, FragmentSums, Lease, MAX_KEY_BYTES, ObjectKey, Run, SlotBuf, SlotPool, Store,
    Txn, fragment_sums,
};

use crate::entry::{DRIVE_BITS, FOLLOWS, MAX_RUN, NO_SLOT, Operation, Place, Reply, Request, Status};
use crate::failures::{Failures, is_full};
use crate::memory::{RingMemory, SharedQueue, SlotTable};
use crate::queue::{Consumer, Corrupt, Producer, QueueMemory};

/// Leases and transactions of one session at most.
const MAX_HANDLES: usize = 16_384;
/// Objects that wait to be read again at most; each keeps a place in the queue of replies.
const MAX_RECHECKS: usize = 64;
/// Shortest and longest pause while the client does not take its replies.
const FULL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));
/// How long the end of a session waits for its thread.
const ENDING: Duration = Duration::from_secs(5);
/// Longest sleep while there is nothing to do. The other side wakes the sleeper; one that failed to costs its request
/// this long, not a session.
const IDLE: Duration = Duration::from_millis(250);

/// Where replies go, from any thread.
struct Replies {
    producer: Mutex<Producer<SharedQueue>>,
    /// Requests taken and not answered yet.
    in_flight: AtomicU64,
    answered: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    failures: Arc<Failures>,
    fault: Mutex<Option<String>>,
}

impl Replies {
    /// Counts a request as in flight when its reply fits beside those of the others and an event.
    fn admit(&self) -> Result<bool, Corrupt> {
        // Under the lock that events take, so that none takes the place just found.
        let producer = self.producer.lock();
        let fits = u64::from(producer.room()?) > self.in_flight.load(Ordering::SeqCst) + 1;
        if fits {
            self.in_flight.fetch_add(1, Ordering::SeqCst);
        }
        Ok(fits)
    }

    fn answer(&self, reply: &Reply) {
        self.failures.note(reply);
        let mut producer = self.producer.lock();
        // Counted before the client can see the reply, and under the lock, where reply and request change places.
        self.answered.fetch_add(1, Ordering::Relaxed);
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        match producer.push(&reply.encode()) {
            Ok(true) => producer.publish(),
            Ok(false) => self.blame("the client's replies do not fit into the ring".into()),
            Err(corrupt) => self.blame(corrupt.to_string()),
        }
    }

    fn blame(&self, fault: String) {
        self.fault.lock().get_or_insert(fault);
    }
}

/// An answer that is owed. The slot goes back to the client with it.
struct Owed {
    replies: Arc<Replies>,
    request: Request,
}

impl Owed {
    fn give(self, status: Status) {
        self.give_value(status, 0, 0);
    }

    fn give_value(self, status: Status, handle: u64, value: u64) {
        self.give_sums(status, handle, value, Default::default());
    }

    fn give_sums(self, status: Status, handle: u64, value: u64, sums: [FragmentSums; MAX_RUN]) {
        let Request { number, operation, slot, .. } = self.request;
        self.replies.answer(&Reply { number, operation, status, slot, handle, value, sums });
    }
}

/// Dropped before the session's leases. Ends the session when its thread panics, rather than leaving it to the client's patience.
struct Guard<'a>(&'a Service);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // Before any slot may hold other bytes: what the client reads straight counts only while this is not set.
        self.0.memory.set_over();
        if std::thread::panicking() {
            self.0.replies.blame("the session's thread failed".into());
        }
    }
}

struct OpenTxn {
    txn: Txn,
    sums: Vec<Option<FragmentSums>>,
    /// A fragment of it found no room.
    full: Arc<AtomicBool>,
}

#[derive(Default)]
struct Handles {
    next: u64,
    leases: HashMap<u64, Arc<Lease>>,
    txns: HashMap<u64, OpenTxn>,
}

/// Objects that the client says are damaged, to be read again one after the other.
#[derive(Default)]
struct Rechecks {
    waiting: VecDeque<(Arc<Lease>, Owed)>,
    /// Objects of `waiting`, and the one that is being read: storing them again waits for the outcome.
    doubted: HashSet<Digest>,
    running: bool,
}

impl Rechecks {
    fn next(&mut self) -> Option<(Arc<Lease>, Owed)> {
        let next = self.waiting.pop_front();
        self.running = next.is_some();
        next
    }
}

/// What a session uses, for status.
pub(crate) struct Usage {
    pub(crate) straight: bool,
    pub(crate) slots: u32,
    pub(crate) slots_in_use: usize,
    pub(crate) leases: u64,
    pub(crate) transactions: u64,
    pub(crate) in_flight: u64,
    pub(crate) answered: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
}

/// The service of one session.
pub(crate) struct Service {
    store: Store,
    /// The client has the drives.
    straight: bool,
    memory: Arc<RingMemory>,
    slots: Arc<SlotTable>,
    replies: Arc<Replies>,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: Arc<AtomicBool>,
    /// Space events so far, also those that found no place.
    spaces: AtomicU64,
    /// A space event found no place.
    owes_space: AtomicBool,
    leases: AtomicU64,
    transactions: AtomicU64,
    rechecks: Mutex<Rechecks>,
}

impl Service {
    /// Starts the thread that serves a session's ring; failures are counted in `failures`. `straight`: the client has the drives.
    pub(crate) fn start(
        store: Store,
        straight: bool,
        memory: Arc<RingMemory>,
        failures: Arc<Failures>,
    ) -> io::Result<Arc<Self>> {
        let service = Arc::new(Self {
            store,
            straight,
            slots: SlotTable::new(&memory),
            replies: Arc::new(Replies {
                producer: Mutex::new(Producer::new(memory.completions())),
                in_flight: AtomicU64::new(0),
                answered: AtomicU64::new(0),
                bytes_read: AtomicU64::new(0),
                bytes_written: AtomicU64::new(0),
                failures,
                fault: Mutex::default(),
            }),
            memory,
            thread: Mutex::default(),
            ended: Arc::default(),
            spaces: AtomicU64::new(0),
            owes_space: AtomicBool::new(false),
            leases: AtomicU64::new(0),
            transactions: AtomicU64::new(0),
            rechecks: Mutex::default(),
        });
        let running = service.clone();
        let thread = std::thread::Builder::new().name("xkv-ring".into()).spawn(move || running.run())?;
        *service.thread.lock() = Some(thread);
        Ok(service)
    }

    /// Why the session must end, when the client broke the rules.
    pub(crate) fn fault(&self) -> Option<String> {
        self.replies.fault.lock().clone()
    }

    /// Requests answered so far.
    pub(crate) fn answered(&self) -> u64 {
        self.replies.answered.load(Ordering::Relaxed)
    }

    /// Tells the client that asking for room again may help.
    pub(crate) fn tell_space(&self) {
        self.spaces.fetch_add(1, Ordering::SeqCst);
        self.send_space();
    }

    /// Tells what could not be told while the ring was full. To be called now and then.
    pub(crate) fn tell_owed_space(&self) {
        if self.owes_space.swap(false, Ordering::SeqCst) {
            self.send_space();
        }
    }

    fn send_space(&self) {
        let (operation, status, sums) = (Operation::Space, Status::Done, Default::default());
        let mut producer = self.replies.producer.lock();
        // Every request in flight has a place for its reply.
        if producer.room().is_ok_and(|room| u64::from(room) > self.replies.in_flight.load(Ordering::SeqCst)) {
            let event = Reply { number: 0, operation, status, slot: NO_SLOT, handle: 0, value: 0, sums };
            if producer.push(&event.encode()).is_ok_and(|pushed| pushed) {
                producer.publish();
            }
        } else {
            self.owes_space.store(true, Ordering::SeqCst);
        }
    }

    /// Ends the session: its leases and transactions are dropped when this returns. Idempotent.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        let Some(thread) = self.thread.lock().take() else { return };
        let deadline = Instant::now() + ENDING;
        // Between its look at `ended` and its sleep the thread misses a wake-up: so again until it is gone.
        while !thread.is_finished() {
            if Instant::now() > deadline {
                tracing::error!("a session's thread does not end; it is left behind");
                return;
            }
            self.memory.submissions().wake();
            std::thread::sleep(Duration::from_millis(1));
        }
        _ = thread.join();
    }

    pub(crate) fn usage(&self) -> Usage {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Usage {
            straight: self.straight,
            slots: self.memory.geometry().slots,
            slots_in_use: self.slots.in_use(),
            leases: count(&self.leases),
            transactions: count(&self.transactions),
            in_flight: count(&self.replies.in_flight),
            answered: count(&self.replies.answered),
            bytes_read: count(&self.replies.bytes_read),
            bytes_written: count(&self.replies.bytes_written),
        }
    }

    fn run(self: Arc<Self>) {
        let mut requests = Consumer::new(self.memory.submissions());
        let mut handles = Handles { next: 1, ..Handles::default() };
        let mut pause = FULL.0;
        // After `handles`, and so dropped before them.
        let _guard = Guard(&self);
        while !self.ended.load(Ordering::SeqCst) && self.fault().is_none() {
            match self.turn(&mut requests, &mut handles) {
                Ok(true) => pause = FULL.0,
                Ok(false) => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(FULL.1);
                }
                Err(fault) => self.replies.blame(fault),
            }
        }
    }

    /// Takes a request, or waits for one. False: the client must take replies first.
    fn turn(
        self: &Arc<Self>,
        requests: &mut Consumer<SharedQueue>,
        handles: &mut Handles,
    ) -> Result<bool, String> {
        let corrupt = |error: Corrupt| error.to_string();
        if requests.ready().map_err(corrupt)? == 0 {
            return requests.wait(IDLE).map(|()| true).map_err(corrupt);
        }
        if !self.replies.admit().map_err(corrupt)? {
            return Ok(false);
        }
        // Gone again when the client took the index back.
        let Some(entry) = requests.pop().map_err(corrupt)? else {
            self.replies.in_flight.fetch_sub(1, Ordering::SeqCst);
            return Ok(true);
        };
        let request = Request::decode(&entry).ok_or("an unknown request")?;
        self.handle(request, handles)?;
        Ok(true)
    }

    fn handle(self: &Arc<Self>, request: Request, handles: &mut Handles) -> Result<(), String> {
        let owed = Owed { replies: self.replies.clone(), request };
        let taken = |slot| self.slots.take(slot).ok_or_else(|| format!("slot {slot} is unknown or in use"));
        let mut slots = request.slots().map(taken).collect::<Result<Vec<_>, _>>()?;
        if request.operation == Operation::Read && !slots.is_empty() {
            self.read(owed, slots, handles);
            return Ok(());
        }
        match (request.operation, slots.pop()) {
            (Operation::Lookup, Some(slot)) => self.lookup(owed, slot),
            (Operation::Open, Some(slot)) => self.open(owed, slot, handles),
            (Operation::Begin, Some(slot)) => self.begin(owed, slot, handles),
            (Operation::Remove, Some(slot)) => self.remove(owed, slot),
            (Operation::Write, Some(slot)) => self.write(owed, slot, handles),
            (Operation::Commit, None) => self.commit(owed, handles),
            (Operation::Discard, None) => self.discard(owed, handles),
            (Operation::Close, None) => {
                if let Some(lease) = handles.leases.remove(&request.handle)
                    && self.straight
                {
                    // The client's word, within what can be.
                    let read = request.argument.min(lease.size());
                    self.replies.bytes_read.fetch_add(read, Ordering::Relaxed);
                }
                handles.txns.remove(&request.handle);
                self.count(handles);
                owed.give(Status::Done);
            }
            (_, slot) => {
                drop(slot);
                owed.give(Status::Invalid);
            }
        }
        Ok(())
    }

    /// For status, before the reply is given.
    fn count(&self, handles: &Handles) {
        self.leases.store(handles.leases.len() as u64, Ordering::Relaxed);
        self.transactions.store(handles.txns.len() as u64, Ordering::Relaxed);
    }

    fn lookup(&self, owed: Owed, mut slot: SlotBuf) {
        let count = owed.request.argument as usize;
        if count.checked_mul(32).is_none_or(|bytes| bytes > slot.len()) {
            drop(slot);
            return owed.give(Status::Invalid);
        }
        let doubted = self.rechecks.lock().doubted.clone();
        for i in 0..count {
            let mut digest = [0; 32];
            digest.copy_from_slice(&slot[32 * i..32 * (i + 1)]);
            // Answers are a quarter as long as questions: none is overwritten before it was read.
            let digest = Digest(digest);
            let found = (!doubted.contains(&digest)).then(|| self.store.drives_of_digest(&digest)).flatten();
            let drives = found.unwrap_or(0);
            slot[8 * i..8 * (i + 1)].copy_from_slice(&drives.to_le_bytes());
        }
        drop(slot);
        owed.give(Status::Done);
    }

    fn open(&self, owed: Owed, mut slot: SlotBuf, handles: &mut Handles) {
        if handles.leases.len() + handles.txns.len() >= MAX_HANDLES {
            drop(slot);
            return owed.give(Status::Limit);
        }
        let Some(key) = key_in(&slot) else {
            drop(slot);
            return owed.give(Status::Invalid);
        };
        // What this client called damaged is absent to it until the gateway knows better.
        let doubted = self.rechecks.lock().doubted.contains(key.digest());
        let Some(lease) = (!doubted).then(|| self.store.lease(&key)).flatten() else {
            drop(slot);
            return owed.give(Status::Absent);
        };
        describe(&mut slot, (0..lease.fragments()).map(|index| lease.place(index)));
        if self.straight {
            let place = |index| Place { slot: lease.place(index).1, sums: lease.sums(index) };
            Place::put(&mut slot, (0..lease.fragments()).map(place));
        }
        drop(slot);
        let (handle, size) = (handles.number(), lease.size());
        handles.leases.insert(handle, Arc::new(lease));
        self.count(handles);
        owed.give_value(Status::Done, handle, size);
    }

    fn begin(&self, owed: Owed, mut slot: SlotBuf, handles: &mut Handles) {
        if handles.leases.len() + handles.txns.len() >= MAX_HANDLES {
            drop(slot);
            return owed.give(Status::Limit);
        }
        let Some(key) = key_in(&slot) else {
            drop(slot);
            return owed.give(Status::Invalid);
        };
        let spaces = self.spaces.load(Ordering::SeqCst);
        // Looked at first: an object found damaged in between is absent below.
        let doubted = self.rechecks.lock().doubted.contains(key.digest());
        let status = match self.store.begin(&key, owed.request.argument) {
            Begin::Txn(txn) => {
                describe(&mut slot, (0..txn.fragments()).map(|index| txn.place(index)));
                drop(slot);
                let (handle, sums) = (handles.number(), vec![None; txn.fragments() as usize]);
                handles.txns.insert(handle, OpenTxn { txn, sums, full: Arc::default() });
                self.count(handles);
                return owed.give_value(Status::Done, handle, 0);
            }
            // Told "present" now, the client would not store it again.
            Begin::Present if doubted => Status::Busy,
            Begin::Present => Status::Present,
            Begin::Busy => Status::Busy,
            Begin::Wait => Status::Wait,
            Begin::NoSpace => Status::NoSpace,
            Begin::ReadOnly => Status::ReadOnly,
        };
        drop(slot);
        owed.give(status);
        // An event between the store's answer and this reply would come too early to be of use: once more.
        if matches!(status, Status::Busy | Status::Wait) && self.spaces.load(Ordering::SeqCst) != spaces {
            self.send_space();
        }
    }

    fn remove(&self, owed: Owed, slot: SlotBuf) {
        let key = key_in(&slot);
        drop(slot);
        let Some(key) = key else { return owed.give(Status::Invalid) };
        let done = move |outcome: xkv_store::Result<bool>| match outcome {
            Ok(found) => owed.give_value(Status::Done, 0, found.into()),
            Err(error) => owed.give(status_of(&error)),
        };
        self.store.remove(&key, Box::new(done));
    }

    fn read(&self, owed: Owed, slots: Vec<SlotBuf>, handles: &Handles) {
        let Request { handle, argument, .. } = owed.request;
        let run = Run { first: argument as u32, step: (argument >> 32) as u32, count: slots.len() as u32 };
        let lease = handles.leases.get(&handle).filter(|lease| lies_together(run, lease));
        let Some(lease) = lease else {
            drop(slots);
            return owed.give(Status::Invalid);
        };
        let bytes = run.fragments().map(|index| lease.fragment_len(index) as u64).sum();
        let mut sums = [FragmentSums::default(); MAX_RUN];
        for (sums, index) in sums.iter_mut().zip(run.fragments()) {
            *sums = lease.sums(index);
        }
        let done = move |slots: Vec<SlotBuf>, outcome: io::Result<()>| {
            // The client may use the slots again as soon as it has the reply.
            drop(slots);
            match outcome {
                Ok(()) => {
                    owed.replies.bytes_read.fetch_add(bytes, Ordering::Relaxed);
                    owed.give_sums(Status::Done, 0, bytes, sums);
                }
                Err(error) => owed.give_io(&error),
            }
        };
        lease.read_slots(run, slots, Box::new(done));
    }

    fn write(&self, owed: Owed, slot: SlotBuf, handles: &mut Handles) {
        let Request { handle, argument, sums, .. } = owed.request;
        let place = handles.txns.get_mut(&handle).and_then(|open| {
            let place = open.sums.get_mut(usize::try_from(argument).ok()?)?;
            // A fragment is written once.
            place.is_none().then(|| *place = Some(sums))?;
            Some((&open.txn, open.full.clone()))
        });
        let Some((txn, full)) = place else {
            drop(slot);
            return owed.give(Status::Invalid);
        };
        let bytes = txn.fragment_len(argument as u32) as u64;
        let done = move |slot: SlotBuf, outcome: io::Result<()>| {
            drop(slot);
            match outcome {
                Ok(()) => {
                    owed.replies.bytes_written.fetch_add(bytes, Ordering::Relaxed);
                    owed.give(Status::Done);
                }
                Err(error) => {
                    let no_room = error.raw_os_error().is_some_and(|errno| is_full(errno as u64));
                    if no_room && !full.swap(true, Ordering::Relaxed) {
                        owed.replies.failures.no_room();
                    }
                    owed.give_io(&error);
                }
            }
        };
        txn.write(argument as u32, slot, Box::new(done));
    }

    fn commit(&self, owed: Owed, handles: &mut Handles) {
        let Some(OpenTxn { txn, sums, .. }) = handles.txns.remove(&owed.request.handle) else {
            return owed.give(Status::Invalid);
        };
        self.count(handles);
        let Some(sums) = sums.into_iter().collect::<Option<Vec<_>>>() else {
            return owed.give(Status::Invalid);
        };
        let done = move |outcome: xkv_store::Result<()>| match outcome {
            Ok(()) => owed.give(Status::Done),
            Err(error) => {
                let errno = error.errno().unwrap_or(0) as u64;
                owed.give_value(status_of(&error), 0, errno);
            }
        };
        txn.commit(sums, Box::new(done));
    }

    /// A client says that an object is damaged: only the gateway's own reading of it counts.
    fn discard(self: &Arc<Self>, owed: Owed, handles: &mut Handles) {
        let Some(lease) = handles.leases.remove(&owed.request.handle) else {
            return owed.give(Status::Invalid);
        };
        self.count(handles);
        {
            let mut rechecks = self.rechecks.lock();
            if rechecks.waiting.len() >= MAX_RECHECKS {
                // The next load of the object complains again.
                drop(rechecks);
                return owed.give(Status::Busy);
            }
            rechecks.doubted.insert(*lease.key().digest());
            rechecks.waiting.push_back((lease, owed));
            if std::mem::replace(&mut rechecks.running, true) {
                return;
            }
        }
        let service = self.clone();
        let recheck = move || {
            loop {
                let Some((lease, owed)) = service.rechecks.lock().next() else { return };
                let damaged = !intact(&lease, service.store.fragment_bytes(), &service.ended);
                if damaged {
                    service.store.discard(&lease);
                }
                service.rechecks.lock().doubted.remove(lease.key().digest());
                drop(lease);
                owed.give_value(Status::Done, 0, damaged.into());
                service.tell_space();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("xkv-recheck".into()).spawn(recheck) {
            self.replies.blame(format!("cannot start a thread: {error}"));
        }
    }
}

impl Owed {
    fn give_io(self, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(0) as u64;
        self.give_value(Status::Io, 0, errno);
    }
}

impl Handles {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

fn status_of(error: &xkv_store::Error) -> Status {
    match error.kind() {
        ErrorKind::ReadOnly => Status::ReadOnly,
        ErrorKind::Removed => Status::Removed,
        ErrorKind::Invalid => Status::Invalid,
        _ => Status::Io,
    }
}

/// Writes the byte of each fragment, as far as the slot reaches.
fn describe(slot: &mut SlotBuf, places: impl Iterator<Item = (usize, u32)>) {
    let mut last = [None; DRIVE_BITS as usize + 1];
    for (byte, (drive, place)) in slot.iter_mut().zip(places) {
        let label = drive as u8 & DRIVE_BITS;
        let before = last[label as usize].replace((drive, place));
        let follows = place.checked_sub(1).is_some_and(|place| before == Some((drive, place)));
        *byte = label | if follows { FOLLOWS } else { 0 };
    }
}

/// Whether these are fragments of an object, and lie one behind another on a drive.
fn lies_together(run: Run, lease: &Lease) -> bool {
    let last = u64::from(run.first) + u64::from(run.count - 1) * u64::from(run.step);
    if last >= u64::from(lease.fragments()) || (run.count > 1) != (run.step > 0) {
        return false;
    }
    let (drive, start) = lease.place(run.first);
    (start..).zip(run.fragments()).all(|(slot, index)| lease.place(index) == (drive, slot))
}

/// Copies the key out of a slot. None: lengths that cannot be right.
fn key_in(slot: &SlotBuf) -> Option<ObjectKey> {
    let length = |at: usize| Some(u32::from_le_bytes(slot.get(at..at + 4)?.try_into().ok()?) as usize);
    let (namespace, key) = (length(0)?, length(4)?);
    if namespace.checked_add(key)? > MAX_KEY_BYTES {
        return None;
    }
    let bytes = slot.get(8..8 + namespace + key)?.to_vec();
    Some(ObjectKey::new(&Arc::from(&bytes[..namespace]), &bytes[namespace..]))
}

/// Whether an object's bytes match its checksums, read again. True also when the session ends before it is known.
fn intact(lease: &Lease, fragment_bytes: usize, ended: &AtomicBool) -> bool {
    let Ok(pool) = SlotPool::new(1, fragment_bytes) else { return true };
    for index in 0..lease.fragments() {
        if ended.load(Ordering::SeqCst) {
            return true;
        }
        let Some(slot) = pool.try_take() else { return true };
        let (sender, receiver) = std::sync::mpsc::channel();
        lease.read(index, slot, Box::new(move |slot, outcome| _ = sender.send((slot, outcome))));
        let Ok((slot, outcome)) = receiver.recv() else { return true };
        let data = &slot[..lease.fragment_len(index)];
        if outcome.is_err() || fragment_sums(lease.key().digest(), index, data) != lease.sums(index) {
            return false;
        }
    }
    true
}
