//! Bindings of `sao_core::buffer`.

use std::ffi::c_int;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use numpy::{IntoPyArray, PyArray1};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};
use rustix::event::{eventfd, EventfdFlags};
use sao_core::buffer::{self, Ask, Content, Item, Label, Limits, NO_TASK};
use sao_core::wait::Pace;
use sao_core::wire as format;

use crate::argument::count;
use crate::call::{blocking, check_timeout, run};
use crate::error::{guard, to_py, validation};
use crate::lend;
use crate::wire;

/// Up to this size a `put` that need not wait keeps the GIL.
const COPY_WITH_GIL_BYTES: usize = 1 << 20;
/// Up to this number a `take` that need not wait keeps the GIL.
const TAKE_WITH_GIL: usize = 256;

/// A bounded buffer of encoded trajectories.
#[pyclass(frozen, module = "sao._core")]
struct Buffer {
    buffer: buffer::Buffer,
    max_trajectories: usize,
}

#[pymethods]
impl Buffer {
    #[new]
    #[pyo3(signature = (max_trajectories, max_bytes, policy="block"))]
    fn new(max_trajectories: i64, max_bytes: i64, policy: &str) -> PyResult<Self> {
        let policy = policy.parse().map_err(to_py)?;
        let limits = Limits {
            max_trajectories: count("max_trajectories", max_trajectories, 1)?,
            max_bytes: count("max_bytes", max_bytes, 1)?,
            policy,
        };
        Ok(Self {
            buffer: buffer::Buffer::new(limits).map_err(to_py)?,
            max_trajectories: limits.max_trajectories,
        })
    }

    #[pyo3(signature = (header, payload, *, min_version, timeout_s=None, sidecars=None, task=NO_TASK))]
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)] // arguments of the Python function
    fn put(
        &self,
        py: Python<'_>,
        header: &Bound<'_, PyAny>,
        payload: &Bound<'_, PyAny>,
        min_version: i64,
        timeout_s: Option<f64>,
        sidecars: Option<Vec<Bound<'_, PyAny>>>,
        task: i64,
    ) -> PyResult<Vec<i64>> {
        let frames = Frames::new(header, payload, sidecars.as_deref())?;
        let label = Label { min_version, task };
        frames.with(|content| self.store(py, content, label, timeout_s))
    }

    /// Checks a `sao.Trajectory` and encodes it into the buffer's memory.
    #[pyo3(signature = (trajectory, timeout_s=None))]
    fn put_trajectory(
        &self,
        py: Python<'_>,
        trajectory: &Bound<'_, PyAny>,
        timeout_s: Option<f64>,
    ) -> PyResult<Vec<i64>> {
        let arrays = wire::arrays(trajectory)?;
        let view = wire::extract(trajectory, &arrays)?;
        let lengths = view.segments.iter().map(|s| s.action_mask.len());
        let (places, length) = guard(|| sao_core::layout::layout(lengths))?;
        let frozen = arrays.frozen();
        let (header, counts) = run(py, frozen && length > COPY_WITH_GIL_BYTES, || {
            format::header(&view, &places, length)
        })?;
        let label = Label {
            min_version: counts.min_version.unwrap_or(0),
            task: view.task_ordinal,
        };
        let sides: Vec<&[u8]> = view.sidecars.iter().map(|sidecar| sidecar.bytes).collect();
        let write = |out: &mut [u8]| format::fill(&view, &places, out);
        if frozen {
            let content = Content::Write(&header, length, &write, &sides);
            return self.store(py, &content, label, timeout_s);
        }
        // Somebody may write to the arrays while this waits for room: what was checked is what goes in.
        let mut payload = vec![0; length];
        write(&mut payload);
        let copies: Vec<Vec<u8>> = sides.iter().map(|bytes| bytes.to_vec()).collect();
        let sides: Vec<&[u8]> = copies.iter().map(Vec::as_slice).collect();
        let content = Content::Copy(&header, &payload, &sides);
        self.store(py, &content, label, timeout_s)
    }

    #[pyo3(signature = (what, timeout_s=None))]
    fn take(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        timeout_s: Option<f64>,
    ) -> PyResult<Vec<Lease>> {
        let wish = self.wish(what)?;
        check_timeout(timeout_s)?;
        if wish.size() <= TAKE_WITH_GIL && wish != Wish::Next(0) {
            if let Some(leases) = guard(|| self.buffer.try_take(wish.ask()))? {
                return Ok(Lease::all(leases));
            }
        }
        let take = |pace: &mut dyn Pace| self.buffer.take(wish.ask(), pace);
        Ok(Lease::all(blocking(py, timeout_s, take)?))
    }

    fn try_take(&self, what: &Bound<'_, PyAny>) -> PyResult<Vec<Lease>> {
        let wish = self.wish(what)?;
        let leases = guard(|| self.buffer.try_take(wish.ask()))?;
        Ok(Lease::all(leases.unwrap_or_default()))
    }

    #[pyo3(signature = (version, keep_from=None))]
    fn advance(&self, py: Python<'_>, version: i64, keep_from: Option<i64>) -> PyResult<Vec<i64>> {
        run(py, true, || self.buffer.advance(version, keep_from))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.buffer.stats();
        let result = PyDict::new(py);
        result.set_item("trajectories", stats.ready)?;
        result.set_item("leased", stats.leased)?;
        result.set_item("copying", stats.copying)?;
        result.set_item("bytes", stats.bytes)?;
        result.set_item("received", stats.received)?;
        result.set_item("committed", stats.committed)?;
        result.set_item("dropped", stats.dropped)?;
        result.set_item("waiting_takes", stats.waiting.0)?;
        result.set_item("waiting_puts", stats.waiting.1)?;
        result.set_item("version", stats.version)?;
        result.set_item("closed", stats.closed)?;
        Ok(result)
    }

    /// One array a column: quick however many are held.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let entries = py.detach(|| self.buffer.snapshot());
        let column = |of: fn(&buffer::Entry) -> i64| -> Bound<'py, PyArray1<i64>> {
            entries.iter().map(of).collect::<Vec<_>>().into_pyarray(py)
        };
        let leased: Vec<bool> = entries.iter().map(|entry| entry.leased).collect();
        let result = PyDict::new(py);
        result.set_item("sequence", column(|entry| entry.sequence as i64))?;
        result.set_item("leased", leased.into_pyarray(py))?;
        result.set_item("bytes", column(|entry| entry.bytes as i64))?;
        result.set_item("min_version", column(|entry| entry.min_version))?;
        result.set_item("task", column(|entry| entry.task))?;
        Ok(result)
    }

    fn wait_to_take(&self, what: &Bound<'_, PyAny>) -> PyResult<Waiter> {
        let wish = self.wish(what)?;
        Waiter::new(|call| self.buffer.wait_to_take(wish.ask(), call).map_err(to_py))
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
    /// A number, or task ordinals, of which there are not too many. Memory for them all is taken at once, so their number
    /// is looked at before they are: a `range` may have more than fit anywhere, which would abort the process.
    fn wish(&self, what: &Bound<'_, PyAny>) -> PyResult<Wish> {
        if what.is_instance_of::<PyInt>() || what.len().is_err() {
            let n: i64 = what.extract()?;
            let n = usize::try_from(n).map_err(|_| validation(format!("n: {n} is negative")))?;
            return Ok(Wish::Next(n));
        }
        let most = self.max_trajectories;
        match what.len() {
            Ok(n) if n > most => Err(validation(format!(
                "ordinals: {n} tasks are not in 1..={most} (max_trajectories)"
            ))),
            _ => what.extract().map(Wish::Tasks),
        }
    }

    /// Puts `content` in; gives the tasks of those that were dropped for it.
    fn store(
        &self,
        py: Python<'_>,
        content: &Content<'_>,
        label: Label,
        timeout_s: Option<f64>,
    ) -> PyResult<Vec<i64>> {
        check_timeout(timeout_s)?;
        // Giving the GIL up may cost its switch interval to come back, thousands of times what the copy takes.
        if content.bytes() <= COPY_WITH_GIL_BYTES && guard(|| self.buffer.try_put(content, label))?
        {
            return Ok(Vec::new());
        }
        blocking(py, timeout_s, |pace| {
            self.buffer.put_content(content, label, pace)
        })
    }
}

/// Bytes of Python objects that stay where they are while this lives: header, payload, sidecars.
struct Frames(Vec<PyBuffer<u8>>);

impl Frames {
    fn new(
        header: &Bound<'_, PyAny>,
        payload: &Bound<'_, PyAny>,
        sidecars: Option<&[Bound<'_, PyAny>]>,
    ) -> PyResult<Self> {
        let source = |name: &str, object: &Bound<'_, PyAny>| match PyBuffer::<u8>::get(object) {
            Ok(buffer) if buffer.is_c_contiguous() => Ok(buffer),
            _ => Err(PyTypeError::new_err(format!(
                "{name}: expected contiguous bytes (format B), got {}",
                object.get_type().name()?
            ))),
        };
        let mut all = vec![source("header", header)?, source("payload", payload)?];
        for (index, object) in sidecars.unwrap_or_default().iter().enumerate() {
            all.push(source(&format!("sidecars[{index}]"), object)?);
        }
        Ok(Self(all))
    }

    fn with<T>(&self, run: impl FnOnce(&Content<'_>) -> T) -> T {
        let bytes: Vec<&[u8]> = self.0.iter().map(|buffer| lend::bytes(buffer)).collect();
        run(&Content::Copy(bytes[0], bytes[1], &bytes[2..]))
    }
}

/// As `buffer::Ask`, with its ordinals.
#[derive(PartialEq)]
enum Wish {
    Next(usize),
    Tasks(Vec<i64>),
}

impl Wish {
    fn ask(&self) -> Ask<'_> {
        match self {
            Self::Next(n) => Ask::Next(*n),
            Self::Tasks(ordinals) => Ask::Tasks(ordinals),
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::Next(n) => *n,
            Self::Tasks(ordinals) => ordinals.len(),
        }
    }
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
        let woken = event.clone();
        // A write of 8 bytes that cannot block; when the counter is full it is readable anyway.
        let call = move || drop((&*woken).write(&1u64.to_ne_bytes()));
        Ok(Self {
            waiter: Mutex::new(Some(join(Box::new(call))?)),
            event,
        })
    }

    fn with<T>(&self, run: impl FnOnce(&buffer::Waiter) -> sao_core::Result<T>) -> PyResult<T> {
        // Taken back before it is looked at, so that what comes later is noticed.
        let _ = (&*self.event).read(&mut [0; 8]);
        match lock(&self.waiter).as_ref() {
            Some(waiter) => guard(|| run(waiter)),
            None => Err(closed("the waiter has left the queue")),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn closed(text: &str) -> PyErr {
    to_py(sao_core::Error::Closed(text.into()))
}

#[pymethods]
impl Waiter {
    fn fileno(&self) -> i32 {
        self.event.as_raw_fd()
    }

    fn take(&self, py: Python<'_>) -> PyResult<Option<Vec<Lease>>> {
        let leases = py.detach(|| self.with(buffer::Waiter::take))?;
        Ok(leases.map(Lease::all))
    }

    /// The tasks of those that were dropped for it, or none when it could not be put in yet.
    #[pyo3(signature = (header, payload, min_version, sidecars=None, *, task=NO_TASK))]
    #[allow(clippy::needless_pass_by_value)] // arguments of the Python function
    fn put(
        &self,
        py: Python<'_>,
        header: &Bound<'_, PyAny>,
        payload: &Bound<'_, PyAny>,
        min_version: i64,
        sidecars: Option<Vec<Bound<'_, PyAny>>>,
        task: i64,
    ) -> PyResult<Option<Vec<i64>>> {
        let frames = Frames::new(header, payload, sidecars.as_deref())?;
        let label = Label { min_version, task };
        frames.with(|content| py.detach(|| self.with(|waiter| waiter.put(content, label))))
    }

    fn close(&self) {
        let waiter = lock(&self.waiter).take();
        drop(waiter);
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
    fn all(leases: Vec<buffer::Lease>) -> Vec<Self> {
        leases.into_iter().map(Self::new).collect()
    }

    fn new(lease: buffer::Lease) -> Self {
        let label = lease.item().map_or(0.into(), |item| item.label());
        Self {
            sequence: lease.sequence(),
            open: Mutex::new(Some(lease)),
            min_version: label.min_version,
            task: label.task,
        }
    }

    fn item(&self) -> PyResult<Arc<Item>> {
        let open = lock(&self.open);
        let item = open.as_ref().and_then(buffer::Lease::item);
        item.cloned().ok_or_else(|| closed(SETTLED))
    }

    fn settle(&self, how: impl FnOnce(buffer::Lease)) -> PyResult<()> {
        let lease = lock(&self.open).take();
        lease.map(how).ok_or_else(|| closed(SETTLED))
    }
}

const SETTLED: &str = "the lease was committed or given back already";

#[pymethods]
impl Lease {
    #[getter]
    fn header(&self) -> PyResult<View> {
        let (item, part) = (self.item()?, Part::Header);
        Ok(View { item, part })
    }

    #[getter]
    fn payload(&self) -> PyResult<View> {
        let (item, part) = (self.item()?, Part::Payload);
        Ok(View { item, part })
    }

    /// The frames of its sidecars.
    #[getter]
    fn sidecars(&self) -> PyResult<Vec<View>> {
        let item = self.item()?;
        let view = |index| View {
            item: item.clone(),
            part: Part::Sidecar(index),
        };
        Ok((0..item.sidecars()).map(view).collect())
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
