//! The store's face: open, begin, write, commit, read, remove.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::alloc::{Allocator, Slots};
use crate::buf::SlotBuf;
use crate::checksum::FragmentSums;
use crate::commit::{Commits, Committer, MAX_TOUCHED, Op};
use crate::error::{Error, ErrorKind, Result};
use crate::evict;
use crate::index::{Claim, Entry, Index, Taken, Token};
use crate::io::device::open::{OpenOptions, Target, inspect, open, open_read_only};
use crate::io::engine::{IoDone, start};
use crate::io::{BLOCK, Device, DirectIo, EngineKind, EngineLoad, IoEngine, IoRequest, Op as IoOp};
use crate::key::{Digest, MAX_KEY_BYTES, ObjectKey};
use crate::layout::Superblock;
use crate::log::Log;
use crate::record::{self, manifest_bytes};
use crate::recover::{Live, recover};
use crate::set::{self, Found};
use crate::signals::Signals;

/// How to open a store.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Block devices, store files, or folders (made when missing) that get a store file each.
    pub paths: Vec<PathBuf>,
    /// Size of all files together, bytes; block devices are used whole. Only used when a store is made.
    pub file_bytes: u64,
    /// Bytes per fragment; none takes the store's own, 131,072 for a new one. Another value than the store's is refused.
    pub fragment_bytes: Option<u32>,
    /// How bytes move.
    pub engine: EngineKind,
    /// Whether the page cache is bypassed.
    pub direct: DirectIo,
    /// Requests in flight per drive.
    pub depth: usize,
    /// Overwrite foreign content and other stores.
    pub force: bool,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            paths: Vec::new(),
            file_bytes: 16 << 30,
            fragment_bytes: None,
            engine: EngineKind::Auto,
            direct: DirectIo::Auto,
            depth: 32,
            force: false,
        }
    }
}

/// Answer of [`Store::begin`].
pub enum Begin {
    /// Space is reserved: write every fragment, then commit. Dropping it gives the space back.
    Txn(Txn),
    /// The object is there already, whatever its size.
    Present,
    /// Another transaction writes this key (or its commit or removal is on the way); ask again later.
    Busy,
    /// Eviction is making room; ask again when the waker of [`Store::on_space`] was called.
    Wait,
    /// The object cannot fit: larger than the store allows, or everything else is being read.
    NoSpace,
    /// The store takes no changes (its log failed, or it is closed).
    ReadOnly,
}

/// Takes the outcome of a commit or removal, on the store's committer thread. Must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// Counters and gauges of a store.
#[derive(Clone, Debug, Default)]
pub struct StoreStats {
    /// Objects present.
    pub objects: u64,
    /// Slots of live objects, transactions, and removals not yet committed.
    pub slots_used: u64,
    /// Slots in all.
    pub slots_total: u64,
    /// Bytes of a fragment and of a slot.
    pub fragment_bytes: u32,
    /// Objects evicted since opening.
    pub evicted: u64,
    /// Objects committed since opening.
    pub committed: u64,
    /// Objects removed on request since opening.
    pub removed: u64,
    /// Objects dropped as damaged since opening (by a failed load or a recovery).
    pub discarded: u64,
    /// Groups of commits since opening.
    pub commit_groups: u64,
    /// Damaged blocks, records and implausible objects that the last recovery met.
    pub damaged: u64,
    /// Commits and removals waiting for the log.
    pub commits_queued: usize,
    /// For how long the group of commits being written has been.
    pub committing_for: Option<Duration>,
    /// True when the log failed and nothing can be stored.
    pub read_only: bool,
    /// What each drive's engine has to do.
    pub drives: Vec<EngineLoad>,
}

/// One drive: where its slots are, and what moves bytes.
pub(crate) struct Drive {
    pub(crate) device: Arc<dyn Device>,
    engine: Arc<dyn IoEngine>,
    slots_offset: u64,
    /// Written to since the last flush.
    dirty: AtomicBool,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) committed: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) groups: AtomicU64,
    removed: AtomicU64,
    discarded: AtomicU64,
    damaged: AtomicU64,
}

/// What clones, transactions, leases and the threads share.
pub(crate) struct Inner {
    pub(crate) drives: Vec<Drive>,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) index: Index,
    pub(crate) commits: Commits,
    pub(crate) signals: Arc<Signals>,
    pub(crate) counters: Counters,
    /// Fragments of the largest object seen.
    pub(crate) largest: AtomicUsize,
    /// Largest group of log records, bytes.
    pub(crate) group_limit: usize,
    /// Failed flushes so far. A transaction that saw one cannot be committed: what it wrote may be lost.
    pub(crate) flush_failures: AtomicU64,
    fragment_bytes: usize,
    live_limit: u64,
    read_only: AtomicBool,
    closed: AtomicBool,
    touched: Mutex<Vec<Digest>>,
}

impl Inner {
    pub(crate) fn read_only(&self) -> bool {
        self.read_only.load(Ordering::SeqCst)
    }

    pub(crate) fn set_read_only(&self, error: &io::Error) {
        if !self.read_only.swap(true, Ordering::SeqCst) {
            tracing::error!(
                drive = self.drives[0].device.name(),
                %error,
                "the manifest log failed; the store is read-only, serves what it has, and tries again every few seconds"
            );
        }
    }

    pub(crate) fn set_writable(&self) {
        self.read_only.store(false, Ordering::SeqCst);
        self.signals.changed();
    }

    /// Manifest bytes above which the evictor makes room, when somebody waits for `wanted` more.
    pub(crate) fn manifest_goal(&self, wanted: u64) -> u64 {
        (self.live_limit / 10 * 9).min(self.live_limit.saturating_sub(wanted))
    }

    /// Flushes every drive that was written to.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let dirty: Vec<&Drive> = self
            .drives
            .iter()
            .filter(|drive| drive.dirty.swap(false, Ordering::SeqCst))
            .collect();
        let flush = |drive: &&Drive| {
            drive.device.flush().inspect_err(|error| {
                drive.dirty.store(true, Ordering::SeqCst);
                self.flush_failures.fetch_add(1, Ordering::SeqCst);
                tracing::error!(drive = drive.device.name(), %error, "flush failed; stores since the last one are refused");
            })
        };
        match &dirty[..] {
            [] => Ok(()),
            [one] => flush(one),
            many => std::thread::scope(|scope| {
                let running: Vec<_> = many
                    .iter()
                    .map(|drive| scope.spawn(|| flush(drive)))
                    .collect();
                let ended: Vec<_> = running
                    .into_iter()
                    .map(|flush| {
                        flush
                            .join()
                            .unwrap_or_else(|_| Err(io::Error::other("the flush panicked")))
                    })
                    .collect();
                ended.into_iter().collect()
            }),
        }
    }

    /// Appends records of uses that the log has not heard of, up to `limit` bytes.
    pub(crate) fn put_touched(&self, records: &mut Vec<u8>, limit: usize) {
        let mut touched = std::mem::take(&mut *self.touched.lock());
        let start = records.len();
        while records.len() - start + record::HEADER + 40 <= limit {
            let Some(digest) = touched.pop() else { break };
            if let Some(entry) = self.index.by_digest(&digest) {
                entry.touched.store(false, Ordering::Relaxed);
                record::put_touch(records, &digest, entry.recency.load(Ordering::Relaxed));
            }
        }
        if !touched.is_empty() {
            self.touched.lock().append(&mut touched);
        }
    }

    fn fragments(&self, size: u64) -> u64 {
        size.div_ceil(self.fragment_bytes as u64)
    }

    fn fragment_len(&self, size: u64, index: u32) -> usize {
        let start = u64::from(index) * self.fragment_bytes as u64;
        (size - start).min(self.fragment_bytes as u64) as usize
    }

    /// Starts the I/O of one slot.
    fn io(&self, op: IoOp, slot: u32, len: usize, buf: SlotBuf, done: IoDone) {
        let (drive, slot) = self.allocator.place(slot);
        let drive = &self.drives[drive];
        let offset = drive.slots_offset + u64::from(slot) * self.fragment_bytes as u64;
        drive.engine.submit(IoRequest {
            op,
            offset,
            len: len.next_multiple_of(BLOCK),
            buf,
            done,
        });
    }
}

/// A store. Cheap to clone; the last clone closes it.
#[derive(Clone)]
pub struct Store(Arc<Handle>);

struct Handle {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close(Duration::from_secs(5));
    }
}

impl Handle {
    fn close(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        self.inner.closed.store(true, Ordering::SeqCst);
        self.inner.signals.close();
        self.inner.commits.close();
        let threads = std::mem::take(&mut *self.threads.lock());
        if threads.is_empty() {
            return;
        }
        let mut patient = true;
        for thread in threads {
            // A drive that hangs holds the committer: leave it behind then.
            while patient && !thread.is_finished() {
                patient = Instant::now() < deadline;
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                _ = thread.join();
            }
        }
        for drive in &self.inner.drives {
            let left = deadline
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(10));
            if !drive.engine.shutdown(left) {
                tracing::warn!(
                    drive = drive.device.name(),
                    "closing while the drive still has I/O in flight"
                );
            }
        }
    }
}

impl Store {
    /// Opens the store on `config.paths`, makes one where the drives are blank.
    ///
    /// # Errors
    /// See [`ErrorKind`]; every text names the path, the value and the cure.
    pub fn open(config: &StoreConfig) -> Result<Store> {
        let options = config.open_options()?;
        let mut files = Vec::new();
        for path in &config.paths {
            files.push(open(path, &options)?);
        }
        let devices: Vec<&dyn Device> = files.iter().map(|file| file as &dyn Device).collect();
        let (headers, fresh) = match set::recognise(&devices, config.fragment_bytes, config.force)?
        {
            Found::Store(headers) => (headers, false),
            Found::Blank => {
                let headers = set::plan(&devices, config.fragment_bytes)?;
                (
                    headers
                        .into_iter()
                        .enumerate()
                        .map(|(i, h)| (h, i))
                        .collect(),
                    true,
                )
            }
        };
        for (header, position) in &headers {
            files[*position].set_direct(config.direct, true)?;
            if fresh {
                files[*position].reserve(0, header.slots_offset)?;
            }
        }
        if !fresh {
            config.warn_of_other_size(
                &files
                    .iter()
                    .filter(|f| !f.is_block_device())
                    .map(|f| f.size())
                    .sum(),
            );
        }
        let mut files: Vec<Option<_>> = files.into_iter().map(Some).collect();
        let drives = headers
            .into_iter()
            .map(|(header, position)| {
                let file = files[position].take().expect("each drive has one position");
                (header, Arc::new(file) as Arc<dyn Device>)
            })
            .collect();
        Self::start(drives, fresh, config)
    }

    /// Does every check of [`Store::open`] and changes nothing.
    ///
    /// # Errors
    /// Those of [`Store::open`].
    pub fn probe(config: &StoreConfig) -> Result<()> {
        let options = config.open_options()?;
        let mut existing = Vec::new();
        let mut planned = Vec::new();
        for path in &config.paths {
            let inspection = inspect(path, &options)?;
            match open_read_only(path)? {
                Some(file) => existing.push(file),
                None => planned.push((path, inspection)),
            }
        }
        let devices: Vec<&dyn Device> = existing.iter().map(|file| file as &dyn Device).collect();
        let found = if devices.is_empty() {
            Found::Blank
        } else {
            set::recognise(&devices, config.fragment_bytes, config.force)?
        };
        match found {
            Found::Store(_) => match planned.first() {
                Some((path, _)) => Err(Error::new(
                    ErrorKind::Mismatch,
                    format!(
                        "{}: blank, but the other drives hold a store; name exactly its drives",
                        path.display()
                    ),
                )),
                None => Ok(()),
            },
            Found::Blank => {
                let mut names: Vec<&str> = devices.iter().map(|d| d.name()).collect();
                let mut sizes: Vec<u64> = devices.iter().map(|d| d.size()).collect();
                let paths: Vec<String> = planned
                    .iter()
                    .map(|(path, _)| path.display().to_string())
                    .collect();
                names.extend(paths.iter().map(String::as_str));
                sizes.extend(planned.iter().map(|_| options.file_bytes));
                let fragment_bytes = config
                    .fragment_bytes
                    .unwrap_or(crate::layout::DEFAULT_FRAGMENT_BYTES);
                let uuids = vec![[0; 16]; names.len()];
                crate::layout::plan(&names, &sizes, fragment_bytes, [0; 16], &uuids).map(|_| ())
            }
        }
    }

    /// Opens a store on devices made by the caller (tests). The paths and sizes of `config` do not count.
    ///
    /// # Errors
    /// Those of [`Store::open`].
    pub fn open_on(devices: Vec<Arc<dyn Device>>, config: &StoreConfig) -> Result<Store> {
        let refs: Vec<&dyn Device> = devices.iter().map(|d| &**d).collect();
        let (headers, fresh) = match set::recognise(&refs, config.fragment_bytes, config.force)? {
            Found::Store(headers) => (headers, false),
            Found::Blank => {
                let headers = set::plan(&refs, config.fragment_bytes)?;
                (
                    headers
                        .into_iter()
                        .enumerate()
                        .map(|(i, h)| (h, i))
                        .collect(),
                    true,
                )
            }
        };
        let drives = headers
            .into_iter()
            .map(|(header, position)| (header, devices[position].clone()))
            .collect();
        Self::start(drives, fresh, config)
    }

    fn start(
        mut drives: Vec<(Superblock, Arc<dyn Device>)>,
        fresh: bool,
        config: &StoreConfig,
    ) -> Result<Store> {
        let mut log = Log::new(drives[0].1.clone(), drives[0].0.clone())?;
        let slots: Vec<u64> = drives.iter().map(|(header, _)| header.slots).collect();
        if fresh {
            form(&mut drives, &mut log)?;
        } else {
            mark_formed(&mut drives)?;
        }
        let first = drives[0].0.clone();
        let fragment_bytes = first.fragment_bytes as usize;
        log.start_from(first.clone());
        let recovery = recover(&mut log, slots.iter().sum::<u64>() as usize, fragment_bytes)?;
        let mut used = vec![false; slots.iter().sum::<u64>() as usize];
        for (slot, _) in recovery
            .live
            .iter()
            .flat_map(|live| &live.manifest.fragments)
        {
            used[*slot as usize] = true;
        }
        let signals = Arc::new(Signals::default());
        let on_release = {
            let signals = signals.clone();
            Box::new(move || signals.changed())
        };
        let inner = Arc::new(Inner {
            drives: drives
                .into_iter()
                .map(|(header, device)| {
                    Ok(Drive {
                        engine: start(device.clone(), config.engine, config.depth)?,
                        device,
                        slots_offset: header.slots_offset,
                        dirty: AtomicBool::new(false),
                    })
                })
                .collect::<Result<_>>()?,
            allocator: Arc::new(Allocator::new(
                &slots,
                |slot| used[slot as usize],
                on_release,
            )),
            index: Index::new(),
            commits: Commits::default(),
            signals,
            counters: Counters::default(),
            largest: AtomicUsize::new(1),
            group_limit: Log::group_limit(first.area_bytes),
            flush_failures: AtomicU64::new(0),
            fragment_bytes,
            live_limit: Log::live_limit(first.area_bytes),
            read_only: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            touched: Mutex::default(),
        });
        inner
            .counters
            .damaged
            .store(recovery.damaged, Ordering::Relaxed);
        for live in recovery.live {
            inner.restore(live);
        }
        let fill = log.fill();
        let mut committer = Committer::new(inner.clone(), log);
        if !recovery.complete || recovery.damaged > 0 || fill > 0.5 {
            if !recovery.complete {
                tracing::error!(
                    drive = inner.drives[0].device.name(),
                    "no manifest log can be read; the store starts empty"
                );
            } else if recovery.damaged > 0 {
                tracing::warn!(
                    drive = inner.drives[0].device.name(),
                    damaged = recovery.damaged,
                    "the manifest log has damaged blocks or records; the objects they spoke of are gone"
                );
            }
            if let Err(error) = committer.snapshot() {
                inner.set_read_only(&error);
            }
        }
        let evictor = {
            let inner = inner.clone();
            move || evict::run(&inner)
        };
        let threads = vec![
            spawn("xkv-commit", move || committer.run())?,
            spawn("xkv-evict", evictor)?,
        ];
        inner.signals.kick();
        Ok(Store(Arc::new(Handle {
            inner,
            threads: Mutex::new(threads),
        })))
    }

    /// Bytes of a fragment.
    pub fn fragment_bytes(&self) -> usize {
        self.0.inner.fragment_bytes
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        self.0.inner.drives.len()
    }

    /// One line for the log: drives, capacity, engine, direct or buffered, objects found.
    pub fn describe(&self) -> String {
        let inner = &self.0.inner;
        let drives: Vec<String> = inner
            .drives
            .iter()
            .map(|drive| {
                let cache = if drive.device.is_direct() {
                    "direct"
                } else {
                    "buffered"
                };
                format!("{} ({}, {cache})", drive.device.name(), drive.engine.name())
            })
            .collect();
        format!(
            "store of {} drive{}: {}; {:.1} GiB in {} slots of {} bytes, {} objects",
            drives.len(),
            if drives.len() == 1 { "" } else { "s" },
            drives.join(", "),
            (inner.allocator.slots() * inner.fragment_bytes) as f64 / f64::from(1 << 30),
            inner.allocator.slots(),
            inner.fragment_bytes,
            inner.index.objects()
        )
    }

    /// Whether the object is present. In memory, no I/O, no waiting. Does not count as use.
    pub fn contains(&self, key: &ObjectKey) -> bool {
        self.0.inner.index.with(key, |_| ()).is_some()
    }

    /// Drives that the object has fragments on, as a bit set (drive 0 is bit 0; drives beyond 63 share bit 63); none
    /// when absent. In memory.
    pub fn drives_of(&self, key: &ObjectKey) -> Option<u64> {
        let inner = &self.0.inner;
        if inner.drives.len() == 1 {
            return self.contains(key).then_some(1);
        }
        inner.index.with(key, |entry| {
            entry.slots.numbers().iter().fold(0, |set, &slot| {
                set | 1 << inner.allocator.place(slot).0.min(63)
            })
        })
    }

    /// Starts storing an object of `size` bytes (at least 1).
    pub fn begin(&self, key: &ObjectKey, size: u64) -> Begin {
        let inner = &self.0.inner;
        if inner.closed.load(Ordering::SeqCst) || inner.read_only() {
            return Begin::ReadOnly;
        }
        let key_bytes = key.namespace().len() + key.key().len();
        let fragments = inner.fragments(size) as usize;
        let manifest = manifest_bytes(key_bytes, fragments);
        let largest = evict::largest_object(inner.allocator.slots());
        if size == 0
            || key_bytes > MAX_KEY_BYTES
            || fragments > largest
            || manifest > inner.group_limit
        {
            return Begin::NoSpace;
        }
        inner.largest.fetch_max(fragments, Ordering::Relaxed);
        let token = Token::default();
        // Asked twice: between a refusal and the wish to be woken the answer may have changed.
        for waiting in [false, true] {
            if waiting {
                inner.signals.wait();
            }
            let reserve = || {
                let room = inner.allocator.manifest_bytes() + manifest as u64 <= inner.live_limit;
                room.then(|| inner.allocator.reserve(fragments, manifest as u64))
                    .flatten()
            };
            match inner.index.claim(key, &token, reserve) {
                Claim::Claimed(slots) => {
                    if inner.allocator.free()
                        < evict::reserve(
                            inner.allocator.slots(),
                            inner.largest.load(Ordering::Relaxed),
                        )
                    {
                        inner.signals.kick();
                    }
                    let generation = inner.flush_failures.load(Ordering::SeqCst);
                    return Begin::Txn(Txn(Arc::new(TxnInner {
                        store: inner.clone(),
                        key: key.clone(),
                        size,
                        fragments: fragments as u32,
                        token,
                        generation,
                        numbers: slots.numbers().into(),
                        slots: Mutex::new(Some(slots)),
                        written: AtomicU32::new(0),
                    })));
                }
                Claim::Present => return Begin::Present,
                Claim::Busy if waiting => return Begin::Busy,
                Claim::Refused if waiting => {
                    inner.signals.ask(fragments, manifest as u64);
                    return Begin::Wait;
                }
                Claim::Busy | Claim::Refused => {}
            }
        }
        unreachable!("the second try returns")
    }

    /// Opens an object for reading and counts it as used. None: absent, or another key with the same digest.
    pub fn lease(&self, key: &ObjectKey) -> Option<Lease> {
        let inner = &self.0.inner;
        let entry = inner.index.lease(key)?;
        if !entry.touched.swap(true, Ordering::Relaxed) {
            let mut touched = inner.touched.lock();
            if touched.len() < MAX_TOUCHED {
                touched.push(*key.digest());
            } else {
                entry.touched.store(false, Ordering::Relaxed);
            }
        }
        Some(Lease {
            store: inner.clone(),
            entry,
        })
    }

    /// Removes an object and ends a transaction on it. `done` gets whether there was one, once the removal is
    /// committed: no store begun before becomes visible after that.
    pub fn remove(&self, key: &ObjectKey, done: Done<bool>) {
        let inner = &self.0.inner;
        let digest = *key.digest();
        let entry = match inner.index.take(&digest) {
            // An earlier removal, or a commit that failed, may not be durable yet.
            Taken::Nothing => {
                let done = Box::new(move |outcome: Result<()>| done(outcome.map(|()| false)));
                return inner.commits.barrier(inner.read_only(), done);
            }
            Taken::Transaction => None,
            Taken::Object(entry) => Some(entry),
        };
        inner.counters.removed.fetch_add(1, Ordering::Relaxed);
        let done = Box::new(move |outcome: Result<()>| done(outcome.map(|()| true)));
        inner.commits.push(Op::Remove {
            digest,
            entry,
            done,
        });
    }

    /// Removes a damaged object, unless another one has taken its place since.
    pub fn discard(&self, lease: &Lease) {
        let inner = &self.0.inner;
        if inner.index.take_entry(&lease.entry, |_| true) {
            inner.counters.discarded.fetch_add(1, Ordering::Relaxed);
            let (digest, entry) = (*lease.entry.key.digest(), Some(lease.entry.clone()));
            inner.commits.push(Op::Remove {
                digest,
                entry,
                done: Box::new(|_| ()),
            });
        }
    }

    /// Sets the function that is called when [`Begin::Wait`] or [`Begin::Busy`] may have become something else. Must
    /// not block.
    pub fn on_space(&self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.0.inner.signals.set_waker(waker);
    }

    /// Counters and gauges.
    pub fn stats(&self) -> StoreStats {
        let inner = &self.0.inner;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (commits_queued, committing_for) = inner.commits.load();
        StoreStats {
            objects: inner.index.objects(),
            slots_used: (inner.allocator.slots() - inner.allocator.free()) as u64,
            slots_total: inner.allocator.slots() as u64,
            fragment_bytes: inner.fragment_bytes as u32,
            evicted: count(&inner.counters.evicted),
            committed: count(&inner.counters.committed),
            removed: count(&inner.counters.removed),
            discarded: count(&inner.counters.discarded),
            commit_groups: count(&inner.counters.groups),
            damaged: count(&inner.counters.damaged),
            commits_queued,
            committing_for,
            read_only: inner.read_only(),
            drives: inner
                .drives
                .iter()
                .map(|drive| drive.engine.load())
                .collect(),
        }
    }

    /// What each drive's engine has to do: cheap, to see a drive that hangs.
    pub fn drive_loads(&self) -> Vec<EngineLoad> {
        self.0
            .inner
            .drives
            .iter()
            .map(|drive| drive.engine.load())
            .collect()
    }

    /// Ends the store: commits what was asked for, then refuses everything. Waits at most `patience`.
    pub fn close(&self, patience: Duration) {
        self.0.close(patience);
    }
}

impl Inner {
    fn restore(self: &Arc<Self>, live: Live) {
        let Live { key, manifest } = live;
        let (numbers, sums): (Vec<u32>, Vec<FragmentSums>) = manifest.fragments.into_iter().unzip();
        let bytes = manifest_bytes(key.namespace().len() + key.key().len(), numbers.len());
        self.largest.fetch_max(numbers.len(), Ordering::Relaxed);
        self.index.advance(manifest.recency);
        let slots = self.allocator.adopt(numbers.into(), bytes as u64);
        self.index.restore(Arc::new(Entry::new(
            key,
            manifest.size,
            slots,
            sums.into(),
            manifest.recency,
        )));
    }
}

/// Makes a new store: an empty log and headers that say "being made", then the word that it is made.
fn form(drives: &mut [(Superblock, Arc<dyn Device>)], log: &mut Log) -> Result<()> {
    log.snapshot(|put| {
        let mut end = Vec::new();
        record::put_snapshot_end(&mut end, 0);
        put(&end)
    })
    .map_err(|error| {
        Error::io(
            format!("{}: cannot make a store", drives[0].1.name()),
            error,
        )
    })?;
    for (header, device) in &mut *drives {
        write_headers(header, &**device)?;
    }
    mark_formed(drives)
}

/// Makes both copies of every header valid and say "made", the first drive's first.
fn mark_formed(drives: &mut [(Superblock, Arc<dyn Device>)]) -> Result<()> {
    for (header, device) in drives {
        if !set::is_whole(&**device)? {
            header.formed = true;
            write_headers(header, &**device)?;
        }
    }
    Ok(())
}

/// Writes both copies.
fn write_headers(header: &mut Superblock, device: &dyn Device) -> Result<()> {
    for _ in 0..2 {
        header.sequence += 1;
        set::write(device, header).map_err(|error| {
            Error::io(format!("{}: cannot write the header", device.name()), error)
        })?;
    }
    Ok(())
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|error| Error::io(format!("cannot start the thread {name}"), error))
}

impl StoreConfig {
    fn open_options(&self) -> Result<OpenOptions> {
        if self.paths.is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "no store path; name at least one drive, file or folder",
            ));
        }
        let mut files = 0;
        for path in &self.paths {
            files += u64::from(!matches!(Target::of(path)?, Target::BlockDevice { .. }));
        }
        let file_bytes = self.file_bytes / files.max(1);
        Ok(OpenOptions {
            file_bytes,
            direct: self.direct,
            ..OpenOptions::default()
        })
    }

    fn warn_of_other_size(&self, have: &u64) {
        if *have > 0 && have.abs_diff(self.file_bytes) > self.file_bytes / 100 {
            tracing::warn!(
                have_bytes = have,
                asked_bytes = self.file_bytes,
                "the store exists with another size than asked for (store_gb) and keeps it; remove its files to make a new one"
            );
        }
    }
}

/// An object being written.
pub struct Txn(Arc<TxnInner>);

pub(crate) struct TxnInner {
    store: Arc<Inner>,
    key: ObjectKey,
    size: u64,
    fragments: u32,
    pub(crate) token: Token,
    /// Failed flushes when it began.
    pub(crate) generation: u64,
    numbers: Box<[u32]>,
    /// Taken by the commit. Free again when the last write has ended, since every write holds this value.
    slots: Mutex<Option<Slots>>,
    written: AtomicU32,
}

impl TxnInner {
    /// Whether the key is still this transaction's (a removal takes it away).
    pub(crate) fn holds_key(&self) -> bool {
        self.store.index.claimed(self.key.digest(), &self.token)
    }

    /// Gives the key up.
    pub(crate) fn release(&self) {
        self.store.index.unclaim(self.key.digest(), &self.token);
        self.store.signals.changed();
    }
}

impl Drop for TxnInner {
    fn drop(&mut self) {
        self.release();
    }
}

impl Txn {
    /// Number of fragments.
    pub fn fragments(&self) -> u32 {
        self.0.fragments
    }

    /// Bytes of fragment `index`.
    pub fn fragment_len(&self, index: u32) -> usize {
        self.0.store.fragment_len(self.0.size, index)
    }

    /// Drive that fragment `index` goes to.
    pub fn drive(&self, index: u32) -> usize {
        self.0
            .store
            .allocator
            .place(self.0.numbers[index as usize])
            .0
    }

    /// Writes fragment `index`, once. The bytes of `buf` beyond the fragment's length are zeroed up to the next block.
    pub fn write(&self, index: u32, mut buf: SlotBuf, done: IoDone) {
        let txn = self.0.clone();
        let len = self.fragment_len(index);
        buf[len..len.next_multiple_of(BLOCK)].fill(0);
        let slot = self.0.numbers[index as usize];
        let done = Box::new(move |buf, outcome: io::Result<()>| {
            if outcome.is_ok() {
                let drive = txn.store.allocator.place(slot).0;
                txn.store.drives[drive].dirty.store(true, Ordering::SeqCst);
                txn.written.fetch_add(1, Ordering::SeqCst);
            }
            drop(txn);
            done(buf, outcome);
        });
        self.0.store.io(IoOp::Write, slot, len, buf, done);
    }

    /// Makes the object visible and durable; `sums` has one entry per fragment. All writes must have succeeded.
    pub fn commit(self, sums: Vec<FragmentSums>, done: Done<()>) {
        let txn = self.0;
        let written = txn.written.load(Ordering::SeqCst);
        if written != txn.fragments || sums.len() != txn.fragments as usize {
            let text = format!(
                "commit of {} fragments with {written} written and {} checksums; write every fragment first",
                txn.fragments,
                sums.len()
            );
            return done(Err(Error::new(ErrorKind::Invalid, text)));
        }
        let slots = txn
            .slots
            .lock()
            .take()
            .expect("a transaction commits once: it is consumed");
        let recency = txn.store.index.tick();
        let entry = Arc::new(Entry::new(
            txn.key.clone(),
            txn.size,
            slots,
            sums.into(),
            recency,
        ));
        let store = txn.store.clone();
        store.commits.push(Op::Commit { txn, entry, done });
    }
}

/// An object being read: while it lives the object is not evicted and its slots are not reused.
pub struct Lease {
    store: Arc<Inner>,
    entry: Arc<Entry>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.entry.leases.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.store.signals.changed();
        }
    }
}

impl Lease {
    /// Bytes of the object.
    pub fn size(&self) -> u64 {
        self.entry.size
    }

    /// Number of fragments.
    pub fn fragments(&self) -> u32 {
        self.entry.sums.len() as u32
    }

    /// Bytes of fragment `index`.
    pub fn fragment_len(&self, index: u32) -> usize {
        self.store.fragment_len(self.entry.size, index)
    }

    /// Drive that fragment `index` is on.
    pub fn drive(&self, index: u32) -> usize {
        self.store
            .allocator
            .place(self.entry.slots.numbers()[index as usize])
            .0
    }

    /// The checksums of fragment `index`.
    pub fn sums(&self, index: u32) -> FragmentSums {
        self.entry.sums[index as usize]
    }

    /// Reads fragment `index` into the start of `buf` (whole blocks; bytes beyond the fragment are undefined).
    /// The object's slots stay reserved until `done` was called, even when the lease is dropped before.
    pub fn read(&self, index: u32, buf: SlotBuf, done: IoDone) {
        let entry = self.entry.clone();
        let slot = entry.slots.numbers()[index as usize];
        let done = Box::new(move |buf, outcome| {
            drop(entry);
            done(buf, outcome);
        });
        self.store
            .io(IoOp::Read, slot, self.fragment_len(index), buf, done);
    }
}
