//! The face: submit, drain, close. Nothing here waits for a drive, and nothing fails: what cannot be taken is answered
//! as a failed completion.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use parking_lot::{Mutex, RwLock};
use rustix::event::EventfdFlags;
use serde_json::{Value, json};
use xkv_store::{Error, MAX_KEY_BYTES, ObjectKey, Result, StoreConfig};

use crate::backend::{Backend, DriveSet, UNKNOWN};
use crate::config::Config;
use crate::copy;
use crate::embedded::Embedded;
use crate::guard::L1Buffer;
use crate::inbox::Inbox;
use crate::log::{Line, Log};
use crate::poison::Stamp;
use crate::reactor::Reactor;
use crate::stats::{self, Miss, Outcome, Stats};
use crate::task::{Completion, Message, Operation, Question, Submission};

pub use crate::task::Owner;

/// Lookups of at most so many keys are answered in submit, where the store knows without waiting.
pub const INSTANT_LOOKUP_KEYS: usize = 1024;

/// Loads and stores of at most so many keys are begun in submit, if nothing is in their way; others by the reactor's thread, since
/// submit must not take long.
const INSTANT_KEYS: usize = 2;

/// Longest time that [`Connector::close`] takes: for what touches buffers, for the store, for the last words.
const CLOSE_PATIENCE: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(3), Duration::from_millis(500)];

/// Why nothing is taken any more.
pub(crate) const CLOSED: &str = "the connector is closed";

/// Why a store is dropped.
pub(crate) const BACKLOG: &str = "more stores wait than max_pending_store_mb allows";

/// What the connector's threads share.
pub(crate) struct Shared {
    pub config: Config,
    pub namespace: Arc<[u8]>,
    pub backend: Arc<dyn Backend>,
    pub stamp: Stamp,
    pub stats: Stats,
    pub log: Log,
    /// Drives that do not answer at the moment.
    pub stalled: AtomicU64,
    /// Set once: no buffer is touched any more.
    pub closing: AtomicBool,
    /// Keys being loaded and stored.
    pub live_keys: [AtomicU64; 2],
    pending_store_bytes: AtomicU64,
    completions: Mutex<Vec<Completion>>,
    event: OwnedFd,
}

impl Shared {
    /// Hands an answer to whoever drains: first the list, then the signal.
    pub fn complete(&self, completion: Completion) {
        self.completions.lock().push(completion);
        // The counter cannot overflow before 2^64 - 2 answers are undrained.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub fn pending_store_bytes(&self) -> u64 {
        self.pending_store_bytes.load(Ordering::Relaxed)
    }

    /// Ends the backlog's share of a store.
    pub fn stores_answered(&self, bytes: u64) {
        self.pending_store_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Why a lookup does not find an object that lies there; none when it does.
    pub fn lookup_miss(&self, place: Option<DriveSet>) -> Option<Miss> {
        match place {
            None => Some(Miss::Absent),
            Some(UNKNOWN) => Some(Miss::Unreachable),
            Some(drives) if drives & self.stalled.load(Ordering::Relaxed) != 0 => Some(Miss::Stalled),
            Some(_) => None,
        }
    }

    /// What is known to be wrong with the way to the store.
    fn troubles(&self, session: Option<&Value>, read_only: bool) -> Vec<String> {
        let mut troubles = Vec::new();
        if let Some(session) = session.filter(|session| session["state"] != "open") {
            let text = |name: &str| session[name].as_str().unwrap_or_default().to_owned();
            troubles.push(format!("no session with the gateway ({}): {}", text("state"), text("reason")));
        }
        let stalled = self.stalled.load(Ordering::Relaxed);
        let drives = 0..self.backend.drives();
        for drive in drives.filter(|&drive| stalled & crate::backend::drive_set(drive) != 0) {
            troubles.push(format!("drive {drive} does not answer"));
        }
        if read_only {
            troubles.push("the store takes no changes: its log failed".into());
        }
        if self.closing.load(Ordering::Acquire) {
            troubles.push(CLOSED.into());
        }
        troubles
    }

    /// Everything that is counted.
    pub fn snapshot(&self) -> Value {
        let mut all = self.stats.snapshot();
        let (free, low) = self.backend.free_slots();
        all.insert(
            "queue".into(),
            json!({
                "loads": self.live_keys[0].load(Ordering::Relaxed),
                "stores": self.live_keys[1].load(Ordering::Relaxed),
                "pending_store_bytes": self.pending_store_bytes(),
                "slots": self.backend.slots(),
                "slots_free": free,
                "slots_free_low": low,
                "max_pending_store_bytes": self.config.max_pending_store_bytes,
                "undrained": self.completions.lock().len(),
            }),
        );
        let store = self.backend.stats();
        let stalled = self.stalled.load(Ordering::Relaxed);
        let drives: Vec<Value> = (store.drives.iter().enumerate())
            .map(|(drive, load)| {
                json!({
                    "stalled": stalled & crate::backend::drive_set(drive) != 0,
                    "queued_reads": load.queued_reads,
                    "queued_writes": load.queued_writes,
                    "in_flight": load.in_flight,
                    "oldest_in_flight_s": load.oldest.map_or(0.0, |since| since.elapsed().as_secs_f64()),
                })
            })
            .collect();
        all.insert(
            "store".into(),
            json!({
                "objects": store.objects, "never_read": store.never_read, "never_read_slots": store.never_read_slots,
                "slots_used": store.slots_used, "slots_total": store.slots_total,
                "fragment_bytes": store.fragment_bytes, "committed": store.committed, "evicted": store.evicted,
                "evicted_never_read": store.evicted_never_read,
                "removed": store.removed, "discarded": store.discarded, "commit_groups": store.commit_groups,
                "read_only": store.read_only, "drives": drives,
            }),
        );
        let session = self.backend.session();
        all.insert("mode".into(), json!(if session.is_some() { "gateway" } else { "embedded" }));
        all.insert("namespace".into(), json!(String::from_utf8_lossy(&self.namespace)));
        let troubles = self.troubles(session.as_ref(), store.read_only);
        all.insert("health".into(), self.stats.health(troubles));
        all.insert("session".into(), session.unwrap_or_default());
        Value::Object(all)
    }
}

/// The second tier's end in LMCache's process. Usable from any thread; submit calls take short locks, and begin
/// what is small.
pub struct Connector {
    shared: Arc<Shared>,
    inbox: Arc<Inbox<Reactor>>,
    next_id: AtomicU64,
    open: RwLock<bool>,
    ends: Ends,
}

/// How the threads are told to end, and how it shows that they did.
struct Ends {
    movers: Receiver<()>,
    stop_reporter: Sender<()>,
    reporter: Receiver<()>,
}

impl Connector {
    /// A connector on an embedded store with `slots` fragments in flight at most.
    ///
    /// # Errors
    /// Those of [`xkv_store::Store::open`]; memory or threads cannot be had.
    pub fn open(store: &StoreConfig, slots: usize, config: Config) -> Result<Self> {
        Self::new(Arc::new(Embedded::open(store, slots)?), config)
    }

    /// A connector on any backend, which it closes.
    ///
    /// # Errors
    /// Threads or a descriptor cannot be had; the backend is closed then.
    pub fn new(backend: Arc<dyn Backend>, config: Config) -> Result<Self> {
        let ends = (
            crossbeam_channel::bounded::<()>(0),
            crossbeam_channel::bounded(1),
            crossbeam_channel::bounded::<()>(0),
        );
        let ((movers_alive, movers), (stop_reporter, stopped), (reporter_alive, reporter)) = ends;
        let (lines, said) = crossbeam_channel::unbounded::<Line>();
        let inbox = Arc::new(Inbox::new());
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let event = rustix::event::eventfd(0, flags).map_err(|error| {
            backend.close(CLOSE_PATIENCE[1]);
            Error::io("cannot make an eventfd; raise the limit on open files (ulimit -n)", error.into())
        })?;
        let copy_threads = config.copy_threads();
        let interval = config.stats_interval;
        let shared = Arc::new(Shared {
            namespace: config.namespace.as_slice().into(),
            config,
            backend,
            stamp: Stamp::of_this_process(),
            stats: Stats::default(),
            log: Log::new(lines),
            stalled: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            live_keys: Default::default(),
            pending_store_bytes: AtomicU64::new(0),
            completions: Mutex::default(),
            event,
        });
        let ends = Ends { movers, stop_reporter, reporter };
        let connector = Self { shared, inbox, next_id: AtomicU64::new(1), open: RwLock::new(true), ends };

        // Should a thread fail to start, dropping the connector ends those that did.
        let shared = &connector.shared;
        tracing::info!("{}", shared.backend.describe());
        if shared.namespace.is_empty() {
            tracing::warn!(
                "namespace is empty: LMCache's keys do not tell weights, dtype and layout apart; set namespace to a \
                 text that does (LMC_XKV_NAMESPACE) where one store serves more than one of a model's name"
            );
        }
        spawn("xkv-report", {
            let shared = shared.clone();
            move || {
                let _alive = reporter_alive;
                stats::report(&shared, &said, &stopped, interval);
            }
        })?;
        let (jobs, copies) = crossbeam_channel::unbounded();
        for _ in 0..copy_threads {
            let (alive, copies) = (movers_alive.clone(), copies.clone());
            let (inbox, shared) = (connector.inbox.clone(), shared.clone());
            spawn("xkv-copy", move || {
                let _alive = alive;
                copy::run(&copies, &inbox, &shared.closing);
            })?;
        }
        let reactor = Reactor::new(shared.clone(), connector.inbox.clone(), jobs);
        spawn("xkv-reactor", move || {
            // Ends last: the reactor and its messages may hold the store.
            let _alive = movers_alive;
            reactor.run();
        })?;
        Ok(connector)
    }

    /// Descriptor that becomes readable when there is something to drain. It stays open until the connector is dropped.
    pub fn event_fd(&self) -> RawFd {
        self.shared.event.as_raw_fd()
    }

    /// Loads objects into buffers of exactly their size. `buffers` has one entry per key, none where it cannot be filled.
    pub fn submit_get(&self, keys: Vec<Vec<u8>>, buffers: Vec<Option<L1Buffer>>, owner: Owner) -> u64 {
        if keys.len() != buffers.len() {
            let error = format!("{} keys but {} buffers", keys.len(), buffers.len());
            return self.refuse(Operation::Get, keys.len(), buffers, owner, &error);
        }
        let open = self.open.read();
        if !*open || keys.is_empty() {
            let error = if *open { "" } else { CLOSED };
            return self.refuse(Operation::Get, keys.len(), buffers, owner, error);
        }
        let id = self.submitted(Operation::Get, keys.len());
        let (count, buffers) = (keys.len(), shareable(buffers));
        let (submitted, owner) = (Instant::now(), Some(owner));
        let get = Submission { id, submitted, accepted: count, keys, buffers, owner, bytes: 0 };
        self.send(Message::Get(get), count, INSTANT_KEYS);
        id
    }

    /// Stores objects. All or nothing in the answer; what was stored of a failed set stays.
    pub fn submit_set(&self, keys: Vec<Vec<u8>>, buffers: Vec<Option<L1Buffer>>, owner: Owner) -> u64 {
        let count = keys.len();
        let refuse = |poisoned: usize, outcome: Outcome, buffers, owner, error: &str| {
            let stats = &self.shared.stats;
            stats.stored(Outcome::Poisoned, poisoned as u64, 0);
            stats.stored(outcome, (count - poisoned) as u64, 0);
            self.refuse(Operation::Set, count, buffers, owner, error)
        };
        if count != buffers.len() {
            let error = format!("{count} keys but {} buffers", buffers.len());
            return refuse(0, Outcome::Failed, buffers, owner, &error);
        }
        let open = self.open.read();
        if !*open || keys.is_empty() {
            let error = if *open { "" } else { CLOSED };
            return refuse(0, Outcome::Failed, buffers, owner, error);
        }
        // The whole set and at once: LMCache answers lookups from an unfilled buffer for as long as its store is pending.
        let carries = |buffer: &&L1Buffer| buffer.carries(&self.shared.stamp);
        let poisoned = buffers.iter().flatten().filter(carries).count();
        if poisoned > 0 {
            let error = format!("{poisoned} of {count} buffers carry the stamp of a failed load");
            return refuse(poisoned, Outcome::Failed, buffers, owner, &error);
        }
        let (accepted, bytes) = self.accept(&buffers);
        if accepted == 0 {
            return refuse(0, Outcome::Dropped, buffers, owner, BACKLOG);
        }
        let id = self.submitted(Operation::Set, count);
        let (submitted, buffers, owner) = (Instant::now(), shareable(buffers), Some(owner));
        let set = Submission { id, submitted, keys, buffers, owner, bytes, accepted };
        self.send(Message::Set(set), count, INSTANT_KEYS);
        id
    }

    /// How many of the buffers, from the first on, fit into the backlog, and their bytes, which now count.
    fn accept(&self, buffers: &[Option<L1Buffer>]) -> (usize, u64) {
        let max = self.shared.config.max_pending_store_bytes;
        let mut taken = (0, 0);
        let take = |pending: u64| {
            taken = (0, 0);
            for buffer in buffers {
                let bytes = taken.1 + buffer.as_ref().map_or(0, |buffer| buffer.len() as u64);
                if pending + bytes > max {
                    break;
                }
                taken = (taken.0 + 1, bytes);
            }
            Some(pending + taken.1)
        };
        let _ = self.shared.pending_store_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken
    }

    /// Looks objects up.
    pub fn submit_exists(&self, keys: Vec<Vec<u8>>) -> u64 {
        let shared = &self.shared;
        let open = self.open.read();
        if !*open || keys.is_empty() {
            let error = if *open { "" } else { CLOSED };
            return self.refuse(Operation::Exists, keys.len(), Vec::new(), Box::new(()), error);
        }
        let submitted = Instant::now();
        let id = self.submitted(Operation::Exists, keys.len());
        let keys = self.object_keys(&keys);
        if keys.len() <= INSTANT_LOOKUP_KEYS && shared.backend.answers_at_once() {
            let shared = shared.clone();
            let answer = move |places: Vec<Option<DriveSet>>| {
                let misses = places.into_iter().map(|place| shared.lookup_miss(place));
                let answers: Vec<bool> = misses
                    .map(|miss| {
                        miss.into_iter().for_each(|miss| shared.stats.lookup_missed(miss, 1));
                        miss.is_none()
                    })
                    .collect();
                shared.stats.hit(Operation::Exists, answers.iter().filter(|&&found| found).count() as u64, 0);
                shared.stats.answered(Operation::Exists, submitted);
                shared.complete(Completion::new(id, Operation::Exists, answers, String::new(), None));
            };
            self.shared.backend.lookup(&keys, Box::new(answer));
        } else {
            // One question for all of them.
            let count = keys.len();
            self.send(Message::Exists(Question { id, submitted, keys }), count, INSTANT_LOOKUP_KEYS);
        }
        id
    }

    /// Removes objects. Once answered, no store submitted before becomes visible.
    pub fn submit_delete(&self, keys: Vec<Vec<u8>>) -> u64 {
        let open = self.open.read();
        if !*open || keys.is_empty() {
            let error = if *open { "" } else { CLOSED };
            return self.refuse(Operation::Delete, keys.len(), Vec::new(), Box::new(()), error);
        }
        let id = self.submitted(Operation::Delete, keys.len());
        let keys = self.object_keys(&keys);
        // Not here: it may have to wait for a copy out of a buffer.
        self.inbox.leave(Message::Delete(Question { id, submitted: Instant::now(), keys }));
        id
    }

    /// Brings the reactor an operation of so many keys; with up to `instant`, some of the reactor's work may be done here.
    fn send(&self, message: Message, keys: usize, instant: usize) {
        if keys <= instant {
            self.inbox.offer(message);
        } else {
            self.inbox.leave(message);
        }
    }

    fn object_keys(&self, keys: &[Vec<u8>]) -> Vec<ObjectKey> {
        keys.iter().map(|key| ObjectKey::new(&self.shared.namespace, key)).collect()
    }

    fn submitted(&self, operation: Operation, keys: usize) -> u64 {
        self.shared.stats.submitted(operation, keys);
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Answers an operation as failed without looking at it; as done when it has no keys and there is no `error`. Buffers
    /// of a get are stamped as unfilled.
    pub fn refuse(
        &self,
        operation: Operation,
        keys: usize,
        buffers: Vec<Option<L1Buffer>>,
        owner: Owner,
        error: &str,
    ) -> u64 {
        let id = self.submitted(operation, keys);
        if operation == Operation::Get {
            for buffer in buffers.iter().flatten() {
                let closed = buffer.fail(&self.shared.stamp);
                debug_assert!(closed, "nothing is lent of a buffer that was just submitted");
            }
            self.shared.stats.missed(Miss::Refused, keys as u64);
        }
        if operation == Operation::Exists {
            self.shared.stats.lookup_missed(Miss::Refused, keys as u64);
        }
        if !error.is_empty() {
            self.shared.log.failed(operation.name(), 1, || format!("{}: {error}", operation.name()));
        }
        let mut completion = Completion::new(id, operation, vec![false; keys], error.into(), Some(owner));
        completion.ok &= error.is_empty();
        completion.error = error.into();
        self.shared.complete(completion);
        id
    }

    /// The answers since the last call. Their owners are to be dropped by the caller.
    pub fn drain(&self) -> Vec<Completion> {
        // Cleared before the list is taken: an answer that comes in between signals again.
        let _ = rustix::io::read(&self.shared.event, &mut [0; 8]);
        std::mem::take(&mut *self.shared.completions.lock())
    }

    /// Everything that is counted, as JSON.
    pub fn stats(&self) -> Value {
        self.shared.snapshot()
    }

    /// Ends the connector: answers what is open as failed, touches no buffer any more, closes the store. Takes at most 5
    /// seconds, can be called from any state and any number of times. The owners are to be dropped by the caller.
    pub fn close(&self) -> Vec<Owner> {
        {
            let mut open = self.open.write();
            if !*open {
                return Vec::new();
            }
            *open = false;
        }
        self.shared.closing.store(true, Ordering::Release);
        self.inbox.close();
        // Nothing is ever sent on these channels: they disconnect when the last thread ends.
        if self.ends.movers.recv_timeout(CLOSE_PATIENCE[0])
            == Err(crossbeam_channel::RecvTimeoutError::Timeout)
        {
            tracing::error!("the threads that move bytes did not end in time");
        }
        self.shared.backend.close(CLOSE_PATIENCE[1]);
        let _ = self.ends.stop_reporter.try_send(());
        let _ = self.ends.reporter.recv_timeout(CLOSE_PATIENCE[2]);
        self.shared.completions.lock().iter_mut().filter_map(|completion| completion.owner.take()).collect()
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        drop(self.close());
    }
}

fn shareable(buffers: Vec<Option<L1Buffer>>) -> Vec<Option<Arc<L1Buffer>>> {
    let share = |buffer: Option<L1Buffer>| buffer.map(Arc::new);
    buffers.into_iter().map(share).collect()
}

/// Whether the store would take a key of that length.
pub(crate) fn key_fits(namespace: &[u8], key: &[u8]) -> bool {
    namespace.len() + key.len() <= MAX_KEY_BYTES
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    thread.map(drop).map_err(|error| {
        Error::io(format!("cannot start thread {name}; raise the limit on processes"), error)
    })
}
