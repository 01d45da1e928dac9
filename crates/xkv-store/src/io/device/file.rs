//! A block device or regular file.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};

use super::open::whole_blocks;
use super::{Device, DirectIo};
use crate::buf::SlotPool;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{BLOCK, resume_at};

/// Position of the block that is read and written to find out whether direct I/O works.
pub const SCRATCH_OFFSET: u64 = 8192;

/// File systems by their magic numbers, `linux/magic.h` and those of XFS and ZFS themselves.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const EXT4_MAGIC: u64 = 0xEF53;
const XFS_MAGIC: u64 = 0x5846_5342;
const BTRFS_MAGIC: u64 = 0x9123_683E;
const F2FS_MAGIC: u64 = 0xF2F5_2010;
const ZFS_MAGIC: u64 = 0x2FC1_2FC1;
const OVERLAY_MAGIC: u64 = 0x794C_7630;
/// Those that need nobody else to answer.
const LOCAL_FILE_SYSTEMS: [u64; 7] =
    [TMPFS_MAGIC, EXT4_MAGIC, XFS_MAGIC, BTRFS_MAGIC, F2FS_MAGIC, ZFS_MAGIC, OVERLAY_MAGIC];

/// A block device or regular file, made by [`super::open()`]. Holds its lock until dropped.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    path: PathBuf,
    name: String,
    size: u64,
    block_device: bool,
    created: bool,
    direct: AtomicBool,
    in_memory: bool,
}

impl FileDevice {
    /// Wraps an open, locked file of `size` bytes. Buffered until [`FileDevice::set_direct`].
    pub(super) fn new(file: File, path: &Path, size: u64, block_device: bool, created: bool) -> Self {
        let in_memory =
            !block_device && rustix::fs::fstatfs(&file).is_ok_and(|stats| stats.f_type as u64 == TMPFS_MAGIC);
        Self {
            file,
            in_memory,
            path: path.to_owned(),
            name: path.display().to_string(),
            size,
            block_device,
            created,
            direct: AtomicBool::new(false),
        }
    }

    /// Takes a descriptor that [`Device::share`] of another process made, to read through it. `name` is for messages.
    ///
    /// # Errors
    /// `Invalid` for what is no block device and no file of a local file system; `Io` with the system's reason.
    pub fn shared(fd: OwnedFd, name: &str) -> Result<Self> {
        let failed = |e: rustix::io::Errno| Error::io(format!("{name}: cannot be read here"), e.into());
        let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&fd).map_err(failed)?.st_mode);
        // Others may never answer, because somebody wants it so.
        let local = || {
            let magic = rustix::fs::fstatfs(&fd).map_err(failed)?.f_type as u64;
            Ok::<_, Error>(LOCAL_FILE_SYSTEMS.contains(&magic))
        };
        if !(kind.is_block_device() || kind.is_file() && local()?) {
            let text = format!("{name}: neither a block device nor a file of a local file system");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(failed)?;
        // Works for both; nobody uses the position.
        let size = rustix::fs::seek(&fd, SeekFrom::End(0)).map_err(failed)?;
        let device =
            Self::new(File::from(fd), Path::new(name), whole_blocks(size), kind.is_block_device(), false);
        device.direct.store(flags.contains(OFlags::DIRECT), Ordering::Relaxed);
        Ok(device)
    }

    /// The path that was opened: the device, or the store file inside its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this is a block device.
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// Whether the file is new (made by this call, or found empty) and therefore blank.
    pub fn created(&self) -> bool {
        self.created
    }

    /// Turns direct I/O on or off and returns whether it is on. It is tried on the scratch block first: a read, and,
    /// when the drive is `ours`, a write of the bytes that were read. Pass false before the headers were recognised,
    /// true afterwards: some filesystems accept direct reads and refuse direct writes.
    ///
    /// With [`DirectIo::Auto`] a failure falls back to the page cache with one warning.
    ///
    /// # Errors
    /// `Io` with [`DirectIo::On`] and a failed trial; `TooSmall` when there is no scratch block.
    pub fn set_direct(&self, mode: DirectIo, ours: bool) -> Result<bool> {
        if mode == DirectIo::Off {
            self.set_flag(false)
                .map_err(|e| Error::io(format!("{}: cannot turn direct I/O off", self.name), e))?;
            return Ok(false);
        }
        if self.size < SCRATCH_OFFSET + BLOCK as u64 {
            return Err(Error::new(
                ErrorKind::TooSmall,
                format!(
                    "{}: {} bytes cannot hold a store's headers; take a larger drive or file",
                    self.name, self.size
                ),
            ));
        }
        let Err((step, error)) = self.try_direct(ours) else {
            return Ok(true);
        };
        let _ = self.set_flag(false);
        if mode == DirectIo::On {
            return Err(Error::io(
                format!(
                    "{}: direct I/O does not work here ({step}); let it be chosen (auto) or turn it off",
                    self.name
                ),
                error,
            ));
        }
        tracing::warn!(
            "{}: direct I/O does not work here ({step}: {error}); using the page cache",
            self.name
        );
        Ok(false)
    }

    fn try_direct(&self, ours: bool) -> std::result::Result<(), (&'static str, io::Error)> {
        let mut block = SlotPool::new(1, BLOCK)
            .map_err(|e| ("memory for the trial", io::Error::other(e)))?
            .try_take()
            .expect("a new pool has its slot");
        self.set_flag(true).map_err(|e| ("O_DIRECT", e))?;
        self.read_at(&mut block, SCRATCH_OFFSET).map_err(|e| ("trial read", e))?;
        if ours {
            self.write_at(&block, SCRATCH_OFFSET).map_err(|e| ("trial write", e))?;
        }
        Ok(())
    }

    fn set_flag(&self, direct: bool) -> io::Result<()> {
        let mut flags = rustix::fs::fcntl_getfl(&self.file)?;
        flags.set(OFlags::DIRECT, direct);
        rustix::fs::fcntl_setfl(&self.file, flags)?;
        self.direct.store(direct, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of the filesystem that a file takes; 0 for a block device.
    ///
    /// # Errors
    /// The system's.
    pub fn taken(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// Makes a file of `bytes` zeros of this one; a block device keeps its contents and size.
    ///
    /// # Errors
    /// `TooSmall` when the filesystem cannot hold it; `Io` otherwise.
    pub fn empty(&mut self, bytes: u64) -> Result<()> {
        if self.block_device {
            return Ok(());
        }
        let failed = |e| Error::io(format!("{}: cannot be made {bytes} bytes long", self.name), e);
        let stats = rustix::fs::fstatvfs(&self.file).map_err(|e| failed(e.into()))?;
        let taken = self.taken().map_err(failed)?;
        let free = stats.f_bavail * stats.f_frsize + taken;
        if bytes > free {
            return Err(Error::new(
                ErrorKind::TooSmall,
                format!(
                    "{}: a file of {bytes} bytes does not fit, {free} bytes are free on its filesystem; lower store_gb",
                    self.name
                ),
            ));
        }
        self.file.set_len(0).and_then(|()| self.file.set_len(bytes)).map_err(failed)?;
        self.size = whole_blocks(bytes);
        Ok(())
    }

    /// Takes real space for a range of a sparse file. Does nothing on a block device and where the filesystem has no
    /// such call.
    ///
    /// # Errors
    /// `TooSmall` when the filesystem is full; `Io` otherwise.
    pub fn reserve(&self, offset: u64, bytes: u64) -> Result<()> {
        if self.block_device || bytes == 0 {
            return Ok(());
        }
        let outcome = rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, bytes)
        });
        match outcome {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(()),
            Err(rustix::io::Errno::NOSPC) => {
                let free = rustix::fs::fstatvfs(&self.file)
                    .map(|s| (s.f_bavail * s.f_frsize).to_string())
                    .unwrap_or_else(|_| "an unknown number of".into());
                Err(Error::new(
                    ErrorKind::TooSmall,
                    format!(
                        "{}: {bytes} bytes wanted, {free} bytes free; free some space or lower \
                         store_gb (LMC_XKV_STORE_GB)",
                        self.name
                    ),
                ))
            }
            Err(error) => Err(Error::io(
                format!("{}: cannot reserve {bytes} bytes at {offset}", self.name),
                error.into(),
            )),
        }
    }
}

impl Device for FileDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64) {
                Ok(moved) => {
                    done = resume_at(done, moved, self.is_direct()).ok_or(io::ErrorKind::UnexpectedEof)?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.write_at(&buf[done..], offset + done as u64) {
                Ok(moved) => {
                    done = resume_at(done, moved, self.is_direct()).ok_or(io::ErrorKind::WriteZero)?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.file.as_raw_fd())
    }

    fn can_share(&self, even_files: bool) -> bool {
        self.block_device || even_files
    }

    fn share(&self) -> io::Result<OwnedFd> {
        // Opened anew: the lock, the flags and the right to write stay with ours.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let mut flags = OFlags::RDONLY | OFlags::CLOEXEC;
        flags.set(OFlags::DIRECT, self.is_direct());
        Ok(rustix::fs::open(path, flags, Mode::empty())?)
    }

    fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    fn in_memory(&self) -> bool {
        self.in_memory
    }
}
