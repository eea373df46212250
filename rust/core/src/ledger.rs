//! Where every task of a run is, and where every sampled token went.
//!
//! issued -> generating -> ready -> leased -> trained | dropped(reason); a task that is put back (requeued) is issued
//! again with the next attempt, and answers of earlier attempts are late. Steps that were lost with the learner are taken
//! back (`history.rs`): their tasks are requeued. Always: sampled = trained + masked + dropped + held.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use crate::error::{Error, Result};
use crate::event::Event;
use crate::journal::{Journal, MAX_RECORD_BYTES};

/// Most different reasons; reasons are codes, details belong in logs.
pub const MAX_REASONS: usize = 256;
/// Longest reason, bytes.
pub const MAX_REASON_BYTES: usize = 128;

/// Where an unfinished task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub enum Phase {
    /// To be issued again.
    Requeued,
    /// Handed out.
    Issued,
    /// A generator works on it.
    Generating,
    /// Its trajectory waits in the buffer.
    Ready,
    /// Its trajectory is with the learner.
    Leased,
}

impl Phase {
    /// All phases in order.
    pub const ALL: [Self; 5] = [
        Self::Requeued,
        Self::Issued,
        Self::Generating,
        Self::Ready,
        Self::Leased,
    ];

    /// The name used in Python and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Requeued => "requeued",
            Self::Issued => "issued",
            Self::Generating => "generating",
            Self::Ready => "ready",
            Self::Leased => "leased",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub(crate) struct Task {
    pub(crate) attempt: u64,
    pub(crate) phase: Phase,
    pub(crate) tokens: u64,
    pub(crate) lease: u64,
}

/// Where sampled tokens went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tokens {
    /// All that were reported.
    pub sampled: u64,
    /// In the policy loss of a committed step.
    pub trained: u64,
    /// Part of a committed step, kept out of the policy loss.
    pub masked: u64,
    /// Thrown away, by reason.
    pub dropped: BTreeMap<String, u64>,
    /// In trajectories that are ready or leased.
    pub held: u64,
}

/// How the tokens of a lease were used.
#[derive(Debug, Clone, PartialEq)]
pub enum Use {
    /// Totals: trained, masked.
    Total(u64, u64),
    /// (trained, masked) per task, in the order of the lease without the tasks dropped from it.
    Each(Vec<(u64, u64)>),
}

/// Disjoint, non-touching runs of finished ordinals: as many as there are gaps, however many tasks finished.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Runs(pub(crate) BTreeMap<u64, u64>);

impl Runs {
    pub(crate) fn contains(&self, ordinal: u64) -> bool {
        self.0
            .range(..=ordinal)
            .next_back()
            .is_some_and(|(_, stop)| ordinal < *stop)
    }

    pub(crate) fn insert(&mut self, ordinal: u64) {
        let (mut start, mut stop) = (ordinal, ordinal + 1);
        if let Some((before, end)) = self.0.range(..ordinal).next_back().map(|(a, b)| (*a, *b)) {
            if end == ordinal {
                start = before;
            }
        }
        if let Some(end) = self.0.remove(&stop) {
            stop = end;
        }
        self.0.insert(start, stop);
    }

    /// Takes out an ordinal that is in.
    pub(crate) fn remove(&mut self, ordinal: u64) {
        let Some((start, stop)) = self
            .0
            .range(..=ordinal)
            .next_back()
            .map(|(a, b)| (*a, *b))
            .filter(|(_, stop)| ordinal < *stop)
        else {
            return;
        };
        self.0.remove(&start);
        if start < ordinal {
            self.0.insert(start, ordinal);
        }
        if ordinal + 1 < stop {
            self.0.insert(ordinal + 1, stop);
        }
    }
}

/// Everything that the file says, in memory; grows with the unfinished tasks only.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct State {
    pub(crate) open: BTreeMap<u64, Task>,
    phases: [u64; 5],
    pub(crate) finished: Runs,
    pub(crate) leases: HashMap<u64, Vec<u64>>,
    pub(crate) tokens: Tokens,
    pub(crate) trained: u64,
    pub(crate) dropped: u64,
    pub(crate) next_ordinal: u64,
    pub(crate) last_step: Option<u64>,
    /// Records of the picture at the beginning of the file that are still to come.
    pub(crate) parts_due: u64,
}

pub(crate) fn fault<T>(text: String) -> Result<T> {
    Err(Error::Ledger(text))
}

impl State {
    fn where_is(&self, ordinal: u64) -> &'static str {
        match self.open.get(&ordinal) {
            Some(task) => task.phase.name(),
            None if self.finished.contains(ordinal) => "finished",
            None => "unknown",
        }
    }

    fn illegal<T>(&self, ordinal: u64, wanted: &str) -> Result<T> {
        let attempt = self
            .open
            .get(&ordinal)
            .map_or(String::new(), |t| format!(" (attempt {})", t.attempt));
        fault(format!(
            "task {ordinal} is {}{attempt}; wanted: {wanted}",
            self.where_is(ordinal)
        ))
    }

    /// The task, `None` when `attempt` is late (an earlier attempt, or the task is finished).
    fn current(&self, ordinal: u64, attempt: u64, wanted: &str) -> Result<Option<Task>> {
        match self.open.get(&ordinal) {
            Some(task) if attempt < task.attempt => Ok(None),
            Some(task) if attempt == task.attempt && task.phase != Phase::Requeued => {
                Ok(Some(*task))
            }
            Some(_) => self.illegal(ordinal, &format!("{wanted} of attempt {attempt}")),
            None if self.finished.contains(ordinal) => Ok(None),
            None => self.illegal(ordinal, wanted),
        }
    }

    pub(crate) fn place(&mut self, ordinal: u64, task: Task) {
        self.phases[task.phase as usize] += 1;
        if let Some(old) = self.open.insert(ordinal, task) {
            self.phases[old.phase as usize] -= 1;
        }
    }

    fn finish(&mut self, ordinal: u64) {
        if let Some(old) = self.open.remove(&ordinal) {
            self.phases[old.phase as usize] -= 1;
        }
        self.finished.insert(ordinal);
    }

    pub(crate) fn check_reason(&self, reason: &str) -> Result<()> {
        if reason.is_empty() || reason.len() > MAX_REASON_BYTES {
            return fault(format!(
                "reason: {reason:?} has {} bytes, expected 1 to {MAX_REASON_BYTES}",
                reason.len()
            ));
        }
        if self.tokens.dropped.len() >= MAX_REASONS && !self.tokens.dropped.contains_key(reason) {
            return fault(format!(
                "reason: {reason:?} would be number {}; reasons are codes, at most {MAX_REASONS}",
                MAX_REASONS + 1
            ));
        }
        Ok(())
    }

    fn room(&self, tokens: u64) -> Result<()> {
        match self.tokens.sampled.checked_add(tokens) {
            Some(sum) if i64::try_from(sum).is_ok() => Ok(()),
            _ => fault(format!(
                "sampled_tokens: {tokens} overflow the count of sampled tokens"
            )),
        }
    }

    /// Tokens that are newly sampled when an open task leaves with `tokens`.
    fn leaving(&self, ordinal: u64, task: Task, tokens: Option<u64>) -> Result<u64> {
        if !matches!(task.phase, Phase::Ready | Phase::Leased) {
            let new = tokens.unwrap_or(0);
            self.room(new)?;
            return Ok(new);
        }
        match tokens {
            Some(told) if told != task.tokens => fault(format!(
                "task {ordinal}: sampled_tokens {told}, but {} were reported when it became ready",
                task.tokens
            )),
            _ => Ok(0),
        }
    }

    /// Moves the task's tokens to `reason` and takes it out of its lease.
    fn release(&mut self, ordinal: u64, task: Task, new: u64, reason: &str) {
        self.tokens.sampled += new;
        self.tokens.held -= task.tokens;
        *self.tokens.dropped.entry(reason.to_owned()).or_default() += new + task.tokens;
        if task.phase == Phase::Leased {
            if let Some(members) = self.leases.get_mut(&task.lease) {
                members.retain(|member| *member != ordinal);
            }
        }
    }

    /// Applies an event of the file, every one of which changed something.
    pub(crate) fn replay(&mut self, event: &Event) -> Result<()> {
        if self.apply(event)? {
            Ok(())
        } else {
            fault("it would change nothing".into())
        }
    }

    /// Checks the whole event, then changes the state; `false` = late or twice, nothing changed.
    pub(crate) fn apply(&mut self, event: &Event) -> Result<bool> {
        if !matches!(event, Event::Part(_)) {
            self.check_whole()?;
        }
        match event {
            Event::Issue { ordinal } => self.issue(*ordinal),
            Event::Generating { ordinal, attempt } => self.generating(*ordinal, *attempt),
            Event::Ready {
                ordinal,
                attempt,
                tokens,
            } => self.ready(*ordinal, *attempt, *tokens),
            Event::Lease { lease, ordinals } => self.lease(*lease, ordinals),
            Event::GiveBack { lease } => self.give_back(*lease),
            Event::Trained {
                lease,
                step,
                trained,
                masked,
            } => self.train(*lease, *step, *trained, *masked),
            Event::Drop {
                ordinal,
                attempt,
                reason,
                tokens,
            } => self.drop(*ordinal, *attempt, reason, *tokens),
            Event::Requeue {
                ordinal,
                reason,
                tokens,
            } => self.requeue(*ordinal, reason, *tokens),
            Event::Waste { reason, tokens } => {
                self.check_reason(reason)?;
                self.room(*tokens)?;
                self.tokens.sampled += tokens;
                *self.tokens.dropped.entry(reason.clone()).or_default() += tokens;
                Ok(true)
            }
            Event::Rewind {
                step,
                before,
                trained,
                masked,
                members,
            } => self.take_back(*step, *before, *trained, *masked, members),
            Event::Base(base) => self.restore(base),
            Event::Part(part) => self.restore_part(part),
        }
    }

    fn issue(&mut self, ordinal: u64) -> Result<bool> {
        if i64::try_from(ordinal.saturating_add(1)).is_err() {
            return fault(format!("task {ordinal}: ordinals are below 2^63 - 1"));
        }
        let attempt = match self.open.get(&ordinal) {
            None if !self.finished.contains(ordinal) => 0,
            Some(task) if task.phase == Phase::Requeued => task.attempt,
            _ => return self.illegal(ordinal, "issued"),
        };
        let task = Task {
            attempt,
            phase: Phase::Issued,
            tokens: 0,
            lease: 0,
        };
        self.place(ordinal, task);
        self.next_ordinal = self.next_ordinal.max(ordinal + 1);
        Ok(true)
    }

    fn generating(&mut self, ordinal: u64, attempt: u64) -> Result<bool> {
        match self.open.get(&ordinal).copied() {
            Some(task) if task.phase == Phase::Issued && task.attempt == attempt => {
                self.place(
                    ordinal,
                    Task {
                        phase: Phase::Generating,
                        ..task
                    },
                );
                Ok(true)
            }
            _ => self.illegal(ordinal, &format!("generating of attempt {attempt}")),
        }
    }

    fn ready(&mut self, ordinal: u64, attempt: u64, tokens: u64) -> Result<bool> {
        let Some(task) = self.current(ordinal, attempt, "ready")? else {
            return Ok(false);
        };
        match task.phase {
            Phase::Generating => {}
            Phase::Ready | Phase::Leased => return Ok(false),
            _ => return self.illegal(ordinal, "ready"),
        }
        self.room(tokens)?;
        self.tokens.sampled += tokens;
        self.tokens.held += tokens;
        self.place(
            ordinal,
            Task {
                phase: Phase::Ready,
                tokens,
                ..task
            },
        );
        Ok(true)
    }

    fn lease(&mut self, lease: u64, ordinals: &[u64]) -> Result<bool> {
        if self.leases.contains_key(&lease) {
            return fault(format!("lease {lease} is open already"));
        }
        if ordinals.is_empty() {
            return fault(format!("lease {lease}: no tasks"));
        }
        let mut seen = HashSet::with_capacity(ordinals.len());
        for ordinal in ordinals {
            let ready = self
                .open
                .get(ordinal)
                .is_some_and(|t| t.phase == Phase::Ready);
            if !ready || !seen.insert(ordinal) {
                return self.illegal(*ordinal, &format!("leased, once, by lease {lease}"));
            }
        }
        self.leases.insert(lease, ordinals.to_vec());
        self.rephase(ordinals, Phase::Leased, lease);
        Ok(true)
    }

    fn rephase(&mut self, ordinals: &[u64], phase: Phase, lease: u64) {
        for ordinal in ordinals {
            if let Some(task) = self.open.get(ordinal).copied() {
                self.place(
                    *ordinal,
                    Task {
                        phase,
                        lease,
                        ..task
                    },
                );
            }
        }
    }

    fn members(&self, lease: u64) -> Result<&Vec<u64>> {
        match self.leases.get(&lease) {
            Some(members) => Ok(members),
            None => fault(format!("lease {lease} is not open")),
        }
    }

    fn give_back(&mut self, lease: u64) -> Result<bool> {
        self.members(lease)?;
        let members = self.leases.remove(&lease).unwrap_or_default();
        self.rephase(&members, Phase::Ready, 0);
        Ok(true)
    }

    fn train(&mut self, lease: u64, step: u64, trained: u64, masked: u64) -> Result<bool> {
        let members = self.members(lease)?;
        let held: u64 = members
            .iter()
            .filter_map(|o| self.open.get(o))
            .map(|t| t.tokens)
            .sum();
        if trained.checked_add(masked) != Some(held) {
            return fault(format!(
                "lease {lease}: trained {trained} + masked {masked} tokens, but it holds {held}"
            ));
        }
        if let Some(last) = self.last_step.filter(|last| *last >= step) {
            return fault(format!(
                "step: {step} is not after the last committed step {last}"
            ));
        }
        let members = self.leases.remove(&lease).unwrap_or_default();
        for ordinal in &members {
            self.finish(*ordinal);
        }
        self.trained += members.len() as u64;
        self.tokens.trained += trained;
        self.tokens.masked += masked;
        self.tokens.held -= held;
        self.last_step = Some(step);
        Ok(true)
    }

    fn drop(
        &mut self,
        ordinal: u64,
        attempt: u64,
        reason: &str,
        tokens: Option<u64>,
    ) -> Result<bool> {
        self.check_reason(reason)?;
        let Some(task) = self.current(ordinal, attempt, "dropped")? else {
            return Ok(false);
        };
        let new = self.leaving(ordinal, task, tokens)?;
        self.release(ordinal, task, new, reason);
        self.finish(ordinal);
        self.dropped += 1;
        Ok(true)
    }

    fn requeue(&mut self, ordinal: u64, reason: &str, tokens: Option<u64>) -> Result<bool> {
        self.check_reason(reason)?;
        let task = match self.open.get(&ordinal) {
            Some(task) if task.phase != Phase::Requeued => *task,
            _ => return self.illegal(ordinal, "requeued"),
        };
        let new = self.leaving(ordinal, task, tokens)?;
        self.release(ordinal, task, new, reason);
        let attempt = task.attempt + 1;
        self.place(
            ordinal,
            Task {
                attempt,
                phase: Phase::Requeued,
                tokens: 0,
                lease: 0,
            },
        );
        Ok(true)
    }
}

/// The ledger: the state in memory and, when a path was given, every event in a file.
#[derive(Debug, Default)]
pub struct Ledger {
    pub(crate) state: State,
    pub(crate) journal: Option<Journal>,
}

impl Ledger {
    /// Opens the file at `path` and recovers its state, or creates it; `None` keeps everything in memory.
    ///
    /// # Errors
    /// `Error::Ledger` when the file cannot be used or is damaged; names file and byte offset.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let mut state = State::default();
        let journal = match path {
            None => None,
            Some(path) => Some(Journal::open(
                path,
                &mut state,
                |state, payload| state.replay(&Event::of(payload)?),
                State::check_whole,
            )?),
        };
        Ok(Self { state, journal })
    }

    pub(crate) fn record(&mut self, event: &Event) -> Result<bool> {
        let Some(journal) = &mut self.journal else {
            return self.state.apply(event);
        };
        journal.ready()?;
        let bytes = event.bytes();
        if bytes.len() > MAX_RECORD_BYTES {
            return fault(format!(
                "event of {} bytes, at most {MAX_RECORD_BYTES}",
                bytes.len()
            ));
        }
        let changed = self.state.apply(event)?;
        if changed {
            journal.append(&bytes)?;
        }
        Ok(changed)
    }

    /// A new task, or a requeued one again; returns its attempt (0 the first time).
    ///
    /// # Errors
    /// `Error::Ledger` unless the ordinal is new or requeued.
    pub fn issue(&mut self, ordinal: u64) -> Result<u64> {
        self.record(&Event::Issue { ordinal })?;
        Ok(self.state.open.get(&ordinal).map_or(0, |task| task.attempt))
    }

    /// A generator works on the issued task.
    ///
    /// # Errors
    /// `Error::Ledger` unless it is issued with this attempt.
    pub fn generating(&mut self, ordinal: u64, attempt: u64) -> Result<()> {
        self.record(&Event::Generating { ordinal, attempt })
            .map(drop)
    }

    /// Its trajectory arrived; `false` when it is late or arrived before, then nothing changed.
    ///
    /// # Errors
    /// `Error::Ledger` when the task never got that far.
    pub fn ready(&mut self, ordinal: u64, attempt: u64, tokens: u64) -> Result<bool> {
        self.record(&Event::Ready {
            ordinal,
            attempt,
            tokens,
        })
    }

    /// The learner takes ready tasks under a lease.
    ///
    /// # Errors
    /// `Error::Ledger` when the lease is open already, empty, or a task is not ready or named twice; nothing changed.
    pub fn lease(&mut self, ordinals: &[u64], lease: u64) -> Result<()> {
        let ordinals = ordinals.to_vec();
        self.record(&Event::Lease { lease, ordinals }).map(drop)
    }

    /// The tasks of a lease are ready again.
    ///
    /// # Errors
    /// `Error::Ledger` when the lease is not open.
    pub fn give_back(&mut self, lease: u64) -> Result<()> {
        self.record(&Event::GiveBack { lease }).map(drop)
    }

    /// A learner step used the lease and was committed.
    ///
    /// # Errors
    /// `Error::Ledger` when the lease is not open, trained + masked differ from its tokens or the step does not advance.
    pub fn trained(&mut self, lease: u64, step: u64, used: &Use) -> Result<()> {
        let (trained, masked) = match used {
            Use::Total(trained, masked) => (*trained, *masked),
            Use::Each(pairs) => self.sum_pairs(lease, pairs)?,
        };
        self.record(&Event::Trained {
            lease,
            step,
            trained,
            masked,
        })
        .map(drop)
    }

    fn sum_pairs(&self, lease: u64, pairs: &[(u64, u64)]) -> Result<(u64, u64)> {
        let members = self.state.members(lease)?;
        if members.len() != pairs.len() {
            return fault(format!(
                "lease {lease}: tokens of {} tasks given, it holds {}",
                pairs.len(),
                members.len()
            ));
        }
        let (mut trained, mut masked) = (0, 0);
        for (ordinal, pair) in members.iter().zip(pairs) {
            let held = self.state.open.get(ordinal).map_or(0, |task| task.tokens);
            if pair.0.checked_add(pair.1) != Some(held) {
                return fault(format!(
                    "task {ordinal}: trained {} + masked {} tokens, but it holds {held}",
                    pair.0, pair.1
                ));
            }
            trained += pair.0;
            masked += pair.1;
        }
        Ok((trained, masked))
    }

    /// The task ends without training; `false` when the attempt is late, then nothing changed.
    ///
    /// `tokens` were sampled for it; once it is ready the ledger knows them and `None` will do.
    ///
    /// # Errors
    /// `Error::Ledger` when the task is unknown, the reason is no code or `tokens` contradict what was reported.
    pub fn drop_task(
        &mut self,
        ordinal: u64,
        attempt: u64,
        reason: &str,
        tokens: Option<u64>,
    ) -> Result<bool> {
        let reason = reason.to_owned();
        self.record(&Event::Drop {
            ordinal,
            attempt,
            reason,
            tokens,
        })
    }

    /// Puts the task back to be issued with the next attempt; its tokens count as dropped under `reason`.
    ///
    /// # Errors
    /// As `drop_task`; also when it is requeued already or finished.
    pub fn requeue(&mut self, ordinal: u64, reason: &str, tokens: Option<u64>) -> Result<()> {
        let reason = reason.to_owned();
        self.record(&Event::Requeue {
            ordinal,
            reason,
            tokens,
        })
        .map(drop)
    }

    /// Counts tokens that were sampled for no open task (late answers) as dropped under `reason`.
    ///
    /// # Errors
    /// `Error::Ledger` when the reason is no code or the count overflows.
    pub fn waste(&mut self, reason: &str, tokens: u64) -> Result<()> {
        let reason = reason.to_owned();
        self.record(&Event::Waste { reason, tokens }).map(drop)
    }

    /// Number of tasks per state, finished ones as `trained` and `dropped`.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let open = Phase::ALL
            .iter()
            .map(|phase| (phase.name(), self.state.phases[*phase as usize]));
        open.chain([
            ("trained", self.state.trained),
            ("dropped", self.state.dropped),
        ])
        .collect()
    }

    /// Where the tokens went.
    pub fn tokens(&self) -> &Tokens {
        &self.state.tokens
    }

    /// State of one task: a phase, `finished` or `unknown`.
    pub fn state(&self, ordinal: u64) -> &'static str {
        self.state.where_is(ordinal)
    }

    /// (ordinal, attempt, phase) of all unfinished tasks in order.
    pub fn unfinished(&self) -> Vec<(u64, u64, Phase)> {
        self.state
            .open
            .iter()
            .map(|(o, t)| (*o, t.attempt, t.phase))
            .collect()
    }

    /// Open leases with their tasks.
    pub fn leases(&self) -> Vec<(u64, Vec<u64>)> {
        let mut all: Vec<_> = self
            .state
            .leases
            .iter()
            .map(|(l, o)| (*l, o.clone()))
            .collect();
        all.sort_unstable();
        all
    }

    /// One more than the highest ordinal ever issued.
    pub fn next_ordinal(&self) -> u64 {
        self.state.next_ordinal
    }

    /// The last committed learner step.
    pub fn last_step(&self) -> Option<u64> {
        self.state.last_step
    }

    /// Entries held in memory: unfinished tasks, leases, runs of finished ordinals and reasons.
    pub fn entries(&self) -> usize {
        let state = &self.state;
        state.open.len() + state.leases.len() + state.finished.0.len() + state.tokens.dropped.len()
    }

    /// Recounts the held tokens and checks that every sampled token is somewhere.
    ///
    /// # Errors
    /// `Error::Ledger` with all the numbers.
    pub fn check(&self) -> Result<()> {
        let tokens = &self.state.tokens;
        let held: u64 = self.state.open.values().map(|task| task.tokens).sum();
        let dropped: u64 = tokens.dropped.values().sum();
        if held == tokens.held && tokens.sampled == tokens.trained + tokens.masked + dropped + held
        {
            return Ok(());
        }
        fault(format!(
            "tokens do not add up: sampled {} != trained {} + masked {} + dropped {dropped} + held {} (recounted {held})",
            tokens.sampled, tokens.trained, tokens.masked, tokens.held
        ))
    }

    /// Hands all events to the operating system; returns the file, on which `sync_data` waits for the disk.
    ///
    /// # Errors
    /// `Error::Ledger` when the file cannot be written.
    pub fn flush(&mut self) -> Result<Option<std::sync::Arc<std::fs::File>>> {
        match &mut self.journal {
            None => Ok(None),
            Some(journal) => journal.flush().map(|()| Some(journal.file())),
        }
    }
}
