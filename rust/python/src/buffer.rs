//! Bindings of `sao_core::buffer`.

use std::ffi::c_int;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use numpy::IntoPyArray;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use rustix::event::{eventfd, EventfdFlags};
use sao_core::buffer::{self, Content, Item, Label, Limits};
use sao_core::wait::Pace;
use sao_core::wire as format;

use crate::error::{guard, to_py, validation};
use crate::lend;
use crate::pace::{blocking, check_timeout};
use crate::wire;

/// Up to this size a `put` that need not wait keeps the GIL.
const COPY_WITH_GIL_BYTES: usize = 1 << 20;
/// Up to this number a `take` that need not wait keeps the GIL.
const TAKE_WITH_GIL: usize = 256;

/// A bounded buffer of encoded trajectories.
#[pyclass(frozen, module = "sao._core")]
struct Buffer {
    buffer: buffer::Buffer,
    limits: Limits,
}

#[pymethods]
impl Buffer {
    #[new]
    #[pyo3(signature = (max_trajectories, max_bytes, policy="block"))]
    fn new(max_trajectories: i64, max_bytes: i64, policy: &str) -> PyResult<Self> {
        let size = |name: &str, value: i64| {
            usize::try_from(value)
                .map_err(|_| validation(format!("{name}: {value} must be at least 1")))
        };
        let policy = policy.parse().map_err(to_py)?;
        let limits = Limits {
            max_trajectories: size("max_trajectories", max_trajectories)?,
            max_bytes: size("max_bytes", max_bytes)?,
            policy,
        };
        Ok(Self {
            buffer: buffer::Buffer::new(limits).map_err(to_py)?,
            limits,
        })
    }

    #[pyo3(signature = (header, payload, *, min_version, timeout_s=None, sidecars=None, task=-1))]
    #[allow(clippy::too_many_arguments)] // arguments of the Python function
    fn put<'py>(
        &self,
        py: Python<'py>,
        header: &Bound<'py, PyAny>,
        payload: &Bound<'py, PyAny>,
        min_version: i64,
        timeout_s: Option<f64>,
        sidecars: Option<Vec<Bound<'py, PyAny>>>,
        task: i64,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let (header, payload) = (
            Source::new("header", header)?,
            Source::new("payload", payload)?,
        );
        let (header, payload) = (header.bytes(), payload.bytes());
        let sidecars = sources(&sidecars.unwrap_or_default())?;
        let sides: Vec<&[u8]> = sidecars.iter().map(Source::bytes).collect();
        let extra: usize = sides.iter().map(|bytes| bytes.len()).sum();
        let size = header.len() + payload.len() + extra;
        let content = Content::Copy(header, payload, &sides);
        let label = Label { min_version, task };
        let dropped = self.store(py, &content, size, label, timeout_s)?;
        if dropped.is_empty() {
            return Ok(None);
        }
        let result = PyDict::new(py);
        result.set_item("reason", self.limits.policy.name())?;
        result.set_item("headers", headers(py, &dropped)?)?;
        Ok(Some(result))
    }

    /// Checks a `sao.Trajectory` and encodes it into the buffer's memory; gives how many the policy dropped for it.
    #[pyo3(signature = (trajectory, timeout_s=None))]
    fn put_trajectory(
        &self,
        py: Python<'_>,
        trajectory: &Bound<'_, PyAny>,
        timeout_s: Option<f64>,
    ) -> PyResult<usize> {
        let arrays = wire::arrays(trajectory)?;
        let view = wire::extract(trajectory, &arrays)?;
        let lengths = view.segments.iter().map(|s| s.action_mask.len());
        let (places, length) = guard(|| format::layout(lengths))?;
        let check = || guard(|| format::header(&view, &places, length));
        let frozen = arrays.frozen();
        let (header, counts) = if frozen && length > COPY_WITH_GIL_BYTES {
            py.detach(check)?
        } else {
            check()?
        };
        let label = Label {
            min_version: counts.min_version.unwrap_or(0),
            task: view.task_ordinal,
        };
        let sides: Vec<&[u8]> = view.sidecars.iter().map(|sidecar| sidecar.bytes).collect();
        let size = header.len() + length + sides.iter().map(|bytes| bytes.len()).sum::<usize>();
        let write = |out: &mut [u8]| format::fill(&view, &places, out);
        let dropped = if frozen {
            let content = Content::Write(&header, length, &write, &sides);
            self.store(py, &content, size, label, timeout_s)?
        } else {
            // Somebody may write to the arrays while this waits for room: what was checked is what goes in.
            let mut payload = vec![0; length];
            write(&mut payload);
            let copies: Vec<Vec<u8>> = sides.iter().map(|bytes| bytes.to_vec()).collect();
            let sides: Vec<&[u8]> = copies.iter().map(Vec::as_slice).collect();
            let content = Content::Copy(&header, &payload, &sides);
            self.store(py, &content, size, label, timeout_s)?
        };
        Ok(dropped.len())
    }

    /// Takes `n` and commits them at once: (header, payload, sidecars...) of each.
    #[pyo3(signature = (n, timeout_s=None))]
    fn drain<'py>(
        &self,
        py: Python<'py>,
        n: i64,
        timeout_s: Option<f64>,
    ) -> PyResult<Bound<'py, PyList>> {
        let n = count(n)?;
        check_timeout(timeout_s)?;
        let ready = if (1..=TAKE_WITH_GIL).contains(&n) {
            guard(|| self.buffer.try_drain(n))?
        } else {
            None
        };
        let items = match ready {
            Some(items) => items,
            None => blocking(py, timeout_s, |pace| self.buffer.drain(n, pace))?,
        };
        let list = PyList::empty(py);
        for item in items {
            let sides = (0..item.sidecars()).map(Part::Sidecar);
            let parts = [Part::Header, Part::Payload].into_iter().chain(sides);
            let views = parts.map(|part| View::of(&item, part));
            list.append(PyTuple::new(py, views.collect::<Vec<_>>())?)?;
        }
        Ok(list)
    }

    #[pyo3(signature = (n, timeout_s=None))]
    fn take(&self, py: Python<'_>, n: i64, timeout_s: Option<f64>) -> PyResult<Vec<Lease>> {
        let n = count(n)?;
        check_timeout(timeout_s)?;
        if (1..=TAKE_WITH_GIL).contains(&n) {
            if let Some(leases) = guard(|| self.buffer.try_take(n))? {
                return Ok(leases.into_iter().map(Lease::new).collect());
            }
        }
        let leases = blocking(py, timeout_s, |pace| self.buffer.take(n, pace))?;
        Ok(leases.into_iter().map(Lease::new).collect())
    }

    fn try_take(&self, n: i64) -> PyResult<Vec<Lease>> {
        let leases = self
            .buffer
            .try_take(count(n)?)
            .map_err(to_py)?
            .unwrap_or_default();
        Ok(leases.into_iter().map(Lease::new).collect())
    }

    #[pyo3(signature = (ordinals, timeout_s=None))]
    fn take_tasks(
        &self,
        py: Python<'_>,
        ordinals: &Bound<'_, PyAny>,
        timeout_s: Option<f64>,
    ) -> PyResult<Vec<Lease>> {
        let ordinals = self.ordinals(ordinals)?;
        check_timeout(timeout_s)?;
        if (1..=TAKE_WITH_GIL).contains(&ordinals.len()) {
            if let Some(leases) = guard(|| self.buffer.try_take_tasks(&ordinals))? {
                return Ok(leases.into_iter().map(Lease::new).collect());
            }
        }
        let take = |pace: &mut dyn Pace| self.buffer.take_tasks(&ordinals, pace);
        let leases = blocking(py, timeout_s, take)?;
        Ok(leases.into_iter().map(Lease::new).collect())
    }

    fn try_take_tasks(&self, ordinals: &Bound<'_, PyAny>) -> PyResult<Vec<Lease>> {
        let ordinals = self.ordinals(ordinals)?;
        let leases = guard(|| self.buffer.try_take_tasks(&ordinals))?.unwrap_or_default();
        Ok(leases.into_iter().map(Lease::new).collect())
    }

    #[pyo3(signature = (version, keep_from=None))]
    fn advance<'py>(
        &self,
        py: Python<'py>,
        version: i64,
        keep_from: Option<i64>,
    ) -> PyResult<Bound<'py, PyList>> {
        let dropped = py.detach(|| guard(|| self.buffer.advance(version, keep_from)))?;
        headers(py, &dropped)
    }

    #[pyo3(signature = (version, keep_from=None))]
    fn retire(&self, py: Python<'_>, version: i64, keep_from: Option<i64>) -> PyResult<usize> {
        py.detach(|| guard(|| self.buffer.retire(version, keep_from)))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.buffer.stats();
        let result = PyDict::new(py);
        result.set_item("trajectories", stats.ready)?;
        result.set_item("leased", stats.leased)?;
        result.set_item("copying", stats.copying)?;
        result.set_item("bytes", stats.bytes)?;
        result.set_item("unfreed", stats.unfreed)?;
        result.set_item("received", stats.received)?;
        result.set_item("committed", stats.committed)?;
        result.set_item("dropped", stats.dropped)?;
        result.set_item("waiting_takes", stats.waiting.0)?;
        result.set_item("waiting_puts", stats.waiting.1)?;
        result.set_item("version", stats.version)?;
        result.set_item("closed", stats.closed)?;
        Ok(result)
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let show = |entry: buffer::Entry| {
            let result = PyDict::new(py);
            result.set_item("sequence", entry.sequence)?;
            result.set_item("state", if entry.leased { "leased" } else { "ready" })?;
            result.set_item("bytes", entry.bytes)?;
            result.set_item("min_version", entry.min_version)?;
            result.set_item("task", entry.task)?;
            Ok(result)
        };
        let entries = py.detach(|| self.buffer.snapshot());
        entries.into_iter().map(show).collect()
    }

    /// As `snapshot`, one array a column: quick however many are held.
    fn columns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let entries = py.detach(|| self.buffer.snapshot());
        let result = PyDict::new(py);
        let sequence: Vec<i64> = entries.iter().map(|entry| entry.sequence as i64).collect();
        let leased: Vec<bool> = entries.iter().map(|entry| entry.leased).collect();
        let bytes: Vec<i64> = entries.iter().map(|entry| entry.bytes as i64).collect();
        let version: Vec<i64> = entries.iter().map(|entry| entry.min_version).collect();
        result.set_item("sequence", sequence.into_pyarray(py))?;
        result.set_item("leased", leased.into_pyarray(py))?;
        result.set_item("bytes", bytes.into_pyarray(py))?;
        let task: Vec<i64> = entries.iter().map(|entry| entry.task).collect();
        result.set_item("min_version", version.into_pyarray(py))?;
        result.set_item("task", task.into_pyarray(py))?;
        Ok(result)
    }

    fn wait_to_take(&self, n: i64) -> PyResult<Waiter> {
        Waiter::new(|call| self.buffer.wait_to_take(count(n)?, call).map_err(to_py))
    }

    fn wait_to_take_tasks(&self, ordinals: &Bound<'_, PyAny>) -> PyResult<Waiter> {
        let ordinals = self.ordinals(ordinals)?;
        let join = |call| self.buffer.wait_to_take_tasks(&ordinals, call);
        Waiter::new(|call| join(call).map_err(to_py))
    }

    fn wait_to_put(&self, bytes: usize) -> PyResult<Waiter> {
        Waiter::new(|call| self.buffer.wait_to_put(bytes, call).map_err(to_py))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.buffer.close());
    }

    fn __len__(&self) -> usize {
        self.buffer.stats().ready
    }
}

impl Buffer {
    /// Task ordinals, of which there are not too many. Memory for them all is taken at once, so their number is looked at
    /// before they are: a `range` may have more than fit anywhere, which would abort the process.
    fn ordinals(&self, given: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        let most = self.limits.max_trajectories;
        match given.len() {
            Ok(n) if n > most => Err(validation(format!(
                "ordinals: {n} tasks are not in 1..={most} (max_trajectories)"
            ))),
            _ => given.extract(),
        }
    }

    /// Puts `content` in, of which `size` bytes are to be copied; gives the headers of those dropped for it.
    fn store(
        &self,
        py: Python<'_>,
        content: &Content<'_>,
        size: usize,
        label: Label,
        timeout_s: Option<f64>,
    ) -> PyResult<Vec<Vec<u8>>> {
        check_timeout(timeout_s)?;
        // Giving the GIL up may cost its switch interval to come back, thousands of times what the copy takes.
        if size <= COPY_WITH_GIL_BYTES && guard(|| self.buffer.try_put(content, label))? {
            return Ok(Vec::new());
        }
        blocking(py, timeout_s, |pace| {
            self.buffer.put_content(content, label, pace)
        })
    }
}

fn count(n: i64) -> PyResult<usize> {
    usize::try_from(n).map_err(|_| validation(format!("n: {n} is negative")))
}

fn headers<'py>(py: Python<'py>, all: &[Vec<u8>]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, all.iter().map(|header| PyBytes::new(py, header)))
}

/// A place in the queue of those who wait, for event loops: `fileno` becomes readable when to try again.
#[pyclass(frozen, module = "sao._core")]
struct Waiter {
    waiter: Mutex<Option<buffer::Waiter>>,
    event: Arc<File>,
}

impl Waiter {
    fn new(
        join: impl FnOnce(Box<dyn Fn() + Send + Sync>) -> PyResult<buffer::Waiter>,
    ) -> PyResult<Self> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(std::io::Error::from)?;
        let event = Arc::new(File::from(event));
        let told = event.clone();
        // A write of 8 bytes that cannot block; when the counter is full it is readable anyway.
        let call = move || drop((&*told).write(&1u64.to_ne_bytes()));
        Ok(Self {
            waiter: Mutex::new(Some(join(Box::new(call))?)),
            event,
        })
    }

    fn with<T>(&self, run: impl FnOnce(&buffer::Waiter) -> sao_core::Result<T>) -> PyResult<T> {
        // Taken back before it is looked at, so that what comes later is noticed.
        let _ = (&*self.event).read(&mut [0; 8]);
        let waiter = self.waiter.lock().unwrap_or_else(PoisonError::into_inner);
        match waiter.as_ref() {
            Some(waiter) => guard(|| run(waiter)),
            None => Err(to_py(sao_core::Error::Closed(
                "the waiter has left the queue".into(),
            ))),
        }
    }
}

#[pymethods]
impl Waiter {
    fn fileno(&self) -> i32 {
        self.event.as_raw_fd()
    }

    fn take(&self, py: Python<'_>) -> PyResult<Option<Vec<Lease>>> {
        let leases = py.detach(|| self.with(buffer::Waiter::take))?;
        Ok(leases.map(|leases| leases.into_iter().map(Lease::new).collect()))
    }

    /// The headers of those that were dropped for it, or none when it could not be put in yet.
    #[pyo3(signature = (header, payload, min_version, sidecars=None, *, task=-1))]
    fn put<'py>(
        &self,
        py: Python<'py>,
        header: &Bound<'py, PyAny>,
        payload: &Bound<'py, PyAny>,
        min_version: i64,
        sidecars: Option<Vec<Bound<'py, PyAny>>>,
        task: i64,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let (header, payload) = (
            Source::new("header", header)?,
            Source::new("payload", payload)?,
        );
        let (header, payload) = (header.bytes(), payload.bytes());
        let sidecars = sources(&sidecars.unwrap_or_default())?;
        let sides: Vec<&[u8]> = sidecars.iter().map(Source::bytes).collect();
        let put = |waiter: &buffer::Waiter| {
            let content = Content::Copy(header, payload, &sides);
            waiter.put(&content, Label { min_version, task })
        };
        let dropped = py.detach(|| self.with(put))?;
        dropped.map(|dropped| headers(py, &dropped)).transpose()
    }

    fn close(&self) {
        let waiter = self
            .waiter
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(waiter);
    }
}

/// Bytes of a Python object that stay where they are while this lives.
struct Source(PyBuffer<u8>);

fn sources(objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<Source>> {
    let source = |(index, object)| Source::new(&format!("sidecars[{index}]"), object);
    objects.iter().enumerate().map(source).collect()
}

impl Source {
    fn new(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match PyBuffer::<u8>::get(object) {
            Ok(buffer) if buffer.is_c_contiguous() => Ok(Self(buffer)),
            _ => Err(PyTypeError::new_err(format!(
                "{name}: expected contiguous bytes (format B), got {}",
                object.get_type().name()?
            ))),
        }
    }

    fn bytes(&self) -> &[u8] {
        lend::bytes(&self.0)
    }
}

/// One trajectory taken out of the buffer.
#[pyclass(frozen, module = "sao._core")]
struct Lease {
    open: Mutex<Option<buffer::Lease>>,
    #[pyo3(get)]
    sequence: u64,
    #[pyo3(get)]
    min_version: i64,
    #[pyo3(get)]
    task: i64,
}

impl Lease {
    fn new(lease: buffer::Lease) -> Self {
        let item = lease.item();
        let (min_version, task) = item.map_or((0, -1), |item| (item.min_version(), item.task()));
        Self {
            sequence: lease.sequence(),
            open: Mutex::new(Some(lease)),
            min_version,
            task,
        }
    }

    fn view(&self, part: Part) -> PyResult<View> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        match open.as_ref().and_then(buffer::Lease::item) {
            Some(item) => Ok(View {
                item: item.clone(),
                part,
            }),
            None => Err(to_py(settled())),
        }
    }

    fn settle(&self, how: impl FnOnce(buffer::Lease)) -> PyResult<()> {
        let lease = self
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        lease.map(how).ok_or_else(|| to_py(settled()))
    }
}

fn settled() -> sao_core::Error {
    sao_core::Error::Closed("the lease was committed or given back already".into())
}

#[pymethods]
impl Lease {
    #[getter]
    fn header(&self) -> PyResult<View> {
        self.view(Part::Header)
    }

    #[getter]
    fn payload(&self) -> PyResult<View> {
        self.view(Part::Payload)
    }

    /// The frames of its sidecars.
    #[getter]
    fn sidecars(&self) -> PyResult<Vec<View>> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        match open.as_ref().and_then(buffer::Lease::item) {
            Some(item) => {
                let parts = (0..item.sidecars()).map(Part::Sidecar);
                Ok(parts.map(|part| View::of(item, part)).collect())
            }
            None => Err(to_py(settled())),
        }
    }

    fn commit(&self) -> PyResult<()> {
        self.settle(buffer::Lease::commit)
    }

    fn give_back(&self) -> PyResult<()> {
        self.settle(buffer::Lease::give_back)
    }
}

enum Part {
    Header,
    Payload,
    Sidecar(usize),
}

/// Read-only bytes inside the buffer's memory, which stays while a view of it lives.
#[pyclass(frozen, module = "sao._core")]
struct View {
    item: Arc<Item>,
    part: Part,
}

impl View {
    fn of(item: &Arc<Item>, part: Part) -> Self {
        Self {
            item: item.clone(),
            part,
        }
    }

    fn bytes(&self) -> &[u8] {
        match self.part {
            Part::Header => self.item.header(),
            Part::Payload => self.item.payload(),
            Part::Sidecar(index) => self.item.sidecar(index).unwrap_or_default(),
        }
    }
}

#[pymethods]
impl View {
    fn __len__(&self) -> usize {
        self.bytes().len()
    }

    /// # Safety
    /// Called by the interpreter with a `Py_buffer` to fill.
    #[allow(clippy::needless_pass_by_value)] // the signature is given
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = slf.get().bytes();
        // SAFETY: `bytes` is immutable and lives as long as `slf`; `view` is the interpreter's.
        unsafe { lend::read_only(slf.as_any(), (bytes.as_ptr(), bytes.len()), view, flags) }
    }
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Buffer>()?;
    m.add_class::<Lease>()?;
    m.add_class::<View>()?;
    m.add_class::<Waiter>()
}
