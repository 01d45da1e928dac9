//! The one error of this crate: a kind to decide by, a text that names thing, value and cure.

use std::fmt;
use std::io;

/// What went wrong, for code that has to decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The settings cannot work (no path, fragment size not a power of two, ...).
    Invalid,
    /// The drive or file carries something that is not ours.
    Foreign,
    /// Somebody else has the drive or file.
    InUse,
    /// The headers disagree with what was asked for, or with each other.
    Mismatch,
    /// The drive or file cannot hold a store, or the filesystem cannot hold the file.
    TooSmall,
    /// The operating system refused.
    Io,
    /// Nothing valid could be read where something valid must be.
    Corrupt,
    /// The store does not take changes: its log failed, or it is closed.
    ReadOnly,
    /// The object was removed while it was being stored.
    Removed,
    /// The store is behind a gateway that cannot be reached.
    Unreachable,
}

/// An error of the store.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<io::Error>,
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of `kind` with a text for people.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// An operating system error, with what was being done to what.
    pub fn io(message: impl Into<String>, source: io::Error) -> Self {
        Self { kind: ErrorKind::Io, message: message.into(), source: Some(source) }
    }

    /// The kind, to decide by.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The operating system's error number, where there is one.
    pub fn errno(&self) -> Option<i32> {
        self.source.as_ref().and_then(io::Error::raw_os_error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{}: {}", self.message, source),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}
