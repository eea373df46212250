//! The rollout: segments of sampled and given tokens, its outcome, and the rules that both must keep.
//!
//! Token arrays are borrowed little-endian bytes, so that the same pass checks arrays of a caller and arrays inside a
//! received payload without copying either.

use std::collections::HashSet;
use std::fmt::Display;
use std::hash::Hash;

use crate::error::{Error, Result};
use crate::msgpack::MAX_KEYS;
use crate::rules::{kept, sealed};
use crate::sidecar::{self, Sidecar};

/// The kind of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// Acting in the environment.
    Execution,
    /// Writing the summary that opens the next segment (compaction).
    Summary,
}

impl SegmentKind {
    /// The name used in Python and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Execution => "execution",
            Self::Summary => "summary",
        }
    }

    /// The kind of this name.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Execution, Self::Summary]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

/// How a rollout ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TerminationKind {
    /// The environment said so.
    Finished,
    /// A limit was reached; the reward counts.
    Truncated,
    /// Environment, grader or engine failed; there is no reward.
    Failed,
}

impl TerminationKind {
    /// The name used in Python and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Truncated => "truncated",
            Self::Failed => "failed",
        }
    }

    /// The kind of this name.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Finished, Self::Truncated, Self::Failed]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

/// Tokens `start..stop` of a segment were sampled by policy `version` (context tokens inside do not count).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First token position.
    pub start: i64,
    /// Position after the last token.
    pub stop: i64,
    /// Policy version: the number of committed learner steps in the weights that sampled.
    pub version: i64,
}

/// One physical token sequence; the three arrays have the same length n.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment<'a> {
    /// Its kind.
    pub kind: SegmentKind,
    /// i32 little endian, 4 n bytes, each id >= 0.
    pub token_ids: &'a [u8],
    /// f32 little endian, 4 n bytes: NaN where the mask is 0, finite and <= 0 where it is 1.
    pub logprobs: &'a [u8],
    /// n bytes, 1 = sampled by the policy, 0 = context; the first is 0.
    pub action_mask: &'a [u8],
    /// Sorted, disjoint, versions non-decreasing; together they hold every sampled token.
    pub version_spans: Vec<Span>,
}

/// A reward given for one turn, on the action token where the turn ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TurnReward {
    /// Index of the segment.
    pub segment: i64,
    /// Token position in the segment.
    pub position: i64,
    /// Finite reward, in addition to the trajectory's.
    pub reward: f64,
}

/// What was sampled after a segment's last action token, where segments do not follow each other in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct After {
    /// Action tokens that count as its future.
    pub actions: i64,
    /// Index of the segment that goes on behind it; -1: none does.
    pub next: i64,
}

/// A value of the free metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Meta {
    /// None.
    Null,
    /// A truth value.
    Bool(bool),
    /// A signed 64-bit integer.
    Int(i64),
    /// A float, bits kept.
    Float(f64),
    /// Text.
    Text(String),
}

/// One logical rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct Trajectory<'a> {
    /// 128-bit id.
    pub id: [u8; 16],
    /// Number of the task in the run's task stream.
    pub task_ordinal: i64,
    /// Number of the try at this task, from 0.
    pub attempt: i64,
    /// Name of the environment.
    pub env: String,
    /// At least one with a sampled token, unless failed.
    pub segments: Vec<Segment<'a>>,
    /// Finite, or `None` exactly when failed.
    pub reward: Option<f64>,
    /// How it ended.
    pub termination: TerminationKind,
    /// Why; empty exactly when finished.
    pub reason: String,
    /// Sampling temperature of every action token; 0 is greedy.
    pub temperature: f64,
    /// In order of (segment, position), no position twice.
    pub turn_rewards: Vec<TurnReward>,
    /// One for each segment; empty: each goes on in the next one.
    pub after: Vec<After>,
    /// Policy version -> fingerprint of its weights.
    pub fingerprints: Vec<(i64, String)>,
    /// Durations in seconds.
    pub timings_s: Vec<(String, f64)>,
    /// Free facts.
    pub metadata: Vec<(String, Meta)>,
    /// Arrays that travel as frames of their own.
    pub sidecars: Vec<Sidecar<'a>>,
}

/// Sizes of a valid segment or trajectory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens.
    pub tokens: usize,
    /// Sampled tokens.
    pub actions: usize,
    /// Oldest policy version over the sampled tokens.
    pub min_version: Option<i64>,
    /// Newest policy version over the sampled tokens.
    pub max_version: Option<i64>,
}

impl Counts {
    /// Adds the counts of another segment.
    pub fn add(&mut self, other: Counts) {
        let low = self.min_version.into_iter().chain(other.min_version).min();
        let high = self.max_version.into_iter().chain(other.max_version).max();
        self.tokens += other.tokens;
        self.actions += other.actions;
        self.min_version = low;
        self.max_version = high;
    }
}

fn fault<T>(text: String) -> Result<T> {
    Err(Error::Validation(text))
}

fn word(bytes: &[u8], index: usize) -> [u8; 4] {
    let at = 4 * index;
    [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]
}

fn logprob_ok(value: f32, action: bool) -> bool {
    let sampled = (f32::MIN..=0.0).contains(&value);
    (action & sampled) | (!action & value.is_nan())
}

impl Segment<'_> {
    /// Checks every rule of a segment; `prefix` opens the field name in messages (`"segments[1]."`).
    ///
    /// # Errors
    /// `Error::Validation` that names field, index and value.
    pub fn check(&self, prefix: &dyn Display) -> Result<Counts> {
        self.check_lengths(prefix)?;
        let kept = kept(self.token_ids, self.logprobs, self.action_mask);
        self.check_rest(prefix, kept)
    }

    /// As `check`, and gives the checksums of `token_ids`, `logprobs` and `action_mask` as well.
    pub(crate) fn check_sealed(&self, prefix: &dyn Display) -> Result<(Counts, [u32; 3])> {
        self.check_lengths(prefix)?;
        let (crcs, kept) = sealed(self.token_ids, self.logprobs, self.action_mask);
        Ok((self.check_rest(prefix, kept)?, crcs))
    }

    fn check_lengths(&self, prefix: &dyn Display) -> Result<()> {
        let tokens = self.action_mask.len();
        let (ids, logs) = (self.token_ids.len(), self.logprobs.len());
        if ids != 4 * tokens || logs != 4 * tokens {
            return fault(format!(
                "{prefix}token_ids, action_mask and logprobs have lengths {}, {tokens} and {}; they must be equal",
                ids / 4,
                logs / 4
            ));
        }
        Ok(())
    }

    /// The rules beyond equal lengths; `kept` is the number of sampled tokens if the arrays keep their rules.
    pub(crate) fn check_rest(&self, prefix: &dyn Display, kept: Option<usize>) -> Result<Counts> {
        let tokens = self.action_mask.len();
        if tokens == 0 {
            return fault(format!(
                "{prefix}token_ids: empty; a segment has at least one token"
            ));
        }
        // The index of a fault is looked up only when there is one.
        let Some(actions) = kept else {
            return self.explain(prefix);
        };
        if self.action_mask[0] != 0 {
            return fault(format!(
                "{prefix}action_mask[0]: true; the first token is always context, a sampled token has something before it"
            ));
        }
        self.check_spans(prefix)?;
        Ok(Counts {
            tokens,
            actions,
            min_version: self.version_spans.first().map(|span| span.version),
            max_version: self.version_spans.last().map(|span| span.version),
        })
    }

    /// The first fault of the arrays, which have one.
    fn explain(&self, prefix: &dyn Display) -> Result<Counts> {
        for (index, flag) in self.action_mask.iter().enumerate() {
            if *flag > 1 {
                return fault(format!(
                    "{prefix}action_mask[{index}]: byte {flag} is neither 0 nor 1"
                ));
            }
            let id = i32::from_le_bytes(word(self.token_ids, index));
            if id < 0 {
                return fault(format!(
                    "{prefix}token_ids[{index}]: {id} is negative; token ids are >= 0"
                ));
            }
            let (value, action) = (f32::from_le_bytes(word(self.logprobs, index)), *flag == 1);
            if !logprob_ok(value, action) {
                let field = format!("{prefix}logprobs[{index}]: {value}");
                return fault(match (action, value > 0.0 && value.is_finite()) {
                    (true, true) => {
                        format!("{field} is positive; log-probs of sampled tokens must be finite and <= 0")
                    }
                    (true, false) => {
                        format!("{field} is not finite; log-probs of sampled tokens must be finite and <= 0")
                    }
                    (false, _) => format!("{field} on a context token; log-probs must be NaN where action_mask is false"),
                });
            }
        }
        fault(format!(
            "{prefix}action_mask: an array changed while it was checked"
        ))
    }

    fn check_spans(&self, prefix: &dyn Display) -> Result<()> {
        let tokens = self.action_mask.len();
        // Between the spans nothing was sampled.
        let (mut previous, mut end, mut bare) = (None::<Span>, 0, false);
        for (index, span) in self.version_spans.iter().enumerate() {
            let name = || {
                format!(
                    "{prefix}version_spans[{index}]: ({}, {}, {})",
                    span.start, span.stop, span.version
                )
            };
            let (Ok(start), Ok(stop)) = (usize::try_from(span.start), usize::try_from(span.stop))
            else {
                return fault(format!("{} has a negative position", name()));
            };
            if start >= stop || stop > tokens {
                return fault(format!(
                    "{} is empty, reversed or outside 0..{tokens}",
                    name()
                ));
            }
            if span.version < 0 {
                return fault(format!("{} has a negative version", name()));
            }
            if let Some(before) = previous {
                if span.start < before.stop {
                    return fault(format!(
                        "{} overlaps or precedes the span before it, which stops at {}",
                        name(),
                        before.stop
                    ));
                }
                if span.version < before.version {
                    return fault(format!(
                        "{} goes back in version; the span before it has version {}",
                        name(),
                        before.version
                    ));
                }
            }
            if !self.action_mask[start..stop].contains(&1) {
                return fault(format!("{} holds no sampled token", name()));
            }
            bare |= self.action_mask[end..start].contains(&1);
            end = stop;
            previous = Some(*span);
        }
        bare |= self.action_mask[end..].contains(&1);
        if !bare {
            return Ok(());
        }
        let held = |index: usize| {
            self.version_spans
                .iter()
                .any(|span| (span.start..span.stop).contains(&(index as i64)))
        };
        let bare = (0..tokens).find(|index| self.action_mask[*index] == 1 && !held(*index));
        fault(format!(
            "{prefix}version_spans: sampled token {} lies in no span; every sampled token needs its policy version",
            bare.unwrap_or(0)
        ))
    }
}

impl Trajectory<'_> {
    /// Checks every rule of the trajectory and of its segments.
    ///
    /// # Errors
    /// `Error::Validation` that names field, index and value.
    pub fn check(&self) -> Result<Counts> {
        self.check_by(|segment, _, prefix| segment.check(prefix))
    }

    /// As `check`, and gives the checksums of the arrays of each segment as well.
    pub(crate) fn check_sealed(&self) -> Result<(Counts, Vec<[u32; 3]>)> {
        let mut crcs = Vec::with_capacity(self.segments.len());
        let counts = self.check_by(|segment, _, prefix| {
            let (counts, crc) = segment.check_sealed(prefix)?;
            crcs.push(crc);
            Ok(counts)
        })?;
        Ok((counts, crcs))
    }

    /// As `check`, with the result of `rules` for the arrays of each segment.
    pub(crate) fn check_rest(&self, kept: &[Option<usize>]) -> Result<Counts> {
        self.check_by(|segment, index, prefix| segment.check_rest(prefix, kept[index]))
    }

    fn check_by(
        &self,
        mut check: impl FnMut(&Segment<'_>, usize, &dyn Display) -> Result<Counts>,
    ) -> Result<Counts> {
        let mut counts = Counts::default();
        for (index, segment) in self.segments.iter().enumerate() {
            counts.add(check(segment, index, &format_args!("segments[{index}]."))?);
        }
        self.check_fields(counts.actions)?;
        Ok(counts)
    }

    /// Checks all but the segments, which hold `actions` sampled tokens and were checked before.
    ///
    /// # Errors
    /// `Error::Validation` that names field, index and value.
    pub fn check_fields(&self, actions: usize) -> Result<()> {
        if self.task_ordinal < 0 {
            return fault(format!("task_ordinal: {} is negative", self.task_ordinal));
        }
        if self.attempt < 0 {
            return fault(format!("attempt: {} is negative", self.attempt));
        }
        if self.env.is_empty() {
            return fault("env: empty; expected the name of the environment".into());
        }
        self.check_outcome(actions)?;
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return fault(format!(
                "temperature: {} is not finite and >= 0",
                self.temperature
            ));
        }
        self.check_turn_rewards()?;
        self.check_after(actions)?;
        check_keys("fingerprints", &self.fingerprints)?;
        for (version, text) in &self.fingerprints {
            if *version < 0 || text.is_empty() {
                return fault(format!(
                    "fingerprints[{version}]: {text:?}; expected a version >= 0 and a non-empty fingerprint"
                ));
            }
        }
        check_keys("timings_s", &self.timings_s)?;
        for (name, value) in &self.timings_s {
            if !(value.is_finite() && *value >= 0.0) {
                return fault(format!(
                    "timings_s[{name:?}]: {value} is not finite and >= 0"
                ));
            }
        }
        check_keys("metadata", &self.metadata)?;
        sidecar::check(&self.sidecars, |index| self.sidecars[index].bytes.len())
    }

    fn check_outcome(&self, actions: usize) -> Result<()> {
        let (kind, failed) = (
            self.termination.name(),
            self.termination == TerminationKind::Failed,
        );
        if (self.termination == TerminationKind::Finished) != self.reason.is_empty() {
            return fault(format!(
                "termination.reason: {:?} with kind {kind:?}; a reason is given exactly for truncated and failed",
                self.reason
            ));
        }
        match self.reward {
            Some(reward) if failed => fault(format!(
                "reward: {reward} with termination.kind \"failed\"; a failure has no reward (None)"
            )),
            None if !failed => fault(format!(
                "reward: None with termination.kind {kind:?}; only a failed trajectory has no reward"
            )),
            Some(reward) if !reward.is_finite() => fault(format!("reward: {reward} is not finite")),
            _ if actions == 0 && !failed => fault(format!(
                "segments: {} without any sampled token; only a failed trajectory may have none",
                self.segments.len()
            )),
            _ => Ok(()),
        }
    }

    fn check_after(&self, actions: usize) -> Result<()> {
        let segments = self.segments.len();
        if !self.after.is_empty() && self.after.len() != segments {
            return fault(format!(
                "after: {} entries for {segments} segments; expected one for each, or none",
                self.after.len()
            ));
        }
        for (index, after) in self.after.iter().enumerate() {
            let name = || format!("after[{index}]: ({}, {})", after.actions, after.next);
            if usize::try_from(after.actions).map_or(true, |later| later > actions) {
                return fault(format!("{}: expected 0 to {actions} action tokens", name()));
            }
            if after.next != -1 && !(index as i64 + 1..segments as i64).contains(&after.next) {
                return fault(format!("{}: expected a later segment, or -1", name()));
            }
        }
        Ok(())
    }

    fn check_turn_rewards(&self) -> Result<()> {
        let mut previous = None;
        for (index, turn) in self.turn_rewards.iter().enumerate() {
            let name = || {
                format!(
                    "turn_rewards[{index}]: ({}, {}, {})",
                    turn.segment, turn.position, turn.reward
                )
            };
            let flag = usize::try_from(turn.segment)
                .ok()
                .and_then(|segment| self.segments.get(segment))
                .zip(usize::try_from(turn.position).ok())
                .and_then(|(segment, position)| segment.action_mask.get(position));
            if flag != Some(&1) {
                return fault(format!("{} is not on a sampled token", name()));
            }
            if !turn.reward.is_finite() {
                return fault(format!("{} is not finite", name()));
            }
            let place = (turn.segment, turn.position);
            if previous >= Some(place) {
                return fault(format!(
                    "{} is not after the one before it; expected order of (segment, position)",
                    name()
                ));
            }
            previous = Some(place);
        }
        Ok(())
    }
}

fn check_keys<K: Eq + Hash + std::fmt::Debug, V>(field: &str, entries: &[(K, V)]) -> Result<()> {
    if entries.len() > MAX_KEYS {
        return fault(format!(
            "{field}: {} entries, at most {MAX_KEYS}",
            entries.len()
        ));
    }
    let mut seen = HashSet::new();
    let twice = if entries.len() <= 8 {
        let before = |at: usize| entries[..at].iter().any(|(key, _)| *key == entries[at].0);
        (0..entries.len())
            .find(|at| before(*at))
            .map(|at| &entries[at])
    } else {
        entries.iter().find(|(key, _)| !seen.insert(key))
    };
    match twice {
        Some((key, _)) => fault(format!("{field}: key {key:?} stands twice")),
        None => Ok(()),
    }
}
