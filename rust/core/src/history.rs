//! The steps that were trained and not taken back: the later ones one by one, of the earlier ones only which tasks.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::runs::Runs;

/// One committed step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainedStep {
    /// Its number.
    pub step: u64,
    /// The lease that it used.
    pub lease: u64,
    /// Its tasks, as (ordinal, attempt), in the order of the lease. No such pair is ever trained again.
    pub members: Vec<(u64, u64)>,
    /// Tokens in its policy loss.
    pub trained: u64,
    /// Tokens kept out of it.
    pub masked: u64,
}

/// The steps of a ledger.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// Tasks of the steps that are no longer listed.
    pub(crate) trained: Runs,
    /// The last of those steps.
    pub(crate) folded: Option<u64>,
    /// Steps after it, in order.
    pub steps: Vec<TrainedStep>,
}

impl History {
    /// Steps up to `upto` are no longer listed one by one and cannot be taken back.
    pub(crate) fn fold(&mut self, upto: u64) {
        let n = self.steps.partition_point(|step| step.step <= upto);
        for step in self.steps.drain(..n) {
            self.folded = Some(step.step);
            for (ordinal, _) in step.members {
                self.trained.insert(ordinal);
            }
        }
    }

    /// Ordinals trained in the steps that are no longer listed, as runs (first, one past the last).
    pub fn trained_before(&self) -> Vec<(u64, u64)> {
        self.trained.iter().collect()
    }

    /// The steps after `step`.
    ///
    /// # Errors
    /// `Error::Ledger` when some of them are no longer listed.
    pub fn after(&self, step: u64) -> Result<&[TrainedStep]> {
        match self.folded.filter(|folded| *folded > step) {
            None => Ok(&self.steps[self.steps.partition_point(|s| s.step <= step)..]),
            Some(folded) => Err(Error::Ledger(format!(
                "steps up to {folded} are no longer listed one by one; asked for those after {step}"
            ))),
        }
    }

    /// The last step.
    pub(crate) fn last_step(&self) -> Option<u64> {
        self.steps.last().map(|step| step.step).or(self.folded)
    }
}
