//! Policy versions: the clock, the lag of tokens, and how many rollouts may start.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::wait::Pace;
use crate::{Error, Result};

/// The current policy version; advanced only by a committed update.
#[derive(Debug, Default)]
pub struct VersionClock {
    version: Mutex<i64>,
    advanced: Condvar,
}

impl VersionClock {
    /// A clock that stands at `version`.
    ///
    /// # Errors
    /// [`Error::Validation`] for a negative version.
    pub fn new(version: i64) -> Result<Self> {
        if version < 0 {
            return Err(Error::Validation(format!("version: {version} is negative")));
        }
        Ok(Self {
            version: Mutex::new(version),
            advanced: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, i64> {
        self.version.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The version now.
    pub fn version(&self) -> i64 {
        *self.lock()
    }

    /// Moves to `to` and wakes everybody who waits.
    ///
    /// # Errors
    /// [`Error::Validation`] unless `to` exceeds the current version.
    pub fn advance(&self, to: i64) -> Result<()> {
        let mut version = self.lock();
        if to <= *version {
            return Err(Error::Validation(format!(
                "version: {to} does not exceed the current version {}",
                *version
            )));
        }
        *version = to;
        self.advanced.notify_all();
        Ok(())
    }

    /// Parks until the version is at least `version`; gives the version then.
    ///
    /// # Errors
    /// [`Error::Deadline`] or [`Error::Interrupted`] when `pace` ends the wait first.
    pub fn wait(&self, version: i64, pace: &mut dyn Pace) -> Result<i64> {
        let mut now = self.lock();
        loop {
            if *now >= version {
                return Ok(*now);
            }
            drop(now);
            let pause = pace
                .next()
                .map_err(|stop| stop.error(&format!("policy version {version}")))?;
            now = self.lock();
            if *now < version {
                now = self
                    .advanced
                    .wait_timeout(now, pause)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
    }
}

/// Bounds the rollouts in flight so that, with batches trained in order of start, no token lags by more than `max_lag`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Largest lag, in learner steps.
    pub max_lag: u64,
    /// Trajectories per learner step.
    pub batch: u64,
}

impl Admission {
    /// Rollouts that may start now: `(max_lag + steps + 1) * batch - (trained + leased + ready + running)`, at least 0.
    ///
    /// `steps` counts committed learner steps, those of a critic warm-up included, so that the bound moves on although
    /// the weights do not.
    pub fn permits(&self, steps: u64, trained: u64, leased: u64, ready: u64, running: u64) -> u64 {
        let room = (u128::from(self.max_lag) + u128::from(steps) + 1)
            .saturating_mul(u128::from(self.batch));
        let held = [trained, leased, ready, running]
            .map(u128::from)
            .iter()
            .sum::<u128>();
        u64::try_from(room.saturating_sub(held)).unwrap_or(u64::MAX)
    }
}

/// Lag of every token: `learner_version - version` on action tokens, -1 elsewhere.
///
/// `spans` are rows `(start, stop, version)`, sorted and disjoint. Lag 0 is a token of the very version that is about to
/// be updated.
///
/// # Errors
/// [`Error::Validation`] names the span or token that is wrong; a version from the future is an error, never lag -1.
pub fn token_lags(
    action_mask: &[u8],
    spans: &[[i64; 3]],
    learner_version: i64,
) -> Result<Vec<i32>> {
    let mut lags = vec![-1; action_mask.len()];
    let mut from = 0;
    for (index, &[start, stop, version]) in spans.iter().enumerate() {
        if start < from as i64 || stop <= start || stop > action_mask.len() as i64 {
            return Err(Error::Validation(format!(
                "version_spans[{index}]: [{start}, {stop}) must be non-empty, start at or after {from} and end within {} tokens",
                action_mask.len()
            )));
        }
        if version < 0 {
            return Err(Error::Validation(format!(
                "version_spans[{index}]: version {version} is negative"
            )));
        }
        if version > learner_version {
            return Err(Error::Validation(format!(
                "version_spans[{index}]: version {version} is ahead of the learner's version {learner_version}"
            )));
        }
        let (start, stop) = (start as usize, stop as usize);
        uncovered(action_mask, from, start)?;
        let lag = i32::try_from(learner_version - version).unwrap_or(i32::MAX);
        for (out, &action) in lags[start..stop].iter_mut().zip(&action_mask[start..stop]) {
            *out = if action == 0 { -1 } else { lag };
        }
        from = stop;
    }
    uncovered(action_mask, from, action_mask.len())?;
    Ok(lags)
}

fn uncovered(action_mask: &[u8], from: usize, to: usize) -> Result<()> {
    match action_mask[from..to].iter().position(|&action| action != 0) {
        Some(at) => Err(Error::Validation(format!(
            "action_mask[{}]: an action token lies in no version span",
            from + at
        ))),
        None => Ok(()),
    }
}
