//! The reactor's loads: open, read, copy out, verify.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::Sender;
use xkv_store::io::engine::has_time;
use xkv_store::{Coverage, FragmentSums, ObjectKey, SlotBuf};

use crate::backend::{Reading, drive_set, is_unreachable};
use crate::copy::{CopyJob, Place, do_job};
use crate::guard::L1Buffer;
use crate::inbox::Inbox;
use crate::reactor::{Reactor, show};
use crate::stats::Miss;
use crate::task::{
    Batch, Class, Ending, LoadKey, Message, Operation, Outstanding, Piece, Scattering, Submission,
};

impl Reactor {
    pub(crate) fn take_get(&mut self, submission: Submission) {
        let Submission { id, submitted, keys, buffers, owner, .. } = submission;
        let mut tickets = Vec::with_capacity(keys.len());
        for (index, (key, buffer)) in keys.iter().zip(&buffers).enumerate() {
            let Some(buffer) = buffer.as_ref().filter(|buffer| !buffer.is_empty()) else {
                tickets.push(0);
                continue;
            };
            let ticket = self.new_ticket();
            tickets.push(ticket);
            let key = ObjectKey::new(&self.shared.namespace, key);
            let (buffer, left, straight) = (buffer.clone(), Outstanding::default(), buffer.is_aligned());
            let load = LoadKey { batch: id, index, key, buffer, reading: None, left, straight, ending: None };
            self.loads.insert(ticket, load);
            self.waiting[0].push_back(ticket);
        }
        let refused: Vec<usize> = (0..keys.len()).filter(|&index| tickets[index] == 0).collect();
        let deadline = submitted + self.shared.config.load_deadline;
        let answers = vec![None; keys.len()];
        let (operation, open, error) = (Operation::Get, keys.len(), String::new());
        self.add_batch(
            id,
            Batch { operation, submitted, deadline, answers, open, tickets, owner, bytes: 0, error },
        );
        for index in refused {
            let why = "its buffer is empty, read-only or in pieces";
            self.shared.stats.missed(Miss::Refused, 1);
            self.shared.log.failed(Miss::Refused.plural(), 1, || format!("load refused: {why}"));
            self.answer(id, index, false, || why.into());
        }
    }

    /// Asks the backend for the next object. False when there is none to ask for.
    pub(crate) fn open_next(&mut self) -> bool {
        let Some(ticket) = self.waiting[0].pop_front() else {
            return false;
        };
        let Some(load) = self.loads.get(&ticket) else {
            return true;
        };
        self.asked[0] += 1;
        let inbox = self.inbox.clone();
        let done = move |reading| {
            inbox.post(Message::Opened { ticket, reading });
        };
        self.shared.backend.open(&load.key, Box::new(done));
        true
    }

    pub(crate) fn opened(&mut self, ticket: u64, reading: io::Result<Option<Box<dyn Reading>>>) {
        self.asked[0] -= 1;
        let Some(load) = self.loads.get_mut(&ticket).filter(|load| load.ending.is_none()) else {
            return;
        };
        let reading = match reading {
            Ok(Some(reading)) => reading,
            Ok(None) => return self.fail_load(ticket, Miss::Absent, || "not in the store".into()),
            Err(error) => return self.fail_load(ticket, Miss::Unreachable, || error.to_string()),
        };
        if reading.size() != load.buffer.len() as u64 {
            let (has, wants) = (reading.size(), load.buffer.len());
            // Not as damaged: it is what was stored, and a gateway would keep it.
            self.shared.stats.discarded();
            self.shared.backend.remove(&load.key, Box::new(drop));
            return self
                .fail_load(ticket, Miss::Size, || format!("has {has} bytes, the buffer {wants}; removed"));
        }
        let drive_of = |index| reading.drive(index);
        if (0..reading.fragments()).any(|index| self.stalled & drive_set(drive_of(index)) != 0) {
            return self.fail_load(ticket, Miss::Stalled, || "its drive does not answer".into());
        }
        load.left = Outstanding::new((0..reading.fragments()).map(drive_of));
        for run in reading.runs() {
            let drive = drive_of(run.first) as u16;
            self.window.push(Piece { class: Class::Load, ticket, run, drive });
        }
        load.reading = Some(reading);
    }

    /// Reads a run into `slots`; it goes on to a copy thread, or is copied where the thread that brings it has time.
    pub(crate) fn read(&mut self, piece: Piece, slots: Vec<SlotBuf>) {
        let load = &self.loads[&piece.ticket];
        let reading = load.reading.as_ref().expect("only opened objects have fragments in the window");
        let place = self.place(&load.buffer, &load.key);
        let coverage = self.shared.config.verify.coverage();
        let (inbox, copies) = (self.inbox.clone(), self.copies.clone());
        let done = move |slots, result: io::Result<Vec<FragmentSums>>| match result {
            Ok(sums) => {
                let job = CopyJob::Scatter { piece, place, slots, sums, coverage };
                hand_on(job, &inbox, &copies);
            }
            Err(error) => {
                drop(slots);
                inbox.post(Message::Scattered { piece, outcome: Scattering::Failed(error) });
            }
        };
        reading.read(piece.run, slots, Box::new(done));
    }

    /// Has the drive read a run straight into its buffer, if it can; false otherwise, and nothing happened.
    pub(crate) fn read_straight(&mut self, piece: Piece) -> bool {
        let Some(load) = self.loads.get(&piece.ticket).filter(|load| load.ending.is_none()) else {
            return false;
        };
        let Some(reading) = load.reading.as_ref().filter(|reading| {
            let healthy = self.slow & drive_set(piece.drive as usize) == 0;
            load.straight && healthy && reading.goes_straight(piece.run.first)
        }) else {
            return false;
        };
        let place = self.place(&load.buffer, &load.key);
        let coverage = self.shared.config.verify.coverage();
        let (memory, passing) = match coverage {
            Coverage::None => (place.lend(piece.run), None),
            _ => {
                let (memory, passing) = place.lend_watched(piece.run, coverage);
                (memory, Some(passing))
            }
        };
        let (inbox, copies) = (self.inbox.clone(), self.copies.clone());
        let done = move |result: io::Result<Vec<FragmentSums>>| match result {
            Ok(sums) => {
                let found = passing.and_then(|passing| passing.sums());
                hand_on(CopyJob::Check { piece, place, sums, coverage, found }, &inbox, &copies);
            }
            Err(error) => {
                let refused = matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EINVAL));
                let outcome = if refused || error.kind() == io::ErrorKind::Unsupported {
                    Scattering::NotStraight(error)
                } else {
                    Scattering::Failed(error)
                };
                inbox.post(Message::Scattered { piece, outcome });
            }
        };
        reading.read_straight(piece.run, memory, Box::new(done));
        true
    }

    /// Where the fragments of an object are to be found in `buffer`, which is as long as the object.
    pub(crate) fn place(&self, buffer: &Arc<L1Buffer>, key: &ObjectKey) -> Place {
        let fragment_bytes = self.shared.backend.fragment_bytes();
        Place { buffer: buffer.clone(), fragment_bytes, digest: *key.digest() }
    }

    pub(crate) fn scattered(&mut self, piece: Piece, outcome: Scattering) {
        self.window.landed(&piece);
        let Some(load) = self.loads.get_mut(&piece.ticket) else {
            return self.shared.stats.withheld();
        };
        if let Some(Ending { miss, why, .. }) = &load.ending {
            let (miss, why) = (*miss, why.clone());
            return self.fail_load(piece.ticket, miss, || why);
        }
        match outcome {
            Scattering::NotStraight(error) => {
                if std::mem::take(&mut load.straight) {
                    tracing::debug!(%error, drive = piece.drive, "not read straight into L1, but through a slot");
                }
                self.window.push(piece);
            }
            Scattering::Done => {
                if load.left.done(piece.drive, piece.run.count) {
                    self.finish_load(piece.ticket);
                }
            }
            Scattering::Damaged(index) => {
                let reading = load.reading.take();
                reading.iter().for_each(|reading| self.discard(&**reading));
                self.fail_load(piece.ticket, Miss::NotVerified, || {
                    format!("fragment {index} on drive {} does not match its checksum; removed", piece.drive)
                });
            }
            Scattering::Failed(error) if is_unreachable(&error) => {
                self.fail_load(piece.ticket, Miss::Unreachable, || error.to_string());
            }
            Scattering::Failed(error) => {
                let reading = load.reading.take();
                reading.iter().for_each(|reading| self.discard(&**reading));
                self.fail_load(piece.ticket, Miss::IoError, || {
                    format!("{} on drive {}: {error}; removed", piece.run, piece.drive)
                });
            }
            // The buffer is closed only when the key was answered, which took it out of `loads`.
            Scattering::Closed => {
                self.fail_load(piece.ticket, Miss::Refused, || "its buffer was closed".into())
            }
        }
    }

    fn discard(&self, reading: &dyn Reading) {
        self.shared.stats.discarded();
        reading.discard();
    }

    fn finish_load(&mut self, ticket: u64) {
        let Some(load) = self.loads.remove(&ticket) else {
            return;
        };
        // Every fragment is through, so nothing is lent.
        let closed = load.buffer.close();
        debug_assert!(closed, "a load is finished while a drive has some of its buffer");
        let bytes = load.buffer.len() as u64;
        self.shared.stats.hit(Operation::Get, 1, bytes);
        self.answer(load.batch, load.index, true, String::new);
    }

    /// Answers a key as missed. Its buffer is stamped first, so that it is known when it comes back as a store; not when
    /// closing, when LMCache may have handed the memory on already. While a drive reads straight into the buffer the
    /// answer is put off until that ends: [`Reactor::scattered`] comes back to it.
    pub(crate) fn fail_load(&mut self, ticket: u64, miss: Miss, why: impl FnOnce() -> String) {
        let Some(load) = self.loads.get_mut(&ticket) else {
            return;
        };
        let released = if self.shared.closing.load(Ordering::Acquire) {
            load.buffer.close()
        } else {
            load.buffer.fail(&self.shared.stamp)
        };
        if !released {
            if load.ending.is_none() {
                let submitted =
                    self.batches.get(&load.batch).map_or_else(Instant::now, |batch| batch.submitted);
                load.ending = Some(Ending { miss, why: why(), submitted });
                // The object may be evicted. What is in flight may bring other bytes then, but the load is a miss already.
                load.reading = None;
            }
            return;
        }
        let Some(load) = self.loads.remove(&ticket) else {
            return;
        };
        self.shared.stats.missed(miss, 1);
        if miss == Miss::Absent {
            // Nothing to tell: an object may be evicted between its lookup and its load.
            return self.answer(load.batch, load.index, false, why);
        }
        let text = format!("load of {}: {}", show(&load.key), why());
        self.shared.log.failed(miss.plural(), 1, || text.clone());
        self.answer(load.batch, load.index, false, || text);
    }
}

/// Has a job done: here, where the thread has time, by a copy thread otherwise.
fn hand_on(job: CopyJob, inbox: &Inbox<Reactor>, copies: &Sender<CopyJob>) {
    let job = if has_time() { Some(job) } else { copies.send(job).err().map(|refused| refused.0) };
    // Refused only when the copy threads have ended with the connector; the reactor may still wait for the buffer.
    if let Some(job) = job {
        inbox.post(do_job(job));
    }
}
