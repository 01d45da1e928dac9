//! An object being written: slots reserved, nothing visible until the commit.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::alloc::Slots;
use crate::buf::{Lent, SlotBuf};
use crate::checksum::FragmentSums;
use crate::commit::{Done, Op};
use crate::error::{Error, ErrorKind};
use crate::index::{Entry, Token};
use crate::inner::Inner;
use crate::io::engine::{IoDone, LentDone};
use crate::io::{BLOCK, Op as IoOp};
use crate::key::ObjectKey;
use crate::run::Run;

/// An object being written.
pub struct Txn(Arc<TxnInner>);

pub(crate) struct TxnInner {
    store: Arc<Inner>,
    key: ObjectKey,
    size: u64,
    fragments: u32,
    pub(crate) token: Token,
    /// Failed flushes when it began.
    pub(crate) generation: u64,
    numbers: Box<[u32]>,
    /// Taken by the commit. Free again when the last write has ended, since every write holds this value.
    slots: Mutex<Option<Slots>>,
    written: AtomicU32,
}

impl TxnInner {
    /// Whether the key is still this transaction's (a removal takes it away).
    pub(crate) fn holds_key(&self) -> bool {
        self.store.index.claimed(self.key.digest(), &self.token)
    }

    /// The write of a run has ended.
    fn wrote(&self, run: Run, outcome: &io::Result<()>) {
        self.store.counters.io.fetch_add(1, Ordering::Relaxed);
        if outcome.is_ok() {
            let drive = self.store.allocator.place(self.numbers[run.first as usize]).0;
            self.store.drives[drive].dirty.store(true, Ordering::SeqCst);
            self.written.fetch_add(run.count, Ordering::SeqCst);
        }
    }

    /// Gives the key up.
    pub(crate) fn release(&self) {
        self.store.index.unclaim(self.key.digest(), &self.token);
        self.store.signals.changed();
    }
}

impl Drop for TxnInner {
    fn drop(&mut self) {
        self.release();
    }
}

impl Txn {
    pub(crate) fn new(
        store: Arc<Inner>,
        key: &ObjectKey,
        size: u64,
        token: Token,
        generation: u64,
        slots: Slots,
    ) -> Self {
        Self(Arc::new(TxnInner {
            store,
            key: key.clone(),
            size,
            fragments: slots.numbers().len() as u32,
            token,
            generation,
            numbers: slots.numbers().into(),
            slots: Mutex::new(Some(slots)),
            written: AtomicU32::new(0),
        }))
    }

    /// Number of fragments.
    pub fn fragments(&self) -> u32 {
        self.0.fragments
    }

    /// Bytes of fragment `index`.
    pub fn fragment_len(&self, index: u32) -> usize {
        self.0.store.fragment_len(self.0.size, index)
    }

    /// Drive that fragment `index` goes to.
    pub fn drive(&self, index: u32) -> usize {
        self.place(index).0
    }

    /// Drive that fragment `index` goes to, and its slot there.
    pub fn place(&self, index: u32) -> (usize, u32) {
        self.0.store.allocator.place(self.0.numbers[index as usize])
    }

    /// Writes fragment `index`, once. The bytes of `buf` beyond the fragment's length are zeroed up to the next block.
    pub fn write(&self, index: u32, mut buf: SlotBuf, done: IoDone) {
        let txn = self.0.clone();
        let len = self.fragment_len(index);
        buf[len..len.next_multiple_of(BLOCK)].fill(0);
        let slot = self.0.numbers[index as usize];
        let done = Box::new(move |buf, outcome: io::Result<()>| {
            txn.wrote(Run::one(index), &outcome);
            drop(txn);
            done(buf, outcome);
        });
        self.0.store.io(IoOp::Write, slot, len, buf, done);
    }

    /// Whether fragment `index` can be written straight from memory of somebody else that starts at a whole block.
    pub fn goes_straight(&self, index: u32) -> bool {
        self.0.store.goes_straight(self.0.numbers[index as usize], self.fragment_len(index))
    }

    /// Whether watches of memory that fragment `index` is written from are called ([`crate::Lent::watched`]).
    pub fn watches(&self, index: u32) -> bool {
        self.0.store.drives[self.drive(index)].engine.watches()
    }

    /// The object in runs: fragments to be written in one go where they go straight, the others one by one.
    pub fn runs(&self) -> Vec<Run> {
        self.0.store.runs(&self.0.numbers, self.0.size)
    }

    /// As [`Txn::write`], of a run of [`Txn::runs`] from memory of exactly its length, see [`Txn::goes_straight`]. It is given
    /// back before `done` is called.
    pub fn write_straight(&self, run: Run, memory: Lent, done: LentDone) {
        let txn = self.0.clone();
        let done = Box::new(move |outcome: io::Result<()>| {
            txn.wrote(run, &outcome);
            drop(txn);
            done(outcome);
        });
        self.0.store.io_straight(IoOp::Write, &self.0.numbers, run, memory, done);
    }

    /// Makes the object visible and durable; `sums` has one entry per fragment. All writes must have succeeded.
    pub fn commit(self, sums: Vec<FragmentSums>, done: Done<()>) {
        let txn = self.0;
        let written = txn.written.load(Ordering::SeqCst);
        if written != txn.fragments || sums.len() != txn.fragments as usize {
            let text = format!(
                "commit of {} fragments with {written} written and {} checksums; write every fragment first",
                txn.fragments,
                sums.len()
            );
            return done(Err(Error::new(ErrorKind::Invalid, text)));
        }
        let slots = txn.slots.lock().take().expect("a transaction commits once: it is consumed");
        let recency = txn.store.index.tick();
        let entry = Arc::new(Entry::new(txn.key.clone(), txn.size, slots, sums.into(), recency));
        let store = txn.store.clone();
        store.commits.push(Op::Commit { txn, entry, done });
    }
}
