//! The bounded buffer of finished trajectories between producers and the learner.
//!
//! Memory is bounded in bytes: room is reserved before anything is copied and given back when the copy is freed, so a
//! leased trajectory that somebody still reads counts. Producers and consumers wait parked, first come first served.
//! Nothing vanishes: what came in is ready, leased, committed or dropped under a reason.
//!
//! A `put` that has room waits for nobody: it reserves by atomics, copies, and hands over through a lock-free queue.
//! Consumers move what is in that queue into the index, which has a mutex.
//! `docs/explanation/concurrency.md` says what waits for what.

use std::sync::Arc;

use crate::error::Result;
use crate::sync::{fence, Ordering};
use crate::wait::Pace;

mod budget;
mod content;
mod index;
mod lease;
mod limits;
mod pool;
mod ready;
mod shared;
mod waiter;
mod wanted;

use index::{Call, Index, Side, Want};
use lease::{leases, Slot};
use ready::Ready;
use shared::{closed, invalid, Shared};

pub use content::Content;
pub use lease::Lease;
pub use limits::{Ask, Entry, Label, Limits, Policy, Stats, NO_TASK};
pub use shared::Item;
pub use waiter::Waiter;

/// The buffer. Dropping it closes it; leases outlive it.
#[derive(Debug)]
pub struct Buffer {
    shared: Arc<Shared>,
}

impl Buffer {
    /// An empty buffer.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] for a limit of 0.
    pub fn new(limits: Limits) -> Result<Self> {
        for (name, value) in [
            ("max_trajectories", limits.max_trajectories),
            ("max_bytes", limits.max_bytes),
        ] {
            if value == 0 {
                return invalid(format!("{name}: 0 must be at least 1"));
            }
        }
        Ok(Self {
            shared: Arc::new(Shared::new(limits)),
        })
    }

    /// [`Self::put_content`] of a header and a payload, both copied.
    ///
    /// # Errors
    /// As [`Self::put_content`].
    pub fn put(
        &self,
        header: &[u8],
        payload: &[u8],
        label: impl Into<Label>,
        pace: &mut dyn Pace,
    ) -> Result<Vec<i64>> {
        self.put_content(&Content::Copy(header, payload, &[]), label, pace)
    }

    /// Puts one trajectory in; gives the tasks of those that the policy dropped for it.
    ///
    /// Policies that drop wait too when everything that is left is leased.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] at once for one that can never fit; [`crate::Error::Full`] by [`Policy::Reject`];
    /// [`crate::Error::Closed`]; what `pace` says. It is not stored then, but room may have been made for it.
    pub fn put_content(
        &self,
        content: &Content<'_>,
        label: impl Into<Label>,
        pace: &mut dyn Pace,
    ) -> Result<Vec<i64>> {
        let (bytes, label) = (content.bytes(), label.into());
        let shared = &self.shared;
        if self.try_put(content, label)? {
            return Ok(Vec::new());
        }
        let mut evicted = Vec::new();
        let attempt = |index: &mut Index<_>| shared.try_room(index, bytes);
        shared.enter(Side::Put, bytes, pace, &mut evicted, attempt)?;
        Slot::new(shared.clone(), bytes).publish(content, label)?;
        Ok(evicted)
    }

    /// [`Self::put_content`] without waiting and without dropping anything; `false` when it did not go in, which may be
    /// because others wait for room.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] and [`crate::Error::Closed`] as [`Self::put_content`].
    pub fn try_put(&self, content: &Content<'_>, label: impl Into<Label>) -> Result<bool> {
        let (bytes, label) = (content.bytes(), label.into());
        let shared = &self.shared;
        shared.check_put(bytes, label)?;
        if shared.closed.load(Ordering::SeqCst) {
            return Err(closed());
        }
        if shared.waiting_puts.load(Ordering::SeqCst) > 0 {
            return Ok(false);
        }
        if !shared.budget.reserve(bytes) {
            // What failed may have held a place for a moment, in the way of one that parked meanwhile.
            shared.room_was_made();
            return Ok(false);
        }
        Slot::new(shared.clone(), bytes).publish(content, label)?;
        Ok(true)
    }

    /// Leases what is asked for, all of it or none. Calls wait in one queue: what cannot be served yet holds up what comes
    /// after it.
    ///
    /// Those of certain tasks cost a look at the key of everything that is ready, and one more whenever the last of those
    /// missing has come.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] at once for none, for more than can ever be there, and for a task that is negative or
    /// named twice; [`crate::Error::Closed`]; what `pace` says.
    pub fn take<'a>(&self, ask: impl Into<Ask<'a>>, pace: &mut dyn Pace) -> Result<Vec<Lease>> {
        let shared = &self.shared;
        let want = Want::new(ask.into(), shared.limits.max_trajectories)?;
        let attempt = |index: &mut Index<_>| shared.try_lease(index, &want);
        let items = shared.enter(Side::Take, want.need(), pace, &mut Vec::new(), attempt)?;
        Ok(leases(shared, items))
    }

    /// [`Self::take`] without waiting: none when not all is there or others wait for theirs.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] and [`crate::Error::Closed`] as [`Self::take`].
    pub fn try_take<'a>(&self, ask: impl Into<Ask<'a>>) -> Result<Option<Vec<Lease>>> {
        let (shared, ask) = (&self.shared, ask.into());
        if ask == Ask::Next(0) {
            return Ok(Some(Vec::new()));
        }
        let want = Want::new(ask, shared.limits.max_trajectories)?;
        let mut index = shared.lock();
        if index.closed {
            return Err(closed());
        }
        if !index.takers.is_empty() {
            return Ok(None);
        }
        shared.gather(&mut index);
        let items = index.lease(&want, false);
        drop(index);
        Ok(items.map(|items| leases(shared, items)))
    }

    /// Joins the queue of those who wait to take, without a thread: `call` is called, from whatever thread makes it so and
    /// under a lock (it must be quick and call nothing of the buffer), when [`Waiter::take`] may succeed.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] as [`Self::take`].
    pub fn wait_to_take<'a>(&self, ask: impl Into<Ask<'a>>, call: Call) -> Result<Waiter> {
        let want = Want::new(ask.into(), self.shared.limits.max_trajectories)?;
        Ok(Waiter::new(&self.shared, Ok(want), call))
    }

    /// As [`Self::wait_to_take`], for room for a trajectory of `bytes` and [`Waiter::put`].
    ///
    /// # Errors
    /// [`crate::Error::Validation`] for one that can never fit.
    pub fn wait_to_put(&self, bytes: usize, call: Call) -> Result<Waiter> {
        self.shared.check_put(bytes, 0.into())?;
        Ok(Waiter::new(&self.shared, Err(bytes), call))
    }

    /// Takes note of the current policy version and drops ready trajectories older than `keep_from`, reason `stale`; gives
    /// their tasks, version by version.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] when the version goes back; [`crate::Error::Closed`].
    pub fn advance(&self, version: i64, keep_from: Option<i64>) -> Result<Vec<i64>> {
        let shared = &self.shared;
        let mut index = shared.lock();
        if index.closed {
            return Err(closed());
        }
        if version < index.version {
            return invalid(format!(
                "version: {version} is below the current version {}",
                index.version
            ));
        }
        index.version = version;
        shared.gather(&mut index);
        let stale = keep_from.map_or_else(Vec::new, |from| index.ready.retire(from));
        let count = stale.iter().map(|bucket| bucket.items.len()).sum();
        index.count_dropped("stale", count);
        shared.budget.release_places(count);
        shared.wake(&index);
        drop(index);
        let keys = stale.iter().flat_map(|bucket| &bucket.keys);
        Ok(keys.map(|key| key.task).collect())
    }

    /// Ends the buffer: everybody who waits gets [`crate::Error::Closed`], what is ready is freed (reason `closed`). Leases
    /// and views stay valid. A second call changes nothing.
    pub fn close(&self) {
        let shared = &self.shared;
        let mut index = shared.lock();
        index.closed = true;
        shared.closed.store(true, Ordering::SeqCst);
        // Pairs with the fence in `publish`: either this finds what was handed over, or its producer sees the end.
        fence(Ordering::SeqCst);
        let late = shared.collect(&mut index);
        let ready = std::mem::replace(&mut index.ready, Ready::new());
        index.count_dropped("closed", ready.len());
        shared.budget.release_places(ready.len());
        for ticket in index.takers.iter().chain(&index.putters) {
            ticket.wake();
        }
        drop(index);
        drop((late, ready));
        shared.bound_pool();
    }

    /// Counters now; works on a closed buffer too.
    pub fn stats(&self) -> Stats {
        let shared = &self.shared;
        let mut index = shared.lock();
        shared.gather(&mut index);
        let (ready, leased) = (index.ready.len(), index.leased.len());
        Stats {
            ready,
            leased,
            copying: shared.budget.places().saturating_sub(ready + leased),
            bytes: shared.budget.bytes(),
            received: index.received,
            committed: index.committed,
            dropped: index.dropped.clone(),
            waiting: (index.takers.len(), index.putters.len()),
            version: index.version,
            closed: index.closed,
        }
    }

    /// Every trajectory held, in order of completion; for inspection.
    pub fn snapshot(&self) -> Vec<Entry> {
        let mut index = self.shared.lock();
        self.shared.gather(&mut index);
        let mut entries = index.entries();
        drop(index);
        entries.sort_unstable_by_key(|entry| entry.sequence);
        entries
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.close();
    }
}
