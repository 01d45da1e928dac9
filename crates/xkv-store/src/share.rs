//! Drives of a store, read by another process on this machine. The owner keeps the index and hands out leases; whoever has
//! the drives' descriptors reads leased slots without it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use crate::buf::{Lent, SlotPool};
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

impl DriveReader {
    /// Takes drive `index` of the store `id` (hexadecimal, fragments of `fragment_bytes`) from its owner's descriptor, with up to
    /// `depth` reads in flight. Its header is read first, until `deadline`.
    ///
    /// # Errors
    /// The drive does not answer, or is another one; it is buffered; no engine can be had here.
    pub fn open(
        fd: OwnedFd,
        id: &str,
        index: usize,
        fragment_bytes: usize,
        depth: usize,
        deadline: Instant,
    ) -> Result<Self> {
        let name = format!("drive {index} of the gateway");
        let device = Arc::new(FileDevice::shared(fd, &name)?);
        let refuse = |what: &str| Error::new(ErrorKind::Mismatch, format!("{name}: {what}"));
        if !device.goes_straight() {
            return Err(refuse("is read through the page cache"));
        }
        let engine = engine::start(device.clone(), EngineKind::Auto, depth)?;
        let header = match read_header(&*engine, deadline) {
            Ok(header) => header.ok_or_else(|| refuse("has no header"))?,
            Err(error) => return Err(refuse(&format!("its header was not read: {error}"))),
        };
        let place = (header.index as usize, header.fragment_bytes as usize);
        if hex(&header.set) != id || place != (index, fragment_bytes) || header.end() > device.size() {
            return Err(refuse("its header is of another drive"));
        }
        Ok(Self { engine, header })
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

/// The newest valid copy of a drive's header, read through its engine, which a drive that hangs does not hold up.
fn read_header(engine: &dyn IoEngine, deadline: Instant) -> io::Result<Option<Superblock>> {
    let pool = SlotPool::new(SUPERBLOCKS.len(), BLOCK).map_err(io::Error::other)?;
    let (sender, answers) = crossbeam_channel::unbounded();
    for offset in SUPERBLOCKS {
        let buf = pool.try_take().expect("a slot for each copy");
        let sender = sender.clone();
        let done = Box::new(move |buf, outcome| _ = sender.send((buf, outcome)));
        engine.submit(IoRequest { op: Op::Read, offset, len: BLOCK, buf, done });
    }
    let mut newest: Option<Superblock> = None;
    for _ in SUPERBLOCKS {
        let (block, outcome) = answers.recv_deadline(deadline).map_err(|_| io::ErrorKind::TimedOut)?;
        outcome?;
        let copy = Superblock::decode(&block).map_err(io::Error::other)?;
        newest = newest.into_iter().chain(copy).max_by_key(|header| header.sequence);
    }
    Ok(newest)
}
