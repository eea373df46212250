//! Arrays that belong to a trajectory and travel as frames of their own: routed experts, images, anything by the token.
//!
//! The header names them, with dtype, shape, length and checksum; the bytes themselves are nowhere in header or payload,
//! so that whoever sends them need not copy them.

use rmp::encode as put;

use crate::checksum::crc32c;
use crate::error::{Error, Result};
use crate::reader::{bad, Reader};

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

/// What a header says of a sidecar.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Announced {
    pub(crate) bytes: usize,
    pub(crate) crc: u32,
}

fn fault<T>(text: String) -> Result<T> {
    Err(Error::Validation(text))
}

fn refuse<T>(text: String) -> Result<T> {
    Err(Error::Wire(text))
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

/// Writes the array of `[name, dtype, shape, bytes, crc32c]`.
pub(crate) fn put_all(
    out: &mut Vec<u8>,
    sidecars: &[Sidecar<'_>],
) -> std::result::Result<(), put::ValueWriteError> {
    put::write_array_len(out, sidecars.len() as u32)?;
    for sidecar in sidecars {
        put::write_array_len(out, 5)?;
        put::write_str(out, &sidecar.name)?;
        put::write_str(out, &sidecar.dtype)?;
        put::write_array_len(out, sidecar.shape.len() as u32)?;
        for dimension in &sidecar.shape {
            put::write_uint(out, *dimension)?;
        }
        put::write_uint(out, sidecar.bytes.len() as u64)?;
        put::write_uint(out, u64::from(crc32c(&[sidecar.bytes])))?;
    }
    Ok(())
}

impl Reader<'_> {
    /// Of at most `room` bytes together.
    pub(crate) fn sidecars(
        &mut self,
        mut room: usize,
    ) -> Result<(Vec<Sidecar<'static>>, Vec<Announced>)> {
        self.key("sidecars")?;
        let count = self.any_array("sidecars")?;
        if count > MAX_SIDECARS {
            return refuse(format!("sidecars: {count}, at most {MAX_SIDECARS}"));
        }
        let (mut sidecars, mut announced) = (Vec::new(), Vec::new());
        for _ in 0..count {
            self.array("sidecars", 5)?;
            let (name, dtype) = (
                self.text("sidecars")?.to_owned(),
                self.text("sidecars")?.to_owned(),
            );
            let mut shape = Vec::new();
            for _ in 0..self.any_array("sidecars")? {
                shape.push(self.size("sidecars")? as u64);
            }
            let bytes = self.size("sidecars")?;
            let crc =
                u32::try_from(self.int("sidecars")?).map_err(|_| bad("sidecars", "a crc32c"))?;
            let Some(left) = room.checked_sub(bytes) else {
                return refuse(format!(
                    "sidecars[{name:?}]: {bytes} bytes, {room} more are accepted"
                ));
            };
            room = left;
            sidecars.push(Sidecar {
                name,
                dtype,
                shape,
                bytes: &[],
            });
            announced.push(Announced { bytes, crc });
        }
        check(&sidecars, |index| announced[index].bytes)
            .map_err(|error| Error::Wire(error.to_string()))?;
        Ok((sidecars, announced))
    }
}

/// Compares the frames with what the header announced and puts them into the sidecars.
pub(crate) fn attach<'a>(
    sidecars: Vec<Sidecar<'static>>,
    announced: &[Announced],
    frames: &[&'a [u8]],
) -> Result<Vec<Sidecar<'a>>> {
    if frames.len() != sidecars.len() {
        return Err(Error::Wire(format!(
            "sidecars: {} frames, the header announces {}",
            frames.len(),
            sidecars.len()
        )));
    }
    let mut attached = Vec::with_capacity(sidecars.len());
    for ((sidecar, told), frame) in sidecars.into_iter().zip(announced).zip(frames) {
        let name = &sidecar.name;
        if frame.len() != told.bytes {
            return Err(Error::Wire(format!(
                "sidecars[{name:?}]: {} bytes, the header announces {}",
                frame.len(),
                told.bytes
            )));
        }
        let found = crc32c(&[frame]);
        if found != told.crc {
            return Err(Error::Wire(format!(
                "sidecars[{name:?}]: crc32c {found:#010x}, the header announces {:#010x}",
                told.crc
            )));
        }
        attached.push(Sidecar {
            bytes: frame,
            ..sidecar
        });
    }
    Ok(attached)
}
