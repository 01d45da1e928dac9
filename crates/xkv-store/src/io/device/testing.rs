//! Devices for tests: in memory, and wrappers that are slow, stall, fail, or lose power.
//!
//! Wrappers have no descriptor, so engines go through their methods.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::Device;
use crate::io::BLOCK;

/// Memory is taken in pieces of this size, when first written.
const PIECE: usize = 1 << 20;
const SECTOR: usize = 512;

/// A drive in memory. Takes memory only for what was written; refuses what direct I/O would refuse (offsets and
/// lengths that are not whole blocks).
pub struct MemoryDevice {
    name: String,
    size: u64,
    pieces: RwLock<HashMap<u64, Box<[u8]>>>,
}

impl MemoryDevice {
    /// A drive of `size` bytes, all zero; `size` must be a multiple of [`BLOCK`].
    pub fn new(size: u64) -> Arc<Self> {
        Self::named("memory", size)
    }

    /// As [`MemoryDevice::new`], with a name for messages.
    pub fn named(name: &str, size: u64) -> Arc<Self> {
        Arc::new(Self::empty(name, size))
    }

    fn empty(name: &str, size: u64) -> Self {
        assert!(size.is_multiple_of(BLOCK as u64), "{size} is not a multiple of {BLOCK}");
        Self { name: name.into(), size, pieces: RwLock::default() }
    }

    /// An independent drive with the same contents.
    pub fn copy(&self) -> Arc<Self> {
        let copy = Self::empty(&self.name, self.size);
        *copy.pieces.write() = self.pieces.read().clone();
        Arc::new(copy)
    }

    /// Inverts bits of one byte, as a decaying medium would.
    pub fn flip(&self, offset: u64, mask: u8) {
        assert!(offset < self.size);
        let mut pieces = self.pieces.write();
        let piece = pieces.entry(offset / PIECE as u64).or_insert_with(new_piece);
        piece[(offset % PIECE as u64) as usize] ^= mask;
    }

    fn put(&self, buf: &[u8], offset: u64) {
        let mut pieces = self.pieces.write();
        for (piece, within, part) in split(offset, buf.len()) {
            let bytes = pieces.entry(piece).or_insert_with(new_piece);
            bytes[within..within + part.len()].copy_from_slice(&buf[part]);
        }
    }

    fn check(&self, offset: u64, bytes: usize) -> io::Result<()> {
        let block = BLOCK as u64;
        if !offset.is_multiple_of(block) || !(bytes as u64).is_multiple_of(block) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::ENXIO)),
        }
    }
}

fn new_piece() -> Box<[u8]> {
    vec![0; PIECE].into_boxed_slice()
}

/// Cuts a range of the drive at the pieces: (piece, position in it, range of the buffer).
fn split(offset: u64, bytes: usize) -> impl Iterator<Item = (u64, usize, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == bytes {
            return None;
        }
        let at = offset + done as u64;
        let within = (at % PIECE as u64) as usize;
        let part = done..bytes.min(done + PIECE - within);
        done = part.end;
        Some((at / PIECE as u64, within, part))
    })
}

impl Device for MemoryDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.check(offset, buf.len())?;
        let pieces = self.pieces.read();
        for (piece, within, part) in split(offset, buf.len()) {
            let to = &mut buf[part];
            match pieces.get(&piece) {
                Some(bytes) => to.copy_from_slice(&bytes[within..within + to.len()]),
                None => to.fill(0),
            }
        }
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.check(offset, buf.len())?;
        self.put(buf, offset);
        Ok(())
    }

    fn goes_straight(&self) -> bool {
        true
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Kinds of calls that a wrapper acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calls {
    /// [`Device::read_at`].
    pub reads: bool,
    /// [`Device::write_at`].
    pub writes: bool,
    /// [`Device::flush`].
    pub flushes: bool,
}

impl Calls {
    /// Reads alone.
    pub const READS: Self = Self { reads: true, writes: false, flushes: false };
    /// Writes alone.
    pub const WRITES: Self = Self { reads: false, writes: true, flushes: false };
    /// Flushes alone.
    pub const FLUSHES: Self = Self { reads: false, writes: false, flushes: true };
    /// Everything.
    pub const ALL: Self = Self { reads: true, writes: true, flushes: true };

    const NONE: Self = Self { reads: false, writes: false, flushes: false };

    fn include(self, call: Self) -> bool {
        (self.reads && call.reads) || (self.writes && call.writes) || (self.flushes && call.flushes)
    }
}

/// A drive that moves at most so many bytes a second, reads and writes together.
pub struct ThrottledDevice {
    inner: Arc<dyn Device>,
    bytes_per_second: u64,
    free_at: Mutex<Instant>,
}

impl ThrottledDevice {
    /// Slows `inner` down to `bytes_per_second`.
    pub fn new(inner: Arc<dyn Device>, bytes_per_second: u64) -> Arc<Self> {
        assert!(bytes_per_second > 0);
        Arc::new(Self { inner, bytes_per_second, free_at: Mutex::new(Instant::now()) })
    }

    fn wait(&self, bytes: usize) {
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let until = {
            let mut free_at = self.free_at.lock();
            *free_at = (*free_at).max(Instant::now()) + takes;
            *free_at
        };
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

impl Device for ThrottledDevice {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.wait(buf.len());
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.wait(buf.len());
        self.inner.write_at(buf, offset)
    }

    fn goes_straight(&self) -> bool {
        self.inner.goes_straight()
    }

    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// A drive that stops answering, and answers late: stalled calls block before they touch the drive.
pub struct StallDevice {
    inner: Arc<dyn Device>,
    state: Mutex<Stall>,
    changed: Condvar,
}

struct Stall {
    stalled: Calls,
    waiting: usize,
}

impl StallDevice {
    /// Wraps `inner`; nothing stalls yet.
    pub fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        let state = Mutex::new(Stall { stalled: Calls::NONE, waiting: 0 });
        Arc::new(Self { inner, state, changed: Condvar::new() })
    }

    /// From now on these calls, and no others, block.
    pub fn stall(&self, calls: Calls) {
        self.state.lock().stalled = calls;
        self.changed.notify_all();
    }

    /// Lets everything go on.
    pub fn resume(&self) {
        self.stall(Calls::NONE);
    }

    /// Calls that are blocked now.
    pub fn waiting(&self) -> usize {
        self.state.lock().waiting
    }

    /// Waits until at least `calls` calls are blocked; false after `patience`.
    pub fn await_waiting(&self, calls: usize, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.waiting < calls {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.waiting >= calls;
            }
        }
        true
    }

    fn pass(&self, call: Calls) {
        let mut state = self.state.lock();
        if !state.stalled.include(call) {
            return;
        }
        state.waiting += 1;
        self.changed.notify_all();
        while state.stalled.include(call) {
            self.changed.wait(&mut state);
        }
        state.waiting -= 1;
        self.changed.notify_all();
    }
}

impl Device for StallDevice {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.pass(Calls::READS);
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.pass(Calls::WRITES);
        self.inner.write_at(buf, offset)
    }

    fn goes_straight(&self) -> bool {
        self.inner.goes_straight()
    }

    fn flush(&self) -> io::Result<()> {
        self.pass(Calls::FLUSHES);
        self.inner.flush()
    }
}

/// What a fault does to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing is moved, the call fails with this error number (`libc::EIO`, `libc::ENOSPC`, ...).
    Errno(i32),
    /// Half of the blocks are moved, then the call fails.
    Short,
    /// Reads: one bit is wrong, the call succeeds. Writes and flushes: nothing happens, the call succeeds.
    Lie,
}

/// Which calls fail, and how.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Kinds of calls.
    pub calls: Calls,
    /// Calls that touch these bytes of the drive; flushes touch everything.
    pub offsets: Range<u64>,
    /// Matching calls that still work before the first one that fails.
    pub after: u64,
    /// Calls that fail, then the fault is over.
    pub times: u64,
    /// How they fail.
    pub effect: Effect,
}

impl Fault {
    /// Every such call fails from now on, wherever it goes.
    pub fn every(calls: Calls, effect: Effect) -> Self {
        Self { calls, offsets: 0..u64::MAX, after: 0, times: u64::MAX, effect }
    }
}

/// A drive with faults that can be added and lifted while it runs.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    faults: Mutex<Vec<Fault>>,
}

impl FaultyDevice {
    /// Wraps `inner`, without a fault.
    pub fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self { inner, faults: Mutex::default() })
    }

    /// Adds a fault; the first one added that applies to a call decides.
    pub fn inject(&self, fault: Fault) {
        self.faults.lock().push(fault);
    }

    /// Lifts all faults.
    pub fn heal(&self) {
        self.faults.lock().clear();
    }

    fn effect(&self, call: Calls, touched: Range<u64>) -> Option<Effect> {
        for fault in self.faults.lock().iter_mut() {
            let hit = fault.offsets.start < touched.end && touched.start < fault.offsets.end;
            if !hit || !fault.calls.include(call) || fault.times == 0 {
                continue;
            }
            if fault.after > 0 {
                fault.after -= 1;
                continue;
            }
            fault.times -= 1;
            return Some(fault.effect);
        }
        None
    }
}

fn range(offset: u64, bytes: usize) -> Range<u64> {
    offset..offset.saturating_add(bytes as u64)
}

fn half(bytes: usize) -> usize {
    bytes / 2 / BLOCK * BLOCK
}

impl Device for FaultyDevice {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self.effect(Calls::READS, range(offset, buf.len())) {
            None => self.inner.read_at(buf, offset),
            Some(Effect::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Effect::Short) => {
                let bytes = half(buf.len());
                self.inner.read_at(&mut buf[..bytes], offset)?;
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            Some(Effect::Lie) => {
                self.inner.read_at(buf, offset)?;
                let middle = buf.len() / 2;
                buf[middle] ^= 1;
                Ok(())
            }
        }
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        match self.effect(Calls::WRITES, range(offset, buf.len())) {
            None => self.inner.write_at(buf, offset),
            Some(Effect::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Effect::Short) => {
                self.inner.write_at(&buf[..half(buf.len())], offset)?;
                Err(io::ErrorKind::WriteZero.into())
            }
            Some(Effect::Lie) => Ok(()),
        }
    }

    fn goes_straight(&self) -> bool {
        self.inner.goes_straight()
    }

    fn flush(&self) -> io::Result<()> {
        match self.effect(Calls::FLUSHES, 0..u64::MAX) {
            None => self.inner.flush(),
            Some(Effect::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Effect::Short) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(Effect::Lie) => Ok(()),
        }
    }
}

/// A drive that can lose power: what was written is seen at once, but survives only a flush.
pub struct CrashDevice {
    live: Arc<MemoryDevice>,
    state: Mutex<CrashState>,
}

struct CrashState {
    durable: Arc<MemoryDevice>,
    pending: Vec<(u64, Box<[u8]>)>,
    writes_left: Option<u64>,
    writes: u64,
    flushes: u64,
}

impl CrashDevice {
    /// A drive that holds what `image` holds, all of it durable.
    pub fn new(image: &MemoryDevice) -> Arc<Self> {
        Arc::new(Self {
            live: image.copy(),
            state: Mutex::new(CrashState {
                durable: image.copy(),
                pending: Vec::new(),
                writes_left: None,
                writes: 0,
                flushes: 0,
            }),
        })
    }

    /// After `writes` more writes every call fails with EIO, as if the power were gone.
    pub fn freeze_after(&self, writes: u64) {
        self.state.lock().writes_left = Some(writes);
    }

    /// Whether the freeze point is reached.
    pub fn is_frozen(&self) -> bool {
        self.state.lock().writes_left == Some(0)
    }

    /// Writes so far.
    pub fn writes(&self) -> u64 {
        self.state.lock().writes
    }

    /// Flushes so far.
    pub fn flushes(&self) -> u64 {
        self.state.lock().flushes
    }

    /// What a drive could hold after a power cut now: everything flushed, and of every write since then each 4 KiB
    /// block whole, not at all, or torn (some of its 512 B sectors). The same `seed` gives the same image.
    pub fn crash(&self, seed: u64) -> Arc<MemoryDevice> {
        let mut random = SplitMix(seed);
        let state = self.state.lock();
        let image = state.durable.copy();
        for (offset, bytes) in &state.pending {
            for (i, block) in bytes.chunks(BLOCK).enumerate() {
                let at = offset + (i * BLOCK) as u64;
                match random.next() % 4 {
                    0 => {}
                    1 => {
                        let kept = random.next();
                        for (j, sector) in block.chunks(SECTOR).enumerate() {
                            if kept >> j & 1 == 1 {
                                image.put(sector, at + (j * SECTOR) as u64);
                            }
                        }
                    }
                    _ => image.put(block, at),
                }
            }
        }
        image
    }

    /// What a power cut now would leave at best and what kill -9 leaves: everything written.
    pub fn live(&self) -> Arc<MemoryDevice> {
        let _state = self.state.lock();
        self.live.copy()
    }

    /// What a power cut now would leave at worst: everything flushed, nothing else.
    pub fn durable(&self) -> Arc<MemoryDevice> {
        self.state.lock().durable.copy()
    }
}

fn power_is_gone() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl Device for CrashDevice {
    fn name(&self) -> &str {
        self.live.name()
    }

    fn size(&self) -> u64 {
        self.live.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if self.is_frozen() {
            return Err(power_is_gone());
        }
        self.live.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        match &mut state.writes_left {
            Some(0) => return Err(power_is_gone()),
            Some(left) => *left -= 1,
            None => {}
        }
        self.live.write_at(buf, offset)?;
        state.writes += 1;
        state.pending.push((offset, buf.into()));
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.writes_left == Some(0) {
            return Err(power_is_gone());
        }
        state.flushes += 1;
        for (offset, bytes) in std::mem::take(&mut state.pending) {
            state.durable.put(&bytes, offset);
        }
        Ok(())
    }
}

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRIVE: u64 = 4 << 20;

    fn read(device: &dyn Device, offset: u64) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        device.read_at(&mut block, offset).unwrap();
        block
    }

    #[test]
    fn memory_holds_what_was_written_across_pieces() {
        let device = MemoryDevice::new(DRIVE);
        let offset = PIECE as u64 - BLOCK as u64;
        let bytes: Vec<u8> = (0..3 * BLOCK).map(|i| (i % 253) as u8).collect();
        device.write_at(&bytes, offset).unwrap();
        let copy = device.copy();
        device.flip(offset, 0xff);
        let mut read = vec![1; 5 * BLOCK];
        copy.read_at(&mut read, offset - BLOCK as u64).unwrap();
        assert!(read[..BLOCK].iter().chain(&read[4 * BLOCK..]).all(|&b| b == 0));
        assert_eq!(read[BLOCK..4 * BLOCK], bytes);
        assert!(device.read_at(&mut read, 512).is_err());
        assert!(device.write_at(&bytes, DRIVE - BLOCK as u64).is_err());
    }

    #[test]
    fn only_a_flush_makes_writes_survive_for_sure() {
        let device = CrashDevice::new(&MemoryDevice::new(DRIVE));
        device.write_at(&[1; BLOCK], 0).unwrap();
        device.flush().unwrap();
        device.write_at(&[2; BLOCK], 0).unwrap();
        device.write_at(&[3; BLOCK], BLOCK as u64).unwrap();
        assert_eq!(read(&*device, 0), [2; BLOCK]);
        assert_eq!(read(&*device.live(), 0), [2; BLOCK]);
        assert_eq!(read(&*device.durable(), 0), [1; BLOCK]);

        let (mut old, mut new, mut torn, mut reordered) = (0, 0, 0, 0);
        for seed in 0..200 {
            let image = device.crash(seed);
            let (first, second) = (read(&*image, 0), read(&*image, BLOCK as u64));
            for sector in first.chunks(SECTOR) {
                assert!(sector == [1; SECTOR] || sector == [2; SECTOR]);
            }
            match &first[..] {
                b if b == [1; BLOCK] => old += 1,
                b if b == [2; BLOCK] => new += 1,
                _ => torn += 1,
            }
            reordered += usize::from(first == [1; BLOCK] && second == [3; BLOCK]);
            assert_eq!(first, read(&*device.crash(seed), 0), "the seed decides");
        }
        assert!(old > 20 && new > 20 && torn > 20 && reordered > 5);
    }

    #[test]
    fn after_the_freeze_point_nothing_answers() {
        let device = CrashDevice::new(&MemoryDevice::new(DRIVE));
        device.freeze_after(2);
        device.write_at(&[1; BLOCK], 0).unwrap();
        device.flush().unwrap();
        assert!(!device.is_frozen());
        device.write_at(&[2; BLOCK], 0).unwrap();
        assert!(device.is_frozen());
        assert!(device.write_at(&[3; BLOCK], 0).is_err());
        assert!(device.read_at(&mut [0; BLOCK], 0).is_err());
        assert!(device.flush().is_err());
        assert_eq!(read(&*device.live(), 0), [2; BLOCK]);
        assert_eq!(read(&*device.durable(), 0), [1; BLOCK]);
        assert_eq!((device.writes(), device.flushes()), (2, 1));
    }

    #[test]
    fn stalled_calls_go_on_late() {
        let memory = MemoryDevice::new(DRIVE);
        let device = StallDevice::new(memory.clone());
        device.stall(Calls::WRITES);
        std::thread::scope(|scope| {
            scope.spawn(|| device.write_at(&[1; BLOCK], 0).unwrap());
            assert!(device.await_waiting(1, Duration::from_secs(60)));
            assert_eq!(read(&*device, 0), [0; BLOCK]);
            device.resume();
        });
        assert_eq!(read(&*memory, 0), [1; BLOCK]);
        assert_eq!(device.waiting(), 0);
    }
}
