//! The books of a run: where every task is, and where every sampled token went.
//!
//! issued -> generating -> ready -> leased -> trained | dropped(reason); a task that is put back (requeued) is issued
//! again with the next attempt, and answers of earlier attempts are late. Steps that were lost with the learner are
//! taken back: their tasks are requeued. Always: sampled = trained + masked + dropped + held.
//!
//! A state to which events are applied one after another; the same events lead to the same state. It can be written
//! down as a whole (`snapshot`), and events go on from there.

use std::collections::{BTreeMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::event::Event;
use crate::history::{History, TrainedStep};
use crate::runs::Runs;

/// Most different reasons; reasons are codes, details belong in logs.
pub const MAX_REASONS: usize = 256;
/// Longest reason, bytes.
pub const MAX_REASON_BYTES: usize = 128;
/// The reason under which the tokens of steps that were taken back are counted.
pub const REWOUND: &str = "rewound";
/// Attempts that are remembered to have ended; more than all generators have slots.
const ANSWERED: usize = 1 << 14;
/// A bound that no number of a snapshot reaches, so that one more can always be counted.
const LIMIT: u64 = 1 << 63;

/// Where an unfinished task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Serialize, Deserialize)]
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
    /// The name used in Python and in messages.
    pub fn name(self) -> &'static str {
        PHASES[self as usize]
    }
}

const PHASES: [&str; 5] = ["requeued", "issued", "generating", "ready", "leased"];

/// An unfinished task.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) attempt: u64,
    pub(crate) phase: Phase,
    pub(crate) tokens: u64,
    pub(crate) lease: u64,
    /// Number of its rollout. A rollout may go on in the next attempt; one that begins anew has another number.
    pub(crate) rollout: u64,
}

/// Where sampled tokens went.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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

impl Tokens {
    fn drop(&mut self, reason: &str, tokens: u64) {
        *self.dropped.entry(reason.to_owned()).or_default() += tokens;
    }

    /// Whether every sampled token is somewhere.
    fn add_up(&self) -> bool {
        let parts = [&self.trained, &self.masked, &self.held];
        let mut parts = self.dropped.values().chain(parts);
        parts.try_fold(0u64, |sum, part| sum.checked_add(*part)) == Some(self.sampled)
    }
}

/// The books; their memory grows with the unfinished tasks, and with the steps where those are listed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Books {
    pub(crate) open: BTreeMap<u64, Task>,
    #[serde(skip)]
    phases: [u64; 5],
    finished: Runs,
    /// Open leases with their tasks.
    pub leases: BTreeMap<u64, Vec<u64>>,
    /// Where the tokens went.
    pub tokens: Tokens,
    trained: u64,
    dropped: u64,
    /// One more than the highest ordinal ever issued.
    pub next_ordinal: u64,
    last_rollout: u64,
    /// The last committed learner step.
    pub last_step: Option<u64>,
    /// None where nobody can go back to a step.
    pub(crate) history: Option<History>,
    answered: VecDeque<(u64, u64)>,
    #[serde(skip)]
    answers: HashSet<(u64, u64)>,
    /// The last `Event::Note`.
    pub note: Vec<u8>,
}

pub(crate) fn fault<T>(text: String) -> Result<T> {
    Err(Error::Ledger(text))
}

impl Books {
    /// Books in which nothing is; `history`: steps are listed and can be taken back.
    pub(crate) fn new(history: bool) -> Self {
        Self {
            history: history.then(History::default),
            ..Self::default()
        }
    }

    /// All of it as bytes.
    pub(crate) fn snapshot(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("a vector has room for everything")
    }

    /// The books of a snapshot.
    ///
    /// # Errors
    /// `Error::Ledger` for bytes that are none, and for books that contradict themselves.
    pub(crate) fn restore(snapshot: &[u8]) -> Result<Self> {
        let mut books: Self = postcard::from_bytes(snapshot)
            .map_err(|error| Error::Ledger(format!("no snapshot of this format: {error}")))?;
        for task in books.open.values() {
            books.phases[task.phase as usize] += 1;
        }
        books.answers = books.answered.iter().copied().collect();
        if books.sound() {
            return Ok(books);
        }
        fault("the snapshot contradicts itself".into())
    }

    /// Whether every count is what it counts, so that no later event can make one negative.
    fn sound(&self) -> bool {
        let tokens = &self.tokens;
        let task = |(ordinal, task): (&u64, &Task)| {
            *ordinal < self.next_ordinal
                && !self.finished.contains(*ordinal)
                && task.attempt.max(task.rollout) < LIMIT
                && (task.phase >= Phase::Ready || task.tokens == 0)
        };
        let lease = |(lease, members): (&u64, &Vec<u64>)| {
            let inside = |task: &Task| task.phase == Phase::Leased && task.lease == *lease;
            members.iter().all(|o| self.open.get(o).is_some_and(inside))
        };
        let members: usize = self.leases.values().map(Vec::len).sum();
        let mut held = self.open.values().map(|task| task.tokens);
        let held = held.try_fold(0u64, u64::checked_add) == Some(tokens.held);
        self.open.iter().all(task)
            && self.leases.iter().all(lease)
            && members as u64 == self.phases[Phase::Leased as usize]
            && self.finished.sound(self.next_ordinal)
            && held
            && tokens.add_up()
            && tokens.sampled.max(self.next_ordinal).max(self.last_rollout) < LIMIT
            && self.answers.len() == self.answered.len()
            && self.history.as_ref().is_none_or(|h| self.agrees(h))
    }

    /// Whether the listed steps can be taken back one after another.
    fn agrees(&self, history: &History) -> bool {
        let (mut last, mut seen) = (history.folded, HashSet::new());
        let sum = |tokens: fn(&TrainedStep) -> u64| {
            let mut steps = history.steps.iter().map(tokens);
            steps.try_fold(0u64, u64::checked_add)
        };
        let step = |step: &TrainedStep| {
            let later = last.is_none_or(|last| last < step.step);
            last = Some(step.step);
            let mut members = step.members.iter();
            later
                && members.all(|(ordinal, attempt)| {
                    *attempt < LIMIT && self.finished.contains(*ordinal) && seen.insert(*ordinal)
                })
        };
        history.trained.sound(self.next_ordinal)
            && history.steps.iter().all(step)
            && !seen
                .iter()
                .any(|ordinal| history.trained.contains(*ordinal))
            && history.last_step() == self.last_step
            && sum(|step| step.trained).is_some_and(|sum| sum <= self.tokens.trained)
            && sum(|step| step.masked).is_some_and(|sum| sum <= self.tokens.masked)
            && seen.len() as u64 <= self.trained
    }

    /// The state of a task: a phase, `finished` or `unknown`.
    pub fn where_is(&self, ordinal: u64) -> &'static str {
        match self.open.get(&ordinal) {
            Some(task) => task.phase.name(),
            None if self.finished.contains(ordinal) => "finished",
            None => "unknown",
        }
    }

    pub(crate) fn illegal<T>(&self, ordinal: u64, wanted: &str) -> Result<T> {
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

    /// The task in a phase in which it holds no tokens. `rollout`: a new one unless given.
    fn place(&mut self, ordinal: u64, attempt: u64, phase: Phase, rollout: Option<u64>) {
        self.last_rollout += u64::from(rollout.is_none());
        let task = Task {
            attempt,
            phase,
            tokens: 0,
            lease: 0,
            rollout: rollout.unwrap_or(self.last_rollout),
        };
        self.phases[phase as usize] += 1;
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

    fn check_reason(&self, reason: &str) -> Result<()> {
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
            Some(other) if other != task.tokens => fault(format!(
                "task {ordinal}: sampled_tokens {other}, but {} were reported when it became ready",
                task.tokens
            )),
            _ => Ok(0),
        }
    }

    /// Moves the task's tokens to `reason` and takes it out of its lease.
    fn release(&mut self, ordinal: u64, task: Task, new: u64, reason: &str) {
        self.tokens.sampled += new;
        self.tokens.held -= task.tokens;
        self.tokens.drop(reason, new + task.tokens);
        if task.phase == Phase::Leased {
            if let Some(members) = self.leases.get_mut(&task.lease) {
                members.retain(|member| *member != ordinal);
            }
        }
    }

    /// Checks the whole event, then changes the state; `false` = late or twice, nothing changed.
    pub(crate) fn apply(&mut self, event: &Event) -> Result<bool> {
        match event {
            Event::Issue(ordinal) => self.issue(*ordinal),
            Event::Generating(ordinal, attempt) => self.generating(*ordinal, *attempt),
            Event::Ready(ordinal, attempt, tokens) => self.ready(*ordinal, *attempt, *tokens),
            Event::Lease(lease, ordinals) => self.lease(*lease, ordinals),
            Event::GiveBack(lease) => self.give_back(*lease),
            Event::Trained(lease, step, trained, masked) => {
                self.train(*lease, *step, *trained, *masked)
            }
            Event::Drop(task, attempt, reason, tokens) => {
                self.drop(*task, *attempt, reason, *tokens)
            }
            Event::Requeue(ordinal, reason, tokens) => self.requeue(*ordinal, reason, *tokens),
            Event::Waste(reason, tokens) => self.waste(reason, *tokens),
            Event::Rewind(step) => self.rewind(*step),
            Event::Anew(ordinal) => self.begin_anew(*ordinal),
            Event::Answered(ordinal, attempt) => Ok(self.answer(*ordinal, *attempt)),
            Event::Note(note) => {
                self.note.clone_from(note);
                Ok(true)
            }
        }
    }

    fn issue(&mut self, ordinal: u64) -> Result<bool> {
        if i64::try_from(ordinal.saturating_add(1)).is_err() {
            return fault(format!("task {ordinal}: ordinals are below 2^63 - 1"));
        }
        let (attempt, rollout) = match self.open.get(&ordinal) {
            None if !self.finished.contains(ordinal) => (0, None),
            Some(task) if task.phase == Phase::Requeued => (task.attempt, Some(task.rollout)),
            _ => return self.illegal(ordinal, "issued"),
        };
        self.place(ordinal, attempt, Phase::Issued, rollout);
        self.next_ordinal = self.next_ordinal.max(ordinal + 1);
        Ok(true)
    }

    fn generating(&mut self, ordinal: u64, attempt: u64) -> Result<bool> {
        match self.open.get(&ordinal).copied() {
            Some(task) if task.phase == Phase::Issued && task.attempt == attempt => {
                self.rephase(&[ordinal], Phase::Generating, 0);
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
        self.rephase(&[ordinal], Phase::Ready, 0);
        if let Some(task) = self.open.get_mut(&ordinal) {
            task.tokens = tokens;
        }
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
            let task = self.open.get(ordinal);
            if task.is_none_or(|t| t.phase != Phase::Ready) || !seen.insert(ordinal) {
                return self.illegal(*ordinal, &format!("leased, once, by lease {lease}"));
            }
        }
        self.leases.insert(lease, ordinals.to_vec());
        self.rephase(ordinals, Phase::Leased, lease);
        Ok(true)
    }

    fn rephase(&mut self, ordinals: &[u64], phase: Phase, lease: u64) {
        for ordinal in ordinals {
            if let Some(task) = self.open.get_mut(ordinal) {
                self.phases[task.phase as usize] -= 1;
                self.phases[phase as usize] += 1;
                (task.phase, task.lease) = (phase, lease);
            }
        }
    }

    pub(crate) fn members(&self, lease: u64) -> Result<&Vec<u64>> {
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
        let tasks: Vec<(u64, Task)> = self
            .members(lease)?
            .iter()
            .filter_map(|ordinal| Some((*ordinal, *self.open.get(ordinal)?)))
            .collect();
        let held: u64 = tasks.iter().map(|(_, task)| task.tokens).sum();
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
        self.leases.remove(&lease);
        for (ordinal, _) in &tasks {
            self.finish(*ordinal);
        }
        self.trained += tasks.len() as u64;
        self.tokens.trained += trained;
        self.tokens.masked += masked;
        self.tokens.held -= held;
        self.last_step = Some(step);
        if let Some(history) = &mut self.history {
            history.steps.push(TrainedStep {
                step,
                lease,
                members: tasks.into_iter().map(|(o, t)| (o, t.attempt)).collect(),
                trained,
                masked,
            });
        }
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
        // The turns of a finished rollout are in its trajectory: they count no longer.
        let running = !matches!(task.phase, Phase::Ready | Phase::Leased);
        let rollout = running.then_some(task.rollout);
        self.place(ordinal, task.attempt + 1, Phase::Requeued, rollout);
        Ok(true)
    }

    fn waste(&mut self, reason: &str, tokens: u64) -> Result<bool> {
        self.check_reason(reason)?;
        self.room(tokens)?;
        self.tokens.sampled += tokens;
        self.tokens.drop(reason, tokens);
        Ok(true)
    }

    fn begin_anew(&mut self, ordinal: u64) -> Result<bool> {
        match self.open.get_mut(&ordinal) {
            Some(task) if task.phase < Phase::Ready => {
                self.last_rollout += 1;
                task.rollout = self.last_rollout;
                Ok(true)
            }
            _ => self.illegal(ordinal, "begun anew"),
        }
    }

    fn answer(&mut self, ordinal: u64, attempt: u64) -> bool {
        let new = self.answers.insert((ordinal, attempt));
        if new {
            self.answered.push_back((ordinal, attempt));
        }
        if self.answered.len() > ANSWERED {
            if let Some(oldest) = self.answered.pop_front() {
                self.answers.remove(&oldest);
            }
        }
        new
    }

    /// The steps after `step`.
    ///
    /// # Errors
    /// `Error::Ledger` when they cannot be taken back.
    pub fn steps_after(&self, step: u64) -> Result<&[TrainedStep]> {
        let last = self.last_step.unwrap_or(0);
        match &self.history {
            _ if last < step => fault(format!(
                "cannot go back to step {step}: the last committed step is {last}"
            )),
            _ if last == step => Ok(&[]),
            None => fault(format!(
                "cannot go back to step {step}: a ledger without a journal does not know which tasks were in a step"
            )),
            Some(history) => history.after(step),
        }
    }

    /// Takes back the steps after `step`.
    fn rewind(&mut self, step: u64) -> Result<bool> {
        self.check_reason(REWOUND)?;
        let back = self.steps_after(step)?.to_vec();
        for taken in back.iter().rev() {
            for (ordinal, attempt) in &taken.members {
                self.finished.remove(*ordinal);
                self.place(*ordinal, attempt + 1, Phase::Requeued, None);
            }
            self.trained -= taken.members.len() as u64;
            self.tokens.trained -= taken.trained;
            self.tokens.masked -= taken.masked;
            self.tokens.drop(REWOUND, taken.trained + taken.masked);
        }
        if let Some(history) = &mut self.history {
            history.steps.truncate(history.steps.len() - back.len());
            self.last_step = history.last_step();
        }
        Ok(!back.is_empty())
    }

    /// Number of tasks per state, finished ones as `trained` and `dropped`.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let open = PHASES.into_iter().zip(self.phases);
        open.chain([("trained", self.trained), ("dropped", self.dropped)])
    }

    /// Attempt and phase of a task that is not finished.
    pub fn task(&self, ordinal: u64) -> Option<(u64, Phase)> {
        self.open
            .get(&ordinal)
            .map(|task| (task.attempt, task.phase))
    }

    /// (ordinal, attempt, phase) of all unfinished tasks in order.
    pub fn unfinished(&self) -> impl Iterator<Item = (u64, u64, Phase)> + '_ {
        self.open.iter().map(|(o, t)| (*o, t.attempt, t.phase))
    }

    /// Entries held in memory: unfinished tasks, leases, runs of finished ordinals and reasons.
    pub fn entries(&self) -> usize {
        self.open.len() + self.leases.len() + self.finished.len() + self.tokens.dropped.len()
    }

    /// Recounts the held tokens and checks that every sampled token is somewhere.
    ///
    /// # Errors
    /// `Error::Ledger` with all the numbers.
    pub fn check(&self) -> Result<()> {
        let tokens = &self.tokens;
        let held: u64 = self.open.values().map(|task| task.tokens).sum();
        if held == tokens.held && tokens.add_up() {
            return Ok(());
        }
        fault(format!(
            "tokens do not add up: {tokens:?}, recounted held {held}"
        ))
    }
}
