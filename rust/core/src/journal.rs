//! An append-only file of checksummed records that survives a torn tail.
//!
//! File: 8 bytes magic, u32 format (1, or 2 once it was compacted), u32 crc32c of those 12; then records of u32 length, u32 crc32c over length and
//! payload, payload (little endian). Bytes at the end that hold no whole record are what a crash left of the last write
//! and are cut off; a bad record with a whole one behind it is damage and refused.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checksum::crc32c;
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"SAOLEDGR";
/// Of a file that holds every event from the beginning, and of one that begins with a picture of the state.
const FORMATS: [u32; 2] = [1, 2];
const HEADER_BYTES: usize = 16;
const FRAME_BYTES: usize = 8;
/// Longest record, bytes.
pub const MAX_RECORD_BYTES: usize = 1 << 20;
/// Buffered bytes that are handed to the operating system without waiting for `flush`.
const BATCH_BYTES: usize = 1 << 16;

/// The open file; records are buffered until `flush`.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: Arc<File>,
    pending: Vec<u8>,
    broken: Option<String>,
}

fn file_header(format: u32) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&format.to_le_bytes());
    let crc = crc32c(&[&header[..12]]);
    header[12..].copy_from_slice(&crc.to_le_bytes());
    header
}

fn number(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .rev()
        .fold(0, |all, byte| (all << 8) | u32::from(*byte))
}

/// The payload of the whole record at `at`, if there is one.
fn record(data: &[u8], at: usize) -> Option<&[u8]> {
    let frame = data.get(at..at + FRAME_BYTES)?;
    let length = number(&frame[..4]) as usize;
    if length == 0 || length > MAX_RECORD_BYTES {
        return None;
    }
    let payload = data.get(at + FRAME_BYTES..at + FRAME_BYTES + length)?;
    let crc = crc32c(&[&frame[..4], payload]);
    (crc == number(&frame[4..])).then_some(payload)
}

fn frame(out: &mut Vec<u8>, payload: &[u8]) {
    let length = (payload.len() as u32).to_le_bytes();
    let crc = crc32c(&[&length, payload]);
    out.extend_from_slice(&length);
    out.extend_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(payload);
}

impl Journal {
    /// Opens or creates the file and hands every whole record, in order, to `replay`, then asks `whole`.
    ///
    /// # Errors
    /// `Error::Ledger` that names the file and, for damage or a record that `replay` refuses, the byte offset; or what
    /// `whole` says. The file is left as it is then.
    pub fn open<S>(
        path: &Path,
        state: &mut S,
        replay: impl Fn(&mut S, &[u8]) -> Result<()>,
        whole: impl FnOnce(&S) -> Result<()>,
    ) -> Result<Self> {
        let failed = |what: &str, error: &std::io::Error| {
            Error::Ledger(format!("{}: {what}: {error}", path.display()))
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|e| failed("cannot be opened", &e))?;
        let keep = Self::scan(path, |payload| replay(state, payload))?;
        whole(state).map_err(|error| Error::Ledger(format!("{}: {error}", path.display())))?;
        let header = file_header(FORMATS[0]);
        let prepared = (|| {
            file.set_len(keep as u64)?;
            file.seek(SeekFrom::End(0))?;
            if keep == 0 {
                file.write_all(&header)?;
            }
            file.sync_all()
        })();
        prepared.map_err(|e| failed("cannot be prepared", &e))?;
        Ok(Self {
            path: path.to_owned(),
            file: Arc::new(file),
            pending: Vec::new(),
            broken: None,
        })
    }

    /// Hands every whole record of the file, in order, to `replay`; returns where the last one ends (0 when not even
    /// the header is whole). Changes nothing.
    ///
    /// # Errors
    /// As `open`.
    pub fn scan(path: &Path, mut replay: impl FnMut(&[u8]) -> Result<()>) -> Result<usize> {
        let data = std::fs::read(path)
            .map_err(|e| Error::Ledger(format!("{}: cannot be read: {e}", path.display())))?;
        let headers = FORMATS.map(file_header);
        if data.len() < HEADER_BYTES && headers[0].starts_with(&data) {
            Ok(0)
        } else if let Some(format) = headers.iter().position(|header| data.starts_with(header)) {
            let end = Self::replay_all(path, &data, &mut replay)?;
            if format == 1 && end == HEADER_BYTES {
                return Err(Error::Ledger(format!(
                    "{}: cut short: the picture of the state at its beginning is missing",
                    path.display()
                )));
            }
            Ok(end)
        } else {
            Err(Error::Ledger(format!(
                "{}: not a ledger file of format 1 or 2",
                path.display()
            )))
        }
    }

    fn replay_all(
        path: &Path,
        data: &[u8],
        replay: &mut impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<usize> {
        let mut at = HEADER_BYTES;
        while let Some(payload) = record(data, at) {
            replay(payload).map_err(|error| {
                Error::Ledger(format!(
                    "{}: the record at byte {at} is impossible: {error}",
                    path.display()
                ))
            })?;
            at += FRAME_BYTES + payload.len();
        }
        match (at + 1..data.len()).find(|next| record(data, *next).is_some()) {
            Some(next) => Err(Error::Ledger(format!(
                "{}: corrupt record at byte {at} of {}; a whole record follows at byte {next}",
                path.display(),
                data.len()
            ))),
            None => Ok(at),
        }
    }

    /// Adds a record; it is safe from a crash of the process after `flush`, from a crash of the machine after `sync`.
    ///
    /// # Errors
    /// `Error::Ledger` when the record is too long or the file could not be written, now or before.
    pub fn append(&mut self, payload: &[u8]) -> Result<()> {
        self.ready()?;
        frame(&mut self.pending, payload);
        if self.pending.len() >= BATCH_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Fails when an earlier write failed: what is in memory would then be ahead of the file for ever.
    ///
    /// # Errors
    /// `Error::Ledger` with the reason of the first failure.
    pub fn ready(&self) -> Result<()> {
        match &self.broken {
            Some(text) => Err(Error::Ledger(text.clone())),
            None => Ok(()),
        }
    }

    /// Hands all records to the operating system.
    ///
    /// # Errors
    /// `Error::Ledger` when the file cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        self.ready()?;
        let mut file: &File = &self.file;
        if let Err(error) = file.write_all(&self.pending) {
            let text = format!("{}: cannot be written: {error}", self.path.display());
            self.broken = Some(text.clone());
            return Err(Error::Ledger(text));
        }
        self.pending.clear();
        Ok(())
    }

    /// Replaces the file by one of these records, whole or not at all; returns its bytes. Everything must be flushed.
    ///
    /// # Errors
    /// `Error::Ledger` when the new file cannot be written; the old one is then still in place and in use.
    pub fn replace(&mut self, records: impl Iterator<Item = Vec<u8>>) -> Result<u64> {
        self.ready()?;
        let mut beside = self.path.clone().into_os_string();
        beside.push(".compacting");
        let beside = PathBuf::from(beside);
        let write = || {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(&beside)?;
            let mut out = file_header(FORMATS[1]).to_vec();
            for record in records {
                frame(&mut out, &record);
                if out.len() >= BATCH_BYTES {
                    file.write_all(&out)?;
                    out.clear();
                }
            }
            file.write_all(&out)?;
            file.sync_all()?;
            std::fs::rename(&beside, &self.path)?;
            let bytes = file.stream_position()?;
            Ok((file, bytes))
        };
        let (file, bytes) = write().map_err(|error: std::io::Error| {
            let _ = std::fs::remove_file(&beside); // the disk may be full
            let text = format!("{}: cannot be compacted: {error}", self.path.display());
            Error::Ledger(text)
        })?;
        self.file = Arc::new(file);
        // Until the folder is on disk a crash of the machine may bring the old file back, without what follows.
        let folder = self.path.parent().filter(|p| !p.as_os_str().is_empty());
        let synced =
            File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        if let Err(error) = synced {
            let text = format!(
                "{}: its folder cannot be synced: {error}",
                self.path.display()
            );
            self.broken = Some(text.clone());
            return Err(Error::Ledger(text));
        }
        Ok(bytes)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, to wait for the disk without holding the journal.
    pub fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let _ = self.flush();
    }
}
