//! The Python module `xkv_lmcache._native`: connector and gateway with Python's types, and nothing else.
//!
//! LMCache's threads must never see an exception from a submit call: whatever goes wrong there, also a panic or an
//! argument of another type, becomes a failed completion.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod buffers;
mod connector;
mod gateway;
mod logging;
mod trial;

use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use tracing::Level;
use xkv_plugin::{Error, ErrorKind};
use xkv_store::io::{DirectIo, EngineKind};
use xkv_store::{Store, StoreConfig};

/// Compiled half of `xkv_lmcache`; use that package instead.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::connector::Connector;
    #[pymodule_export]
    use super::gateway::{
        Gateway, check_store, clear_store, format_store, gateway_clear, gateway_list, gateway_status,
        list_store, survey_store,
    };
    #[pymodule_export]
    use super::trial::Trial;
    #[pymodule_export]
    use super::{log, probe_store, set_up_log};
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

/// Logs on stderr from `level` (debug, info, warning, error) on: `json` lines or text. Only the first call of a process
/// counts.
#[pyfunction]
fn set_up_log(json: bool, level: &str) -> PyResult<()> {
    let format =
        if json { logging::Format::Json("xkv-gateway") } else { logging::Format::Console("[xkv-gateway]") };
    logging::install_as(format, level_of(level)?);
    Ok(())
}

/// Writes a line to the log.
#[pyfunction]
fn log(level: &str, text: &str) -> PyResult<()> {
    match level_of(level)? {
        Level::ERROR => tracing::error!("{text}"),
        Level::WARN => tracing::warn!("{text}"),
        Level::INFO => tracing::info!("{text}"),
        _ => tracing::debug!("{text}"),
    }
    Ok(())
}

fn level_of(name: &str) -> PyResult<Level> {
    Ok(match name {
        "debug" => Level::DEBUG,
        "info" => Level::INFO,
        "warning" => Level::WARN,
        "error" => Level::ERROR,
        other => return Err(unknown("level", other, "debug, info, warning or error")),
    })
}

fn engine_of(name: &str) -> PyResult<EngineKind> {
    Ok(match name {
        "auto" => EngineKind::Auto,
        "uring" => EngineKind::Uring,
        "pool" => EngineKind::Pool,
        other => return Err(unknown("io_engine", other, "auto, uring or pool")),
    })
}

fn direct_io_of(name: &str) -> PyResult<DirectIo> {
    Ok(match name {
        "auto" => DirectIo::Auto,
        "on" => DirectIo::On,
        "off" => DirectIo::Off,
        other => return Err(unknown("direct_io", other, "auto, on or off")),
    })
}

fn unknown(name: &str, value: &str, expects: &str) -> PyErr {
    PyValueError::new_err(format!("{name}={value:?} is not {expects}"))
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| PyValueError::new_err(format!("{name}={value} is not a number of seconds")))
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
