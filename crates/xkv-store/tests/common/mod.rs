//! A blocking client of a store, for tests.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use xkv_store::checksum::fragment_sums;
use xkv_store::io::Device;
use xkv_store::{Begin, Error, ObjectKey, SlotPool, Store, StoreConfig};

pub const MIB: u64 = 1 << 20;

/// Bytes that repeat nowhere: a swapped fragment cannot look right.
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

pub fn key(name: impl AsRef<[u8]>) -> ObjectKey {
    ObjectKey::new(&Arc::from(&b"test"[..]), name.as_ref())
}

/// A small store: 4 KiB fragments.
pub fn config() -> StoreConfig {
    StoreConfig { fragment_bytes: Some(4096), ..StoreConfig::default() }
}

pub fn open_on(devices: &[Arc<dyn Device>], config: &StoreConfig) -> Store {
    Store::open_on(devices.to_vec(), config).expect("the store opens")
}

#[derive(Debug)]
pub enum Put {
    Stored,
    Present,
    Busy,
    NoSpace,
    ReadOnly,
    Failed(String),
}

/// Stores an object; waits for room for up to ten seconds.
pub fn put(store: &Store, key: &ObjectKey, data: &[u8]) -> Put {
    let deadline = Instant::now() + Duration::from_secs(10);
    let txn = loop {
        match store.begin(key, data.len() as u64) {
            Begin::Txn(txn) => break txn,
            Begin::Present => return Put::Present,
            Begin::NoSpace => return Put::NoSpace,
            Begin::ReadOnly => return Put::ReadOnly,
            Begin::Busy => return Put::Busy,
            Begin::Wait if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            Begin::Wait => return Put::Failed("no room within ten seconds".into()),
        }
    };
    let pool = SlotPool::new(8, store.fragment_bytes()).unwrap();
    let (tx, rx) = channel();
    let mut sums = Vec::new();
    let mut outstanding = 0;
    let mut failed = None;
    for (i, piece) in data.chunks(store.fragment_bytes()).enumerate() {
        let mut buf = loop {
            match pool.try_take() {
                Some(buf) => break buf,
                None => {
                    let outcome: std::io::Result<()> =
                        rx.recv_timeout(Duration::from_secs(10)).expect("the write ends");
                    failed = failed.or(outcome.err());
                    outstanding -= 1;
                }
            }
        };
        assert_eq!(piece.len(), txn.fragment_len(i as u32));
        buf[..piece.len()].copy_from_slice(piece);
        sums.push(fragment_sums(key.digest(), i as u32, piece));
        let tx = tx.clone();
        txn.write(
            i as u32,
            buf,
            Box::new(move |buf, outcome| {
                drop(buf);
                _ = tx.send(outcome);
            }),
        );
        outstanding += 1;
    }
    for _ in 0..outstanding {
        let outcome = rx.recv_timeout(Duration::from_secs(10)).expect("the write ends");
        failed = failed.or(outcome.err());
    }
    if let Some(error) = failed {
        return Put::Failed(error.to_string());
    }
    let (tx, rx) = channel::<Result<(), Error>>();
    txn.commit(sums, Box::new(move |outcome| _ = tx.send(outcome)));
    match rx.recv_timeout(Duration::from_secs(10)).expect("the commit is answered") {
        Ok(()) => Put::Stored,
        Err(error) => Put::Failed(error.to_string()),
    }
}

#[derive(PartialEq, Eq)]
pub enum Get {
    Data(Vec<u8>),
    Absent,
    /// The drive refused, or the checksum did not match: the object was discarded.
    Discarded,
}

impl std::fmt::Debug for Get {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Get::Data(data) => write!(f, "{} bytes {:02x?}...", data.len(), &data[..data.len().min(16)]),
            Get::Absent => f.write_str("absent"),
            Get::Discarded => f.write_str("discarded"),
        }
    }
}

/// Loads and verifies an object, as the connector does.
pub fn get(store: &Store, key: &ObjectKey) -> Get {
    let Some(lease) = store.lease(key) else {
        return Get::Absent;
    };
    let pool = SlotPool::new(1, store.fragment_bytes()).unwrap();
    let mut data = Vec::with_capacity(lease.size() as usize);
    for i in 0..lease.fragments() {
        let (tx, rx) = channel();
        lease.read(i, pool.try_take().unwrap(), Box::new(move |buf, outcome| _ = tx.send((buf, outcome))));
        let (buf, outcome) = rx.recv_timeout(Duration::from_secs(10)).expect("the read ends");
        let piece = &buf[..lease.fragment_len(i)];
        if outcome.is_err() || fragment_sums(key.digest(), i, piece) != lease.sums(i) {
            store.discard(&lease);
            return Get::Discarded;
        }
        data.extend_from_slice(piece);
    }
    Get::Data(data)
}

/// Removes an object; true when there was one.
pub fn remove(store: &Store, key: &ObjectKey) -> Result<bool, String> {
    let (tx, rx) = channel();
    store.remove(key, Box::new(move |outcome| _ = tx.send(outcome)));
    rx.recv_timeout(Duration::from_secs(10)).expect("the removal is answered").map_err(|e| e.to_string())
}

/// Waits until `done` holds.
pub fn await_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Slots that all live objects take, from their own sizes.
pub fn slots_of(sizes: impl IntoIterator<Item = u64>, fragment_bytes: u64) -> u64 {
    sizes.into_iter().map(|size| size.div_ceil(fragment_bytes)).sum()
}
