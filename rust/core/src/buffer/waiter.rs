//! Waiting without a thread.

use std::sync::atomic::AtomicBool as Flag;
use std::sync::Arc;

use super::item::Content;
use super::lease::{leases, Lease, Slot};
use super::{closed, invalid, Attempt, Call, Event, Index, Label, Shared, Side, Ticket};
use crate::index::Wanted;
use crate::Result;

/// A place in the queue of those who wait; dropping it leaves the queue.
#[derive(Debug)]
pub struct Waiter {
    shared: Arc<Shared>,
    side: Side,
    /// The tasks that it waits for, if any.
    wanted: Option<Arc<Wanted>>,
    ticket: Arc<Ticket>,
}

impl Waiter {
    pub(super) fn new(
        shared: &Arc<Shared>,
        side: Side,
        need: usize,
        wanted: Option<Arc<Wanted>>,
        call: Call,
    ) -> Self {
        let ticket = Arc::new(Ticket {
            need,
            event: Event::Call(call),
            told: Flag::new(false),
        });
        shared.join(&mut shared.lock(), side, &ticket);
        Self {
            shared: shared.clone(),
            side,
            wanted,
            ticket,
        }
    }

    /// Tries again; none when it is not its turn or there is not enough. To be asked once at the beginning and then
    /// whenever `call` was called.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn take(&self) -> Result<Option<Vec<Lease>>> {
        debug_assert_eq!(self.side, Side::Take);
        let items = self.attempt(|shared, index, need| match &self.wanted {
            Some(wanted) => shared.try_lease_tasks(index, wanted),
            None => shared.try_lease(index, need),
        })?;
        Ok(items.map(|items| leases(&self.shared, items)))
    }

    /// Tries again to put in a trajectory of the announced size; gives what [`Buffer::put`] gives, or none.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Full`] by [`Policy::Reject`]; [`Error::Validation`] for another size.
    pub fn put(
        &self,
        content: &Content<'_>,
        label: impl Into<Label>,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        debug_assert_eq!(self.side, Side::Put);
        let label = label.into();
        let bytes = content.bytes();
        if bytes != self.ticket.need {
            return Err(invalid(format!(
                "trajectory: {bytes} bytes, {} were announced",
                self.ticket.need
            )));
        }
        self.shared.check_put(bytes, label)?;
        let mut evicted = Vec::new();
        loop {
            let done = self.attempt(|shared, index, need| match shared.try_room(index, need) {
                Attempt::Failed(error) => Attempt::Failed(error),
                Attempt::Wait => Attempt::Wait,
                other => Attempt::Done(other),
            })?;
            match done {
                None => return Ok(None),
                Some(Attempt::Evicted(victim)) => evicted.push(victim.header().to_vec()),
                Some(Attempt::Unfreed(items)) => drop(items),
                Some(_) => break,
            }
        }
        Slot::new(self.shared.clone(), bytes).publish(content, label)?;
        Ok(Some(evicted))
    }

    fn attempt<T>(
        &self,
        attempt: impl FnOnce(&Shared, &mut Index, usize) -> Attempt<T>,
    ) -> Result<Option<T>> {
        let mut index = self.shared.lock();
        if index.closed {
            return Err(closed());
        }
        if !index.is_first(self.side, &self.ticket) {
            return Ok(None);
        }
        match attempt(&self.shared, &mut index, self.ticket.need) {
            Attempt::Done(value) => Ok(Some(value)),
            Attempt::Failed(error) => Err(error),
            Attempt::Evicted(_) | Attempt::Unfreed(_) | Attempt::Wait => Ok(None),
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut index = self.shared.lock();
        self.shared.leave(&mut index, self.side, &self.ticket);
        self.shared.gather(&mut index);
        self.shared.wake(&index);
    }
}
