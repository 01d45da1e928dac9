//! The Python module `xkv_lmcache._native`: the connector with Python's types, and nothing else.
//!
//! LMCache's threads must never see an exception from a submit call: whatever goes wrong there, also a panic or an
//! argument of another type, becomes a failed completion.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod buffers;
mod connector;
mod logging;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use xkv_plugin::{Error, ErrorKind};
use xkv_store::{Store, StoreConfig};

/// Compiled half of `xkv_lmcache`; use that package instead.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::connector::Connector;
    #[pymodule_export]
    use super::probe_store;
}

/// Examines the paths of an embedded store as opening them would, and changes nothing.
///
/// ValueError: the settings, or what is on the drives, cannot work. OSError: the system refuses, or the store is in use.
#[pyfunction]
#[pyo3(signature = (paths, store_gb = None, fragment_bytes = None))]
fn probe_store(
    py: Python<'_>,
    paths: Vec<std::path::PathBuf>,
    store_gb: Option<f64>,
    fragment_bytes: Option<u32>,
) -> PyResult<()> {
    logging::install();
    let config = store_config(paths, store_gb, fragment_bytes);
    py.detach(|| Store::probe(&config)).map_err(exception)
}

fn store_config(
    paths: Vec<std::path::PathBuf>,
    store_gb: Option<f64>,
    fragment_bytes: Option<u32>,
) -> StoreConfig {
    let mut config = StoreConfig { paths, fragment_bytes, ..StoreConfig::default() };
    if let Some(gib) = store_gb {
        config.file_bytes = (gib * f64::from(1 << 30)) as u64;
    }
    config
}

/// The exception that says what the store said.
fn exception(error: Error) -> PyErr {
    let text = error.to_string();
    match (error.kind(), error.errno()) {
        // With its number, Python makes the fitting subclass: PermissionError, FileNotFoundError, ...
        (_, Some(errno)) => PyOSError::new_err((errno, text)),
        (ErrorKind::InUse, None) => PyOSError::new_err((libc_ebusy(), text)),
        (ErrorKind::Io | ErrorKind::ReadOnly, None) => PyOSError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

/// EBUSY, everywhere that Linux runs.
fn libc_ebusy() -> i32 {
    16
}
