//! Memory that is read where it lies: Python's here, and ours there.

use std::ffi::c_int;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::ffi;
use pyo3::prelude::*;

/// The bytes of a contiguous object of Python's, as long as `buffer` holds them. Python code that writes to them meanwhile
/// makes some mixture of bytes: who minds that keeps the GIL, or takes only what cannot be written to.
///
/// # Panics
/// When it is not contiguous, which whoever got the buffer has to refuse.
pub fn bytes(buffer: &PyUntypedBuffer) -> &[u8] {
    assert!(buffer.is_c_contiguous());
    match buffer.len_bytes() {
        0 => &[],
        // SAFETY: so many contiguous bytes, which the object keeps where they are until `buffer` is released.
        len => unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), len) },
    }
}

/// Fills `view` with the `len` bytes at `address`, to be read only; the view holds a reference of `owner`. What asks for
/// writable bytes gets `BufferError`.
///
/// # Safety
/// `view` is the one that the interpreter passes to `__getbuffer__`, and the bytes stay as long as `owner` lives.
pub unsafe fn read_only(
    owner: &Bound<'_, PyAny>,
    (address, len): (*const u8, usize),
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let (start, len) = (address.cast_mut().cast(), len as isize);
    // SAFETY: as the caller promises.
    match unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start, len, 1, flags) } {
        0 => Ok(()),
        _ => Err(PyErr::fetch(owner.py())),
    }
}
