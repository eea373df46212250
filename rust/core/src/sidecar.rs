//! Arrays that belong to a trajectory and travel as frames of their own: routed experts, images, anything by the token.
//!
//! The header names them, with dtype, shape, length and checksum; the bytes themselves are nowhere in header or payload,
//! so that whoever sends them need not copy them.

use crate::error::{Error, Result};

/// Most sidecars of a trajectory.
pub const MAX_SIDECARS: usize = 256;
/// Most dimensions of a sidecar.
pub const MAX_DIMENSIONS: usize = 8;
/// Element types and their sizes in bytes; little endian.
pub const DTYPES: [(&str, usize); 12] = [
    ("bool", 1),
    ("uint8", 1),
    ("int8", 1),
    ("uint16", 2),
    ("int16", 2),
    ("float16", 2),
    ("uint32", 4),
    ("int32", 4),
    ("float32", 4),
    ("uint64", 8),
    ("int64", 8),
    ("float64", 8),
];

/// One array, borrowed.
#[derive(Debug, Clone, PartialEq)]
pub struct Sidecar<'a> {
    /// Its name, no two alike.
    pub name: String,
    /// One of [`DTYPES`].
    pub dtype: String,
    /// At most [`MAX_DIMENSIONS`].
    pub shape: Vec<u64>,
    /// The elements, row by row.
    pub bytes: &'a [u8],
}

fn fault<T>(text: String) -> Result<T> {
    Err(Error::Validation(text))
}

/// Bytes of an array of this dtype and shape; none when there is no such array.
fn size(dtype: &str, shape: &[u64]) -> Option<usize> {
    let (_, element) = DTYPES.iter().find(|(name, _)| *name == dtype)?;
    let count = shape
        .iter()
        .try_fold(1u64, |all, &dimension| all.checked_mul(dimension))?;
    usize::try_from(count).ok()?.checked_mul(*element)
}

/// Checks names, dtypes, shapes and lengths. `length` gives the bytes of the sidecar at an index.
pub(crate) fn check(sidecars: &[Sidecar<'_>], length: impl Fn(usize) -> usize) -> Result<()> {
    if sidecars.len() > MAX_SIDECARS {
        return fault(format!(
            "sidecars: {}, at most {MAX_SIDECARS}",
            sidecars.len()
        ));
    }
    for (index, sidecar) in sidecars.iter().enumerate() {
        let Sidecar {
            name, dtype, shape, ..
        } = sidecar;
        if name.is_empty() || sidecars[..index].iter().any(|other| other.name == *name) {
            return fault(format!("sidecars: name {name:?} is empty or stands twice"));
        }
        if !DTYPES.iter().any(|(known, _)| known == dtype) {
            return fault(format!(
                "sidecars[{name:?}]: dtype {dtype:?} is none of {}",
                DTYPES.map(|(known, _)| known).join(", ")
            ));
        }
        if shape.len() > MAX_DIMENSIONS {
            return fault(format!(
                "sidecars[{name:?}]: {} dimensions, at most {MAX_DIMENSIONS}",
                shape.len()
            ));
        }
        if size(dtype, shape) != Some(length(index)) {
            return fault(format!(
                "sidecars[{name:?}]: {} bytes for shape {shape:?} of {dtype}",
                length(index)
            ));
        }
    }
    Ok(())
}
