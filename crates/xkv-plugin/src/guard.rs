//! The guarded access to a buffer of LMCache's L1 tier.
//!
//! L1 hands the memory to somebody else once an operation was answered. Whoever copies enters the guard, is refused
//! once it was closed, and whoever closes waits for the copies in progress, each of one fragment at most.
//!
//! A drive that reads straight into the buffer cannot be waited for like that: it may take for ever, and nothing takes
//! the memory from it. While it has some, closing is put off; nobody enters any more, and whoever wants to close comes
//! back when the drive has let go.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;
use xkv_store::{Lender, Shape, Summer};

use crate::copy;
use crate::poison::{STAMP_BYTES, Stamp};

/// A buffer of L1: its address while the guard is open, and its length.
pub struct L1Buffer {
    address: RwLock<Access>,
    /// Fragments that a drive reads straight into the buffer, or writes from it, at the moment.
    lent: AtomicUsize,
    len: usize,
}

enum Access {
    Open(Address),
    /// To be closed as soon as nothing is lent.
    Ending(Address),
    Closed,
}

#[derive(Clone, Copy)]
struct Address(NonNull<u8>);

/// Where reads straight into memory may start.
const ALIGNMENT: usize = 4096;

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
        Self { address: RwLock::new(Access::Open(Address(address))), lent: AtomicUsize::new(0), len }
    }

    /// Whether a drive may read straight into it, as far as the address goes. False once closed.
    pub(crate) fn is_aligned(&self) -> bool {
        let address = self.address.read();
        matches!(&*address, Access::Open(start) if start.0.as_ptr().addr().is_multiple_of(ALIGNMENT))
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
        let Access::Open(start) = &*address else { return false };
        assert!(offset.checked_add(slot.len()).is_some_and(|end| end <= self.len), "outside of the buffer");
        // SAFETY: inside the buffer, checked above; mapped while the guard is open, which the read lock holds up.
        unsafe { copy::gather(start.0.add(offset), slot, summer) };
        true
    }

    /// Copies `slot` to `offset` of the buffer, through `summer`. False once closed.
    pub(crate) fn scatter(&self, offset: usize, slot: &[u8], summer: &mut Summer) -> bool {
        let address = self.address.read();
        let Access::Open(start) = &*address else { return false };
        assert!(offset.checked_add(slot.len()).is_some_and(|end| end <= self.len), "outside of the buffer");
        // SAFETY: as in `gather`.
        unsafe { copy::scatter(slot, start.0.add(offset), summer) };
        true
    }

    /// Takes `len` bytes at `offset`, read straight into the buffer, through `summer`. False once closed.
    pub(crate) fn sum(&self, offset: usize, len: usize, summer: &mut Summer) -> bool {
        let address = self.address.read();
        let Access::Open(start) = &*address else { return false };
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside of the buffer");
        // SAFETY: as in `gather`.
        unsafe { copy::sum(start.0.add(offset), len, summer) };
        true
    }

    /// Whether the buffer starts with `stamp`. False once closed.
    pub(crate) fn carries(&self, stamp: &Stamp) -> bool {
        let address = self.address.read();
        let Access::Open(start) = &*address else { return false };
        let mut head = [0; STAMP_BYTES];
        if self.len < STAMP_BYTES {
            return false;
        }
        // SAFETY: the buffer has that many bytes, mapped while the guard is open.
        unsafe { copy::peek(start.0, &mut head) };
        head == stamp.0
    }

    /// Stamps the buffer as unfilled and closes it. False when a drive has some of it: nobody enters any more, and the
    /// call has to be made again when the drive has let go.
    #[must_use]
    pub(crate) fn fail(&self, stamp: &Stamp) -> bool {
        self.end(|start| {
            if self.len >= STAMP_BYTES {
                // SAFETY: the buffer has that many bytes, mapped until it is closed.
                unsafe { copy::poke(&stamp.0, start) };
            }
        })
    }

    /// Waits for copies in progress; nobody touches the buffer from here on. False as in [`L1Buffer::fail`].
    pub(crate) fn close(&self) -> bool {
        self.end(|_| ())
    }

    fn end(&self, last: impl FnOnce(NonNull<u8>)) -> bool {
        let mut address = self.address.write();
        let start = match &*address {
            Access::Open(start) | Access::Ending(start) => *start,
            Access::Closed => return true,
        };
        // Nobody enters meanwhile: that takes the lock.
        if self.lent.load(Ordering::Acquire) > 0 {
            *address = Access::Ending(start);
            return false;
        }
        last(start.0);
        *address = Access::Closed;
        true
    }
}

/// A part of a buffer, lent to a drive.
pub(crate) struct LentPart {
    pub buffer: Arc<L1Buffer>,
    /// Of the part in the buffer, bytes.
    pub offset: usize,
    /// Which bytes, from there on.
    pub shape: Shape,
}

// SAFETY: between `enter` and `leave` the buffer counts as lent. That of a load is not closed before, and until then its
// bytes are mapped, writable (`L1Buffer::new`), and L1 keeps them for the load alone. That of a store may be given up
// while a drive reads it, through a system call: the kernel holds the pages, or refuses an address that is gone.
unsafe impl Lender for LentPart {
    fn enter(&self) -> Option<NonNull<u8>> {
        let address = self.buffer.address.read();
        let Access::Open(start) = &*address else { return None };
        let end = self.offset.checked_add(self.shape.span());
        assert!(end.is_some_and(|end| end <= self.buffer.len), "outside of the buffer");
        self.buffer.lent.fetch_add(1, Ordering::Relaxed);
        // SAFETY: inside the buffer, checked above.
        Some(unsafe { start.0.add(self.offset) })
    }

    fn leave(&self) {
        self.buffer.lent.fetch_sub(1, Ordering::Release);
    }

    fn shape(&self) -> Shape {
        self.shape
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
        assert!(guarded.fail(&Stamp::of_this_process()));
        assert_eq!(memory, [7; 100]);
    }

    #[test]
    fn a_failed_buffer_carries_the_stamp_and_small_ones_do_not() {
        let stamp = Stamp::of_this_process();
        for (len, stamped) in [(63, false), (64, true), (200, true)] {
            let mut memory = vec![7u8; len];
            let before = buffer(&mut memory);
            assert!(!before.carries(&stamp));
            assert!(before.fail(&stamp));
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
            assert!(closer.join().unwrap());
        });
        assert!(matches!(*guarded.address.read(), Access::Closed));
    }

    #[test]
    fn what_a_drive_has_is_neither_stamped_nor_closed() {
        let stamp = Stamp::of_this_process();
        let mut memory = vec![7u8; 8192];
        let guarded = Arc::new(buffer(&mut memory));
        let part = |offset| LentPart { buffer: guarded.clone(), offset, shape: Shape::whole(4096) };
        let (first, second) = (part(0), part(4096));
        let lent = first.enter().unwrap();
        assert!(!guarded.fail(&stamp));
        assert!(second.enter().is_none(), "nobody enters a buffer that is to be closed");
        assert!(!guarded.scatter(0, &[9; 50], &mut summer()));
        // SAFETY: entered and not left.
        unsafe { lent.write_bytes(5, 4096) };
        assert!(!guarded.close());
        first.leave();
        assert!(guarded.fail(&stamp));
        assert_eq!(memory[..64], stamp.0);
        assert_eq!(memory[64..4096], [5; 4032]);
        assert!(buffer(&mut memory).carries(&stamp));
    }
}
