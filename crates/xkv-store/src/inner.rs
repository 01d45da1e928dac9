//! What a store's clones, transactions, leases and threads share.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::alloc::Allocator;
use crate::buf::{Lent, SlotBuf};
use crate::checksum::FragmentSums;
use crate::commit::{self, Commits, Done, Op};
use crate::index::{Entry, Index};
use crate::io::engine::{IoDone, LentDone, LentRequest, SlotsDone, SlotsRequest};
use crate::io::{BLOCK, Device, IoEngine, IoRequest, Op as IoOp};
use crate::key::Digest;
use crate::layout::Uuid;
use crate::record::{self, manifest_bytes};
use crate::recover::Live;
use crate::run::{self, RUN_BYTES, Run};
use crate::signals::Signals;

/// One drive: where its slots are, and what moves bytes.
pub(crate) struct Drive {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) engine: Arc<dyn IoEngine>,
    pub(crate) slots_offset: u64,
    /// Written to since the last flush.
    pub(crate) dirty: AtomicBool,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) committed: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) evicted_never_read: AtomicU64,
    pub(crate) groups: AtomicU64,
    pub(crate) removed: AtomicU64,
    pub(crate) discarded: AtomicU64,
    pub(crate) damaged: AtomicU64,
    /// I/O operations completed, also failed ones.
    pub(crate) io: AtomicU64,
}

/// What clones, transactions, leases and the threads share.
pub(crate) struct Inner {
    pub(crate) drives: Vec<Drive>,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) index: Index,
    pub(crate) commits: Commits,
    pub(crate) signals: Arc<Signals>,
    pub(crate) counters: Counters,
    /// Fragments of the largest object seen.
    pub(crate) largest: AtomicUsize,
    /// Largest group of log records, bytes.
    pub(crate) group_limit: usize,
    /// Failed flushes so far. A transaction that saw one cannot be committed: what it wrote may be lost.
    pub(crate) flush_failures: AtomicU64,
    pub(crate) id: Uuid,
    pub(crate) fragment_bytes: usize,
    pub(crate) live_limit: u64,
    pub(crate) read_only: AtomicBool,
    pub(crate) closed: AtomicBool,
    /// Objects used since the log heard of them.
    pub(crate) touched: Mutex<Vec<Digest>>,
}

impl Inner {
    pub(crate) fn read_only(&self) -> bool {
        self.read_only.load(Ordering::SeqCst)
    }

    pub(crate) fn set_read_only(&self, error: &io::Error) {
        if !self.read_only.swap(true, Ordering::SeqCst) {
            tracing::error!(
                drive = self.drives[0].device.name(),
                %error,
                "the manifest log failed; the store is read-only, serves what it has, and tries again every few seconds"
            );
        }
    }

    pub(crate) fn set_writable(&self) {
        self.read_only.store(false, Ordering::SeqCst);
        self.signals.changed();
    }

    /// Manifest bytes above which the evictor makes room, when somebody waits for `wanted` more.
    pub(crate) fn manifest_goal(&self, wanted: u64) -> u64 {
        (self.live_limit / 10 * 9).min(self.live_limit.saturating_sub(wanted))
    }

    /// Flushes those of the first drives, `drives`, that were written to. Its errors, each with the number of its drive.
    pub(crate) fn flush(&self, drives: &[Drive]) -> Vec<(usize, io::Error)> {
        let dirty: Vec<(usize, &Drive)> = drives
            .iter()
            .enumerate()
            .filter(|(_, drive)| drive.dirty.swap(false, Ordering::SeqCst))
            .collect();
        let outcomes: Vec<io::Result<()>> = match &dirty[..] {
            [(_, one)] => vec![one.device.flush()],
            many => std::thread::scope(|scope| {
                let running: Vec<_> =
                    many.iter().map(|(_, drive)| scope.spawn(|| drive.device.flush())).collect();
                let ended = running.into_iter().map(|flush| flush.join());
                ended.map(|end| end.unwrap_or_else(|_| Err(io::Error::other("the flush panicked")))).collect()
            }),
        };
        let mut failures = Vec::new();
        for ((number, drive), outcome) in dirty.into_iter().zip(outcomes) {
            if let Err(error) = outcome {
                self.flush_failed(number);
                tracing::error!(drive = drive.device.name(), %error, "flush failed; stores since the last one are refused");
                failures.push((number, error));
            }
        }
        failures
    }

    /// Whatever was written to a drive since its last flush may be lost.
    pub(crate) fn flush_failed(&self, drive: usize) {
        self.drives[drive].dirty.store(true, Ordering::SeqCst);
        self.flush_failures.fetch_add(1, Ordering::SeqCst);
    }

    /// Takes this very object out of the index, if it is still there and `allowed`. Its removal, whose outcome `done` gets, is queued
    /// before anybody can see it gone: whoever waits for what is queued then waits for it, too.
    pub(crate) fn take_out(
        &self,
        entry: &Arc<Entry>,
        allowed: impl FnOnce(&Entry) -> bool,
        done: Done<()>,
    ) -> bool {
        let op = Op::Remove { digest: *entry.key.digest(), entry: Some(entry.clone()), done };
        let mut refused = None;
        let taken = self.index.take_entry(entry, allowed, || refused = self.commits.queue(op));
        commit::refuse(refused);
        taken
    }

    /// Appends records of uses that the log has not heard of, up to `limit` bytes.
    pub(crate) fn put_touched(&self, records: &mut Vec<u8>, limit: usize) {
        let mut touched = std::mem::take(&mut *self.touched.lock());
        let start = records.len();
        while records.len() - start + record::HEADER + 40 <= limit {
            let Some(digest) = touched.pop() else { break };
            if let Some(entry) = self.index.with_digest(&digest, Arc::clone) {
                entry.touched.store(false, Ordering::Relaxed);
                record::put_touch(records, &digest, entry.recency.load(Ordering::Relaxed));
            }
        }
        if !touched.is_empty() {
            self.touched.lock().append(&mut touched);
        }
    }

    pub(crate) fn fragments(&self, size: u64) -> u64 {
        size.div_ceil(self.fragment_bytes as u64)
    }

    pub(crate) fn fragment_len(&self, size: u64, index: u32) -> usize {
        let start = u64::from(index) * self.fragment_bytes as u64;
        (size - start).min(self.fragment_bytes as u64) as usize
    }

    /// Drives of an object, see [`crate::Store::drives_of`].
    pub(crate) fn drive_set(&self, entry: &Entry) -> u64 {
        if self.drives.len() == 1 {
            return 1;
        }
        let numbers = entry.slots.numbers();
        numbers.iter().fold(0, |set, &slot| set | 1 << self.allocator.place(slot).0.min(63))
    }

    /// Starts the I/O of one slot.
    pub(crate) fn io(&self, op: IoOp, slot: u32, len: usize, buf: SlotBuf, done: IoDone) {
        let (drive, slot) = self.allocator.place(slot);
        let drive = &self.drives[drive];
        let offset = drive.slots_offset + u64::from(slot) * self.fragment_bytes as u64;
        drive.engine.submit(IoRequest { op, offset, len: len.next_multiple_of(BLOCK), buf, done });
    }

    /// Whether a slot's bytes can go straight between the drive and memory of somebody else that starts at a block's
    /// boundary: whole blocks.
    pub(crate) fn goes_straight(&self, slot: u32, len: usize) -> bool {
        len.is_multiple_of(BLOCK) && self.drives[self.allocator.place(slot).0].device.goes_straight()
    }

    /// The runs of an object of `size` bytes in these slots.
    pub(crate) fn runs(&self, slots: &[u32], size: u64) -> Vec<Run> {
        let place = |(index, &slot): (usize, &u32)| {
            let straight = self.goes_straight(slot, self.fragment_len(size, index as u32));
            straight.then(|| self.allocator.place(slot))
        };
        let most = (RUN_BYTES / self.fragment_bytes).max(1);
        run::runs(slots.iter().enumerate().map(place), most, self.drives.len())
    }

    /// Starts the I/O of a run of the object in `slots`, in memory of somebody else.
    pub(crate) fn io_straight(&self, op: IoOp, slots: &[u32], run: Run, memory: Lent, done: LentDone) {
        let (drive, offset) = self.place_of(slots, run, memory.len());
        drive.engine.submit_lent(LentRequest { op, offset, memory, done });
    }

    /// Starts reading a run of the object in `slots`, `len` bytes, into as many slots of memory.
    pub(crate) fn read_slots(
        &self,
        slots: &[u32],
        run: Run,
        len: usize,
        bufs: Vec<SlotBuf>,
        done: SlotsDone,
    ) {
        let len = len.next_multiple_of(BLOCK);
        let (drive, offset) = self.place_of(slots, run, len);
        drive.engine.submit_slots(SlotsRequest { op: IoOp::Read, offset, len, slots: bufs, done });
    }

    /// Drive and position of a run of `len` bytes of the object in `slots`.
    fn place_of(&self, slots: &[u32], run: Run, len: usize) -> (&Drive, u64) {
        let (drive, slot) = self.allocator.place(slots[run.first as usize]);
        let behind = |(slot, index)| self.allocator.place(slots[index as usize]) == (drive, slot);
        // What follows on the drive must be the object's own.
        assert!(
            (slot..).zip(run.fragments()).all(behind) && len <= run.count as usize * self.fragment_bytes,
            "{run:?} is not a run of {slots:?}, or has other than {len} bytes"
        );
        let drive = &self.drives[drive];
        (drive, drive.slots_offset + u64::from(slot) * self.fragment_bytes as u64)
    }

    /// Takes over the objects that recovery found.
    pub(crate) fn restore(&self, live: Vec<Live>) {
        let entries = live.into_iter().map(|Live { key, manifest }| {
            let (numbers, sums): (Vec<u32>, Vec<FragmentSums>) = manifest.fragments.into_iter().unzip();
            let bytes = manifest_bytes(key.namespace().len() + key.key().len(), numbers.len());
            self.largest.fetch_max(numbers.len(), Ordering::Relaxed);
            let slots = self.allocator.adopt(numbers.into(), bytes as u64);
            Arc::new(Entry::new(key, manifest.size, slots, sums.into(), manifest.recency))
        });
        self.index.restore(entries.collect());
    }
}
