//! Reading a header field by field (`wire` says which): no length is trusted that was not compared with what is there.

use crate::error::{Error, Result};
use crate::trajectory::{
    Counts, Meta, Segment, SegmentKind, Span, TerminationKind, Trajectory, TurnReward, MAX_KEYS,
};
use crate::wire::{Place, ARRAYS, FIELDS, FORMAT, MAGIC, SEGMENT_FIELDS};

/// The rest of a header. Every read names the field it is for.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    /// Reads up to the checksum.
    pub(crate) fn open(&mut self) -> Result<()> {
        let foreign = || Error::Wire("header: not a trajectory of sao".into());
        let length = rmp::decode::read_map_len(&mut self.0).map_err(|_| foreign())?;
        self.key("magic").map_err(|_| foreign())?;
        if self.text("magic").map_err(|_| foreign())? != MAGIC {
            return Err(foreign());
        }
        self.key("format")?;
        let format = self.int("format")?;
        if u64::try_from(format) != Ok(FORMAT) {
            return wire(format!("format: {format}, this build reads {FORMAT}"));
        }
        if length != FIELDS {
            return wire(format!("header: {length} fields, expected {FIELDS}"));
        }
        self.key("crc32c")
    }

    pub(crate) fn crc(&mut self) -> Result<u32> {
        rmp::decode::read_u32(&mut self.0)
            .map_err(|_| Error::Wire("crc32c: not a 32-bit unsigned integer".into()))
    }

    pub(crate) fn fields(&mut self) -> Result<(Trajectory<'static>, Counts)> {
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
            fingerprints,
            timings_s,
            metadata,
            sidecars: Vec::new(),
        };
        Ok((trajectory, counts))
    }

    pub(crate) fn segment(
        &mut self,
        index: usize,
        end: usize,
    ) -> Result<(Segment<'static>, Place, [u32; 3])> {
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

    /// Goes past this name of a field, which is shorter than 32 bytes.
    #[allow(clippy::inline_always)] // so that the name is a constant to compare with
    #[inline(always)]
    pub(crate) fn key(&mut self, name: &str) -> Result<()> {
        if let [marker, rest @ ..] = self.0 {
            if usize::from(*marker) == 0xa0 | name.len() && rest.starts_with(name.as_bytes()) {
                self.0 = &rest[name.len()..];
                return Ok(());
            }
        }
        self.other_key(name)
    }

    /// As `key`, when the name is written in a longer way or is another.
    #[cold]
    fn other_key(&mut self, name: &str) -> Result<()> {
        match self.text(name) {
            Ok(found) if found == name => Ok(()),
            Ok(found) => wire(format!(
                "header: field {found:?} where {name:?} is expected"
            )),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn text(&mut self, field: &str) -> Result<&'a str> {
        let length = match self.0 {
            [marker @ 0xa0..=0xbf, rest @ ..] => {
                self.0 = rest;
                u32::from(marker & 0x1f)
            }
            _ => rmp::decode::read_str_len(&mut self.0).map_err(|_| bad(field, "text"))?,
        };
        let bytes = self.take(field, length)?;
        std::str::from_utf8(bytes).map_err(|_| bad(field, "UTF-8 text"))
    }

    fn id(&mut self) -> Result<[u8; 16]> {
        let length = rmp::decode::read_bin_len(&mut self.0).map_err(|_| bad("id", "16 bytes"))?;
        let bytes = self.take("id", length)?;
        bytes.try_into().map_err(|_| bad("id", "16 bytes"))
    }

    fn take(&mut self, field: &str, length: u32) -> Result<&'a [u8]> {
        match self.0.split_at_checked(length as usize) {
            Some((bytes, rest)) => {
                self.0 = rest;
                Ok(bytes)
            }
            None => wire(format!(
                "{field}: announces {length} bytes, {} are left in the header",
                self.0.len()
            )),
        }
    }

    pub(crate) fn int(&mut self, field: &str) -> Result<i64> {
        if let [small @ 0..=0x7f, rest @ ..] = self.0 {
            self.0 = rest;
            return Ok(i64::from(*small));
        }
        rmp::decode::read_int(&mut self.0).map_err(|_| bad(field, "a 64-bit integer"))
    }

    pub(crate) fn size(&mut self, field: &str) -> Result<usize> {
        if let [small @ 0..=0x7f, rest @ ..] = self.0 {
            self.0 = rest;
            return Ok(usize::from(*small));
        }
        rmp::decode::read_int(&mut self.0).map_err(|_| bad(field, "a size"))
    }

    fn float(&mut self, field: &str) -> Result<f64> {
        rmp::decode::read_f64(&mut self.0).map_err(|_| bad(field, "a 64-bit float"))
    }

    fn nullable<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.0.first() == Some(&0xc0) {
            self.0 = &self.0[1..];
            return Ok(None);
        }
        read(self).map(Some)
    }

    pub(crate) fn any_array(&mut self, field: &str) -> Result<usize> {
        let length =
            rmp::decode::read_array_len(&mut self.0).map_err(|_| bad(field, "an array"))? as usize;
        if length > self.0.len() {
            return wire(format!(
                "{field}: announces {length} entries, {} bytes are left in the header",
                self.0.len()
            ));
        }
        Ok(length)
    }

    pub(crate) fn array(&mut self, field: &str, length: usize) -> Result<()> {
        match self.any_array(field)? {
            found if found == length => Ok(()),
            found => wire(format!("{field}: {found} entries, expected {length}")),
        }
    }

    fn map<T>(
        &mut self,
        field: &str,
        mut entry: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let length =
            rmp::decode::read_map_len(&mut self.0).map_err(|_| bad(field, "a map"))? as usize;
        if length > MAX_KEYS {
            return wire(format!(
                "{field}: announces {length} entries, at most {MAX_KEYS}"
            ));
        }
        (0..length).map(|_| entry(self)).collect()
    }
}

pub(crate) fn bad(field: &str, expected: &str) -> Error {
    Error::Wire(format!("{field}: missing, cut short or not {expected}"))
}

fn wire<T>(text: String) -> Result<T> {
    Err(Error::Wire(text))
}
