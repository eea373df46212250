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
use pyo3::types::{PyBytes, PyDict, PyList};
use rustix::event::{eventfd, EventfdFlags};
use sao_core::buffer::{self, Item, Limits};

use crate::error::{guard, to_py, validation};
use crate::pace::{blocking, check_timeout};

/// Up to this size a `put` that need not wait keeps the GIL.
const COPY_WITH_GIL_BYTES: usize = 1 << 20;
/// Up to this number a `take` that need not wait keeps the GIL.
const TAKE_WITH_GIL: usize = 256;

/// A bounded buffer of encoded trajectories.
#[pyclass(frozen, module = "sao._core")]
struct Buffer {
    buffer: buffer::Buffer,
    policy: buffer::Policy,
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
            policy,
        })
    }

    #[pyo3(signature = (header, payload, *, min_version, timeout_s=None))]
    fn put<'py>(
        &self,
        py: Python<'py>,
        header: &Bound<'py, PyAny>,
        payload: &Bound<'py, PyAny>,
        min_version: i64,
        timeout_s: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let (header, payload) = (
            Source::new("header", header)?,
            Source::new("payload", payload)?,
        );
        let (header, payload) = (header.bytes(), payload.bytes());
        check_timeout(timeout_s)?;
        // Giving the GIL up may cost its switch interval to come back, thousands of times what the copy takes.
        if header.len() + payload.len() <= COPY_WITH_GIL_BYTES
            && guard(|| self.buffer.try_put(header, payload, min_version))?
        {
            return Ok(None);
        }
        let dropped = blocking(py, timeout_s, |pace| {
            self.buffer.put(header, payload, min_version, pace)
        })?;
        if dropped.is_empty() {
            return Ok(None);
        }
        let result = PyDict::new(py);
        result.set_item("reason", self.policy.name())?;
        result.set_item("headers", headers(py, &dropped)?)?;
        Ok(Some(result))
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
        // The memory is freed here, without the GIL.
        let retire = || Ok(self.buffer.retire(version, keep_from)?.len());
        py.detach(|| guard(retire))
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

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let show = |entry: buffer::Entry| {
            let result = PyDict::new(py);
            result.set_item("sequence", entry.sequence)?;
            result.set_item("state", if entry.leased { "leased" } else { "ready" })?;
            result.set_item("bytes", entry.bytes)?;
            result.set_item("min_version", entry.min_version)?;
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
        result.set_item("min_version", version.into_pyarray(py))?;
        Ok(result)
    }

    fn wait_to_take(&self, n: i64) -> PyResult<Waiter> {
        Waiter::new(|call| self.buffer.wait_to_take(count(n)?, call).map_err(to_py))
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
    fn put<'py>(
        &self,
        py: Python<'py>,
        header: &Bound<'py, PyAny>,
        payload: &Bound<'py, PyAny>,
        min_version: i64,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let (header, payload) = (
            Source::new("header", header)?,
            Source::new("payload", payload)?,
        );
        let (header, payload) = (header.bytes(), payload.bytes());
        let put = |waiter: &buffer::Waiter| waiter.put(header, payload, min_version);
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
        if self.0.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps this contiguous memory of `len_bytes` bytes valid until the buffer is released,
        // which happens when `self` is dropped. A caller that writes to it during the call gets some mixture of bytes.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast::<u8>(), self.0.len_bytes()) }
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
}

impl Lease {
    fn new(lease: buffer::Lease) -> Self {
        let (sequence, min_version) = (
            lease.sequence(),
            lease.item().map_or(0, |item| item.min_version()),
        );
        Self {
            open: Mutex::new(Some(lease)),
            sequence,
            min_version,
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
        // SAFETY: `bytes` is immutable and lives as long as `slf`, of which the filled view holds a reference; the
        // call refuses writable requests.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                bytes.as_ptr().cast_mut().cast(),
                bytes.len() as isize,
                1,
                flags,
            )
        };
        if filled == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Buffer>()?;
    m.add_class::<Lease>()?;
    m.add_class::<View>()?;
    m.add_class::<Waiter>()
}
