//! An append-only file of checksummed records that survives a torn tail.
//!
//! File: 8 bytes magic, u32 format, u32 crc32c of those 12; then records of u32 length, u32 crc32c over length and
//! payload, payload (little endian). Bytes at the end that hold no whole record are what a crash left of the last write
//! and are cut off; a bad record with a whole one behind it is damage and refused.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checksum::crc32c;
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"SAOLEDGR";
const FORMAT: u32 = 1;
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

fn file_header() -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&FORMAT.to_le_bytes());
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

impl Journal {
    /// Opens or creates the file and hands every whole record, in order, to `replay`.
    ///
    /// # Errors
    /// `Error::Ledger` that names the file and, for damage or a record that `replay` refuses, the byte offset.
    pub fn open(path: &Path, mut replay: impl FnMut(&[u8]) -> Result<()>) -> Result<Self> {
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
        let keep = Self::scan(path, &mut replay)?;
        let header = file_header();
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
        let header = file_header();
        if data.len() < HEADER_BYTES && header.starts_with(&data) {
            Ok(0)
        } else if data.starts_with(&header) {
            Self::replay_all(path, &data, &mut replay)
        } else {
            Err(Error::Ledger(format!(
                "{}: not a ledger file of format {FORMAT}",
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
        let length = (payload.len() as u32).to_le_bytes();
        let crc = crc32c(&[&length, payload]);
        self.pending.extend_from_slice(&length);
        self.pending.extend_from_slice(&crc.to_le_bytes());
        self.pending.extend_from_slice(payload);
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
