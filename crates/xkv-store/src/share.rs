//! Drives of a store, read by another process on this machine. The owner keeps the index and hands out leases; whoever has
//! the drives' descriptors, which cannot write, reads leased slots without it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::buf::{Lent, SlotPool};
use crate::error::{Error, ErrorKind, Result};
use crate::io::device::FileDevice;
use crate::io::engine::{EngineLoad, LentDone, LentRequest};
use crate::io::{BLOCK, Device, EngineKind, IoEngine, IoRequest, Op, engine};
use crate::layout::{SUPERBLOCKS, Superblock};

/// One drive of a store that another process owns.
pub struct DriveReader {
    engine: Arc<dyn IoEngine>,
    header: Superblock,
}

impl DriveReader {
    /// Takes drive `index` of the store `id` (hexadecimal, fragments of `fragment_bytes`) from its owner's descriptor, with up to
    /// `depth` reads in flight. Its header is read first, within `patience`.
    ///
    /// # Errors
    /// The drive does not answer, or is another one; it is buffered; no engine can be had here.
    pub fn open(
        fd: OwnedFd,
        id: &str,
        index: usize,
        fragment_bytes: usize,
        depth: usize,
        patience: Duration,
    ) -> Result<Self> {
        let device = Arc::new(FileDevice::shared(fd, &format!("drive {index} of the gateway"))?);
        let refuse = |what: &str| Error::new(ErrorKind::Mismatch, format!("{}: {what}", device.name()));
        if !device.goes_straight() {
            return Err(refuse("is read through the page cache"));
        }
        let engine = engine::start(device.clone(), EngineKind::Auto, depth)?;
        let header = read_header(&*engine, patience)?.ok_or_else(|| refuse("has no header"))?;
        let place = (header.index as usize, header.fragment_bytes as usize);
        if hex(&header.set) != id || place != (index, fragment_bytes) || header.end() > device.size() {
            return Err(refuse("its header is of another drive"));
        }
        Ok(Self { engine, header })
    }

    /// Reads what lies in slot `slot` and behind it into `memory`, whole blocks. The caller has a lease of these slots, and asks its owner
    /// afterwards whether it still had it.
    pub fn read(&self, slot: u32, memory: Lent, done: LentDone) {
        let offset = self.header.slots_offset + u64::from(slot) * u64::from(self.header.fragment_bytes);
        self.engine.submit_lent(LentRequest { op: Op::Read, offset, memory, done });
    }

    /// What is queued and in flight.
    pub fn load(&self) -> EngineLoad {
        self.engine.load()
    }
}

impl Drop for DriveReader {
    fn drop(&mut self) {
        // What is in flight is answered when the drive does.
        self.engine.shutdown(Duration::ZERO);
    }
}

/// The newest valid copy of a drive's header, read through its engine, which a drive that hangs does not hold up.
fn read_header(engine: &dyn IoEngine, patience: Duration) -> Result<Option<Superblock>> {
    let pool = SlotPool::new(SUPERBLOCKS.len(), BLOCK)?;
    let (sender, answers) = mpsc::channel();
    for offset in SUPERBLOCKS {
        let buf = pool.try_take().expect("a slot for each copy");
        let sender = sender.clone();
        let done = Box::new(move |buf, outcome| _ = sender.send((buf, outcome)));
        engine.submit(IoRequest { op: Op::Read, offset, len: BLOCK, buf, done });
    }
    let mut newest: Option<Superblock> = None;
    for _ in SUPERBLOCKS {
        let (block, outcome) = answers
            .recv_timeout(patience)
            .map_err(|_| Error::new(ErrorKind::Io, "its header was not read in time"))?;
        outcome.map_err(|error| Error::io("its header cannot be read".to_owned(), error))?;
        let copy = Superblock::decode(&block)?;
        newest = newest.into_iter().chain(copy).max_by_key(|header| header.sequence);
    }
    Ok(newest)
}

/// As hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
