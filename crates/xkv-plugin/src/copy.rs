//! Copies between slots and L1, fused with the checksum in pieces that stay in the CPU's first cache, and the threads
//! that run them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crossbeam_channel::Receiver;
use parking_lot::Mutex;
use xkv_store::{Coverage, Digest, FragmentSums, Lent, Run, Shape, SlotBuf, Summer, Watch};

use crate::guard::{L1Buffer, LentPart};
use crate::inbox::Inbox;
use crate::reactor::Reactor;
use crate::task::{Gathering, Message, Piece, Scattering};

/// A multiple of the checksum's sampling stride, and half of a small first-level cache.
const PIECE_BYTES: usize = 16 * 1024;

/// Copies `slot.len()` bytes from L1 into `slot`; what is summed is what the slot holds, whatever L1's other users do.
///
/// # Safety
/// `source` is valid for reads of `slot.len()` bytes and does not overlap `slot`.
pub unsafe fn gather(source: NonNull<u8>, slot: &mut [u8], summer: &mut Summer) {
    let mut offset = 0;
    for piece in slot.chunks_mut(PIECE_BYTES) {
        // SAFETY: `offset + piece.len()` is at most the slot's length, for which the caller vouches. Another process
        // may write L1 meanwhile: any bytes are valid, and the checksum is taken of the copy.
        unsafe { source.add(offset).as_ptr().copy_to_nonoverlapping(piece.as_mut_ptr(), piece.len()) };
        summer.update(piece);
        offset += piece.len();
    }
}

/// Copies `slot` to L1.
///
/// # Safety
/// `target` is valid for writes of `slot.len()` bytes and does not overlap `slot`.
pub unsafe fn scatter(slot: &[u8], target: NonNull<u8>, summer: &mut Summer) {
    let mut offset = 0;
    for piece in slot.chunks(PIECE_BYTES) {
        summer.update(piece);
        // SAFETY: as in `gather`, for writes.
        unsafe { target.add(offset).as_ptr().copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
        offset += piece.len();
    }
}

/// Takes `len` bytes of L1 through `summer`.
///
/// # Safety
/// `source` is valid for reads of `len` bytes, and nobody writes them meanwhile (L1 has locked them for the operation).
pub unsafe fn sum(source: NonNull<u8>, len: usize, summer: &mut Summer) {
    // SAFETY: the caller's contract.
    summer.update(unsafe { std::slice::from_raw_parts(source.as_ptr(), len) });
}

/// Reads the first bytes of a buffer.
///
/// # Safety
/// `source` is valid for reads of `head.len()` bytes.
pub unsafe fn peek(source: NonNull<u8>, head: &mut [u8]) {
    // SAFETY: the caller's contract; `head` is our own memory.
    unsafe { source.as_ptr().copy_to_nonoverlapping(head.as_mut_ptr(), head.len()) };
}

/// Writes the first bytes of a buffer.
///
/// # Safety
/// `target` is valid for writes of `head.len()` bytes.
pub unsafe fn poke(head: &[u8], target: NonNull<u8>) {
    // SAFETY: the caller's contract; `head` is our own memory.
    unsafe { target.as_ptr().copy_from_nonoverlapping(head.as_ptr(), head.len()) };
}

/// Where fragments lie in their object's buffer, and what their checksums are bound to.
#[derive(Clone)]
pub struct Place {
    /// The whole object's buffer.
    pub buffer: Arc<L1Buffer>,
    /// Of a fragment; the last one of the object may be shorter.
    pub fragment_bytes: usize,
    /// Of the object's key.
    pub digest: Digest,
}

impl Place {
    /// A fragment's offset in the buffer and its length, bytes.
    fn of(&self, index: u32) -> (usize, usize) {
        let offset = index as usize * self.fragment_bytes;
        (offset, self.fragment_bytes.min(self.buffer.len() - offset))
    }

    /// Checksums of a fragment, to be computed.
    fn summer(&self, index: u32, coverage: Coverage) -> Summer {
        Summer::new(&self.digest, index, self.of(index).1 as u32, coverage)
    }

    /// The bytes of a run, to be lent to a drive, and their checksums as they pass.
    pub(crate) fn lend_watched(&self, run: Run, coverage: Coverage) -> (Lent, Passing) {
        let (passing, watch) = Passing::of(run, self.clone(), coverage);
        (self.lend(run).watched(watch), passing)
    }

    /// The bytes of a run, to be lent to a drive.
    pub(crate) fn lend(&self, run: Run) -> Lent {
        let (offset, _) = self.of(run.first);
        let len = run.fragments().map(|index| self.of(index).1).sum();
        let stride = run.step as usize * self.fragment_bytes;
        let shape = Shape { len, piece: self.fragment_bytes, stride };
        Lent::new(Box::new(LentPart { buffer: self.buffer.clone(), offset, shape }))
    }
}

/// Checksums of a run's fragments, computed as its bytes pass, under the buffer's guard.
pub struct Passing(Arc<Mutex<Passed>>);

struct Passed {
    place: Place,
    run: Run,
    coverage: Coverage,
    /// Of the fragments that are through.
    sums: Vec<FragmentSums>,
    /// The fragment that is passing, and how much of it is still to come.
    current: Option<(Summer, usize)>,
    /// Whether the buffer was closed.
    closed: bool,
}

impl Passing {
    /// For a run, and who has to be told of its bytes.
    pub(crate) fn of(run: Run, place: Place, coverage: Coverage) -> (Self, Watch) {
        let passed = Passed { place, run, coverage, sums: Vec::new(), current: None, closed: false };
        let shared = Arc::new(Mutex::new(passed));
        (Self(shared.clone()), Box::new(move |bytes| shared.lock().take(bytes)))
    }

    /// The sums of all fragments. None when not all of their bytes have passed, or the buffer was closed meanwhile.
    pub(crate) fn sums(&self) -> Option<Vec<FragmentSums>> {
        let mut passed = self.0.lock();
        (passed.sums.len() == passed.run.count as usize).then(|| std::mem::take(&mut passed.sums))
    }
}

impl Passed {
    /// Sums the next bytes where they are.
    fn take(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let index = self.run.first + self.sums.len() as u32 * self.run.step;
            let (offset, len) = self.place.of(index);
            let fresh = || (self.place.summer(index, self.coverage), len);
            let (mut summer, left) = self.current.take().unwrap_or_else(fresh);
            let now = left.min(bytes);
            if self.closed || !self.place.buffer.sum(offset + len - left, now, &mut summer) {
                // Nobody may look at the buffer any more, and nobody will ask.
                self.closed = true;
                return;
            }
            match left - now {
                0 => self.sums.push(summer.finish()),
                left => self.current = Some((summer, left)),
            }
            bytes -= now;
        }
    }
}

/// One fragment to move, or a run to sum.
pub enum CopyJob {
    /// L1 to slot, for a store; refused when it ends later than `deadline`.
    Gather { piece: Piece, place: Place, slot: SlotBuf, deadline: Instant },
    /// A run, for a store straight from L1; refused as above.
    Sum { piece: Piece, place: Place, deadline: Instant },
    /// Slots to L1, each a fragment, for a load, checked against `sums`.
    Scatter { piece: Piece, place: Place, slots: Vec<SlotBuf>, sums: Vec<FragmentSums>, coverage: Coverage },
    /// A run that the drive read straight into L1, checked against `sums` of each fragment; `found` as it passed.
    Check {
        piece: Piece,
        place: Place,
        sums: Vec<FragmentSums>,
        coverage: Coverage,
        found: Option<Vec<FragmentSums>>,
    },
}

/// Runs jobs until there is nobody left to send some, or `closing`.
pub fn run(jobs: &Receiver<CopyJob>, inbox: &Inbox<Reactor>, closing: &AtomicBool) {
    for job in jobs {
        // The reactor ends with the connector; what is left then is of no use to anybody.
        inbox.post(do_job(job));
        // What there is is done first, at once since the buffers are closed: the reactor waits for those that a drive had.
        if closing.load(Ordering::Acquire) && jobs.is_empty() {
            return;
        }
    }
}

/// Does a job, and says what came of it.
pub fn do_job(job: CopyJob) -> Message {
    // A panic costs its own key: without an answer the slot would count as used for ever.
    match job {
        CopyJob::Gather { piece, place, slot, deadline } => {
            let copied = catch_unwind(AssertUnwindSafe(|| gathered(piece, &place, slot, deadline)));
            Message::Gathered { piece, outcome: copied.unwrap_or(Gathering::Closed) }
        }
        CopyJob::Sum { piece, place, deadline } => {
            let summed = catch_unwind(AssertUnwindSafe(|| summed(piece, &place, deadline)));
            Message::Gathered { piece, outcome: summed.unwrap_or(Gathering::Closed) }
        }
        CopyJob::Scatter { piece, place, slots, sums, coverage } => {
            let copied = catch_unwind(AssertUnwindSafe(|| scattered(piece, &place, &slots, &sums, coverage)));
            drop(slots);
            Message::Scattered { piece, outcome: copied.unwrap_or(Scattering::Closed) }
        }
        CopyJob::Check { piece, place, sums, coverage, found } => {
            let checked = catch_unwind(AssertUnwindSafe(|| checked(piece, &place, &sums, coverage, found)));
            Message::Scattered { piece, outcome: checked.unwrap_or(Scattering::Closed) }
        }
    }
}

fn gathered(piece: Piece, place: &Place, mut slot: SlotBuf, deadline: Instant) -> Gathering {
    let index = piece.run.first;
    let (offset, len) = place.of(index);
    let mut summer = place.summer(index, Coverage::Both);
    if Instant::now() >= deadline {
        Gathering::TooOld
    } else if !place.buffer.gather(offset, &mut slot[..len], &mut summer) {
        Gathering::Closed
    } else if Instant::now() >= deadline {
        // L1's lock on the bytes may have run out while they were copied.
        Gathering::TooOld
    } else {
        Gathering::Done(slot, summer.finish())
    }
}

fn summed(piece: Piece, place: &Place, deadline: Instant) -> Gathering {
    if Instant::now() >= deadline {
        return Gathering::TooOld;
    }
    // Whether it is too old by then is asked again when it was written.
    sums_in(piece.run, place, Coverage::Both).map_or(Gathering::Closed, Gathering::Summed)
}

/// The checksums of a run's fragments where they are. None once their buffer is closed.
fn sums_in(run: Run, place: &Place, coverage: Coverage) -> Option<Vec<FragmentSums>> {
    run.fragments().map(|index| sums_of(index, place, coverage)).collect()
}

/// The checksums of a fragment where it is. None once its buffer is closed.
fn sums_of(index: u32, place: &Place, coverage: Coverage) -> Option<FragmentSums> {
    let (offset, len) = place.of(index);
    let mut summer = place.summer(index, coverage);
    place.buffer.sum(offset, len, &mut summer).then(|| summer.finish())
}

fn scattered(
    piece: Piece,
    place: &Place,
    slots: &[SlotBuf],
    sums: &[FragmentSums],
    coverage: Coverage,
) -> Scattering {
    assert_eq!((slots.len(), sums.len()), (piece.run.count as usize, piece.run.count as usize));
    for ((index, slot), &wanted) in piece.run.fragments().zip(slots).zip(sums) {
        let (offset, len) = place.of(index);
        let mut summer = place.summer(index, coverage);
        if !place.buffer.scatter(offset, &slot[..len], &mut summer) {
            return Scattering::Closed;
        }
        if !agree(summer.finish(), wanted, coverage) {
            return Scattering::Damaged(index);
        }
    }
    Scattering::Done
}

fn checked(
    piece: Piece,
    place: &Place,
    sums: &[FragmentSums],
    coverage: Coverage,
    found: Option<Vec<FragmentSums>>,
) -> Scattering {
    assert_eq!(sums.len(), piece.run.count as usize, "a checksum for each fragment");
    let Some(found) = found.or_else(|| sums_in(piece.run, place, coverage)) else {
        return Scattering::Closed;
    };
    let mut pairs = piece.run.fragments().zip(found.iter().zip(sums));
    let damaged = pairs.find(|(_, (found, wanted))| !agree(**found, **wanted, coverage));
    damaged.map_or(Scattering::Done, |(index, _)| Scattering::Damaged(index))
}

fn agree(found: FragmentSums, wanted: FragmentSums, coverage: Coverage) -> bool {
    match coverage {
        Coverage::Both => found == wanted,
        Coverage::Full => found.full == wanted.full,
        Coverage::Sample => found.sample == wanted.sample,
        Coverage::None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xkv_store::checksum::fragment_sums;

    #[test]
    fn both_ways_move_every_byte_and_sum_them() {
        let digest = Digest([3; 32]);
        for len in [1, 63, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 77] {
            let mut memory: Vec<u8> = (0..len).map(|i| (i * 31 + i / 251) as u8).collect();
            let want = fragment_sums(&digest, 5, &memory);
            let l1 = NonNull::new(memory.as_mut_ptr()).unwrap();
            let mut slot = vec![0; len];
            let mut summer = Summer::new(&digest, 5, len as u32, Coverage::Both);
            // SAFETY: `memory` has `len` bytes.
            unsafe { gather(l1, &mut slot, &mut summer) };
            assert_eq!((&slot, summer.finish()), (&memory, want));
            let mut back = vec![0; len];
            let mut summer = Summer::new(&digest, 5, len as u32, Coverage::Both);
            // SAFETY: `back` has `len` bytes.
            unsafe { scatter(&slot, NonNull::new(back.as_mut_ptr()).unwrap(), &mut summer) };
            assert_eq!((back, summer.finish()), (memory, want));
        }
    }

    #[test]
    fn what_passes_is_summed_by_fragments() {
        let (fragment_bytes, len) = (8192, 4 * 8192 + 100);
        let mut memory: Vec<u8> = (0..len).map(|i| (i * 13 + i / 251) as u8).collect();
        let address = NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: `memory` outlives the buffer.
        let buffer = Arc::new(unsafe { L1Buffer::new(address, memory.len()) });
        let place = Place { buffer, fragment_bytes, digest: Digest([3; 32]) };
        for (run, step) in
            [(Run { first: 1, count: 4, step: 1 }, 4096), (Run { first: 0, count: 3, step: 2 }, 12288)]
        {
            let fragment = |index: u32| {
                let start = index as usize * fragment_bytes;
                &memory[start..(start + fragment_bytes).min(len)]
            };
            let bytes: usize = run.fragments().map(|index| fragment(index).len()).sum();
            let (passing, mut watch) = Passing::of(run, place.clone(), Coverage::Both);
            for start in (0..bytes).step_by(step) {
                assert_eq!(passing.sums(), None, "not all of it has passed");
                watch(step.min(bytes - start));
            }
            let want: Vec<_> =
                run.fragments().map(|i| fragment_sums(&place.digest, i, fragment(i))).collect();
            assert_eq!(passing.sums(), Some(want));
        }
        let (passing, mut watch) = Passing::of(Run::one(0), place.clone(), Coverage::Both);
        watch(4096);
        assert!(place.buffer.close());
        watch(4096);
        assert_eq!(passing.sums(), None, "nothing looks at a closed buffer");
    }

    #[test]
    fn what_is_too_old_is_not_gathered() {
        let mut memory = vec![7u8; 4096];
        let address = NonNull::new(memory.as_mut_ptr()).unwrap();
        let place = Place {
            // SAFETY: `memory` outlives the buffer.
            buffer: Arc::new(unsafe { L1Buffer::new(address, memory.len()) }),
            fragment_bytes: memory.len(),
            digest: Digest([3; 32]),
        };
        let piece = Piece { class: crate::task::Class::Store, ticket: 1, run: Run::one(0), drive: 0 };
        let pool = xkv_store::SlotPool::new(1, 4096).unwrap();
        let outcome = |deadline| gathered(piece, &place, pool.try_take().unwrap(), deadline);
        let now = Instant::now();
        assert!(matches!(outcome(now), Gathering::TooOld));
        let hour = std::time::Duration::from_secs(3600);
        assert!(matches!(outcome(now + hour), Gathering::Done(..)));
        place.buffer.close();
        assert!(matches!(outcome(now + hour), Gathering::Closed));
    }
}
