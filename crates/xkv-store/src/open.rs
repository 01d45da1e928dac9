//! Opening and making stores.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::alloc::Allocator;
use crate::commit::{Commits, Committer};
use crate::config::StoreConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::evict;
use crate::index::Index;
use crate::inner::{Counters, Drive, Inner};
use crate::io::Device;
use crate::io::device::open::{inspect, open, open_read_only};
use crate::io::engine::start;
use crate::layout::Superblock;
use crate::log::Log;
use crate::record;
use crate::recover::recover;
use crate::set::{self, Found};
use crate::signals::Signals;
use crate::store::{Handle, Store};

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
        let (headers, fresh) = match set::recognise(&devices, config.fragment_bytes)? {
            Found::Store(headers) => (headers, false),
            Found::Blank => {
                let headers = set::plan(&devices, config.fragment_bytes)?;
                (headers.into_iter().enumerate().map(|(i, h)| (h, i)).collect(), true)
            }
        };
        for (header, position) in &headers {
            files[*position].set_direct(config.direct, true)?;
            if fresh {
                files[*position].reserve(0, header.slots_offset)?;
            }
        }
        if !fresh {
            config.warn_of_other_size(&files.iter().filter(|f| !f.is_block_device()).map(|f| f.size()).sum());
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
        let found =
            if devices.is_empty() { Found::Blank } else { set::recognise(&devices, config.fragment_bytes)? };
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
                let paths: Vec<String> = planned.iter().map(|(path, _)| path.display().to_string()).collect();
                names.extend(paths.iter().map(String::as_str));
                sizes.extend(planned.iter().map(|_| options.file_bytes));
                let fragment_bytes = config.fragment_bytes.unwrap_or(crate::layout::DEFAULT_FRAGMENT_BYTES);
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
        let (headers, fresh) = match set::recognise(&refs, config.fragment_bytes)? {
            Found::Store(headers) => (headers, false),
            Found::Blank => {
                let headers = set::plan(&refs, config.fragment_bytes)?;
                (headers.into_iter().enumerate().map(|(i, h)| (h, i)).collect(), true)
            }
        };
        let drives =
            headers.into_iter().map(|(header, position)| (header, devices[position].clone())).collect();
        Self::start(drives, fresh, config)
    }

    pub(crate) fn start(
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
        for (slot, _) in recovery.live.iter().flat_map(|live| &live.manifest.fragments) {
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
            allocator: Arc::new(Allocator::new(&slots, |slot| used[slot as usize], on_release)),
            index: Index::new(),
            commits: Commits::default(),
            signals,
            counters: Counters::default(),
            largest: AtomicUsize::new(1),
            group_limit: Log::group_limit(first.area_bytes),
            flush_failures: AtomicU64::new(0),
            id: first.set,
            fragment_bytes,
            live_limit: Log::live_limit(first.area_bytes),
            read_only: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            touched: Mutex::default(),
        });
        let damaged = recovery.damaged();
        inner.counters.damaged.store(damaged, Ordering::Relaxed);
        inner.restore(recovery.live);
        let fill = log.fill();
        let mut committer = Committer::new(inner.clone(), log);
        if !recovery.complete || damaged > 0 || fill > 0.5 {
            if !recovery.complete {
                tracing::error!(
                    drive = inner.drives[0].device.name(),
                    "no manifest log can be read; the store starts empty"
                );
            } else if damaged > 0 {
                tracing::warn!(
                    drive = inner.drives[0].device.name(),
                    damaged,
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
        let threads = vec![spawn("xkv-commit", move || committer.run())?, spawn("xkv-evict", evictor)?];
        inner.signals.kick();
        Ok(Store(Arc::new(Handle { inner, threads: Mutex::new(threads) })))
    }
}

/// Makes a new store: an empty log and headers that say "being made", then the word that it is made.
fn form(drives: &mut [(Superblock, Arc<dyn Device>)], log: &mut Log) -> Result<()> {
    log.snapshot(|put| {
        let mut end = Vec::new();
        record::put_snapshot_end(&mut end, 0);
        put(&end)
    })
    .map_err(|error| Error::io(format!("{}: cannot make a store", drives[0].1.name()), error))?;
    for (header, device) in &mut *drives {
        write_headers(header, &**device)?;
    }
    mark_formed(drives)
}

/// Makes both copies of every header valid and say "made", the first drive's first.
pub(crate) fn mark_formed(drives: &mut [(Superblock, Arc<dyn Device>)]) -> Result<()> {
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
        set::write(device, header)
            .map_err(|error| Error::io(format!("{}: cannot write the header", device.name()), error))?;
    }
    Ok(())
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|error| Error::io(format!("cannot start the thread {name}"), error))
}
