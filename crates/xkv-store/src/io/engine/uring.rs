//! One io_uring and one thread per device.
//!
//! The thread sleeps in the kernel until a transfer is done or somebody writes to the ring's eventfd, which it always
//! reads. Memory that the kernel may write to belongs to the table of what is in flight until its completion is seen;
//! when the device never answers, or the thread panics, it is leaked rather than freed.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::EventfdFlags;

use super::desk::{Desk, Job, Request, panic_text};
use super::{EngineLoad, HAS_TIME, IoEngine, IoRequest, LentRequest, Op, SlotsRequest, taken_back};
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Device, resume_at};

/// Requests in flight at most, whatever depth is asked for.
const MAX_DEPTH: usize = 4096;

/// Marks the completion of the eventfd's read; transfers carry their place in the table.
const WAKE: u64 = u64::MAX;

/// Times that a transfer refused with EAGAIN or EINTR is tried again.
const MAX_RETRIES: u32 = 100;

/// Bytes that are given to the kernel together. It starts none of them before it has looked at all, page by page: more would
/// leave an idle drive idle for longer.
const TOGETHER: usize = 256 * 1024;

/// Bytes of completions that the ring's thread has time for when they come at once; of more, the first go to other threads.
const UNHURRIED: usize = 2 << 20;

/// Pause before the kernel is asked again after it lacked the resources.
const BACK_OFF: Duration = Duration::from_millis(1);

/// An io_uring for one device.
pub(super) struct Uring {
    desk: Arc<Desk>,
    wake: Arc<OwnedFd>,
}

impl Uring {
    /// Starts the ring and its thread.
    pub fn start(device: Arc<dyn Device>, depth: usize) -> Result<Self> {
        let depth = depth.clamp(1, MAX_DEPTH);
        let Some(fd) = device.fd() else {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{}: has no descriptor for io_uring; use the pool", device.name()),
            ));
        };
        // Its first value completes the first read: the trial of the ring.
        let wake = rustix::event::eventfd(1, EventfdFlags::CLOEXEC)
            .map_err(|e| Error::io("cannot make an eventfd; raise ulimit -n", e.into()))?;
        let wake = Arc::new(wake);
        let desk = Arc::new(Desk::new(&*device, depth, 1));
        let (ready_tx, ready_rx) = mpsc::sync_channel(1);
        let (its_desk, its_wake) = (desk.clone(), wake.clone());
        std::thread::Builder::new()
            .name("xkv-io-uring".into())
            .spawn(move || {
                let ring = match Ring::new(fd, its_wake, depth) {
                    Ok(ring) => ring,
                    Err(error) => {
                        drop(device);
                        return ready_tx.send(Err(error)).unwrap_or_default();
                    }
                };
                ready_tx.send(Ok(())).unwrap_or_default();
                let ran = catch_unwind(AssertUnwindSafe(|| ring.serve(&its_desk, &*device)));
                match ran {
                    Ok(()) => {
                        drop(device);
                        its_desk.leave();
                    }
                    Err(panic) => {
                        // What is in flight is leaked and stays counted; nobody else waits for this thread.
                        std::mem::forget(device);
                        tracing::error!("io_uring thread panicked: {}", panic_text(&*panic));
                        its_desk.close();
                    }
                }
            })
            .map_err(|e| Error::io("cannot start a thread; raise the limit (ulimit -u)", e))?;
        match ready_rx.recv() {
            Ok(Ok(())) => Ok(Self { desk, wake }),
            Ok(Err(error)) => Err(refused(error)),
            Err(_) => Err(Error::new(ErrorKind::Io, "the io_uring thread ended before it began")),
        }
    }

    fn wake(&self) {
        if let Err(error) = rustix::io::write(&self.wake, &1u64.to_ne_bytes()) {
            tracing::error!("cannot wake the io_uring thread: {error}");
        }
    }
}

/// What the kernel's refusal means and what helps.
fn refused(error: io::Error) -> Error {
    let cure = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "allow it: sysctl kernel.io_uring_disabled=0, and in a container a seccomp profile with io_uring_setup, \
             io_uring_enter and io_uring_register"
        }
        Some(libc::ENOSYS | libc::EINVAL | libc::EOPNOTSUPP) => {
            "needs a kernel of 5.6 or newer, and no sandbox that hides it"
        }
        Some(libc::ENOMEM) => "raise the limit of locked memory (ulimit -l, RLIMIT_MEMLOCK)",
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files (ulimit -n)",
        _ => "use the pool",
    };
    Error::io(format!("io_uring is refused; {cure}"), error)
}

impl IoEngine for Uring {
    fn submit(&self, request: IoRequest) {
        if self.desk.submit(request) {
            self.wake();
        }
    }

    fn submit_slots(&self, request: SlotsRequest) {
        if self.desk.submit(request) {
            self.wake();
        }
    }

    fn submit_lent(&self, request: LentRequest) {
        if self.desk.submit(request) {
            self.wake();
        }
    }

    fn watches(&self) -> bool {
        false
    }

    fn load(&self) -> EngineLoad {
        self.desk.load()
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn shutdown(&self, patience: Duration) -> bool {
        self.desk.close();
        self.wake();
        self.desk.await_empty(patience)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.desk.close();
        self.wake();
    }
}

/// A request that the kernel has, or gets next.
struct Flight {
    request: Request,
    done: usize,
    retries: u32,
    /// Where the rest of a request is whose memory lies in several pieces; the kernel reads it.
    pieces: Vec<libc::iovec>,
}

impl Flight {
    fn new(request: Request) -> Self {
        Self { request, done: 0, retries: 0, pieces: Vec::new() }
    }

    /// The kernel's order for what is not done yet.
    fn entry(&mut self, fd: types::Fd) -> squeue::Entry {
        let Self { request, done, pieces, .. } = self;
        let (offset, rest) = (request.offset + *done as u64, request.len - *done);
        let op = request.op;
        let first = request.piece(*done);
        if first.len() == rest {
            let len = u32::try_from(rest).expect("a run is far below 4 GiB");
            return match op {
                Op::Read => opcode::Read::new(fd, first.as_mut_ptr(), len).offset(offset).build(),
                Op::Write => opcode::Write::new(fd, first.as_ptr(), len).offset(offset).build(),
            };
        }
        pieces.clear();
        let mut position = *done;
        while position < request.len {
            let piece = request.piece(position);
            pieces.push(libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() });
            position += piece.len();
        }
        let (start, count) = (pieces.as_ptr(), pieces.len() as u32);
        match op {
            Op::Read => opcode::Readv::new(fd, start, count).offset(offset).build(),
            Op::Write => opcode::Writev::new(fd, start, count).offset(offset).build(),
        }
    }
}

/// A request that is over: its place, itself, its outcome.
type Finished = (usize, Request, io::Result<()>);

fn answer_all(desk: &Desk, finished: &mut Vec<Finished>) {
    desk.retire(finished.iter().map(|(place, request, _)| (*place, request.op)));
    let mut left: usize = finished.iter().map(|(_, request, _)| request.len).sum();
    for (_, request, outcome) in finished.drain(..) {
        HAS_TIME.set(left <= UNHURRIED && !desk.has_waiting());
        left -= request.len;
        request.answer(outcome);
    }
    HAS_TIME.set(false);
}

struct Ring {
    ring: IoUring,
    fd: RawFd,
    wake: Arc<OwnedFd>,
    /// The eventfd's value is read to here while `wake_armed`. Freed at an orderly end only.
    wake_word: *mut u64,
    wake_armed: bool,
    /// By place. Never dropped: it is empty at an orderly end, and otherwise the kernel may still write to its buffers.
    flights: ManuallyDrop<Vec<Option<Flight>>>,
    /// Places whose transfer, or the rest of it, goes to the kernel next.
    to_push: Vec<usize>,
}

impl Ring {
    /// Sets the ring up and tries it with a read of the eventfd, whose value must not be zero.
    fn new(fd: RawFd, wake: Arc<OwnedFd>, depth: usize) -> io::Result<Self> {
        // Every transfer in flight and the eventfd's read fit in the submission queue, so a push never fails; the
        // completion queue is twice as long.
        let entries = (depth as u32 + 1).next_power_of_two();
        let ring = set_up(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let mut this = Self {
            ring,
            fd,
            wake,
            wake_word: Box::into_raw(Box::new(0)),
            wake_armed: false,
            flights: ManuallyDrop::new((0..depth).map(|_| None).collect()),
            to_push: Vec::with_capacity(depth),
        };
        this.arm_wake();
        while this.wake_armed {
            match this.ring.submit_and_wait(1) {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
                _ => {}
            }
            if let Some(completion) = this.ring.completion().next() {
                this.wake_armed = false;
                if completion.result() < 0 {
                    return Err(io::Error::from_raw_os_error(-completion.result()));
                }
            }
        }
        Ok(this)
    }

    fn serve(mut self, desk: &Desk, device: &dyn Device) {
        let mut jobs = Vec::new();
        let mut finished = Vec::new();
        let mut complained = false;
        loop {
            let closed = desk.sleep_or_take(&mut jobs);
            for Job { place, mut request } in jobs.drain(..) {
                if !request.memory.enter() {
                    finished.push((place, request, Err(taken_back())));
                    continue;
                }
                self.flights[place] = Some(Flight::new(request));
                self.to_push.push(place);
            }
            if !finished.is_empty() {
                answer_all(desk, &mut finished);
                continue;
            }
            if closed && self.flights.iter().all(Option::is_none) && !self.wake_armed {
                break;
            }
            self.push_transfers();
            if !closed {
                self.arm_wake();
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => complained = false,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // What the kernel took stays in flight, the rest stays in the submission queue: try again.
                    let busy = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY));
                    if !busy && !std::mem::replace(&mut complained, true) {
                        tracing::error!("{}: io_uring_enter: {error}", device.name());
                    }
                    std::thread::sleep(BACK_OFF);
                }
            }
            self.reap(device.is_direct(), &mut finished);
            if !finished.is_empty() {
                answer_all(desk, &mut finished);
            }
        }
        // SAFETY: made by `Box::into_raw` in `new`; the eventfd's read is not in flight, and `self` ends here.
        drop(unsafe { Box::from_raw(self.wake_word) });
    }

    fn arm_wake(&mut self) {
        if self.wake_armed {
            return;
        }
        let fd = types::Fd(self.wake.as_raw_fd());
        let entry = opcode::Read::new(fd, self.wake_word.cast(), 8).offset(u64::MAX).build().user_data(WAKE);
        // SAFETY: the descriptor lives as long as `self.wake`; the word is freed only while no read of it is in
        // flight, and nobody else touches it.
        unsafe { self.push(&entry) };
        self.wake_armed = true;
    }

    fn push_transfers(&mut self) {
        let fd = types::Fd(self.fd);
        let mut together = 0;
        for place in std::mem::take(&mut self.to_push) {
            if together >= TOGETHER {
                // What it refuses stays in the queue; the next call says why.
                _ = self.ring.submit();
                together = 0;
            }
            let flight = self.flights[place].as_mut().expect("a place to push has its flight");
            together += flight.request.len - flight.done;
            let entry = flight.entry(fd);
            // SAFETY: the bytes, and the list of their pieces, belong to the flight, which stays in the table, untouched,
            // until its completion is seen; the table is never dropped. `serve` holds the device, and with it the
            // descriptor.
            unsafe { self.push(&entry.user_data(place as u64)) };
        }
    }

    /// # Safety
    /// What the entry points to must stay valid until its completion is seen.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: as the caller promises.
        unsafe { self.ring.submission().push(entry) }
            .expect("the queue holds every place and the eventfd's read");
    }

    /// Takes completions in: moves requests that are done to `finished`, sends the rest of short transfers again.
    fn reap(&mut self, direct: bool, finished: &mut Vec<Finished>) {
        let mut starved = false;
        for completion in self.ring.completion() {
            if completion.user_data() == WAKE {
                self.wake_armed = false;
                continue;
            }
            let place = completion.user_data() as usize;
            let flight = self.flights[place].as_mut().expect("one completion per entry");
            let outcome = match completion.result() {
                moved if moved >= 0 => {
                    match (resume_at(flight.done, moved as usize, direct), flight.request.op) {
                        (Some(done), _) if done < flight.request.len => {
                            flight.done = done;
                            self.to_push.push(place);
                            continue;
                        }
                        (Some(_), _) => Ok(()),
                        (None, Op::Read) => Err(io::ErrorKind::UnexpectedEof.into()),
                        (None, Op::Write) => Err(io::ErrorKind::WriteZero.into()),
                    }
                }
                refused => {
                    let again = matches!(-refused, libc::EAGAIN | libc::EINTR);
                    if again && flight.retries < MAX_RETRIES {
                        flight.retries += 1;
                        starved |= -refused == libc::EAGAIN;
                        self.to_push.push(place);
                        continue;
                    }
                    Err(io::Error::from_raw_os_error(-refused))
                }
            };
            let flight = self.flights[place].take().expect("looked at above");
            finished.push((place, flight.request, outcome));
        }
        if starved {
            std::thread::sleep(BACK_OFF);
        }
    }
}

/// A ring with the cheapest way of completing that the kernel knows.
fn set_up(entries: u32) -> io::Result<IoUring> {
    let mut newest = IoUring::builder();
    newest.dontfork().setup_single_issuer().setup_defer_taskrun();
    let mut plain = IoUring::builder();
    plain.dontfork();
    match newest.build(entries) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => plain.build(entries),
        outcome => outcome,
    }
}
