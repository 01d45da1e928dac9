//! What a store says of itself.

use std::time::Duration;

use crate::io::EngineLoad;

/// What a drive is.
#[derive(Clone, Debug)]
pub struct DriveInfo {
    /// Path of the device or file.
    pub name: String,
    /// Bytes of the device or file.
    pub bytes: u64,
    /// Slots in all.
    pub slots_total: u64,
    /// Slots of live objects, transactions, and removals not yet committed.
    pub slots_used: u64,
    /// How bytes move.
    pub engine: &'static str,
    /// Whether the page cache is bypassed.
    pub direct: bool,
}

/// Counters and gauges of a store.
#[derive(Clone, Debug, Default)]
pub struct StoreStats {
    /// Objects present.
    pub objects: u64,
    /// Of those, objects never read since they were written. Reads of the seconds before a crash are forgotten.
    pub never_read: u64,
    /// Slots of those.
    pub never_read_slots: u64,
    /// Slots of live objects, transactions, and removals not yet committed.
    pub slots_used: u64,
    /// Slots in all.
    pub slots_total: u64,
    /// Bytes of a fragment and of a slot.
    pub fragment_bytes: u32,
    /// Objects evicted since opening.
    pub evicted: u64,
    /// Of those, objects that were never read: written in vain.
    pub evicted_never_read: u64,
    /// Objects committed since opening.
    pub committed: u64,
    /// Objects removed on request since opening.
    pub removed: u64,
    /// Objects dropped as damaged since opening (by a failed load or a recovery).
    pub discarded: u64,
    /// Groups of commits since opening.
    pub commit_groups: u64,
    /// Damaged blocks, records and implausible objects that the last recovery met.
    pub damaged: u64,
    /// Commits and removals waiting for the log.
    pub commits_queued: usize,
    /// For how long the group of commits being written has been.
    pub committing_for: Option<Duration>,
    /// True when the log failed and nothing can be stored.
    pub read_only: bool,
    /// What each drive's engine has to do.
    pub drives: Vec<EngineLoad>,
}
