//! Drives of a store, read by another process on this machine. The owner keeps the index and hands out leases; whoever has
//! the drives' descriptors reads leased slots without it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Receiver;

use crate::buf::{Lent, SlotBuf, SlotPool};
use crate::bytes::hex;
use crate::error::{Error, ErrorKind, Result};
use crate::io::device::FileDevice;
use crate::io::engine::{EngineLoad, LentDone, LentRequest};
use crate::io::{BLOCK, Device, EngineKind, IoEngine, IoRequest, Op, engine};
use crate::layout::{SUPERBLOCKS, Superblock};

/// One drive of a store that another process owns. Dropped, it answers what is queued; what the drive has is answered by the drive.
pub struct DriveReader {
    engine: Arc<dyn IoEngine>,
    header: Superblock,
}

/// A drive whose header is being read.
pub struct Opening {
    name: String,
    device: Arc<FileDevice>,
    engine: Arc<dyn IoEngine>,
    copies: Receiver<(SlotBuf, io::Result<()>)>,
}

impl DriveReader {
    /// Takes drive `index` of a store from its owner's descriptor, with up to `depth` reads in flight, and starts to read its
    /// header.
    ///
    /// # Errors
    /// It is no drive, or buffered; no engine can be had here.
    pub fn begin(fd: OwnedFd, index: usize, depth: usize) -> Result<Opening> {
        let name = format!("drive {index} of the gateway");
        let device = Arc::new(FileDevice::shared(fd, &name)?);
        if !device.goes_straight() {
            return Err(Error::new(ErrorKind::Invalid, format!("{name}: is read through the page cache")));
        }
        let engine = engine::start(device.clone(), EngineKind::Auto, depth)?;
        let pool = SlotPool::new(SUPERBLOCKS.len(), BLOCK)?;
        let (sender, copies) = crossbeam_channel::unbounded();
        for offset in SUPERBLOCKS {
            let buf = pool.try_take().expect("a slot for each copy");
            let sender = sender.clone();
            let done = Box::new(move |buf, outcome| _ = sender.send((buf, outcome)));
            engine.submit(IoRequest { op: Op::Read, offset, len: BLOCK, buf, done });
        }
        Ok(Opening { name, device, engine, copies })
    }

    /// Reads what lies in slot `slot` and behind it into `memory`, whole blocks. The caller has a lease of these slots, and
    /// asks their owner afterwards whether it still had it.
    pub fn read(&self, slot: u32, memory: Lent, done: LentDone) {
        if u64::from(slot) >= self.header.slots {
            drop(memory);
            return done(Err(io::ErrorKind::InvalidInput.into()));
        }
        let offset = self.header.slots_offset + u64::from(slot) * u64::from(self.header.fragment_bytes);
        self.engine.submit_lent(LentRequest { op: Op::Read, offset, memory, done });
    }

    /// What is queued and in flight.
    pub fn load(&self) -> EngineLoad {
        self.engine.load()
    }
}

impl Opening {
    /// Waits for the header until `deadline`: it must be that of drive `index` of the store `id` (hexadecimal), of fragments of
    /// `fragment_bytes`.
    ///
    /// # Errors
    /// It did not come, or is another one.
    pub fn finish(
        self,
        id: &str,
        index: usize,
        fragment_bytes: usize,
        deadline: Instant,
    ) -> Result<DriveReader> {
        let refuse = |what: String| Error::new(ErrorKind::Mismatch, format!("{}: {what}", self.name));
        let header =
            self.header(deadline).map_err(|error| refuse(format!("its header was not read: {error}")))?;
        let header = header.ok_or_else(|| refuse("has no header".into()))?;
        let place = (header.index as usize, header.fragment_bytes as usize);
        if hex(&header.set) != id || place != (index, fragment_bytes) || header.end() > self.device.size() {
            return Err(refuse("its header is of another drive".into()));
        }
        Ok(DriveReader { engine: self.engine, header })
    }

    /// The newest valid copy.
    fn header(&self, deadline: Instant) -> io::Result<Option<Superblock>> {
        let mut newest: Option<Superblock> = None;
        for _ in SUPERBLOCKS {
            let (block, outcome) =
                self.copies.recv_deadline(deadline).map_err(|_| io::ErrorKind::TimedOut)?;
            outcome?;
            let copy = Superblock::decode(&block).map_err(io::Error::other)?;
            newest = newest.into_iter().chain(copy).max_by_key(|header| header.sequence);
        }
        Ok(newest)
    }
}
