//! One direction of the ring: a queue of fixed entries between one producer and one consumer in two processes.
//!
//! Generic over its words, so that the same code runs over shared memory and, under loom, over the heap. What the
//! other side writes is hostile: an index that cannot be right is an error, never an access out of bounds. Entries are
//! read once, into a copy.
//!
//! Sleeping: the consumer sets `waiting`, looks at `tail` once more, and sleeps on `tail`; the producer publishes
//! `tail`, then looks at `waiting`. Both do so with a full fence between, so that one of them sees the other.

use std::time::Duration;

use crate::words::{Ordering, Word32, Word64, fence};

/// Words of an entry. Fewer in the model, which looks at every interleaving of them.
pub const ENTRY_WORDS: usize = if cfg!(loom) { 2 } else { 8 };

/// An entry, as its 64 bytes in eight little-endian words.
pub type Entry = [u64; ENTRY_WORDS];

/// The shared words of one queue.
pub trait QueueMemory {
    /// Number of the next entry the producer writes; grows for ever, modulo 2^32.
    fn tail(&self) -> &Word32;
    /// Number of the next entry the consumer reads.
    fn head(&self) -> &Word32;
    /// Not zero while the consumer sleeps or is about to.
    fn waiting(&self) -> &Word32;
    /// Entries; a power of two.
    fn capacity(&self) -> u32;
    /// Word `word` of the entry in place `place`, which is below the capacity.
    fn word(&self, place: u32, word: usize) -> &Word64;
    /// Sleeps while `tail` is `seen`, at most `patience`.
    fn sleep(&self, seen: u32, patience: Duration);
    /// Wakes the sleeper.
    fn wake(&self);
}

/// The other side wrote an index that cannot be right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring is corrupt: {distance} entries between its ends, it has {capacity}")]
pub struct Corrupt {
    distance: u32,
    capacity: u32,
}

/// The producer's end.
pub struct Producer<M> {
    memory: M,
    tail: u32,
}

impl<M: QueueMemory> Producer<M> {
    /// The producing end of an empty queue.
    pub fn new(memory: M) -> Self {
        Self::at(memory, 0)
    }

    /// The producing end of an empty queue whose indices stand at `tail`.
    pub fn at(memory: M, tail: u32) -> Self {
        Self { memory, tail }
    }

    /// Free places now.
    ///
    /// # Errors
    /// The consumer's index cannot be right.
    pub fn room(&self) -> Result<u32, Corrupt> {
        let capacity = self.memory.capacity();
        let distance = self.tail.wrapping_sub(self.memory.head().load(Ordering::Acquire));
        if distance > capacity {
            return Err(Corrupt { distance, capacity });
        }
        Ok(capacity - distance)
    }

    /// Writes an entry; false when the queue is full. Call [`Producer::publish`] after the last of several.
    ///
    /// # Errors
    /// The consumer's index cannot be right.
    pub fn push(&mut self, entry: &Entry) -> Result<bool, Corrupt> {
        if self.room()? == 0 {
            return Ok(false);
        }
        let place = self.tail & (self.memory.capacity() - 1);
        for (i, value) in entry.iter().enumerate() {
            self.memory.word(place, i).store(*value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        Ok(true)
    }

    /// Shows what was pushed to the consumer and wakes it if it sleeps.
    pub fn publish(&self) {
        self.memory.tail().store(self.tail, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.memory.waiting().load(Ordering::Relaxed) != 0 {
            self.memory.wake();
        }
    }
}

/// The consumer's end.
pub struct Consumer<M> {
    memory: M,
    head: u32,
}

impl<M: QueueMemory> Consumer<M> {
    /// The consuming end of an empty queue.
    pub fn new(memory: M) -> Self {
        Self::at(memory, 0)
    }

    /// The consuming end of an empty queue whose indices stand at `head`.
    pub fn at(memory: M, head: u32) -> Self {
        Self { memory, head }
    }

    /// Entries to read now.
    ///
    /// # Errors
    /// The producer's index cannot be right.
    pub fn ready(&self) -> Result<u32, Corrupt> {
        let capacity = self.memory.capacity();
        let distance = self.memory.tail().load(Ordering::Acquire).wrapping_sub(self.head);
        if distance > capacity {
            return Err(Corrupt { distance, capacity });
        }
        Ok(distance)
    }

    /// Takes the next entry.
    ///
    /// # Errors
    /// The producer's index cannot be right.
    pub fn pop(&mut self) -> Result<Option<Entry>, Corrupt> {
        if self.ready()? == 0 {
            return Ok(None);
        }
        let place = self.head & (self.memory.capacity() - 1);
        let entry = std::array::from_fn(|i| self.memory.word(place, i).load(Ordering::Relaxed));
        self.head = self.head.wrapping_add(1);
        self.memory.head().store(self.head, Ordering::Release);
        Ok(Some(entry))
    }

    /// Sleeps until there is something to read, at most `patience`. May return early.
    ///
    /// # Errors
    /// The producer's index cannot be right.
    pub fn wait(&self, patience: Duration) -> Result<(), Corrupt> {
        if self.ready()? > 0 {
            return Ok(());
        }
        self.memory.waiting().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.ready()? == 0 {
            self.memory.sleep(self.head, patience);
        }
        self.memory.waiting().store(0, Ordering::Relaxed);
        Ok(())
    }
}
