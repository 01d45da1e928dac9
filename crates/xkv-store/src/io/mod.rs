//! Input and output: the *where* ([`device`]) apart from the *how* ([`engine`]).

pub mod device;
pub mod engine;

pub use device::{Device, DirectIo};
pub use engine::{EngineKind, EngineLoad, IoEngine, IoRequest, Op};

/// Every offset and length that reaches a device is a multiple of this, and every buffer starts at one.
pub const BLOCK: usize = 4096;
