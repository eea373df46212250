//! Bindings of `sao_core::ledger`.

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict, PyTuple};
use sao_core::ledger::{self as core, Event, Stored, TrainedStep, SEGMENT_BYTES};
use sao_core::{Error, Result};

use crate::error::{guard, to_py};
use crate::lend;

/// A count or ordinal: an integer from 0 to 2^63 - 1.
fn natural(value: &Bound<'_, PyAny>, field: impl Display) -> PyResult<u64> {
    let number = value
        .extract::<i64>()
        .ok()
        .and_then(|n| u64::try_from(n).ok());
    number.ok_or_else(|| {
        let shown = value.repr().map_or("?".into(), |text| text.to_string());
        let range = "is not an integer from 0 to 2^63 - 1";
        to_py(Error::Ledger(format!("{field}: {shown} {range}")))
    })
}

fn naturals(values: &[Bound<'_, PyAny>], field: &str) -> PyResult<Vec<u64>> {
    let values = values.iter().enumerate();
    values
        .map(|(index, value)| natural(value, format_args!("{field}[{index}]")))
        .collect()
}

/// Such a number as an argument of this name.
macro_rules! arguments {
    ($($name:ident $text:literal)*) => {$(
        struct $name(u64);

        impl<'py> FromPyObject<'_, 'py> for $name {
            type Error = PyErr;

            fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
                natural(&value, $text).map(Self)
            }
        }
    )*};
}

arguments! {
    Ordinal "ordinal" Attempt "attempt" LeaseId "lease_id" Sampled "sampled_tokens"
    Step "step" UptoStep "upto_step" AfterStep "after_step"
}

/// The frames of a record, read where Python has them.
struct Frames(Vec<PyUntypedBuffer>);

impl<'py> FromPyObject<'_, 'py> for Frames {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let frames = value.try_iter()?.map(|frame| PyUntypedBuffer::get(&frame?));
        let frames: Vec<_> = frames.collect::<PyResult<_>>()?;
        if frames.iter().all(PyUntypedBuffer::is_c_contiguous) {
            return Ok(Self(frames));
        }
        let text = "frames: expected contiguous bytes".into();
        Err(to_py(Error::Ledger(text)))
    }
}

impl Frames {
    fn bytes(&self) -> Vec<&[u8]> {
        self.0.iter().map(lend::bytes).collect()
    }
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

    fn with<T>(&self, call: impl FnOnce(&mut core::Ledger) -> Result<T>) -> PyResult<T> {
        guard(|| match self.lock().as_mut() {
            Some(ledger) => call(ledger),
            None => Err(Error::Closed("the ledger is closed".into())),
        })
    }

    fn look<T>(&self, call: impl FnOnce(&core::Books) -> T) -> PyResult<T> {
        self.with(|ledger| Ok(call(ledger.books())))
    }

    fn record(&self, event: &Event) -> PyResult<bool> {
        self.with(|ledger| ledger.record(event))
    }

    fn done(&self, event: &Event) -> PyResult<()> {
        self.record(event).map(drop)
    }
}

#[pymethods]
#[allow(clippy::needless_pass_by_value)] // arguments from Python arrive owned
impl Ledger {
    #[new]
    #[pyo3(signature = (path = None, *, segment_bytes = SEGMENT_BYTES))]
    fn new(py: Python<'_>, path: Option<PathBuf>, segment_bytes: u64) -> PyResult<Self> {
        let open = || guard(|| core::Ledger::open(path.as_deref(), segment_bytes));
        Ok(Self {
            inner: Mutex::new(Some(py.detach(open)?)),
        })
    }

    fn issue(&self, ordinal: Ordinal) -> PyResult<u64> {
        self.with(|ledger| {
            ledger.record(&Event::Issue(ordinal.0))?;
            let task = ledger.books().task(ordinal.0);
            Ok(task.map_or(0, |(attempt, _)| attempt))
        })
    }

    fn generating(&self, ordinal: Ordinal, attempt: Attempt) -> PyResult<()> {
        self.done(&Event::Generating(ordinal.0, attempt.0))
    }

    fn ready(&self, ordinal: Ordinal, attempt: Attempt, sampled_tokens: Sampled) -> PyResult<bool> {
        self.record(&Event::Ready(ordinal.0, attempt.0, sampled_tokens.0))
    }

    fn lease(&self, ordinals: Vec<Bound<'_, PyAny>>, lease_id: LeaseId) -> PyResult<()> {
        self.done(&Event::Lease(lease_id.0, naturals(&ordinals, "ordinals")?))
    }

    fn give_back(&self, lease_id: LeaseId) -> PyResult<()> {
        self.done(&Event::GiveBack(lease_id.0))
    }

    fn trained(
        &self,
        lease_id: LeaseId,
        step: Step,
        trained_tokens: &Bound<'_, PyAny>,
        masked_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (trained, masked) = ("trained_tokens", "masked_tokens");
        let lists = (
            trained_tokens.extract::<Vec<_>>(),
            masked_tokens.extract::<Vec<_>>(),
        );
        let (trained, masked) = match lists {
            (Ok(each), Ok(of_each)) => {
                let used = (naturals(&each, trained)?, naturals(&of_each, masked)?);
                self.with(|ledger| ledger.total(lease_id.0, &used.0, &used.1))?
            }
            (Err(_), Err(_)) => (
                natural(trained_tokens, trained)?,
                natural(masked_tokens, masked)?,
            ),
            _ => {
                let text = format!("{trained} and {masked}: give two totals or two lists");
                return Err(to_py(Error::Ledger(text)));
            }
        };
        self.done(&Event::Trained(lease_id.0, step.0, trained, masked))
    }

    #[pyo3(signature = (ordinal, attempt, reason, sampled_tokens = None))]
    fn drop(
        &self,
        ordinal: Ordinal,
        attempt: Attempt,
        reason: String,
        sampled_tokens: Option<Sampled>,
    ) -> PyResult<bool> {
        let tokens = sampled_tokens.map(|tokens| tokens.0);
        self.record(&Event::Drop(ordinal.0, attempt.0, reason, tokens))
    }

    #[pyo3(signature = (ordinal, reason = "requeued".to_owned(), sampled_tokens = None))]
    fn requeue(
        &self,
        ordinal: Ordinal,
        reason: String,
        sampled_tokens: Option<Sampled>,
    ) -> PyResult<()> {
        let tokens = sampled_tokens.map(|tokens| tokens.0);
        self.done(&Event::Requeue(ordinal.0, reason, tokens))
    }

    fn waste(&self, reason: String, sampled_tokens: Sampled) -> PyResult<()> {
        self.done(&Event::Waste(reason, sampled_tokens.0))
    }

    fn begin_anew(&self, ordinal: Ordinal) -> PyResult<()> {
        self.done(&Event::Anew(ordinal.0))
    }

    fn answered(&self, ordinal: Ordinal, attempt: Attempt) -> PyResult<bool> {
        self.record(&Event::Answered(ordinal.0, attempt.0))
    }

    fn rewind<'py>(&self, py: Python<'py>, step: Step) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let back = py.detach(|| self.with(|ledger| ledger.rewind(step.0)))?;
        back.iter().map(|step| described(py, step)).collect()
    }

    fn trajectory(&self, ordinal: Ordinal, frames: Frames) -> PyResult<()> {
        self.with(|ledger| ledger.trajectory(ordinal.0, &frames.bytes()))
    }

    fn turn(&self, ordinal: Ordinal, part: u32, frames: Frames) -> PyResult<()> {
        self.with(|ledger| ledger.turn(ordinal.0, part, &frames.bytes()))
    }

    fn frames<'py>(&self, py: Python<'py>, ordinal: Ordinal) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let found = py.detach(|| self.with(|ledger| ledger.frames(ordinal.0)))?;
        let frames = |stored: &Stored| {
            let frames = stored.frames().into_iter();
            PyTuple::new(py, frames.map(|f| PyBytes::new(py, f)).collect::<Vec<_>>())
        };
        found.iter().map(frames).collect()
    }

    #[getter]
    fn damage(&self) -> PyResult<Vec<String>> {
        self.with(|ledger| Ok(ledger.damage().to_vec()))
    }

    #[getter]
    fn note<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.look(|books| PyBytes::new(py, &books.note))
    }

    #[setter]
    fn set_note(&self, note: Vec<u8>) -> PyResult<()> {
        self.done(&Event::Note(note))
    }

    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts: Vec<_> = self.look(|books| books.counts().collect())?;
        counts.into_py_dict(py)
    }

    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tokens = self.look(|books| books.tokens.clone())?;
        let out = PyDict::new(py);
        out.set_item("sampled", tokens.sampled)?;
        out.set_item("trained", tokens.trained)?;
        out.set_item("masked", tokens.masked)?;
        out.set_item("dropped", tokens.dropped)?;
        out.set_item("held", tokens.held)?;
        Ok(out)
    }

    fn check(&self) -> PyResult<()> {
        self.with(|ledger| ledger.books().check())
    }

    fn state(&self, ordinal: Ordinal) -> PyResult<&'static str> {
        self.look(|books| books.where_is(ordinal.0))
    }

    fn unfinished(&self) -> PyResult<Vec<(u64, u64, &'static str)>> {
        self.look(|books| {
            let tasks = books.unfinished();
            tasks.map(|(o, a, phase)| (o, a, phase.name())).collect()
        })
    }

    fn leases(&self) -> PyResult<Vec<(u64, Vec<u64>)>> {
        self.look(|books| books.leases.clone().into_iter().collect())
    }

    #[getter]
    fn next_ordinal(&self) -> PyResult<u64> {
        self.look(|books| books.next_ordinal)
    }

    #[getter]
    fn last_step(&self) -> PyResult<Option<u64>> {
        self.look(|books| books.last_step)
    }

    #[getter]
    fn entries(&self) -> PyResult<usize> {
        self.look(core::Books::entries)
    }

    #[getter]
    fn n_bytes(&self) -> PyResult<u64> {
        self.with(|ledger| Ok(ledger.bytes()))
    }

    #[getter]
    fn due(&self) -> PyResult<bool> {
        self.with(|ledger| Ok(ledger.due()))
    }

    #[getter]
    fn full(&self) -> PyResult<bool> {
        self.with(|ledger| Ok(ledger.full()))
    }

    fn roll(&self, py: Python<'_>, upto_step: UptoStep) -> PyResult<()> {
        py.detach(|| self.with(|ledger| ledger.roll(upto_step.0)))
    }

    #[getter]
    fn broken(&self) -> PyResult<bool> {
        self.with(|ledger| Ok(ledger.broken()))
    }

    fn mend(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.with(core::Ledger::mend))
    }

    fn flush(&self) -> PyResult<()> {
        self.with(core::Ledger::flush).map(drop)
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        // The disk is waited for without the GIL and without the lock, so other threads go on meanwhile.
        py.detach(
            || match self.with(core::Ledger::flush)?.map(|file| file.sync_data()) {
                Some(Err(error)) => self.with(|ledger| Err(ledger.failed(&error))),
                _ => Ok(()),
            },
        )
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
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
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

type Runs = Vec<(u64, u64)>;

#[pyfunction]
#[pyo3(signature = (path, after_step = AfterStep(0)))]
#[allow(clippy::needless_pass_by_value)] // arguments from Python arrive owned
fn ledger_history(
    py: Python<'_>,
    path: PathBuf,
    after_step: AfterStep,
) -> PyResult<(Runs, Vec<Bound<'_, PyDict>>)> {
    let found = py.detach(|| guard(|| core::history(&path, after_step.0)))?;
    let steps = found.steps.iter().map(|step| described(py, step));
    Ok((found.trained_before(), steps.collect::<PyResult<_>>()?))
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(ledger_history, m)?)?;
    m.add_class::<Ledger>()
}
