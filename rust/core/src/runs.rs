//! A set of numbers as disjoint runs: as large as it has gaps, however many numbers are in it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// First number of each run -> one past its last. Runs neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Runs(BTreeMap<u64, u64>);

impl Runs {
    /// The run that holds `number`.
    fn around(&self, number: u64) -> Option<(u64, u64)> {
        let (start, stop) = self.0.range(..=number).next_back()?;
        (number < *stop).then_some((*start, *stop))
    }

    pub(crate) fn contains(&self, number: u64) -> bool {
        self.around(number).is_some()
    }

    /// Adds a number below 2^63 that is not in.
    pub(crate) fn insert(&mut self, number: u64) {
        let stop = self.0.remove(&(number + 1)).unwrap_or(number + 1);
        let before = number.checked_sub(1).and_then(|last| self.around(last));
        self.0.insert(before.map_or(number, |run| run.0), stop);
    }

    /// Takes out a number, if it is in.
    pub(crate) fn remove(&mut self, number: u64) {
        let Some((start, stop)) = self.around(number) else {
            return;
        };
        self.0.remove(&start);
        if start < number {
            self.0.insert(start, number);
        }
        if number + 1 < stop {
            self.0.insert(number + 1, stop);
        }
    }

    /// The runs in order, as (first, one past the last).
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|(start, stop)| (*start, *stop))
    }

    /// Number of runs.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether runs that were read are those of a set of numbers below `limit`.
    pub(crate) fn sound(&self, limit: u64) -> bool {
        let mut free = 0;
        self.iter().all(|(start, stop)| {
            let right = start >= free && start < stop && stop <= limit;
            free = stop.saturating_add(1);
            right
        })
    }
}
