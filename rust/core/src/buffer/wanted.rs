//! Which tasks somebody asks for, laid out for a look at every key that is held.

use crate::error::{Error, Result};

/// Bits of the filter for each task: about one key in so many that is not wanted gets past it.
const BITS_A_TASK: usize = 16;

/// Distinct task ordinals in the order in which they were asked for.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Ascending, each with its place in the request.
    sorted: Vec<(i64, usize)>,
    /// A bit for the hash of each, so that a scan looks at one word for almost every key.
    filter: Vec<u64>,
    shift: u32,
}

impl Wanted {
    /// `ordinals` of at least one task and of `most` at most.
    pub(crate) fn new(ordinals: &[i64], most: usize) -> Result<Self> {
        let n = ordinals.len();
        if n == 0 || n > most {
            return Err(Error::Validation(format!(
                "ordinals: {n} tasks are not in 1..={most} (max_trajectories)"
            )));
        }
        if let Some(at) = ordinals.iter().position(|&ordinal| ordinal < 0) {
            return Err(Error::Validation(format!(
                "ordinals[{at}]: {} is negative, a task ordinal is at least 0",
                ordinals[at]
            )));
        }
        let mut sorted: Vec<(i64, usize)> = ordinals.iter().copied().zip(0..).collect();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::Validation(format!(
                "ordinals[{}]: {} was asked for at ordinals[{}] already, each task may come once",
                twice[1].1, twice[1].0, twice[0].1
            )));
        }
        let bits = (n * BITS_A_TASK).next_power_of_two().max(64);
        let mut wanted = Self {
            sorted,
            filter: vec![0; bits / 64],
            shift: u64::BITS - bits.trailing_zeros(),
        };
        for &ordinal in ordinals {
            let (word, bit) = wanted.bit(ordinal);
            wanted.filter[word] |= bit;
        }
        Ok(wanted)
    }

    pub(crate) fn len(&self) -> usize {
        self.sorted.len()
    }

    /// The word and the bit of a task in the filter.
    #[inline]
    fn bit(&self, ordinal: i64) -> (usize, u64) {
        let hash = (ordinal as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift;
        ((hash / 64) as usize, 1 << (hash % 64))
    }

    /// The place of a task in the request.
    #[inline]
    pub(crate) fn place(&self, ordinal: i64) -> Option<usize> {
        let (word, bit) = self.bit(ordinal);
        if self.filter[word] & bit == 0 {
            return None;
        }
        let at = self.sorted.binary_search_by_key(&ordinal, |&(own, _)| own);
        at.ok().map(|at| self.sorted[at].1)
    }

    /// The task at a place of the request; looked for, because only error texts ask.
    pub(crate) fn ordinal(&self, place: usize) -> Option<i64> {
        let own = self.sorted.iter().find(|&&(_, of)| of == place);
        own.map(|&(ordinal, _)| ordinal)
    }
}
