//! One trajectory in the buffer's memory.

use super::{Charge, Label};
use crate::pool::Pool;
use crate::{Error, Result};

/// What is put into the buffer.
pub enum Content<'a> {
    /// Header, payload and sidecars are copied.
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
    /// What it counts.
    pub(super) fn bytes(&self) -> usize {
        let all = |sidecars: &[&[u8]]| sidecars.iter().map(|bytes| bytes.len()).sum::<usize>();
        match self {
            Self::Copy(header, payload, sides) => header.len() + payload.len() + all(sides),
            Self::Write(header, payload, _, sides) => header.len() + payload + all(sides),
        }
    }

    /// What is kept, in the buffer's memory.
    pub(super) fn store(&self, pool: &Pool) -> Result<Stored> {
        let copied = |sidecars: &[&[u8]]| {
            let copies = sidecars.iter().map(|bytes| Blob::copy(bytes, pool));
            copies.collect::<Result<Vec<_>>>()
        };
        Ok(match self {
            Self::Copy(header, payload, sidecars) => Stored {
                header: Blob::copy(header, pool)?,
                payload: Blob::copy(payload, pool)?,
                sidecars: copied(sidecars)?,
            },
            Self::Write(header, bytes, write, sidecars) => Stored {
                header: Blob::copy(header, pool)?,
                payload: Blob::written(*bytes, pool, write)?,
                sidecars: copied(sidecars)?,
            },
        })
    }
}

/// The memory of an item.
#[derive(Default)]
pub(super) struct Stored {
    header: Blob,
    payload: Blob,
    sidecars: Vec<Blob>,
}

/// An encoded trajectory in the buffer's memory.
pub struct Item {
    pub(super) stored: Stored,
    pub(super) label: Label,
    // Gives the bytes back, after the memory was freed or given to the pool.
    pub(super) charge: Charge,
}

impl Item {
    /// The encoded header.
    pub fn header(&self) -> &[u8] {
        self.stored.header.bytes()
    }

    /// The encoded payload; starts at a multiple of 64.
    pub fn payload(&self) -> &[u8] {
        self.stored.payload.bytes()
    }

    /// The frames of its sidecars, each starting at a multiple of 64.
    pub fn sidecars(&self) -> usize {
        self.stored.sidecars.len()
    }

    /// One of them.
    pub fn sidecar(&self, index: usize) -> Option<&[u8]> {
        self.stored.sidecars.get(index).map(Blob::bytes)
    }

    /// Oldest policy version of its tokens.
    pub fn min_version(&self) -> i64 {
        self.label.min_version
    }

    /// The ordinal of its task, or -1.
    pub fn task(&self) -> i64 {
        self.label.task
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        if self.stored.payload.data.capacity() == 0 {
            return;
        }
        let shared = &self.charge.shared;
        shared
            .pool
            .give(std::mem::take(&mut self.stored.payload.data));
        for sidecar in self.stored.sidecars.drain(..) {
            shared.pool.give(sidecar.data);
        }
        shared.bound_pool();
    }
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Item")
            .field("bytes", &self.charge.bytes)
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

/// Bytes that start at a multiple of 64, so that arrays laid out at such offsets are aligned.
#[derive(Debug, Default)]
pub(super) struct Blob {
    data: Vec<u8>,
    start: usize,
    stop: usize,
}

const ALIGN: usize = 64;
const PAGE: usize = 4096;

impl Blob {
    pub(super) fn copy(source: &[u8], pool: &Pool) -> Result<Self> {
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

    pub(super) fn written(bytes: usize, pool: &Pool, write: &dyn Fn(&mut [u8])) -> Result<Self> {
        let mut data = memory(bytes, pool)?;
        let start = data.as_ptr().align_offset(ALIGN).min(ALIGN);
        let stop = start + bytes;
        if data.len() < stop {
            data.resize(stop, 0);
        }
        write(&mut data[start..stop]);
        Ok(Self { data, start, stop })
    }

    fn bytes(&self) -> &[u8] {
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
    data.try_reserve_exact(pool.rounded(most))
        .map_err(|_| Error::Full(format!("no memory for {bytes} bytes")))?;
    Ok(data)
}
