//! Retiring whole versions, and freeing what was retired a little at a time.
//!
//! Thousands of trajectories may go at once, and freeing each costs some hundred nanoseconds, so the call that retires
//! frees a bounded number. The rest is freed by the calls that come after it, a few each, or by whoever needs the room.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use super::item::Item;
use super::{closed, invalid, Buffer, Shared};
use crate::index::Bucket;
use crate::sync::{AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::Result;

/// Freed by the call that retires; none in the models, so that they see what is left.
const BY_RETIRE: usize = if cfg!(loom) { 0 } else { 64 };
/// Freed by each put and take that comes later; above 1, so that a buffer that goes on has soon freed all.
const BY_OTHERS: usize = 2;

type Retired = Bucket<Arc<Item>>;
type Queues = Vec<VecDeque<Arc<Item>>>;

/// What was retired and is still to be freed. Its mutex is held to move references only, and may be taken with that of
/// the index held, never the other way round.
#[derive(Debug)]
pub(super) struct Unfreed {
    len: AtomicUsize,
    buckets: Mutex<Queues>,
}

impl Unfreed {
    pub(super) fn new() -> Self {
        Self {
            len: AtomicUsize::new(0),
            buckets: Mutex::new(Vec::new()),
        }
    }

    /// Trajectories still to be freed.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::SeqCst)
    }

    fn add(&self, more: Vec<Retired>) {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        for bucket in more {
            self.len.fetch_add(bucket.items.len(), Ordering::SeqCst);
            buckets.push(bucket.items);
        }
    }

    /// Up to `most` of them, to be dropped without a lock.
    pub(super) fn take(&self, most: usize) -> Vec<Arc<Item>> {
        if self.len() == 0 {
            return Vec::new();
        }
        let buckets = self.buckets.lock();
        self.pop(buckets.unwrap_or_else(PoisonError::into_inner), most)
    }

    /// As `take`, but none when another thread is at it.
    fn try_take(&self, most: usize) -> Vec<Arc<Item>> {
        match self.buckets.try_lock() {
            Ok(buckets) if self.len() > 0 => self.pop(buckets, most),
            _ => Vec::new(),
        }
    }

    fn pop(&self, mut buckets: MutexGuard<'_, Queues>, most: usize) -> Vec<Arc<Item>> {
        let mut items = Vec::with_capacity(most.min(self.len()));
        let mut empty = Vec::new();
        while items.len() < most {
            let Some(bucket) = buckets.last_mut() else {
                break;
            };
            match bucket.pop_front() {
                Some(item) => items.push(item),
                None => empty.extend(buckets.pop()),
            }
        }
        self.len.fetch_sub(items.len(), Ordering::SeqCst);
        drop(buckets);
        drop(empty);
        items
    }
}

impl Shared {
    /// Frees some of what was retired; waits for nobody.
    pub(super) fn free_some(&self) {
        if self.unfreed.len() > 0 {
            drop(self.unfreed.try_take(BY_OTHERS));
        }
    }

    pub(super) fn free_all(&self) {
        drop(self.unfreed.take(usize::MAX));
    }

    /// Reserves one place and `bytes`, and frees what was retired as far as that takes.
    pub(super) fn reserve(&self, bytes: usize) -> bool {
        while !self.budget.reserve(bytes) {
            let unfreed = self.unfreed.take(BY_OTHERS);
            if unfreed.is_empty() {
                return false;
            }
            drop(unfreed);
        }
        true
    }

    fn free_soon(&self, retired: Vec<Retired>) {
        self.unfreed.add(retired);
        // Whoever waits for room can free it. Either it finds this when it looks again, or this sees that it waits.
        self.room_was_made();
        if self.closed.load(Ordering::SeqCst) {
            // `close` may have passed before this was there.
            self.free_all();
        } else {
            drop(self.unfreed.take(BY_RETIRE));
        }
    }

    /// Takes out what is older than `keep_from`.
    fn outdated(&self, version: i64, keep_from: Option<i64>) -> Result<Vec<Retired>> {
        let mut index = self.lock();
        if index.closed {
            return Err(closed());
        }
        if version < index.version {
            return Err(invalid(format!(
                "version: {version} is below the current version {}",
                index.version
            )));
        }
        index.version = version;
        let Some(keep_from) = keep_from else {
            return Ok(Vec::new());
        };
        self.gather(&mut index);
        let old = index.ready.retire(keep_from);
        let count = old.iter().map(|bucket| bucket.items.len()).sum();
        index.drop_count("stale", count);
        self.budget.release_places(count);
        self.wake(&index);
        Ok(old)
    }
}

impl Buffer {
    /// Tells the current policy version and drops ready trajectories older than `keep_from`, reason `stale`; gives how
    /// many were dropped. The memory of at most 64 is freed now, that of the others by later calls, a few each, and at
    /// once when somebody needs the room or the buffer is closed; until then it counts against the budget.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] when the version goes back; [`crate::Error::Closed`].
    pub fn retire(&self, version: i64, keep_from: Option<i64>) -> Result<usize> {
        let old = self.shared.outdated(version, keep_from)?;
        let count = old.iter().map(|bucket| bucket.items.len()).sum();
        if count > 0 {
            self.shared.free_soon(old);
        }
        Ok(count)
    }

    /// As [`Self::retire`], and gives the headers of those that were dropped.
    ///
    /// # Errors
    /// As [`Self::retire`].
    pub fn advance(&self, version: i64, keep_from: Option<i64>) -> Result<Vec<Vec<u8>>> {
        let old = self.shared.outdated(version, keep_from)?;
        let items = old.iter().flat_map(|bucket| &bucket.items);
        let headers: Vec<_> = items.map(|item| item.header().to_vec()).collect();
        if !headers.is_empty() {
            self.shared.free_soon(old);
        }
        Ok(headers)
    }
}
