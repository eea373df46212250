//! Which tasks were trained in which step, read from the ledger's file, and steps that are taken back.
//!
//! A learner that continues from a checkpoint has lost the steps after it. `Ledger::rewind` takes them back, newest
//! first, one record each: their tasks are requeued with the next attempt and their tokens count as dropped under
//! `REWOUND`. A crash in between leaves a ledger that is whole and not yet as far back. What is read here is the line of
//! history that survives: steps that were taken back are not in it.

use std::path::Path;

use crate::compact::Part;
use crate::error::Result;
use crate::event::Event;
use crate::journal::Journal;
use crate::ledger::{fault, Ledger, Phase, Runs, State, Task};

/// The reason under which the tokens of steps that were taken back are counted.
pub const REWOUND: &str = "rewound";

/// One committed step.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// What is committed and was not taken back.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    runs: Runs,
    last: Option<u64>,
    folded: Option<u64>,
    /// Steps after the one that was asked for, in order.
    pub steps: Vec<TrainedStep>,
}

impl History {
    /// Reads the steps after `after` from a ledger's file, and the set of tasks trained up to it. Changes nothing; a
    /// torn tail is left out.
    ///
    /// # Errors
    /// `Error::Ledger` when the file cannot be read, is damaged, or was compacted beyond `after`.
    pub fn read(path: &Path, after: u64) -> Result<Self> {
        let (mut state, mut found) = (State::default(), Self::default());
        Journal::scan(path, |payload| {
            let event = Event::of(payload)?;
            found.note(&state, &event, after)?;
            state.replay(&event)
        })?;
        state.check_whole()?;
        if let Some(folded) = found.folded.filter(|folded| *folded > after) {
            return fault(format!(
                "{}: was compacted: steps up to {folded} are no longer listed one by one; asked for those after {after}",
                path.display()
            ));
        }
        Ok(found)
    }

    /// Ordinals trained in steps up to the one asked for, as runs (first, one past the last).
    pub fn trained_before(&self) -> Vec<(u64, u64)> {
        self.runs.0.iter().map(|(a, b)| (*a, *b)).collect()
    }

    pub(crate) fn note(&mut self, state: &State, event: &Event, after: u64) -> Result<()> {
        match event {
            Event::Base(base) => {
                self.folded = base.last_step;
                self.last = base.last_step;
            }
            Event::Part(Part::Trained(runs)) if !self.runs.append(runs) => {
                return fault("trained tasks out of order".into());
            }
            Event::Trained {
                lease,
                step,
                trained,
                masked,
            } => {
                let members: Vec<(u64, u64)> = state
                    .leases
                    .get(lease)
                    .into_iter()
                    .flatten()
                    .map(|ordinal| (*ordinal, state.open.get(ordinal).map_or(0, |t| t.attempt)))
                    .collect();
                if *step > after {
                    self.steps.push(TrainedStep {
                        step: *step,
                        lease: *lease,
                        members,
                        trained: *trained,
                        masked: *masked,
                    });
                } else {
                    self.last = Some(*step);
                    for (ordinal, _) in members {
                        self.runs.insert(ordinal);
                    }
                }
            }
            Event::Rewind {
                step,
                before,
                members,
                ..
            } => {
                if *step > after {
                    self.steps.pop();
                } else {
                    self.last = *before;
                    for (ordinal, _) in members {
                        self.runs.remove(*ordinal);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl State {
    /// Takes the last committed step back.
    pub(crate) fn take_back(
        &mut self,
        step: u64,
        before: Option<u64>,
        trained: u64,
        masked: u64,
        members: &[(u64, u64)],
    ) -> Result<bool> {
        self.check_reason(REWOUND)?;
        if self.last_step != Some(step) || before.is_some_and(|before| before >= step) {
            return fault(format!(
                "step {step} after {before:?} cannot be taken back: the last committed step is {:?}",
                self.last_step
            ));
        }
        let mut ordinals: Vec<u64> = members.iter().map(|(ordinal, _)| *ordinal).collect();
        ordinals.sort_unstable();
        ordinals.dedup();
        let fits = self.tokens.trained >= trained
            && self.tokens.masked >= masked
            && self.trained >= members.len() as u64
            && ordinals.len() == members.len()
            && ordinals.iter().all(|o| self.finished.contains(*o));
        if !fits {
            return fault(format!("step {step} was not committed with these tasks"));
        }
        for (ordinal, attempt) in members {
            self.finished.remove(*ordinal);
            self.place(
                *ordinal,
                Task {
                    attempt: attempt + 1,
                    phase: Phase::Requeued,
                    tokens: 0,
                    lease: 0,
                },
            );
        }
        self.trained -= members.len() as u64;
        self.tokens.trained -= trained;
        self.tokens.masked -= masked;
        *self.tokens.dropped.entry(REWOUND.to_owned()).or_default() += trained + masked;
        self.last_step = before;
        Ok(true)
    }
}

impl Ledger {
    /// Takes back every step after `step`, newest first; returns them in that order. Their tasks are to be issued again
    /// with the next attempt.
    ///
    /// # Errors
    /// `Error::Ledger` when the ledger is behind `step`, has no file to read its steps from, or the file fails.
    pub fn rewind(&mut self, step: u64) -> Result<Vec<TrainedStep>> {
        let last = self.last_step().unwrap_or(0);
        if last < step {
            return fault(format!(
                "cannot go back to step {step}: the last committed step is {last}"
            ));
        }
        if last == step {
            return Ok(Vec::new());
        }
        self.flush()?;
        let Some(journal) = &self.journal else {
            return fault(format!(
                "cannot go back to step {step}: a ledger without a file does not know which tasks were in a step"
            ));
        };
        let History { last, steps, .. } = History::read(journal.path(), step)?;
        let mut back = Vec::with_capacity(steps.len());
        for index in (0..steps.len()).rev() {
            let taken = &steps[index];
            let before = index
                .checked_sub(1)
                .map_or(last, |before| Some(steps[before].step));
            self.record(&Event::Rewind {
                step: taken.step,
                before,
                trained: taken.trained,
                masked: taken.masked,
                members: taken.members.clone(),
            })?;
            back.push(taken.clone());
        }
        self.flush()?;
        Ok(back)
    }
}
