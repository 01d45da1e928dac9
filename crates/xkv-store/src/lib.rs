//! A store of objects on drives or files: what is acknowledged survives kill -9, and power loss where the drive
//! honours a flush. Layout and invariants: `docs/design.md`.
#![deny(unsafe_code)]

mod alloc;
#[allow(unsafe_code)]
pub mod buf;
mod bytes;
pub mod checksum;
mod commit;
pub mod error;
mod evict;
mod index;
#[allow(unsafe_code)]
pub mod io;
pub mod key;
pub mod layout;
mod log;
mod record;
mod recover;
mod set;
mod signals;
pub mod store;

pub use buf::{SlotBuf, SlotHome, SlotPool};
pub use checksum::{Coverage, FragmentSums, Summer};
pub use error::{Error, ErrorKind, Result};
pub use key::{Digest, MAX_KEY_BYTES, ObjectKey};
pub use store::{Begin, Lease, Store, StoreConfig, StoreStats, Txn};
