//! Memory that Python may read where it lies.

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;

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
