//! Where bytes live.

pub mod file;
pub mod open;
pub mod signature;
pub mod testing;

use std::io;
use std::os::fd::{OwnedFd, RawFd};

pub use file::FileDevice;
pub use open::{Inspection, OpenOptions, Target, inspect, open, open_to_examine};
pub use signature::{is_blank, signature};

/// Whether to bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectIo {
    /// Direct where a probe of the scratch block shows that it works, buffered otherwise; said once.
    #[default]
    Auto,
    /// Direct, or an error.
    On,
    /// Through the page cache.
    Off,
}

/// A drive or file, read and written in whole blocks. Calls block; they may come from several threads at once.
pub trait Device: Send + Sync + 'static {
    /// Name for messages: the path, or a test's label.
    fn name(&self) -> &str;
    /// Size, bytes.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset`. A short read is an error.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `buf` at `offset`.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;
    /// Returns when everything written before survives a power cut (as far as the drive honours a flush).
    fn flush(&self) -> io::Result<()>;
    /// Descriptor for engines that talk to the kernel themselves; none makes them call the methods above.
    fn fd(&self) -> Option<RawFd> {
        None
    }
    /// Whether [`Device::share`] has a descriptor; of a file only `even_files`: a process whose user may write the file can open the
    /// descriptor again for writing, while that of a block device needs a right to the device.
    fn can_share(&self, _even_files: bool) -> bool {
        false
    }
    /// A descriptor of its own, open for reading alone, for another process on this machine.
    fn share(&self) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Whether the page cache is bypassed.
    fn is_direct(&self) -> bool {
        false
    }
    /// Whether it is memory (tmpfs): every transfer is a copy, nothing can be waited for.
    fn in_memory(&self) -> bool {
        false
    }
    /// Whether bytes may go straight between it and memory of somebody else: not where the kernel copies between the
    /// page cache and an address whenever the drive has answered, but where it holds the pages themselves (direct) or
    /// copies at once.
    fn goes_straight(&self) -> bool {
        self.is_direct() || self.in_memory()
    }
}
