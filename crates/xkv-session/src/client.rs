//! The client's half of a session. One thread takes replies out of the ring, one keeps the control connection: it
//! sends heartbeats and ends the session when the gateway falls silent.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use xkv_store::{FragmentSums, SlotBuf, SlotPool};

use crate::control::{
    self, Bye, ClearRequest, Frames, Heartbeat, Hello, Message, RefusalCode, StatusRequest, VERSION, Welcome,
    has_left,
};
use crate::entry::{MAX_RUN, NO_SLOT, Operation, Reply, Request, Status};
use crate::memory::{Geometry, MAX_SLOT_BYTES, MAX_SLOTS, RingMemory, SharedQueue};
use crate::pass;
use crate::queue::{Consumer, Entry, Producer, QueueMemory};

/// Longest sleep while there is no reply, as the gateway's.
const IDLE: Duration = Duration::from_millis(250);
/// How often silence is looked for.
const TICK: Duration = Duration::from_millis(50);

/// How to reach a gateway.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Name or address of the gateway. All addresses of a name are tried.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The folder shared with the gateway.
    pub shm_dir: PathBuf,
    /// Shared secret, when the gateway wants one.
    pub token: Option<String>,
    /// For the gateway's log: who this is.
    pub name: String,
    /// Slots wanted.
    pub slots: u32,
    /// Fragment size to insist on, bytes.
    pub fragment_bytes: Option<u32>,
    /// Longest silence: no completion and no heartbeat with an advancing I/O counter while something is in flight, no
    /// heartbeat at all otherwise. Also the longest wait for each step of opening.
    pub silence: Duration,
    /// Longest time that a flush in progress counts as life.
    pub flush_patience: Duration,
}

/// Why there is no session, or no longer.
#[derive(Clone, Debug)]
pub struct SessionError {
    /// The gateway's reason, when it refused.
    pub code: Option<RefusalCode>,
    message: String,
    unsent: bool,
}

impl SessionError {
    /// An error with a text for people.
    pub fn new(message: impl Into<String>) -> Self {
        Self { code: None, message: message.into(), unsent: false }
    }

    /// Whether trying again cannot help: the settings are wrong, not the moment.
    pub fn is_permanent(&self) -> bool {
        matches!(self.code, Some(RefusalCode::Version | RefusalCode::Token | RefusalCode::FragmentBytes))
    }

    /// Whether the call that it answers was not taken by the gateway, so that it may be made again.
    pub fn is_unsent(&self) -> bool {
        self.unsent
    }
}

impl fmt::Display for SessionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for SessionError {}

/// One request to the gateway.
pub struct Call {
    /// What is asked for.
    pub operation: Operation,
    /// The slot that goes with it, if any; of a read up to [`MAX_RUN`]. They come back with the answer.
    pub slots: Vec<SlotBuf>,
    /// Lease or transaction.
    pub handle: u64,
    /// See [`Operation`].
    pub argument: u64,
    /// Checksums of a written fragment.
    pub sums: FragmentSums,
}

/// What became of a call.
pub struct Answer {
    /// The gateway's reply, or why there is none.
    pub reply: Result<Reply, SessionError>,
    /// The call's slots. After the end of a session their memory may still be written to by the gateway.
    pub slots: Vec<SlotBuf>,
}

/// Takes an answer; on a thread of the session, or the caller's when the session has ended. Must not block.
pub type Answered = Box<dyn FnOnce(Answer) + Send>;

struct Pending {
    operation: Operation,
    slots: Vec<SlotBuf>,
    done: Answered,
}

impl Pending {
    fn answer(self, reply: Result<Reply, SessionError>) {
        (self.done)(Answer { reply, slots: self.slots });
    }
}

struct Outbox {
    producer: Producer<SharedQueue>,
    /// Requests that found the queue full.
    backlog: VecDeque<Entry>,
    next: u64,
}

type Hook = Arc<dyn Fn() + Send + Sync>;
type LastWords = Box<dyn FnOnce(SessionError) + Send>;

struct Inner {
    welcome: Welcome,
    memory: Arc<RingMemory>,
    pool: SlotPool,
    outbox: Mutex<Outbox>,
    pending: Mutex<HashMap<u64, Pending>>,
    ended: AtomicBool,
    reason: Mutex<Option<SessionError>>,
    control: TcpStream,
    started: Instant,
    /// Milliseconds after `started` of the latest completion, and of the moment since when something is in flight.
    completed: AtomicU64,
    busy_since: AtomicU64,
    on_space: Mutex<Option<Hook>>,
    on_end: Mutex<Option<LastWords>>,
    drives: Mutex<Vec<OwnedFd>>,
    /// Ends with the gateway's process, at once: nothing can be between the two.
    handed: UnixStream,
}

/// An open session. Cheap to clone; the last clone ends it.
#[derive(Clone)]
pub struct Session(Arc<Owner>);

struct Owner(Arc<Inner>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.end(SessionError::new("the session was closed"), "closed by the client");
    }
}

impl Session {
    /// Opens a session; takes at most a few times `silence`.
    ///
    /// # Errors
    /// The gateway cannot be reached or refuses, its memory cannot be fetched; the text says what to do.
    pub fn open(config: &ClientConfig) -> Result<Session, SessionError> {
        let mut control = connect(config)?;
        let hello = Message::Hello(Hello {
            version: VERSION,
            client: config.name.clone(),
            token: config.token.clone(),
            slots: config.slots,
            fragment_bytes: config.fragment_bytes,
            straight: true,
        });
        let at = format!("gateway {}:{}", config.host, config.port);
        let mut frames = Frames::default();
        let welcome = match exchange(&mut control, &mut frames, &hello, config.silence) {
            Ok(Message::Welcome(welcome)) => welcome,
            Ok(Message::Refused(refusal)) => {
                let message = format!("{at} refuses: {}", refusal.reason);
                return Err(SessionError { code: Some(refusal.code), message, unsent: false });
            }
            Ok(_) => {
                return Err(SessionError::new(format!(
                    "{at} answers something else than welcome; is it a gateway?"
                )));
            }
            Err(error) => return Err(SessionError::new(format!("{at}: {error}"))),
        };
        check(&welcome, config).map_err(|what| SessionError::new(format!("{at}: {what}")))?;
        let geometry = Geometry::new(welcome.slots, welcome.fragment_bytes);
        let memory = pass::fetch(&config.shm_dir, &welcome.socket, welcome.ticket, config.silence).and_then(
            |fetched| {
                let memory = RingMemory::attach(&fetched.memory, geometry, welcome.generation)?;
                Ok((memory, fetched.drives, fetched.stream))
            },
        );
        let (memory, drives, handed) = match memory {
            Ok(fetched) => fetched,
            Err(error) => {
                _ = control::send(&mut control, &Message::Bye(Bye { reason: error.to_string() }));
                return Err(SessionError::new(format!("{at}: {error}")));
            }
        };
        let setup = |error: io::Error| SessionError::new(format!("{at}: {error}"));
        control.set_read_timeout(Some(TICK)).map_err(setup)?;
        control.set_write_timeout(Some(config.silence)).map_err(setup)?;
        let inner = Arc::new(Inner {
            pool: memory.pool(),
            outbox: Mutex::new(Outbox {
                producer: Producer::new(memory.submissions()),
                backlog: VecDeque::new(),
                next: 1,
            }),
            pending: Mutex::default(),
            ended: AtomicBool::new(false),
            reason: Mutex::default(),
            control: control.try_clone().map_err(setup)?,
            started: Instant::now(),
            completed: AtomicU64::new(0),
            busy_since: AtomicU64::new(0),
            on_space: Mutex::default(),
            on_end: Mutex::default(),
            drives: Mutex::new(drives),
            handed,
            welcome,
            memory,
        });
        let session = Session(Arc::new(Owner(inner.clone())));
        let replies = inner.clone();
        spawn("xkv-replies", move || replies.take_replies()).map_err(setup)?;
        let life = Life { inner, control, frames, config: config.clone() };
        spawn("xkv-control", move || life.run()).map_err(setup)?;
        Ok(session)
    }

    /// What the gateway said of itself.
    pub fn welcome(&self) -> &Welcome {
        &self.0.0.welcome
    }

    /// The session's slots.
    pub fn pool(&self) -> &SlotPool {
        &self.0.0.pool
    }

    /// Descriptors of the gateway's drives, in their order, once; none where it does not share them, or some were kept back.
    pub fn take_drives(&self) -> Vec<OwnedFd> {
        let drives = std::mem::take(&mut *self.0.0.drives.lock());
        let all = self.welcome().straight && drives.len() == self.welcome().drives as usize;
        if all { drives } else { Vec::new() }
    }

    /// Whether every lease of the session that was not closed still counts: the gateway lives, and has not ended it. What was
    /// read straight before this, in a session with drives, is what was leased.
    pub fn holds_leases(&self) -> bool {
        let inner = &self.0.0;
        self.is_open() && !inner.memory.is_over() && !has_left(&inner.handed)
    }

    /// False once the session has ended.
    pub fn is_open(&self) -> bool {
        !self.0.0.ended.load(Ordering::SeqCst)
    }

    /// Sends a request; `done` is called exactly once. Never blocks.
    pub fn call(&self, call: Call, done: Answered) {
        self.0.0.call(call, done);
    }

    /// Sets the function that is called when asking [`Operation::Begin`] again may help.
    pub fn on_space(&self, hook: Box<dyn Fn() + Send + Sync>) {
        *self.0.0.on_space.lock() = Some(hook.into());
    }

    /// Sets the function that is called once when the session ends; at once when it has.
    pub fn on_end(&self, hook: Box<dyn FnOnce(SessionError) + Send>) {
        *self.0.0.on_end.lock() = Some(hook);
        let reason = self.0.0.reason.lock().clone();
        if let Some(reason) = reason {
            self.0.0.tell_end(reason);
        }
    }

    /// Ends the session: what is in flight is answered with an error.
    pub fn close(&self) {
        self.0.0.end(SessionError::new("the session was closed"), "closed by the client");
    }
}

impl Inner {
    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    fn call(&self, call: Call, done: Answered) {
        let Call { operation, handle, argument, sums, .. } = call;
        assert!(call.slots.len() <= MAX_RUN, "a call has {MAX_RUN} slots at most");
        let slot = call.slots.first().map_or(NO_SLOT, SlotBuf::slot);
        let mut more = [0; MAX_RUN - 1];
        for (number, slot) in more.iter_mut().zip(call.slots.iter().skip(1)) {
            *number = slot.slot() + 1;
        }
        let mut outbox = self.outbox.lock();
        let number = outbox.next;
        {
            let mut pending = self.pending.lock();
            if self.ended.load(Ordering::SeqCst) {
                drop((pending, outbox));
                let reason = self.reason.lock().clone();
                let reason = reason.unwrap_or_else(|| SessionError::new("the session has ended"));
                let reply = Err(SessionError { unsent: true, ..reason });
                return done(Answer { reply, slots: call.slots });
            }
            if pending.is_empty() {
                self.busy_since.store(self.now(), Ordering::Relaxed);
            }
            pending.insert(number, Pending { operation, slots: call.slots, done });
        }
        outbox.next += 1;
        outbox.backlog.push_back(Request { number, operation, slot, handle, argument, sums, more }.encode());
        if let Err(error) = outbox.flush() {
            drop(outbox);
            self.end(SessionError::new(error.to_string()), "corrupt ring");
        }
    }

    /// Runs on its own thread: takes replies until the end.
    fn take_replies(&self) {
        let mut replies = Consumer::new(self.memory.completions());
        while !self.ended.load(Ordering::SeqCst) {
            let entry = match replies.pop() {
                Ok(Some(entry)) => entry,
                Ok(None) => match replies.wait(IDLE) {
                    Ok(()) => continue,
                    Err(error) => return self.end(SessionError::new(error.to_string()), "corrupt ring"),
                },
                Err(error) => return self.end(SessionError::new(error.to_string()), "corrupt ring"),
            };
            if let Err(what) = self.take(&entry) {
                return self.end(SessionError::new(format!("the gateway sent {what}")), what);
            }
        }
    }

    fn take(&self, entry: &Entry) -> Result<(), &'static str> {
        let reply = Reply::decode(entry).ok_or("an unknown reply")?;
        if reply.number == 0 {
            if reply.operation != Operation::Space {
                return Err("an unknown event");
            }
            let hook = self.on_space.lock().clone();
            if let Some(hook) = hook {
                hook();
            }
            return Ok(());
        }
        self.completed.store(self.now(), Ordering::Relaxed);
        let pending = self.pending.lock().remove(&reply.number).ok_or("a reply to nothing")?;
        let slot = pending.slots.first().map_or(NO_SLOT, SlotBuf::slot);
        let wrong = if slot != reply.slot {
            Some("a reply with another slot")
        } else if pending.operation != reply.operation {
            Some("a reply to another operation")
        } else if reply.operation == Operation::Read
            && reply.status == Status::Done
            && reply.value > (self.pool.slot_bytes() * pending.slots.len()) as u64
        {
            Some("more than the slots hold")
        } else {
            None
        };
        if let Some(what) = wrong {
            let reply = Err(SessionError::new(format!("the gateway sent {what}")));
            pending.answer(reply);
            return Err(what);
        }
        pending.answer(Ok(reply));
        let mut outbox = self.outbox.lock();
        if outbox.backlog.is_empty() { Ok(()) } else { outbox.flush().map_err(|_| "a corrupt ring") }
    }

    /// Ends the session once: everything in flight is answered. `gone` when the gateway has left, so that it takes no
    /// more requests out of the ring.
    fn end_with(&self, reason: SessionError, bye: &str, gone: bool) {
        let pending = {
            // Under the lock, so that no call slips in behind.
            let mut pending = self.pending.lock();
            if self.ended.swap(true, Ordering::SeqCst) {
                return;
            }
            // In the order of the calls.
            BTreeMap::from_iter(std::mem::take(&mut *pending))
        };
        *self.reason.lock() = Some(reason.clone());
        // Wakes the thread that takes replies.
        self.memory.completions().wake();
        // Requests are numbered from 1 in the order in which they enter the queue, whose entries are from 0.
        let taken = self.memory.submissions().head().load(Ordering::Acquire);
        for (number, pending) in pending {
            let unsent = gone && (number as u32).wrapping_sub(1).wrapping_sub(taken) as i32 >= 0;
            let reply = Err(SessionError { unsent, ..reason.clone() });
            pending.answer(reply);
        }
        self.tell_end(reason);
        // Last, since a connection that takes nothing more would hold the answers up.
        let mut control = &self.control;
        _ = control::send(&mut control, &Message::Bye(Bye { reason: bye.to_owned() }));
        _ = self.control.shutdown(Shutdown::Both);
    }

    fn end(&self, reason: SessionError, bye: &str) {
        self.end_with(reason, bye, false);
    }

    fn tell_end(&self, reason: SessionError) {
        let hook = self.on_end.lock().take();
        if let Some(hook) = hook {
            hook(reason);
        }
    }
}

impl Outbox {
    fn flush(&mut self) -> Result<(), crate::queue::Corrupt> {
        while let Some(entry) = self.backlog.front() {
            if !self.producer.push(entry)? {
                break;
            }
            self.backlog.pop_front();
        }
        self.producer.publish();
        Ok(())
    }
}

/// The thread that keeps the control connection.
struct Life {
    inner: Arc<Inner>,
    control: TcpStream,
    frames: Frames,
    config: ClientConfig,
}

impl Life {
    fn run(mut self) {
        let every = Duration::from_millis(u64::from(self.inner.welcome.heartbeat_ms));
        let mut sent = Instant::now();
        let (mut heard, mut advanced, mut io) = (self.inner.now(), self.inner.now(), 0);
        // Since when heartbeats speak of a flush and the counter stands still.
        let mut flushing = None;
        while !self.inner.ended.load(Ordering::SeqCst) {
            match self.frames.next(&mut self.control) {
                Ok(Some(Message::Heartbeat(beat))) => {
                    heard = self.inner.now();
                    if beat.io != io || !beat.flushing {
                        flushing = None;
                    }
                    let patience = self.config.flush_patience.as_millis() as u64;
                    let flush = beat.flushing && heard - *flushing.get_or_insert(heard) < patience;
                    if beat.io != io || flush {
                        advanced = heard;
                    }
                    io = beat.io;
                }
                Ok(Some(Message::Bye(bye))) => {
                    return self.gone(format!("the gateway ended the session: {}", bye.reason));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return self.gone("the gateway closed the connection".to_owned());
                }
                Err(error) => return self.gone(format!("the connection to the gateway failed: {error}")),
            }
            if sent.elapsed() >= every {
                sent = Instant::now();
                if let Err(error) =
                    control::send(&mut self.control, &Message::Heartbeat(Heartbeat::default()))
                {
                    return self.gone(format!("the connection to the gateway failed: {error}"));
                }
            }
            let silence = self.silence(heard, advanced);
            if silence > self.config.silence.as_millis() as u64 {
                return self.end(format!("the gateway has been silent for {silence} ms (wait_timeout_s)"));
            }
        }
    }

    /// Milliseconds without a sign of life.
    fn silence(&self, heard: u64, advanced: u64) -> u64 {
        let inner = &self.inner;
        let busy = !inner.pending.lock().is_empty();
        let life = if busy {
            let completed = inner.completed.load(Ordering::Relaxed);
            advanced.max(completed).max(inner.busy_since.load(Ordering::Relaxed))
        } else {
            heard.max(inner.completed.load(Ordering::Relaxed))
        };
        inner.now().saturating_sub(life)
    }

    fn end(&self, reason: String) {
        self.inner.end(SessionError::new(reason.clone()), &reason);
    }

    fn gone(&self, reason: String) {
        self.inner.end_with(SessionError::new(reason.clone()), &reason, true);
    }
}

fn check(welcome: &Welcome, config: &ClientConfig) -> Result<(), String> {
    if welcome.version != VERSION {
        return Err(format!("speaks protocol version {}, this side {VERSION}", welcome.version));
    }
    let bytes = welcome.fragment_bytes;
    if !bytes.is_power_of_two() || !(4096..=MAX_SLOT_BYTES).contains(&bytes) {
        return Err(format!("welcome with impossible fragment_bytes={bytes}"));
    }
    if welcome.slots == 0 || welcome.slots > config.slots.min(MAX_SLOTS) {
        return Err(format!("welcome with {} slots, {} were asked for", welcome.slots, config.slots));
    }
    if welcome.heartbeat_ms == 0 || u128::from(welcome.heartbeat_ms) * 2 > config.silence.as_millis() {
        return Err(format!(
            "sends a heartbeat every {} ms, too rarely for wait_timeout_s={:.1}; raise wait_timeout_s",
            welcome.heartbeat_ms,
            config.silence.as_secs_f64()
        ));
    }
    Ok(())
}

fn connect(config: &ClientConfig) -> Result<TcpStream, SessionError> {
    let at = format!("gateway {}:{}", config.host, config.port);
    let host = config.host.trim_start_matches('[').trim_end_matches(']');
    let addresses = (host, config.port)
        .to_socket_addrs()
        .map_err(|error| SessionError::new(format!("{at}: the name cannot be resolved: {error}")))?;
    let mut failure = "the name has no address".to_owned();
    for address in addresses {
        match TcpStream::connect_timeout(&address, config.silence) {
            Ok(stream) => {
                _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Err(error) => failure = format!("{address}: {error}"),
        }
    }
    Err(SessionError::new(format!("{at} cannot be reached: {failure}; is it running (xkv gateway serve)?")))
}

fn exchange(
    control: &mut TcpStream,
    frames: &mut Frames,
    message: &Message,
    patience: Duration,
) -> io::Result<Message> {
    control.set_write_timeout(Some(patience))?;
    control.set_read_timeout(Some(TICK))?;
    control::send(control, message)?;
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline {
        if let Some(answer) = frames.next(control)? {
            return Ok(answer);
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} ms", patience.as_millis())))
}

/// Asks a gateway for its state.
///
/// # Errors
/// As [`Session::open`].
pub fn status(config: &ClientConfig) -> Result<serde_json::Value, SessionError> {
    ask(
        config,
        &Message::Status(StatusRequest { version: VERSION, token: config.token.clone() }),
        config.silence,
    )
}

/// Asks a gateway what is in its store: `usage` by namespace and model, most bytes first. Waits up to `patience`.
///
/// # Errors
/// As [`Session::open`].
pub fn list(config: &ClientConfig, patience: Duration) -> Result<serde_json::Value, SessionError> {
    ask(config, &Message::List(StatusRequest { version: VERSION, token: config.token.clone() }), patience)
}

/// Has a gateway remove the objects of a namespace, of a model, or all; the state has `objects` and `bytes`, or `error`.
/// Waits up to `patience`; the gateway goes on after that.
///
/// # Errors
/// As [`Session::open`].
pub fn clear(
    config: &ClientConfig,
    namespace: Option<String>,
    model: Option<String>,
    patience: Duration,
) -> Result<serde_json::Value, SessionError> {
    let request = ClearRequest { version: VERSION, token: config.token.clone(), namespace, model };
    ask(config, &Message::Clear(request), patience)
}

fn ask(
    config: &ClientConfig,
    request: &Message,
    patience: Duration,
) -> Result<serde_json::Value, SessionError> {
    let mut control = connect(config)?;
    let at = format!("gateway {}:{}", config.host, config.port);
    match exchange(&mut control, &mut Frames::default(), request, patience) {
        Ok(Message::State(state)) => Ok(state),
        Ok(Message::Refused(refusal)) => Err(SessionError {
            code: Some(refusal.code),
            message: format!("{at} refuses: {}", refusal.reason),
            unsent: false,
        }),
        Ok(_) => {
            Err(SessionError::new(format!("{at} answers something else than its state; is it a gateway?")))
        }
        Err(error) => Err(SessionError::new(format!("{at}: {error}"))),
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(|_| ())
}
