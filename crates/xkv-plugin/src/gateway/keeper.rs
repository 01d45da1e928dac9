//! Keeps a session open: opens one, waits for its end, opens the next.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use xkv_session::{ClientConfig, Session, SessionError};

use super::link::{FEWEST_SLOTS, Link};
use super::straight::Drives;
use super::{Phase, Shared};

/// Pause between attempts while questions may wait for a session.
const HURRY: Duration = Duration::from_millis(100);
/// A refusal that only another gateway or other settings can change is tried again after so many times the pause.
const SLOWLY: u32 = 6;
/// Sessions that end sooner, one after the other, are not opened again at once.
const SHORT_LIVED: Duration = Duration::from_secs(1);
/// At most so many lines about sessions within a minute; statistics show every change.
const LINES_PER_MINUTE: usize = 6;

/// What the keeper reacts to.
pub enum Event {
    /// An attempt ended.
    Attempted(Result<(Session, Drives), SessionError>),
    /// The session ended.
    Ended(SessionError),
    /// A question waits.
    Held,
    Close,
}

pub struct Keeper {
    shared: Arc<Shared>,
    config: ClientConfig,
    /// Gets the outcome of the first attempt.
    first: Option<Sender<Result<(), SessionError>>>,
    attempting: bool,
    next_attempt: Instant,
    /// When the current session was opened, or the last one.
    opened: Option<Instant>,
    /// Number of the latest sessions that did not live long.
    short_lived: u32,
    /// What was said last about why there is no session.
    said: String,
    lines: VecDeque<Instant>,
}

impl Keeper {
    pub fn new(shared: Arc<Shared>, first: Sender<Result<(), SessionError>>) -> Self {
        Self {
            config: shared.config.clone(),
            shared,
            first: Some(first),
            attempting: false,
            next_attempt: Instant::now(),
            opened: None,
            short_lived: 0,
            said: String::new(),
            lines: VecDeque::new(),
        }
    }

    /// Runs until it is told to close.
    pub fn run(mut self, events: &Receiver<Event>) {
        loop {
            let event = match self.wake_at() {
                Some(at) => events.recv_deadline(at),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match event {
                Ok(Event::Attempted(outcome)) => {
                    self.attempting = false;
                    match outcome {
                        Ok((session, drives)) => self.open(session, drives),
                        Err(error) => self.failed(&error),
                    }
                }
                Ok(Event::Ended(reason)) => self.ended(&reason),
                Ok(Event::Held) | Err(RecvTimeoutError::Timeout) => {}
                Ok(Event::Close) | Err(RecvTimeoutError::Disconnected) => return self.close(),
            }
            self.expire();
            if self.may_attempt() && Instant::now() >= self.next_attempt {
                self.attempt();
            }
        }
    }

    fn may_attempt(&self) -> bool {
        !self.attempting && matches!(self.shared.state.lock().phase, Phase::Lost(_))
    }

    fn wake_at(&self) -> Option<Instant> {
        let attempt = self.may_attempt().then_some(self.next_attempt);
        attempt.into_iter().chain(self.held_until()).min()
    }

    /// When the question that has waited longest has waited long enough.
    fn held_until(&self) -> Option<Instant> {
        let state = self.shared.state.lock();
        let age = state.held.front()?.asked + self.config.silence;
        match state.phase {
            Phase::Lost(Some(until)) => Some(until.min(age)),
            _ => Some(age),
        }
    }

    /// Answers questions that have waited long enough.
    fn expire(&mut self) {
        let now = Instant::now();
        let mut expired = Vec::new();
        {
            let mut state = self.shared.state.lock();
            let over = match state.phase {
                Phase::Open(_) => false,
                Phase::Lost(until) => until.is_none_or(|until| now >= until),
                Phase::Closed => true,
            };
            if over && matches!(state.phase, Phase::Lost(Some(_))) {
                state.phase = Phase::Lost(None);
            }
            let old = |asked: Instant| now.saturating_duration_since(asked) >= self.config.silence;
            while state.held.front().is_some_and(|question| over || old(question.asked)) {
                expired.extend(state.held.pop_front());
            }
        }
        self.shared.refuse(expired);
    }

    /// Tries to open a session, on a thread of its own: that takes long while a gateway is frozen.
    fn attempt(&mut self) {
        let (config, inbox) = (self.config.clone(), self.shared.inbox.clone());
        let open = move || {
            // With nobody left to take it, the session ends here.
            let opened = Session::open(&config).and_then(usable).map(|session| {
                let drives = Drives::of(&session, config.silence / 2);
                (session, drives)
            });
            let _ = inbox.send(Event::Attempted(opened));
        };
        match std::thread::Builder::new().name("xkv-open".into()).spawn(open) {
            Ok(_) => self.attempting = true,
            Err(error) => {
                tracing::error!("{}: cannot start a thread: {error}", self.shared.address());
                self.next_attempt = Instant::now() + self.shared.reopen_after;
            }
        }
    }

    fn open(&mut self, session: Session, mut drives: Drives) {
        let shared = &self.shared;
        let welcome = session.welcome().clone();
        let lacking = drives.lacking.take();
        let weak = Arc::downgrade(shared);
        let unsent = move |question| match weak.upgrade() {
            Some(shared) => shared.unsent(question),
            None => question_refused(question),
        };
        let link = Link::new(session, drives, Box::new(unsent));
        let weak = Arc::downgrade(shared);
        link.session.on_space(Box::new(move || {
            if let Some(shared) = weak.upgrade() {
                shared.tell_space();
            }
        }));
        shared.slots.store(link.slots(), Ordering::Relaxed);
        shared.drives.store(link.drives(), Ordering::Relaxed);
        shared.fragment_bytes.store(link.fragment_bytes(), Ordering::Release);
        // What is to come must have fragments of the same size: objects in progress are cut by it.
        self.config.fragment_bytes = Some(welcome.fragment_bytes);

        // Questions that waited go first; those that come meanwhile queue behind them.
        let until = Some(Instant::now() + self.config.silence);
        let mut state = shared.state.lock();
        state.phase = Phase::Lost(until);
        loop {
            let Some(question) = state.held.pop_front() else { break };
            drop(state);
            link.ask(question);
            state = shared.state.lock();
        }
        let (gone, before) =
            (state.since.elapsed(), std::mem::replace(&mut state.store, welcome.store.clone()));
        state.opened += 1;
        state.generation = welcome.generation;
        let reopened = state.opened > 1;
        let before_it = state.change(Phase::Open(link.clone()), welcome.description.clone());
        drop(state);
        drop(before_it);
        // Only now, so that its end finds it open.
        let (weak, inbox) = (Arc::downgrade(&link), shared.inbox.clone());
        link.session.on_end(Box::new(move |reason| {
            if let Some(link) = weak.upgrade() {
                link.ended();
            }
            let _ = inbox.send(Event::Ended(reason));
        }));
        shared.tell_space();

        self.opened = Some(Instant::now());
        self.said.clear();
        let address = self.shared.address();
        if reopened || self.first.is_none() {
            let seconds = gone.as_secs_f64();
            self.say(|| {
                tracing::info!("{address}: session open after {seconds:.1} s: {}", welcome.description)
            });
        }
        if let Some(why) = lacking {
            self.say(|| tracing::warn!("{address}: objects are read through the gateway: {why}"));
        }
        if reopened && before != welcome.store {
            let (store, slots) = (&welcome.store, welcome.slots);
            tracing::warn!("{address}: another store than before: {store}, was {before}; {slots} slots");
        }
        if let Some(first) = self.first.take() {
            let _ = first.send(Ok(()));
        }
    }

    fn failed(&mut self, error: &SessionError) {
        let pause = self.pause(error);
        self.next_attempt = Instant::now() + pause;
        let text = error.to_string();
        {
            let mut state = self.shared.state.lock();
            // Waiting is of no use.
            if error.is_permanent() && matches!(state.phase, Phase::Lost(Some(_))) {
                state.phase = Phase::Lost(None);
            }
            state.reason.clone_from(&text);
        }
        let first = self.first.take();
        let is_first = first.is_some();
        // Who makes the backend is told of a refusal and says it, unless it has stopped waiting.
        let told = first.is_some_and(|first| first.send(Err(error.clone())).is_ok());
        let news = (is_first || error.is_permanent()) && self.said != text;
        if news && !(told && error.is_permanent()) {
            let seconds = self.shared.reopen_after.as_secs_f64();
            let text = text.clone();
            if error.is_permanent() {
                self.say(|| {
                    tracing::error!("{text}; objects are misses until that changes; tried again slowly")
                });
            } else {
                self.say(|| {
                    tracing::warn!("{text}; objects are misses until it is; tried every {seconds} s")
                });
            }
        }
        self.said = text;
    }

    fn ended(&mut self, reason: &SessionError) {
        let lived = self.opened.map_or(Duration::ZERO, |opened| opened.elapsed());
        let now = Instant::now();
        let mut refused = VecDeque::new();
        let (idle, over);
        {
            let mut state = self.shared.state.lock();
            let Phase::Open(link) = &state.phase else { return };
            idle = !link.lost_something();
            let until = idle.then(|| now + self.config.silence);
            state.lost += 1;
            over = state.change(Phase::Lost(until), reason.to_string());
            if !idle {
                refused = std::mem::take(&mut state.held);
            }
        }
        // Answers what its drives have not begun.
        drop(over);
        self.shared.refuse(refused);
        self.short_lived = if lived < SHORT_LIVED { self.short_lived + 1 } else { 0 };
        self.next_attempt = match self.short_lived {
            0..=1 => now,
            _ if idle => now + HURRY,
            _ => now + jittered(self.shared.reopen_after),
        };
        let address = self.shared.address();
        let what = if idle { "while idle" } else { "with operations in flight" };
        self.say(|| {
            tracing::warn!("{address}: session lost {what}: {reason}; objects are misses until it is back")
        });
    }

    fn close(&mut self) {
        let (phase, held) = {
            let mut state = self.shared.state.lock();
            let phase = state.change(Phase::Closed, "closed".into());
            (phase, std::mem::take(&mut state.held))
        };
        self.shared.refuse(held);
        if let Phase::Open(link) = phase {
            link.session.close();
        }
    }

    fn pause(&self, error: &SessionError) -> Duration {
        if error.is_permanent() {
            return jittered(self.shared.reopen_after * SLOWLY);
        }
        match self.shared.state.lock().phase {
            Phase::Lost(Some(until)) if Instant::now() < until => HURRY.min(self.shared.reopen_after),
            _ => jittered(self.shared.reopen_after),
        }
    }

    fn say(&mut self, line: impl FnOnce()) {
        let now = Instant::now();
        while self.lines.front().is_some_and(|&at| now.duration_since(at) > Duration::from_secs(60)) {
            self.lines.pop_front();
        }
        if self.lines.len() < LINES_PER_MINUTE {
            self.lines.push_back(now);
            line();
        }
    }
}

fn usable(session: Session) -> Result<Session, SessionError> {
    let slots = session.welcome().slots;
    if slots >= FEWEST_SLOTS {
        return Ok(session);
    }
    Err(SessionError::new(format!("the gateway grants {slots} slots, at least {FEWEST_SLOTS} are needed")))
}

fn question_refused(question: super::Question) {
    question.answer(Err(super::Unanswered::Lost));
}

/// `pause`, by up to a fifth shorter or longer, so that many clients do not come at the same moment.
fn jittered(pause: Duration) -> Duration {
    // Seeded from the system's randomness each time.
    let random = RandomState::new().hash_one(0u8) as u32;
    pause.mul_f64(0.8 + 0.4 * f64::from(random) / f64::from(u32::MAX))
}
