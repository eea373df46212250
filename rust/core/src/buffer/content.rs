//! The bytes that are put into the buffer, and the memory that keeps them.

use crate::buffer::pool::Pool;
use crate::error::{Error, Result};

/// The frames of one trajectory: header, payload and sidecars.
pub enum Content<'a> {
    /// All are copied.
    Copy(&'a [u8], &'a [u8], &'a [&'a [u8]]),
    /// As `Copy`, but the payload is this long and is written in place, every byte of it.
    Write(
        &'a [u8],
        usize,
        &'a (dyn Fn(&mut [u8]) + Sync),
        &'a [&'a [u8]],
    ),
}

impl Content<'_> {
    /// Its counts.
    pub fn bytes(&self) -> usize {
        let (header, payload, sidecars) = match self {
            Self::Copy(header, payload, sidecars) => (header, payload.len(), sidecars),
            Self::Write(header, payload, _, sidecars) => (header, *payload, sidecars),
        };
        header.len() + payload + sidecars.iter().map(|bytes| bytes.len()).sum::<usize>()
    }

    /// The frames, in the buffer's memory.
    pub(crate) fn store(&self, pool: &Pool) -> Result<Stored> {
        let (header, payload, sidecars) = match self {
            Self::Copy(header, payload, sidecars) => (header, Blob::copy(payload, pool)?, sidecars),
            Self::Write(header, bytes, write, sidecars) => {
                (header, Blob::written(*bytes, pool, write)?, sidecars)
            }
        };
        let sidecars = sidecars.iter().map(|bytes| Blob::copy(bytes, pool));
        Ok(Stored {
            header: Blob::copy(header, pool)?,
            payload,
            sidecars: sidecars.collect::<Result<_>>()?,
        })
    }
}

/// A trajectory in the buffer's memory.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    pub(crate) header: Blob,
    pub(crate) payload: Blob,
    pub(crate) sidecars: Vec<Blob>,
}

impl Stored {
    /// Gives the memory to the pool.
    pub(crate) fn recycle(&mut self, pool: &Pool) {
        pool.give(std::mem::take(&mut self.payload.data));
        for sidecar in self.sidecars.drain(..) {
            pool.give(sidecar.data);
        }
    }
}

/// Bytes that start at a multiple of 64, so that arrays laid out at such offsets are aligned.
#[derive(Debug, Default)]
pub(crate) struct Blob {
    data: Vec<u8>,
    start: usize,
    stop: usize,
}

const ALIGN: usize = 64;
const PAGE: usize = 4096;

impl Blob {
    fn copy(source: &[u8], pool: &Pool) -> Result<Self> {
        let mut data = memory(source.len(), pool)?;
        let mut start = data.as_ptr().align_offset(ALIGN).min(ALIGN);
        // Some CPUs copy 10 to 25 times slower with `rep movsb` when the destination lies up to a cache line behind
        // the source, modulo the page. Fresh large allocations on both sides produce just that, so step over it.
        let distance =
            (data.as_ptr() as usize + start).wrapping_sub(source.as_ptr() as usize) % PAGE;
        if (1..ALIGN).contains(&distance) {
            start += ALIGN;
        }
        let stop = start + source.len();
        if data.len() < stop {
            data.resize(start, 0);
            data.extend_from_slice(source);
        } else {
            data[start..stop].copy_from_slice(source);
        }
        Ok(Self { data, start, stop })
    }

    fn written(bytes: usize, pool: &Pool, write: &dyn Fn(&mut [u8])) -> Result<Self> {
        let mut data = memory(bytes, pool)?;
        let start = data.as_ptr().align_offset(ALIGN).min(ALIGN);
        let stop = start + bytes;
        if data.len() < stop {
            data.resize(stop, 0);
        }
        write(&mut data[start..stop]);
        Ok(Self { data, start, stop })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.data[self.start..self.stop]
    }
}

/// Memory for `bytes` at a multiple of `ALIGN`: either empty, or full of whatever was in it before.
fn memory(bytes: usize, pool: &Pool) -> Result<Vec<u8>> {
    let most = bytes + 2 * ALIGN;
    if let Some(data) = pool.get(most) {
        return Ok(data);
    }
    let mut data = Vec::new();
    data.try_reserve_exact(Pool::rounded(most))
        .map_err(|_| Error::Full(format!("no memory for {bytes} bytes")))?;
    Ok(data)
}
