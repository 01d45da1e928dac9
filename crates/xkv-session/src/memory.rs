//! A session's shared memory: header, indices, both queues, slots. A sealed memfd: it has no name that could be left
//! behind or confused, its pages are reserved before anybody uses it, and nobody can shrink it under the other side.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | magic `XKVRING\0` |
//! | 8 | 4 | layout version, 1 |
//! | 12 | 4 | slots |
//! | 16 | 4 | bytes of a slot |
//! | 20 | 4 | entries of each queue |
//! | 24 | 8 | generation of the gateway |
//! | 32 | 4 | not 0: the gateway has let go of the session's leases, or is about to |
//! | 4096 | 4 each, 128 apart | submission tail, head, waiting; completion tail, head, waiting |
//! | 8192 | 64 x entries | submission entries |
//! | | 64 x entries | completion entries |
//! | next page | slots x slot bytes | slots |

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use xkv_store::{SlotBuf, SlotHome, SlotPool};

use crate::queue::{ENTRY_WORDS, QueueMemory};

const MAGIC: [u8; 8] = *b"XKVRING\0";
const LAYOUT: u32 = 1;
const PAGE: u64 = 4096;
const OVER: u64 = 32;
const INDICES: u64 = PAGE;
const LINE: u64 = 128;
const ENTRIES: u64 = 2 * PAGE;
/// File system type of a memfd of plain pages (`TMPFS_MAGIC` of `linux/magic.h`).
const TMPFS: rustix::fs::FsWord = 0x0102_1994;
const ENTRY_BYTES: u64 = ENTRY_WORDS as u64 * 8;
/// Largest number of slots of a session.
pub const MAX_SLOTS: u32 = 1 << 16;
/// Largest slot, bytes.
pub const MAX_SLOT_BYTES: u32 = 16 << 20;

/// Sizes of a session's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of slots.
    pub slots: u32,
    /// Bytes of a slot, a multiple of 4,096.
    pub slot_bytes: u32,
    /// Entries of each queue, a power of two.
    pub entries: u32,
}

impl Geometry {
    /// For so many slots: queues with room for twice as many requests, and some for those without a slot.
    pub fn new(slots: u32, slot_bytes: u32) -> Self {
        Self { slots, slot_bytes, entries: (2 * slots).max(256).next_power_of_two() }
    }

    fn valid(&self) -> bool {
        (1..=MAX_SLOTS).contains(&self.slots)
            && (1..=MAX_SLOT_BYTES).contains(&self.slot_bytes)
            && u64::from(self.slot_bytes).is_multiple_of(PAGE)
            && self.entries.is_power_of_two()
            && (256..=4 * MAX_SLOTS).contains(&self.entries)
    }

    fn slots_offset(&self) -> u64 {
        (ENTRIES + 2 * ENTRY_BYTES * u64::from(self.entries)).next_multiple_of(PAGE)
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.slots_offset() + u64::from(self.slots) * u64::from(self.slot_bytes)
    }
}

/// The mapped memory of a session.
pub struct RingMemory {
    base: NonNull<u8>,
    geometry: Geometry,
    generation: u64,
    /// Whether the slots were handed out, to a pool or a table.
    handed_out: AtomicBool,
}

// SAFETY: the words are atomics; the slots are handed out one holder at a time by `SlotPool` and `SlotTable`.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `map`; queues and slots hold an `Arc` to this value, so none is
        // left.
        unsafe {
            _ = rustix::mm::munmap(self.base.as_ptr().cast(), self.geometry.bytes() as usize);
        }
    }
}

impl RingMemory {
    /// Makes the memory of a new session, every page reserved, and the descriptor to hand to the client.
    ///
    /// # Errors
    /// The system has not enough memory; the text names the bytes needed.
    pub fn create(geometry: Geometry, generation: u64) -> io::Result<(Arc<Self>, OwnedFd)> {
        assert!(geometry.valid(), "{geometry:?}");
        let bytes = geometry.bytes();
        let needed = |error: rustix::io::Errno| {
            let text = format!(
                "{} slots of {} bytes need {bytes} bytes of shared memory: {error}; lower batch_slots",
                geometry.slots, geometry.slot_bytes
            );
            io::Error::new(io::Error::from(error).kind(), text)
        };
        let fd = rustix::fs::memfd_create("xkv-session", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, bytes).map_err(needed)?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes).map_err(needed)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = Self::map(&fd, geometry, generation)?;
        memory.put(0, &MAGIC);
        for (offset, value) in
            [(8, LAYOUT), (12, geometry.slots), (16, geometry.slot_bytes), (20, geometry.entries)]
        {
            memory.put(offset, &value.to_le_bytes());
        }
        memory.put(24, &generation.to_le_bytes());
        Ok((Arc::new(memory), fd))
    }

    /// Maps the memory that a gateway handed over, after checking everything about it.
    ///
    /// # Errors
    /// `InvalidData` when it is not what it must be.
    pub fn attach(fd: impl AsFd, expected: Geometry, generation: u64) -> io::Result<Arc<Self>> {
        let wrong =
            |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("the session's memory: {what}"));
        if !expected.valid() {
            return Err(wrong("impossible sizes"));
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| wrong("not a memfd"))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(wrong("not sealed"));
        }
        // Sealed huge pages can still be given back under us; those of a plain memfd come back as zeros.
        if rustix::fs::fstatfs(&fd)?.f_type != TMPFS {
            return Err(wrong("not plain memory"));
        }
        let stat = rustix::fs::fstat(&fd)?;
        if stat.st_size as u64 != expected.bytes() {
            return Err(wrong("unexpected size"));
        }
        if (stat.st_blocks as u64) * 512 < expected.bytes() {
            return Err(wrong("its pages are not reserved"));
        }
        let memory = Self::map(&fd, expected, generation)?;
        let mut header = [0; 32];
        memory.get(0, &mut header);
        let field = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        if header[..8] != MAGIC || field(8) != LAYOUT {
            return Err(wrong("unknown layout"));
        }
        if (field(12), field(16), field(20)) != (expected.slots, expected.slot_bytes, expected.entries)
            || header[24..32] != generation.to_le_bytes()
        {
            return Err(wrong("of another session"));
        }
        Ok(Arc::new(memory))
    }

    fn map(fd: impl AsFd, geometry: Geometry, generation: u64) -> io::Result<Self> {
        let bytes = geometry.bytes() as usize;
        // SAFETY: a new shared mapping at an address of the kernel's choice touches nothing of ours; the file is
        // sealed against shrinking, so no access to it can fault.
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0)?
        };
        // SAFETY: the range is the mapping made above.
        unsafe {
            _ = rustix::mm::madvise(base, bytes, Advice::LinuxDontFork);
        }
        Ok(Self {
            base: NonNull::new(base.cast()).expect("mmap never returns null here"),
            geometry,
            generation,
            handed_out: AtomicBool::new(false),
        })
    }

    /// Sizes.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Generation of the gateway that made it.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Tells the client that its leases count no more; before they end.
    pub fn set_over(&self) {
        self.word32(OVER).store(1, Ordering::SeqCst);
    }

    /// Whether leases of the session may have ended.
    pub fn is_over(&self) -> bool {
        self.word32(OVER).load(Ordering::SeqCst) != 0
    }

    /// Requests, client to gateway.
    pub fn submissions(self: &Arc<Self>) -> SharedQueue {
        SharedQueue { memory: self.clone(), indices: INDICES, entries: ENTRIES }
    }

    /// Replies, gateway to client.
    pub fn completions(self: &Arc<Self>) -> SharedQueue {
        let entries = ENTRIES + ENTRY_BYTES * u64::from(self.geometry.entries);
        SharedQueue { memory: self.clone(), indices: INDICES + 3 * LINE, entries }
    }

    /// The client's slots.
    ///
    /// # Panics
    /// The slots of this mapping were handed out before.
    pub fn pool(self: &Arc<Self>) -> SlotPool {
        self.hand_out();
        let Geometry { slots, slot_bytes, .. } = self.geometry;
        // SAFETY: the mapping reaches to the end of the last slot and lives as long as the box; it is zeroed pages,
        // page-aligned; `hand_out` makes this pool the only way to the slots of this mapping.
        unsafe { SlotPool::over(self.slot(0), slots as usize, slot_bytes as usize, Box::new(self.clone())) }
    }

    fn hand_out(&self) {
        assert!(!self.handed_out.swap(true, Ordering::SeqCst), "a mapping's slots are handed out once");
    }

    fn slot(&self, slot: u32) -> NonNull<u8> {
        assert!(slot < self.geometry.slots);
        let offset = self.geometry.slots_offset() + u64::from(slot) * u64::from(self.geometry.slot_bytes);
        self.at(offset)
    }

    fn at(&self, offset: u64) -> NonNull<u8> {
        assert!(offset < self.geometry.bytes());
        // SAFETY: the offset is inside the mapping.
        unsafe { self.base.add(offset as usize) }
    }

    fn word32(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: `at` checks the range, every word's offset is a multiple of its size (indices are 128 apart from a
        // page's start), and both sides reach the word through atomics alone.
        unsafe { AtomicU32::from_ptr(self.at(offset).as_ptr().cast()) }
    }

    fn word64(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: as in `word32`; entries are 64 bytes from a page's start.
        unsafe { AtomicU64::from_ptr(self.at(offset).as_ptr().cast()) }
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        for (i, chunk) in bytes.chunks(4).enumerate() {
            let value = u32::from_ne_bytes(chunk.try_into().expect("whole words"));
            self.word32(offset + 4 * i as u64).store(value, Ordering::Relaxed);
        }
    }

    fn get(&self, offset: u64, bytes: &mut [u8]) {
        for (i, chunk) in bytes.chunks_mut(4).enumerate() {
            let value = self.word32(offset + 4 * i as u64).load(Ordering::Relaxed);
            chunk.copy_from_slice(&value.to_ne_bytes());
        }
    }
}

/// One of the two queues in a session's memory.
#[derive(Clone)]
pub struct SharedQueue {
    memory: Arc<RingMemory>,
    indices: u64,
    entries: u64,
}

impl QueueMemory for SharedQueue {
    fn tail(&self) -> &AtomicU32 {
        self.memory.word32(self.indices)
    }

    fn head(&self) -> &AtomicU32 {
        self.memory.word32(self.indices + LINE)
    }

    fn waiting(&self) -> &AtomicU32 {
        self.memory.word32(self.indices + 2 * LINE)
    }

    fn capacity(&self) -> u32 {
        self.memory.geometry.entries
    }

    fn word(&self, place: u32, word: usize) -> &AtomicU64 {
        self.memory.word64(self.entries + u64::from(place) * ENTRY_BYTES + word as u64 * 8)
    }

    fn sleep(&self, seen: u32, patience: Duration) {
        let timeout = libc::timespec {
            tv_sec: patience.as_secs() as libc::time_t,
            tv_nsec: patience.subsec_nanos() as libc::c_long,
        };
        // SAFETY: the word is mapped and four-byte aligned, the timeout lives through the call. Not FUTEX_PRIVATE: the
        // waker may be another process. Every outcome (woken, changed, timed out, interrupted) is a return.
        unsafe {
            libc::syscall(libc::SYS_futex, self.tail().as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout);
        }
    }

    fn wake(&self) {
        // SAFETY: as in `sleep`.
        unsafe {
            libc::syscall(libc::SYS_futex, self.tail().as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }
}

/// The gateway's view of a session's slots: which one is in use is the client's to say, that none is used twice at
/// once is checked here.
pub struct SlotTable {
    memory: Arc<RingMemory>,
    busy: Box<[AtomicBool]>,
}

impl SlotTable {
    /// No slot is in use.
    ///
    /// # Panics
    /// The slots of this mapping were handed out before.
    pub fn new(memory: &Arc<RingMemory>) -> Arc<Self> {
        memory.hand_out();
        let busy = (0..memory.geometry.slots).map(|_| AtomicBool::new(false)).collect();
        Arc::new(Self { memory: memory.clone(), busy })
    }

    /// Takes the slot that a request names. None: there is no such slot, or a request in flight has it.
    pub fn take(self: &Arc<Self>, slot: u32) -> Option<SlotBuf> {
        let busy = self.busy.get(slot as usize)?;
        if busy.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: the slot is inside the mapping that `self.memory` keeps; the flag gives it to one holder in this
        // process at a time. The client may write to it all the same: whatever is read from it is copied, then
        // checked.
        Some(unsafe {
            SlotBuf::new(self.clone(), self.memory.slot(slot), self.memory.geometry.slot_bytes as usize, slot)
        })
    }

    /// Slots in use.
    pub fn in_use(&self) -> usize {
        self.busy.iter().filter(|busy| busy.load(Ordering::Relaxed)).count()
    }
}

impl SlotHome for SlotTable {
    fn give_back(&self, slot: u32) {
        self.busy[slot as usize].store(false, Ordering::Release);
    }
}

/// Whether a descriptor is sealed as a session's memory must be (for tests and diagnostics).
pub fn is_sealed(fd: &impl AsRawFd) -> bool {
    // SAFETY: the call reads the flags of a descriptor; a bad one is an error.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    let wanted = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    seals >= 0 && seals & wanted == wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::{Consumer, Producer};

    #[test]
    fn both_sides_see_the_same_and_nobody_can_shrink_it() {
        let geometry = Geometry::new(4, 8192);
        let (ours, fd) = RingMemory::create(geometry, 42).unwrap();
        let theirs = RingMemory::attach(&fd, geometry, 42).unwrap();
        assert!(is_sealed(&fd));
        for bytes in [0, geometry.bytes() - 1, geometry.bytes() + 1] {
            assert!(rustix::fs::ftruncate(&fd, bytes).is_err());
        }
        assert!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).is_err());

        let mut slot = theirs.pool().try_take().unwrap();
        slot.fill(7);
        let seen = SlotTable::new(&ours).take(slot.slot()).unwrap();
        assert!(seen.iter().all(|&b| b == 7));

        let mut producer = Producer::new(theirs.submissions());
        let mut consumer = Consumer::new(ours.submissions());
        assert!(producer.push(&[9; 8]).unwrap());
        producer.publish();
        assert_eq!(consumer.pop().unwrap(), Some([9; 8]));
        assert_eq!(Consumer::new(ours.completions()).pop().unwrap(), None);
    }

    #[test]
    fn memory_of_another_session_is_refused() {
        let geometry = Geometry::new(4, 4096);
        let (_memory, fd) = RingMemory::create(geometry, 1).unwrap();
        assert!(RingMemory::attach(&fd, geometry, 2).is_err());
        assert!(RingMemory::attach(&fd, Geometry::new(5, 4096), 1).is_err());
        assert!(RingMemory::attach(&fd, Geometry { entries: 512, ..geometry }, 1).is_err());
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(geometry.bytes()).unwrap();
        assert!(RingMemory::attach(&plain, geometry, 1).is_err());
    }

    #[test]
    fn a_slot_has_one_holder() {
        let (memory, _fd) = RingMemory::create(Geometry::new(2, 4096), 1).unwrap();
        let table = SlotTable::new(&memory);
        let held = table.take(1).unwrap();
        assert!(table.take(1).is_none() && table.take(2).is_none() && table.in_use() == 1);
        drop(held);
        assert!(table.take(1).is_some());
    }

    #[test]
    fn hostile_indices_are_errors() {
        let (memory, _fd) = RingMemory::create(Geometry::new(2, 4096), 1).unwrap();
        let queue = memory.submissions();
        for tail in [257, u32::MAX, 1 << 31] {
            queue.tail().store(tail, Ordering::Relaxed);
            assert!(Consumer::new(memory.submissions()).pop().is_err(), "{tail}");
        }
        queue.head().store(5, Ordering::Relaxed);
        assert!(Producer::new(memory.submissions()).push(&[0; 8]).is_err());
    }

    #[test]
    fn a_sleeper_is_woken_by_what_is_published() {
        let (memory, _fd) = RingMemory::create(Geometry::new(2, 4096), 1).unwrap();
        let mut producer = Producer::new(memory.submissions());
        let mut consumer = Consumer::new(memory.submissions());
        let reader = std::thread::spawn(move || {
            let mut sum = 0;
            while sum < 5050 {
                match consumer.pop().unwrap() {
                    Some(entry) => sum += entry[0],
                    // Far longer than the test may take: only a wake-up ends it.
                    None => consumer.wait(Duration::from_secs(100)).unwrap(),
                }
            }
        });
        for i in 1..=100 {
            assert!(producer.push(&[i, 0, 0, 0, 0, 0, 0, 0]).unwrap());
            producer.publish();
        }
        reader.join().unwrap();
    }
}
