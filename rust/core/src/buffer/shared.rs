//! The state shared by everybody who holds a part of a buffer: the byte budget, what has come in, and the index with its queues.

use std::sync::{Arc, PoisonError};

use crate::buffer::budget::Budget;
use crate::buffer::content::{Blob, Stored};
use crate::buffer::index::{Arrival, Event, Index, Leased, Side, Ticket, Want};
use crate::buffer::limits::{Label, Limits, Policy, NO_TASK};
use crate::buffer::pool::Pool;
use crate::error::{Error, Result};
use crate::sync::{
    fence, lock, AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, SegQueue,
};
use crate::wait::Pace;

/// Bytes of the budget; given back when dropped. Never dropped under the lock.
#[derive(Debug)]
pub(crate) struct Charge {
    pub(crate) shared: Arc<Shared>,
    pub(crate) bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shared.budget.release_bytes(self.bytes);
        self.shared.room_was_made();
    }
}

/// An encoded trajectory in the buffer's memory.
#[derive(Debug)]
pub struct Item {
    pub(crate) stored: Stored,
    pub(crate) label: Label,
    // Gives the bytes back, after the memory was freed or given to the pool.
    pub(crate) charge: Charge,
}

impl Item {
    /// The encoded header.
    pub fn header(&self) -> &[u8] {
        self.stored.header.bytes()
    }

    /// The encoded payload; starts at a multiple of 64.
    pub fn payload(&self) -> &[u8] {
        self.stored.payload.bytes()
    }

    /// The number of frames of its sidecars, each starting at a multiple of 64.
    pub fn sidecars(&self) -> usize {
        self.stored.sidecars.len()
    }

    /// One of them.
    pub fn sidecar(&self, index: usize) -> Option<&[u8]> {
        self.stored.sidecars.get(index).map(Blob::bytes)
    }

    /// Its label.
    pub fn label(&self) -> Label {
        self.label
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        let shared = &self.charge.shared;
        self.stored.recycle(&shared.pool);
        shared.bound_pool();
    }
}

/// The outcome of an attempt under the lock.
pub(crate) enum Attempt<T> {
    Done(T),
    Failed(Error),
    /// Dropped for room, which is there once it is freed, without the lock.
    Evicted(Arc<Item>),
    Wait,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) budget: Budget,
    pub(crate) pool: Pool,
    /// Trajectories that have arrived and are not in the index yet, in order of completion. Lock-free: a producer waits neither for
    /// another one nor for a consumer that has the index.
    arrivals: SegQueue<Arrival<Arc<Item>>>,
    /// As `Index::closed`, for those who do not hold the lock.
    pub(crate) closed: AtomicBool,
    /// Lengths of the queues, for those who do not hold the lock.
    pub(crate) waiting_takes: AtomicUsize,
    pub(crate) waiting_puts: AtomicUsize,
    index: Mutex<Index<Arc<Item>>>,
}

impl Shared {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            budget: Budget::new(limits.max_trajectories, limits.max_bytes),
            pool: Pool::new(),
            arrivals: SegQueue::new(),
            closed: AtomicBool::new(false),
            waiting_takes: AtomicUsize::new(0),
            waiting_puts: AtomicUsize::new(0),
            index: Mutex::new(Index::new()),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Index<Arc<Item>>> {
        lock(&self.index)
    }

    fn waiting(&self, side: Side) -> &AtomicUsize {
        match side {
            Side::Put => &self.waiting_puts,
            Side::Take => &self.waiting_takes,
        }
    }

    /// Hands a trajectory over to whoever has the index next.
    pub(crate) fn hand_over(&self, item: Arc<Item>) {
        let (label, bytes) = (item.label, item.charge.bytes);
        self.arrivals.push(Arrival { label, bytes, item });
    }

    /// Moves what has come in into the index; on a closed buffer it gives it out to be dropped without the lock.
    #[must_use = "to be dropped without the lock"]
    pub(crate) fn collect(&self, index: &mut Index<Arc<Item>>) -> Vec<Arc<Item>> {
        let arrived = std::iter::from_fn(|| self.arrivals.pop());
        let late: Vec<_> = arrived
            .filter_map(|arrival| index.arrive(arrival))
            .collect();
        self.budget.release_places(late.len());
        late
    }

    /// As `collect` on a buffer that is not closed.
    pub(crate) fn gather(&self, index: &mut Index<Arc<Item>>) {
        if !index.closed {
            let late = self.collect(index);
            debug_assert!(late.is_empty());
        }
    }

    /// Wakes whoever is next and can go on now. What has come in must be in the index.
    pub(crate) fn wake(&self, index: &Index<Arc<Item>>) {
        if let Some(taker) = index.next_taker() {
            taker.wake();
        }
        if let Some(putter) = index.putters.front() {
            if self.budget.fits(putter.need) || (self.limits.drops() && index.ready.len() > 0) {
                putter.wake();
            }
        }
    }

    /// Memory kept for reuse and memory in use stay together below the bound; a closed buffer keeps nothing.
    pub(crate) fn bound_pool(&self) {
        let held = self.budget.bytes();
        let room = self.limits.max_bytes.saturating_sub(held);
        let closed = self.closed.load(Ordering::Relaxed);
        if self.pool.kept() > if closed { 0 } else { room } {
            self.pool.shrink(if closed { 0 } else { room });
        }
    }

    /// To be called after room was given back without the lock.
    pub(crate) fn room_was_made(&self) {
        // Pairs with the fence in `join`: either the waiting call sees the room, or this sees that it waits.
        fence(Ordering::SeqCst);
        if self.waiting_puts.load(Ordering::SeqCst) > 0 {
            let mut index = self.lock();
            self.gather(&mut index);
            self.wake(&index);
        }
    }

    pub(crate) fn join(&self, index: &mut Index<Arc<Item>>, side: Side, ticket: &Arc<Ticket>) {
        index.queue(side).push_back(ticket.clone());
        self.waiting(side).fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn leave(&self, index: &mut Index<Arc<Item>>, side: Side, ticket: &Arc<Ticket>) {
        index.leave(side, ticket);
        self.waiting(side).fetch_sub(1, Ordering::SeqCst);
    }

    /// Takes the next victim of the policy out; the caller drops it without the lock.
    fn evict(&self, index: &mut Index<Arc<Item>>) -> Option<Arc<Item>> {
        let (_, _, item) = match self.limits.policy {
            Policy::Block | Policy::Reject => None,
            Policy::DropOldest => index.ready.pop_first(),
            Policy::DropStalest => index.ready.pop_stalest(),
        }?;
        index.count_dropped(self.limits.policy.name(), 1);
        self.budget.release_places(1);
        Some(item)
    }

    /// Reserves room for a trajectory of so many bytes.
    pub(crate) fn try_room(&self, index: &mut Index<Arc<Item>>, bytes: usize) -> Attempt<()> {
        if self.budget.reserve(bytes) {
            return Attempt::Done(());
        }
        self.gather(index);
        match self.evict(index) {
            Some(victim) => Attempt::Evicted(victim),
            None if self.limits.policy == Policy::Reject => Attempt::Failed(Error::Full(format!(
                "no room for {bytes} bytes: {} of {} trajectories and {} of {} bytes are held",
                self.budget.places(),
                self.limits.max_trajectories,
                self.budget.bytes(),
                self.limits.max_bytes
            ))),
            None => Attempt::Wait,
        }
    }

    /// Leases what is wanted, for the first of the queue.
    pub(crate) fn try_lease(
        &self,
        index: &mut Index<Arc<Item>>,
        want: &Want,
    ) -> Attempt<Leased<Arc<Item>>> {
        self.gather(index);
        index.lease(want, true).map_or(Attempt::Wait, Attempt::Done)
    }

    pub(crate) fn check_put(&self, bytes: usize, label: Label) -> Result<()> {
        if label.min_version < 0 {
            let version = label.min_version;
            return invalid(format!("min_version: {version} is negative"));
        }
        if label.task < NO_TASK {
            return invalid(format!(
                "task: {} is neither a task ordinal, from 0, nor {NO_TASK} for none",
                label.task
            ));
        }
        if bytes > self.limits.max_bytes {
            return invalid(format!(
                "trajectory: {bytes} bytes can never fit into max_bytes = {}",
                self.limits.max_bytes
            ));
        }
        Ok(())
    }

    /// The thing that a call waited for, for its error.
    fn waited_for(&self, index: &mut Index<Arc<Item>>, side: Side, ticket: &Arc<Ticket>) -> String {
        self.gather(index);
        let what = match (side, index.missing(side, ticket)) {
            (Side::Put, _) => format!("room for a trajectory of {} bytes", ticket.need),
            (Side::Take, None) => format!("{} trajectories", ticket.need),
            (Side::Take, Some(task)) => format!(
                "{} trajectories by task, that of task {task} is missing",
                ticket.need
            ),
        };
        format!(
            "{what} ({} ready, {} leased, {} of {} bytes held, {} producers waiting for room)",
            index.ready.len(),
            index.leased.len(),
            self.budget.bytes(),
            self.limits.max_bytes,
            index.putters.len()
        )
    }

    /// Runs `attempt` under the lock when this call is first in its queue, and parks in between. `evicted` gets the tasks
    /// of what was dropped for it.
    pub(crate) fn enter<T>(
        &self,
        side: Side,
        need: usize,
        pace: &mut dyn Pace,
        evicted: &mut Vec<i64>,
        mut attempt: impl FnMut(&mut Index<Arc<Item>>) -> Attempt<T>,
    ) -> Result<T> {
        let ticket = Ticket::new(need, Event::Parked(Condvar::new()));
        let Event::Parked(condition) = &ticket.event else {
            unreachable!("it was made one line above");
        };
        let mut queued = false;
        let mut pause = None;
        let mut index = self.lock();
        let outcome = loop {
            if index.closed {
                break Err(closed());
            }
            ticket.looks();
            let attempted = if index.is_first(side, &ticket) {
                attempt(&mut index)
            } else {
                Attempt::Wait
            };
            if matches!(attempted, Attempt::Evicted(_) | Attempt::Wait) && !queued {
                self.join(&mut index, side, &ticket);
                queued = true;
            }
            match attempted {
                Attempt::Done(value) => break Ok(value),
                Attempt::Failed(error) => break Err(error),
                Attempt::Evicted(victim) => {
                    // Bytes come back when what held them is dropped, which takes the lock.
                    drop(index);
                    evicted.push(victim.label.task);
                    drop(victim);
                    index = self.lock();
                }
                Attempt::Wait => {
                    if let Some(pause) = pause.take() {
                        index = condition
                            .wait_timeout(index, pause)
                            .unwrap_or_else(PoisonError::into_inner)
                            .0;
                        continue;
                    }
                    // Asked without the lock; whether to park is looked at again afterwards, so no event is missed.
                    drop(index);
                    let answer = pace.next();
                    index = self.lock();
                    match answer {
                        Ok(longest) => pause = Some(longest),
                        Err(stop) => {
                            break Err(stop.error(&self.waited_for(&mut index, side, &ticket)))
                        }
                    }
                }
            }
        };
        if queued {
            self.leave(&mut index, side, &ticket);
        }
        self.gather(&mut index);
        self.wake(&index);
        outcome
    }
}

pub(crate) fn invalid<T>(text: String) -> Result<T> {
    Err(Error::Validation(text))
}

pub(crate) fn closed() -> Error {
    Error::Closed("the buffer is closed".into())
}
