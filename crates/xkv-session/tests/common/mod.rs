//! A gateway over memory, and a blocking client, for tests.
#![allow(dead_code)]

pub mod raw;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use xkv_session::entry::{Operation, Reply, Status};
use xkv_session::{Answer, Call, ClientConfig, Gateway, GatewayConfig, Session, SessionError};
use xkv_store::io::Device;
use xkv_store::io::device::testing::MemoryDevice;
use xkv_store::{FragmentSums, ObjectKey, SlotBuf, Store, StoreConfig, fragment_sums};

pub const FRAGMENT: usize = 4096;
pub const PATIENCE: Duration = Duration::from_secs(10);

pub struct Rig {
    pub gateway: Gateway,
    pub store: Store,
    pub folder: tempfile::TempDir,
}

pub fn rig() -> Rig {
    rig_with(MemoryDevice::new(32 << 20), |_| ())
}

pub fn rig_with(device: Arc<dyn Device>, change: impl FnOnce(&mut GatewayConfig)) -> Rig {
    let config = StoreConfig { fragment_bytes: Some(FRAGMENT as u32), ..StoreConfig::default() };
    let store = Store::open_on(vec![device], &config).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut config = GatewayConfig {
        listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
        shm_dir: folder.path().into(),
        heartbeat: Duration::from_millis(100),
        client_silence: Duration::from_secs(2),
        ..GatewayConfig::default()
    };
    change(&mut config);
    let gateway = Gateway::start(store.clone(), config).unwrap();
    Rig { gateway, store, folder }
}

impl Rig {
    pub fn config(&self) -> ClientConfig {
        client_config(self.gateway.addresses()[0], self.folder.path())
    }

    pub fn open(&self) -> Session {
        Session::open(&self.config()).unwrap()
    }
}

pub fn client_config(address: SocketAddr, folder: &Path) -> ClientConfig {
    ClientConfig {
        host: address.ip().to_string(),
        port: address.port(),
        shm_dir: folder.into(),
        token: None,
        name: "test".into(),
        slots: 16,
        fragment_bytes: None,
        silence: Duration::from_secs(1),
        flush_patience: Duration::from_secs(5),
    }
}

pub fn contents(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend(state.to_le_bytes());
    }
    out.truncate(len);
    out
}

pub fn key(name: &str) -> ObjectKey {
    ObjectKey::new(&Arc::from(&b"ns"[..]), name.as_bytes())
}

/// Takes a slot, waiting for one.
pub fn slot(session: &Session) -> SlotBuf {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(slot) = session.pool().try_take() {
            return slot;
        }
        assert!(Instant::now() < deadline, "no slot came back");
        std::thread::yield_now();
    }
}

/// A slot that holds a key as `Open`, `Begin` and `Remove` want it.
pub fn key_slot(session: &Session, key: &ObjectKey) -> SlotBuf {
    let mut slot = slot(session);
    let head =
        [(key.namespace().len() as u32).to_le_bytes(), (key.key().len() as u32).to_le_bytes()].concat();
    let bytes = [&head, key.namespace(), key.key()].concat();
    slot[..bytes.len()].copy_from_slice(&bytes);
    slot
}

pub fn call(
    session: &Session,
    operation: Operation,
    slot: Option<SlotBuf>,
    handle: u64,
    argument: u64,
) -> Answer {
    let slots = slot.into_iter().collect();
    call_with(session, Call { operation, slots, handle, argument, sums: FragmentSums::default() })
}

pub fn call_with(session: &Session, call: Call) -> Answer {
    let (sender, receiver) = channel();
    session.call(call, Box::new(move |answer| _ = sender.send(answer)));
    receiver.recv_timeout(PATIENCE).expect("every call is answered")
}

pub fn reply(answer: Answer) -> Result<Reply, SessionError> {
    answer.reply
}

/// Stores an object; the status that ended it.
pub fn put(session: &Session, key: &ObjectKey, data: &[u8]) -> Result<Status, SessionError> {
    let deadline = Instant::now() + PATIENCE;
    let handle = loop {
        let begun =
            call(session, Operation::Begin, Some(key_slot(session, key)), 0, data.len() as u64).reply?;
        match begun.status {
            Status::Done => break begun.handle,
            Status::Wait | Status::Busy if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1))
            }
            other => return Ok(other),
        }
    };
    for (index, piece) in data.chunks(FRAGMENT).enumerate() {
        let mut slot = slot(session);
        slot[..piece.len()].copy_from_slice(piece);
        let sums = fragment_sums(key.digest(), index as u32, piece);
        let write =
            Call { operation: Operation::Write, slots: vec![slot], handle, argument: index as u64, sums };
        let written = call_with(session, write).reply?;
        if written.status != Status::Done {
            call(session, Operation::Close, None, handle, 0).reply?;
            return Ok(written.status);
        }
    }
    Ok(call(session, Operation::Commit, None, handle, 0).reply?.status)
}

/// Loads an object and checks its sums.
pub fn get(session: &Session, key: &ObjectKey) -> Result<Option<Vec<u8>>, SessionError> {
    let opened = call(session, Operation::Open, Some(key_slot(session, key)), 0, 0).reply?;
    if opened.status != Status::Done {
        return Ok(None);
    }
    let mut data = Vec::new();
    for index in 0..opened.value.div_ceil(FRAGMENT as u64) {
        let answer = call(session, Operation::Read, Some(slot(session)), opened.handle, index);
        let read = answer.reply?;
        assert_eq!(read.status, Status::Done);
        let piece = answer.slots[0][..read.value as usize].to_vec();
        assert_eq!(fragment_sums(key.digest(), index as u32, &piece), read.sums[0]);
        data.extend(piece);
    }
    assert_eq!(data.len() as u64, opened.value);
    call(session, Operation::Close, None, opened.handle, 0).reply?;
    Ok(Some(data))
}

pub fn present(session: &Session, keys: &[ObjectKey]) -> Vec<bool> {
    let mut slot = slot(session);
    for (i, key) in keys.iter().enumerate() {
        slot[32 * i..32 * (i + 1)].copy_from_slice(&key.digest().0);
    }
    let answer = call(session, Operation::Lookup, Some(slot), 0, keys.len() as u64);
    assert_eq!(answer.reply.unwrap().status, Status::Done);
    let slot = &answer.slots[0];
    (0..keys.len()).map(|i| slot[8 * i..8 * (i + 1)] != [0; 8]).collect()
}

pub fn await_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Numbers that look random and are the same every time.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(len).collect()
    }
}

/// Tests that count what the process holds run one at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What this process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub descriptors: usize,
    pub threads: usize,
    pub rings: usize,
}

impl Held {
    /// What is held once the threads that were started have given themselves their names.
    pub fn floor() -> Self {
        let (mut floor, mut same) = (Self::now(), 0);
        while same < 10 {
            std::thread::sleep(Duration::from_millis(20));
            let now = Self::now();
            same = if now == floor { same + 1 } else { 0 };
            floor = now;
        }
        floor
    }

    pub fn now() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let rings = maps.lines().filter(|line| line.contains("memfd:xkv-session")).count();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        // Threads of the gateway, the store and the sessions; not those of the tests that wait for their turn.
        let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let threads = names.filter(|name| name.starts_with("xkv-")).count();
        Self { descriptors, threads, rings }
    }

    /// Waits until no more is held than then.
    pub fn await_again(self) {
        let deadline = Instant::now() + 2 * PATIENCE;
        loop {
            let now = Self::now();
            let fits = now.descriptors <= self.descriptors && now.threads <= self.threads;
            if fits && now.rings <= self.rings {
                return;
            }
            assert!(Instant::now() < deadline, "{now:?} is above the floor of {self:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// An honest session that stores and loads all the while, every byte checked.
pub struct Witness {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Witness {
    pub fn start(rig: &Rig) -> Self {
        let session = Session::open(&ClientConfig { silence: PATIENCE, ..rig.config() }).unwrap();
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (stop.clone(), rounds.clone());
        let thread = std::thread::spawn(move || {
            let mut n = 0;
            while !stopped.load(Ordering::Relaxed) {
                let (name, data) = (key(&format!("witness {}", n % 40)), contents(n % 40, 9_000));
                let stored = put(&session, &name, &data).unwrap();
                assert!(matches!(stored, Status::Done | Status::Present), "{stored:?}");
                if let Some(found) = get(&session, &name).unwrap() {
                    assert!(found == data, "the witness got other bytes than it stored");
                    counted.fetch_add(1, Ordering::Relaxed);
                }
                n += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let witness = Self { stop, rounds, thread };
        // From here on both sides of its session stand, and count to the floor.
        witness.await_rounds(1);
        witness
    }

    /// Waits for some more rounds: whatever was done to others did not harm this session.
    pub fn await_rounds(&self, more: u64) {
        let goal = self.rounds.load(Ordering::Relaxed) + more;
        await_until("the witness goes on", || {
            assert!(!self.thread.is_finished(), "the witness failed");
            self.rounds.load(Ordering::Relaxed) >= goal
        });
    }

    pub fn finish(self) {
        self.await_rounds(3);
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the witness was served well");
    }
}
