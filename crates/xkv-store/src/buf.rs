//! Slots of memory: page-aligned buffers of one fragment each, owned by whoever holds the [`SlotBuf`].
//!
//! A buffer moves into an I/O request and comes back with its completion. Giving up on an operation therefore
//! never frees memory that the kernel still writes to. Memory of somebody else is [`Lent`] for one transfer.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// Where a slot goes when its holder lets go of it. Keeps the slot's memory mapped.
pub trait SlotHome: Send + Sync + 'static {
    /// Takes slot number `slot` back.
    fn give_back(&self, slot: u32);
}

/// One slot, owned. Dropping it gives it back to where it came from.
pub struct SlotBuf {
    home: Arc<dyn SlotHome>,
    start: NonNull<u8>,
    len: usize,
    slot: u32,
}

// SAFETY: a `SlotBuf` is the only way to its bytes (see `SlotBuf::new`), like a `Box<[u8]>`.
unsafe impl Send for SlotBuf {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for SlotBuf {}

impl SlotBuf {
    /// Hands slot number `slot` out: `len` bytes from `start`.
    ///
    /// # Safety
    /// The bytes must be mapped and initialised for as long as `home` lives, and nothing else in this process may
    /// reach them until `home` got the slot back.
    pub unsafe fn new(home: Arc<dyn SlotHome>, start: NonNull<u8>, len: usize, slot: u32) -> Self {
        Self { home, start, len, slot }
    }

    /// The slot's number.
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

impl Deref for SlotBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the contract of `SlotBuf::new`: mapped, initialised, reachable through this value alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for SlotBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for SlotBuf {
    fn drop(&mut self) {
        self.home.give_back(self.slot);
    }
}

/// How memory lies: pieces of `piece` bytes, their starts `stride` bytes apart, `len` bytes in all; the last piece may be
/// shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of all pieces.
    pub len: usize,
    /// Bytes of a piece.
    pub piece: usize,
    /// From the start of a piece to that of the next, at least `piece`.
    pub stride: usize,
}

impl Shape {
    /// `len` bytes in one piece.
    pub fn whole(len: usize) -> Self {
        Self { len, piece: len, stride: len }
    }

    /// Where the byte at `position` of the transfer lies from the start of the memory, and how many follow it there.
    fn at(&self, position: usize) -> (usize, usize) {
        if self.stride == self.piece {
            return (position, self.len - position);
        }
        let (number, within) = (position / self.piece, position % self.piece);
        (number * self.stride + within, (self.piece - within).min(self.len - position))
    }

    /// Bytes from the start of the memory to the end of its last piece.
    pub fn span(&self) -> usize {
        self.len.checked_sub(1).map_or(0, |last| self.at(last).0 + 1)
    }
}

/// Memory of somebody else that a transfer may go to, as long as its owner does not take it back.
///
/// # Safety
/// From [`Lender::enter`] until the matching [`Lender::leave`], the bytes of [`Lender::shape`] from the address on are mapped;
/// for a read from a device they are writable and nobody else uses them, for a write to one nobody else writes them.
pub unsafe trait Lender: Send + Sync + 'static {
    /// Called when the transfer is given to the device. None when the owner has taken the memory back.
    fn enter(&self) -> Option<NonNull<u8>>;
    /// Called when the device is done with it.
    fn leave(&self);
    /// Which bytes, from the address on; the same at every call.
    fn shape(&self) -> Shape;
}

/// Told how many more bytes of a transfer, from its start on, were read or are about to be written.
pub type Watch = Box<dyn FnMut(usize) + Send>;

/// Memory that is lent for one transfer.
pub struct Lent {
    lender: Box<dyn Lender>,
    watch: Option<Watch>,
    shape: Shape,
    start: Option<NonNull<u8>>,
}

// SAFETY: the address is only used between `enter` and `leave`, under the contract of `Lender`, on one thread at a time.
unsafe impl Send for Lent {}

impl Lent {
    /// Memory of `lender`.
    pub fn new(lender: Box<dyn Lender>) -> Self {
        Self { shape: lender.shape(), lender, watch: None, start: None }
    }

    /// Has `watch` told of every piece, of whole blocks, while the CPU's caches have it. Some engines do so
    /// ([`crate::io::IoEngine::watches`]), the others do not.
    pub fn watched(mut self, watch: Watch) -> Self {
        self.watch = Some(watch);
        self
    }

    pub(crate) fn take_watch(&mut self) -> Option<Watch> {
        self.watch.take()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.shape.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Holds the memory until this value is dropped. False when its owner has taken it back.
    pub(crate) fn enter(&mut self) -> bool {
        if self.start.is_none() {
            self.start = self.lender.enter();
        }
        self.start.is_some()
    }

    /// The bytes from `position` of the transfer to the end of their piece; they must have been entered.
    pub(crate) fn piece(&mut self, position: usize) -> &mut [u8] {
        let start = self.start.expect("entered before its bytes are used");
        assert!(position < self.shape.len, "outside of the memory that was lent");
        let (offset, len) = self.shape.at(position);
        // SAFETY: entered and not left, so the contract of `Lender` holds, and the bytes are of its shape; `&mut self`
        // makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(start.add(offset).as_ptr(), len) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.start.is_some() {
            self.lender.leave();
        }
    }
}

/// Anonymous memory of this process.
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory; who may touch which part of it is the pool's business.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> std::io::Result<Self> {
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the range is the mapping made above. A forked child must not share pages that the kernel writes to.
        // Huge pages, where the system has some, spare most of the address translations of copies.
        unsafe {
            libc::madvise(base, bytes, libc::MADV_DONTFORK);
            libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
        }
        Ok(Self { base: NonNull::new(base.cast()).expect("mmap never returns null here"), bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are those of the mapping; whoever used it holds it no longer.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.bytes);
        }
    }
}

struct Free {
    /// The last one given back is taken first: the CPU's caches may still have it.
    free: Mutex<Vec<u32>>,
    low_water: AtomicUsize,
    slots: usize,
    slot_bytes: usize,
    base: NonNull<u8>,
    /// Unmapped after the last slot.
    _memory: Box<dyn Send + Sync>,
}

// SAFETY: every slot number is in the list or in exactly one `SlotBuf`, so no two threads reach the same bytes
// through this value; the rest is `Sync` itself.
unsafe impl Send for Free {}
// SAFETY: as above.
unsafe impl Sync for Free {}

impl SlotHome for Free {
    fn give_back(&self, slot: u32) {
        self.free.lock().push(slot);
    }
}

/// A fixed number of slots of equal size.
#[derive(Clone)]
pub struct SlotPool(Arc<Free>);

impl SlotPool {
    /// Maps `slots` buffers of `slot_bytes` each; `slot_bytes` must be a multiple of 4,096. Pages are taken from the
    /// system when first used.
    ///
    /// # Errors
    /// The mapping is refused (out of address space or memory limit).
    pub fn new(slots: usize, slot_bytes: usize) -> Result<Self> {
        let bytes = slots * slot_bytes;
        let mapping = Mapping::new(bytes).map_err(|error| {
            let text =
                format!("{slots} slots of {slot_bytes} bytes: cannot map {bytes} bytes; lower batch_slots");
            Error::io(text, error)
        })?;
        let base = mapping.base;
        // SAFETY: the mapping has `slots * slot_bytes` bytes, is zeroed, page-aligned, and known to this pool alone.
        Ok(unsafe { Self::over(base, slots, slot_bytes, Box::new(mapping)) })
    }

    /// A pool over memory that `memory` keeps mapped.
    ///
    /// # Safety
    /// `slots * slot_bytes` bytes from `base` must be mapped and initialised for as long as `memory` lives, `base`
    /// aligned to 4,096, and nothing else in this process may reach them.
    pub unsafe fn over(
        base: NonNull<u8>,
        slots: usize,
        slot_bytes: usize,
        memory: Box<dyn Send + Sync>,
    ) -> Self {
        assert!(slots > 0 && slot_bytes > 0 && slot_bytes.is_multiple_of(4096));
        let free = Mutex::new((0..slots as u32).rev().collect());
        let low_water = AtomicUsize::new(slots);
        Self(Arc::new(Free { free, low_water, slots, slot_bytes, base, _memory: memory }))
    }

    /// A free slot, or none at once.
    pub fn try_take(&self) -> Option<SlotBuf> {
        let slot = {
            let mut free = self.0.free.lock();
            let slot = free.pop()?;
            self.0.low_water.fetch_min(free.len(), Ordering::Relaxed);
            slot
        };
        // SAFETY: `slot` is below the pool's count, so the offset stays inside the memory, which `self.0` keeps; the
        // number came out of the list and goes back when the `SlotBuf` drops.
        unsafe {
            let start = self.0.base.add(slot as usize * self.0.slot_bytes);
            Some(SlotBuf::new(self.0.clone(), start, self.0.slot_bytes, slot))
        }
    }

    /// Free slots now.
    pub fn free(&self) -> usize {
        self.0.free.lock().len()
    }

    /// Slots in all.
    pub fn slots(&self) -> usize {
        self.0.slots
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.0.slot_bytes
    }

    /// Fewest free slots seen so far.
    pub fn low_water(&self) -> usize {
        self.0.low_water.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_finds_every_byte() {
        let whole = Shape::whole(100);
        assert_eq!((whole.at(0), whole.at(99), whole.span()), ((0, 100), (99, 1), 100));
        let pieces = Shape { len: 25, piece: 10, stride: 40 };
        assert_eq!(
            (pieces.at(0), pieces.at(9), pieces.at(13), pieces.at(20)),
            ((0, 10), (9, 1), (43, 7), (80, 5))
        );
        assert_eq!(pieces.span(), 85);
        let together = Shape { len: 25, piece: 10, stride: 10 };
        assert_eq!((together.at(13), together.span()), ((13, 12), 25));
    }

    #[test]
    fn slots_are_aligned_apart_and_come_back() {
        let pool = SlotPool::new(3, 8192).unwrap();
        let mut held: Vec<SlotBuf> = (0..3).map(|_| pool.try_take().unwrap()).collect();
        assert!(pool.try_take().is_none());
        for (i, slot) in held.iter_mut().enumerate() {
            assert_eq!(slot.as_ptr() as usize % 4096, 0);
            slot.fill(i as u8 + 1);
        }
        for (i, slot) in held.iter().enumerate() {
            assert!(slot.iter().all(|&b| b == i as u8 + 1));
        }
        held.remove(1);
        assert_eq!(pool.free(), 1);
        drop(held);
        assert_eq!((pool.free(), pool.low_water()), (3, 0));
    }
}
