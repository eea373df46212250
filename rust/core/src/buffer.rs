//! The bounded buffer of finished trajectories between producers and the learner.
//!
//! Memory is bounded in bytes: room is reserved before anything is copied and given back when the copy is freed, so a
//! leased trajectory that somebody still reads counts. Producers and consumers wait parked, first come first served.
//! Nothing vanishes: what came in is ready, leased, committed or dropped under a reason.
//!
//! A `put` that has room takes no mutex: it reserves by atomics, copies, and hands over through a ring. Consumers move
//! what is in the ring into the index under theirs. `docs/explanation/concurrency.md` says what waits for what.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};

use crate::budget::Budget;
use crate::index::{Key, Ready};
use crate::pool::Pool;
use crate::ring::Ring;
use crate::sync::{fence, AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering};
use crate::wait::Pace;
use crate::{Error, Result};

mod item;
mod lease;
mod retire;
mod snapshot;
mod state;
mod tasks;
mod waiter;

use lease::{leases, Slot};
use retire::Unfreed;
use tasks::Watch;

pub use item::{Content, Item};
pub use lease::Lease;
pub use state::{Entry, Label, Limits, Policy, Stats};
pub use waiter::Waiter;

/// Bytes of the budget; given back when dropped. Never dropped under the lock.
#[derive(Debug)]
struct Charge {
    shared: Arc<Shared>,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shared.budget.release_bytes(self.bytes);
        self.shared.room_was_made();
    }
}

type Call = Box<dyn Fn() + Send + Sync>;

/// How a waiting call is told that its turn may have come.
enum Event {
    Parked(Condvar),
    /// Runs under the lock: it must be quick, and take no lock that is held while the buffer is called.
    Call(Call),
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Parked(_) => "Parked",
            Self::Call(_) => "Call",
        })
    }
}

/// One waiting call; only the first of its queue is ever told.
#[derive(Debug)]
struct Ticket {
    /// Trajectories for `take`, bytes for `put`.
    need: usize,
    event: Event,
    /// A parked one was told and has not looked since: telling it again would cost a system call for nothing. Changes
    /// under the lock only, so the models need not look at it.
    told: Flag,
}

impl Ticket {
    fn tell(&self) {
        match &self.event {
            Event::Parked(parked) => {
                if !self.told.swap(true, Relaxed) {
                    parked.notify_all();
                }
            }
            Event::Call(call) => call(),
        }
    }
}

/// The label of what belongs to no task.
const NO_TASK: i64 = -1;

type Items = Vec<(u64, Arc<Item>)>;

/// What has come in and has no place in the order yet. What the index asks for is here too, so that nobody has to look
/// for it in cold memory under the lock.
#[derive(Debug)]
struct Arrival {
    label: Label,
    bytes: usize,
    item: Arc<Item>,
}

/// What consumers share under the lock.
#[derive(Debug)]
struct Index {
    closed: bool,
    version: i64,
    next_sequence: u64,
    ready: Ready<Arc<Item>>,
    /// Key and version of what is out.
    leased: BTreeMap<u64, (Key, i64)>,
    received: u64,
    committed: u64,
    dropped: BTreeMap<&'static str, u64>,
    takers: VecDeque<Arc<Ticket>>,
    /// Of the first of `takers`, if it waits for tasks.
    watch: Option<Watch>,
    putters: VecDeque<Arc<Ticket>>,
}

impl Index {
    fn queue(&mut self, side: Side) -> &mut VecDeque<Arc<Ticket>> {
        match side {
            Side::Put => &mut self.putters,
            Side::Take => &mut self.takers,
        }
    }

    fn is_first(&mut self, side: Side, ticket: &Arc<Ticket>) -> bool {
        match self.queue(side).front() {
            Some(front) => Arc::ptr_eq(front, ticket),
            None => true,
        }
    }

    fn drop_count(&mut self, reason: &'static str, count: usize) {
        if count > 0 {
            *self.dropped.entry(reason).or_default() += count as u64;
        }
    }

    /// The first sequence number held that is not below `from`.
    fn next_from(&self, from: u64) -> Option<u64> {
        let leased = self.leased.range(from..).next().map(|(&next, _)| next);
        self.ready.next_from(from).into_iter().chain(leased).min()
    }

    fn lease(&mut self, n: usize) -> Option<Items> {
        if self.ready.len() < n {
            return None;
        }
        let mut items = Vec::with_capacity(n);
        while items.len() < n {
            let (key, version, item) = self.ready.pop_first()?;
            self.leased.insert(key.sequence, (key, version));
            items.push((key.sequence, item));
        }
        Some(items)
    }
}

#[derive(Debug)]
struct Shared {
    limits: Limits,
    budget: Budget,
    pool: Pool,
    /// What has come in and is not in the index yet, in order of completion.
    arrivals: Ring<Arrival>,
    /// What was retired and is still to be freed; counts against the budget until then.
    unfreed: Unfreed,
    /// As `Index::closed`, for those who do not hold the lock.
    closed: AtomicBool,
    /// Lengths of the queues, for those who do not hold the lock.
    waiting_takes: AtomicUsize,
    waiting_puts: AtomicUsize,
    index: Mutex<Index>,
}

/// Places of the ring; whoever finds it full empties it into the index.
#[cfg(not(loom))]
const MAX_ARRIVALS: usize = 512;
#[cfg(loom)]
const MAX_ARRIVALS: usize = 2;

/// What a call that waits for room frees before it looks again.
const FREED_FOR_ROOM: usize = 8;

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self, side: Side) -> &AtomicUsize {
        match side {
            Side::Put => &self.waiting_puts,
            Side::Take => &self.waiting_takes,
        }
    }

    /// Moves what has come in into the index; on a closed buffer it gives it out to be dropped without the lock.
    #[must_use = "to be dropped without the lock"]
    fn collect(&self, index: &mut Index) -> Vec<Arc<Item>> {
        let mut late = Vec::new();
        while let Some(arrival) = self.arrivals.pop() {
            let sequence = index.next_sequence;
            index.next_sequence += 1;
            index.received += 1;
            if index.closed {
                index.drop_count("closed", 1);
                self.budget.release_place();
                late.push(arrival.item);
            } else {
                let key = Key {
                    sequence,
                    bytes: arrival.bytes,
                    task: arrival.label.task,
                };
                index.admit(key, arrival.label.min_version, arrival.item);
            }
        }
        late
    }

    /// As `collect` on a buffer that is not closed.
    fn gather(&self, index: &mut Index) {
        if !index.closed {
            let late = self.collect(index);
            debug_assert!(late.is_empty());
        }
    }

    /// Tells whoever is next and can go on now. What has come in must be in the index.
    fn wake(&self, index: &Index) {
        if let Some(taker) = index.takers.front() {
            let complete = index.watch.as_ref().is_none_or(Watch::complete);
            if complete && index.ready.len() >= taker.need {
                taker.tell();
            }
        }
        if let Some(putter) = index.putters.front() {
            let room = self.budget.fits(putter.need) || self.unfreed.len() > 0;
            if room || (self.limits.drops() && index.ready.len() > 0) {
                putter.tell();
            }
        }
    }

    /// What is kept for reuse and what is held stay together below the bound; a closed buffer keeps nothing.
    fn bound_pool(&self) {
        let held = self.budget.bytes();
        let room = self.limits.max_bytes.saturating_sub(held);
        let closed = self.closed.load(Ordering::Relaxed);
        if closed || self.pool.kept() > room {
            self.pool.shrink(if closed { 0 } else { room });
        }
    }

    /// To be called after room was given back without the lock.
    fn room_was_made(&self) {
        // Pairs with the fence in `join`: either the waiting call sees the room, or this sees that it waits.
        fence(Ordering::SeqCst);
        if self.waiting_puts.load(Ordering::SeqCst) > 0 {
            let mut index = self.lock();
            self.gather(&mut index);
            self.wake(&index);
        }
    }

    fn join(&self, index: &mut Index, side: Side, ticket: &Arc<Ticket>) {
        index.queue(side).push_back(ticket.clone());
        self.waiting(side).fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    fn leave(&self, index: &mut Index, side: Side, ticket: &Arc<Ticket>) {
        if side == Side::Take && index.is_first(side, ticket) {
            index.watch = None;
        }
        index
            .queue(side)
            .retain(|other| !Arc::ptr_eq(other, ticket));
        self.waiting(side).fetch_sub(1, Ordering::SeqCst);
    }

    /// Takes the next victim of the policy out; the caller drops it without the lock.
    fn evict(&self, index: &mut Index) -> Option<Arc<Item>> {
        let (_, _, item) = match self.limits.policy {
            Policy::Block | Policy::Reject => None,
            Policy::DropOldest => index.ready.pop_first(),
            Policy::DropStalest => index.ready.pop_stalest(),
        }?;
        index.drop_count(self.limits.policy.name(), 1);
        self.budget.release_place();
        Some(item)
    }

    fn no_room(&self, bytes: usize) -> String {
        format!(
            "no room for {bytes} bytes: {} of {} trajectories and {} of {} bytes are held",
            self.budget.places(),
            self.limits.max_trajectories,
            self.budget.bytes(),
            self.limits.max_bytes
        )
    }

    fn waited_for(&self, index: &Index, side: Side, need: usize, missing: Option<i64>) -> String {
        let held = format!(
            "{} ready, {} leased, {} of {} bytes held, {} producers waiting for room",
            index.ready.len(),
            index.leased.len(),
            self.budget.bytes(),
            self.limits.max_bytes,
            index.putters.len()
        );
        match side {
            Side::Put => format!("room for a trajectory of {need} bytes ({held})"),
            Side::Take => match missing {
                Some(task) => {
                    format!("{need} trajectories by task, that of task {task} is missing ({held})")
                }
                None => format!("{need} trajectories ({held})"),
            },
        }
    }

    fn try_room(&self, index: &mut Index, bytes: usize) -> Attempt<()> {
        if self.budget.reserve(bytes) {
            return Attempt::Done(());
        }
        let unfreed = self.unfreed.take(FREED_FOR_ROOM);
        if !unfreed.is_empty() {
            return Attempt::Unfreed(unfreed);
        }
        self.gather(index);
        match self.evict(index) {
            Some(victim) => Attempt::Evicted(victim),
            None if self.limits.policy == Policy::Reject => {
                Attempt::Failed(Error::Full(self.no_room(bytes)))
            }
            None => Attempt::Wait,
        }
    }

    fn try_lease(&self, index: &mut Index, n: usize) -> Attempt<Items> {
        self.gather(index);
        match index.lease(n) {
            Some(items) => Attempt::Done(items),
            None => Attempt::Wait,
        }
    }

    fn try_drain(&self, index: &mut Index, n: usize) -> Attempt<Vec<Arc<Item>>> {
        self.gather(index);
        if index.ready.len() < n {
            return Attempt::Wait;
        }
        let items: Vec<_> = std::iter::from_fn(|| index.ready.pop_first())
            .take(n)
            .map(|(_, _, item)| item)
            .collect();
        index.committed += items.len() as u64;
        self.budget.release_places(items.len());
        Attempt::Done(items)
    }

    fn check_put(&self, bytes: usize, label: Label) -> Result<()> {
        if label.min_version < 0 {
            let version = label.min_version;
            return Err(invalid(format!("min_version: {version} is negative")));
        }
        if label.task < NO_TASK {
            return Err(invalid(format!(
                "task: {} is neither a task ordinal, from 0, nor {NO_TASK} for none",
                label.task
            )));
        }
        if bytes > self.limits.max_bytes {
            return Err(invalid(format!(
                "trajectory: {bytes} bytes can never fit into max_bytes = {}",
                self.limits.max_bytes
            )));
        }
        Ok(())
    }

    fn check_count(&self, n: usize) -> Result<()> {
        let most = self.limits.max_trajectories;
        if n == 0 || n > most {
            return Err(invalid(format!(
                "n: {n} is not in 1..={most} (max_trajectories)"
            )));
        }
        Ok(())
    }
}

/// The buffer. Dropping it closes it; leases outlive it.
#[derive(Debug)]
pub struct Buffer {
    shared: Arc<Shared>,
}

fn invalid(text: String) -> Error {
    Error::Validation(text)
}

fn closed() -> Error {
    Error::Closed("the buffer is closed".into())
}

impl Buffer {
    /// An empty buffer.
    ///
    /// # Errors
    /// [`Error::Validation`] for a limit of 0.
    pub fn new(limits: Limits) -> Result<Self> {
        for (name, value) in [
            ("max_trajectories", limits.max_trajectories),
            ("max_bytes", limits.max_bytes),
        ] {
            if value == 0 {
                return Err(invalid(format!("{name}: 0 must be at least 1")));
            }
        }
        let index = Index {
            closed: false,
            version: 0,
            next_sequence: 0,
            ready: Ready::new(),
            leased: BTreeMap::new(),
            received: 0,
            committed: 0,
            dropped: BTreeMap::new(),
            takers: VecDeque::new(),
            watch: None,
            putters: VecDeque::new(),
        };
        let arrivals = limits.max_trajectories.clamp(2, MAX_ARRIVALS);
        Ok(Self {
            shared: Arc::new(Shared {
                limits,
                budget: Budget::new(limits.max_trajectories, limits.max_bytes),
                pool: Pool::new(),
                arrivals: Ring::new(arrivals.next_power_of_two()),
                unfreed: Unfreed::new(),
                closed: AtomicBool::new(false),
                waiting_takes: AtomicUsize::new(0),
                waiting_puts: AtomicUsize::new(0),
                index: Mutex::new(index),
            }),
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
    ) -> Result<Vec<Vec<u8>>> {
        self.put_content(&Content::Copy(header, payload, &[]), label, pace)
    }

    /// Puts one trajectory in; gives the headers of those that the policy dropped for it.
    ///
    /// Policies that drop wait too when everything that is left is leased.
    ///
    /// # Errors
    /// [`Error::Validation`] at once for one that can never fit; [`Error::Full`] by [`Policy::Reject`];
    /// [`Error::Closed`]; what `pace` says. It is not stored then, but room may have been made for it.
    pub fn put_content(
        &self,
        content: &Content<'_>,
        label: impl Into<Label>,
        pace: &mut dyn Pace,
    ) -> Result<Vec<Vec<u8>>> {
        let (bytes, label) = (content.bytes(), label.into());
        let shared = &self.shared;
        if self.try_put(content, label)? {
            return Ok(Vec::new());
        }
        let mut evicted = Vec::new();
        let attempt = |index: &mut Index| shared.try_room(index, bytes);
        self.enter(Side::Put, bytes, pace, &mut evicted, attempt)?;
        Slot::new(shared.clone(), bytes).publish(content, label)?;
        Ok(evicted)
    }

    /// [`Self::put_content`] without waiting and without dropping anything; `false` when it did not go in, which may be
    /// because others wait for room.
    ///
    /// # Errors
    /// [`Error::Validation`] and [`Error::Closed`] as [`Self::put_content`].
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
        if !shared.reserve(bytes) {
            // What failed may have held a place for a moment, in the way of one that parked meanwhile.
            shared.room_was_made();
            return Ok(false);
        }
        Slot::new(shared.clone(), bytes).publish(content, label)?;
        Ok(true)
    }

    /// Takes `n` out in order of completion, all or none, and commits them at once.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn drain(&self, n: usize, pace: &mut dyn Pace) -> Result<Vec<Arc<Item>>> {
        let shared = &self.shared;
        shared.check_count(n)?;
        let attempt = |index: &mut Index| shared.try_drain(index, n);
        let items = self.enter(Side::Take, n, pace, &mut Vec::new(), attempt)?;
        shared.free_some();
        Ok(items)
    }

    /// [`Self::drain`] without waiting: none when fewer than `n` are ready or others wait for theirs.
    ///
    /// # Errors
    /// [`Error::Validation`] and [`Error::Closed`] as [`Self::drain`].
    pub fn try_drain(&self, n: usize) -> Result<Option<Vec<Arc<Item>>>> {
        let shared = &self.shared;
        shared.check_count(n.max(1))?;
        let mut index = shared.lock();
        if index.closed {
            return Err(closed());
        }
        if !index.takers.is_empty() {
            return Ok(None);
        }
        let items = shared.try_drain(&mut index, n);
        shared.wake(&index);
        drop(index);
        shared.free_some();
        Ok(match items {
            Attempt::Done(items) => Some(items),
            _ => None,
        })
    }

    /// Leases `n` trajectories in order of completion, all or none.
    ///
    /// # Errors
    /// [`Error::Validation`] at once for an `n` that can never be there; [`Error::Closed`]; what `pace` says.
    pub fn take(&self, n: usize, pace: &mut dyn Pace) -> Result<Vec<Lease>> {
        let shared = &self.shared;
        shared.check_count(n)?;
        let attempt = |index: &mut Index| shared.try_lease(index, n);
        let items = self.enter(Side::Take, n, pace, &mut Vec::new(), attempt)?;
        Ok(leases(shared, items))
    }

    /// [`Self::take`] without waiting: none when fewer than `n` are ready or others wait for theirs.
    ///
    /// # Errors
    /// [`Error::Validation`] and [`Error::Closed`] as [`Self::take`].
    pub fn try_take(&self, n: usize) -> Result<Option<Vec<Lease>>> {
        let shared = &self.shared;
        shared.check_count(n.max(1))?;
        let mut index = shared.lock();
        if index.closed {
            return Err(closed());
        }
        let items = if index.takers.is_empty() {
            shared.try_lease(&mut index, n)
        } else {
            Attempt::Wait
        };
        drop(index);
        Ok(match items {
            Attempt::Done(items) => Some(leases(shared, items)),
            _ => None,
        })
    }

    /// Joins the queue of those who wait to take `n`, without a thread: `call` is called, from whatever thread makes it
    /// so and under a lock (it must be quick and call nothing of the buffer), when [`Waiter::take`] may succeed.
    ///
    /// # Errors
    /// [`Error::Validation`] as [`Self::take`].
    pub fn wait_to_take(&self, n: usize, call: Call) -> Result<Waiter> {
        self.shared.check_count(n)?;
        Ok(Waiter::new(&self.shared, Side::Take, n, None, call))
    }

    /// As [`Self::wait_to_take`], for room for a trajectory of `bytes` and [`Waiter::put`].
    ///
    /// # Errors
    /// [`Error::Validation`] for one that can never fit.
    pub fn wait_to_put(&self, bytes: usize, call: Call) -> Result<Waiter> {
        self.shared.check_put(bytes, 0.into())?;
        Ok(Waiter::new(&self.shared, Side::Put, bytes, None, call))
    }

    /// Ends the buffer: everybody who waits gets [`Error::Closed`], what is ready is freed (reason `closed`). Leases and
    /// views stay valid. A second call changes nothing.
    pub fn close(&self) {
        let shared = &self.shared;
        let mut index = shared.lock();
        index.closed = true;
        shared.closed.store(true, Ordering::SeqCst);
        // Pairs with the fence in `publish`: either this finds what was handed over, or its producer sees the end.
        fence(Ordering::SeqCst);
        let late = shared.collect(&mut index);
        let ready = std::mem::replace(&mut index.ready, Ready::new());
        index.drop_count("closed", ready.len());
        shared.budget.release_places(ready.len());
        for ticket in index.takers.iter().chain(&index.putters) {
            ticket.tell();
        }
        drop(index);
        drop((late, ready));
        shared.free_all();
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
            unfreed: shared.unfreed.len(),
            received: index.received,
            committed: index.committed,
            dropped: index.dropped.clone(),
            waiting: (index.takers.len(), index.putters.len()),
            version: index.version,
            closed: index.closed,
        }
    }

    /// Runs `attempt` under the lock when this call is first in its queue, and parks in between.
    fn enter<T>(
        &self,
        side: Side,
        need: usize,
        pace: &mut dyn Pace,
        evicted: &mut Vec<Vec<u8>>,
        mut attempt: impl FnMut(&mut Index) -> Attempt<T>,
    ) -> Result<T> {
        let shared = &self.shared;
        let parked = Event::Parked(Condvar::new());
        let ticket = Arc::new(Ticket {
            need,
            event: parked,
            told: Flag::new(false),
        });
        let Event::Parked(condition) = &ticket.event else {
            unreachable!("it was made one line above");
        };
        let mut queued = false;
        let mut pause = None;
        let mut index = shared.lock();
        let outcome = loop {
            if index.closed {
                break Err(closed());
            }
            ticket.told.store(false, Relaxed);
            let attempted = if index.is_first(side, &ticket) {
                attempt(&mut index)
            } else {
                Attempt::Wait
            };
            match attempted {
                Attempt::Done(value) => break Ok(value),
                Attempt::Failed(error) => break Err(error),
                Attempt::Evicted(_) | Attempt::Unfreed(_) | Attempt::Wait if !queued => {
                    shared.join(&mut index, side, &ticket);
                    queued = true;
                }
                _ => {}
            }
            let room = matches!(attempted, Attempt::Evicted(_) | Attempt::Unfreed(_));
            if room {
                // Bytes come back when what held them is dropped, which takes the lock.
                drop(index);
                if let Attempt::Evicted(victim) = &attempted {
                    evicted.push(victim.header().to_vec());
                }
                drop(attempted);
                index = shared.lock();
            } else if let Some(pause) = pause.take() {
                index = condition
                    .wait_timeout(index, pause)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            } else {
                // Asked without the lock; whether to park is looked at again afterwards, so no event is missed.
                drop(index);
                let answer = pace.next();
                index = shared.lock();
                match answer {
                    Ok(longest) => pause = Some(longest),
                    Err(stop) => {
                        shared.gather(&mut index);
                        let missing = index.missing(side, &ticket);
                        break Err(stop.error(&shared.waited_for(&index, side, need, missing)));
                    }
                }
            }
        };
        if queued {
            shared.leave(&mut index, side, &ticket);
        }
        shared.gather(&mut index);
        shared.wake(&index);
        outcome
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.close();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Put,
    Take,
}

enum Attempt<T> {
    Done(T),
    Failed(Error),
    Evicted(Arc<Item>),
    /// What was retired before and is to be freed now, without the lock.
    Unfreed(Vec<Arc<Item>>),
    Wait,
}
