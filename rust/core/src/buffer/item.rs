//! One trajectory in the buffer's memory.

use super::Charge;
use crate::pool::Pool;
use crate::{Error, Result};

/// An encoded trajectory in the buffer's memory.
#[derive(Debug)]
pub struct Item {
    // `charge` gives the bytes back, after the memory was freed or given to the pool.
    pub(super) header: Blob,
    pub(super) payload: Blob,
    pub(super) min_version: i64,
    pub(super) charge: Charge,
}

impl Item {
    /// The encoded header.
    pub fn header(&self) -> &[u8] {
        self.header.bytes()
    }

    /// The encoded payload; starts at a multiple of 64.
    pub fn payload(&self) -> &[u8] {
        self.payload.bytes()
    }

    /// Oldest policy version of its tokens.
    pub fn min_version(&self) -> i64 {
        self.min_version
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        let shared = &self.charge.shared;
        shared.pool.give(std::mem::take(&mut self.payload.data));
        shared.bound_pool();
    }
}

/// Bytes that start at a multiple of 64, so that arrays laid out at such offsets are aligned.
#[derive(Debug)]
pub(super) struct Blob {
    data: Vec<u8>,
    start: usize,
}

const ALIGN: usize = 64;
const PAGE: usize = 4096;

impl Blob {
    pub(super) fn copy(source: &[u8], pool: &Pool) -> Result<Self> {
        let bytes = source.len() + 2 * ALIGN;
        let mut data = pool.get(bytes).unwrap_or_default();
        data.clear();
        data.try_reserve_exact(pool.rounded(bytes))
            .map_err(|_| Error::Full(format!("no memory for {} bytes", source.len())))?;
        let mut start = data.as_ptr().align_offset(ALIGN).min(ALIGN);
        // Some CPUs copy 10 to 25 times slower with `rep movsb` when the destination lies up to a cache line behind
        // the source, modulo the page. Fresh large allocations on both sides produce just that, so step over it.
        let distance =
            (data.as_ptr() as usize + start).wrapping_sub(source.as_ptr() as usize) % PAGE;
        if (1..ALIGN).contains(&distance) {
            start += ALIGN;
        }
        data.resize(start, 0);
        data.extend_from_slice(source);
        Ok(Self { data, start })
    }

    fn bytes(&self) -> &[u8] {
        &self.data[self.start..]
    }
}
