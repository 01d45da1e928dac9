//! A connector on drives of the test's choice, embedded or through a gateway, a client that waits for its answers, and
//! memory that shows whether anybody wrote beside it.
#![allow(dead_code, unused_macros, unused_imports)]

mod rig;
mod witness;

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use rig::Rig;
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::Value;
pub use witness::Witness;
use xkv_plugin::{Backend, Completion, Config, Connector, Embedded, L1Buffer};
use xkv_store::io::device::testing::MemoryDevice;
use xkv_store::io::{Device, EngineKind};
use xkv_store::{Store, StoreConfig};

pub const MIB: u64 = 1 << 20;
pub const FRAGMENT: usize = 4096;

/// Bytes that repeat nowhere: a swapped fragment cannot look right.
pub fn contents(seed: u64, len: usize) -> Vec<u8> {
    let mut state = (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
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

const MARGIN: usize = 64;
const PAGE: usize = 4096;
const MARGIN_BYTE: u8 = 0xA5;

/// Memory of an L1 object between two margins. Like L1's own it may be touched by others at any time, and lives as
/// long as the test.
#[derive(Clone, Copy)]
pub struct Memory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory that is never freed; tests read it only after an answer.
unsafe impl Send for Memory {}

impl Memory {
    /// Not at a page's boundary: no drive reads straight into it.
    pub fn new(data: &[u8]) -> Self {
        let mut memory = Self::at(8, data.len());
        memory.write(data);
        memory
    }

    /// Of `len` bytes from a page's boundary on, as L1's own: a drive may read straight into it.
    pub fn aligned(len: usize) -> Self {
        let mut memory = Self::at(0, len);
        memory.write(&vec![0xEE; len]);
        memory
    }

    /// Of `len` bytes, `beyond` a page's boundary.
    fn at(beyond: usize, len: usize) -> Self {
        let bytes = Box::leak(vec![MARGIN_BYTE; len + 2 * MARGIN + 2 * PAGE].into_boxed_slice());
        let skip =
            (MARGIN..).find(|at| (bytes.as_ptr().addr() + at) % PAGE == beyond).expect("within a page");
        // SAFETY: within the bytes just made.
        Self { start: unsafe { NonNull::from(bytes).cast::<u8>().add(skip - MARGIN) }, len }
    }

    /// Addresses of its bytes.
    pub fn addresses(&self) -> std::ops::Range<usize> {
        let start = self.start.as_ptr().addr() + MARGIN;
        start..start + self.len
    }

    pub fn blank(len: usize) -> Self {
        Self::new(&vec![0xEE; len])
    }

    pub fn buffer(self) -> Option<L1Buffer> {
        // SAFETY: inside the leaked memory, which nothing moves or frees.
        Some(unsafe { L1Buffer::new(self.start.add(MARGIN), self.len) })
    }

    /// What it holds; panics when a margin was written to.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the leaked memory's own length; its operation was answered, so nobody writes any more.
        let all = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len + 2 * MARGIN) };
        let (before, rest) = all.split_at(MARGIN);
        let (bytes, after) = rest.split_at(self.len);
        let margins = before.iter().chain(after);
        assert!(margins.copied().all(|byte| byte == MARGIN_BYTE), "written beside the buffer");
        bytes
    }

    pub fn write(&mut self, data: &[u8]) {
        assert_eq!(data.len(), self.len);
        // SAFETY: inside the leaked memory; nobody else touches it at that moment.
        unsafe { self.start.add(MARGIN).copy_from(NonNull::from(data).cast(), data.len()) };
    }

    pub fn is_stamped(&self) -> bool {
        self.bytes().starts_with(b"xkv:unfilled-L1\0")
    }
}

pub fn memory_drives(drives: usize, bytes: u64) -> Vec<Arc<dyn Device>> {
    (0..drives).map(|i| MemoryDevice::named(&format!("drive {i}"), bytes) as Arc<dyn Device>).collect()
}

pub fn store_config() -> StoreConfig {
    StoreConfig { fragment_bytes: Some(FRAGMENT as u32), engine: EngineKind::Pool, ..StoreConfig::default() }
}

pub fn config() -> Config {
    Config { copy_threads: Some(2), ..Config::default() }
}

/// Where the store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    Embedded,
    Gateway,
}

/// Runs tests that take a [`Via`] once with each.
macro_rules! both_ways {
    ($($name:ident,)*) => {
        mod embedded {
            $(#[test] fn $name() { super::$name(crate::common::Via::Embedded); })*
        }
        mod gateway {
            $(#[test] fn $name() { super::$name(crate::common::Via::Gateway); })*
        }
    };
}
pub(crate) use both_ways;

/// A connector and the answers that were drained but not asked for yet.
pub struct Client {
    pub connector: Connector,
    answers: HashMap<u64, Completion>,
    /// The gateway of its own, if it has one; dropped after the connector.
    pub rig: Option<Rig>,
}

impl Client {
    pub fn on(via: Via, drives: &[Arc<dyn Device>], slots: usize, config: Config) -> Self {
        if via == Via::Gateway {
            let rig = Rig::on(drives);
            let mut client = Self::of(&rig, slots, config);
            client.rig = Some(rig);
            return client;
        }
        let store = Store::open_on(drives.to_vec(), &store_config()).expect("the store opens");
        let backend = Embedded::on(store, slots).expect("slots can be had");
        Self::over(Arc::new(backend), config)
    }

    /// One of several clients of a gateway.
    pub fn of(rig: &Rig, slots: usize, config: Config) -> Self {
        let backend = rig.backend(slots as u32, &config).expect("the gateway accepts");
        Self::over(Arc::new(backend), config)
    }

    pub fn over(backend: Arc<dyn Backend>, config: Config) -> Self {
        let connector = Connector::new(backend, config).expect("threads can be had");
        Self { connector, answers: HashMap::new(), rig: None }
    }

    pub fn set(&self, keys: &[&str], memory: &[Memory]) -> u64 {
        let buffers = memory.iter().map(|memory| memory.buffer()).collect();
        self.connector.submit_set(encoded(keys), buffers, Box::new(()))
    }

    pub fn get(&self, keys: &[&str], memory: &[Memory]) -> u64 {
        let buffers = memory.iter().map(|memory| memory.buffer()).collect();
        self.connector.submit_get(encoded(keys), buffers, Box::new(()))
    }

    pub fn exists(&self, keys: &[&str]) -> u64 {
        self.connector.submit_exists(encoded(keys))
    }

    pub fn delete(&self, keys: &[&str]) -> u64 {
        self.connector.submit_delete(encoded(keys))
    }

    /// The answers that are there and were not asked for.
    pub fn drained(&mut self) -> Vec<Completion> {
        self.take();
        self.answers.drain().map(|(_, answer)| answer).collect()
    }

    fn take(&mut self) {
        for answer in self.connector.drain() {
            let id = answer.id;
            assert!(self.answers.insert(id, answer).is_none(), "{id} was answered twice");
        }
    }

    /// The answer of `id`, awaited on the event descriptor for up to `patience`.
    pub fn answer_within(&mut self, id: u64, patience: Duration) -> Option<Completion> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(answer) = self.answers.remove(&id) {
                return Some(answer);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let left = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            // SAFETY: the connector keeps the descriptor open.
            let event = unsafe { std::os::fd::BorrowedFd::borrow_raw(self.connector.event_fd()) };
            let mut waited = [PollFd::new(&event, PollFlags::IN)];
            if poll(&mut waited, Some(&left)).expect("poll works") == 0 {
                return None;
            }
            self.take();
        }
    }

    pub fn answer(&mut self, id: u64) -> Completion {
        self.answer_within(id, Duration::from_secs(60))
            .unwrap_or_else(|| panic!("{id} was not answered; {}", self.connector.stats()))
    }

    pub fn results(&mut self, id: u64) -> Vec<bool> {
        self.answer(id).results.expect("answers by key")
    }

    pub fn ok(&mut self, id: u64) -> bool {
        self.answer(id).ok
    }

    /// Stores `contents(seed, len)` under `name`.
    pub fn put(&mut self, name: &str, seed: u64, len: usize) -> bool {
        let id = self.set(&[name], &[Memory::new(&contents(seed, len))]);
        self.ok(id)
    }

    /// What is stored under `name`, when it loads into `len` bytes.
    pub fn load(&mut self, name: &str, len: usize) -> Option<Vec<u8>> {
        let memory = Memory::blank(len);
        let id = self.get(&[name], &[memory]);
        let loaded = self.results(id) == [true];
        assert_eq!(memory.is_stamped(), !loaded && len >= 64, "stamped when and only when missed");
        loaded.then(|| memory.bytes().to_vec())
    }

    pub fn present(&mut self, keys: &[&str]) -> Vec<bool> {
        let id = self.exists(keys);
        self.results(id)
    }

    pub fn count(&self, name: &str) -> u64 {
        self.connector.stats()[name].as_u64().unwrap_or_else(|| panic!("{name} is counted"))
    }

    pub fn store_stats(&self) -> Value {
        match &self.rig {
            Some(rig) => rig.status(),
            None => self.connector.stats()["store"].clone(),
        }
    }

    /// Whether `key` is present, once a gateway had the time to look at what it was told is damaged.
    pub fn present_in_the_end(&mut self, key: &str, present: bool) -> bool {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.rig.is_some() && self.present(&[key]) != [present] && Instant::now() < deadline {
            std::thread::yield_now();
        }
        self.present(&[key]) == [present]
    }
}

fn encoded(keys: &[&str]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.as_bytes().to_vec()).collect()
}
