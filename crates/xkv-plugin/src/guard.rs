//! The guarded access to a buffer of LMCache's L1 tier.
//!
//! L1 hands the memory to somebody else once an operation was answered. Whoever copies enters the guard, is refused
//! once it was closed, and whoever closes waits for the copies in progress, each of one fragment at most.

use std::ptr::NonNull;

use parking_lot::RwLock;
use xkv_store::Summer;

use crate::copy;
use crate::poison::{STAMP_BYTES, Stamp};

/// A buffer of L1: its address while the guard is open, and its length.
pub struct L1Buffer {
    address: RwLock<Option<Address>>,
    len: usize,
}

struct Address(NonNull<u8>);

// SAFETY: the address is only used under the contract of `L1Buffer::new`, which does not depend on the thread.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl L1Buffer {
    /// Guards `len` bytes at `address`.
    ///
    /// # Safety
    /// Until [`L1Buffer::close`] or [`L1Buffer::fail`] returned (the connector calls one of them before it answers the
    /// operation, and on every buffer before its `close` returns), the bytes are mapped, readable and writable. Others may
    /// read and write them meanwhile: they are only reached through raw pointers.
    pub unsafe fn new(address: NonNull<u8>, len: usize) -> Self {
        Self { address: RwLock::new(Some(Address(address))), len }
    }

    /// Bytes of the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `slot.len()` bytes at `offset` of the buffer into `slot`, through `summer`. False once closed.
    pub(crate) fn gather(&self, offset: usize, slot: &mut [u8], summer: &mut Summer) -> bool {
        let address = self.address.read();
        let Some(start) = &*address else { return false };
        assert!(offset.checked_add(slot.len()).is_some_and(|end| end <= self.len), "outside of the buffer");
        // SAFETY: inside the buffer, checked above; mapped while the guard is open, which the read lock holds up.
        unsafe { copy::gather(start.0.add(offset), slot, summer) };
        true
    }

    /// Copies `slot` to `offset` of the buffer, through `summer`. False once closed.
    pub(crate) fn scatter(&self, offset: usize, slot: &[u8], summer: &mut Summer) -> bool {
        let address = self.address.read();
        let Some(start) = &*address else { return false };
        assert!(offset.checked_add(slot.len()).is_some_and(|end| end <= self.len), "outside of the buffer");
        // SAFETY: as in `gather`.
        unsafe { copy::scatter(slot, start.0.add(offset), summer) };
        true
    }

    /// Whether the buffer starts with `stamp`. False once closed.
    pub(crate) fn carries(&self, stamp: &Stamp) -> bool {
        let address = self.address.read();
        let Some(start) = &*address else { return false };
        let mut head = [0; STAMP_BYTES];
        if self.len < STAMP_BYTES {
            return false;
        }
        // SAFETY: the buffer has that many bytes, mapped while the guard is open.
        unsafe { copy::peek(start.0, &mut head) };
        head == stamp.0
    }

    /// Stamps the buffer as unfilled and closes it.
    pub(crate) fn fail(&self, stamp: &Stamp) {
        let mut address = self.address.write();
        if let Some(start) = address.take()
            && self.len >= STAMP_BYTES
        {
            // SAFETY: the buffer has that many bytes, mapped until this function returns.
            unsafe { copy::poke(&stamp.0, start.0) };
        }
    }

    /// Waits for copies in progress; nobody touches the buffer from here on.
    pub(crate) fn close(&self) {
        *self.address.write() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xkv_store::{Coverage, Digest};

    fn buffer(bytes: &mut [u8]) -> L1Buffer {
        // SAFETY: the tests keep `bytes` alive and unmoved.
        unsafe { L1Buffer::new(NonNull::new(bytes.as_mut_ptr()).unwrap(), bytes.len()) }
    }

    fn summer() -> Summer {
        Summer::new(&Digest([1; 32]), 0, 0, Coverage::None)
    }

    #[test]
    fn nothing_moves_once_closed() {
        let mut memory = vec![7u8; 100];
        let guarded = buffer(&mut memory);
        let mut slot = vec![0; 50];
        assert!(guarded.gather(50, &mut slot, &mut summer()));
        assert_eq!(slot, [7; 50]);
        guarded.close();
        assert!(!guarded.gather(0, &mut slot, &mut summer()));
        assert!(!guarded.scatter(0, &[9; 50], &mut summer()));
        guarded.fail(&Stamp::of_this_process());
        assert_eq!(memory, [7; 100]);
    }

    #[test]
    fn a_failed_buffer_carries_the_stamp_and_small_ones_do_not() {
        let stamp = Stamp::of_this_process();
        for (len, stamped) in [(63, false), (64, true), (200, true)] {
            let mut memory = vec![7u8; len];
            let before = buffer(&mut memory);
            assert!(!before.carries(&stamp));
            before.fail(&stamp);
            assert_eq!(buffer(&mut memory).carries(&stamp), stamped, "{len} bytes");
            assert!(memory[len.min(64)..].iter().all(|&b| b == 7));
        }
    }

    #[test]
    fn closing_waits_for_the_copy_in_progress() {
        let mut memory = vec![7u8; 8];
        let guarded = buffer(&mut memory);
        let entered = guarded.address.read();
        std::thread::scope(|scope| {
            let closer = scope.spawn(|| guarded.close());
            while guarded.address.try_read().is_some() {
                std::thread::yield_now();
            }
            assert!(!closer.is_finished());
            drop(entered);
            closer.join().unwrap();
        });
        assert!(guarded.address.read().is_none());
    }
}
