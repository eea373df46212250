//! The arguments and answers of a buffer's callers: limits, labels, selections, counters, entries.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// The behaviour of `put` when there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Wait.
    Block,
    /// Refuse with [`Error::Full`].
    Reject,
    /// Drop the trajectory that came first.
    DropOldest,
    /// Drop the trajectory with the oldest policy version.
    DropStalest,
}

impl Policy {
    /// Its name; also the reason under which it drops.
    pub fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Reject => "reject",
            Self::DropOldest => "drop_oldest",
            Self::DropStalest => "drop_stalest",
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [
            Self::Block,
            Self::Reject,
            Self::DropOldest,
            Self::DropStalest,
        ]
        .into_iter()
        .find(|policy| policy.name() == name)
        .ok_or_else(|| {
            Error::Validation(format!(
                "policy: {name:?} is not block, reject, drop_oldest or drop_stalest"
            ))
        })
    }
}

/// The label of what belongs to no task.
pub const NO_TASK: i64 = -1;

/// The label of a trajectory, kept beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Oldest policy version of its tokens.
    pub min_version: i64,
    /// The ordinal of its task, by which it can be taken; [`NO_TASK`] for none.
    pub task: i64,
}

impl From<i64> for Label {
    /// Of a trajectory that belongs to no task.
    fn from(min_version: i64) -> Self {
        let task = NO_TASK;
        Self { min_version, task }
    }
}

/// Bounds of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Trajectories held at most, ready and leased.
    pub max_trajectories: usize,
    /// Bytes held at most, headers and payloads.
    pub max_bytes: usize,
    /// The behaviour of `put` when there is no room.
    pub policy: Policy,
}

/// Counters at one instant; `received = ready + leased + committed + dropped`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Trajectories that can be taken.
    pub ready: usize,
    /// Trajectories taken and neither committed nor given back.
    pub leased: usize,
    /// Trajectories being copied in.
    pub copying: usize,
    /// Bytes held, views of committed trajectories included.
    pub bytes: usize,
    /// Trajectories that came in.
    pub received: u64,
    /// Trajectories that were committed.
    pub committed: u64,
    /// Trajectories dropped, by reason.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Calls of `take` and of `put` that wait.
    pub waiting: (usize, usize),
    /// The version of the last `advance`.
    pub version: i64,
    /// No longer usable.
    pub closed: bool,
}

/// One trajectory as `snapshot` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Position in the order of completion.
    pub sequence: u64,
    /// Taken, not yet settled.
    pub leased: bool,
    /// Bytes of header and payload.
    pub bytes: usize,
    /// Oldest policy version of its tokens.
    pub min_version: i64,
    /// The ordinal of its task, or -1.
    pub task: i64,
}

/// A consumer's selection, all of it or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask<'a> {
    /// So many, the next in order of completion.
    Next(usize),
    /// Those of exactly these tasks, in this order; of several of one task the one that finished first.
    Tasks(&'a [i64]),
}

impl From<usize> for Ask<'_> {
    fn from(n: usize) -> Self {
        Self::Next(n)
    }
}

impl<'a, T: AsRef<[i64]> + ?Sized> From<&'a T> for Ask<'a> {
    fn from(tasks: &'a T) -> Self {
        Self::Tasks(tasks.as_ref())
    }
}

impl Limits {
    pub(crate) fn drops(&self) -> bool {
        matches!(self.policy, Policy::DropOldest | Policy::DropStalest)
    }
}
