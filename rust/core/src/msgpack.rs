//! Reading msgpack field by field, without recursion: no length is trusted that was not compared with what is there.

use crate::error::{Error, Result};

/// Most entries of a map.
pub const MAX_KEYS: usize = 1024;

/// The bytes left to read. Every read names the field it is for.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
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

    pub(crate) fn take(&mut self, field: &str, length: u32) -> Result<&'a [u8]> {
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

    pub(crate) fn float(&mut self, field: &str) -> Result<f64> {
        rmp::decode::read_f64(&mut self.0).map_err(|_| bad(field, "a 64-bit float"))
    }

    pub(crate) fn nullable<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
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

    pub(crate) fn map<T>(
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

pub(crate) fn wire<T>(text: String) -> Result<T> {
    Err(Error::Wire(text))
}
