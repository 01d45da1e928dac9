//! A gateway as a backend: one session at a time, opened again whenever it ends.
//!
//! `gateway/keeper.rs` opens sessions, `gateway/link.rs` uses one, `gateway/straight.rs` reads its drives, `gateway/question.rs` is
//! what can be asked of any.
//! Everything that belongs to a session dies with it. Only questions that no session has taken yet wait for the next
//! one, and only for a short while after a session that ended idle; otherwise, without a session, all keys are absent
//! and nothing can be stored.

mod keeper;
mod link;
mod question;
mod straight;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use xkv_session::ClientConfig;
use xkv_session::entry::Status;
use xkv_store::{Error, ErrorKind, ObjectKey, Result, StoreStats};

use crate::backend::{Backend, Begun, Done, DriveSet, Reading, UNKNOWN, unreachable};
use keeper::{Event, Keeper};
use link::{Leased, Link, Writing};
use question::{DIGEST_BYTES, Heard, Question, Subject, Unanswered};

/// Questions that wait for a session at most.
const MOST_HELD: usize = 16_384;
/// Changes of state that statistics show.
const HISTORY: usize = 16;

/// The way to a gateway, until it is closed.
pub struct Gateway {
    shared: Arc<Shared>,
    /// Disconnects when the keeper has ended.
    kept: Receiver<()>,
}

/// What the backend, its keeper and its sessions share.
struct Shared {
    config: ClientConfig,
    reopen_after: Duration,
    state: Mutex<State>,
    inbox: Sender<Event>,
    on_space: RwLock<Option<Arc<dyn Fn() + Send + Sync>>>,
    /// Of the latest session; of the settings before the first.
    slots: AtomicUsize,
    drives: AtomicUsize,
    fragment_bytes: AtomicUsize,
    /// Questions answered without a session, asked again on another, and not askable for the length of their key.
    unanswered: AtomicU64,
    asked_again: AtomicU64,
    too_long: AtomicU64,
}

enum Phase {
    /// A session is open, or has ended so recently that its end was not dealt with yet.
    Open(Arc<Link>),
    /// No session. Questions wait for one until then, if at all.
    Lost(Option<Instant>),
    Closed,
}

struct State {
    phase: Phase,
    held: VecDeque<Question>,
    since: Instant,
    /// Why there is no session.
    reason: String,
    store: String,
    generation: u64,
    opened: u64,
    lost: u64,
    /// The latest changes: when, to what, and why.
    history: VecDeque<(Instant, &'static str, String)>,
}

impl State {
    /// Returns the phase before, to be dropped without the lock: the end of a link answers what was asked of it.
    #[must_use]
    fn change(&mut self, phase: Phase, reason: String) -> Phase {
        let before = std::mem::replace(&mut self.phase, phase);
        self.since = Instant::now();
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((self.since, self.name(), reason.clone()));
        self.reason = reason;
        before
    }

    fn name(&self) -> &'static str {
        match &self.phase {
            Phase::Open(_) => "open",
            Phase::Lost(_) => "lost",
            Phase::Closed => "closed",
        }
    }
}

impl Gateway {
    /// Opens a session, and keeps opening one whenever it ends: at once, then every `reopen_after`, some jitter aside.
    /// Waits for the first at most `config.silence`; a gateway that cannot be reached may come later.
    ///
    /// # Errors
    /// The gateway refuses for good: wrong token, version or fragment size. A thread cannot be had.
    pub fn open(config: ClientConfig, reopen_after: Duration) -> Result<Self> {
        let (inbox, events) = crossbeam_channel::unbounded();
        let (alive, kept) = crossbeam_channel::bounded(0);
        let patience = config.silence;
        let phase = Phase::Lost(None);
        let shared = Arc::new(Shared {
            slots: AtomicUsize::new(config.slots.max(1) as usize),
            drives: AtomicUsize::new(1),
            fragment_bytes: AtomicUsize::new(config.fragment_bytes.unwrap_or(0) as usize),
            config,
            reopen_after,
            state: Mutex::new(State {
                phase,
                held: VecDeque::new(),
                since: Instant::now(),
                reason: "not opened yet".into(),
                store: String::new(),
                generation: 0,
                opened: 0,
                lost: 0,
                history: VecDeque::new(),
            }),
            inbox,
            on_space: RwLock::default(),
            unanswered: AtomicU64::new(0),
            asked_again: AtomicU64::new(0),
            too_long: AtomicU64::new(0),
        });
        let (sender, first) = crossbeam_channel::bounded(1);
        let keeper = Keeper::new(shared.clone(), sender);
        let run = move || {
            let _alive = alive;
            keeper.run(&events);
        };
        let thread = std::thread::Builder::new().name("xkv-keeper".into()).spawn(run);
        thread.map_err(|error| Error::io("cannot start a thread; raise the limit on processes", error))?;
        let gateway = Self { shared, kept };
        match first.recv_timeout(patience) {
            Ok(Err(refusal)) if refusal.is_permanent() => {
                Err(Error::new(ErrorKind::Invalid, refusal.to_string()))
            }
            _ => Ok(gateway),
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // Nobody waits: the keeper ends by itself.
        let _ = self.shared.inbox.send(Event::Close);
    }
}

impl Shared {
    fn address(&self) -> String {
        format!("gateway {}:{}", self.config.host, self.config.port)
    }

    /// Asks a question of the session, or of the next one if it may wait for it.
    fn ask(&self, question: Question) {
        let mut state = self.state.lock();
        match &state.phase {
            Phase::Open(link) if link.session.is_open() => {
                let link = link.clone();
                drop(state);
                return link.ask(question);
            }
            // The keeper decides as soon as it knows of the end.
            Phase::Open(_) => {}
            Phase::Lost(Some(until)) if Instant::now() < *until => {}
            Phase::Lost(_) | Phase::Closed => {
                drop(state);
                return self.refuse([question]);
            }
        }
        if state.held.len() < MOST_HELD {
            state.held.push_back(question);
            drop(state);
            let _ = self.inbox.send(Event::Held);
        } else {
            drop(state);
            self.refuse([question]);
        }
    }

    /// A session ended before it took a question: that is asked again once.
    fn unsent(&self, mut question: Question) {
        if question.again {
            return self.refuse([question]);
        }
        question.again = true;
        self.asked_again.fetch_add(1, Ordering::Relaxed);
        self.ask(question);
    }

    fn refuse(&self, questions: impl IntoIterator<Item = Question>) {
        for question in questions {
            question.answer(Err(Unanswered::Lost));
        }
    }

    /// Counts a question that got no answer.
    fn count(&self, unanswered: &Unanswered) {
        let counter = match unanswered {
            Unanswered::TooLong => &self.too_long,
            Unanswered::Lost => &self.unanswered,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn link(&self) -> Option<Arc<Link>> {
        match &self.state.lock().phase {
            Phase::Open(link) if link.session.is_open() => Some(link.clone()),
            _ => None,
        }
    }

    fn tell_space(&self) {
        let waker = self.on_space.read().clone();
        if let Some(waker) = waker {
            waker();
        }
    }
}

impl Backend for Gateway {
    fn fragment_bytes(&self) -> usize {
        self.shared.fragment_bytes.load(Ordering::Acquire)
    }

    fn drives(&self) -> usize {
        self.shared.drives.load(Ordering::Relaxed)
    }

    fn slots(&self) -> usize {
        self.shared.slots.load(Ordering::Relaxed)
    }

    fn describe(&self) -> String {
        let address = self.shared.address();
        match self.shared.link() {
            Some(link) => {
                let welcome = link.session.welcome();
                format!("{address}: {}; {} slots", welcome.description, welcome.slots)
            }
            None => format!("{address}: no session yet; objects are misses until there is one"),
        }
    }

    fn answers_at_once(&self) -> bool {
        false
    }

    fn lookup(&self, keys: &[ObjectKey], done: Done<Vec<Option<DriveSet>>>) {
        let per_slot = self.fragment_bytes() / DIGEST_BYTES;
        if per_slot == 0 || keys.is_empty() {
            return done(vec![Some(UNKNOWN); keys.len()]);
        }
        let found = Arc::new(Mutex::new(Lookup {
            places: vec![None; keys.len()],
            left: keys.len().div_ceil(per_slot),
            done: Some(done),
        }));
        for (number, part) in keys.chunks(per_slot).enumerate() {
            let (found, shared) = (found.clone(), self.shared.clone());
            let (start, len) = (number * per_slot, part.len());
            let subject = Subject::Lookup(part.iter().map(|key| *key.digest()).collect());
            let answered = move |outcome| {
                let places = match outcome {
                    Ok(Heard { reply, slot, .. }) if reply.status == Status::Done => {
                        let places = slot.chunks_exact(8).take(len);
                        let drives =
                            places.map(|place| DriveSet::from_le_bytes(place.try_into().expect("8 bytes")));
                        drives.map(|drives| (drives != UNKNOWN).then_some(drives)).collect()
                    }
                    Ok(_) => Vec::new(),
                    Err(why) => {
                        shared.count(&why);
                        vec![Some(UNKNOWN); len]
                    }
                };
                let mut found = found.lock();
                for (place, answer) in found.places[start..].iter_mut().zip(places) {
                    *place = answer;
                }
                found.left -= 1;
                if found.left == 0
                    && let Some(done) = found.done.take()
                {
                    let places = std::mem::take(&mut found.places);
                    drop(found);
                    done(places);
                }
            };
            self.shared.ask(Question::new(subject, answered));
        }
    }

    fn open(&self, key: &ObjectKey, done: Done<io::Result<Option<Box<dyn Reading>>>>) {
        let shared = self.shared.clone();
        let answered = move |outcome| match outcome {
            Ok(heard) => done(Ok(opened(heard))),
            Err(why) => {
                shared.count(&why);
                done(match why {
                    Unanswered::TooLong => Ok(None),
                    Unanswered::Lost => Err(unreachable()),
                });
            }
        };
        self.shared.ask(Question::new(Subject::Open(key.clone()), answered));
    }

    fn begin(&self, key: &ObjectKey, size: u64, done: Done<Begun>) {
        let shared = self.shared.clone();
        let answered = move |outcome| match outcome {
            Ok(heard) => done(begun(heard, size)),
            Err(why) => {
                shared.count(&why);
                done(match why {
                    Unanswered::TooLong => Begun::NoSpace,
                    Unanswered::Lost => Begun::Unreachable,
                });
            }
        };
        self.shared.ask(Question::new(Subject::Begin(key.clone(), size), answered));
    }

    fn remove(&self, key: &ObjectKey, done: Done<Result<bool>>) {
        let shared = self.shared.clone();
        let answered = move |outcome: std::result::Result<Heard, Unanswered>| match outcome {
            Ok(Heard { reply, slot, .. }) => {
                drop(slot);
                done(match reply.status {
                    Status::Done => Ok(reply.value == 1),
                    status => Err(link::refused(status, reply.value)),
                });
            }
            Err(why) => {
                shared.count(&why);
                done(Err(match why {
                    Unanswered::TooLong => {
                        Error::new(ErrorKind::Invalid, "the key is longer than a slot of the ring")
                    }
                    Unanswered::Lost => link::lost(),
                }));
            }
        };
        self.shared.ask(Question::new(Subject::Remove(key.clone()), answered));
    }

    fn on_space(&self, waker: Arc<dyn Fn() + Send + Sync>) {
        *self.shared.on_space.write() = Some(waker);
    }

    fn oldest_io(&self) -> Vec<Option<Instant>> {
        self.shared
            .link()
            .map_or_else(Vec::new, |link| link.load().iter().map(|drive| drive.oldest).collect())
    }

    fn free_slots(&self) -> (usize, usize) {
        let pool = self.shared.link().map(|link| link.session.pool().clone());
        pool.map_or((0, 0), |pool| (pool.free(), pool.low_water()))
    }

    fn stats(&self) -> StoreStats {
        StoreStats {
            fragment_bytes: self.fragment_bytes() as u32,
            drives: self.shared.link().map_or_else(Vec::new, |link| link.load()),
            ..StoreStats::default()
        }
    }

    fn reachable(&self) -> bool {
        matches!(self.shared.state.lock().phase, Phase::Open(_))
    }

    fn session(&self) -> Option<Value> {
        let state = self.shared.state.lock();
        let ago = |at: Instant| at.elapsed().as_secs_f64();
        let history: Vec<Value> = state
            .history
            .iter()
            .map(|(at, what, why)| json!({"state": what, "ago_s": ago(*at), "reason": why}))
            .collect();
        Some(json!({
            "gateway": format!("{}:{}", self.shared.config.host, self.shared.config.port),
            "state": state.name(), "for_s": ago(state.since), "reason": state.reason,
            "store": state.store, "generation": format!("{:016x}", state.generation),
            "opened": state.opened, "reopened": state.opened.saturating_sub(1), "lost": state.lost,
            "held": state.held.len(),
            "unanswered": self.shared.unanswered.load(Ordering::Relaxed),
            "asked_again": self.shared.asked_again.load(Ordering::Relaxed),
            "keys_too_long": self.shared.too_long.load(Ordering::Relaxed),
            "history": history,
        }))
    }

    fn close(&self, patience: Duration) {
        let _ = self.shared.inbox.send(Event::Close);
        // Nothing is ever sent: it disconnects when the keeper has ended.
        let _ = self.kept.recv_timeout(patience);
    }
}

/// A lookup whose digests need several slots.
struct Lookup {
    places: Vec<Option<DriveSet>>,
    left: usize,
    done: Option<Done<Vec<Option<DriveSet>>>>,
}

fn opened(heard: Heard) -> Option<Box<dyn Reading>> {
    match heard.reply.status {
        Status::Done => Some(Box::new(Leased::new(heard))),
        // Also `Limit`: there are others to read.
        _ => None,
    }
}

fn begun(heard: Heard, size: u64) -> Begun {
    match heard.reply.status {
        Status::Done => Begun::Open(Box::new(Writing::new(heard, size))),
        Status::Present => Begun::Present,
        Status::Busy | Status::Limit => Begun::Busy,
        Status::Wait => Begun::Wait,
        Status::NoSpace => Begun::NoSpace,
        _ => Begun::ReadOnly,
    }
}
