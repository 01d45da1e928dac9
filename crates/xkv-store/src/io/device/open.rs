//! From a path to a locked device.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, FlockOperation};

use super::{DirectIo, FileDevice};
use crate::error::{Error, ErrorKind, Result};
use crate::io::BLOCK;

/// Name of the store file in a folder.
pub const STORE_FILE: &str = "xkv-store.dat";

/// Pause between two tries to get a lock.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// How to open a path.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Size of a new file, bytes, rounded down to whole blocks. Existing files keep theirs, block devices are used
    /// whole.
    pub file_bytes: u64,
    /// Whether the page cache is bypassed.
    pub direct: DirectIo,
    /// How long to wait for a lock that somebody else holds: a process just killed still has it for a moment.
    pub patience: Duration,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { file_bytes: 16 << 30, direct: DirectIo::Auto, patience: Duration::from_secs(5) }
    }
}

/// What a path stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A block device, used whole.
    BlockDevice(PathBuf),
    /// A regular file that exists.
    File(PathBuf),
    /// A folder, existing or to be made, with a file of the name [`STORE_FILE`] in it.
    Folder(PathBuf),
}

impl Target {
    /// What `path` stands for: block devices and regular files that exist stand for themselves, everything that does
    /// not exist is a folder to be made.
    ///
    /// # Errors
    /// `Invalid` for anything else (a character device, a socket, a dangling link, a missing device); `Io` when the path cannot be
    /// examined.
    pub fn of(path: &Path) -> Result<Self> {
        let shown = path.display();
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Self::of_missing(path),
            Err(e) if e.raw_os_error() == Some(libc::ENOTDIR) => {
                return Err(Error::io(
                    format!(
                        "{shown}: a part of this path is a file, not a folder; choose another path \
                         (store, LMC_XKV_STORE)"
                    ),
                    e,
                ));
            }
            Err(e) => {
                return Err(Error::io(
                    format!("{shown}: cannot be examined; check the path and the rights on its folders"),
                    e,
                ));
            }
        };
        let kind = metadata.file_type();
        if kind.is_block_device() {
            Ok(Self::BlockDevice(path.to_owned()))
        } else if kind.is_file() {
            Ok(Self::File(path.to_owned()))
        } else if kind.is_dir() {
            let file = path.join(STORE_FILE);
            match fs::metadata(&file) {
                Ok(inner) if !inner.is_file() => Err(not_a_store(&file, kind_name(inner.file_type()))),
                _ => Ok(Self::Folder(path.to_owned())),
            }
        } else {
            Err(not_a_store(path, kind_name(kind)))
        }
    }

    fn of_missing(path: &Path) -> Result<Self> {
        let shown = path.display();
        if path.as_os_str().is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "the store's path is empty; name a block device, a file or a folder (store, LMC_XKV_STORE)",
            ));
        }
        if fs::symlink_metadata(path).is_ok() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{shown}: a link to something that does not exist; mend or remove it"),
            ));
        }
        if path.starts_with("/dev") && !path.starts_with("/dev/shm") {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{shown}: no such device; `lsblk` lists what there is (a container needs it passed in)"
                ),
            ));
        }
        Ok(Self::Folder(path.to_owned()))
    }

    /// The device or file that is opened.
    pub fn file(&self) -> PathBuf {
        match self {
            Self::BlockDevice(path) | Self::File(path) => path.clone(),
            Self::Folder(folder) => folder.join(STORE_FILE),
        }
    }
}

fn kind_name(kind: fs::FileType) -> &'static str {
    if kind.is_char_device() {
        "a character device"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_block_device() {
        "a block device"
    } else if kind.is_dir() {
        "a folder"
    } else {
        "of an unknown kind"
    }
}

fn not_a_store(path: &Path, what: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!(
            "{}: this is {what}; a store needs a block device, a regular file or a folder",
            path.display()
        ),
    )
}

/// Opens and locks what `path` stands for; makes the folder and the file when they are missing. Nothing that exists
/// is changed. Direct I/O is on when a trial read of the scratch block works; call [`FileDevice::set_direct`] again
/// once the drive is known to be ours.
///
/// # Errors
/// `InUse` when another process has it (or the device is mounted); `TooSmall` when the filesystem cannot hold the new file or there
/// is no room for headers; `Invalid` for what cannot be a store; `Io` with the operating system's reason. Each text names the path and the cure.
pub fn open(path: &Path, options: &OpenOptions) -> Result<FileDevice> {
    let target = Target::of(path)?;
    let device = match &target {
        Target::BlockDevice(path) => open_block_device(path, options.patience)?,
        Target::File(path) => open_file(path, options, false)?,
        Target::Folder(folder) => {
            make_folder(folder, options)?;
            open_file(&target.file(), options, true)?
        }
    };
    device.set_direct(options.direct, false)?;
    Ok(device)
}

fn open_block_device(path: &Path, patience: Duration) -> Result<FileDevice> {
    refuse_read_only(path)?;
    // Exclusive opens of a block device exclude one another and mounts, whatever device node or container they come
    // from; locks of files do not.
    let file =
        retry(patience, || File::options().read(true).write(true).custom_flags(libc::O_EXCL).open(path))
            .map_err(|e| cannot_open(path, true, e))?;
    let size = block_device_size(path, &file)?;
    Ok(FileDevice::new(file, path, size, true, false))
}

fn block_device_size(path: &Path, file: &File) -> Result<u64> {
    let shown = path.display();
    let failed = |what: &str, e: io::Error| Error::io(format!("{shown}: cannot find out {what}"), e);
    let sector = rustix::fs::ioctl_blksszget(file).map_err(|e| failed("the sector size", e.into()))? as usize;
    if sector > BLOCK {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{shown}: sectors of {sector} bytes; a store needs {BLOCK} or fewer"),
        ));
    }
    let size =
        rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|e| failed("the size", e.into()))?;
    if size == 0 {
        return Err(Error::new(
            ErrorKind::TooSmall,
            format!("{shown}: the device has no bytes (no medium?); `lsblk` shows the sizes"),
        ));
    }
    Ok(whole_blocks(size))
}

pub(super) fn whole_blocks(bytes: u64) -> u64 {
    bytes - bytes % BLOCK as u64
}

fn make_folder(folder: &Path, options: &OpenOptions) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    check_free(folder, &existing_ancestor(folder), options.file_bytes)?;
    fs::create_dir_all(folder).map_err(|e| {
        Error::io(
            format!(
                "{}: the folder cannot be made; make it yourself with the right owner, or choose another path \
                 (store, LMC_XKV_STORE)",
                folder.display()
            ),
            e,
        )
    })?;
    sync_folder(folder.parent());
    Ok(())
}

/// Makes a new name survive a power cut, where the filesystem can do that.
fn sync_folder(folder: Option<&Path>) {
    let folder = folder.filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Err(e) = File::open(folder).and_then(|f| f.sync_all()) {
        tracing::debug!("{}: the folder cannot be flushed: {e}", folder.display());
    }
}

fn open_file(path: &Path, options: &OpenOptions, create: bool) -> Result<FileDevice> {
    let deadline = Instant::now() + options.patience;
    let file = loop {
        let file = File::options()
            .read(true)
            .write(true)
            .create(create)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|e| cannot_open(path, true, e))?;
        let patience = deadline.saturating_duration_since(Instant::now());
        retry(patience, || lock(&file)).map_err(|e| cannot_lock(path, e))?;
        if is_still(path, &file) {
            break file;
        }
    };
    let examine = |e| Error::io(format!("{}: cannot be examined", path.display()), e);
    let found = file.metadata().map_err(examine)?.len();
    if found > 0 {
        return Ok(FileDevice::new(file, path, whole_blocks(found), false, false));
    }
    let size = whole_blocks(options.file_bytes);
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let sized = check_free(path, folder, size).and_then(|()| {
        file.set_len(size).and_then(|()| file.sync_all()).map_err(|e| {
            Error::io(
                format!(
                    "{}: cannot be made {size} bytes long; lower store_gb (LMC_XKV_STORE_GB) or use another \
                     filesystem",
                    path.display()
                ),
                e,
            )
        })
    });
    if let Err(error) = sized {
        if create {
            let _ = fs::remove_file(path);
        }
        return Err(error);
    }
    sync_folder(Some(folder));
    Ok(FileDevice::new(file, path, size, false, true))
}

/// Whether `path` still names this file: somebody may have replaced it before we had the lock.
fn is_still(path: &Path, file: &File) -> bool {
    match (fs::metadata(path), file.metadata()) {
        (Ok(named), Ok(opened)) => (named.dev(), named.ino()) == (opened.dev(), opened.ino()),
        _ => false,
    }
}

fn lock(file: &File) -> io::Result<()> {
    Ok(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

fn is_held(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EWOULDBLOCK | libc::EINTR))
}

/// Repeats `attempt` for up to `patience` while somebody else holds what it wants.
fn retry<T>(patience: Duration, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        match attempt() {
            Err(e) if is_held(&e) && Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
            outcome => return outcome,
        }
    }
}

fn cannot_lock(path: &Path, error: io::Error) -> Error {
    let shown = path.display();
    if is_held(&error) {
        return Error::new(
            ErrorKind::InUse,
            format!(
                "{shown}: in use by another process; stop it or choose another path (`fuser -v {shown}` names it)"
            ),
        );
    }
    Error::io(
        format!("{shown}: the filesystem cannot lock the file; keep the store on a local filesystem"),
        error,
    )
}

fn cannot_open(path: &Path, writing: bool, error: io::Error) -> Error {
    let shown = path.display();
    let purpose = if writing { "writing" } else { "reading" };
    let cure = match error.raw_os_error() {
        Some(libc::EBUSY) => {
            return Error::new(
                ErrorKind::InUse,
                format!(
                    "{shown}: mounted, or in use by another process; look with `lsblk {shown}` and `fuser -v {shown}`"
                ),
            );
        }
        Some(libc::EACCES | libc::EPERM) => {
            "run as a user who may (block devices: group disk), mend the rights, or choose another path \
             (store, LMC_XKV_STORE)"
        }
        Some(libc::EROFS) => {
            "it is read-only: make it writable or choose another path (store, LMC_XKV_STORE)"
        }
        Some(libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM) => {
            "the device is not there; `lsblk` lists what there is"
        }
        Some(libc::ENOSPC | libc::EDQUOT) => "free some space or choose another path (store, LMC_XKV_STORE)",
        _ => "check the path (store, LMC_XKV_STORE)",
    };
    Error::io(format!("{shown}: cannot be opened for {purpose}; {cure}"), error)
}

/// Free bytes of the filesystem of `folder` for this user.
fn free_bytes(folder: &Path) -> io::Result<u64> {
    let stats = rustix::fs::statvfs(folder)?;
    Ok(stats.f_bavail * stats.f_frsize)
}

fn check_free(shown: &Path, folder: &Path, wanted: u64) -> Result<()> {
    let free = free_bytes(folder)
        .map_err(|e| Error::io(format!("{}: cannot find out the free space", folder.display()), e))?;
    if wanted > free {
        return Err(Error::new(
            ErrorKind::TooSmall,
            format!(
                "{}: a file of {wanted} bytes does not fit, {free} bytes are free on its filesystem; lower store_gb \
                 (LMC_XKV_STORE_GB), free some space or choose another path",
                shown.display()
            ),
        ));
    }
    Ok(())
}

/// The nearest folder above `path` that exists.
fn existing_ancestor(path: &Path) -> PathBuf {
    path.ancestors().skip(1).find(|a| a.is_dir()).unwrap_or(Path::new(".")).to_owned()
}

/// What is at a path, found without changing anything.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// What the path stands for.
    pub target: Target,
    /// Bytes of the device or file that is there; none when the file (or its folder) would be made.
    pub size: Option<u64>,
    /// Free bytes of the filesystem; none for a block device.
    pub free: Option<u64>,
}

/// Makes every check of [`open`] and changes nothing: no folder, no file, no lock that stays.
///
/// # Errors
/// Those of [`open`].
pub fn inspect(path: &Path, options: &OpenOptions) -> Result<Inspection> {
    let target = Target::of(path)?;
    let file = target.file();
    if let Target::BlockDevice(path) = &target {
        writable(path)?;
        refuse_read_only(path)?;
        let device =
            retry(options.patience, || File::options().read(true).custom_flags(libc::O_EXCL).open(path))
                .map_err(|e| cannot_open(path, true, e))?;
        let size = block_device_size(path, &device)?;
        return Ok(Inspection { target, size: Some(size), free: None });
    }
    let folder = if file.exists() {
        writable(&file)?;
        let opened = File::open(&file).map_err(|e| cannot_open(&file, false, e))?;
        retry(options.patience, || lock(&opened)).map_err(|e| cannot_lock(&file, e))?;
        file.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
    } else {
        let folder = existing_ancestor(&file);
        writable(&folder)?;
        folder
    };
    let free = free_bytes(&folder)
        .map_err(|e| Error::io(format!("{}: cannot find out the free space", folder.display()), e))?;
    let found = fs::metadata(&file).map(|m| m.len()).unwrap_or(0);
    if found > 0 {
        return Ok(Inspection { target, size: Some(whole_blocks(found)), free: Some(free) });
    }
    check_free(path, &folder, whole_blocks(options.file_bytes))?;
    Ok(Inspection { target, size: None, free: Some(free) })
}

/// Some kernels and drivers open a read-only block device for writing and refuse the writes.
fn refuse_read_only(path: &Path) -> Result<()> {
    let read_only = fs::metadata(path).is_ok_and(|metadata| {
        let device = metadata.rdev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"))
            .is_ok_and(|value| value.trim() == "1")
    });
    if read_only {
        return Err(cannot_open(path, true, io::Error::from_raw_os_error(libc::EROFS)));
    }
    Ok(())
}

fn writable(path: &Path) -> Result<()> {
    let wanted =
        if path.is_dir() { Access::WRITE_OK | Access::EXEC_OK } else { Access::READ_OK | Access::WRITE_OK };
    rustix::fs::accessat(CWD, path, wanted, AtFlags::EACCESS).map_err(|e| cannot_open(path, true, e.into()))
}

/// Opens and locks the device or file at `path` for reading only; makes and changes nothing. None when it does not
/// exist yet or is an empty file.
///
/// # Errors
/// Those of [`open`].
pub fn open_to_examine(path: &Path, options: &OpenOptions) -> Result<Option<FileDevice>> {
    let target = Target::of(path)?;
    let path = target.file();
    let device = if matches!(target, Target::BlockDevice(_)) {
        let file =
            retry(options.patience, || File::options().read(true).custom_flags(libc::O_EXCL).open(&path))
                .map_err(|e| cannot_open(&path, false, e))?;
        let size = block_device_size(&path, &file)?;
        FileDevice::new(file, &path, size, true, false)
    } else {
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(cannot_open(&path, false, e)),
        };
        retry(options.patience, || lock(&file)).map_err(|e| cannot_lock(&path, e))?;
        let examine = |e| Error::io(format!("{}: cannot be examined", path.display()), e);
        let size = whole_blocks(file.metadata().map_err(examine)?.len());
        if size == 0 {
            return Ok(None);
        }
        FileDevice::new(file, &path, size, false, false)
    };
    device.set_direct(options.direct, false)?;
    Ok(Some(device))
}

/// Opens the device or file at `path` for reading only, without lock and buffered: to look at its headers. None when
/// it does not exist yet or is an empty file.
///
/// # Errors
/// Those of [`open`], without `InUse`.
pub fn open_read_only(path: &Path) -> Result<Option<FileDevice>> {
    let target = Target::of(path)?;
    let path = target.file();
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(cannot_open(&path, false, e)),
    };
    if matches!(target, Target::BlockDevice(_)) {
        let size = block_device_size(&path, &file)?;
        return Ok(Some(FileDevice::new(file, &path, size, true, false)));
    }
    let size =
        file.metadata().map_err(|e| Error::io(format!("{}: cannot be examined", path.display()), e))?.len();
    Ok((size > 0).then(|| FileDevice::new(file, &path, whole_blocks(size), false, false)))
}
