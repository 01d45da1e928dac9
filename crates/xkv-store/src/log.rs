//! The manifest log: two areas on the first drive. One holds a snapshot of the live manifests followed by what
//! happened since; when it is full, the next snapshot goes to the other one under the next epoch.
//!
//! A block of 4 KiB: magic (u32), CRC-32C of the store's UUID and bytes 8.. (u32), epoch (u64), number in the area
//! (u64), offset of the first record that starts in the payload, or 0xFFFF (u16), bytes used of the payload (u16),
//! zero (u32), payload. Records run over block ends; a group of records always starts a new block.
//!
//! Epochs grow by steps that nobody can foresee: blocks that a snapshot left behind when it was cut short lie beyond the
//! end of the next one in that area, and must not be taken for its continuation.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::Arc;

use crate::buf::{SlotBuf, SlotPool};
use crate::bytes::{array, crc32c, get_u32, get_u64, put_u32, put_u64};
use crate::error::{Error, Result};
use crate::io::{BLOCK, Device};
use crate::layout::Superblock;
use crate::record::{Parsed, Record, parse};

const MAGIC: u32 = u32::from_le_bytes(*b"XKVL");
const HEAD: usize = 32;
const PAYLOAD: usize = BLOCK - HEAD;
const NO_RECORD: u16 = u16::MAX;
/// Bytes read or written at once.
const CHUNK: usize = 1 << 20;
/// Chunks that a scan reads ahead: one that waits and one that is being read.
const AHEAD: usize = 2;
/// Largest group, in blocks; also how far a scan looks behind damage for the log's continuation.
const GROUP_BLOCKS: u64 = 1024;

/// Writes the log and reads it back.
pub struct Log {
    device: Arc<dyn Device>,
    header: Superblock,
    chunk: SlotBuf,
    area: usize,
    epoch: u64,
    /// Largest epoch that was read or written.
    highest: u64,
    next: u64,
}

/// What a scan of the log found beside its records.
#[derive(Default)]
pub struct Recovered {
    /// Damaged blocks in front of the log's end, and damaged records.
    pub damaged: u64,
    /// False when neither area held a whole snapshot.
    pub complete: bool,
}

impl Log {
    /// A log on the first drive of a store, positioned nowhere: call [`Log::recover`] or [`Log::snapshot`] first.
    pub fn new(device: Arc<dyn Device>, header: Superblock) -> Result<Self> {
        let chunk = SlotPool::new(1, CHUNK)?.try_take().expect("the only slot of a new pool is free");
        let epoch = header.epoch;
        Ok(Self { device, header, chunk, area: 1, epoch, highest: epoch, next: 0 })
    }

    /// The drive's header with the epoch in force, to be written next.
    pub fn next_header(&mut self) -> Superblock {
        self.header.sequence += 1;
        self.header.epoch = self.epoch;
        self.header.clone()
    }

    /// Takes over the header that was written last.
    pub fn start_from(&mut self, header: Superblock) {
        self.header = header;
    }

    /// Largest group of records that fits in an area beside the largest snapshot, bytes.
    pub fn group_limit(area_bytes: u64) -> usize {
        (GROUP_BLOCKS.min(area_bytes / BLOCK as u64 / 8) as usize) * PAYLOAD
    }

    /// Live manifests may take so many bytes, so that a snapshot leaves a quarter of the area to the log.
    pub fn live_limit(area_bytes: u64) -> u64 {
        area_bytes / BLOCK as u64 * 3 / 4 * PAYLOAD as u64
    }

    fn area_blocks(&self) -> u64 {
        self.header.area_bytes / BLOCK as u64
    }

    /// Whether a group of `bytes` fits behind what is there.
    pub fn fits(&self, bytes: usize) -> bool {
        self.next + blocks(bytes) <= self.area_blocks()
    }

    /// Share of the area in use, 0 to 1.
    pub fn fill(&self) -> f64 {
        self.next as f64 / self.area_blocks() as f64
    }

    /// Appends a group of records. They count when the drive was flushed after it; should either fail, some may still be
    /// readable after a crash, and only a [`Log::snapshot`] goes on.
    pub fn append(&mut self, records: &[u8]) -> io::Result<()> {
        let mut writer = BlockWriter::new(self, self.area, self.epoch, self.next);
        writer.push(records)?;
        self.next = writer.finish()?;
        Ok(())
    }

    /// Writes a snapshot to the other area under the next epoch and goes on there. `fill` hands every record to its
    /// argument, the end record last.
    pub fn snapshot(
        &mut self,
        fill: impl FnOnce(&mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()>,
    ) -> io::Result<()> {
        let (area, epoch) = (1 - self.area, self.highest.saturating_add(step()));
        self.highest = epoch;
        let mut writer = BlockWriter::new(self, area, epoch, 0);
        fill(&mut |records| writer.push(records))?;
        let next = writer.finish()?;
        self.device.flush()?;
        (self.area, self.epoch, self.next) = (area, epoch, next);
        Ok(())
    }

    /// Reads the newest whole log, handing every record to `found` in order, and goes on behind it. `reset` is called
    /// before a log is read: what was found before does not count.
    ///
    /// # Errors
    /// The drive refuses to read.
    pub fn recover(&mut self, mut reset: impl FnMut(), mut found: impl FnMut(Record)) -> Result<Recovered> {
        let mut epochs = Vec::new();
        for area in 0..2 {
            if let Some(epoch) = self.first_epoch(area)? {
                epochs.push((epoch, area));
            }
        }
        epochs.sort_unstable();
        self.highest = epochs.last().map_or(0, |e| e.0).max(self.header.epoch);
        for (epoch, area) in epochs.into_iter().rev() {
            reset();
            let mut recovered = Recovered::default();
            let end = self.scan(area, epoch, &mut recovered, &mut found)?;
            if recovered.complete {
                (self.area, self.epoch, self.next) = (area, epoch, end);
                return Ok(recovered);
            }
        }
        reset();
        self.epoch = self.highest;
        Ok(Recovered::default())
    }

    /// Epoch of the first readable block of an area, within the first group.
    fn first_epoch(&mut self, area: usize) -> Result<Option<u64>> {
        let blocks = GROUP_BLOCKS.min(self.area_blocks());
        for from in (0..blocks).step_by(CHUNK / BLOCK) {
            let count = ((blocks - from) as usize).min(CHUNK / BLOCK);
            let bytes = &mut self.chunk[..count * BLOCK];
            read(&*self.device, self.header.area_offset(area) + from * BLOCK as u64, bytes)?;
            for (i, block) in self.chunk[..count * BLOCK].chunks_exact(BLOCK).enumerate() {
                if let Some(block) = open_block(&self.header, block)
                    && block.number == from + i as u64
                {
                    return Ok(Some(block.epoch));
                }
            }
        }
        Ok(None)
    }

    /// Reads one area: the next blocks while the ones before are looked at. Returns the block after the last valid one.
    fn scan(
        &self,
        area: usize,
        epoch: u64,
        recovered: &mut Recovered,
        found: &mut impl FnMut(Record),
    ) -> Result<u64> {
        let (device, start) = (&*self.device, self.header.area_offset(area));
        let blocks = self.area_blocks();
        let pool = SlotPool::new(1 + AHEAD, CHUNK)?;
        std::thread::scope(|scope| {
            // Dropped when the scan ends, which ends the reading too.
            let (sender, chunks) = crossbeam_channel::bounded(AHEAD - 1);
            let read_ahead = move || {
                for from in (0..blocks).step_by(CHUNK / BLOCK) {
                    let mut chunk = pool.try_take().expect("the others are looked at or wait");
                    let bytes = CHUNK.min((blocks - from) as usize * BLOCK);
                    let outcome = read(device, start + from * BLOCK as u64, &mut chunk[..bytes]);
                    if sender.send((from, bytes, outcome.map(|()| chunk))).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new()
                .name("xkv-log".to_owned())
                .spawn_scoped(scope, read_ahead)
                .map_err(|error| Error::io("cannot start the thread xkv-log".to_owned(), error))?;
            let mut stream = Stream { bytes: Vec::new(), limit: self.header.area_bytes as usize };
            let (mut end, mut missing) = (0, 0);
            for (from, bytes, chunk) in chunks {
                for (number, bytes) in (from..).zip(chunk?[..bytes].chunks_exact(BLOCK)) {
                    let block =
                        open_block(&self.header, bytes).filter(|b| b.epoch == epoch && b.number == number);
                    let Some(block) = block else {
                        missing += 1;
                        if missing > GROUP_BLOCKS {
                            return Ok(end);
                        }
                        continue;
                    };
                    if missing > 0 {
                        recovered.damaged += missing;
                        missing = 0;
                        stream.bytes.clear();
                    }
                    end = number + 1;
                    recovered.damaged += stream.push(&block, |record| match record {
                        Record::SnapshotEnd(_) => recovered.complete = true,
                        record => found(record),
                    });
                }
            }
            Ok(end)
        })
    }
}

/// Reads blocks of the log. One that the drive cannot read is left zero, so that it counts as damaged and costs only its
/// own records.
fn read(device: &dyn Device, offset: u64, blocks: &mut [u8]) -> Result<()> {
    if device.read_at(blocks, offset).is_ok() {
        return Ok(());
    }
    let mut readable = 0;
    let mut last = None;
    for (i, block) in blocks.chunks_exact_mut(BLOCK).enumerate() {
        match device.read_at(block, offset + (i * BLOCK) as u64) {
            Ok(()) => readable += 1,
            Err(error) => {
                block.fill(0);
                last = Some(error);
            }
        }
    }
    match last {
        Some(error) if readable == 0 => {
            Err(Error::io(format!("{}: cannot read the manifest log at byte {offset}", device.name()), error))
        }
        _ => Ok(()),
    }
}

/// From one epoch to the next: 1 to 2^32.
fn step() -> u64 {
    1 + u64::from(RandomState::new().build_hasher().finish() as u32)
}

/// Blocks that `bytes` of records take.
fn blocks(bytes: usize) -> u64 {
    bytes.div_ceil(PAYLOAD) as u64
}

struct Block<'a> {
    epoch: u64,
    number: u64,
    first: u16,
    payload: &'a [u8],
}

/// The block in `bytes`, when it is one of this store's log.
fn open_block<'a>(header: &Superblock, bytes: &'a [u8]) -> Option<Block<'a>> {
    if get_u32(bytes, 0) != MAGIC || get_u32(bytes, 4) != crc32c(&[&header.set, &bytes[8..BLOCK]]) {
        return None;
    }
    let used = u16::from_le_bytes(array(bytes, 26)) as usize;
    Some(Block {
        epoch: get_u64(bytes, 8),
        number: get_u64(bytes, 16),
        first: u16::from_le_bytes(array(bytes, 24)),
        payload: bytes[HEAD..].get(..used)?,
    })
}

/// Puts records together that run over block ends.
struct Stream {
    /// Start of a record whose rest is in the next block.
    bytes: Vec<u8>,
    limit: usize,
}

impl Stream {
    /// Takes the next block of the log. Returns the number of damaged records.
    fn push(&mut self, block: &Block<'_>, mut found: impl FnMut(Record)) -> u64 {
        let mut damaged = 0;
        let mut at = 0;
        if self.bytes.is_empty() || block.first == 0 {
            damaged += u64::from(!self.bytes.is_empty());
            self.bytes.clear();
            at = (block.first as usize).min(block.payload.len());
        }
        self.bytes.extend_from_slice(&block.payload[at..]);
        let mut done = 0;
        loop {
            match parse(&self.bytes[done..], self.limit) {
                Parsed::Record(record, len) => {
                    found(record);
                    done += len;
                }
                Parsed::Damaged(len) => {
                    damaged += 1;
                    done += len;
                }
                Parsed::Incomplete => break,
                Parsed::Lost => {
                    damaged += 1;
                    done = self.bytes.len();
                }
            }
        }
        self.bytes.drain(..done);
        damaged
    }
}

/// Packs records into blocks and writes them, a chunk at a time.
struct BlockWriter<'a> {
    log: &'a mut Log,
    area: usize,
    epoch: u64,
    /// Block that the first byte of the chunk goes to.
    base: u64,
    /// Blocks in the chunk.
    ready: usize,
    /// Records not packed yet, and where records start in them.
    pending: Vec<u8>,
    starts: std::collections::VecDeque<usize>,
}

impl<'a> BlockWriter<'a> {
    fn new(log: &'a mut Log, area: usize, epoch: u64, base: u64) -> Self {
        let (pending, starts) = Default::default();
        Self { log, area, epoch, base, ready: 0, pending, starts }
    }

    /// Takes whole records.
    fn push(&mut self, records: &[u8]) -> io::Result<()> {
        let mut at = 0;
        while at < records.len() {
            self.starts.push_back(self.pending.len() + at);
            at += get_u32(records, at) as usize;
        }
        self.pending.extend_from_slice(records);
        self.pack(PAYLOAD)
    }

    /// Writes what is left. Returns the block after the last one.
    fn finish(mut self) -> io::Result<u64> {
        self.pack(1)?;
        self.write()?;
        Ok(self.base)
    }

    /// Packs while at least `least` bytes are pending.
    fn pack(&mut self, least: usize) -> io::Result<()> {
        let mut done = 0;
        while self.pending.len() - done >= least {
            let used = (self.pending.len() - done).min(PAYLOAD);
            let first = self.starts.front().map(|s| s - done).filter(|&s| s < used);
            let block = &mut self.log.chunk[self.ready * BLOCK..][..BLOCK];
            put_u32(block, 0, MAGIC);
            put_u64(block, 8, self.epoch);
            put_u64(block, 16, self.base + self.ready as u64);
            block[24..26].copy_from_slice(&first.map_or(NO_RECORD, |f| f as u16).to_le_bytes());
            block[26..28].copy_from_slice(&(used as u16).to_le_bytes());
            block[28..HEAD].fill(0);
            block[HEAD..HEAD + used].copy_from_slice(&self.pending[done..done + used]);
            block[HEAD + used..].fill(0);
            let crc = crc32c(&[&self.log.header.set, &block[8..]]);
            put_u32(block, 4, crc);
            done += used;
            while self.starts.front().is_some_and(|&s| s < done) {
                self.starts.pop_front();
            }
            self.ready += 1;
            if self.ready == CHUNK / BLOCK {
                self.write()?;
            }
        }
        self.pending.drain(..done);
        for start in &mut self.starts {
            *start -= done;
        }
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        if self.base + self.ready as u64 > self.log.area_blocks() {
            return Err(io::Error::other("the manifest area is full"));
        }
        if self.ready > 0 {
            let offset = self.log.header.area_offset(self.area) + self.base * BLOCK as u64;
            self.log.device.write_at(&self.log.chunk[..self.ready * BLOCK], offset)?;
        }
        self.base += self.ready as u64;
        self.ready = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::device::testing::{Calls, Effect, Fault, FaultyDevice, MemoryDevice};
    use crate::key::Digest;
    use crate::layout;
    use crate::record::{put_remove, put_snapshot_end};

    fn records(kind: u8, count: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for i in 0..count {
            let mut digest = [kind; 32];
            digest[..8].copy_from_slice(&(i as u64).to_le_bytes());
            put_remove(&mut out, &Digest(digest));
        }
        out
    }

    fn whole(log: &mut Log, kind: u8, count: usize) {
        let snapshot = log.snapshot(|put| {
            let mut records = records(kind, count);
            put_snapshot_end(&mut records, count as u64);
            put(&records)
        });
        snapshot.unwrap();
    }

    fn found(log: &mut Log) -> Vec<Record> {
        let all = std::cell::RefCell::new(Vec::new());
        let recovered =
            log.recover(|| all.borrow_mut().clear(), |record| all.borrow_mut().push(record)).unwrap();
        assert!(recovered.complete && recovered.damaged == 0);
        all.into_inner()
    }

    /// A snapshot fails after it wrote many blocks (the drive refuses, or the process dies). The log goes on, the live
    /// manifests become fewer, and the next snapshot goes to the same area and is shorter: what the first one left behind
    /// the second one's end is not part of the log, or removed objects would come back and take slots from new ones.
    #[test]
    fn blocks_of_a_snapshot_that_was_cut_short_join_no_later_one() {
        let device: Arc<dyn Device> = MemoryDevice::new(64 << 20);
        let header = header(8 << 20);
        let open = || Log::new(device.clone(), header.clone()).unwrap();
        let mut log = open();
        whole(&mut log, 1, 10);
        let cut_short = |log: &mut Log| {
            let failed = log.snapshot(|put| {
                put(&records(2, 60_000))?;
                Err(io::Error::other("cut short"))
            });
            assert!(failed.is_err());
        };
        cut_short(&mut log);
        assert_eq!(found(&mut open()).len(), 10);
        whole(&mut log, 3, 5);
        log.append(&records(4, 1)).unwrap();
        assert_eq!(found(&mut open()).len(), 6);

        // The same over a restart.
        cut_short(&mut log);
        let mut log = open();
        assert_eq!(found(&mut log).len(), 6);
        whole(&mut log, 5, 3);
        let records = found(&mut open());
        assert_eq!(records.len(), 3);
        assert!(matches!(&records[0], Record::Remove(Digest(digest)) if digest[31] == 5));
    }
    fn header(area_bytes: u64) -> Superblock {
        let planned = layout::plan(&["a"], &[64 << 20], 4096, [1; 16], &[[2; 16]]).unwrap().remove(0);
        Superblock { area_bytes, ..planned }
    }

    /// A drive that tells where it is read.
    struct Telling(Arc<MemoryDevice>, crossbeam_channel::Sender<u64>);

    impl Device for Telling {
        fn name(&self) -> &str {
            self.0.name()
        }
        fn size(&self) -> u64 {
            self.0.size()
        }
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            _ = self.1.send(offset);
            self.0.read_at(buf, offset)
        }
        fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
            self.0.write_at(buf, offset)
        }
        fn flush(&self) -> io::Result<()> {
            self.0.flush()
        }
    }

    /// Opening a large store must not wait for the drive and the CPU in turns.
    #[test]
    fn the_next_blocks_are_read_while_records_are_looked_at() {
        let (device, header) = (MemoryDevice::new(64 << 20), header(8 << 20));
        whole(&mut Log::new(device.clone(), header.clone()).unwrap(), 1, 60_000);
        let (sender, reads) = crossbeam_channel::unbounded();
        let mut log = Log::new(Arc::new(Telling(device, sender)), header.clone()).unwrap();
        let second = header.area_offset(0) + CHUNK as u64;
        let mut records = 0;
        let look = |_| {
            if records == 0 {
                let patience = std::time::Duration::from_secs(20);
                while reads.recv_timeout(patience).expect("the second chunk is read meanwhile") != second {}
            }
            records += 1;
        };
        assert!(log.recover(|| (), look).unwrap().complete);
        assert_eq!(records, 60_000);
    }

    /// What is read ahead may lie behind the log's end, where nothing was ever written: if it cannot be read, nothing is
    /// lost.
    #[test]
    fn an_unreadable_place_far_behind_the_end_is_none_of_the_log() {
        let device = FaultyDevice::new(MemoryDevice::new(64 << 20));
        let header = header(8 << 20);
        let open = || Log::new(device.clone(), header.clone()).unwrap();
        whole(&mut open(), 1, 10);
        let looked_at = (GROUP_BLOCKS + 2).next_multiple_of((CHUNK / BLOCK) as u64) * BLOCK as u64;
        let start = header.area_offset(0);
        let fault = Fault::every(Calls::READS, Effect::Errno(libc::EIO));
        device.inject(Fault { offsets: start + looked_at..start + header.area_bytes, ..fault.clone() });
        assert_eq!(found(&mut open()).len(), 10);
        device.inject(Fault { offsets: start..start + 1, ..fault });
        assert!(!open().recover(|| (), |_| ()).unwrap().complete);
    }
}
