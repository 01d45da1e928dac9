//! The gateway's drives, read by this process: what a session leased goes from the drive to L1 without the gateway and its
//! slots.

use std::time::{Duration, Instant};

use xkv_session::Session;
use xkv_store::DriveReader;
use xkv_store::io::engine::EngineLoad;

/// Reads under way on a drive, as an embedded store has.
const DEPTH: usize = 32;

/// The drives of a session that shares them.
pub struct Drives(Box<[DriveReader]>);

impl Drives {
    /// Those of `session`; none where it shares none, or one of them cannot be read here, which is said. Takes up to
    /// `patience`.
    pub fn of(session: &Session, patience: Duration) -> Option<Self> {
        let fds = session.take_drives();
        if fds.is_empty() {
            if session.welcome().straight {
                tracing::warn!(
                    "the gateway's drives did not arrive here; objects are read through the gateway"
                );
            }
            return None;
        }
        let (store, size) = (&session.welcome().store, session.welcome().fragment_bytes as usize);
        let deadline = Instant::now() + patience;
        let open = |(index, fd)| {
            let left = deadline.saturating_duration_since(Instant::now());
            DriveReader::open(fd, store, index, size, DEPTH, left)
        };
        match fds.into_iter().enumerate().map(open).collect() {
            Ok(readers) => Some(Self(readers)),
            Err(error) => {
                tracing::warn!(%error, "objects are read through the gateway");
                None
            }
        }
    }

    /// A drive's reader.
    pub fn get(&self, drive: usize) -> Option<&DriveReader> {
        self.0.get(drive)
    }

    /// What a drive has to do for this process.
    pub fn load(&self, drive: usize) -> EngineLoad {
        self.get(drive).map(DriveReader::load).unwrap_or_default()
    }
}
