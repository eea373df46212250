//! Bindings of `sao_core::gather`.

use numpy::PyReadonlyArray1;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use sao_core::gather::{self, Piece};

use crate::array::array;
use crate::error::{guard, validation};
use crate::lend;

/// Above this many bytes the GIL is released.
const DETACH_BYTES: usize = 1 << 16;

fn buffer(object: &Bound<'_, PyAny>, name: &str, dims: usize) -> PyResult<PyUntypedBuffer> {
    match PyUntypedBuffer::get(object) {
        Ok(buffer) if buffer.is_c_contiguous() && buffer.dimensions() == dims => Ok(buffer),
        _ => Err(validation(format!(
            "{name}: expected a contiguous array of {dims} dimension{}",
            if dims == 1 { "" } else { "s" }
        ))),
    }
}

fn indices(name: &str, values: &[i64], count: usize) -> PyResult<Vec<usize>> {
    if values.len() != count {
        return Err(validation(format!(
            "{name}: {} entries for {count} arrays",
            values.len()
        )));
    }
    let index = |(at, &value): (usize, &i64)| {
        usize::try_from(value).map_err(|_| validation(format!("{name}[{at}]: {value} is negative")))
    };
    values.iter().enumerate().map(index).collect()
}

/// See `sao._core.pyi`.
#[pyfunction]
#[pyo3(signature = (arrays, rows, positions, out, *, fill=None, threads=1))]
#[allow(clippy::needless_pass_by_value)] // arguments of the Python function
fn gather_rows(
    py: Python<'_>,
    arrays: Vec<Bound<'_, PyAny>>,
    rows: &Bound<'_, PyAny>,
    positions: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    fill: Option<&Bound<'_, PyAny>>,
    threads: i64,
) -> PyResult<()> {
    let threads = match usize::try_from(threads) {
        Ok(threads) if threads > 0 => threads,
        _ => return Err(validation(format!("threads: {threads} must be at least 1"))),
    };
    let rows: PyReadonlyArray1<'_, i64> = array("rows", rows)?;
    let positions: PyReadonlyArray1<'_, i64> = array("positions", positions)?;
    let rows = indices("rows", rows.as_slice()?, arrays.len())?;
    let positions = indices("positions", positions.as_slice()?, arrays.len())?;
    let target = buffer(out, "out", 2)?;
    if target.readonly() {
        return Err(validation("out: cannot be written to"));
    }
    let size = target.item_size();
    let target_bytes = target.len_bytes();
    let begin = target.buf_ptr() as usize;
    let mut sources = Vec::with_capacity(arrays.len());
    for (at, object) in arrays.iter().enumerate() {
        let source = buffer(object, &format!("arrays[{at}]"), 1)?;
        if source.format() != target.format() || source.item_size() != size {
            return Err(validation(format!(
                "arrays[{at}]: elements of format {:?}, out has {:?}",
                source.format(),
                target.format()
            )));
        }
        let from = source.buf_ptr() as usize;
        if from < begin + target_bytes && begin < from + source.len_bytes() {
            return Err(validation(format!("arrays[{at}]: is a part of out")));
        }
        sources.push(source);
    }
    let fill: Vec<u8> = match fill {
        None => vec![0; size],
        Some(value) => {
            let value = buffer(value, "fill", 1)?;
            if value.len_bytes() != size {
                return Err(validation(format!(
                    "fill: {} bytes, expected one element of {size}",
                    value.len_bytes()
                )));
            }
            if value.format() != target.format() {
                return Err(validation(format!(
                    "fill: of format {:?}, out has {:?}",
                    value.format(),
                    target.format()
                )));
            }
            lend::bytes(&value).to_vec()
        }
    };
    let pieces: Vec<Piece<'_>> = sources
        .iter()
        .zip(rows.iter().zip(&positions))
        .map(|(source, (&row, &position))| Piece {
            row,
            start: position.saturating_mul(size),
            bytes: lend::bytes(source),
        })
        .collect();
    let whole: &mut [u8] = if target_bytes == 0 {
        &mut []
    } else {
        // SAFETY: `target` is writable, contiguous, of this length and held until this function returns; no source
        // overlaps it (checked above). Python code that uses it meanwhile sees some mixture of bytes.
        unsafe { std::slice::from_raw_parts_mut(target.buf_ptr().cast::<u8>(), target_bytes) }
    };
    let row_bytes = target.shape()[1] * size;
    let mut run = move || guard(|| gather::gather(&pieces, whole, row_bytes, &fill, threads));
    if target_bytes > DETACH_BYTES {
        py.detach(run)
    } else {
        run()
    }
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(gather_rows, m)?)
}
