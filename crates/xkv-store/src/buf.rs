//! Slots of memory: page-aligned buffers of one fragment each, owned by whoever holds the [`SlotBuf`].
//!
//! A buffer moves into an I/O request and comes back with its completion. Giving up on an operation therefore
//! never frees memory that the kernel still writes to.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::{Receiver, Sender};

use crate::error::{Error, Result};

struct Region {
    base: NonNull<u8>,
    bytes: usize,
    slot_bytes: usize,
    free_tx: Sender<u32>,
    free_rx: Receiver<u32>,
    slots: usize,
    low_water: AtomicUsize,
}

// SAFETY: the region is plain memory; every slot number is in the free channel or in exactly one `SlotBuf`, so no
// two threads reach the same bytes.
unsafe impl Send for Region {}
// SAFETY: as above; the shared fields are themselves `Sync`.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are those of the mapping made in `SlotPool::new`; no `SlotBuf` is left, since
        // each holds an `Arc` to this region.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.bytes);
        }
    }
}

/// A fixed number of slots of equal size.
#[derive(Clone)]
pub struct SlotPool(Arc<Region>);

impl SlotPool {
    /// Maps `slots` buffers of `slot_bytes` each; `slot_bytes` must be a multiple of 4,096. Pages are taken from the
    /// system when first used.
    ///
    /// # Errors
    /// The mapping is refused (out of address space or memory limit).
    pub fn new(slots: usize, slot_bytes: usize) -> Result<Self> {
        assert!(slots > 0 && slot_bytes > 0 && slot_bytes.is_multiple_of(4096));
        let bytes = slots * slot_bytes;
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
            return Err(Error::io(
                format!(
                    "{slots} slots of {slot_bytes} bytes: cannot map {bytes} bytes; lower batch_slots"
                ),
                std::io::Error::last_os_error(),
            ));
        }
        // SAFETY: the range is the mapping made above. A forked child must not share pages that the kernel writes to.
        unsafe {
            libc::madvise(base, bytes, libc::MADV_DONTFORK);
        }
        let (free_tx, free_rx) = crossbeam_channel::bounded(slots);
        for slot in 0..slots as u32 {
            free_tx
                .try_send(slot)
                .expect("the channel holds every slot");
        }
        let base = NonNull::new(base.cast()).expect("mmap never returns null here");
        let low_water = AtomicUsize::new(slots);
        Ok(Self(Arc::new(Region {
            base,
            bytes,
            slot_bytes,
            free_tx,
            free_rx,
            slots,
            low_water,
        })))
    }

    /// A free slot, or none at once.
    pub fn try_take(&self) -> Option<SlotBuf> {
        let slot = self.0.free_rx.try_recv().ok()?;
        self.0
            .low_water
            .fetch_min(self.0.free_rx.len(), Ordering::Relaxed);
        Some(SlotBuf {
            region: self.0.clone(),
            slot,
        })
    }

    /// Free slots now.
    pub fn free(&self) -> usize {
        self.0.free_rx.len()
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

/// One slot, owned. Dropping it gives it back to its pool.
pub struct SlotBuf {
    region: Arc<Region>,
    slot: u32,
}

impl SlotBuf {
    fn start(&self) -> NonNull<u8> {
        // SAFETY: `slot` is below the region's slot count, so the offset stays inside the mapping.
        unsafe {
            self.region
                .base
                .add(self.slot as usize * self.region.slot_bytes)
        }
    }
}

impl Deref for SlotBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot's bytes are mapped, initialised (zero pages), and reachable through this value alone.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.region.slot_bytes) }
    }
}

impl DerefMut for SlotBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.region.slot_bytes) }
    }
}

impl Drop for SlotBuf {
    fn drop(&mut self) {
        self.region
            .free_tx
            .try_send(self.slot)
            .expect("the channel holds every slot");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
