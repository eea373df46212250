//! Bindings of `sao_core::ledger`.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sao_core::history::{History, TrainedStep};
use sao_core::ledger as core;
use sao_core::Error;

use crate::error::{guard, to_py};

/// A count or ordinal: an integer from 0 to 2^63 - 1; or what was given instead.
struct Natural(std::result::Result<u64, String>);

impl<'py> FromPyObject<'_, 'py> for Natural {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let number = value.extract::<i64>().ok();
        let number = number.and_then(|number| u64::try_from(number).ok());
        Ok(Self(number.ok_or_else(|| {
            let shown = value.repr();
            shown.map_or_else(|_| "?".into(), |text| text.to_string())
        })))
    }
}

impl Natural {
    /// The number, or an error that names the argument `field`.
    fn get(self, field: impl std::fmt::Display) -> PyResult<u64> {
        self.0.map_err(|shown| {
            ledger_error(format!(
                "{field}: {shown} is not an integer from 0 to 2^63 - 1"
            ))
        })
    }
}

fn all(field: &str, numbers: Vec<Natural>) -> PyResult<Vec<u64>> {
    let numbers = numbers.into_iter().enumerate();
    numbers
        .map(|(index, number)| number.get(format_args!("{field}[{index}]")))
        .collect()
}

fn ledger_error(text: impl Into<String>) -> PyErr {
    to_py(Error::Ledger(text.into()))
}

/// Where every task of a run is and where every sampled token went; see `sao._core.pyi`.
#[pyclass(frozen, module = "sao._core")]
struct Ledger {
    inner: Mutex<Option<core::Ledger>>,
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, Option<core::Ledger>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, call: impl FnOnce(&mut core::Ledger) -> sao_core::Result<T>) -> PyResult<T> {
        guard(|| match self.lock().as_mut() {
            Some(ledger) => call(ledger),
            None => Err(Error::Closed("the ledger is closed".into())),
        })
    }
}

#[pymethods]
impl Ledger {
    #[new]
    #[pyo3(signature = (path = None))]
    #[allow(clippy::needless_pass_by_value)] // arguments from Python arrive owned
    fn new(py: Python<'_>, path: Option<PathBuf>) -> PyResult<Self> {
        let ledger = py.detach(|| guard(|| core::Ledger::open(path.as_deref())))?;
        Ok(Self {
            inner: Mutex::new(Some(ledger)),
        })
    }

    fn issue(&self, ordinal: Natural) -> PyResult<u64> {
        let ordinal = ordinal.get("ordinal")?;
        self.with(|ledger| ledger.issue(ordinal))
    }

    fn generating(&self, ordinal: Natural, attempt: Natural) -> PyResult<()> {
        let ordinal = ordinal.get("ordinal")?;
        let attempt = attempt.get("attempt")?;
        self.with(|ledger| ledger.generating(ordinal, attempt))
    }

    fn ready(&self, ordinal: Natural, attempt: Natural, sampled_tokens: Natural) -> PyResult<bool> {
        let ordinal = ordinal.get("ordinal")?;
        let attempt = attempt.get("attempt")?;
        let sampled_tokens = sampled_tokens.get("sampled_tokens")?;
        self.with(|ledger| ledger.ready(ordinal, attempt, sampled_tokens))
    }

    fn lease(&self, ordinals: Vec<Natural>, lease_id: Natural) -> PyResult<()> {
        let lease_id = lease_id.get("lease_id")?;
        let ordinals = all("ordinals", ordinals)?;
        self.with(|ledger| ledger.lease(&ordinals, lease_id))
    }

    fn give_back(&self, lease_id: Natural) -> PyResult<()> {
        let lease_id = lease_id.get("lease_id")?;
        self.with(|ledger| ledger.give_back(lease_id))
    }

    fn trained(
        &self,
        lease_id: Natural,
        step: Natural,
        trained_tokens: &Bound<'_, PyAny>,
        masked_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let lease_id = lease_id.get("lease_id")?;
        let step = step.get("step")?;
        let lists = (
            trained_tokens.extract::<Vec<Natural>>(),
            masked_tokens.extract::<Vec<Natural>>(),
        );
        let used = match lists {
            (Ok(trained), Ok(masked)) if trained.len() == masked.len() => {
                let trained = all("trained_tokens", trained)?;
                let masked = all("masked_tokens", masked)?;
                core::Use::Each(trained.into_iter().zip(masked).collect())
            }
            (Ok(trained), Ok(masked)) => {
                return Err(ledger_error(format!(
                    "trained_tokens has {} entries, masked_tokens {}",
                    trained.len(),
                    masked.len()
                )))
            }
            (Err(_), Err(_)) => {
                let (trained, masked): (Natural, Natural) =
                    (trained_tokens.extract()?, masked_tokens.extract()?);
                core::Use::Total(trained.get("trained_tokens")?, masked.get("masked_tokens")?)
            }
            _ => {
                return Err(ledger_error(
                    "trained_tokens and masked_tokens: give two totals or two lists",
                ))
            }
        };
        self.with(|ledger| ledger.trained(lease_id, step, &used))
    }

    #[pyo3(signature = (ordinal, attempt, reason, sampled_tokens = None))]
    fn drop(
        &self,
        ordinal: Natural,
        attempt: Natural,
        reason: &str,
        sampled_tokens: Option<Natural>,
    ) -> PyResult<bool> {
        let ordinal = ordinal.get("ordinal")?;
        let attempt = attempt.get("attempt")?;
        let sampled_tokens = sampled_tokens
            .map(|n| n.get("sampled_tokens"))
            .transpose()?;
        self.with(|ledger| ledger.drop_task(ordinal, attempt, reason, sampled_tokens))
    }

    #[pyo3(signature = (ordinal, reason = "requeued", sampled_tokens = None))]
    fn requeue(
        &self,
        ordinal: Natural,
        reason: &str,
        sampled_tokens: Option<Natural>,
    ) -> PyResult<()> {
        let ordinal = ordinal.get("ordinal")?;
        let sampled_tokens = sampled_tokens
            .map(|n| n.get("sampled_tokens"))
            .transpose()?;
        self.with(|ledger| ledger.requeue(ordinal, reason, sampled_tokens))
    }

    fn waste(&self, reason: &str, sampled_tokens: Natural) -> PyResult<()> {
        let sampled_tokens = sampled_tokens.get("sampled_tokens")?;
        self.with(|ledger| ledger.waste(reason, sampled_tokens))
    }

    fn rewind<'py>(&self, py: Python<'py>, step: Natural) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let step = step.get("step")?;
        let back = py.detach(|| self.with(|ledger| ledger.rewind(step)))?;
        back.iter().map(|step| described(py, step)).collect()
    }

    fn compact(&self, py: Python<'_>, upto_step: Natural) -> PyResult<(u64, u64)> {
        let upto_step = upto_step.get("upto_step")?;
        py.detach(|| self.with(|ledger| ledger.compact(upto_step)))
    }

    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.with(|ledger| Ok(ledger.counts()))?;
        let out = PyDict::new(py);
        for (name, count) in counts {
            out.set_item(name, count)?;
        }
        Ok(out)
    }

    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tokens = self.with(|ledger| Ok(ledger.tokens().clone()))?;
        let dropped = PyDict::new(py);
        for (reason, count) in &tokens.dropped {
            dropped.set_item(reason, count)?;
        }
        let out = PyDict::new(py);
        out.set_item("sampled", tokens.sampled)?;
        out.set_item("trained", tokens.trained)?;
        out.set_item("masked", tokens.masked)?;
        out.set_item("dropped", dropped)?;
        out.set_item("held", tokens.held)?;
        Ok(out)
    }

    fn check(&self) -> PyResult<()> {
        self.with(|ledger| ledger.check())
    }

    fn state(&self, ordinal: Natural) -> PyResult<&'static str> {
        let ordinal = ordinal.get("ordinal")?;
        self.with(|ledger| Ok(ledger.state(ordinal)))
    }

    fn unfinished(&self) -> PyResult<Vec<(u64, u64, &'static str)>> {
        let tasks = self.with(|ledger| Ok(ledger.unfinished()))?;
        Ok(tasks
            .into_iter()
            .map(|(o, a, phase)| (o, a, phase.name()))
            .collect())
    }

    fn leases(&self) -> PyResult<Vec<(u64, Vec<u64>)>> {
        self.with(|ledger| Ok(ledger.leases()))
    }

    #[getter]
    fn next_ordinal(&self) -> PyResult<u64> {
        self.with(|ledger| Ok(ledger.next_ordinal()))
    }

    #[getter]
    fn last_step(&self) -> PyResult<Option<u64>> {
        self.with(|ledger| Ok(ledger.last_step()))
    }

    #[getter]
    fn entries(&self) -> PyResult<usize> {
        self.with(|ledger| Ok(ledger.entries()))
    }

    fn flush(&self) -> PyResult<()> {
        self.with(core::Ledger::flush).map(drop)
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        // The disk is waited for without the GIL and without the lock, so other threads go on meanwhile.
        py.detach(|| match self.with(core::Ledger::flush)? {
            Some(file) => file
                .sync_data()
                .map_err(|error| ledger_error(format!("the ledger could not be synced: {error}"))),
            None => Ok(()),
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.lock().is_none() {
            return Ok(());
        }
        let done = self.sync(py);
        *self.lock() = None;
        done
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

fn described<'py>(py: Python<'py>, step: &TrainedStep) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("step", step.step)?;
    out.set_item("lease", step.lease)?;
    out.set_item("tasks", step.members.clone())?;
    out.set_item("trained_tokens", step.trained)?;
    out.set_item("masked_tokens", step.masked)?;
    Ok(out)
}

type Ordinals = Vec<(u64, u64)>;

#[pyfunction]
#[pyo3(signature = (path, after_step = Natural(Ok(0))))]
#[allow(clippy::needless_pass_by_value)] // arguments from Python arrive owned
fn ledger_history(
    py: Python<'_>,
    path: PathBuf,
    after_step: Natural,
) -> PyResult<(Ordinals, Vec<Bound<'_, PyDict>>)> {
    let (path, after_step) = (path.as_path(), after_step.get("after_step")?);
    let found = py.detach(|| guard(|| History::read(path, after_step)))?;
    let steps = found.steps.iter().map(|step| described(py, step));
    Ok((found.trained_before(), steps.collect::<PyResult<_>>()?))
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(ledger_history, m)?)?;
    m.add_class::<Ledger>()
}
