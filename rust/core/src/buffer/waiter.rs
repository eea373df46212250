//! Waiting without a thread.

use std::sync::Arc;

use crate::buffer::content::Content;
use crate::buffer::index::{Call, Event, Index, Side, Ticket, Want};
use crate::buffer::lease::{leases, Lease, Slot};
use crate::buffer::limits::Label;
use crate::buffer::shared::{closed, invalid, Attempt, Item, Shared};
use crate::error::Result;

/// A place in the queue of those who wait; dropping it leaves the queue.
#[derive(Debug)]
pub struct Waiter {
    shared: Arc<Shared>,
    /// The selection that it waits to take; none: room.
    want: Option<Want>,
    ticket: Arc<Ticket>,
}

impl Waiter {
    /// Waits to take, or for room for a trajectory of so many bytes.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        want: std::result::Result<Want, usize>,
        call: Call,
    ) -> Self {
        let need = want.as_ref().map_or_else(|bytes| *bytes, Want::need);
        let waiter = Self {
            shared: shared.clone(),
            want: want.ok(),
            ticket: Ticket::new(need, Event::Call(call)),
        };
        shared.join(&mut shared.lock(), waiter.side(), &waiter.ticket);
        waiter
    }

    fn side(&self) -> Side {
        match self.want {
            Some(_) => Side::Take,
            None => Side::Put,
        }
    }

    /// Tries again; none when it is not its turn or there is not enough. To be asked once at the beginning and then
    /// whenever `call` was called.
    ///
    /// # Errors
    /// [`crate::Error::Closed`]; [`crate::Error::Validation`] if it waits for room.
    pub fn take(&self) -> Result<Option<Vec<Lease>>> {
        let Some(want) = &self.want else {
            return invalid("take: this waiter waits for room".into());
        };
        let items = self.attempt(|shared, index| shared.try_lease(index, want))?;
        Ok(items.map(|items| leases(&self.shared, items)))
    }

    /// Tries again to put in a trajectory of the announced size; gives what [`crate::buffer::Buffer::put_content`] gives,
    /// or none.
    ///
    /// # Errors
    /// [`crate::Error::Closed`]; [`crate::Error::Full`] by policy; [`crate::Error::Validation`] for another size.
    pub fn put(&self, content: &Content<'_>, label: impl Into<Label>) -> Result<Option<Vec<i64>>> {
        let (bytes, label, need) = (content.bytes(), label.into(), self.ticket.need);
        if self.want.is_some() || bytes != need {
            return invalid(format!("trajectory: {bytes} bytes, {need} were announced"));
        }
        self.shared.check_put(bytes, label)?;
        let mut evicted = Vec::new();
        loop {
            let room = self.attempt(|shared, index| match shared.try_room(index, need) {
                Attempt::Evicted(victim) => Attempt::Done(Some(victim)),
                Attempt::Done(()) => Attempt::Done(None),
                Attempt::Failed(error) => Attempt::Failed(error),
                Attempt::Wait => Attempt::Wait,
            })?;
            match room {
                None => return Ok(None),
                Some(Some(victim)) => evicted.push(victim.label.task),
                Some(None) => break,
            }
        }
        Slot::new(self.shared.clone(), bytes).publish(content, label)?;
        Ok(Some(evicted))
    }

    fn attempt<T>(
        &self,
        attempt: impl FnOnce(&Shared, &mut Index<Arc<Item>>) -> Attempt<T>,
    ) -> Result<Option<T>> {
        let mut index = self.shared.lock();
        if index.closed {
            return Err(closed());
        }
        if !index.is_first(self.side(), &self.ticket) {
            return Ok(None);
        }
        match attempt(&self.shared, &mut index) {
            Attempt::Done(value) => Ok(Some(value)),
            Attempt::Failed(error) => Err(error),
            Attempt::Evicted(_) | Attempt::Wait => Ok(None),
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut index = self.shared.lock();
        self.shared.leave(&mut index, self.side(), &self.ticket);
        self.shared.gather(&mut index);
        self.shared.wake(&index);
    }
}
