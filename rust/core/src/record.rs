//! The records of a journal: a fixed head, then frames.
//!
//! Head, little endian: `SAO`, u8 kind, u32 part, u64 ordinal, u64 owner, u64 bytes of the body, u32 number of frames,
//! u32 CRC-32C of the body, u32 CRC-32C of the head before it. Body: the length of each frame (u64), then the frames.

use crc_fast::{checksum, CrcAlgorithm::Crc32Iscsi, Digest};

/// Bytes of a head.
pub(crate) const HEAD_BYTES: usize = 44;
const MAGIC: &[u8] = b"SAO";
const CHECKED_BYTES: usize = HEAD_BYTES - 4;

/// The kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The books as a whole; begins a segment.
    Snapshot = 1,
    /// The events of a transaction, which they commit; what was written since the last one is part of it.
    Events = 2,
    /// A finished trajectory.
    Trajectory = 3,
    /// One turn of a rollout that runs.
    Turn = 4,
}

impl Kind {
    /// Whether a transaction ends with it.
    pub(crate) fn commits(self) -> bool {
        self <= Self::Events
    }
}

/// The place of a record in the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Its task; of one that commits, the number of the transaction.
    pub(crate) ordinal: u64,
    pub(crate) kind: Kind,
    /// The attempt of a trajectory, the number of a turn's rollout.
    pub(crate) owner: u64,
    /// Number of the turn.
    pub(crate) part: u32,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (ordinal, owner, part) = (self.ordinal, self.owner, self.part);
        match self.kind {
            Kind::Trajectory => write!(f, "trajectory of task {ordinal} attempt {owner}"),
            Kind::Turn => write!(f, "turn {part} of task {ordinal}"),
            _ => write!(f, "transaction {ordinal}"),
        }
    }
}

#[derive(Clone, Copy)]
struct Head {
    key: Key,
    length: u64,
    frames: u32,
    crc: u32,
}

impl Head {
    fn bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.push(self.key.kind as u8);
        out.extend(self.key.part.to_le_bytes());
        for number in [self.key.ordinal, self.key.owner, self.length] {
            out.extend(number.to_le_bytes());
        }
        out.extend(self.frames.to_le_bytes());
        out.extend(self.crc.to_le_bytes());
        out.extend((checksum(Crc32Iscsi, &out) as u32).to_le_bytes());
        out
    }

    /// The head at the beginning of `data`, if a whole one is there.
    fn parse(data: &[u8]) -> Option<Self> {
        let head = data.get(..HEAD_BYTES).filter(|d| d.starts_with(MAGIC))?;
        let (short, long) = (
            |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap_or_default()),
            |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap_or_default()),
        );
        if checksum(Crc32Iscsi, &head[..CHECKED_BYTES]) as u32 != short(CHECKED_BYTES) {
            return None;
        }
        let kinds = [Kind::Snapshot, Kind::Events, Kind::Trajectory, Kind::Turn];
        let key = Key {
            kind: *kinds.iter().find(|kind| **kind as u8 == head[3])?,
            part: short(4),
            ordinal: long(8),
            owner: long(16),
        };
        Some(Self {
            key,
            length: long(24),
            frames: short(32),
            crc: short(36),
        })
    }
}

/// The start of a record, before its frames: its head and their lengths.
pub(crate) fn begin(key: Key, frames: &[&[u8]]) -> Vec<u8> {
    let table: Vec<u8> = frames
        .iter()
        .flat_map(|frame| (frame.len() as u64).to_le_bytes())
        .collect();
    let mut crc = Digest::new(Crc32Iscsi);
    crc.update(&table);
    for frame in frames {
        crc.update(frame);
    }
    let bytes: usize = frames.iter().map(|frame| frame.len()).sum();
    let head = Head {
        key,
        length: (table.len() + bytes) as u64,
        frames: frames.len() as u32,
        crc: crc.finalize() as u32,
    };
    [head.bytes(), table].concat()
}

/// A place in a segment where a record should be.
pub(crate) struct Record<'a> {
    /// Where it begins.
    pub(crate) at: usize,
    /// Where the next one begins.
    pub(crate) end: usize,
    /// None when there is no whole head.
    pub(crate) key: Option<Key>,
    /// None when the body is not whole.
    pub(crate) frames: Option<Vec<&'a [u8]>>,
}

/// The records of a segment's bytes, one behind the other. Where no head is the next one is looked for.
pub(crate) fn records(data: &[u8]) -> impl Iterator<Item = Record<'_>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let (rest, start) = (data.get(at..).filter(|rest| !rest.is_empty())?, at);
        let head = Head::parse(rest);
        let body = head.and_then(|head| {
            let length = usize::try_from(head.length).ok()?;
            rest[HEAD_BYTES..].get(..length)
        });
        at = match (&head, body) {
            (Some(_), Some(body)) => start + HEAD_BYTES + body.len(),
            (Some(_), None) => data.len(),
            (None, _) => (start + 1..data.len())
                .find(|next| Head::parse(&data[*next..]).is_some())
                .unwrap_or(data.len()),
        };
        Some(Record {
            at: start,
            end: at,
            key: head.map(|head| head.key),
            frames: head.zip(body).and_then(|(head, body)| frames(head, body)),
        })
    })
}

fn frames(head: Head, body: &[u8]) -> Option<Vec<&[u8]>> {
    if checksum(Crc32Iscsi, body) as u32 != head.crc {
        return None;
    }
    let (table, mut rest) = body.split_at_checked((head.frames as usize).checked_mul(8)?)?;
    let mut frames = Vec::with_capacity(head.frames as usize);
    for length in table.as_chunks().0 {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (frame, behind) = rest.split_at_checked(length)?;
        frames.push(frame);
        rest = behind;
    }
    rest.is_empty().then_some(frames)
}
