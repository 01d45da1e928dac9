//! The gateway: listens, admits clients, keeps their sessions.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::json;
use xkv_store::{Cleared, Error, ErrorKind, Selection, Store, StoreStats};

use crate::control::{
    self, Bye, ClearRequest, Frames, Heartbeat, Hello, MAX_FRAME, Message, Refusal, RefusalCode,
    StatusRequest, VERSION, Welcome, has_left,
};
use crate::entry::MOST_DRIVES;
use crate::failures::Failures;
use crate::listing;
use crate::memory::{Geometry, MAX_SLOTS, RingMemory};
use crate::pass::{self, Access, Handover};
use crate::service::Service;
use crate::spare;

/// Connections at once, sessions or not.
const MAX_CONNECTIONS: usize = 256;
/// How long a client may take for each step of opening a session.
const OPENING: Duration = Duration::from_secs(5);
/// How often a connection's thread looks at its clock.
const TICK: Duration = Duration::from_millis(100);
/// Pause after the system refused to accept a connection (no descriptors left, say).
const REFUSED: Duration = Duration::from_millis(100);
/// How long a client waits for a seat.
const SEATING: Duration = Duration::from_millis(500);
/// How long a failure shows: whoever asks every ten seconds, as is usual, sees it.
const FAILURE_SHOWS: Duration = Duration::from_secs(15);
/// A request or a group of commits that takes longer keeps the gateway from being ready.
const SLOW: Duration = Duration::from_secs(5);
/// Characters that a client's name for itself is cut to.
const NAME_CHARS: usize = 64;

/// How to run a gateway.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Where to listen.
    pub listen: Vec<SocketAddr>,
    /// Shared secret that clients must show. Required when an address is not on loopback.
    pub token: Option<String>,
    /// Folder shared with the clients; their session's socket appears there.
    pub shm_dir: PathBuf,
    /// Who may connect to that socket.
    pub socket: Access,
    /// Sessions at once.
    pub max_sessions: usize,
    /// Largest number of slots of one session.
    pub max_slots: u32,
    /// Longest pause between heartbeats.
    pub heartbeat: Duration,
    /// A client that is silent for so long loses its session, leases and transactions.
    pub client_silence: Duration,
    /// Which drives clients read themselves.
    pub share_drives: ShareDrives,
}

/// Which drives clients get descriptors of, to read leased slots themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareDrives {
    /// Block devices: whoever has the descriptor cannot write without a right to the device.
    Devices,
    /// Files as well: a client whose user may write the file can open the descriptor again for writing.
    All,
    /// None.
    Off,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 5557))],
            token: None,
            shm_dir: PathBuf::from("/dev/shm"),
            socket: Access { mode: 0o600, group: None },
            max_sessions: 64,
            max_slots: MAX_SLOTS,
            heartbeat: Duration::from_millis(500),
            client_silence: Duration::from_secs(15),
            share_drives: ShareDrives::Devices,
        }
    }
}

/// State of a gateway, for people and programs.
#[derive(Clone, Debug, Serialize)]
pub struct GatewayStatus {
    /// The store's identity.
    pub store: String,
    /// This run of the gateway, hexadecimal.
    pub generation: String,
    /// One line about the store.
    pub description: String,
    /// Seconds since the start.
    pub uptime_s: f64,
    /// Objects present.
    pub objects: u64,
    /// Of those, objects never read since they were written, and their slots.
    pub never_read: u64,
    /// See `never_read`.
    pub never_read_slots: u64,
    /// Slots used and in all.
    pub slots_used: u64,
    /// See `slots_used`.
    pub slots_total: u64,
    /// Bytes of a fragment.
    pub fragment_bytes: u32,
    /// Counters since the start: committed, evicted, removed, discarded objects, groups of commits, I/O operations.
    pub committed: u64,
    /// See `committed`.
    pub evicted: u64,
    /// Of those, objects that were never read.
    pub evicted_never_read: u64,
    /// See `committed`.
    pub removed: u64,
    /// See `committed`.
    pub discarded: u64,
    /// See `committed`.
    pub commit_groups: u64,
    /// See `committed`.
    pub io: u64,
    /// True when the log failed and nothing can be stored.
    pub read_only: bool,
    /// For how long the group of commits being written has been, milliseconds.
    pub committing_ms: Option<u64>,
    /// Bytes read and written for all sessions since the start.
    pub bytes_read: u64,
    /// See `bytes_read`.
    pub bytes_written: u64,
    /// What each drive is, how full, and what it has to do.
    pub drives: Vec<DriveStatus>,
    /// Open sessions.
    pub sessions: Vec<SessionStatus>,
    /// Sessions opened and refused since the start.
    pub sessions_opened: u64,
    /// See `sessions_opened`.
    pub sessions_refused: u64,
    /// Since the start: reads that failed; writes, commits and removals that did; objects that found no room.
    pub failed_reads: u64,
    /// See `failed_reads`.
    pub failed_writes: u64,
    /// See `failed_reads`.
    pub rejected: u64,
    /// Whether it does its work at the moment.
    pub ready: bool,
    /// Why not.
    pub reasons: Vec<String>,
}

/// State of a drive.
#[derive(Clone, Debug, Serialize)]
pub struct DriveStatus {
    /// Path of the device or file, and its bytes.
    pub name: String,
    /// See `name`.
    pub bytes: u64,
    /// How bytes move: `io_uring` or `pool`.
    pub engine: &'static str,
    /// Whether the page cache is bypassed.
    pub direct: bool,
    /// Slots used and in all.
    pub slots_used: u64,
    /// See `slots_used`.
    pub slots_total: u64,
    /// Requests waiting.
    pub queued: usize,
    /// Requests given to the drive.
    pub in_flight: usize,
    /// Age of the oldest of those, milliseconds.
    pub oldest_ms: Option<u64>,
}

/// State of a session.
#[derive(Clone, Debug, Serialize)]
pub struct SessionStatus {
    /// Number of the session.
    pub number: u64,
    /// What the client calls itself.
    pub client: String,
    /// Its address.
    pub address: String,
    /// Seconds since it was opened.
    pub age_s: f64,
    /// Whether it was handed the drives, to read leased slots without the gateway.
    pub straight: bool,
    /// Slots it has.
    pub slots: u32,
    /// Slots in use by requests in flight.
    pub slots_in_use: usize,
    /// Leases it holds.
    pub leases: u64,
    /// Transactions it has open.
    pub transactions: u64,
    /// Requests in flight, and answered so far.
    pub in_flight: u64,
    /// See `in_flight`.
    pub answered: u64,
    /// Bytes read and written for it.
    pub bytes_read: u64,
    /// See `bytes_read`.
    pub bytes_written: u64,
}

struct SessionEntry {
    number: u64,
    client: String,
    address: SocketAddr,
    opened: Instant,
    service: Arc<Service>,
}

/// A session that a client has fetched the memory of.
struct Opened {
    welcome: Welcome,
    service: Arc<Service>,
    /// Tells the client when this process is no more.
    _handed: UnixStream,
    _seat: Seat,
}

struct Shared {
    store: Store,
    config: GatewayConfig,
    generation: u64,
    started: Instant,
    closing: AtomicBool,
    connections: Mutex<Vec<JoinHandle<()>>>,
    sessions: Mutex<Vec<SessionEntry>>,
    /// Sessions open and being opened.
    seats: AtomicUsize,
    /// Held while a ring's memory is taken, so that two sessions do not count the same memory as free.
    taking: Mutex<()>,
    next: AtomicU64,
    opened: AtomicU64,
    refused: AtomicU64,
    /// Bytes moved for sessions that have ended; added up under the lock of `sessions`.
    past_read: AtomicU64,
    past_written: AtomicU64,
    failures: Arc<Failures>,
}

/// One of the `max_sessions`.
struct Seat(Arc<Shared>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.seats.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A running gateway. Dropping it ends it.
pub struct Gateway {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    listener: Option<JoinHandle<()>>,
}

impl Gateway {
    /// Starts listening for clients of `store`.
    ///
    /// # Errors
    /// An address that cannot be listened on, a missing token, a shared folder that cannot be used.
    pub fn start(store: Store, config: GatewayConfig) -> xkv_store::Result<Gateway> {
        let open: Vec<String> =
            config.listen.iter().filter(|a| !a.ip().is_loopback()).map(SocketAddr::to_string).collect();
        if !open.is_empty() && config.token.as_deref().is_none_or(str::is_empty) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "listening on {} needs a token (token_file), or listen on 127.0.0.1",
                    open.join(", ")
                ),
            ));
        }
        if config.max_slots == 0 || config.heartbeat < Duration::from_millis(1) {
            let text = format!(
                "max_slots={} and heartbeat={:?}: a session needs at least one slot and a heartbeat of 1 ms or more",
                config.max_slots, config.heartbeat
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let id = store.id();
        pass::clean(&config.shm_dir, &id);
        // Proves now that sessions can be handed over later.
        Handover::listen(&config.shm_dir, &id, random(), config.socket)
            .map_err(|error| Error::io("the shared folder (shm_dir) cannot be used", error))?;
        let mut listeners = Vec::new();
        for address in &config.listen {
            let failed =
                |error| Error::io(format!("cannot listen on {address}; is another gateway running?"), error);
            let listener = TcpListener::bind(address).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            listeners.push(listener);
        }
        let addresses = listeners.iter().filter_map(|l| l.local_addr().ok()).collect();
        let shared = Arc::new(Shared {
            store,
            config,
            generation: random(),
            started: Instant::now(),
            closing: AtomicBool::new(false),
            connections: Mutex::default(),
            sessions: Mutex::default(),
            seats: AtomicUsize::new(0),
            taking: Mutex::default(),
            next: AtomicU64::new(1),
            opened: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            past_read: AtomicU64::new(0),
            past_written: AtomicU64::new(0),
            failures: Arc::default(),
        });
        let weak = Arc::downgrade(&shared);
        shared.store.on_space(Arc::new(move || {
            if let Some(shared) = weak.upgrade() {
                for session in &*shared.sessions.lock() {
                    session.service.tell_space();
                }
            }
        }));
        let accepting = shared.clone();
        let listener = spawn("xkv-accept", move || accepting.accept(&listeners))
            .map_err(|error| Error::io("cannot start a thread", error))?;
        Ok(Gateway { shared, addresses, listener: Some(listener) })
    }

    /// Addresses in use (port 0 is replaced by the port the system chose).
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// State for people and programs.
    pub fn status(&self) -> GatewayStatus {
        self.shared.status()
    }

    /// Ends all sessions, then the store. What is being committed is committed. Waits at most `patience`.
    pub fn close(&mut self, patience: Duration) {
        let deadline = Instant::now() + patience;
        self.shared.closing.store(true, Ordering::SeqCst);
        if let Some(listener) = self.listener.take() {
            _ = listener.join();
        }
        for connection in std::mem::take(&mut *self.shared.connections.lock()) {
            while !connection.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        self.shared
            .store
            .close(deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(100)));
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.close(Duration::from_secs(5));
    }
}

impl Shared {
    fn closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    fn accept(self: &Arc<Self>, listeners: &[TcpListener]) {
        let timeout = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        while !self.closing() {
            let mut fds: Vec<PollFd<'_>> = listeners.iter().map(|l| PollFd::new(l, PollFlags::IN)).collect();
            _ = poll(&mut fds, Some(&timeout));
            for listener in listeners {
                loop {
                    match listener.accept() {
                        Ok((stream, address)) => self.admit(stream, address),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                        Err(error) => {
                            tracing::error!(%error, "cannot accept a connection");
                            std::thread::sleep(REFUSED);
                            break;
                        }
                    }
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, stream: TcpStream, address: SocketAddr) {
        let mut connections = self.connections.lock();
        connections.retain(|connection| !connection.is_finished());
        if connections.len() >= MAX_CONNECTIONS {
            tracing::warn!(%address, "refused: {MAX_CONNECTIONS} connections are open");
            let reason = format!("{MAX_CONNECTIONS} connections are open, sessions or not; end some");
            // A new connection takes so few bytes without waiting.
            _ = stream.set_nonblocking(true);
            let refusal = Refusal { code: RefusalCode::Limit, reason };
            _ = control::send(&mut &stream, &Message::Refused(refusal));
            return;
        }
        let shared = self.clone();
        match spawn("xkv-session", move || shared.serve(stream, address)) {
            Ok(connection) => connections.push(connection),
            Err(error) => tracing::error!(%error, "cannot start a thread for a connection"),
        }
    }

    /// One connection, from its first frame to its end.
    fn serve(self: &Arc<Self>, mut stream: TcpStream, address: SocketAddr) {
        let mut frames = Frames::default();
        let outcome = setup(&stream).and_then(|()| self.first(&mut stream, &mut frames));
        match outcome {
            Ok(Some(Message::Hello(hello))) => match self.open(&mut stream, &hello) {
                Ok(opened) => self.session(stream, frames, address, &hello, opened),
                Err(refusal) => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    let client = name(&hello);
                    tracing::warn!(%address, client, reason = refusal.reason, "session refused");
                    _ = control::send(&mut stream, &Message::Refused(refusal));
                    _ = stream.shutdown(Shutdown::Write);
                }
            },
            Ok(Some(Message::Status(request))) => _ = self.answer_status(&mut stream, &request),
            Ok(Some(Message::List(request))) => {
                _ = self.answer(&mut stream, request.token.as_deref(), || self.list());
            }
            Ok(Some(Message::Clear(request))) => {
                _ = self.answer(&mut stream, request.token.as_deref(), || {
                    Ok(self.clear(address, request.clone()))
                });
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%address, %error, "connection without a session"),
        }
    }

    fn first(&self, stream: &mut TcpStream, frames: &mut Frames) -> io::Result<Option<Message>> {
        let deadline = Instant::now() + OPENING;
        while Instant::now() < deadline && !self.closing() {
            match frames.next(stream) {
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    let refusal = Refusal { code: RefusalCode::Malformed, reason: error.to_string() };
                    control::send(stream, &Message::Refused(refusal))?;
                    return Err(error);
                }
                other => return other,
            }
        }
        Ok(None)
    }

    fn answer_status(&self, stream: &mut TcpStream, request: &StatusRequest) -> io::Result<()> {
        self.answer(stream, request.token.as_deref(), || self.state())
    }

    /// Answers with a state, when the token is right.
    fn answer(
        &self,
        stream: &mut TcpStream,
        token: Option<&str>,
        state: impl FnOnce() -> io::Result<serde_json::Value>,
    ) -> io::Result<()> {
        let message = match self.check_token(token) {
            Ok(()) => Message::State(state()?),
            Err(refusal) => Message::Refused(refusal),
        };
        control::send(stream, &message)
    }

    /// What is in the store, as a frame can carry it: of very many models the smaller half is left out, and again.
    fn list(&self) -> io::Result<serde_json::Value> {
        let listing = self.store.list();
        let mut most = listing.usage.len();
        loop {
            let state = listing::json_of(&listing, most);
            if serde_json::to_vec(&state)?.len() <= MAX_FRAME - 64 || most == 0 {
                return Ok(state);
            }
            most /= 2;
        }
    }

    fn clear(&self, address: SocketAddr, request: ClearRequest) -> serde_json::Value {
        let (namespace, model) = (request.namespace, request.model);
        let selection = Selection {
            namespace: namespace.clone().map(String::into_bytes),
            model: model.clone().map(String::into_bytes),
        };
        match self.store.clear(&selection) {
            Ok(Cleared { objects, bytes }) => {
                tracing::info!(%address, ?namespace, ?model, objects, bytes, "cleared on request");
                json!({"objects": objects, "bytes": bytes})
            }
            Err(error) => {
                tracing::error!(%address, ?namespace, ?model, %error, "could not clear");
                json!({"error": error.to_string()})
            }
        }
    }

    /// The status as a frame can carry it: of very many sessions the later half is left out, and again.
    fn state(&self) -> io::Result<serde_json::Value> {
        let mut status = self.status();
        while serde_json::to_vec(&status)?.len() > MAX_FRAME - 64 && !status.sessions.is_empty() {
            status.sessions.truncate(status.sessions.len() / 2);
        }
        Ok(serde_json::to_value(status)?)
    }

    fn check_token(&self, shown: Option<&str>) -> Result<(), Refusal> {
        let Some(wanted) = &self.config.token else { return Ok(()) };
        let (wanted, shown) = (wanted.as_bytes(), shown.unwrap_or("").as_bytes());
        // Every byte is looked at, whatever the first difference: time tells nothing but the length.
        let differs =
            wanted.iter().zip(shown).fold(wanted.len() ^ shown.len(), |d, (a, b)| d | usize::from(a ^ b));
        if std::hint::black_box(differs) == 0 {
            return Ok(());
        }
        let reason =
            "the token is missing or wrong; give both sides the same token file (LMC_XKV_TOKEN_FILE)";
        Err(Refusal { code: RefusalCode::Token, reason: reason.into() })
    }

    fn open(self: &Arc<Self>, stream: &mut TcpStream, hello: &Hello) -> Result<Opened, Refusal> {
        let refuse = |code, reason: String| Err(Refusal { code, reason });
        if hello.version != VERSION {
            return refuse(
                RefusalCode::Version,
                format!("the client speaks protocol version {}, this gateway {VERSION}", hello.version),
            );
        }
        self.check_token(hello.token.as_deref())?;
        let fragment_bytes = self.store.fragment_bytes() as u32;
        if let Some(asked) = hello.fragment_bytes.filter(|&asked| asked != fragment_bytes) {
            return refuse(
                RefusalCode::FragmentBytes,
                format!(
                    "the store has fragment_bytes={fragment_bytes}, not {asked}; leave fragment_bytes at auto"
                ),
            );
        }
        if self.closing() {
            return refuse(RefusalCode::Closing, "the gateway is closing".into());
        }
        let Some(seat) = self.seat() else {
            let max = self.config.max_sessions;
            return refuse(
                RefusalCode::Limit,
                format!("{max} sessions are open (max_sessions); end one or raise it"),
            );
        };
        let geometry =
            Geometry::new(hello.slots.clamp(1, self.config.max_slots.min(MAX_SLOTS)), fragment_bytes);
        let limit = |error: io::Error| Refusal { code: RefusalCode::Limit, reason: error.to_string() };
        let (memory, fd) = {
            let _taking = self.taking.lock();
            spare::check(geometry.bytes()).map_err(limit)?;
            RingMemory::create(geometry, self.generation).map_err(limit)?
        };
        let id = self.store.id();
        let handover =
            Handover::listen(&self.config.shm_dir, &id, random(), self.config.socket).map_err(limit)?;
        let welcome = Welcome {
            version: VERSION,
            store: id,
            generation: self.generation,
            fragment_bytes,
            slots: geometry.slots,
            drives: self.store.drives() as u32,
            socket: handover.name(),
            ticket: random(),
            heartbeat_ms: self.config.heartbeat.as_millis() as u32,
            description: self.store.describe(),
            straight: hello.straight && self.shares_drives(),
        };
        control::send(stream, &Message::Welcome(welcome.clone())).map_err(limit)?;
        let gone = || self.closing() || has_left(&*stream);
        // Opened only for somebody who shows the ticket.
        let fds = || {
            std::iter::once(fd)
                .chain(welcome.straight.then(|| self.share_drives()).into_iter().flatten())
                .collect()
        };
        let handed = handover.give(fds, welcome.ticket, OPENING, gone).map_err(limit)?;
        let (store, failures) = (self.store.clone(), self.failures.clone());
        let service = Service::start(store, welcome.straight, memory, failures).map_err(limit)?;
        Ok(Opened { welcome, service, _handed: handed, _seat: seat })
    }

    fn shares_drives(&self) -> bool {
        let can_share = match self.config.share_drives {
            ShareDrives::Devices => self.store.can_share(false),
            ShareDrives::All => self.store.can_share(true),
            ShareDrives::Off => false,
        };
        can_share && self.store.drives() <= MOST_DRIVES
    }

    /// Descriptors of the drives, for a session; none when the system refuses.
    fn share_drives(&self) -> Vec<OwnedFd> {
        self.store.share().unwrap_or_else(|error| {
            tracing::warn!(%error, "a session reads through the gateway: the drives cannot be shared");
            Vec::new()
        })
    }

    /// A free seat. Waits a moment for one, since a client that left may not have been noticed yet.
    fn seat(self: &Arc<Self>) -> Option<Seat> {
        let deadline = Instant::now() + SEATING;
        let next = |taken: usize| (taken < self.config.max_sessions).then_some(taken + 1);
        while self.seats.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_err() {
            if Instant::now() > deadline || self.closing() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(Seat(self.clone()))
    }

    fn session(
        &self,
        mut stream: TcpStream,
        mut frames: Frames,
        address: SocketAddr,
        hello: &Hello,
        opened: Opened,
    ) {
        let Opened { welcome, service, _handed, _seat } = opened;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.opened.fetch_add(1, Ordering::Relaxed);
        let client = name(hello);
        tracing::info!(session = number, client, %address, slots = welcome.slots, "session opened");
        let entry = SessionEntry {
            number,
            client: client.clone(),
            address,
            opened: Instant::now(),
            service: service.clone(),
        };
        self.sessions.lock().push(entry);
        // It may have been told to wait already, while events did not know of it.
        service.tell_space();
        let reason = self.keep(&mut stream, &mut frames, &service);
        // Leases and transactions end here; slots with I/O in flight keep the memory until it is done.
        service.end();
        let mut sessions = self.sessions.lock();
        let usage = service.usage();
        self.past_read.fetch_add(usage.bytes_read, Ordering::Relaxed);
        self.past_written.fetch_add(usage.bytes_written, Ordering::Relaxed);
        sessions.retain(|session| session.number != number);
        drop(sessions);
        _ = control::send(&mut stream, &Message::Bye(Bye { reason: reason.clone() }));
        _ = stream.shutdown(Shutdown::Both);
        tracing::info!(session = number, client, reason, "session ended");
    }

    /// Exchanges signs of life until the session ends. Returns why.
    fn keep(&self, stream: &mut TcpStream, frames: &mut Frames, service: &Arc<Service>) -> String {
        let (mut heard, mut sent) = (Instant::now(), None::<Instant>);
        loop {
            if self.closing() {
                return "the gateway is closing".into();
            }
            if let Some(fault) = service.fault() {
                return fault;
            }
            service.tell_owed_space();
            if sent.is_none_or(|sent| sent.elapsed() >= self.config.heartbeat / 2) {
                sent = Some(Instant::now());
                let (io, committing) = self.store.progress();
                let beat = Heartbeat { io: io + service.answered(), flushing: committing.is_some() };
                if let Err(error) = control::send(stream, &Message::Heartbeat(beat)) {
                    return format!("the connection failed: {error}");
                }
            }
            match frames.next(stream) {
                Ok(None) => {}
                Ok(Some(Message::Bye(bye))) => return format!("the client left: {}", bye.reason),
                Ok(Some(Message::Status(request))) => {
                    if let Err(error) = self.answer_status(stream, &request) {
                        return format!("the connection failed: {error}");
                    }
                }
                Ok(Some(_)) => heard = Instant::now(),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return "the client closed the connection".into();
                }
                Err(error) => return format!("the connection failed: {error}"),
            }
            if heard.elapsed() > self.config.client_silence {
                return format!("the client was silent for {:.1} s", heard.elapsed().as_secs_f64());
            }
        }
    }

    fn status(&self) -> GatewayStatus {
        let StoreStats {
            objects,
            never_read,
            never_read_slots,
            slots_used,
            slots_total,
            fragment_bytes,
            evicted,
            evicted_never_read,
            committed,
            removed,
            discarded,
            commit_groups,
            committing_for,
            read_only,
            drives,
            ..
        } = self.store.stats();
        let milliseconds = |duration: Duration| duration.as_millis() as u64;
        let (sessions, past) = {
            let sessions = self.sessions.lock();
            let past = [&self.past_read, &self.past_written].map(|bytes| bytes.load(Ordering::Relaxed));
            (sessions.iter().map(SessionEntry::status).collect::<Vec<_>>(), past)
        };
        let mut reasons = Vec::new();
        if read_only {
            reasons.push("the store takes no changes: its log failed".into());
        }
        let slow = |since: Duration| since > SLOW;
        for (drive, info) in drives.iter().zip(self.store.drive_info()) {
            if let Some(age) = drive.oldest.map(|oldest| oldest.elapsed()).filter(|&age| slow(age)) {
                reasons.push(format!("{} has not answered for {:.0} s", info.name, age.as_secs_f64()));
            }
        }
        if let Some(age) = committing_for.filter(|&age| slow(age)) {
            reasons.push(format!("a group of commits has been written for {:.0} s", age.as_secs_f64()));
        }
        let [reads, writes, no_space] =
            [self.failures.reads(), self.failures.writes(), self.failures.no_space()];
        for ((_, ago), what) in [
            (reads, "a read failed"),
            (writes, "a write or commit failed"),
            (no_space, "an object found no room"),
        ] {
            if let Some(ago) = ago.filter(|&ago| ago < FAILURE_SHOWS) {
                reasons.push(format!("{what} {:.0} s ago", ago.as_secs_f64()));
            }
        }
        GatewayStatus {
            store: self.store.id(),
            generation: format!("{:016x}", self.generation),
            description: self.store.describe(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            objects,
            never_read,
            never_read_slots,
            slots_used,
            slots_total,
            fragment_bytes,
            committed,
            evicted,
            evicted_never_read,
            removed,
            discarded,
            commit_groups,
            io: self.store.progress().0,
            read_only,
            committing_ms: committing_for.map(milliseconds),
            bytes_read: past[0] + sessions.iter().map(|session| session.bytes_read).sum::<u64>(),
            bytes_written: past[1] + sessions.iter().map(|session| session.bytes_written).sum::<u64>(),
            drives: drives
                .iter()
                .zip(self.store.drive_info())
                .map(|(drive, info)| DriveStatus {
                    name: info.name,
                    bytes: info.bytes,
                    engine: info.engine,
                    direct: info.direct,
                    slots_used: info.slots_used,
                    slots_total: info.slots_total,
                    queued: drive.queued_reads + drive.queued_writes,
                    in_flight: drive.in_flight,
                    oldest_ms: drive.oldest.map(|oldest| milliseconds(oldest.elapsed())),
                })
                .collect(),
            sessions,
            sessions_opened: self.opened.load(Ordering::Relaxed),
            sessions_refused: self.refused.load(Ordering::Relaxed),
            failed_reads: reads.0,
            failed_writes: writes.0,
            rejected: no_space.0,
            ready: reasons.is_empty(),
            reasons,
        }
    }
}

impl SessionEntry {
    fn status(&self) -> SessionStatus {
        let usage = self.service.usage();
        SessionStatus {
            number: self.number,
            client: self.client.clone(),
            address: self.address.to_string(),
            age_s: self.opened.elapsed().as_secs_f64(),
            straight: usage.straight,
            slots: usage.slots,
            slots_in_use: usage.slots_in_use,
            leases: usage.leases,
            transactions: usage.transactions,
            in_flight: usage.in_flight,
            answered: usage.answered,
            bytes_read: usage.bytes_read,
            bytes_written: usage.bytes_written,
        }
    }
}

/// What a client calls itself, fit for a log line.
fn name(hello: &Hello) -> String {
    hello.client.chars().filter(|c| !c.is_control()).take(NAME_CHARS).collect()
}

fn setup(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(OPENING))
}

/// A number nobody can guess.
fn random() -> u64 {
    let mut bytes = [0; 8];
    let filled =
        std::fs::File::open("/dev/urandom").and_then(|mut file| io::Read::read_exact(&mut file, &mut bytes));
    if filled.is_err() {
        // Better than nothing: the socket's permissions still protect it.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
        return now ^ u64::from(std::process::id()).rotate_left(32);
    }
    u64::from_le_bytes(bytes)
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run)
}
