//! The queue under loom: every interleaving, and every value that the memory model allows a load to see, of one
//! producer and one consumer over heap words. Entries must arrive whole, once, in order; a sleeper must be woken, or
//! loom reports the deadlock. Run by `scripts/loom`.
#![cfg(loom)]

use std::time::Duration;

use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use xkv_session::queue::{Consumer, ENTRY_WORDS, Entry, Producer, QueueMemory};

const CAPACITY: u32 = 2;
/// Where the indices start: they wrap within the model.
const START: u32 = u32::MAX;

struct Words {
    tail: AtomicU32,
    head: AtomicU32,
    waiting: AtomicU32,
    entries: Vec<[AtomicU64; ENTRY_WORDS]>,
    /// The kernel's side of a futex: it looks at the word under the lock that a wake-up takes too.
    futex: Mutex<()>,
    woken: Condvar,
}

#[derive(Clone)]
struct Heap(Arc<Words>);

impl Heap {
    fn new() -> Self {
        Self(Arc::new(Words {
            tail: AtomicU32::new(START),
            head: AtomicU32::new(START),
            waiting: AtomicU32::new(0),
            entries: (0..CAPACITY).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect(),
            futex: Mutex::new(()),
            woken: Condvar::new(),
        }))
    }
}

impl QueueMemory for Heap {
    fn tail(&self) -> &AtomicU32 {
        &self.0.tail
    }

    fn head(&self) -> &AtomicU32 {
        &self.0.head
    }

    fn waiting(&self) -> &AtomicU32 {
        &self.0.waiting
    }

    fn capacity(&self) -> u32 {
        CAPACITY
    }

    fn word(&self, place: u32, word: usize) -> &AtomicU64 {
        &self.0.entries[place as usize][word]
    }

    /// Sleeps without a limit: what the real queue would only notice after its patience hangs here.
    fn sleep(&self, seen: u32, _patience: Duration) {
        let futex = self.0.futex.lock().unwrap();
        if self.0.tail.load(Ordering::Relaxed) == seen {
            drop(self.0.woken.wait(futex).unwrap());
        }
    }

    fn wake(&self) {
        let _futex = self.0.futex.lock().unwrap();
        self.0.woken.notify_all();
    }
}

/// Entry number `n`: its words belong together and to no other entry.
fn entry(n: u64) -> Entry {
    std::array::from_fn(|word| 10 * (n + 1) + word as u64)
}

/// Takes `count` entries, asleep in between, and checks them.
fn take(memory: Heap, count: u64) {
    let mut consumer = Consumer::at(memory, START);
    for n in 0..count {
        loop {
            match consumer.pop().unwrap() {
                Some(found) => break assert_eq!(found, entry(n)),
                None => consumer.wait(Duration::MAX).unwrap(),
            }
        }
    }
    assert_eq!(consumer.pop().unwrap(), None, "nothing comes twice");
}

/// More entries than places: places are used again, each only after it was read. All interleavings would take hours;
/// those with at most three preemptions are what bugs need.
#[test]
fn entries_arrive_whole_once_and_in_order() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let memory = Heap::new();
        let mut producer = Producer::at(memory.clone(), START);
        let consumer = thread::spawn(move || take(memory, 3));
        for n in 0..3 {
            while !producer.push(&entry(n)).unwrap() {
                thread::yield_now();
            }
            producer.publish();
        }
        consumer.join().unwrap();
    });
}

/// Several entries shown at once wake the sleeper too.
#[test]
fn a_sleeper_misses_no_wake_up() {
    loom::model(|| {
        let memory = Heap::new();
        let mut producer = Producer::at(memory.clone(), START);
        let consumer = thread::spawn(move || take(memory, 2));
        assert!(producer.push(&entry(0)).unwrap() && producer.push(&entry(1)).unwrap());
        producer.publish();
        consumer.join().unwrap();
    });
}

/// What the producer sees as room is room: it never writes over an entry that was not read.
#[test]
fn room_is_never_more_than_there_is() {
    loom::model(|| {
        let memory = Heap::new();
        let mut producer = Producer::at(memory.clone(), START);
        for n in 0..2 {
            assert!(producer.push(&entry(n)).unwrap());
        }
        producer.publish();
        let watched = memory.clone();
        let consumer = thread::spawn(move || take(watched, 2));
        let room = producer.room().unwrap();
        let taken = memory.head().load(Ordering::Acquire).wrapping_sub(START);
        assert!(room <= taken && taken <= CAPACITY);
        consumer.join().unwrap();
    });
}
