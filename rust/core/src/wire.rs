//! Trajectories as bytes: a msgpack header and one payload blob (`docs/reference/wire.md` is the format).
//!
//! The schema is fixed, so reading needs no recursion, and no length is trusted that was not compared with what is there.

use rmp::encode as put;

use crate::checksum::crc32c;
use crate::error::{Error, Result};
use crate::layout::{layout, Place};
use crate::msgpack::{bad, wire, Reader};
use crate::rules::sealed;
use crate::sidecar::{self, Sidecar, MAX_SIDECARS};
use crate::trajectory::{
    After, Counts, Meta, Segment, SegmentKind, Span, TerminationKind, Trajectory, TurnReward,
};

/// First value of every header.
pub const MAGIC: &str = "sao-trajectory";
/// The format of a trajectory whose segments go on in order.
pub const FORMAT: u64 = 1;
/// The format of one that says what is sampled after each: it has the field `after`.
pub const FORMAT_AFTER: u64 = 2;
/// Longest header, bytes.
pub const MAX_HEADER_BYTES: usize = 1 << 20;
/// Longest payload unless the caller says otherwise, bytes.
pub const DEFAULT_MAX_BYTES: usize = 1 << 28;
/// Most segments unless the caller says otherwise.
pub const DEFAULT_MAX_SEGMENTS: usize = 4096;

const FIELDS: u32 = 18;
const SEGMENT_FIELDS: u32 = 6;

/// The limits of a decoder.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Longest payload, bytes.
    pub max_bytes: usize,
    /// Most segments.
    pub max_segments: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_bytes: DEFAULT_MAX_BYTES,
            max_segments: DEFAULT_MAX_SEGMENTS,
        }
    }
}

/// The summary that a header alone gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// 128-bit id.
    pub id: [u8; 16],
    /// Number of the task.
    pub task_ordinal: i64,
    /// Number of the try.
    pub attempt: i64,
    /// Name of the environment.
    pub env: String,
    /// Tokens, sampled tokens and their oldest and newest version.
    pub counts: Counts,
    /// Number of segments.
    pub n_segments: usize,
    /// How it ended.
    pub termination: TerminationKind,
    /// Why; empty when finished.
    pub reason: String,
    /// Reward, `None` when failed.
    pub reward: Option<f64>,
    /// Fingerprints of the weights that sampled, by policy version.
    pub fingerprints: Vec<(i64, String)>,
    /// Length of the payload, bytes.
    pub payload_bytes: usize,
    /// Names of the sidecars and their lengths, bytes.
    pub sidecars: Vec<(String, usize)>,
}

/// Checks and encodes; returns (header, payload).
///
/// # Errors
/// `Error::Validation` when a rule of the trajectory is broken or the header would exceed `MAX_HEADER_BYTES`.
pub fn encode(trajectory: &Trajectory) -> Result<(Vec<u8>, Vec<u8>)> {
    let (places, bytes) = layout(trajectory.segments.iter().map(|s| s.action_mask.len()))?;
    let mut payload = vec![0; bytes];
    let header = encode_into(trajectory, &places, &mut payload)?;
    Ok((header, payload))
}

/// As `encode`, into a payload of exactly the length that `layout` gave; every byte of it is written.
///
/// # Errors
/// As `encode`.
pub fn encode_into(
    trajectory: &Trajectory,
    places: &[Place],
    payload: &mut [u8],
) -> Result<Vec<u8>> {
    let (header, _) = header(trajectory, places, payload.len())?;
    fill(trajectory, places, payload);
    Ok(header)
}

/// Checks everything and gives the header alone, and what it counts; `fill` writes the payload that belongs to it.
///
/// # Errors
/// As `encode`.
pub fn header(
    trajectory: &Trajectory,
    places: &[Place],
    payload_bytes: usize,
) -> Result<(Vec<u8>, Counts)> {
    let (counts, crcs) = trajectory.check_sealed()?;
    let header = write_header(trajectory, counts, places, &crcs, payload_bytes)?;
    Ok((header, counts))
}

/// Writes every byte of the payload of a trajectory; its length and `places` are those that `layout` gave.
pub fn fill(trajectory: &Trajectory, places: &[Place], payload: &mut [u8]) {
    let mut end = 0;
    for (segment, place) in trajectory.segments.iter().zip(places) {
        for (offset, array) in place.offsets.into_iter().zip(arrays(segment)) {
            payload[end..offset].fill(0);
            end = offset + array.len();
            payload[offset..end].copy_from_slice(array);
        }
    }
}

fn arrays<'a>(segment: &Segment<'a>) -> [&'a [u8]; 3] {
    [segment.token_ids, segment.logprobs, segment.action_mask]
}

fn write_header(
    t: &Trajectory,
    counts: Counts,
    places: &[Place],
    crcs: &[[u32; 3]],
    payload_bytes: usize,
) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(512);
    let done = put_header(&mut out, t, counts, places, crcs, payload_bytes);
    if done.is_err() || out.len() > MAX_HEADER_BYTES {
        return Err(Error::Validation(format!(
            "header: {} bytes of metadata, timings_s, version spans and the rest, at most {MAX_HEADER_BYTES}",
            out.len()
        )));
    }
    let mut reader = Reader(&out);
    let found = reader.open().map(|_| out.len() - reader.0.len() + 1);
    let at = found.unwrap_or(0); // never: the header was just written
    let crc = header_crc(&out, at);
    out[at..at + 4].copy_from_slice(&crc.to_be_bytes());
    Ok(out)
}

/// The checksum of a header: it covers every byte but the four at `at`, its own.
fn header_crc(header: &[u8], at: usize) -> u32 {
    crc32c(&[&header[..at], &header[at + 4..]])
}

type Put = std::result::Result<(), put::ValueWriteError>;

fn put_header(
    out: &mut Vec<u8>,
    t: &Trajectory,
    counts: Counts,
    places: &[Place],
    crcs: &[[u32; 3]],
    payload_bytes: usize,
) -> Put {
    let more = !t.after.is_empty();
    put::write_map_len(out, FIELDS + u32::from(more))?;
    put::write_str(out, "magic")?;
    put::write_str(out, MAGIC)?;
    put::write_str(out, "format")?;
    put::write_uint(out, if more { FORMAT_AFTER } else { FORMAT })?;
    put::write_str(out, "crc32c")?;
    put::write_u32(out, 0)?; // filled in when the rest is known
    put::write_str(out, "payload_bytes")?;
    put::write_uint(out, payload_bytes as u64)?;
    put::write_str(out, "id")?;
    put::write_bin(out, &t.id)?;
    put::write_str(out, "task_ordinal")?;
    put::write_sint(out, t.task_ordinal)?;
    put::write_str(out, "attempt")?;
    put::write_sint(out, t.attempt)?;
    put::write_str(out, "env")?;
    put::write_str(out, &t.env)?;
    put::write_str(out, "counts")?;
    put::write_array_len(out, 4)?;
    put::write_uint(out, counts.tokens as u64)?;
    put::write_uint(out, counts.actions as u64)?;
    put_version(out, counts.min_version)?;
    put_version(out, counts.max_version)?;
    put::write_str(out, "termination")?;
    put::write_array_len(out, 2)?;
    put::write_str(out, t.termination.name())?;
    put::write_str(out, &t.reason)?;
    put::write_str(out, "reward")?;
    match t.reward {
        Some(reward) => put::write_f64(out, reward)?,
        None => put_nil(out)?,
    }
    put::write_str(out, "temperature")?;
    put::write_f64(out, t.temperature)?;
    put::write_str(out, "turn_rewards")?;
    put::write_array_len(out, t.turn_rewards.len() as u32)?;
    for turn in &t.turn_rewards {
        put::write_array_len(out, 3)?;
        put::write_sint(out, turn.segment)?;
        put::write_sint(out, turn.position)?;
        put::write_f64(out, turn.reward)?;
    }
    if more {
        put::write_str(out, "after")?;
        put::write_array_len(out, t.after.len() as u32)?;
        for after in &t.after {
            put::write_array_len(out, 2)?;
            put::write_sint(out, after.actions)?;
            put::write_sint(out, after.next)?;
        }
    }
    put::write_str(out, "fingerprints")?;
    put::write_map_len(out, t.fingerprints.len() as u32)?;
    for (version, text) in &t.fingerprints {
        put::write_sint(out, *version)?;
        put::write_str(out, text)?;
    }
    put::write_str(out, "timings_s")?;
    put::write_map_len(out, t.timings_s.len() as u32)?;
    for (name, value) in &t.timings_s {
        put::write_str(out, name)?;
        put::write_f64(out, *value)?;
    }
    put::write_str(out, "metadata")?;
    put::write_map_len(out, t.metadata.len() as u32)?;
    for (name, value) in &t.metadata {
        put::write_str(out, name)?;
        match value {
            Meta::Null => put_nil(out)?,
            Meta::Bool(flag) => {
                put::write_bool(out, *flag).map_err(put::ValueWriteError::InvalidDataWrite)?;
            }
            Meta::Int(number) => put::write_sint(out, *number).map(drop)?,
            Meta::Float(number) => put::write_f64(out, *number)?,
            Meta::Text(text) => put::write_str(out, text)?,
        }
    }
    put::write_str(out, "sidecars")?;
    put_sidecars(out, &t.sidecars)?;
    put::write_str(out, "segments")?;
    put::write_array_len(out, t.segments.len() as u32)?;
    for ((segment, place), crcs) in t.segments.iter().zip(places).zip(crcs) {
        put_segment(out, segment, *place, *crcs)?;
    }
    Ok(())
}

fn put_segment(out: &mut Vec<u8>, segment: &Segment, place: Place, crcs: [u32; 3]) -> Put {
    put::write_map_len(out, SEGMENT_FIELDS)?;
    put::write_str(out, "kind")?;
    put::write_str(out, segment.kind.name())?;
    put::write_str(out, "n_tokens")?;
    put::write_uint(out, place.tokens as u64)?;
    let sizes = place.sizes();
    for (column, name) in ARRAYS.iter().enumerate() {
        put::write_str(out, name)?;
        put::write_array_len(out, 3)?;
        put::write_uint(out, place.offsets[column] as u64)?;
        put::write_uint(out, sizes[column] as u64)?;
        put::write_uint(out, u64::from(crcs[column]))?;
    }
    put::write_str(out, "version_spans")?;
    put::write_array_len(out, segment.version_spans.len() as u32)?;
    for span in &segment.version_spans {
        put::write_array_len(out, 3)?;
        put::write_sint(out, span.start)?;
        put::write_sint(out, span.stop)?;
        put::write_sint(out, span.version)?;
    }
    Ok(())
}

/// Writes the array of `[name, dtype, shape, bytes, crc32c]`.
fn put_sidecars(
    out: &mut Vec<u8>,
    sidecars: &[Sidecar<'_>],
) -> std::result::Result<(), put::ValueWriteError> {
    put::write_array_len(out, sidecars.len() as u32)?;
    for sidecar in sidecars {
        put::write_array_len(out, 5)?;
        put::write_str(out, &sidecar.name)?;
        put::write_str(out, &sidecar.dtype)?;
        put::write_array_len(out, sidecar.shape.len() as u32)?;
        for dimension in &sidecar.shape {
            put::write_uint(out, *dimension)?;
        }
        put::write_uint(out, sidecar.bytes.len() as u64)?;
        put::write_uint(out, u64::from(crc32c(&[sidecar.bytes])))?;
    }
    Ok(())
}

const ARRAYS: [&str; 3] = ["token_ids", "logprobs", "action_mask"];

fn put_nil(out: &mut Vec<u8>) -> Put {
    put::write_nil(out).map_err(put::ValueWriteError::InvalidMarkerWrite)
}

fn put_version(out: &mut Vec<u8>, version: Option<i64>) -> Put {
    match version {
        Some(version) => put::write_sint(out, version).map(drop),
        None => put_nil(out),
    }
}

/// A sidecar as the header announces it.
#[derive(Debug, Clone, PartialEq)]
struct Announced {
    bytes: usize,
    crc: u32,
}

/// A header, checked against its own checksum and schema but not against a payload.
struct Header {
    counts: Counts,
    payload_bytes: usize,
    places: Vec<Place>,
    crcs: Vec<[u32; 3]>,
    /// Of the trajectory's sidecars.
    announced: Vec<Announced>,
    trajectory: Trajectory<'static>,
}

/// Reads a header alone.
///
/// # Errors
/// `Error::Wire` when it is corrupt, truncated, too long, of another format or not ours.
pub fn summary(header: &[u8], limits: Limits) -> Result<Summary> {
    let read = read_header(header, limits)?;
    let t = read.trajectory;
    Ok(Summary {
        id: t.id,
        task_ordinal: t.task_ordinal,
        attempt: t.attempt,
        env: t.env,
        counts: read.counts,
        n_segments: read.places.len(),
        termination: t.termination,
        reason: t.reason,
        reward: t.reward,
        fingerprints: t.fingerprints,
        payload_bytes: read.payload_bytes,
        sidecars: t
            .sidecars
            .into_iter()
            .zip(&read.announced)
            .map(|(sidecar, expected)| (sidecar.name, expected.bytes))
            .collect(),
    })
}

/// Reads and checks everything; the arrays of the result are slices of `payload`, at the returned places.
///
/// # Errors
/// `Error::Wire` when anything is corrupt, truncated, too long, of another format, not ours or breaks a rule.
pub fn decode<'a>(
    header: &[u8],
    payload: &'a [u8],
    limits: Limits,
) -> Result<(Trajectory<'a>, Vec<Place>)> {
    decode_with(header, payload, &[], limits)
}

/// As `decode`, with the frames of the sidecars in the order of the header.
///
/// # Errors
/// As `decode`; also when they are not those that the header announces.
pub fn decode_with<'a>(
    header: &[u8],
    payload: &'a [u8],
    sidecars: &[&'a [u8]],
    limits: Limits,
) -> Result<(Trajectory<'a>, Vec<Place>)> {
    let read = read_header(header, limits)?;
    if payload.len() != read.payload_bytes {
        return wire(format!(
            "payload: {} bytes, the header announces {}",
            payload.len(),
            read.payload_bytes
        ));
    }
    let (mut trajectory, mut end) = (read.trajectory, 0);
    let named = std::mem::take(&mut trajectory.sidecars);
    let sidecars = attach(named, &read.announced, sidecars)?;
    let drafts = std::mem::take(&mut trajectory.segments);
    let mut segments = Vec::with_capacity(drafts.len());
    let mut kept = Vec::with_capacity(drafts.len());
    for (index, (draft, place)) in drafts.into_iter().zip(&read.places).enumerate() {
        let sizes = place.sizes();
        let view = |column: usize| -> &'a [u8] {
            let offset = place.offsets[column];
            &payload[offset..offset + sizes[column]]
        };
        let views = [view(0), view(1), view(2)];
        let (found, rules) = sealed(views[0], views[1], views[2]);
        for (column, offset) in place.offsets.into_iter().enumerate() {
            if payload[end..offset].iter().any(|byte| *byte != 0) {
                return wire(format!("payload[{end}:{offset}]: padding is not zero"));
            }
            end = offset + sizes[column];
            let (found, expected) = (found[column], read.crcs[index][column]);
            if found != expected {
                return wire(format!(
                    "segments[{index}].{}: crc32c {found:#010x}, the header announces {expected:#010x}",
                    ARRAYS[column]
                ));
            }
        }
        kept.push(rules);
        segments.push(Segment {
            kind: draft.kind,
            token_ids: views[0],
            logprobs: views[1],
            action_mask: views[2],
            version_spans: draft.version_spans,
        });
    }
    let trajectory = Trajectory {
        segments,
        sidecars,
        ..trajectory
    };
    let counts = trajectory
        .check_rest(&kept)
        .map_err(|error| Error::Wire(error.to_string()))?;
    if counts != read.counts {
        return wire(format!(
            "counts: the header announces {:?}, the arrays hold {counts:?}",
            read.counts
        ));
    }
    Ok((trajectory, read.places))
}

/// Compares the frames with what the header announced and puts them into the sidecars.
fn attach<'a>(
    sidecars: Vec<Sidecar<'static>>,
    announced: &[Announced],
    frames: &[&'a [u8]],
) -> Result<Vec<Sidecar<'a>>> {
    if frames.len() != sidecars.len() {
        return Err(Error::Wire(format!(
            "sidecars: {} frames, the header announces {}",
            frames.len(),
            sidecars.len()
        )));
    }
    let mut attached = Vec::with_capacity(sidecars.len());
    for ((sidecar, expected), frame) in sidecars.into_iter().zip(announced).zip(frames) {
        let name = &sidecar.name;
        if frame.len() != expected.bytes {
            return Err(Error::Wire(format!(
                "sidecars[{name:?}]: {} bytes, the header announces {}",
                frame.len(),
                expected.bytes
            )));
        }
        let found = crc32c(&[frame]);
        if found != expected.crc {
            return Err(Error::Wire(format!(
                "sidecars[{name:?}]: crc32c {found:#010x}, the header announces {:#010x}",
                expected.crc
            )));
        }
        attached.push(Sidecar {
            bytes: frame,
            ..sidecar
        });
    }
    Ok(attached)
}

fn read_header(header: &[u8], limits: Limits) -> Result<Header> {
    if header.len() > MAX_HEADER_BYTES {
        return wire(format!(
            "header: {} bytes, at most {MAX_HEADER_BYTES}",
            header.len()
        ));
    }
    let mut reader = Reader(header);
    let format = reader.open()?;
    let at = header.len() - reader.0.len() + 1; // behind the marker of the number
    let expected = reader.crc()?;
    if header_crc(header, at) != expected {
        return wire(format!(
            "header: crc32c does not match the announced {expected:#010x}"
        ));
    }
    reader.key("payload_bytes")?;
    let payload_bytes = reader.size("payload_bytes")?;
    if payload_bytes > limits.max_bytes {
        return wire(format!(
            "payload_bytes: {payload_bytes}, at most {} are accepted",
            limits.max_bytes
        ));
    }
    let mut trajectory = reader.fields(format)?;
    let counts = trajectory.1;
    let announced;
    (trajectory.0.sidecars, announced) = reader.sidecars(limits.max_bytes - payload_bytes)?;
    reader.key("segments")?;
    let n_segments = reader.any_array("segments")?;
    if n_segments > limits.max_segments {
        return wire(format!(
            "segments: {n_segments}, at most {} are accepted",
            limits.max_segments
        ));
    }
    let (mut places, mut crcs, mut end) = (Vec::new(), Vec::new(), 0);
    for index in 0..n_segments {
        let (segment, place, crc) = reader.segment(index, end)?;
        end = place.end();
        if end > payload_bytes {
            return wire(format!(
                "segments[{index}]: its arrays end at byte {end}, payload_bytes is {payload_bytes}"
            ));
        }
        trajectory.0.segments.push(segment);
        places.push(place);
        crcs.push(crc);
    }
    if end != payload_bytes {
        return wire(format!(
            "payload_bytes: {payload_bytes}, the arrays end at byte {end}"
        ));
    }
    if !reader.0.is_empty() {
        return wire(format!("header: {} bytes after its end", reader.0.len()));
    }
    Ok(Header {
        counts,
        payload_bytes,
        places,
        crcs,
        announced,
        trajectory: trajectory.0,
    })
}

impl Reader<'_> {
    /// Reads up to the checksum; gives the format.
    fn open(&mut self) -> Result<u64> {
        let foreign = || Error::Wire("header: not a trajectory of sao".into());
        let length = rmp::decode::read_map_len(&mut self.0).map_err(|_| foreign())?;
        self.key("magic").map_err(|_| foreign())?;
        if self.text("magic").map_err(|_| foreign())? != MAGIC {
            return Err(foreign());
        }
        self.key("format")?;
        let format = self.int("format")?;
        let (format, fields) = match u64::try_from(format) {
            Ok(FORMAT) => (FORMAT, FIELDS),
            Ok(FORMAT_AFTER) => (FORMAT_AFTER, FIELDS + 1),
            _ => {
                return wire(format!(
                    "format: {format}, this build reads {FORMAT} and {FORMAT_AFTER}"
                ))
            }
        };
        if length != fields {
            return wire(format!("header: {length} fields, expected {fields}"));
        }
        self.key("crc32c")?;
        Ok(format)
    }

    fn crc(&mut self) -> Result<u32> {
        rmp::decode::read_u32(&mut self.0)
            .map_err(|_| Error::Wire("crc32c: not a 32-bit unsigned integer".into()))
    }

    fn fields(&mut self, format: u64) -> Result<(Trajectory<'static>, Counts)> {
        self.key("id")?;
        let id = self.id()?;
        self.key("task_ordinal")?;
        let task_ordinal = self.int("task_ordinal")?;
        self.key("attempt")?;
        let attempt = self.int("attempt")?;
        self.key("env")?;
        let env = self.text("env")?.to_owned();
        self.key("counts")?;
        self.array("counts", 4)?;
        let counts = Counts {
            tokens: self.size("counts[0]")?,
            actions: self.size("counts[1]")?,
            min_version: self.nullable(|r| r.int("counts[2]"))?,
            max_version: self.nullable(|r| r.int("counts[3]"))?,
        };
        self.key("termination")?;
        self.array("termination", 2)?;
        let kind = self.text("termination[0]")?;
        let Some(termination) = TerminationKind::parse(kind) else {
            return wire(format!("termination[0]: unknown kind {kind:?}"));
        };
        let reason = self.text("termination[1]")?.to_owned();
        self.key("reward")?;
        let reward = self.nullable(|r| r.float("reward"))?;
        self.key("temperature")?;
        let temperature = self.float("temperature")?;
        self.key("turn_rewards")?;
        let mut turn_rewards = Vec::new();
        for _ in 0..self.any_array("turn_rewards")? {
            self.array("turn_rewards", 3)?;
            turn_rewards.push(TurnReward {
                segment: self.int("turn_rewards")?,
                position: self.int("turn_rewards")?,
                reward: self.float("turn_rewards")?,
            });
        }
        let mut after = Vec::new();
        if format == FORMAT_AFTER {
            self.key("after")?;
            for _ in 0..self.any_array("after")? {
                self.array("after", 2)?;
                after.push(After {
                    actions: self.int("after")?,
                    next: self.int("after")?,
                });
            }
            if after.is_empty() {
                return wire("after: empty; format 2 is for trajectories that have it".into());
            }
        }
        self.key("fingerprints")?;
        let fingerprints = self.map("fingerprints", |r| {
            Ok((r.int("fingerprints")?, r.text("fingerprints")?.to_owned()))
        })?;
        self.key("timings_s")?;
        let timings_s = self.map("timings_s", |r| {
            Ok((r.text("timings_s")?.to_owned(), r.float("timings_s")?))
        })?;
        self.key("metadata")?;
        let metadata = self.map("metadata", |r| {
            Ok((r.text("metadata")?.to_owned(), r.meta()?))
        })?;
        let trajectory = Trajectory {
            id,
            task_ordinal,
            attempt,
            env,
            segments: Vec::new(),
            reward,
            termination,
            reason,
            temperature,
            turn_rewards,
            after,
            fingerprints,
            timings_s,
            metadata,
            sidecars: Vec::new(),
        };
        Ok((trajectory, counts))
    }

    fn segment(&mut self, index: usize, end: usize) -> Result<(Segment<'static>, Place, [u32; 3])> {
        let field = |name: &str| format!("segments[{index}].{name}");
        match rmp::decode::read_map_len(&mut self.0) {
            Ok(SEGMENT_FIELDS) => {}
            _ => {
                return wire(format!(
                    "segments[{index}]: not a map of {SEGMENT_FIELDS} fields"
                ))
            }
        }
        self.key("kind")?;
        let name = self.text("kind")?;
        let Some(kind) = SegmentKind::parse(name) else {
            return wire(format!("{}: unknown kind {name:?}", field("kind")));
        };
        self.key("n_tokens")?;
        let tokens = self.size("n_tokens")?;
        let Some(place) = Place::after(end, tokens) else {
            return wire(format!("{}: {tokens} is too large", field("n_tokens")));
        };
        let mut crcs = [0; 3];
        for column in 0..3 {
            self.key(ARRAYS[column])?;
            self.array(ARRAYS[column], 3)?;
            let (offset, bytes) = (self.size(ARRAYS[column])?, self.size(ARRAYS[column])?);
            let (right_offset, right_bytes) = (place.offsets[column], place.sizes()[column]);
            if (offset, bytes) != (right_offset, right_bytes) {
                return wire(format!(
                    "{}: {bytes} bytes at {offset}, expected {right_bytes} at {right_offset} for {tokens} tokens",
                    field(ARRAYS[column])
                ));
            }
            let crc = self.int(ARRAYS[column])?;
            crcs[column] = u32::try_from(crc).map_err(|_| {
                Error::Wire(format!("{}: {crc} is not a crc32c", field(ARRAYS[column])))
            })?;
        }
        self.key("version_spans")?;
        let mut version_spans = Vec::new();
        for _ in 0..self.any_array("version_spans")? {
            self.array("version_spans", 3)?;
            version_spans.push(Span {
                start: self.int("version_spans")?,
                stop: self.int("version_spans")?,
                version: self.int("version_spans")?,
            });
        }
        let segment = Segment {
            kind,
            token_ids: &[],
            logprobs: &[],
            action_mask: &[],
            version_spans,
        };
        Ok((segment, place, crcs))
    }

    /// Of at most `room` bytes together.
    fn sidecars(&mut self, mut room: usize) -> Result<(Vec<Sidecar<'static>>, Vec<Announced>)> {
        self.key("sidecars")?;
        let count = self.any_array("sidecars")?;
        if count > MAX_SIDECARS {
            return wire(format!("sidecars: {count}, at most {MAX_SIDECARS}"));
        }
        let (mut sidecars, mut announced) = (Vec::new(), Vec::new());
        for _ in 0..count {
            self.array("sidecars", 5)?;
            let (name, dtype) = (
                self.text("sidecars")?.to_owned(),
                self.text("sidecars")?.to_owned(),
            );
            let mut shape = Vec::new();
            for _ in 0..self.any_array("sidecars")? {
                shape.push(self.size("sidecars")? as u64);
            }
            let bytes = self.size("sidecars")?;
            let crc =
                u32::try_from(self.int("sidecars")?).map_err(|_| bad("sidecars", "a crc32c"))?;
            let Some(left) = room.checked_sub(bytes) else {
                return wire(format!(
                    "sidecars[{name:?}]: {bytes} bytes, {room} more are accepted"
                ));
            };
            room = left;
            sidecars.push(Sidecar {
                name,
                dtype,
                shape,
                bytes: &[],
            });
            announced.push(Announced { bytes, crc });
        }
        sidecar::check(&sidecars, |index| announced[index].bytes)
            .map_err(|error| Error::Wire(error.to_string()))?;
        Ok((sidecars, announced))
    }

    fn meta(&mut self) -> Result<Meta> {
        use rmp::Marker as M;
        let marker = self.0.first().map(|byte| M::from_u8(*byte));
        Ok(match marker {
            Some(M::Null) => self.skip(Meta::Null),
            Some(M::True) => self.skip(Meta::Bool(true)),
            Some(M::False) => self.skip(Meta::Bool(false)),
            Some(M::F64) => Meta::Float(self.float("metadata")?),
            Some(M::FixStr(_) | M::Str8 | M::Str16 | M::Str32) => {
                Meta::Text(self.text("metadata")?.to_owned())
            }
            _ => Meta::Int(self.int("metadata")?),
        })
    }

    fn skip(&mut self, value: Meta) -> Meta {
        self.0 = &self.0[1..];
        value
    }

    fn id(&mut self) -> Result<[u8; 16]> {
        let length = rmp::decode::read_bin_len(&mut self.0).map_err(|_| bad("id", "16 bytes"))?;
        let bytes = self.take("id", length)?;
        bytes.try_into().map_err(|_| bad("id", "16 bytes"))
    }
}
