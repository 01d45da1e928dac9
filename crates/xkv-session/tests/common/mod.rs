//! A gateway over memory, and a blocking client, for tests.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
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
    call_with(session, Call { operation, slot, handle, argument, sums: FragmentSums::default() })
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
            Call { operation: Operation::Write, slot: Some(slot), handle, argument: index as u64, sums };
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
        let piece = answer.slot.expect("the slot comes back")[..read.value as usize].to_vec();
        assert_eq!(fragment_sums(key.digest(), index as u32, &piece), read.sums);
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
    let slot = answer.slot.unwrap();
    (0..keys.len()).map(|i| slot[8 * i..8 * (i + 1)] != [0; 8]).collect()
}

pub fn await_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
