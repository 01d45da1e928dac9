//! The gateway's drives, read by this process: what a session leased goes from the drive to L1 without the gateway and its
//! slots.

use std::time::{Duration, Instant};

use xkv_session::Session;
use xkv_store::io::engine::EngineLoad;
use xkv_store::{DriveReader, Opening, Result};

/// Reads under way on a drive, as an embedded store has.
const DEPTH: usize = 32;

/// The drives of a session, as far as this process can read them.
#[derive(Default)]
pub struct Drives {
    readers: Box<[Option<DriveReader>]>,
    /// Why some cannot be read, or all, although the gateway shares them.
    pub lacking: Option<String>,
}

impl Drives {
    /// Those of `session`; none where it shares none. Takes up to `patience`.
    pub fn of(session: &Session, patience: Duration) -> Self {
        let fds = session.take_drives();
        if fds.is_empty() {
            let lacking = || "the descriptors of the drives did not arrive here".to_owned();
            return Self { lacking: session.welcome().straight.then(lacking), ..Self::default() };
        }
        let (store, size) = (&session.welcome().store, session.welcome().fragment_bytes as usize);
        let deadline = Instant::now() + patience;
        // Side by side: one that does not answer takes no time of the others.
        let begun: Vec<_> =
            fds.into_iter().enumerate().map(|(index, fd)| DriveReader::begin(fd, index, DEPTH)).collect();
        let finish = |(index, begun): (usize, Result<Opening>)| begun?.finish(store, index, size, deadline);
        let opened: Vec<Result<DriveReader>> = begun.into_iter().enumerate().map(finish).collect();
        let lacking = opened.iter().find_map(|reader| reader.as_ref().err().map(ToString::to_string));
        Self { readers: opened.into_iter().map(Result::ok).collect(), lacking }
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        self.readers.iter().any(Option::is_some)
    }

    /// A drive's reader.
    pub fn get(&self, drive: usize) -> Option<&DriveReader> {
        self.readers.get(drive)?.as_ref()
    }

    /// What a drive has to do for this process.
    pub fn load(&self, drive: usize) -> EngineLoad {
        self.get(drive).map(DriveReader::load).unwrap_or_default()
    }
}
