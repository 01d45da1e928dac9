//! A trial of a drive: what an I/O engine moves to and from it, without a store.

use std::io;
use std::ops::{ControlFlow, Range};
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

use crate::buf::{SlotBuf, SlotPool};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Content, content, wipe};
use crate::io::device::{self, FileDevice, OpenOptions, Target};
use crate::io::engine::{self, EngineKind, IoEngine, IoRequest};
use crate::io::{BLOCK, Device, DirectIo, Op};

/// Left alone at both ends: what is blank counts as blank afterwards, a store is recognised there.
const END: u64 = 1 << 20;
/// Between two looks whether to go on.
const LOOK: Duration = Duration::from_millis(100);
/// For what is in flight, after somebody gave up.
const PATIENCE: Duration = Duration::from_secs(5);

/// What may happen to what is on the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing is written.
    ReadOnly,
    /// A blank drive is written, anything else refused.
    Blank,
    /// What is there is destroyed.
    Force,
}

/// In which order the blocks are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One behind another, from the start again after the last.
    Sequential,
    /// Anywhere.
    Random,
}

/// When to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// So much time has passed.
    Elapsed(Duration),
    /// Each block was moved once.
    Once,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Measurement {
    /// Direction.
    pub op: Op,
    /// Order.
    pub order: Order,
    /// Bytes of one I/O, a multiple of [`BLOCK`].
    pub block_bytes: usize,
    /// I/Os that the engine has at once.
    pub depth: usize,
    /// How they are done.
    pub engine: EngineKind,
    /// When to stop.
    pub until: Until,
}

/// What a measurement found.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// Bytes.
    pub bytes: u64,
    /// From the first request to the last answer; of writes, to the end of the flush.
    pub elapsed: Duration,
    /// CPU time of this process meanwhile, that of the kernel's workers for it included.
    pub cpu: Duration,
    /// Name of the engine.
    pub engine: &'static str,
}

/// A block device or file, open and locked until dropped.
pub struct Trial {
    device: Arc<FileDevice>,
    content: Content,
    access: Access,
    /// What is read and written.
    span: Range<u64>,
}

impl Trial {
    /// Opens the block device or file at `path`, of which up to `bytes` bytes are used, away from its ends. With
    /// [`Access::Force`] it is blank from then on.
    ///
    /// # Errors
    /// `Foreign` or `Mismatch` for what is not blank with [`Access::Blank`]; `Invalid` for a folder; `TooSmall`; those
    /// of [`device::open()`]. Nothing was changed then.
    pub fn open(path: &Path, bytes: u64, access: Access) -> Result<Self> {
        let shown = path.display();
        if let Target::Folder(_) = Target::of(path)? {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{shown}: a trial needs a block device or a file that exists"),
            ));
        }
        // An empty file stays empty.
        let options = OpenOptions { file_bytes: 0, ..OpenOptions::default() };
        let device = match access {
            Access::ReadOnly => device::open_to_examine(path, &options)?,
            Access::Blank | Access::Force => Some(device::open(path, &options)?),
        };
        let too_small = |size: u64| {
            Error::new(
                ErrorKind::TooSmall,
                format!("{shown}: {size} bytes are too few; name a drive or file of {} or more", 4 * END),
            )
        };
        let device = device.ok_or_else(|| too_small(0))?;
        if device.size() < 4 * END {
            return Err(too_small(device.size()));
        }
        let content = content(&device)?;
        match access {
            Access::ReadOnly => {}
            Access::Blank => {
                refuse(&device, &content)?;
                refuse_data(&device)?;
            }
            Access::Force if content == Content::Blank => {}
            Access::Force => wipe(&device)?,
        }
        if access != Access::ReadOnly {
            device.set_direct(DirectIo::Auto, true)?;
        }
        let span = END..END + bytes.min(device.size() - 2 * END);
        Ok(Self { device: Arc::new(device), content, access, span })
    }

    /// What was found on the drive.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// The part of the drive that is read and written.
    pub fn span(&self) -> Range<u64> {
        self.span.clone()
    }

    /// Whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.device.is_direct()
    }

    /// Whether it is memory (tmpfs).
    pub fn in_memory(&self) -> bool {
        self.device.in_memory()
    }

    /// The descriptor that holds the lock.
    pub fn fd(&self) -> RawFd {
        self.device.fd().expect("a file has a descriptor")
    }

    /// Measures. `go_on` is asked ten times a second.
    ///
    /// # Errors
    /// `Invalid` for blocks of no whole number of [`BLOCK`]s, or larger than the span; `Io` when the engine cannot be
    /// had, or the drive fails; also when `go_on` breaks.
    pub fn measure(&self, what: &Measurement, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Moved> {
        if what.op == Op::Write && self.access == Access::ReadOnly {
            let text = format!("{}: opened for reads only", self.device.name());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        measure(self.device.clone(), self.span(), what, go_on)
    }
}

/// A file may hold data far from its ends, unlike whatever people put on a whole drive.
fn refuse_data(device: &FileDevice) -> Result<()> {
    let taken =
        device.taken().map_err(|error| Error::io(format!("{}: cannot be examined", device.name()), error))?;
    if device.is_block_device() || taken == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Foreign,
        format!(
            "{}: a file with {taken} bytes of data; nothing was changed. Name its folder (a file is made and removed \
             there), or destroy what is there with --force",
            device.name()
        ),
    ))
}

fn refuse(device: &dyn Device, content: &Content) -> Result<()> {
    let kind = match content {
        Content::Missing | Content::Blank => return Ok(()),
        Content::Store { .. } => ErrorKind::Mismatch,
        Content::Foreign(_) => ErrorKind::Foreign,
    };
    let name = device.name();
    Err(Error::new(
        kind,
        format!(
            "{name}: {content}; nothing was changed. Name a blank drive, measure only reads with --read-only, or \
             destroy what is there with --force"
        ),
    ))
}

fn measure(
    device: Arc<dyn Device>,
    span: Range<u64>,
    what: &Measurement,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Moved> {
    let blocks = (span.end - span.start).checked_div(what.block_bytes as u64).unwrap_or(0);
    if blocks == 0 || !what.block_bytes.is_multiple_of(BLOCK) || what.depth == 0 {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{}: {} blocks of {} bytes at once in {} bytes; take whole multiples of {BLOCK} that fit, and one at \
                 least",
                device.name(),
                what.depth,
                what.block_bytes,
                span.end - span.start
            ),
        ));
    }
    let pool = SlotPool::new(what.depth, what.block_bytes)?;
    let mut slots: Vec<SlotBuf> = std::iter::from_fn(|| pool.try_take()).collect();
    for (number, slot) in (0..).zip(&mut slots) {
        fill(slot, number);
    }
    let engine = engine::start(device.clone(), what.engine, what.depth)?;
    let failed = |error| Error::io(format!("{}: {:?} failed", device.name(), what.op), error);
    let tally = Arc::new(Tally::default());
    let (end, ended) = mpsc::channel();
    let (begun, cpu) = (Instant::now(), cpu_time());
    let turn = Arc::new(Turn {
        engine: engine.clone(),
        tally: tally.clone(),
        op: what.op,
        order: what.order,
        start: span.start,
        blocks,
        deadline: match what.until {
            Until::Elapsed(time) => Some(begun + time),
            Until::Once => None,
        },
        next: AtomicU64::new(0),
        _end: end,
    });
    for slot in slots {
        turn.clone().go_on_with(slot);
    }
    drop(turn);
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK) {
        if go_on().is_break() {
            tally.stop.store(true, Ordering::Relaxed);
            engine.shutdown(PATIENCE);
            return Err(failed(io::ErrorKind::Interrupted.into()));
        }
    }
    if let Some(error) = tally.error.lock().take() {
        return Err(failed(error));
    }
    if what.op == Op::Write {
        device.flush().map_err(failed)?;
    }
    let (elapsed, cpu) = (begun.elapsed(), cpu_time() - cpu);
    engine.shutdown(PATIENCE);
    Ok(Moved { bytes: tally.bytes.load(Ordering::Relaxed), elapsed, cpu, engine: engine.name() })
}

/// What all requests of a measurement share. The last one in flight drops it.
struct Turn {
    engine: Arc<dyn IoEngine>,
    tally: Arc<Tally>,
    op: Op,
    order: Order,
    start: u64,
    blocks: u64,
    deadline: Option<Instant>,
    /// Number of the next I/O.
    next: AtomicU64,
    /// Closed by the last.
    _end: Sender<()>,
}

#[derive(Default)]
struct Tally {
    bytes: AtomicU64,
    error: Mutex<Option<io::Error>>,
    stop: AtomicBool,
}

impl Turn {
    /// Sends the next I/O with this slot, from the answer to the one before: nobody is woken in between.
    fn go_on_with(self: Arc<Self>, buf: SlotBuf) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let over = match self.deadline {
            Some(deadline) => Instant::now() >= deadline,
            None => number >= self.blocks,
        };
        if over || self.tally.stop.load(Ordering::Relaxed) {
            return;
        }
        let block = match self.order {
            Order::Sequential => number,
            Order::Random => mix(number),
        } % self.blocks;
        let (turn, len) = (self.clone(), buf.len());
        let done = Box::new(move |buf, outcome| match outcome {
            Ok(()) => {
                turn.tally.bytes.fetch_add(len as u64, Ordering::Relaxed);
                turn.go_on_with(buf);
            }
            Err(error) => {
                turn.tally.error.lock().get_or_insert(error);
                turn.tally.stop.store(true, Ordering::Relaxed);
            }
        });
        let offset = self.start + block * len as u64;
        self.engine.submit(IoRequest { op: self.op, offset, len, buf, done });
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Bytes that do not repeat, for drives that compress.
fn fill(buf: &mut [u8], seed: u64) {
    let words = (buf.len() / 8) as u64;
    for (number, word) in (seed * words..).zip(buf.chunks_exact_mut(8)) {
        word.copy_from_slice(&mix(number).to_le_bytes());
    }
}

/// A permutation of the numbers without visible order; the output function of SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::device::testing::{Calls, Effect, Fault, FaultyDevice, MemoryDevice, StallDevice};

    const MIB: u64 = 1 << 20;
    const BLOCK_BYTES: usize = 64 * 1024;

    fn writes(order: Order, until: Until) -> Measurement {
        let (block_bytes, depth) = (BLOCK_BYTES, 4);
        Measurement { op: Op::Write, order, block_bytes, depth, engine: EngineKind::Pool, until }
    }

    fn on(device: Arc<dyn Device>, what: &Measurement) -> Result<Moved> {
        measure(device, END..7 * MIB, what, &mut || ControlFlow::Continue(()))
    }

    #[test]
    fn each_block_of_the_span_is_moved_once_and_nothing_else() {
        let device = MemoryDevice::new(8 * MIB);
        let moved = on(device.clone(), &writes(Order::Sequential, Until::Once)).unwrap();
        assert_eq!((moved.bytes, moved.engine), (6 * MIB, "pool"));
        let mut drive = vec![0; 8 << 20];
        device.read_at(&mut drive, 0).unwrap();
        let written = |block: &[u8]| block.iter().any(|&byte| byte != 0);
        let found: Vec<bool> = drive.chunks(BLOCK_BYTES).map(written).collect();
        let ends = MIB as usize / BLOCK_BYTES;
        assert!(found[ends..found.len() - ends].iter().all(|&written| written));
        assert!(!found[..ends].contains(&true) && !found[found.len() - ends..].contains(&true));
    }

    #[test]
    fn random_blocks_lie_all_over_the_span() {
        let device = MemoryDevice::new(8 * MIB);
        // As many I/Os as there are blocks: about two thirds of the blocks are hit.
        on(device.clone(), &writes(Order::Random, Until::Once)).unwrap();
        let mut drive = vec![0; 8 << 20];
        device.read_at(&mut drive, 0).unwrap();
        let hit = drive.chunks(BLOCK_BYTES).filter(|block| block.iter().any(|&byte| byte != 0)).count();
        assert!((48..80).contains(&hit), "{hit} of 96 blocks");
        assert!(drive[..MIB as usize].iter().chain(&drive[7 << 20..]).all(|&byte| byte == 0));
    }

    #[test]
    fn it_ends_in_time() {
        let time = Duration::from_millis(50);
        let moved = on(MemoryDevice::new(8 * MIB), &writes(Order::Sequential, Until::Elapsed(time))).unwrap();
        assert!(moved.elapsed >= time && moved.bytes >= BLOCK_BYTES as u64, "{moved:?}");
    }

    #[test]
    fn a_fault_is_reported() {
        let device = FaultyDevice::new(MemoryDevice::new(8 * MIB));
        device.inject(Fault { after: 10, ..Fault::every(Calls::WRITES, Effect::Errno(libc::ENOSPC)) });
        let error = on(device, &writes(Order::Sequential, Until::Once)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOSPC), "{error}");
    }

    #[test]
    fn who_gives_up_is_not_kept_by_a_drive_without_an_end() {
        let device = StallDevice::new(MemoryDevice::new(8 * MIB));
        device.stall(Calls::WRITES);
        let mut give_up = || {
            assert!(device.await_waiting(1, PATIENCE));
            device.resume();
            ControlFlow::Break(())
        };
        let endless = writes(Order::Random, Until::Elapsed(Duration::from_secs(3600)));
        let given_up = measure(device.clone(), END..7 * MIB, &endless, &mut give_up);
        assert!(given_up.unwrap_err().to_string().contains("interrupted"));
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let whole = writes(Order::Random, Until::Once);
        for what in [
            Measurement { block_bytes: 5000, ..whole },
            Measurement { block_bytes: 16 << 20, ..whole },
            Measurement { block_bytes: 0, ..whole },
            Measurement { depth: 0, ..whole },
        ] {
            assert_eq!(on(MemoryDevice::new(8 * MIB), &what).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
