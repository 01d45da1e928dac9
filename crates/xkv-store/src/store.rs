//! The store's face: open, begin, write, commit, read, remove.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::bytes::hex;
use crate::commit::{self, Done, MAX_TOUCHED, Op};
use crate::error::Result;
use crate::evict;
use crate::index::{Claim, Taken, Token};
use crate::inner::Inner;
use crate::io::EngineLoad;
use crate::key::{Digest, MAX_KEY_BYTES, ObjectKey};
use crate::lease::Lease;
use crate::record::manifest_bytes;
use crate::stats::{DriveInfo, StoreStats};
use crate::txn::Txn;

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

/// A store. Cheap to clone; the last clone closes it.
#[derive(Clone)]
pub struct Store(pub(crate) Arc<Handle>);

pub(crate) struct Handle {
    pub(crate) inner: Arc<Inner>,
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
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
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
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
    /// Bytes of a fragment.
    pub fn fragment_bytes(&self) -> usize {
        self.0.inner.fragment_bytes
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        self.0.inner.drives.len()
    }

    /// What each drive is, and how full.
    pub fn drive_info(&self) -> Vec<DriveInfo> {
        let inner = &self.0.inner;
        let slots = inner.allocator.by_drive();
        let describe = |(drive, (slots_total, slots_used)): (&crate::inner::Drive, (u64, u64))| DriveInfo {
            name: drive.device.name().to_owned(),
            bytes: drive.device.size(),
            slots_total,
            slots_used,
            engine: drive.engine.name(),
            direct: drive.device.is_direct(),
        };
        inner.drives.iter().zip(slots).map(describe).collect()
    }

    /// One line for the log: drives, capacity, engine, direct or buffered, objects found.
    pub fn describe(&self) -> String {
        let inner = &self.0.inner;
        let drives: Vec<String> = inner
            .drives
            .iter()
            .map(|drive| {
                let cache = if drive.device.is_direct() { "direct" } else { "buffered" };
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
    /// when absent. In memory. The digest decides, as for [`Store::drives_of_digest`]; a lease compares the whole key.
    pub fn drives_of(&self, key: &ObjectKey) -> Option<u64> {
        self.drives_of_digest(key.digest())
    }

    /// [`Store::drives_of`] for an object known by its digest alone.
    pub fn drives_of_digest(&self, digest: &Digest) -> Option<u64> {
        // In a large store every step to another place in memory costs as much as the rest of a lookup: with one drive the
        // entry itself is not looked at.
        self.0.inner.index.with_digest(digest, |entry| self.0.inner.drive_set(entry))
    }

    /// Identity of the store, as hexadecimal digits.
    pub fn id(&self) -> String {
        hex(&self.0.inner.id)
    }

    /// Whether another process on this machine can read the drives with a [`crate::DriveReader`]: none is read through the page cache,
    /// and each can be shared ([`crate::io::Device::can_share`]).
    pub fn can_share(&self, even_files: bool) -> bool {
        self.0
            .inner
            .drives
            .iter()
            .all(|drive| drive.device.goes_straight() && drive.device.can_share(even_files))
    }

    /// Descriptors of all drives in their order, open for reading alone.
    ///
    /// # Errors
    /// The system's.
    pub fn share(&self) -> std::io::Result<Vec<OwnedFd>> {
        self.0.inner.drives.iter().map(|drive| drive.device.share()).collect()
    }

    /// Signs of life: I/O operations completed so far, and for how long the group of commits being written has been.
    pub fn progress(&self) -> (u64, Option<Duration>) {
        (self.0.inner.counters.io.load(Ordering::Relaxed), self.0.inner.commits.load().1)
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
        if size == 0 || key_bytes > MAX_KEY_BYTES || fragments > largest || manifest > inner.group_limit {
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
                room.then(|| inner.allocator.reserve(fragments, manifest as u64)).flatten()
            };
            match inner.index.claim(key, &token, reserve) {
                Claim::Claimed(slots) => {
                    if inner.allocator.free()
                        < evict::reserve(inner.allocator.slots(), inner.largest.load(Ordering::Relaxed))
                    {
                        inner.signals.kick();
                    }
                    let generation = inner.flush_failures.load(Ordering::SeqCst);
                    return Begin::Txn(Txn::new(inner.clone(), key, size, token, generation, slots));
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
        Some(Lease::new(inner.clone(), entry))
    }

    /// Removes an object and ends a transaction on it. `done` gets whether there was one, once the removal is
    /// committed: no store begun before becomes visible after that.
    pub fn remove(&self, key: &ObjectKey, done: Done<bool>) {
        let inner = &self.0.inner;
        let digest = *key.digest();
        let queued = inner.index.take(&digest, |taken| {
            let entry = match taken {
                Taken::Nothing => return Err(done),
                Taken::Transaction => None,
                Taken::Object(entry) => Some(entry),
            };
            let done = Box::new(move |outcome: Result<()>| done(outcome.map(|()| true)));
            Ok(inner.commits.queue(Op::Remove { digest, entry, done }))
        });
        match queued {
            Ok(refused) => {
                inner.counters.removed.fetch_add(1, Ordering::Relaxed);
                commit::refuse(refused);
            }
            // An earlier removal, or a commit that failed, may not be durable yet.
            Err(done) => {
                let done = Box::new(move |outcome: Result<()>| done(outcome.map(|()| false)));
                inner.commits.barrier(|| inner.read_only(), done);
            }
        }
    }

    /// Removes a damaged object, unless another one has taken its place since.
    pub fn discard(&self, lease: &Lease) {
        let inner = &self.0.inner;
        if inner.take_out(&lease.entry, |_| true, Box::new(|_| ())) {
            inner.counters.discarded.fetch_add(1, Ordering::Relaxed);
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
        let (never_read, never_read_slots) = inner.index.never_read();
        StoreStats {
            objects: inner.index.objects(),
            never_read,
            never_read_slots,
            slots_used: (inner.allocator.slots() - inner.allocator.free()) as u64,
            slots_total: inner.allocator.slots() as u64,
            fragment_bytes: inner.fragment_bytes as u32,
            evicted: count(&inner.counters.evicted),
            evicted_never_read: count(&inner.counters.evicted_never_read),
            committed: count(&inner.counters.committed),
            removed: count(&inner.counters.removed),
            discarded: count(&inner.counters.discarded),
            commit_groups: count(&inner.counters.groups),
            damaged: count(&inner.counters.damaged),
            commits_queued,
            committing_for,
            read_only: inner.read_only(),
            drives: inner.drives.iter().map(|drive| drive.engine.load()).collect(),
        }
    }

    /// What each drive's engine has to do: cheap, to see a drive that hangs.
    pub fn drive_loads(&self) -> Vec<EngineLoad> {
        self.0.inner.drives.iter().map(|drive| drive.engine.load()).collect()
    }

    /// Ends the store: commits what was asked for, then refuses everything. Waits at most `patience`.
    pub fn close(&self, patience: Duration) {
        self.0.close(patience);
    }
}
