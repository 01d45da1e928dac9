//! What the drives or the log refused, over all sessions of a gateway.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::entry::{Operation, Reply, Status};

/// Failures of one kind.
#[derive(Default)]
struct Kind {
    count: AtomicU64,
    /// Milliseconds from the start to the latest; 0 before the first.
    latest: AtomicU64,
}

/// Counts of a gateway, from its start on.
pub(crate) struct Failures {
    started: Instant,
    reads: Kind,
    writes: Kind,
    no_space: Kind,
}

/// Whether the number is of an error that says that there is no room.
pub(crate) fn is_full(errno: u64) -> bool {
    [libc::ENOSPC, libc::EDQUOT].iter().any(|&full| errno == full as u64)
}

/// How many there were, and how long ago the latest was.
pub(crate) type Count = (u64, Option<Duration>);

impl Default for Failures {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            reads: Kind::default(),
            writes: Kind::default(),
            no_space: Kind::default(),
        }
    }
}

impl Failures {
    /// Counts a reply that tells of a failure.
    pub(crate) fn note(&self, reply: &Reply) {
        let kind = match (reply.status, reply.operation) {
            // Counted once an object: see `no_room`.
            (Status::Io, Operation::Write) if is_full(reply.value) => return,
            (Status::Io, Operation::Read) => &self.reads,
            (Status::Io | Status::ReadOnly, _) => &self.writes,
            (Status::NoSpace, _) => &self.no_space,
            _ => return,
        };
        self.add(kind);
    }

    /// Counts an object whose fragments find no room, since the file system under the store is full.
    pub(crate) fn no_room(&self) {
        self.add(&self.no_space);
    }

    fn add(&self, kind: &Kind) {
        kind.latest.store(self.started.elapsed().as_millis().max(1) as u64, Relaxed);
        kind.count.fetch_add(1, Relaxed);
    }

    /// Reads of fragments.
    pub(crate) fn reads(&self) -> Count {
        self.count(&self.reads)
    }

    /// Writes of fragments, commits and removals, and objects that a store without changes did not take.
    pub(crate) fn writes(&self) -> Count {
        self.count(&self.writes)
    }

    /// Objects for which no room could be made.
    pub(crate) fn no_space(&self) -> Count {
        self.count(&self.no_space)
    }

    fn count(&self, kind: &Kind) -> Count {
        let latest = kind.latest.load(Relaxed);
        let ago = self.started.elapsed().saturating_sub(Duration::from_millis(latest));
        (kind.count.load(Relaxed), (latest > 0).then_some(ago))
    }
}
