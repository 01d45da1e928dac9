//! Examination of a store that nobody has open: headers, manifest log, every manifest, every fragment.

use std::collections::HashMap;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use crate::buf::{SlotBuf, SlotPool};
use crate::checksum::fragment_sums;
use crate::config::StoreConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::io::device::open::{open, open_read_only, open_to_examine};
use crate::io::engine::start;
use crate::io::{BLOCK, Device, IoEngine, IoRequest, Op};
use crate::key::ObjectKey;
use crate::layout::Superblock;
use crate::log::Log;
use crate::open::mark_formed;
use crate::record::{self, ManifestRef};
use crate::recover::{Live, recover};
use crate::set;

/// Memory for reads in flight of one drive, bytes.
const WINDOW_BYTES: usize = 16 << 20;
/// How often the caller hears of the progress, at least, also when a drive hangs.
const TICK: Duration = Duration::from_millis(200);

/// What an examination found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Identity of the store, hexadecimal.
    pub store: String,
    /// Bytes of a fragment.
    pub fragment_bytes: u32,
    /// Its drives, in the store's order.
    pub drives: Vec<DriveReport>,
    /// Objects that the log says are there, damaged ones included.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Slots they take.
    pub slots_used: u64,
    /// Slots in all.
    pub slots_total: u64,
    /// False when neither manifest area holds a log: everything that was stored is lost.
    pub log_found: bool,
    /// Damaged blocks and records of the log; what they spoke of is lost.
    pub log_damage: u64,
    /// Objects whose slots belong to newer ones; they are lost.
    pub overlapping: u64,
    /// Objects of an impossible size, key or set of slots; they are lost.
    pub implausible: u64,
    /// Objects with a fragment that cannot be read or is not what was stored.
    pub damaged: Vec<DamagedObject>,
    /// Whether the damage was repaired: damaged objects removed, headers and log written anew.
    pub repaired: bool,
}

/// What is wrong with a drive.
#[derive(Clone, Debug)]
pub struct DriveReport {
    /// Path of the device or file.
    pub name: String,
    /// Bytes of the device or file.
    pub bytes: u64,
    /// Its slots.
    pub slots: u64,
    /// Whether both copies of the header are valid. One is enough to open the store.
    pub header_whole: bool,
}

/// An object that cannot be loaded.
#[derive(Clone, Debug)]
pub struct DamagedObject {
    /// Its key.
    pub key: ObjectKey,
    /// Its bytes.
    pub size: u64,
    /// Fragments whose checksum does not match.
    pub mismatched: u64,
    /// Fragments that the drive cannot read, and its latest reason.
    pub unreadable: u64,
    /// See `unreadable`.
    pub error: Option<String>,
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.log_found
            && self.log_damage + self.overlapping + self.implausible == 0
            && self.damaged.is_empty()
            && self.drives.iter().all(|drive| drive.header_whole)
    }
}

/// How far an examination is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes of fragments read.
    pub done: u64,
    /// Bytes of all fragments.
    pub total: u64,
    /// Damaged objects found so far.
    pub damaged: u64,
}

/// Examines the store on `config.paths`, which it locks, and changes nothing. With `repair`, damage is repaired
/// afterwards: damaged objects are removed, headers mended, and the log is written anew. `progress` is called about
/// five times a second and can end it.
///
/// # Errors
/// No store at the paths, and those of [`crate::Store::open`]; `Io` when `progress` ended it.
pub fn check(
    config: &StoreConfig,
    repair: bool,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Report> {
    let devices = if repair { open_for_writing(config)? } else { open_for_reading(config)? };
    check_on(devices, config, repair, progress)
}

fn nothing(path: &Path) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("{}: there is no store; name the drives, files or folders of one", path.display()),
    )
}

/// The drives of a store, locked, to be looked at alone.
pub(crate) fn open_for_reading(config: &StoreConfig) -> Result<Vec<Arc<dyn Device>>> {
    let options = config.open_options()?;
    let mut devices = Vec::new();
    for path in &config.paths {
        let file = open_to_examine(path, &options)?.ok_or_else(|| nothing(path))?;
        devices.push(Arc::new(file) as Arc<dyn Device>);
    }
    Ok(devices)
}

/// The drives of a store, locked. Nothing is made where there is nothing.
fn open_for_writing(config: &StoreConfig) -> Result<Vec<Arc<dyn Device>>> {
    let options = config.open_options()?;
    let mut devices = Vec::new();
    for path in &config.paths {
        open_read_only(path)?.ok_or_else(|| nothing(path))?;
        devices.push(Arc::new(open(path, &options)?) as Arc<dyn Device>);
    }
    Ok(devices)
}

/// [`check()`] on devices opened by the caller (tests).
///
/// # Errors
/// Those of [`check()`].
pub fn check_on(
    devices: Vec<Arc<dyn Device>>,
    config: &StoreConfig,
    repair: bool,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Report> {
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device).collect();
    let headers = set::recognise_store(&refs, config.fragment_bytes)?;
    let mut drives: Vec<(Superblock, Arc<dyn Device>)> =
        headers.into_iter().map(|(header, position)| (header, devices[position].clone())).collect();
    let first = drives[0].0.clone();
    let slots_total: u64 = drives.iter().map(|(header, _)| header.slots).sum();
    let mut log = Log::new(drives[0].1.clone(), first.clone())?;
    let recovery = recover(&mut log, slots_total as usize, first.fragment_bytes as usize)?;
    let fragments = |live: &Live| live.manifest.fragments.len() as u64;
    let mut report = Report {
        store: first.set.iter().map(|byte| format!("{byte:02x}")).collect(),
        fragment_bytes: first.fragment_bytes,
        drives: drives.iter().map(examine_drive).collect::<Result<_>>()?,
        objects: recovery.live.len() as u64,
        bytes: recovery.live.iter().map(|live| live.manifest.size).sum(),
        slots_used: recovery.live.iter().map(fragments).sum(),
        slots_total,
        log_found: recovery.complete,
        log_damage: recovery.log_damage,
        overlapping: recovery.overlapping,
        implausible: recovery.implausible,
        damaged: Vec::new(),
        repaired: false,
    };
    let damaged = verify(&drives, &recovery.live, config, progress)?;
    report.damaged = damaged.values().cloned().collect();
    report.damaged.sort_by(|a, b| a.key.digest().cmp(b.key.digest()));
    if repair && !report.is_clean() {
        mark_formed(&mut drives)?;
        log.start_from(drives[0].0.clone());
        let intact = recovery.live.iter().enumerate().filter(|(id, _)| !damaged.contains_key(id));
        write_log(&mut log, &*drives[0].1, intact.map(|(_, live)| live))
            .map_err(|error| Error::io(format!("{}: cannot write the log", drives[0].1.name()), error))?;
        report.repaired = true;
    }
    Ok(report)
}

fn examine_drive((header, device): &(Superblock, Arc<dyn Device>)) -> Result<DriveReport> {
    Ok(DriveReport {
        name: device.name().to_owned(),
        bytes: device.size(),
        slots: header.slots,
        header_whole: set::is_whole(&**device)?,
    })
}

/// A snapshot of `objects` in the other area, and the header that says so.
fn write_log<'a>(
    log: &mut Log,
    device: &dyn Device,
    objects: impl Iterator<Item = &'a Live>,
) -> io::Result<()> {
    log.snapshot(|put| {
        let (mut records, mut count) = (Vec::new(), 0);
        for Live { key, manifest } in objects {
            let (slots, sums): (Vec<u32>, Vec<_>) = manifest.fragments.iter().copied().unzip();
            let manifest = ManifestRef {
                recency: manifest.recency,
                size: manifest.size,
                namespace: key.namespace(),
                key: key.key(),
                slots: &slots,
                sums: &sums,
            };
            records.clear();
            record::put_commit(&mut records, &manifest);
            put(&records)?;
            count += 1;
        }
        records.clear();
        record::put_snapshot_end(&mut records, count);
        put(&records)
    })?;
    set::write(device, &log.next_header())
}

/// A fragment to be read: its slot on the drive, its object (position in the list of all), its number.
struct Piece {
    slot: u32,
    object: u32,
    index: u32,
}

/// A fragment that was read.
struct Read {
    drive: usize,
    piece: Piece,
    buf: SlotBuf,
    outcome: io::Result<()>,
}

/// One drive with what is still to be read from it, the last first.
struct Reader {
    header: Superblock,
    device: Arc<dyn Device>,
    engine: Arc<dyn IoEngine>,
    left: Vec<Piece>,
}

impl Reader {
    fn read(&mut self, drive: usize, objects: &[Live], buf: SlotBuf, answers: &Sender<Read>) -> bool {
        let Some(piece) = self.left.pop() else { return false };
        let len = fragment_len(&objects[piece.object as usize], &piece, &self.header);
        let bytes = u64::from(self.header.fragment_bytes);
        let offset = self.header.slots_offset + u64::from(piece.slot) * bytes;
        let answers = answers.clone();
        let done = Box::new(move |buf, outcome| _ = answers.send(Read { drive, piece, buf, outcome }));
        self.engine.submit(IoRequest { op: Op::Read, offset, len: len.next_multiple_of(BLOCK), buf, done });
        true
    }
}

fn fragment_len(live: &Live, piece: &Piece, header: &Superblock) -> usize {
    let bytes = u64::from(header.fragment_bytes);
    (live.manifest.size - u64::from(piece.index) * bytes).min(bytes) as usize
}

/// Reads and verifies every fragment of `objects`, in the order of the drives. Returns the damaged ones by position.
fn verify(
    drives: &[(Superblock, Arc<dyn Device>)],
    objects: &[Live],
    config: &StoreConfig,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<HashMap<usize, DamagedObject>> {
    let fragment_bytes = drives[0].0.fragment_bytes as usize;
    let mut readers = Vec::new();
    for (header, device) in drives {
        let engine = start(device.clone(), config.engine, config.depth)?;
        readers.push(Reader { header: header.clone(), device: device.clone(), engine, left: Vec::new() });
    }
    for (object, live) in objects.iter().enumerate() {
        for (index, &(slot, _)) in live.manifest.fragments.iter().enumerate() {
            let (drive, slot) = place(drives, slot);
            readers[drive].left.push(Piece { slot, object: object as u32, index: index as u32 });
        }
    }
    for reader in &mut readers {
        reader.left.sort_unstable_by_key(|piece| std::cmp::Reverse(piece.slot));
    }
    let window = (WINDOW_BYTES / fragment_bytes).clamp(2, config.depth.max(2));
    let pool = SlotPool::new(window * readers.len(), fragment_bytes)?;
    let (sender, answers) = unbounded();
    let mut in_flight = 0;
    for (drive, reader) in readers.iter_mut().enumerate() {
        for _ in 0..window {
            let buf = pool.try_take().expect("the pool has a window for each drive");
            in_flight += usize::from(reader.read(drive, objects, buf, &sender));
        }
    }
    let outcome = collect(&mut readers, objects, in_flight, &sender, &answers, progress);
    for reader in &readers {
        if !reader.engine.shutdown(Duration::from_secs(1)) {
            tracing::warn!(drive = reader.device.name(), "leaving while the drive still has I/O in flight");
        }
    }
    outcome
}

fn collect(
    readers: &mut [Reader],
    objects: &[Live],
    mut in_flight: usize,
    sender: &Sender<Read>,
    answers: &Receiver<Read>,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<HashMap<usize, DamagedObject>> {
    let mut damaged: HashMap<usize, DamagedObject> = HashMap::new();
    let total = objects.iter().map(|live| live.manifest.size).sum();
    let mut done = 0;
    let mut said = std::time::Instant::now();
    while in_flight > 0 {
        let answer = match answers.recv_timeout(TICK) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("this function has a sender"),
        };
        if let Some(Read { drive, piece, buf, outcome }) = answer {
            let live = &objects[piece.object as usize];
            let len = fragment_len(live, &piece, &readers[drive].header);
            let sums = live.manifest.fragments[piece.index as usize].1;
            let matches =
                outcome.is_ok() && fragment_sums(live.key.digest(), piece.index, &buf[..len]) == sums;
            if !matches {
                let entry = damaged.entry(piece.object as usize).or_insert_with(|| DamagedObject {
                    key: live.key.clone(),
                    size: live.manifest.size,
                    mismatched: 0,
                    unreadable: 0,
                    error: None,
                });
                match outcome {
                    Ok(()) => entry.mismatched += 1,
                    Err(error) => {
                        entry.unreadable += 1;
                        entry.error = Some(format!("{}: {error}", readers[drive].device.name()));
                    }
                }
            }
            done += len as u64;
            if !readers[drive].read(drive, objects, buf, sender) {
                in_flight -= 1;
            }
        }
        if said.elapsed() >= TICK || in_flight == 0 {
            said = std::time::Instant::now();
            let state = Progress { done, total, damaged: damaged.len() as u64 };
            if progress(state).is_break() {
                return Err(Error::new(
                    ErrorKind::Io,
                    "the examination was interrupted; nothing was changed",
                ));
            }
        }
    }
    Ok(damaged)
}

/// Drive of a slot, and its number there.
fn place(drives: &[(Superblock, Arc<dyn Device>)], slot: u32) -> (usize, u32) {
    let mut slot = u64::from(slot);
    for (drive, (header, _)) in drives.iter().enumerate() {
        if slot < header.slots {
            return (drive, slot as u32);
        }
        slot -= header.slots;
    }
    unreachable!("recovery keeps only slots that exist")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::device::testing::MemoryDevice;
    use crate::store::Store;

    const FRAGMENT: usize = 4096;

    /// Writes records behind the log's end, as no store would.
    fn append(device: &Arc<MemoryDevice>, records: &[u8]) {
        let header = set::read(&**device).unwrap().unwrap();
        let mut log = Log::new(device.clone(), header.clone()).unwrap();
        recover(&mut log, header.slots as usize, FRAGMENT).unwrap();
        log.append(records).unwrap();
    }

    fn commit(key: &[u8], slots: &[u32], size: u64) -> Vec<u8> {
        let key = ObjectKey::new(&Arc::from(&b"ns"[..]), key);
        let zeros = vec![0; FRAGMENT];
        let sums: Vec<_> =
            (0..slots.len()).map(|index| fragment_sums(key.digest(), index as u32, &zeros)).collect();
        let mut records = Vec::new();
        let (namespace, key) = (key.namespace(), key.key());
        record::put_commit(
            &mut records,
            &ManifestRef { recency: 1, size, namespace, key, slots, sums: &sums },
        );
        records
    }

    #[test]
    fn overlaps_and_manifests_that_cannot_be_right_are_told_and_repaired() {
        let device = MemoryDevice::new(16 << 20);
        let config = StoreConfig { fragment_bytes: Some(FRAGMENT as u32), ..StoreConfig::default() };
        drop(Store::format_on(vec![device.clone()], &config, false).unwrap());
        let bytes = FRAGMENT as u64;
        append(&device, &commit(b"older", &[1, 2], 2 * bytes));
        append(&device, &commit(b"newer", &[2, 3], 2 * bytes));
        append(&device, &commit(b"size", &[4], 2 * bytes));
        append(&device, &commit(b"slot", &[u32::MAX], bytes));
        let examine = |repair| {
            check_on(vec![device.clone()], &config, repair, &mut |_| ControlFlow::Continue(())).unwrap()
        };
        for repair in [false, true] {
            let report = examine(repair);
            assert_eq!((report.overlapping, report.implausible, report.log_damage), (1, 2, 0), "{report:?}");
            assert_eq!((report.objects, report.slots_used, report.damaged.len()), (1, 2, 0));
            assert_eq!(report.repaired, repair);
        }
        let report = examine(false);
        assert!(report.is_clean() && report.objects == 1, "{report:?}");
    }
}
