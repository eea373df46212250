//! Taking the trajectories of certain tasks, in the order asked: what a windowed FIFO and groups need.
//!
//! They stand in the one queue of all who take. A call whose tasks are not all there holds up those behind it, whatever
//! else is ready: that is what first come, first served means.

use std::sync::Arc;

use super::lease::{leases, Lease};
use super::{closed, Attempt, Buffer, Call, Index, Item, Items, Key, Shared, Side, Ticket, Waiter};
use crate::index::Wanted;
use crate::wait::Pace;
use crate::Result;

/// What the first in the queue of takers waits for, if it waits for tasks. It was found missing when all keys were
/// looked at; since then whatever comes in is noted, and nobody looks again before nothing is missing any more. What
/// goes meanwhile (retired, dropped) is not noted: the next look finds out.
#[derive(Debug)]
pub(super) struct Watch {
    wanted: Arc<Wanted>,
    seen: Vec<bool>,
    missing: usize,
}

impl Watch {
    fn new(wanted: Arc<Wanted>, seen: Vec<bool>) -> Self {
        let missing = seen.iter().filter(|&&seen| !seen).count();
        Self {
            wanted,
            seen,
            missing,
        }
    }

    fn note(&mut self, task: i64) {
        if let Some(place) = self.wanted.place(task) {
            self.missing -= usize::from(!self.seen[place]);
            self.seen[place] = true;
        }
    }

    /// It is worth a look whether all are there.
    pub(super) fn complete(&self) -> bool {
        self.missing == 0
    }

    /// The first task asked for that is missing.
    fn missing(&self) -> Option<i64> {
        let place = self.seen.iter().position(|&seen| !seen)?;
        self.wanted.ordinal(place)
    }
}

impl Index {
    /// Puts what comes in, or comes back, in its place.
    pub(super) fn admit(&mut self, key: Key, version: i64, item: Arc<Item>) {
        if let Some(watch) = &mut self.watch {
            watch.note(key.task);
        }
        self.ready.insert(key, version, item);
    }

    /// A task that this call waits for, as far as it was its turn to look.
    pub(super) fn missing(&mut self, side: Side, ticket: &Arc<Ticket>) -> Option<i64> {
        let own = side == Side::Take && self.is_first(side, ticket);
        self.watch.as_ref().filter(|_| own)?.missing()
    }

    /// Leases the trajectories of these tasks, or says which of them are there.
    fn lease_tasks(&mut self, wanted: &Wanted) -> std::result::Result<Items, Vec<bool>> {
        let mut lease = |(key, version, item): (Key, i64, Arc<Item>)| {
            self.leased.insert(key.sequence, (key, version));
            (key.sequence, item)
        };
        let taken = self.ready.take_tasks(wanted)?;
        Ok(taken.into_iter().map(&mut lease).collect())
    }
}

impl Shared {
    /// For the first of the queue, which waits if it fails.
    pub(super) fn try_lease_tasks(
        &self,
        index: &mut Index,
        wanted: &Arc<Wanted>,
    ) -> Attempt<Items> {
        self.gather(index);
        if index.watch.as_ref().is_some_and(|watch| !watch.complete()) {
            return Attempt::Wait;
        }
        match index.lease_tasks(wanted) {
            Ok(items) => Attempt::Done(items),
            Err(seen) => {
                index.watch = Some(Watch::new(wanted.clone(), seen));
                Attempt::Wait
            }
        }
    }

    fn wanted(&self, ordinals: &[i64]) -> Result<Arc<Wanted>> {
        Wanted::new(ordinals, self.limits.max_trajectories).map(Arc::new)
    }
}

impl Buffer {
    /// Leases the trajectories of exactly these tasks, in the order asked, all or none; of several of one task the one
    /// that finished first. It waits in one queue with [`Self::take`], and what cannot be served yet holds up what
    /// comes after it.
    ///
    /// Costs a look at the key of everything that is ready, and one more whenever the last of those missing has come.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] at once for none, for more than can ever be there, a negative one or one that comes twice;
    /// [`crate::Error::Closed`]; what `pace` says.
    pub fn take_tasks(&self, ordinals: &[i64], pace: &mut dyn Pace) -> Result<Vec<Lease>> {
        let shared = &self.shared;
        let wanted = shared.wanted(ordinals)?;
        let attempt = |index: &mut Index| shared.try_lease_tasks(index, &wanted);
        let items = self.enter(Side::Take, wanted.len(), pace, &mut Vec::new(), attempt)?;
        Ok(leases(shared, items))
    }

    /// [`Self::take_tasks`] without waiting: none when not all are there or others wait for theirs.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] and [`crate::Error::Closed`] as [`Self::take_tasks`].
    pub fn try_take_tasks(&self, ordinals: &[i64]) -> Result<Option<Vec<Lease>>> {
        let shared = &self.shared;
        let wanted = shared.wanted(ordinals)?;
        let mut index = shared.lock();
        if index.closed {
            return Err(closed());
        }
        if !index.takers.is_empty() {
            return Ok(None);
        }
        shared.gather(&mut index);
        let items = index.lease_tasks(&wanted);
        drop(index);
        Ok(items.ok().map(|items| leases(shared, items)))
    }

    /// As [`Self::wait_to_take`], for these tasks.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] as [`Self::take_tasks`].
    pub fn wait_to_take_tasks(&self, ordinals: &[i64], call: Call) -> Result<Waiter> {
        let wanted = self.shared.wanted(ordinals)?;
        let need = wanted.len();
        Ok(Waiter::new(
            &self.shared,
            Side::Take,
            need,
            Some(wanted),
            call,
        ))
    }
}
