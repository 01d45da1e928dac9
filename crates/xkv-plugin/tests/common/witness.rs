//! A drive that remembers where its bytes were wanted by the process that has it open.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use xkv_store::io::Device;

use super::Memory;

pub struct Witness {
    inner: Arc<dyn Device>,
    reads: Mutex<Vec<usize>>,
    writes: Mutex<Vec<usize>>,
    /// Shared in place of the drive itself.
    pub other: Mutex<Option<OwnedFd>>,
}

impl Witness {
    pub fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        let (reads, writes, other) = Default::default();
        Arc::new(Self { inner, reads, writes, other })
    }

    /// Reads since the last call: those into `memory`, and the others.
    pub fn reads(&self, memory: &Memory) -> (usize, usize) {
        let (inside, outside): (Vec<usize>, Vec<usize>) =
            std::mem::take(&mut *self.reads.lock()).iter().partition(|at| memory.addresses().contains(at));
        (inside.len(), outside.len())
    }

    /// Writes from `memory` since the last call.
    pub fn writes_from(&self, memory: &Memory) -> usize {
        std::mem::take(&mut *self.writes.lock()).iter().filter(|at| memory.addresses().contains(at)).count()
    }
}

impl Device for Witness {
    fn name(&self) -> &str {
        "witness"
    }

    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.reads.lock().push(buf.as_ptr().addr());
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.writes.lock().push(buf.as_ptr().addr());
        self.inner.write_at(buf, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
    }

    fn goes_straight(&self) -> bool {
        self.inner.goes_straight()
    }

    fn can_share(&self, even_files: bool) -> bool {
        self.inner.can_share(even_files)
    }

    fn share(&self) -> io::Result<OwnedFd> {
        match &*self.other.lock() {
            Some(other) => Ok(other.try_clone()?),
            None => self.inner.share(),
        }
    }
}
