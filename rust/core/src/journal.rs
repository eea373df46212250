//! The journal of a run: a folder of segments, to which transactions are appended.
//!
//! A transaction is the records since the last one that commits, and that one: frames as they come, then the events.
//! Each segment begins with a snapshot of the books, so the newest one alone says where everything is; older ones are
//! kept for the frames in them that still live. A segment in which nothing lives is deleted when the next one begins.
//! When the dead outgrow the living, the segments in which the least lives are given up and that is copied on, so the
//! disk is bounded by the living, and a new segment by its own size.
//!
//! Recovery cuts the newest segment behind its last whole transaction: that is what a crash left of the last write. A
//! damaged transaction with a whole one behind it is refused, since the books cannot be trusted then. Damaged frames
//! are reported by file and byte, and everything else is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, IoSlice, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::record::{begin, records, Key, Kind};

/// Takes what commits a transaction: a snapshot or events.
type Replay<'a> = &'a mut dyn FnMut(Kind, &[u8]) -> Result<()>;

/// The open journal.
#[derive(Debug)]
pub(crate) struct Journal {
    folder: PathBuf,
    segment_bytes: u64,
    /// Number -> bytes.
    segments: BTreeMap<u64, u64>,
    frames: BTreeMap<Key, Place>,
    file: Arc<File>,
    /// Number of the last transaction.
    transaction: u64,
    /// Frames were written since then.
    begun: bool,
    /// Bytes at which the newest segment is full.
    limit: u64,
    failure: Option<Error>,
    /// Behind the newest segment's end there may be bytes of a write that failed.
    torn: bool,
    /// What the newest segment holds may never come to the disk: a sync that failed is not to be asked again.
    unsynced: bool,
}

/// Where frames are.
#[derive(Debug, Clone, Copy)]
struct Place {
    segment: u64,
    at: u64,
    bytes: u64,
}

/// A record that cannot be read.
pub(crate) struct Damage {
    at: u64,
    /// The task it belongs to, where its head is whole.
    pub(crate) key: Option<Key>,
    pub(crate) text: String,
}

fn failed(path: &Path, what: &str, error: &io::Error) -> Error {
    Error::Ledger(format!("{}: cannot be {what}: {error}", path.display()))
}

fn path_of(folder: &Path, segment: u64) -> PathBuf {
    folder.join(format!("{segment:08}.journal"))
}

/// The numbers of the segments in a folder; a segment that was never finished has another name.
fn list(folder: &Path) -> io::Result<BTreeSet<u64>> {
    let mut numbers = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let stem = name.to_str().and_then(|name| name.strip_suffix(".journal"));
        let digits = |stem: &&str| stem.len() >= 8 && stem.bytes().all(|b| b.is_ascii_digit());
        numbers.extend(
            stem.filter(digits)
                .and_then(|stem| stem.parse::<u64>().ok()),
        );
    }
    Ok(numbers)
}

/// Writes a segment beside the journal and gives it its name; returns it with its bytes. `copies` are whole records.
fn create(
    folder: &Path,
    segment: u64,
    mut copies: impl Iterator<Item = io::Result<Vec<u8>>>,
    snapshot: (Key, &[u8]),
) -> io::Result<(File, u64)> {
    let beside = folder.join(format!("{segment:08}.new"));
    let _ = fs::remove_file(&beside); // of a crash
    let mut write = || {
        let mut file = options().create_new(true).mode(0o600).open(&beside)?;
        copies.try_for_each(|copy| file.write_all(&copy?))?;
        write_all(&file, &begin(snapshot.0, &[snapshot.1]), &[snapshot.1])?;
        file.sync_all()?;
        let bytes = file.metadata()?.len();
        fs::rename(&beside, path_of(folder, segment))?;
        Ok((file, bytes))
    };
    let written = write();
    if written.is_err() {
        let _ = fs::remove_file(&beside); // the disk may be full
    }
    written
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).append(true);
    options
}

fn write_all(mut file: &File, head: &[u8], frames: &[&[u8]]) -> io::Result<()> {
    let frames = frames.iter().copied().filter(|frame| !frame.is_empty());
    let mut parts: Vec<_> = [head].into_iter().chain(frames).map(IoSlice::new).collect();
    let mut left = &mut parts[..];
    while !left.is_empty() {
        match file.write_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut left, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The content of a segment.
#[derive(Default)]
struct Content {
    frames: Vec<(Key, u64, u64)>,
    damage: Vec<Damage>,
    /// Where its first and its last whole transaction end.
    ends: Option<(u64, u64)>,
    /// Number of the last one.
    transaction: u64,
}

/// Reads a segment. With `replay`, of the newest one, the transactions go there, and what is behind the last one is
/// left out; without, all frames that are whole are found.
fn scan(path: &Path, mut replay: Option<Replay>) -> Result<Content> {
    let data = fs::read(path).map_err(|error| failed(path, "read", &error))?;
    let refused = |what: String| Err(Error::Ledger(format!("{}: {what}", path.display())));
    let (mut found, mut frames, mut damage) =
        (Content::default(), Vec::new(), Vec::<Damage>::new());
    for record in records(&data) {
        let (at, end) = (record.at as u64, record.end as u64);
        match (record.key, record.frames) {
            (Some(key), Some(_)) if !key.kind.commits() => frames.push((key, at, end - at)),
            (Some(key), Some(body)) => {
                let follows = match found.ends {
                    None => key.kind == Kind::Snapshot,
                    Some(_) => key.kind == Kind::Events && key.ordinal == found.transaction + 1,
                };
                if let Some(replay) = &mut replay {
                    if !follows {
                        let first = damage.first().map_or(at, |one| one.at);
                        return refused(format!(
                            "corrupt transaction at byte {first} of {}; a whole one follows at byte {at}",
                            data.len()
                        ));
                    }
                    let body = body.first().copied().unwrap_or_default();
                    if let Err(error) = replay(key.kind, body) {
                        return refused(format!(
                            "the transaction at byte {at} is impossible: {error}"
                        ));
                    }
                }
                found.ends = Some((found.ends.map_or(end, |ends| ends.0), end));
                found.transaction = key.ordinal;
                found.frames.append(&mut frames);
                found.damage.append(&mut damage);
            }
            (key, _) => {
                let what = key.map_or("a record".to_owned(), |key| key.to_string());
                let text = format!("{} byte {at}: {what} is damaged", path.display());
                damage.push(Damage { at, key, text });
            }
        }
    }
    if replay.is_none() {
        found.frames.append(&mut frames);
        found.damage.append(&mut damage);
    } else if found.ends.is_none() {
        return refused("no segment of a journal: the snapshot at its beginning is missing".into());
    }
    Ok(found)
}

/// Hands the transactions of the journal in `folder` to `replay`; changes nothing.
pub(crate) fn read(folder: &Path, replay: Replay) -> Result<()> {
    let segments = list(folder).map_err(|error| failed(folder, "read", &error))?;
    let newest = segments.last().map(|newest| path_of(folder, *newest));
    newest.map_or(Ok(()), |path| scan(&path, Some(replay)).map(drop))
}

impl Journal {
    /// Opens the journal in `folder` and hands its transactions to `replay`; where there is none, one is made that
    /// begins with the snapshot `empty`. Returns also what is damaged.
    pub(crate) fn open(
        folder: &Path,
        segment_bytes: u64,
        empty: &[u8],
        replay: Replay,
    ) -> Result<(Self, Vec<Damage>)> {
        let prepare = || {
            if !folder.is_dir() {
                DirBuilder::new().mode(0o700).create(folder)?;
            }
            let mut segments = list(folder)?;
            if segments.is_empty() {
                create(
                    folder,
                    1,
                    std::iter::empty(),
                    (commit(Kind::Snapshot, 0), empty),
                )?;
                sync_folder(folder)?;
                segments.insert(1);
            }
            Ok(segments)
        };
        let numbers = prepare().map_err(|error| failed(folder, "opened", &error))?;
        let newest = numbers.last().copied().unwrap_or_default();
        let path = path_of(folder, newest);
        let mut last = scan(&path, Some(replay))?;
        let (beginning, end) = last.ends.unwrap_or_default();
        let cut = || {
            let file = options().open(&path)?;
            if file.metadata()?.len() > end {
                file.set_len(end)?;
                file.sync_all()?;
            }
            Ok(file)
        };
        let file = cut().map_err(|error| failed(&path, "opened", &error))?;
        let mut journal = Self {
            folder: folder.to_owned(),
            segment_bytes,
            segments: BTreeMap::new(),
            frames: BTreeMap::new(),
            file: Arc::new(file),
            transaction: last.transaction,
            begun: false,
            limit: beginning + segment_bytes.max(beginning),
            failure: None,
            torn: false,
            unsynced: false,
        };
        let mut damage = Vec::new();
        for segment in numbers {
            let path = path_of(folder, segment);
            let content = if segment == newest {
                std::mem::take(&mut last)
            } else {
                scan(&path, None)?
            };
            let bytes = fs::metadata(&path).map_err(|error| failed(&path, "read", &error))?;
            journal.segments.insert(segment, bytes.len());
            for (key, at, bytes) in content.frames {
                journal.frames.insert(key, Place { segment, at, bytes });
            }
            damage.extend(content.damage);
        }
        Ok((journal, damage))
    }

    /// Fails when an earlier write failed: what is in memory would then be ahead of the disk for ever.
    pub(crate) fn ready(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Whether `mend` has something to do.
    pub(crate) fn broken(&self) -> bool {
        self.failure.is_some()
    }

    /// A sync has failed: until `mend` everything fails with this error, which is returned.
    pub(crate) fn not_synced(&mut self, error: &io::Error) -> Error {
        self.unsynced = true;
        self.fail("synced", error)
    }

    /// The first half of a repair, after which writes are possible again: what a failed one has left is cut off. Returns
    /// whether the second half, a `roll` of everything in the newest segment, is due.
    pub(crate) fn mend(&mut self) -> Result<bool> {
        if self.torn {
            let end = self.segments[&self.newest()];
            let cut = self.file.set_len(end);
            cut.map_err(|error| failed(&path_of(&self.folder, self.newest()), "cut", &error))?;
            self.torn = false;
        }
        self.failure = None;
        Ok(self.unsynced)
    }

    /// The second half of a repair has failed.
    pub(crate) fn stays_broken(&mut self, error: &Error) {
        self.failure.get_or_insert_with(|| error.clone());
    }

    fn fail(&mut self, what: &str, error: &io::Error) -> Error {
        let path = path_of(&self.folder, self.newest());
        self.failure
            .get_or_insert_with(|| failed(&path, what, error))
            .clone()
    }

    fn newest(&self) -> u64 {
        self.segments
            .last_key_value()
            .map_or(0, |(number, _)| *number)
    }

    /// Bytes of all segments.
    pub(crate) fn bytes(&self) -> u64 {
        self.segments.values().sum()
    }

    /// Whether frames wait for `commit`.
    pub(crate) fn begun(&self) -> bool {
        self.begun
    }

    /// Writes frames; they count from the next `commit` on.
    pub(crate) fn append(&mut self, key: Key, frames: &[&[u8]]) -> Result<()> {
        let (segment, at) = (self.newest(), self.write(key, frames)?);
        let bytes = self.segments[&segment] - at;
        self.frames.insert(key, Place { segment, at, bytes });
        self.begun = true;
        Ok(())
    }

    /// Ends the transaction with these events, if anything is in it. It has then outlived the process, and with the file
    /// that is returned once that is synced, a crash of the machine.
    pub(crate) fn commit(&mut self, events: &[u8]) -> Result<Arc<File>> {
        self.ready()?;
        if self.begun || !events.is_empty() {
            self.write(commit(Kind::Events, self.transaction + 1), &[events])?;
            self.transaction += 1;
            self.begun = false;
        }
        Ok(Arc::clone(&self.file))
    }

    fn write(&mut self, key: Key, frames: &[&[u8]]) -> Result<u64> {
        self.ready()?;
        let head = begin(key, frames);
        write_all(&self.file, &head, frames).map_err(|error| {
            self.torn = true;
            self.fail("written", &error)
        })?;
        let bytes = head.len() + frames.iter().map(|frame| frame.len()).sum::<usize>();
        let segment = self.newest();
        let end = self.segments.entry(segment).or_default();
        *end += bytes as u64;
        Ok(*end - bytes as u64)
    }

    /// Whether a new segment should begin.
    pub(crate) fn full(&self) -> bool {
        self.segments[&self.newest()] >= self.limit
    }

    /// Begins a segment with the snapshot, and forgets the frames that do not live. Everything must be committed.
    ///
    /// # Errors
    /// When the segment cannot be written; the old one then goes on, and is full again after as many bytes.
    pub(crate) fn roll(&mut self, snapshot: &[u8], lives: impl Fn(&Key) -> bool) -> Result<()> {
        self.ready()?;
        self.frames.retain(|key, _| lives(key));
        let (mut gone, segment) = (self.expendable(), self.newest() + 1);
        if self.unsynced {
            gone.insert(self.newest());
        }
        let moved: Vec<_> = self
            .frames
            .iter()
            .filter(|(_, place)| gone.contains(&place.segment))
            .map(|(key, place)| (*key, *place))
            .collect();
        let copies = moved.iter().map(|(_, place)| self.bytes_at(*place));
        let head = (commit(Kind::Snapshot, self.transaction), snapshot);
        let (file, bytes) = create(&self.folder, segment, copies, head).map_err(|error| {
            self.limit = self.segments[&self.newest()] + self.segment_bytes;
            failed(&path_of(&self.folder, segment), "written", &error)
        })?;
        self.file = Arc::new(file);
        self.segments.insert(segment, bytes);
        self.limit = bytes + self.segment_bytes.max(bytes);
        let mut at = 0;
        for (key, Place { bytes, .. }) in moved {
            self.frames.insert(key, Place { segment, at, bytes });
            at += bytes;
        }
        // Until the folder is on disk a crash of the machine may bring back the old state of it.
        sync_folder(&self.folder).map_err(|error| self.not_synced(&error))?;
        self.unsynced = false;
        for segment in gone {
            let _ = fs::remove_file(path_of(&self.folder, segment));
            self.segments.remove(&segment);
        }
        Ok(())
    }

    /// Segments to be given up: those without living frames, and while more than half is dead those with the least, up
    /// to the size of a segment.
    fn expendable(&self) -> BTreeSet<u64> {
        let mut living: BTreeMap<u64, u64> = self.segments.keys().map(|n| (*n, 0)).collect();
        for place in self.frames.values() {
            *living.entry(place.segment).or_default() += place.bytes;
        }
        let alive: u64 = living.values().sum();
        let (mut total, mut copied, mut gone) = (self.bytes(), 0, BTreeSet::new());
        let mut least: Vec<_> = living.into_iter().map(|(n, bytes)| (bytes, n)).collect();
        least.sort_unstable();
        for (bytes, segment) in least {
            let much = total > 2 * alive + 4 * self.segment_bytes;
            let fits = copied == 0 || copied + bytes <= self.segment_bytes;
            if bytes > 0 && !(much && fits) {
                break;
            }
            copied += bytes;
            total -= self.segments[&segment] - bytes;
            gone.insert(segment);
        }
        gone
    }

    /// The records of a task's frames of this kind and owner, by part from 0 on, until one is missing.
    pub(crate) fn read(&self, kind: Kind, ordinal: u64, owner: u64) -> Result<Vec<Vec<u8>>> {
        let key = |part| Key {
            ordinal,
            kind,
            owner,
            part,
        };
        let places = (0..).map_while(|part| self.frames.get(&key(part)));
        places
            .map(|place| {
                let path = path_of(&self.folder, place.segment);
                self.bytes_at(*place)
                    .map_err(|error| failed(&path, "read", &error))
            })
            .collect()
    }

    fn bytes_at(&self, place: Place) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; place.bytes as usize];
        File::open(path_of(&self.folder, place.segment))?.read_exact_at(&mut bytes, place.at)?;
        Ok(bytes)
    }
}

fn commit(kind: Kind, transaction: u64) -> Key {
    Key {
        ordinal: transaction,
        kind,
        owner: 0,
        part: 0,
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
