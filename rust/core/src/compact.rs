//! A ledger's file made short: all of it up to a step becomes one picture of the state, what follows stays as it is.
//!
//! The picture is a `Base` record and as many `Part` records as it announces, at the beginning of the file and nowhere
//! else. Steps that it holds can no longer be taken back or listed one by one, only the set of tasks that they trained.

use crate::error::Result;
use crate::event::{put, take, text, varint, Event};
use crate::history::History;
use crate::journal::Journal;
use crate::ledger::{fault, Ledger, Phase, Runs, State, Task};

/// Entries of one record, far below the longest that a file may have.
const PART_ENTRIES: usize = 8192;

/// The numbers of a state; the `parts` records after it hold the rest.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Base {
    parts: u64,
    trained: u64,
    dropped: u64,
    next_ordinal: u64,
    pub(crate) last_step: Option<u64>,
    sampled: u64,
    trained_tokens: u64,
    masked_tokens: u64,
}

/// Entries of a state.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    Open(Vec<(u64, Task)>),
    Finished(Vec<(u64, u64)>),
    /// Those of the finished that were trained, for `History`.
    Trained(Vec<(u64, u64)>),
    Lease(u64, Vec<u64>),
    Dropped(u64, String),
}

impl Base {
    /// Tag 11 and the numbers.
    pub(crate) fn bytes(&self, out: &mut Vec<u8>) {
        let last = self.last_step.map_or(0, |step| step.saturating_add(1));
        let numbers = [
            self.parts,
            self.trained,
            self.dropped,
            self.next_ordinal,
            last,
            self.sampled,
            self.trained_tokens,
            self.masked_tokens,
        ];
        put(out, 11, &numbers);
    }

    pub(crate) fn parse(rest: &mut &[u8]) -> Option<Self> {
        Some(Self {
            parts: take(rest)?,
            trained: take(rest)?,
            dropped: take(rest)?,
            next_ordinal: take(rest)?,
            last_step: take(rest)?.checked_sub(1),
            sampled: take(rest)?,
            trained_tokens: take(rest)?,
            masked_tokens: take(rest)?,
        })
    }
}

impl Part {
    /// Tag 12, what it holds, and the entries.
    pub(crate) fn bytes(&self, out: &mut Vec<u8>) {
        match self {
            Self::Open(tasks) => {
                put(out, 12, &[0]);
                for (ordinal, task) in tasks {
                    for number in [
                        *ordinal,
                        task.attempt,
                        task.phase as u64,
                        task.tokens,
                        task.lease,
                    ] {
                        varint(out, number);
                    }
                }
            }
            Self::Finished(runs) => pairs(out, 1, runs),
            Self::Trained(runs) => pairs(out, 2, runs),
            Self::Lease(lease, ordinals) => {
                put(out, 12, &[3, *lease]);
                for ordinal in ordinals {
                    varint(out, *ordinal);
                }
            }
            Self::Dropped(tokens, reason) => {
                put(out, 12, &[4, *tokens]);
                out.extend_from_slice(reason.as_bytes());
            }
        }
    }

    pub(crate) fn parse(rest: &mut &[u8]) -> Option<Self> {
        let run = |rest: &mut &[u8]| Some((take(rest)?, take(rest)?));
        Some(match take(rest)? {
            0 => Self::Open(all(rest, |rest| {
                let (ordinal, attempt) = (take(rest)?, take(rest)?);
                let phase = *Phase::ALL.get(usize::try_from(take(rest)?).ok()?)?;
                let task = Task {
                    attempt,
                    phase,
                    tokens: take(rest)?,
                    lease: take(rest)?,
                };
                Some((ordinal, task))
            })?),
            1 => Self::Finished(all(rest, run)?),
            2 => Self::Trained(all(rest, run)?),
            3 => Self::Lease(take(rest)?, all(rest, take)?),
            4 => Self::Dropped(take(rest)?, text(rest)?),
            _ => return None,
        })
    }
}

fn pairs(out: &mut Vec<u8>, kind: u64, runs: &[(u64, u64)]) {
    put(out, 12, &[kind]);
    for (start, stop) in runs {
        varint(out, *start);
        varint(out, *stop);
    }
}

fn all<T>(rest: &mut &[u8], entry: impl Fn(&mut &[u8]) -> Option<T>) -> Option<Vec<T>> {
    let mut entries = Vec::new();
    while !rest.is_empty() {
        entries.push(entry(rest)?);
    }
    Some(entries)
}

impl Runs {
    /// Adds runs behind those that are in; `false` when they are out of order, touch or are empty.
    pub(crate) fn append(&mut self, runs: &[(u64, u64)]) -> bool {
        runs.iter().all(|&(start, stop)| {
            let end = self.0.last_key_value().map(|(_, end)| *end);
            let right = start < stop && end.is_none_or(|end| end < start);
            self.0.insert(start, stop);
            right
        })
    }
}

impl State {
    pub(crate) fn restore(&mut self, base: &Base) -> Result<bool> {
        if *self != Self::default() {
            return fault("a picture of the state that is not at the beginning".into());
        }
        self.trained = base.trained;
        self.dropped = base.dropped;
        self.next_ordinal = base.next_ordinal;
        self.last_step = base.last_step;
        self.tokens.sampled = base.sampled;
        self.tokens.trained = base.trained_tokens;
        self.tokens.masked = base.masked_tokens;
        self.parts_due = base.parts;
        self.restored()?;
        Ok(true)
    }

    pub(crate) fn restore_part(&mut self, part: &Part) -> Result<bool> {
        let right = match part {
            _ if self.parts_due == 0 => false,
            Part::Open(tasks) => tasks.iter().all(|&(ordinal, task)| {
                let held = self.tokens.held.checked_add(task.tokens);
                self.tokens.held = held.unwrap_or(0);
                let new = !self.open.contains_key(&ordinal) && !self.finished.contains(ordinal);
                self.place(ordinal, task);
                new && held.is_some()
            }),
            Part::Finished(runs) => self.finished.append(runs),
            Part::Trained(_) => true,
            Part::Lease(lease, ordinals) => {
                // One that has lost its tasks may be open.
                let ours = |o: &u64| {
                    let task = self.open.get(o);
                    task.is_some_and(|t| t.phase == Phase::Leased && t.lease == *lease)
                };
                ordinals.iter().all(ours) && self.leases.insert(*lease, ordinals.clone()).is_none()
            }
            Part::Dropped(tokens, reason) => {
                self.check_reason(reason)?;
                self.tokens
                    .dropped
                    .insert(reason.clone(), *tokens)
                    .is_none()
            }
        };
        if !right {
            return fault("it does not fit the picture of the state at the beginning".into());
        }
        self.parts_due -= 1;
        self.restored()?;
        Ok(true)
    }

    /// Once the picture is whole its tokens must add up, and every leased task must be in its lease.
    fn restored(&self) -> Result<()> {
        if self.parts_due > 0 {
            return Ok(());
        }
        let tokens = &self.tokens;
        let sum = tokens
            .dropped
            .values()
            .chain([&tokens.trained, &tokens.masked, &tokens.held])
            .try_fold(0u64, |sum, part| sum.checked_add(*part));
        let leased: usize = self.leases.values().map(Vec::len).sum();
        let in_phase = self.open.values().filter(|t| t.phase == Phase::Leased);
        let last = self.open.keys().next_back().copied();
        let last = last.max(self.finished.0.values().next_back().map(|stop| stop - 1));
        let known = last.is_none_or(|last| last < self.next_ordinal);
        let whole = sum == Some(tokens.sampled) && i64::try_from(tokens.sampled).is_ok();
        if !(whole && leased == in_phase.count() && known && self.next_ordinal < 1 << 63) {
            return fault("the picture of the state at the beginning does not add up".into());
        }
        Ok(())
    }

    /// Fails when the picture at the beginning of the file is not whole.
    pub(crate) fn check_whole(&self) -> Result<()> {
        match self.parts_due {
            0 => Ok(()),
            due => fault(format!(
                "the picture of the state at its beginning is cut short: {due} records are missing"
            )),
        }
    }

    /// The records that `restore` makes this state from. `trained`: the tasks that were trained, for `History`.
    fn picture(&self, trained: &[(u64, u64)]) -> Vec<Event> {
        let mut parts = Vec::new();
        let finished: Vec<(u64, u64)> = self.finished.0.iter().map(|(a, b)| (*a, *b)).collect();
        let chunks = |runs: &[(u64, u64)]| -> Vec<Vec<(u64, u64)>> {
            runs.chunks(PART_ENTRIES).map(<[_]>::to_vec).collect()
        };
        parts.extend(chunks(&finished).into_iter().map(Part::Finished));
        parts.extend(chunks(trained).into_iter().map(Part::Trained));
        let open: Vec<(u64, Task)> = self.open.iter().map(|(o, t)| (*o, *t)).collect();
        parts.extend(
            open.chunks(PART_ENTRIES)
                .map(|tasks| Part::Open(tasks.to_vec())),
        );
        let mut leases: Vec<_> = self.leases.iter().collect();
        leases.sort_unstable();
        parts.extend(
            leases
                .into_iter()
                .map(|(lease, members)| Part::Lease(*lease, members.clone())),
        );
        let dropped = self.tokens.dropped.iter();
        parts.extend(dropped.map(|(reason, tokens)| Part::Dropped(*tokens, reason.clone())));
        let base = Base {
            parts: parts.len() as u64,
            trained: self.trained,
            dropped: self.dropped,
            next_ordinal: self.next_ordinal,
            last_step: self.last_step,
            sampled: self.tokens.sampled,
            trained_tokens: self.tokens.trained,
            masked_tokens: self.tokens.masked,
        };
        std::iter::once(Event::Base(base))
            .chain(parts.into_iter().map(Event::Part))
            .collect()
    }
}

impl Ledger {
    /// Replaces everything in the file up to step `upto` by the state that it leads to; returns the file's bytes before
    /// and after. Later steps stay as they are and can be taken back; the file is replaced as a whole or not at all.
    ///
    /// # Errors
    /// `Error::Ledger` when the file cannot be read, is damaged, or the new one cannot be written.
    pub fn compact(&mut self, upto: u64) -> Result<(u64, u64)> {
        self.flush()?;
        let Some(journal) = &mut self.journal else {
            return Ok((0, 0));
        };
        let path = journal.path().to_owned();
        let (mut state, mut records, mut cut) = (State::default(), 0usize, 0);
        let before = Journal::scan(&path, |payload| {
            state.replay(&Event::of(payload)?)?;
            records += 1;
            if state.parts_due == 0 && state.last_step.is_none_or(|last| last <= upto) {
                cut = records;
            }
            Ok(())
        })? as u64;
        if cut == 0 {
            return Ok((before, before));
        }
        let (mut state, mut history) = (State::default(), History::default());
        let (mut rest, mut at) = (Vec::new(), 0);
        Journal::scan(&path, |payload| {
            at += 1;
            if at > cut {
                rest.push(payload.to_vec());
                return Ok(());
            }
            let event = Event::of(payload)?;
            history.note(&state, &event, u64::MAX)?;
            state.replay(&event)
        })?;
        let picture = state.picture(&history.trained_before());
        if picture.len() >= cut {
            return Ok((before, before));
        }
        let records = picture.iter().map(Event::bytes).chain(rest);
        let after = journal.replace(records)?;
        Ok((before, after))
    }
}
