//! The ledger: the books in memory and, where a folder was given, every event in a journal with what belongs to it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use crate::books::fault;
pub use crate::books::{Books, Phase, Tokens, MAX_REASONS, MAX_REASON_BYTES, REWOUND};
use crate::error::{Error, Result};
pub use crate::event::Event;
pub use crate::history::{History, TrainedStep};
use crate::journal::{self, Journal};
use crate::record::{records, Key, Kind};

/// Bytes after which a segment of the journal is full.
pub const SEGMENT_BYTES: u64 = 16 << 20;

/// The ledger.
#[derive(Debug)]
pub struct Ledger {
    books: Books,
    journal: Option<Journal>,
    /// Events that are not written yet.
    pending: Vec<u8>,
    damage: Vec<String>,
}

/// Frames as they were written for a task.
#[derive(Debug)]
pub struct Stored(Vec<u8>);

impl Stored {
    /// The frames.
    pub fn frames(&self) -> Vec<&[u8]> {
        let frames = records(&self.0).next().and_then(|record| record.frames);
        frames.unwrap_or_default()
    }
}

fn replay(books: &mut Books, kind: Kind, mut bytes: &[u8]) -> Result<()> {
    if kind == Kind::Snapshot {
        *books = Books::restore(bytes)?;
        return Ok(());
    }
    while !bytes.is_empty() {
        let (event, rest) = Event::read(bytes)?;
        if !books.apply(&event)? {
            return fault("an event would change nothing".into());
        }
        bytes = rest;
    }
    Ok(())
}

/// Whether frames still count: the trajectory of a task that is ready or leased, before that the turns of its rollout.
fn lives(books: &Books, key: &Key) -> bool {
    let task = books.open.get(&key.ordinal);
    task.is_some_and(|task| match key.kind {
        Kind::Trajectory => task.phase >= Phase::Ready && task.attempt == key.owner,
        Kind::Turn => task.phase < Phase::Ready && task.rollout == key.owner,
        _ => false,
    })
}

impl Ledger {
    /// Opens the journal in the folder at `path` and recovers the books, or creates it; `None` keeps everything in
    /// memory. `segment_bytes`: size at which a segment of the journal is full.
    ///
    /// # Errors
    /// `Error::Ledger` when the journal cannot be used or is damaged; names file and byte offset.
    pub fn open(path: Option<&Path>, segment_bytes: u64) -> Result<Self> {
        let mut ledger = Self {
            books: Books::new(path.is_some()),
            journal: None,
            pending: Vec::new(),
            damage: Vec::new(),
        };
        if let Some(path) = path {
            let (books, empty) = (&mut ledger.books, Books::new(true).snapshot());
            let (journal, damage) =
                Journal::open(path, segment_bytes, &empty, &mut |kind, bytes| {
                    replay(books, kind, bytes)
                })?;
            ledger.journal = Some(journal);
            for one in damage {
                if one.key.is_none_or(|key| lives(&ledger.books, &key)) {
                    ledger.damage.push(one.text);
                }
            }
        }
        Ok(ledger)
    }

    /// The state of the books.
    pub fn books(&self) -> &Books {
        &self.books
    }

    /// Applies an event; `false` when it is late or was applied before, then nothing changed.
    ///
    /// # Errors
    /// `Error::Ledger` for an event that is impossible, which changes nothing, and when the journal failed before.
    pub fn record(&mut self, event: &Event) -> Result<bool> {
        let Some(journal) = &self.journal else {
            return self.books.apply(event);
        };
        journal.ready()?;
        let before = self.pending.len();
        event.write(&mut self.pending);
        let changed = self.books.apply(event);
        if !matches!(changed, Ok(true)) {
            self.pending.truncate(before);
        }
        changed
    }

    /// Checks and sums what the tasks of a lease were used for: trained and masked tokens of each, in the order of the
    /// lease without the tasks dropped from it.
    ///
    /// # Errors
    /// `Error::Ledger` when they are not the tokens that the tasks hold.
    pub fn total(&self, lease: u64, trained: &[u64], masked: &[u64]) -> Result<(u64, u64)> {
        let members = self.books.members(lease)?;
        if trained.len() != masked.len() || members.len() != trained.len() {
            return fault(format!(
                "lease {lease} holds {} tasks, but trained_tokens has {} entries, masked_tokens {}",
                members.len(),
                trained.len(),
                masked.len()
            ));
        }
        for (ordinal, (trained, masked)) in members.iter().zip(trained.iter().zip(masked)) {
            let held = self.books.open.get(ordinal).map_or(0, |task| task.tokens);
            if trained.checked_add(*masked) != Some(held) {
                return fault(format!(
                    "task {ordinal}: trained {trained} + masked {masked} tokens, but it holds {held}"
                ));
            }
        }
        Ok((trained.iter().sum(), masked.iter().sum()))
    }

    /// Takes back every step after `step`; returns them, newest first. Their tasks are to be issued again with the next
    /// attempt.
    ///
    /// # Errors
    /// `Error::Ledger` when the ledger is behind `step`, has no journal, or no longer lists those steps.
    pub fn rewind(&mut self, step: u64) -> Result<Vec<TrainedStep>> {
        let mut back = self.books.steps_after(step)?.to_vec();
        back.reverse();
        self.record(&Event::Rewind(step))?;
        Ok(back)
    }

    /// Keeps the trajectory of an unfinished task as long as it is ready or leased. It is written at once, without a copy,
    /// and counts from the next `flush` on; without a journal nothing is kept.
    ///
    /// # Errors
    /// `Error::Ledger` when the task is finished or unknown, or the journal cannot be written.
    pub fn trajectory(&mut self, ordinal: u64, frames: &[&[u8]]) -> Result<()> {
        self.keep(Kind::Trajectory, ordinal, 0, frames)
    }

    /// Keeps turn number `part` of a task's rollout until the task is ready or finished, or the rollout begins anew.
    /// Otherwise as `trajectory`.
    ///
    /// # Errors
    /// As `trajectory`.
    pub fn turn(&mut self, ordinal: u64, part: u32, frames: &[&[u8]]) -> Result<()> {
        self.keep(Kind::Turn, ordinal, part, frames)
    }

    fn keep(&mut self, kind: Kind, ordinal: u64, part: u32, frames: &[&[u8]]) -> Result<()> {
        let Some(task) = self.books.open.get(&ordinal) else {
            return self.books.illegal(ordinal, "unfinished, to keep frames");
        };
        let key = Key {
            ordinal,
            kind,
            owner: [task.attempt, task.rollout][usize::from(kind == Kind::Turn)],
            part,
        };
        let journal = self.journal.as_mut();
        journal.map_or(Ok(()), |journal| journal.append(key, frames))
    }

    /// The frames kept of an unfinished task: its trajectory when it is ready or leased, else its turns in order, up to the
    /// first that is missing.
    ///
    /// # Errors
    /// `Error::Ledger` when the journal cannot be read.
    pub fn frames(&self, ordinal: u64) -> Result<Vec<Stored>> {
        let (Some(journal), Some(task)) = (&self.journal, self.books.open.get(&ordinal)) else {
            return Ok(Vec::new());
        };
        let found = if task.phase < Phase::Ready {
            journal.read(Kind::Turn, ordinal, task.rollout)
        } else {
            journal.read(Kind::Trajectory, ordinal, task.attempt)
        };
        Ok(found?.into_iter().map(Stored).collect())
    }

    /// The frames that were damaged when the journal was opened, by file and byte.
    pub fn damage(&self) -> &[String] {
        &self.damage
    }

    /// Whether anything waits for `flush`.
    pub fn due(&self) -> bool {
        !self.pending.is_empty() || self.journal.as_ref().is_some_and(Journal::begun)
    }

    /// Writes what was recorded since the last time as one transaction, of which a crash leaves all or nothing. It then
    /// outlives this process; once the file that is returned is synced, a crash of the machine, too.
    ///
    /// # Errors
    /// `Error::Ledger` when the journal cannot be written. Nothing can be recorded then before `mend`.
    pub fn flush(&mut self) -> Result<Option<Arc<File>>> {
        let Some(journal) = &mut self.journal else {
            return Ok(None);
        };
        let file = journal.commit(&self.pending)?;
        self.pending.clear();
        Ok(Some(file))
    }

    /// The file that `flush` has returned could not be synced: from now on nothing can be recorded.
    pub fn failed(&mut self, error: &std::io::Error) -> Error {
        match &mut self.journal {
            Some(journal) => journal.not_synced(error),
            None => Error::Ledger(error.to_string()),
        }
    }

    /// Whether the journal has failed and `mend` may be tried.
    pub fn broken(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::broken)
    }

    /// Makes the journal usable again: what a failed write has left is cut off, and what could not be synced is written
    /// anew, synced, into a new segment, since a second sync of the same file may succeed without it. The call that failed
    /// can then be made again.
    ///
    /// # Errors
    /// `Error::Ledger` when the disk still fails; nothing has changed then.
    pub fn mend(&mut self) -> Result<()> {
        let Some(journal) = self.journal.as_mut().filter(|journal| journal.broken()) else {
            return Ok(());
        };
        if journal.mend()? {
            let renewed = self.flush().and_then(|_| self.begin_segment());
            if let (Err(error), Some(journal)) = (&renewed, &mut self.journal) {
                journal.stays_broken(error);
            }
            renewed?;
        }
        Ok(())
    }

    /// Bytes of the journal, 0 without one.
    pub fn bytes(&self) -> u64 {
        self.journal.as_ref().map_or(0, Journal::bytes)
    }

    /// Whether the newest segment of the journal is so large that `roll` should be called.
    pub fn full(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::full)
    }

    /// Begins a new segment of the journal and deletes those of which nothing is needed any more. Steps up to `upto` are
    /// no longer listed one by one from then on, and cannot be taken back.
    ///
    /// # Errors
    /// `Error::Ledger` when the segment cannot be written. The old one then goes on.
    pub fn roll(&mut self, upto: u64) -> Result<()> {
        self.flush()?;
        if let (Some(history), true) = (&mut self.books.history, self.journal.is_some()) {
            history.fold(upto);
        }
        self.begin_segment()
    }

    fn begin_segment(&mut self) -> Result<()> {
        let (books, Some(journal)) = (&self.books, &mut self.journal) else {
            return Ok(());
        };
        journal.roll(&books.snapshot(), |key| lives(books, key))
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

/// The steps after `after` of the ledger whose journal is in the folder at `path`, and which tasks were trained up to it.
/// Changes nothing; what a crash left of the last write is left out.
///
/// # Errors
/// `Error::Ledger` when the journal cannot be read, is damaged, or no longer lists those steps.
pub fn history(path: &Path, after: u64) -> Result<History> {
    let mut books = Books::default();
    journal::read(path, &mut |kind, bytes| replay(&mut books, kind, bytes))?;
    let mut history = books.history.unwrap_or_default();
    history
        .after(after)
        .map_err(|error| Error::Ledger(format!("{}: {error}", path.display())))?;
    history.fold(after);
    Ok(history)
}
