//! Bindings of `sao_core::staleness`.

use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use sao_core::staleness;

use crate::argument::{count, mask};
use crate::call::blocking;
use crate::error::{guard, to_py, validation};

/// The current policy version, shared by threads.
#[pyclass(frozen, module = "sao._core")]
struct VersionClock {
    clock: staleness::VersionClock,
}

#[pymethods]
impl VersionClock {
    #[new]
    #[pyo3(signature = (version=0))]
    fn new(version: i64) -> PyResult<Self> {
        Ok(Self {
            clock: staleness::VersionClock::new(version).map_err(to_py)?,
        })
    }

    #[getter]
    fn version(&self) -> i64 {
        self.clock.version()
    }

    fn advance(&self, to: i64) -> PyResult<()> {
        self.clock.advance(to).map_err(to_py)
    }

    #[pyo3(signature = (version, timeout_s=None))]
    fn wait(&self, py: Python<'_>, version: i64, timeout_s: Option<f64>) -> PyResult<i64> {
        blocking(py, timeout_s, |pace| self.clock.wait(version, pace))
    }

    fn __repr__(&self) -> String {
        format!("VersionClock(version={})", self.clock.version())
    }
}

/// How many rollouts may start.
#[pyclass(frozen, module = "sao._core")]
struct Admission {
    admission: staleness::Admission,
}

#[pymethods]
impl Admission {
    #[new]
    fn new(max_lag: i64, batch: i64) -> PyResult<Self> {
        let admission = staleness::Admission {
            max_lag: count("max_lag", max_lag, 0)?,
            batch: count("batch", batch, 1)?,
        };
        Ok(Self { admission })
    }

    fn permits(
        &self,
        steps: i64,
        trained: i64,
        leased: i64,
        ready: i64,
        running: i64,
    ) -> PyResult<u64> {
        Ok(self.admission.permits(
            count("steps", steps, 0)?,
            count("trained", trained, 0)?,
            count("leased", leased, 0)?,
            count("ready", ready, 0)?,
            count("running", running, 0)?,
        ))
    }

    fn __repr__(&self) -> String {
        format!(
            "Admission(max_lag={}, batch={})",
            self.admission.max_lag, self.admission.batch
        )
    }
}

#[pyfunction]
fn token_lags<'py>(
    action_mask: &Bound<'py, PyAny>,
    version_spans: &Bound<'py, PyAny>,
    learner_version: i64,
) -> PyResult<Bound<'py, PyArray1<i32>>> {
    let spans = version_spans.cast::<PyArray2<i64>>().map_err(|_| {
        PyTypeError::new_err(format!(
            "version_spans: expected an int64 array of shape [k, 3], got {}",
            version_spans.get_type()
        ))
    })?;
    if spans.shape()[1] != 3 {
        return Err(validation(format!(
            "version_spans: shape {:?} must be [k, 3]",
            spans.shape()
        )));
    }
    let spans = spans.readonly();
    let rows: Vec<[i64; 3]> = spans
        .as_array()
        .rows()
        .into_iter()
        .map(|row| [row[0], row[1], row[2]])
        .collect();
    let mask = mask("action_mask", action_mask)?;
    let mask = mask.as_slice()?;
    let lags = guard(|| staleness::token_lags(mask, &rows, learner_version))?;
    Ok(lags.into_pyarray(action_mask.py()))
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<VersionClock>()?;
    m.add_class::<Admission>()?;
    m.add_function(wrap_pyfunction!(token_lags, m)?)
}
