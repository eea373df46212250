//! Bindings of `sao_core::shared`, with the line on which the two sides ring: one byte wakes, the end of the stream
//! says that the other side is gone. `sao.transport.shared` makes and watches the sockets.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{recv, send, shutdown, RecvFlags, SendFlags, Shutdown};
use sao_core::shared::{self, Place, Reader, Region, Writer};
use sao_core::Error;

use crate::error::{guard, to_py, validation};
use crate::lend;
use crate::wire::type_name;

/// Above this many bytes the GIL is released.
const DETACH_BYTES: usize = 1 << 16;
/// After so many payloads in a row the caller is sent to look at its sockets: who else wants to join, who is gone.
const TAKES_IN_A_ROW: u32 = 64;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn closed(what: &str) -> PyErr {
    to_py(Error::Closed(format!("the {what} is closed")))
}

/// Bytes of all kinds of contiguous Python objects; without the memoryview of `wire`, which costs more than a small copy.
struct Source(PyUntypedBuffer);

impl Source {
    fn new(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match PyUntypedBuffer::get(object) {
            Ok(buffer) if buffer.is_c_contiguous() => Ok(Self(buffer)),
            _ => Err(validation(format!(
                "{name}: {}, expected contiguous bytes",
                type_name(object)
            ))),
        }
    }

    fn bytes(&self) -> &[u8] {
        lend::bytes(&self.0)
    }
}

/// A connected stream socket, and the epoll it is registered with; `gone` once the other side closed it or died.
struct Line {
    socket: Mutex<Option<(OwnedFd, Option<Arc<OwnedFd>>)>>,
    gone: AtomicBool,
    /// Who made it. A process that was forked has copies, and is not asked whether the line ends.
    process: u32,
}

impl Line {
    /// Takes the socket over.
    fn new(socket: RawFd, epoll: Option<Arc<OwnedFd>>) -> PyResult<Self> {
        if socket < 0 {
            return Err(validation(format!("socket: {socket} is no descriptor")));
        }
        // SAFETY: the caller detached it from its socket object for this.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        Ok(Self {
            socket: Mutex::new(Some((socket, epoll))),
            gone: AtomicBool::new(false),
            process: std::process::id(),
        })
    }

    fn number(&self) -> RawFd {
        lock(&self.socket)
            .as_ref()
            .map_or(-1, |(socket, _)| socket.as_raw_fd())
    }

    fn ring(&self) {
        if let Some((socket, _)) = &*lock(&self.socket) {
            match send(socket, b"!", SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                // What fills the socket wakes as well.
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => self.gone.store(true, Relaxed),
            }
        }
    }

    /// Takes what was rung.
    fn hear(&self) {
        let end = match &*lock(&self.socket) {
            Some((socket, _)) => match recv(socket, &mut [0u8; 256][..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => true,
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => false,
                Err(_) => true,
            },
            None => true,
        };
        if end {
            self.gone.store(true, Relaxed);
        }
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }

    /// Also where a process that was forked has copies: the other side sees the end, and epoll is silent.
    fn close(&self) {
        if let Some((socket, epoll)) = lock(&self.socket).take() {
            if self.process == std::process::id() {
                if let Some(epoll) = epoll {
                    let _ = epoll::delete(epoll, &socket);
                }
                let _ = shutdown(&socket, Shutdown::Both);
            }
        }
        self.gone.store(true, Relaxed);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.close();
    }
}

/// See `sao._core.pyi`.
#[pyclass(frozen, module = "sao._core")]
struct SharedWriter {
    writer: Mutex<Option<Writer>>,
    line: Line,
}

impl SharedWriter {
    fn with<T>(&self, run: impl FnOnce(&mut Writer) -> PyResult<T>) -> PyResult<T> {
        // Never waits: who holds it may be waiting for the GIL.
        let mut writer = self
            .writer
            .try_lock()
            .map_err(|_| validation("the sender is in use by another thread"))?;
        run(writer.as_mut().ok_or_else(|| closed("sender"))?)
    }
}

#[pymethods]
impl SharedWriter {
    #[new]
    fn new(py: Python<'_>, memory: i32, socket: i32, capacity: usize) -> PyResult<Self> {
        let line = Line::new(socket, None)?;
        let region = py.detach(|| map(memory, capacity, true))?;
        Ok(Self {
            writer: Mutex::new(Some(Writer::new(region))),
            line,
        })
    }

    /// False: no room now.
    fn send(
        &self,
        py: Python<'_>,
        header: &Bound<'_, PyAny>,
        payload: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let (header, payload) = (
            Source::new("header", header)?,
            Source::new("payload", payload)?,
        );
        let (header, payload) = (header.bytes(), payload.bytes());
        let sleeps = self.with(|writer| {
            let from = payload.as_ptr() as usize;
            let Some(place) = guard(|| writer.reserve(header.len(), payload.len(), from))? else {
                return Ok(None);
            };
            let mut run = || {
                writer.fill(&place, header, payload);
                Ok(writer.publish(place))
            };
            let sleeps = if payload.len() > DETACH_BYTES {
                py.detach(|| guard(run))
            } else {
                guard(&mut run)
            };
            sleeps.map(Some)
        })?;
        if sleeps == Some(true) {
            self.line.ring();
        }
        Ok(sleeps.is_some())
    }

    /// How many are not released.
    fn unreleased(&self) -> PyResult<usize> {
        self.with(|writer| guard(|| writer.unreleased()))
    }

    fn hear(&self) {
        self.line.hear();
    }

    #[getter]
    fn gone(&self) -> bool {
        self.line.is_gone()
    }

    fn fileno(&self) -> i32 {
        self.line.number()
    }

    /// Waits for a copy that another thread makes.
    fn close(&self, py: Python<'_>) {
        self.line.close();
        py.detach(|| lock(&self.writer).take());
    }
}

fn map(memory: RawFd, capacity: usize, populate: bool) -> PyResult<Arc<Region>> {
    if memory < 0 {
        return Err(validation(format!("memory: {memory} is no descriptor")));
    }
    // SAFETY: the caller keeps it open until this returns.
    let memory = unsafe { BorrowedFd::borrow_raw(memory) };
    guard(|| Region::map(memory, capacity, populate)).map(Arc::new)
}

/// A sender, as its receiver sees it.
struct Peer {
    reader: Mutex<Reader>,
    region: Arc<Region>,
    line: Line,
}

impl Peer {
    fn tell(&self, pause: bool) {
        let must = lock(&self.reader).must_tell(pause);
        if must {
            self.line.ring();
        }
    }
}

struct State {
    epoll: Arc<OwnedFd>,
    peers: Vec<Arc<Peer>>,
    next: usize,
    in_a_row: u32,
    dozing: bool,
}

impl State {
    /// The next payload, of the first sender that has one after the one that was served last.
    fn take(&mut self) -> sao_core::Result<Option<(Arc<Peer>, Place)>> {
        if std::mem::take(&mut self.dozing) {
            for peer in &self.peers {
                lock(&peer.reader).rise();
            }
        }
        if self.in_a_row < TAKES_IN_A_ROW {
            let n = self.peers.len();
            for index in (self.next..n).chain(0..self.next.min(n)) {
                let peer = self.peers[index].clone();
                let taken = lock(&peer.reader).take();
                match taken {
                    Ok(None) => {}
                    Ok(Some(place)) => {
                        self.next = index + 1;
                        self.in_a_row += 1;
                        peer.tell(false);
                        return Ok(Some((peer, place)));
                    }
                    Err(error) => {
                        self.peers.remove(index).line.close();
                        return Err(error);
                    }
                }
            }
        }
        self.in_a_row = 0;
        Ok(None)
    }

    /// Drops senders that are gone; what they published before is still delivered.
    fn part(&mut self) {
        self.peers.retain(|peer| {
            let keep = !peer.line.is_gone() || !lock(&peer.reader).is_empty();
            if !keep {
                peer.line.close();
            }
            keep
        });
    }

    fn doze(&mut self) -> bool {
        for peer in &self.peers {
            peer.tell(true);
        }
        self.part();
        self.dozing = true;
        self.peers.iter().all(|peer| lock(&peer.reader).doze())
    }
}

/// See `sao._core.pyi`.
#[pyclass(frozen, module = "sao._core")]
struct SharedReaders {
    state: Mutex<Option<State>>,
}

impl SharedReaders {
    fn with<T>(&self, run: impl FnOnce(&mut State) -> sao_core::Result<T>) -> PyResult<T> {
        guard(|| match &mut *lock(&self.state) {
            Some(state) => run(state),
            None => Err(Error::Closed("the receiver is closed".into())),
        })
    }
}

#[pymethods]
impl SharedReaders {
    /// Of senders whose sockets the caller registers with this epoll.
    #[new]
    fn new(epoll: i32) -> PyResult<Self> {
        if epoll < 0 {
            return Err(validation(format!("epoll: {epoll} is no descriptor")));
        }
        // SAFETY: the caller keeps it open until this returns.
        let epoll = unsafe { BorrowedFd::borrow_raw(epoll) };
        let state = State {
            epoll: Arc::new(epoll.try_clone_to_owned()?),
            peers: Vec::new(),
            next: 0,
            in_a_row: 0,
            dozing: false,
        };
        Ok(Self {
            state: Mutex::new(Some(state)),
        })
    }

    fn add(&self, memory: i32, socket: i32, capacity: usize) -> PyResult<()> {
        let epoll = lock(&self.state).as_ref().map(|state| state.epoll.clone());
        let line = Line::new(socket, epoll)?;
        let region = map(memory, capacity, false)?;
        let peer = Arc::new(Peer {
            reader: Mutex::new(Reader::new(region.clone())),
            region,
            line,
        });
        self.with(|state| {
            state.peers.push(peer);
            Ok(())
        })
    }

    fn take(&self, py: Python<'_>) -> PyResult<Option<SharedPayload>> {
        // No lock is held while objects are made: that may free others, which releases theirs.
        match self.with(State::take)? {
            None => Ok(None),
            Some((peer, place)) => SharedPayload::new(py, peer, place).map(Some),
        }
    }

    /// True: there is nothing to take, and whoever publishes something rings.
    fn doze(&self) -> PyResult<bool> {
        self.with(|state| Ok(state.doze()))
    }

    /// Takes what was rung on the socket of this number.
    fn hear(&self, socket: i32) -> PyResult<()> {
        self.with(|state| {
            let peer = state.peers.iter().find(|peer| peer.line.number() == socket);
            if let Some(peer) = peer {
                peer.line.hear();
                if peer.line.is_gone() {
                    peer.line.close();
                    state.part();
                }
            }
            Ok(())
        })
    }

    fn __len__(&self) -> usize {
        lock(&self.state)
            .as_ref()
            .map_or(0, |state| state.peers.len())
    }

    fn close(&self) {
        let state = lock(&self.state).take();
        for peer in state.map(|state| state.peers).unwrap_or_default() {
            peer.line.close();
        }
    }
}

/// See `sao._core.pyi`.
#[pyclass(frozen, module = "sao._core")]
struct SharedPayload {
    #[pyo3(get)]
    header: Py<PyBytes>,
    #[pyo3(get)]
    payload: Py<PyMemoryView>,
}

impl SharedPayload {
    fn new(py: Python<'_>, peer: Arc<Peer>, place: Place) -> PyResult<Self> {
        let (start, bytes) = place.header();
        let view = SharedView { peer, place };
        let header = PyBytes::new_with(py, bytes, |out| {
            view.peer.region.read(start, out);
            Ok(())
        })?;
        let view = Bound::new(py, view)?;
        Ok(Self {
            header: header.unbind(),
            payload: PyMemoryView::from(view.as_any())?.unbind(),
        })
    }
}

#[pymethods]
impl SharedPayload {
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.payload
            .call_method0(py, pyo3::intern!(py, "release"))
            .map(drop)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release(py)
    }
}

/// The bytes where they lie; their place is released when nobody views them any more.
#[pyclass(frozen, module = "sao._core")]
struct SharedView {
    peer: Arc<Peer>,
    place: Place,
}

impl Drop for SharedView {
    fn drop(&mut self) {
        lock(&self.peer.reader).release(&self.place);
        self.peer.tell(false);
    }
}

#[pymethods]
impl SharedView {
    /// # Safety
    /// Called by the interpreter with a `Py_buffer` to fill.
    #[allow(clippy::needless_pass_by_value)] // the signature is given
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let (start, bytes) = this.place.payload();
        let address = this.peer.region.address(start, bytes);
        // SAFETY: these bytes are mapped as long as `slf` lives; who reads them knows that the sender could change them.
        // `view` is the interpreter's.
        unsafe { lend::read_only(slf.as_any(), (address, bytes), view, flags) }
    }
}

/// Bytes of the memory that a sender makes for `capacity` bytes of data.
#[pyfunction]
fn shared_bytes(capacity: usize) -> PyResult<usize> {
    shared::total_bytes(capacity).ok_or_else(|| {
        validation(format!(
            "capacity: {capacity} bytes, expected whole pages of 4096 and at most 1 TiB"
        ))
    })
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(shared_bytes, m)?)?;
    m.add_class::<SharedWriter>()?;
    m.add_class::<SharedReaders>()?;
    m.add_class::<SharedPayload>()
}
