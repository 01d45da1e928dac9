//! The gateway, and what is done to a store while nobody has it open.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use pyo3::exceptions::{PyConnectionError, PyPermissionError, PyValueError};
use pyo3::prelude::*;
use serde_json::{Value, json};
use xkv_session::client::{self, ClientConfig, SessionError};
use xkv_session::control::RefusalCode;
use xkv_session::{Access, GatewayConfig, ShareDrives};
use xkv_store::check::{Progress, Report};
use xkv_store::format::{Content, survey};
use xkv_store::{Selection, Store, StoreConfig};

use crate::{direct_io_of, engine_of, exception, seconds, store_config, unknown};

/// Longest wait for each step of a connection, where an answer may take longer.
const OPENING: Duration = Duration::from_secs(5);
/// Damaged objects that a report names; all are counted.
const NAMED_OBJECTS: usize = 1000;

/// A store behind a listening gateway.
#[pyclass(module = "xkv_lmcache._native", frozen)]
pub struct Gateway {
    gateway: Mutex<Option<xkv_session::Gateway>>,
    addresses: Vec<String>,
}

#[pymethods]
impl Gateway {
    /// Opens the store and starts listening; the arguments are checked, named and documented by
    /// `xkv_lmcache.gateway_settings`.
    #[new]
    #[pyo3(signature = (
        *, store, store_gb, fragment_bytes, io_engine, direct_io, depth, listen, token, shm_dir, socket_mode,
        socket_group, share_drives, max_sessions, max_slots, heartbeat_s, client_silence_s,
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        store: Vec<PathBuf>,
        store_gb: f64,
        fragment_bytes: Option<u32>,
        io_engine: &str,
        direct_io: &str,
        depth: usize,
        listen: Vec<String>,
        token: Option<String>,
        shm_dir: PathBuf,
        socket_mode: u32,
        socket_group: Option<u32>,
        share_drives: &str,
        max_sessions: usize,
        max_slots: u32,
        heartbeat_s: f64,
        client_silence_s: f64,
    ) -> PyResult<Self> {
        let mut store = store_config(store, Some(store_gb), fragment_bytes);
        store.engine = engine_of(io_engine)?;
        store.direct = direct_io_of(direct_io)?;
        store.depth = depth;
        let listen = listen
            .iter()
            .map(|address| {
                address
                    .parse::<SocketAddr>()
                    .map_err(|error| PyValueError::new_err(format!("listen address {address:?}: {error}")))
            })
            .collect::<PyResult<_>>()?;
        let config = GatewayConfig {
            listen,
            token,
            shm_dir,
            socket: Access { mode: socket_mode, group: socket_group },
            share_drives: share_drives_of(share_drives)?,
            max_sessions,
            max_slots,
            heartbeat: seconds("heartbeat_s", heartbeat_s)?,
            client_silence: seconds("client_silence_s", client_silence_s)?,
        };
        let gateway = py
            .detach(|| {
                let opened = Store::open(&store)?;
                let (id, description) = (opened.id(), opened.describe());
                let gateway = xkv_session::Gateway::start(opened, config)?;
                let addresses: Vec<String> = gateway.addresses().iter().map(SocketAddr::to_string).collect();
                tracing::info!(
                    store = id,
                    listen = addresses.join(","),
                    max_sessions,
                    "serving a {description}"
                );
                Ok(gateway)
            })
            .map_err(exception)?;
        let addresses = gateway.addresses().iter().map(SocketAddr::to_string).collect();
        Ok(Self { gateway: Mutex::new(Some(gateway)), addresses })
    }

    /// Addresses in use.
    fn addresses(&self) -> Vec<String> {
        self.addresses.clone()
    }

    /// Its state, as JSON text; nothing once it is closed.
    fn status_json(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| {
            let gateway = self.gateway.lock().ok()?;
            serde_json::to_string(&gateway.as_ref()?.status()).ok()
        })
    }

    /// Ends the sessions, commits what was asked for, closes the store. Waits at most `patience_s`.
    fn close(&self, py: Python<'_>, patience_s: f64) -> PyResult<()> {
        let patience = seconds("patience_s", patience_s)?;
        let gateway = self.gateway.lock().ok().and_then(|mut gateway| gateway.take());
        py.detach(|| {
            if let Some(mut gateway) = gateway {
                gateway.close(patience);
            }
        });
        Ok(())
    }
}

/// State of the gateway at an address, as JSON text.
///
/// ConnectionError: it cannot be reached or answers something else. PermissionError: the token is missing or wrong.
#[pyfunction]
pub fn gateway_status(
    py: Python<'_>,
    host: String,
    port: u16,
    token: Option<String>,
    timeout_s: f64,
) -> PyResult<String> {
    let silence = seconds("timeout_s", timeout_s)?;
    let config = visitor(host, port, token, silence);
    answered(py.detach(|| client::status(&config)))
}

/// What is in the store of the gateway at an address, by namespace and model, as JSON text.
///
/// Errors as of `gateway_status`.
#[pyfunction]
pub fn gateway_list(
    py: Python<'_>,
    host: String,
    port: u16,
    token: Option<String>,
    timeout_s: f64,
) -> PyResult<String> {
    let patience = seconds("timeout_s", timeout_s)?;
    let config = visitor(host, port, token, patience);
    answered(py.detach(|| client::list(&config, patience)))
}

/// Has the gateway at an address remove the objects of `namespace` and `model`, None: of all; JSON text with `objects`
/// and `bytes`, or `error`.
///
/// Errors as of `gateway_status`. After a time-out the gateway goes on.
#[pyfunction]
#[pyo3(signature = (host, port, token, timeout_s, namespace, model))]
pub fn gateway_clear(
    py: Python<'_>,
    host: String,
    port: u16,
    token: Option<String>,
    timeout_s: f64,
    namespace: Option<String>,
    model: Option<String>,
) -> PyResult<String> {
    let patience = seconds("timeout_s", timeout_s)?;
    let config = visitor(host, port, token, patience.min(OPENING));
    answered(py.detach(|| client::clear(&config, namespace, model, patience)))
}

fn share_drives_of(name: &str) -> PyResult<ShareDrives> {
    Ok(match name {
        "auto" => ShareDrives::Devices,
        "on" => ShareDrives::All,
        "off" => ShareDrives::Off,
        other => return Err(unknown("share_drives", other, "auto, on or off")),
    })
}

/// Somebody who asks and opens no session.
fn visitor(host: String, port: u16, token: Option<String>, silence: Duration) -> ClientConfig {
    ClientConfig {
        host,
        port,
        token,
        shm_dir: PathBuf::new(),
        name: String::new(),
        slots: 0,
        fragment_bytes: None,
        silence,
        flush_patience: silence,
    }
}

fn answered(answer: Result<Value, SessionError>) -> PyResult<String> {
    match answer {
        Ok(state) => Ok(state.to_string()),
        Err(error) if error.code == Some(RefusalCode::Token) => {
            Err(PyPermissionError::new_err(error.to_string()))
        }
        Err(error) => Err(PyConnectionError::new_err(error.to_string())),
    }
}

/// What is in the store at `paths`, which nobody has open, by namespace and model, as JSON text.
///
/// ValueError: there is no store. OSError: the system refuses, or the store is in use.
#[pyfunction]
pub fn list_store(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<String> {
    let config = StoreConfig { paths, ..StoreConfig::default() };
    let listing = py.detach(|| xkv_store::list(&config)).map_err(exception)?;
    Ok(xkv_session::listing::json_of(&listing, usize::MAX).to_string())
}

/// Removes the objects of `namespace` and `model`, None: of all, from the store at `paths`, which nobody has open.
/// Objects and bytes.
///
/// ValueError: there is no store. OSError: the system refuses, or the store is in use.
#[pyfunction]
#[pyo3(signature = (paths, namespace, model))]
pub fn clear_store(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    namespace: Option<String>,
    model: Option<String>,
) -> PyResult<(u64, u64)> {
    let config = StoreConfig { paths, ..StoreConfig::default() };
    let selection =
        Selection { namespace: namespace.map(String::into_bytes), model: model.map(String::into_bytes) };
    let cleared = py.detach(|| xkv_store::clear(&config, &selection)).map_err(exception)?;
    Ok((cleared.objects, cleared.bytes))
}

/// Examines the store at `paths` and returns what was found as JSON text; with `repair`, repairs it. `progress` is
/// called with bytes read, bytes in all, damaged objects so far.
///
/// ValueError: there is no store. OSError: the system refuses, or the store is in use.
#[pyfunction]
#[pyo3(signature = (paths, repair, progress))]
pub fn check_store(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    repair: bool,
    progress: Py<PyAny>,
) -> PyResult<String> {
    let config = StoreConfig { paths, ..StoreConfig::default() };
    let mut raised = None;
    let mut tell = |state: Progress| {
        let told = Python::attach(|py| {
            py.check_signals()?;
            progress.call1(py, (state.done, state.total, state.damaged)).map(drop)
        });
        match told {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                raised = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let outcome = py.detach(|| xkv_store::check(&config, repair, &mut tell));
    match (raised, outcome) {
        (Some(error), _) => Err(error),
        (None, Ok(report)) => Ok(report_json(&report)),
        (None, Err(error)) => Err(exception(error)),
    }
}

fn report_json(report: &Report) -> String {
    let object = |object: &xkv_store::check::DamagedObject| {
        json!({
            "digest": object.key.digest().0.iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
            "namespace": String::from_utf8_lossy(object.key.namespace()),
            "key": String::from_utf8_lossy(object.key.key()),
            "bytes": object.size,
            "fragments_mismatched": object.mismatched,
            "fragments_unreadable": object.unreadable,
            "error": object.error,
        })
    };
    let drive = |drive: &xkv_store::check::DriveReport| {
        json!({
            "name": drive.name,
            "bytes": drive.bytes,
            "slots": drive.slots,
            "header_whole": drive.header_whole,
        })
    };
    json!({
        "store": report.store,
        "clean": report.is_clean(),
        "repaired": report.repaired,
        "fragment_bytes": report.fragment_bytes,
        "drives": report.drives.iter().map(drive).collect::<Vec<_>>(),
        "objects": report.objects,
        "bytes": report.bytes,
        "slots_used": report.slots_used,
        "slots_total": report.slots_total,
        "log_found": report.log_found,
        "log_damage": report.log_damage,
        "objects_overlapping": report.overlapping,
        "objects_implausible": report.implausible,
        "objects_damaged": report.damaged.len(),
        "damaged": report.damaged.iter().take(NAMED_OBJECTS).map(object).collect::<Vec<_>>(),
    })
    .to_string()
}

/// What is at each of `paths`: path, `missing`, `blank`, `store` or `foreign`, and the same in words. Changes nothing.
///
/// ValueError: a path that cannot be a store. OSError: the system refuses, or it is in use.
#[pyfunction]
pub fn survey_store(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Vec<(PathBuf, &'static str, String)>> {
    // Files of any size: whether a new one fits is for the making to say.
    let config = StoreConfig { paths, file_bytes: 0, ..StoreConfig::default() };
    let found = py.detach(|| survey(&config)).map_err(exception)?;
    let describe = |(path, content): (PathBuf, Content)| (path, kind_of(&content), content.to_string());
    Ok(found.into_iter().map(describe).collect())
}

/// The name of what is at a path.
pub fn kind_of(content: &Content) -> &'static str {
    match content {
        Content::Missing => "missing",
        Content::Blank => "blank",
        Content::Store { .. } => "store",
        Content::Foreign(_) => "foreign",
    }
}

/// Makes a new store at `paths` and returns one line about it. Files that exist keep their size where `store_gb` is
/// None. What is there already is refused without `force` and lost with it.
///
/// ValueError: the settings, or what is on the drives, cannot work. OSError: the system refuses, or it is in use.
#[pyfunction]
pub fn format_store(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    store_gb: Option<f64>,
    fragment_bytes: Option<u32>,
    force: bool,
) -> PyResult<String> {
    let config = store_config(paths, store_gb, fragment_bytes);
    py.detach(|| {
        let store = Store::format(&config, force, store_gb.is_some())?;
        Ok(store.describe())
    })
    .map_err(exception)
}
