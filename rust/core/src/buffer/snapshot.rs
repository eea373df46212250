//! What is held, for inspection, taken in parts.

use super::{Buffer, Entry};
use crate::index::Key;

/// Sequence numbers looked at under one lock: some microseconds.
const PART: u64 = 2048;

impl Buffer {
    /// Every trajectory held, in order of completion; for inspection.
    ///
    /// It is taken in parts, so that nobody waits long for it: what is there all the while is in it once, what comes,
    /// goes or changes hands meanwhile may be in it, in its state of one moment.
    pub fn snapshot(&self) -> Vec<Entry> {
        let shared = &self.shared;
        let mut index = shared.lock();
        shared.gather(&mut index);
        let end = index.next_sequence;
        let mut from = index.next_from(0).unwrap_or(end);
        drop(index);
        let mut entries: Vec<Entry> = Vec::new();
        // Under the lock plain numbers are copied into memory that is there already. Everything else is done without:
        // a thread that is suspended then holds nobody up.
        let mut keys: Vec<Key> = Vec::with_capacity(PART as usize);
        let mut runs: Vec<(i64, usize)> = Vec::with_capacity(64);
        let mut leased: Vec<Entry> = Vec::with_capacity(PART as usize);
        while from < end {
            let stop = (from + PART).min(end);
            let index = shared.lock();
            index.ready.window(from, stop, &mut keys, &mut runs);
            let out = index.leased.range(from..stop);
            leased.extend(out.map(|(_, &(key, min_version))| entry(&key, min_version, true)));
            from = if keys.len() + leased.len() > 0 {
                stop
            } else {
                index.next_from(stop).unwrap_or(end)
            };
            drop(index);
            let first = entries.len();
            entries.append(&mut leased);
            let mut start = 0;
            for (min_version, stop) in runs.drain(..) {
                let run = keys[start..stop].iter();
                entries.extend(run.map(|key| entry(key, min_version, false)));
                start = stop;
            }
            keys.clear();
            entries[first..].sort_by_key(|entry| entry.sequence);
        }
        entries
    }
}

fn entry(key: &Key, min_version: i64, leased: bool) -> Entry {
    Entry {
        sequence: key.sequence,
        leased,
        bytes: key.bytes,
        min_version,
        task: key.task,
    }
}
