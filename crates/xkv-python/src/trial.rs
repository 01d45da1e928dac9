//! A trial of a drive by the I/O engine alone.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use xkv_store::io::{EngineKind, Op};
use xkv_store::trial::{self, Access, Measurement, Moved, Order, Until};

use crate::gateway::kind_of;
use crate::{engine_of, exception, unknown};

/// Of the pass that writes everything once.
const FILL_BLOCK: usize = 1 << 20;
const FILL_DEPTH: usize = 32;

/// A block device or file, open and locked until `close`. Its ends stay as they are, so that what is blank counts as
/// blank afterwards.
#[pyclass(module = "xkv_lmcache._native", frozen)]
pub struct Trial {
    trial: Mutex<Option<Arc<trial::Trial>>>,
}

#[pymethods]
impl Trial {
    /// Opens the block device or file at `path`, of which up to `span_bytes` are used. What is not blank is refused
    /// without `read_only` or `force`, and destroyed with `force`.
    ///
    /// ValueError: refused, or too small. OSError: the system refuses, or it is in use.
    #[new]
    #[pyo3(signature = (path, *, span_bytes, read_only, force))]
    fn new(py: Python<'_>, path: PathBuf, span_bytes: u64, read_only: bool, force: bool) -> PyResult<Self> {
        let access = match (read_only, force) {
            (true, _) => Access::ReadOnly,
            (false, false) => Access::Blank,
            (false, true) => Access::Force,
        };
        let trial = py.detach(|| trial::Trial::open(&path, span_bytes, access)).map_err(exception)?;
        Ok(Self { trial: Mutex::new(Some(Arc::new(trial))) })
    }

    /// What was found there: `blank`, `store` or `foreign`, and the same in words.
    fn found(&self) -> PyResult<(&'static str, String)> {
        let trial = self.open()?;
        Ok((kind_of(trial.content()), trial.content().to_string()))
    }

    /// Where the part that is read and written begins, and its bytes.
    fn span(&self) -> PyResult<(u64, u64)> {
        let span = self.open()?.span();
        Ok((span.start, span.end - span.start))
    }

    /// Whether the page cache is bypassed.
    fn is_direct(&self) -> PyResult<bool> {
        Ok(self.open()?.is_direct())
    }

    /// Whether it is memory (tmpfs).
    fn in_memory(&self) -> PyResult<bool> {
        Ok(self.open()?.in_memory())
    }

    /// The descriptor that holds the lock.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.open()?.fd())
    }

    /// Writes everything once.
    ///
    /// OSError: the drive fails.
    fn fill(&self, py: Python<'_>) -> PyResult<()> {
        let fill = Measurement {
            op: Op::Write,
            order: Order::Sequential,
            block_bytes: FILL_BLOCK,
            depth: FILL_DEPTH,
            engine: EngineKind::Auto,
            until: Until::Once,
        };
        self.measured(py, &fill).map(drop)
    }

    /// Reads or writes blocks for `seconds`: bytes moved, seconds taken, CPU seconds of this process, and the engine's name.
    ///
    /// ValueError: an argument that cannot work. OSError: the engine cannot be had, or the drive fails.
    #[allow(clippy::too_many_arguments)]
    fn measure(
        &self,
        py: Python<'_>,
        op: &str,
        order: &str,
        block_bytes: usize,
        depth: usize,
        io_engine: &str,
        seconds: f64,
    ) -> PyResult<(u64, f64, f64, &'static str)> {
        let what = Measurement {
            op: match op {
                "read" => Op::Read,
                "write" => Op::Write,
                other => return Err(unknown("op", other, "read or write")),
            },
            order: match order {
                "sequential" => Order::Sequential,
                "random" => Order::Random,
                other => return Err(unknown("order", other, "sequential or random")),
            },
            block_bytes,
            depth,
            engine: engine_of(io_engine)?,
            until: Until::Elapsed(crate::seconds("seconds", seconds)?),
        };
        let Moved { bytes, elapsed, cpu, engine } = self.measured(py, &what)?;
        Ok((bytes, elapsed.as_secs_f64(), cpu.as_secs_f64(), engine))
    }

    /// Lets go of the drive.
    fn close(&self) {
        drop(self.trial.lock().ok().and_then(|mut trial| trial.take()));
    }
}

impl Trial {
    fn open(&self) -> PyResult<Arc<trial::Trial>> {
        let trial = self.trial.lock().ok().and_then(|trial| trial.clone());
        trial.ok_or_else(|| PyValueError::new_err("the trial is closed"))
    }

    fn measured(&self, py: Python<'_>, what: &Measurement) -> PyResult<Moved> {
        let trial = self.open()?;
        let mut raised = None;
        let mut go_on = || match Python::attach(|py| py.check_signals()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                raised = Some(error);
                ControlFlow::Break(())
            }
        };
        let moved = py.detach(|| trial.measure(what, &mut go_on));
        match raised {
            Some(error) => Err(error),
            None => moved.map_err(exception),
        }
    }
}
