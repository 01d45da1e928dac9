//! A store of objects on drives or files: what is acknowledged survives kill -9, and power loss where the drive
//! honours a flush. Layout and invariants: `docs/design.md`.
#![deny(unsafe_code)]

mod alloc;
#[allow(unsafe_code)]
pub mod buf;
mod bytes;
pub mod check;
pub mod checksum;
pub mod clear;
mod commit;
mod config;
pub mod error;
mod evict;
pub mod format;
#[doc(hidden)]
pub mod fuzzing;
mod index;
mod inner;
#[allow(unsafe_code)]
pub mod io;
pub mod key;
pub mod layout;
mod lease;
pub mod list;
mod log;
mod open;
mod recency;
mod record;
mod recover;
mod run;
mod set;
mod share;
mod signals;
mod stats;
pub mod store;
pub mod trial;
mod txn;
pub mod usage;

pub use buf::{Lender, Lent, Shape, SlotBuf, SlotHome, SlotPool, Watch};
pub use check::check;
pub use checksum::{Coverage, FragmentSums, Summer, fragment_sums};
pub use clear::{Cleared, clear};
pub use commit::Done;
pub use config::StoreConfig;
pub use error::{Error, ErrorKind, Result};
pub use key::{Digest, MAX_KEY_BYTES, ObjectKey};
pub use lease::Lease;
pub use list::{Listing, list};
pub use run::{RUN_BYTES, Run, runs};
pub use share::{DriveReader, Opening};
pub use stats::{DriveInfo, StoreStats};
pub use store::{Begin, Store};
pub use txn::Txn;
pub use usage::{Selection, Usage};
