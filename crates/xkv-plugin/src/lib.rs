//! Connector logic: tasks, deadlines, scheduling, copy and checksum, statistics; knows no Python.
//!
//! [`Connector`] is the face. Behind it the reactor owns every operation and talks to a [`Backend`]; it works on the
//! thread that brings it a message, or on its own (`inbox.rs`). Bytes move between drive and LMCache's buffers, straight or
//! through slots, from and to which a few threads copy. Buffers are guarded (`guard.rs`): giving up on an operation is safe.
#![deny(unsafe_code)]

pub mod backend;
mod config;
mod connector;
#[allow(unsafe_code)]
mod copy;
mod embedded;
mod gateway;
#[allow(unsafe_code)]
mod guard;
mod inbox;
mod loads;
mod log;
mod poison;
mod process;
mod reactor;
mod stats;
mod stores;
mod task;
mod window;

pub use backend::Backend;
pub use config::{Config, Verify};
pub use connector::{Connector, Owner};
pub use embedded::Embedded;
pub use gateway::Gateway;
pub use guard::L1Buffer;
pub use poison::Stamp;
pub use task::{Completion, Operation};
pub use xkv_session::ClientConfig;
pub use xkv_store::{Error, ErrorKind, Result};
