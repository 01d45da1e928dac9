//! What a connector is told when it is made.

use std::path::PathBuf;
use std::time::Duration;

use xkv_store::Coverage;

/// How much of a loaded fragment is checked against its checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Every byte.
    #[default]
    Full,
    /// The sampled bytes.
    Sample,
    /// Nothing.
    Off,
}

impl Verify {
    pub(crate) fn coverage(self) -> Coverage {
        match self {
            Verify::Full => Coverage::Full,
            Verify::Sample => Coverage::Sample,
            Verify::Off => Coverage::None,
        }
    }
}

/// Settings of a connector, apart from where its store is.
#[derive(Clone, Debug)]
pub struct Config {
    /// Part of every object's identity.
    pub namespace: Vec<u8>,
    /// Threads that copy and checksum; none takes the number of CPUs, at most 4.
    pub copy_threads: Option<usize>,
    /// What a load checks.
    pub verify: Verify,
    /// Age of an I/O in flight from which its drive counts as stalled; deadline of lookups and deletes.
    pub wait_timeout: Duration,
    /// Greatest age of a load.
    pub load_deadline: Duration,
    /// Greatest age of a store, and of the L1 bytes that it may copy.
    pub store_deadline: Duration,
    /// Bytes of accepted, unanswered stores; what comes beyond is refused at once.
    pub max_pending_store_bytes: u64,
    /// Time between two lines of statistics.
    pub stats_interval: Duration,
    /// File that gets the statistics as JSON.
    pub stats_path: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            namespace: Vec::new(),
            copy_threads: None,
            verify: Verify::Full,
            wait_timeout: Duration::from_secs(5),
            load_deadline: Duration::from_secs(30),
            store_deadline: Duration::from_secs(60),
            max_pending_store_bytes: 1 << 30,
            stats_interval: Duration::from_secs(30),
            stats_path: None,
        }
    }
}

impl Config {
    pub(crate) fn copy_threads(&self) -> usize {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        self.copy_threads.unwrap_or(cpus.min(4)).max(1)
    }
}
