//! The atomic words of the ring: the standard library's, or loom's when the ring is modelled.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32 as Word32, AtomicU64 as Word64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32 as Word32, AtomicU64 as Word64, Ordering, fence};
