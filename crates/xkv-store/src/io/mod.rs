//! Input and output: the *where* ([`device`]) apart from the *how* ([`engine`]).
#![deny(unsafe_code)]

pub mod device;
pub mod engine;

pub use device::{Device, DirectIo};
pub use engine::{EngineKind, EngineLoad, IoEngine, IoRequest, Op};

/// Every offset and length that reaches a device is a multiple of this, and every buffer starts at one.
pub const BLOCK: usize = 4096;

/// Where a transfer goes on after it stopped short: `done` bytes were moved before, `moved` more just now. Direct
/// transfers go on at a whole block, so that offset, length and address stay aligned. None when that is no progress.
pub(crate) fn resume_at(done: usize, moved: usize, direct: bool) -> Option<usize> {
    let end = done + moved;
    let next = if direct { end - end % BLOCK } else { end };
    (next > done).then_some(next)
}
