//! The reactor's stores: begin, copy in, write, commit.

use std::io;
use std::time::Instant;

use xkv_store::{Coverage, ErrorKind, FragmentSums, ObjectKey, Result, SlotBuf};

use crate::backend::{Begun, Transaction, UNREACHABLE, drive_set, is_unreachable};
use crate::connector::{BACKLOG, key_fits};
use crate::copy::{CopyJob, Place};
use crate::reactor::{Reactor, show};
use crate::stats::Outcome;
use crate::task::{Batch, Class, Gathering, Message, Operation, Outstanding, Piece, StoreKey, Submission};

impl Reactor {
    pub(crate) fn take_set(&mut self, submission: Submission) {
        let Submission { id, submitted, keys, buffers, owner, bytes, accepted } = submission;
        let deadline = submitted + self.shared.config.store_deadline;
        let (answers, tickets) = (vec![None; keys.len()], vec![0; keys.len()]);
        let (operation, open, error) = (Operation::Set, keys.len(), String::new());
        self.add_batch(
            id,
            Batch { operation, submitted, deadline, answers, open, tickets, owner, bytes, error },
        );
        for (index, (bytes, buffer)) in keys.iter().zip(buffers).enumerate() {
            if index >= accepted {
                self.account_store(id, index, Outcome::Dropped, 0, || BACKLOG.into());
                continue;
            }
            let Some(buffer) = buffer.filter(|buffer| !buffer.is_empty()) else {
                self.account_store(id, index, Outcome::Failed, 0, || {
                    "its buffer is empty or in pieces".into()
                });
                continue;
            };
            if !key_fits(&self.shared.namespace, bytes) {
                let length = bytes.len();
                self.account_store(id, index, Outcome::Failed, 0, || {
                    format!("its key of {length} bytes is too long")
                });
                continue;
            }
            let key = ObjectKey::new(&self.shared.namespace, bytes);
            if let Some(store) = self.storing.get(key.digest()).and_then(|ticket| self.stores.get_mut(ticket))
            {
                store.joined.push((id, index));
                continue;
            }
            let ticket = self.new_ticket();
            if let Some(batch) = self.batches.get_mut(&id) {
                batch.tickets[index] = ticket;
            }
            self.storing.insert(*key.digest(), ticket);
            let (txn, left, joined, straight) =
                (None, Outstanding::default(), Vec::new(), buffer.is_aligned());
            let store = StoreKey { batch: id, index, key, buffer, deadline, txn, left, straight, joined };
            self.stores.insert(ticket, store);
            self.waiting[1].push_back(ticket);
        }
    }

    /// Asks the backend for room for the next object. False when there is none to ask for.
    pub(crate) fn begin_next(&mut self) -> bool {
        let Some(ticket) = self.waiting[1].pop_front() else {
            return false;
        };
        let Some(store) = self.stores.get(&ticket) else {
            return true;
        };
        self.asked[1] += 1;
        let inbox = self.inbox.clone();
        let done = move |begun| {
            inbox.post(Message::Begun { ticket, begun });
        };
        self.shared.backend.begin(&store.key, store.buffer.len() as u64, Box::new(done));
        true
    }

    pub(crate) fn begun(&mut self, ticket: u64, begun: Begun) {
        self.asked[1] -= 1;
        if !self.stores.contains_key(&ticket) {
            return;
        }
        match begun {
            Begun::Open(txn) => self.start_writing(ticket, txn),
            Begun::Present => self.settle(ticket, Outcome::Skipped, String::new),
            Begun::Busy => self.parked.push(ticket),
            Begun::Wait => {
                self.no_room = true;
                self.parked.push(ticket);
            }
            Begun::NoSpace => self.settle(ticket, Outcome::Rejected, || "does not fit into the store".into()),
            Begun::ReadOnly => self.settle(ticket, Outcome::Failed, || "the store takes no changes".into()),
            Begun::Unreachable => self.settle(ticket, Outcome::Unreachable, || UNREACHABLE.into()),
        }
    }

    /// Asks again for stores that were put off, in their order.
    pub(crate) fn retry_parked(&mut self) {
        self.no_room = false;
        for ticket in self.parked.drain(..).rev() {
            self.waiting[1].push_front(ticket);
        }
    }

    fn start_writing(&mut self, ticket: u64, txn: Box<dyn Transaction>) {
        let Some(store) = self.stores.get_mut(&ticket) else {
            return;
        };
        let fragments = 0..txn.fragments();
        if fragments.clone().any(|index| self.stalled & drive_set(txn.drive(index)) != 0) {
            return self.settle(ticket, Outcome::Stalled, || "its drive does not answer".into());
        }
        store.left = Outstanding::new(fragments.map(|index| txn.drive(index)));
        for run in txn.runs() {
            let drive = txn.drive(run.first) as u16;
            self.window.push(Piece { class: Class::Store, ticket, run, drive });
        }
        store.txn = Some(txn);
    }

    /// Has a fragment copied into `slot`.
    pub(crate) fn gather(&mut self, piece: Piece, slot: SlotBuf) {
        let store = &self.stores[&piece.ticket];
        let (place, deadline) = (self.place(&store.buffer, &store.key), store.deadline);
        let _ = self.copies.send(CopyJob::Gather { piece, place, slot, deadline });
    }

    /// Has a run written from where it is, if that can be; false otherwise, and nothing happened. It is summed by the thread
    /// that writes it, where that watches, by a copy thread before it otherwise.
    pub(crate) fn write_straight(&mut self, piece: Piece) -> bool {
        let healthy = self.slow & drive_set(piece.drive as usize) == 0;
        let fragment_bytes = self.shared.backend.fragment_bytes();
        let Some(store) = self.stores.get_mut(&piece.ticket).filter(|store| store.straight && healthy) else {
            return false;
        };
        let Some(txn) = store.txn.as_mut().filter(|txn| txn.goes_straight(piece.run.first)) else {
            return false;
        };
        let place = Place { buffer: store.buffer.clone(), fragment_bytes, digest: *store.key.digest() };
        if !txn.watches(piece.run.first) {
            let _ = self.copies.send(CopyJob::Sum { piece, place, deadline: store.deadline });
            return true;
        }
        let (memory, passing) = place.lend_watched(piece.run, Coverage::Both);
        let inbox = self.inbox.clone();
        let done = move |result: io::Result<()>| {
            let summed = || passing.sums().ok_or_else(|| io::Error::other("its buffer was closed"));
            let result = result.and_then(|()| summed());
            inbox.post(Message::Written { piece, straight: true, result: result.map(Some) });
        };
        txn.write_straight(piece.run, memory, Box::new(done));
        true
    }

    pub(crate) fn gathered(&mut self, piece: Piece, outcome: Gathering) {
        let Some(store) = self.stores.get(&piece.ticket) else {
            drop(outcome);
            return self.window.landed(&piece);
        };
        let place = self.place(&store.buffer, &store.key);
        let store = self.stores.get_mut(&piece.ticket).expect("found above");
        match outcome {
            Gathering::Done(slot, sums) => {
                let inbox = self.inbox.clone();
                let done = move |slot, result: io::Result<()>| {
                    drop(slot);
                    let result = result.map(|()| None);
                    inbox.post(Message::Written { piece, straight: false, result });
                };
                let txn = store.txn.as_mut().expect("a store in progress has its transaction");
                txn.write(piece.run.first, slot, sums, Box::new(done));
            }
            Gathering::Summed(sums) => {
                let inbox = self.inbox.clone();
                let done = move |result: io::Result<()>| {
                    let result = result.map(|()| None);
                    inbox.post(Message::Written { piece, straight: true, result });
                };
                let txn = store.txn.as_mut().expect("a store in progress has its transaction");
                txn.summed(piece.run, sums);
                txn.write_straight(piece.run, place.lend(piece.run), Box::new(done));
            }
            Gathering::TooOld | Gathering::Closed => {
                self.window.landed(&piece);
                self.settle(piece.ticket, Outcome::TooOld, || {
                    "L1's lock on its bytes may have run out".into()
                });
            }
        }
    }

    /// A piece was written, or not; with its checksums, if they were computed on the way.
    pub(crate) fn written(
        &mut self,
        piece: Piece,
        straight: bool,
        result: io::Result<Option<Vec<FragmentSums>>>,
    ) {
        self.window.landed(&piece);
        let ticket = piece.ticket;
        let Some(store) = self.stores.get_mut(&ticket) else {
            return;
        };
        if straight && Instant::now() >= store.deadline {
            // L1's lock on the bytes may have run out while the drive read them: the object is not committed.
            return self.settle(ticket, Outcome::TooOld, || "L1's lock on its bytes may have run out".into());
        }
        let sums = match result {
            Ok(sums) => sums,
            Err(error) => return self.not_written(piece, straight, &error),
        };
        if let (Some(sums), Some(txn)) = (sums, &mut store.txn) {
            txn.summed(piece.run, sums);
        }
        if store.left.done(piece.drive, piece.run.count)
            && let Some(txn) = store.txn.take()
        {
            let inbox = self.inbox.clone();
            let done = move |result| {
                inbox.post(Message::Committed { ticket, result });
            };
            txn.commit(Box::new(done));
        }
    }

    fn not_written(&mut self, piece: Piece, straight: bool, error: &io::Error) {
        let refused = matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EINVAL));
        if straight
            && refused
            && let Some(store) = self.stores.get_mut(&piece.ticket)
        {
            store.straight = false;
            return self.window.push(piece);
        }
        let full = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        let outcome = if is_unreachable(error) {
            Outcome::Unreachable
        } else if full {
            Outcome::Rejected
        } else {
            Outcome::Failed
        };
        self.settle(piece.ticket, outcome, || format!("{} on drive {}: {error}", piece.run, piece.drive));
    }

    pub(crate) fn committed(&mut self, ticket: u64, result: Result<()>) {
        match result {
            Ok(()) => self.settle(ticket, Outcome::Stored, String::new),
            Err(error) => {
                let outcome = match error.kind() {
                    ErrorKind::Removed => Outcome::Deleted,
                    ErrorKind::Unreachable => Outcome::Unreachable,
                    _ => Outcome::Failed,
                };
                self.settle(ticket, outcome, || error.to_string());
            }
        }
    }

    /// Ends the store of a key, for everybody who waits for it.
    pub(crate) fn settle(&mut self, ticket: u64, outcome: Outcome, why: impl FnOnce() -> String) {
        let Some(store) = self.stores.remove(&ticket) else {
            return;
        };
        self.storing.remove(store.key.digest());
        // A drive may still read some of it: nothing comes of that, since the transaction ends here uncommitted.
        let _ = store.buffer.close();
        let why =
            if outcome.ok() { String::new() } else { format!("store of {}: {}", show(&store.key), why()) };
        self.account_store(store.batch, store.index, outcome, store.buffer.len() as u64, || why.clone());
        let outcome = if outcome.ok() { Outcome::Deduped } else { outcome };
        for (batch, index) in store.joined {
            self.account_store(batch, index, outcome, 0, || why.clone());
        }
    }

    /// Counts and answers one key of a set.
    pub(crate) fn account_store(
        &mut self,
        id: u64,
        index: usize,
        outcome: Outcome,
        bytes: u64,
        why: impl FnOnce() -> String,
    ) {
        if !self.is_open(id, index) {
            return;
        }
        self.shared.stats.stored(outcome, 1, bytes);
        if outcome.ok() {
            return self.answer(id, index, true, String::new);
        }
        let text = why();
        self.shared.log.failed(outcome.name(), 1, || text.clone());
        self.answer(id, index, false, || text);
    }
}
