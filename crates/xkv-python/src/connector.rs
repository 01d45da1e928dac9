//! The connector's Python class.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use xkv_plugin::{ClientConfig, Config, Gateway, L1Buffer, Operation, Owner, Verify};

use crate::{buffers, direct_io_of, engine_of, exception, logging, seconds, store_config, unknown};

/// The second tier's end in LMCache's process, on an embedded store or a gateway.
#[pyclass(module = "xkv_lmcache._native", subclass, frozen)]
pub struct Connector(xkv_plugin::Connector);

/// One answer: id, ok, error, and per key for get, exists and delete.
type Answer = (u64, bool, String, Option<Vec<bool>>);

#[pymethods]
impl Connector {
    /// Opens the store, or with `host` a session with a gateway; the arguments are checked, named and documented by
    /// `xkv_lmcache.params`.
    #[new]
    #[pyo3(signature = (
        *, store, defaulted, store_gb, host, port, shm_dir, token_file, reopen_after_s, fragment_bytes, batch_slots, copy_threads, verify, wait_timeout_s, load_deadline_s,
        store_deadline_s, max_pending_store_mb, namespace, stats_interval_s, stats_path, io_engine, direct_io,
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        store: Vec<PathBuf>,
        defaulted: bool,
        store_gb: Option<f64>,
        host: Option<String>,
        port: u16,
        shm_dir: PathBuf,
        token_file: Option<PathBuf>,
        reopen_after_s: f64,
        fragment_bytes: Option<u32>,
        batch_slots: usize,
        copy_threads: Option<usize>,
        verify: &str,
        wait_timeout_s: f64,
        load_deadline_s: f64,
        store_deadline_s: f64,
        max_pending_store_mb: f64,
        namespace: &str,
        stats_interval_s: f64,
        stats_path: Option<PathBuf>,
        io_engine: &str,
        direct_io: &str,
    ) -> PyResult<Self> {
        logging::install();
        let mut store = store_config(store, store_gb, fragment_bytes);
        if defaulted {
            let gib = store.file_bytes as f64 / f64::from(1 << 30);
            tracing::warn!(
                "nothing says where the store is: using {:?}, {gib} GiB; set store (LMC_XKV_STORE) to choose",
                store.paths
            );
        }
        store.engine = engine_of(io_engine)?;
        store.direct = direct_io_of(direct_io)?;
        let verify = match verify {
            "full" => Verify::Full,
            "sample" => Verify::Sample,
            "off" => Verify::Off,
            other => return Err(unknown("verify", other, "full, sample or off")),
        };
        let config = Config {
            namespace: namespace.as_bytes().to_vec(),
            copy_threads,
            verify,
            wait_timeout: seconds("wait_timeout_s", wait_timeout_s)?,
            load_deadline: seconds("load_deadline_s", load_deadline_s)?,
            store_deadline: seconds("store_deadline_s", store_deadline_s)?,
            max_pending_store_bytes: (max_pending_store_mb * f64::from(1 << 20)) as u64,
            stats_interval: seconds("stats_interval_s", stats_interval_s)?,
            stats_path,
        };
        let Some(host) = host else {
            let opened = py.detach(|| xkv_plugin::Connector::open(&store, batch_slots, config));
            return opened.map(Self).map_err(exception);
        };
        let gateway = ClientConfig {
            host,
            port,
            shm_dir,
            token: token_file.as_deref().map(token).transpose()?,
            name: format!("lmcache server, process {}", std::process::id()),
            slots: u32::try_from(batch_slots).unwrap_or(u32::MAX),
            fragment_bytes,
            silence: config.wait_timeout,
            flush_patience: config.store_deadline,
        };
        let reopen_after = seconds("reopen_after_s", reopen_after_s)?;
        py.detach(|| {
            let backend = Gateway::open(gateway, reopen_after)?;
            xkv_plugin::Connector::new(Arc::new(backend), config)
        })
        .map(Self)
        .map_err(exception)
    }

    /// Descriptor that becomes readable when there is something to drain.
    fn event_fd(&self) -> i32 {
        self.0.event_fd()
    }

    /// Loads objects into writable buffers of exactly their size.
    fn submit_batch_get(&self, keys: &Bound<'_, PyAny>, memoryviews: &Bound<'_, PyAny>) -> u64 {
        self.submit_buffers(Operation::Get, keys, memoryviews)
    }

    /// Stores objects.
    fn submit_batch_set(&self, keys: &Bound<'_, PyAny>, memoryviews: &Bound<'_, PyAny>) -> u64 {
        self.submit_buffers(Operation::Set, keys, memoryviews)
    }

    /// Looks objects up.
    fn submit_batch_exists(&self, keys: &Bound<'_, PyAny>) -> u64 {
        self.submit_keys(Operation::Exists, keys, |keys| self.0.submit_exists(keys))
    }

    /// Removes objects.
    fn submit_batch_delete(&self, keys: &Bound<'_, PyAny>) -> u64 {
        self.submit_keys(Operation::Delete, keys, |keys| self.0.submit_delete(keys))
    }

    /// The answers since the last call.
    fn drain_completions(&self) -> Vec<Answer> {
        self.0.drain().into_iter().map(|done| (done.id, done.ok, done.error, done.results)).collect()
    }

    /// Ends it, within 5 seconds.
    fn close(&self, py: Python<'_>) {
        drop(py.detach(|| self.0.close()));
    }

    /// Everything that is counted, as JSON text.
    fn stats_json(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.stats().to_string())
    }
}

impl Connector {
    fn submit_buffers(&self, operation: Operation, keys: &Bound<'_, PyAny>, views: &Bound<'_, PyAny>) -> u64 {
        self.guarded(operation, keys, || {
            let filled = operation == Operation::Get;
            let views: Vec<Bound<'_, PyAny>> =
                views.try_iter().and_then(Iterator::collect).unwrap_or_default();
            let (exported, owner) = buffers::export(&views, filled);
            match encode_all(keys) {
                Ok(keys) if filled => self.0.submit_get(keys, exported, owner),
                Ok(keys) => self.0.submit_set(keys, exported, owner),
                Err(error) => self.refuse(operation, keys, exported, owner, &error.to_string()),
            }
        })
    }

    fn submit_keys(
        &self,
        operation: Operation,
        keys: &Bound<'_, PyAny>,
        submit: impl FnOnce(Vec<Vec<u8>>) -> u64,
    ) -> u64 {
        self.guarded(operation, keys, || match encode_all(keys) {
            Ok(keys) => submit(keys),
            Err(error) => self.refuse(operation, keys, Vec::new(), Box::new(()), &error.to_string()),
        })
    }

    /// A panic becomes a failed completion like any other error.
    fn guarded(&self, operation: Operation, keys: &Bound<'_, PyAny>, submit: impl FnOnce() -> u64) -> u64 {
        catch_unwind(AssertUnwindSafe(submit)).unwrap_or_else(|_| {
            self.refuse(operation, keys, Vec::new(), Box::new(()), "internal error in submit")
        })
    }

    fn refuse(
        &self,
        operation: Operation,
        keys: &Bound<'_, PyAny>,
        buffers: Vec<Option<L1Buffer>>,
        owner: Owner,
        error: &str,
    ) -> u64 {
        self.0.refuse(operation, keys.len().unwrap_or(0), buffers, owner, error)
    }
}

/// The secret in a file, without the line end.
fn token(path: &Path) -> PyResult<String> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let text = format!("token_file={path:?}: {error}; name a readable file with the gateway's token");
        match error.raw_os_error() {
            Some(errno) => PyOSError::new_err((errno, text)),
            None => PyValueError::new_err(text),
        }
    })?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(PyValueError::new_err(format!(
            "token_file={path:?} is empty; write the gateway's token into it"
        ))),
        token => Ok(token.to_owned()),
    }
}

/// Keys as bytes: UTF-8, lone surrogates as Python's `surrogatepass` writes them.
fn encode_all(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u8>>> {
    keys.try_iter()?.map(|key| encode(&key?)).collect()
}

fn encode(key: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let key = key.cast::<PyString>().map_err(|_| PyTypeError::new_err("a key is not a str"))?;
    match key.to_cow() {
        Ok(text) => Ok(text.as_bytes().to_vec()),
        Err(_) => key.call_method1("encode", ("utf-8", "surrogatepass"))?.extract(),
    }
}
