//! The session between a client and a gateway: control frames over TCP, data in a shared-memory ring. Both halves.
//! `docs/protocol.md` describes everything that crosses the border, byte by byte.
#![deny(unsafe_code)]

#[cfg(not(loom))]
pub mod client;
#[cfg(not(loom))]
pub mod control;
#[cfg(not(loom))]
pub mod entry;
#[cfg(not(loom))]
mod failures;
pub mod listing;
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub mod memory;
#[cfg(not(loom))]
pub mod pass;
pub mod queue;
#[cfg(not(loom))]
pub mod server;
#[cfg(not(loom))]
mod service;
#[cfg(not(loom))]
mod spare;
mod words;

#[cfg(not(loom))]
pub use client::{Answer, Call, ClientConfig, Session, SessionError};
#[cfg(not(loom))]
pub use pass::Access;
#[cfg(not(loom))]
pub use server::{Gateway, GatewayConfig, GatewayStatus, ShareDrives};
