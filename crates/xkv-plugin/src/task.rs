//! What is going on: operations, their keys, and the messages that move them.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use xkv_store::{FragmentSums, ObjectKey, Result, Run, SlotBuf};

use crate::backend::{Begun, DriveSet, Reading, Transaction};
use crate::guard::L1Buffer;
use crate::stats::Miss;

/// What keeps an operation's buffers alive for the caller; comes back with the completion.
pub type Owner = Box<dyn Any + Send>;

/// The four operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Load objects.
    Get,
    /// Store objects.
    Set,
    /// Look up objects.
    Exists,
    /// Remove objects.
    Delete,
}

impl Operation {
    /// All of them.
    pub const ALL: [Operation; 4] = [Operation::Get, Operation::Set, Operation::Exists, Operation::Delete];

    /// Its name in statistics.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Get => "get",
            Operation::Set => "set",
            Operation::Exists => "exists",
            Operation::Delete => "delete",
        }
    }
}

/// The answer of an operation.
pub struct Completion {
    /// What the submit call returned.
    pub id: u64,
    /// Whether every key went well.
    pub ok: bool,
    /// Why not; empty when `ok`.
    pub error: String,
    /// Per key: loaded, present or gone; none for a set.
    pub results: Option<Vec<bool>>,
    /// What the caller gave along, to be dropped where the caller may drop it.
    pub owner: Option<Owner>,
}

impl Completion {
    /// A completion from its keys' answers.
    pub fn new(
        id: u64,
        operation: Operation,
        answers: Vec<bool>,
        error: String,
        owner: Option<Owner>,
    ) -> Self {
        // A lookup that finds nothing is an answer, not a failure.
        let ok = match operation {
            Operation::Exists => error.is_empty(),
            _ => answers.iter().all(|&ok| ok),
        };
        let error = if ok { String::new() } else { error };
        let results = (operation != Operation::Set).then_some(answers);
        Self { id, ok, error, results, owner }
    }
}

/// Which way a fragment moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Drive to L1.
    Load = 0,
    /// L1 to drive.
    Store = 1,
}

/// One or several fragments of one key in progress: what one I/O moves.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub class: Class,
    pub ticket: u64,
    pub run: Run,
    pub drive: u16,
}

impl Piece {
    /// Its fragments by `most`, at least 1.
    pub fn split(self, most: u32) -> impl DoubleEndedIterator<Item = Piece> {
        let Run { first, count, step } = self.run;
        (0..count.div_ceil(most)).map(move |part| {
            let done = part * most;
            let count = most.min(count - done);
            let step = if count > 1 { step } else { 1 };
            Piece { run: Run { first: first + done * self.run.step, count, step }, ..self }
        })
    }
}

/// A submitted get or set.
pub struct Submission {
    pub id: u64,
    pub submitted: Instant,
    pub keys: Vec<Vec<u8>>,
    /// One per key; none where the caller's buffer is of no use.
    pub buffers: Vec<Option<Arc<L1Buffer>>>,
    pub owner: Option<Owner>,
    /// Bytes that count as pending stores.
    pub bytes: u64,
    /// Number of keys to serve; those behind them are beyond the backlog of stores.
    pub accepted: usize,
}

/// A submitted exists or delete.
pub struct Question {
    pub id: u64,
    pub submitted: Instant,
    pub keys: Vec<ObjectKey>,
}

/// What happened to a fragment on its way into a slot.
pub enum Gathering {
    Done(SlotBuf, FragmentSums),
    /// It stays where it is, and is written from there; of each fragment.
    Summed(Vec<FragmentSums>),
    TooOld,
    Closed,
}

/// What happened to a fragment on its way out of a slot.
pub enum Scattering {
    Done,
    /// The fragment does not match its checksum.
    Damaged(u32),
    Closed,
    Failed(std::io::Error),
    /// The drive, or the system, does not read straight into this buffer.
    NotStraight(std::io::Error),
}

/// What the reactor reacts to.
pub enum Message {
    Get(Submission),
    Set(Submission),
    Exists(Question),
    Delete(Question),
    Found {
        id: u64,
        places: Vec<Option<DriveSet>>,
    },
    Opened {
        ticket: u64,
        reading: io::Result<Option<Box<dyn Reading>>>,
    },
    Scattered {
        piece: Piece,
        outcome: Scattering,
    },
    Begun {
        ticket: u64,
        begun: Begun,
    },
    Gathered {
        piece: Piece,
        outcome: Gathering,
    },
    Written {
        piece: Piece,
        /// Whether it was written straight from L1.
        straight: bool,
        /// Its checksums, where they were computed on the way.
        result: io::Result<Option<Vec<FragmentSums>>>,
    },
    Committed {
        ticket: u64,
        result: Result<()>,
    },
    Removed {
        id: u64,
        index: usize,
        result: Result<bool>,
    },
    /// Asking to begin again may help.
    Space,
}

/// An operation in progress.
pub struct Batch {
    pub operation: Operation,
    pub submitted: Instant,
    pub deadline: Instant,
    /// Per key; none while it is open.
    pub answers: Vec<Option<bool>>,
    /// Number of keys still open.
    pub open: usize,
    /// Per key, its ticket; 0 where there is none (it joined another store, or is no load or store).
    pub tickets: Vec<u64>,
    pub owner: Option<Owner>,
    pub bytes: u64,
    /// Why the first key failed.
    pub error: String,
}

/// A key being loaded.
pub struct LoadKey {
    pub batch: u64,
    pub index: usize,
    pub key: ObjectKey,
    pub buffer: Arc<L1Buffer>,
    pub reading: Option<Box<dyn Reading>>,
    pub left: Outstanding,
    /// Whether fragments may be read straight into the buffer.
    pub straight: bool,
    /// Why it is a miss, while a drive still has some of the buffer.
    pub ending: Option<Ending>,
}

/// A load that is a miss, and will be answered when the drive lets go of its buffer.
pub struct Ending {
    pub miss: Miss,
    pub why: String,
    pub submitted: Instant,
}

/// A key being stored.
pub struct StoreKey {
    pub batch: u64,
    pub index: usize,
    pub key: ObjectKey,
    pub buffer: Arc<L1Buffer>,
    pub deadline: Instant,
    pub txn: Option<Box<dyn Transaction>>,
    pub left: Outstanding,
    /// Whether fragments may be written straight from the buffer.
    pub straight: bool,
    /// Keys of sets that wait for this one's outcome.
    pub joined: Vec<(u64, usize)>,
}

/// Fragments of a key that are not through yet, by drive.
#[derive(Default)]
pub struct Outstanding {
    by_drive: Vec<u32>,
    total: u32,
}

impl Outstanding {
    /// One entry per fragment: its drive.
    pub fn new(fragments: impl Iterator<Item = usize>) -> Self {
        let mut outstanding = Self::default();
        for drive in fragments {
            if drive >= outstanding.by_drive.len() {
                outstanding.by_drive.resize(drive + 1, 0);
            }
            outstanding.by_drive[drive] += 1;
            outstanding.total += 1;
        }
        outstanding
    }

    /// So many fragments of a drive are through; true when they were the last.
    pub fn done(&mut self, drive: u16, fragments: u32) -> bool {
        self.by_drive[drive as usize] -= fragments;
        self.total -= fragments;
        self.total == 0
    }

    /// Whether fragments on any of `drives` are missing.
    pub fn needs(&self, drives: DriveSet) -> bool {
        let needed =
            |(drive, left): (usize, &u32)| *left > 0 && drives & crate::backend::drive_set(drive) != 0;
        self.by_drive.iter().enumerate().any(needed)
    }
}
