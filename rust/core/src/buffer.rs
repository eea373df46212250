//! The bounded buffer of finished trajectories between producers and the learner.
//!
//! Memory is bounded in bytes: room is reserved before anything is copied and given back when the copy is freed, so a
//! leased trajectory that somebody still reads counts. Producers and consumers wait parked, first come first served.
//! Nothing vanishes: what came in is ready, leased, committed or dropped under a reason.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::wait::Pace;
use crate::{Error, Result};

/// What `put` does when there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Wait.
    Block,
    /// Refuse with [`Error::Full`].
    Reject,
    /// Drop the trajectory that came first.
    DropOldest,
    /// Drop the trajectory with the oldest policy version.
    DropStalest,
}

impl Policy {
    /// Its name; also the reason under which it drops.
    pub fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Reject => "reject",
            Self::DropOldest => "drop_oldest",
            Self::DropStalest => "drop_stalest",
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [
            Self::Block,
            Self::Reject,
            Self::DropOldest,
            Self::DropStalest,
        ]
        .into_iter()
        .find(|policy| policy.name() == name)
        .ok_or_else(|| {
            invalid(format!(
                "policy: {name:?} is not block, reject, drop_oldest or drop_stalest"
            ))
        })
    }
}

/// Bounds of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Trajectories held at most, ready and leased.
    pub max_trajectories: usize,
    /// Bytes held at most, headers and payloads.
    pub max_bytes: usize,
    /// What `put` does when there is no room.
    pub policy: Policy,
}

/// Counters at one instant; `received = ready + leased + committed + dropped`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Trajectories that can be taken.
    pub ready: usize,
    /// Trajectories taken and neither committed nor given back.
    pub leased: usize,
    /// Trajectories being copied in.
    pub copying: usize,
    /// Bytes held, views of committed trajectories included.
    pub bytes: usize,
    /// Trajectories that came in.
    pub received: u64,
    /// Trajectories that were committed.
    pub committed: u64,
    /// Trajectories dropped, by reason.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Calls of `take` and of `put` that wait.
    pub waiting: (usize, usize),
    /// The version of the last `advance`.
    pub version: i64,
    /// No longer usable.
    pub closed: bool,
}

/// One trajectory as `snapshot` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Position in the order of completion.
    pub sequence: u64,
    /// Taken, not yet settled.
    pub leased: bool,
    /// Bytes of header and payload.
    pub bytes: usize,
    /// Oldest policy version of its tokens.
    pub min_version: i64,
}

/// An encoded trajectory in the buffer's memory.
#[derive(Debug)]
pub struct Item {
    // Declared before `charge`: the memory is freed first, its bytes are given back after.
    header: Blob,
    payload: Blob,
    min_version: i64,
    charge: Charge,
}

impl Item {
    /// The encoded header.
    pub fn header(&self) -> &[u8] {
        self.header.bytes()
    }

    /// The encoded payload; starts at a multiple of 64.
    pub fn payload(&self) -> &[u8] {
        self.payload.bytes()
    }

    /// Oldest policy version of its tokens.
    pub fn min_version(&self) -> i64 {
        self.min_version
    }
}

/// Bytes that start at a multiple of 64, so that arrays laid out at such offsets are aligned.
#[derive(Debug)]
struct Blob {
    data: Vec<u8>,
    start: usize,
}

const ALIGN: usize = 64;
const PAGE: usize = 4096;

impl Blob {
    fn copy(source: &[u8]) -> Result<Self> {
        let mut data: Vec<u8> = Vec::new();
        data.try_reserve_exact(source.len() + 2 * ALIGN)
            .map_err(|_| Error::Full(format!("no memory for {} bytes", source.len())))?;
        let mut start = data.as_ptr().align_offset(ALIGN).min(ALIGN);
        // Some CPUs copy 10 to 25 times slower with `rep movsb` when the destination lies up to a cache line behind
        // the source, modulo the page. Fresh large allocations on both sides produce just that, so step over it.
        let distance =
            (data.as_ptr() as usize + start).wrapping_sub(source.as_ptr() as usize) % PAGE;
        if (1..ALIGN).contains(&distance) {
            start += ALIGN;
        }
        data.resize(start, 0);
        data.extend_from_slice(source);
        Ok(Self { data, start })
    }

    fn bytes(&self) -> &[u8] {
        &self.data[self.start..]
    }
}

/// Bytes of the budget; given back when dropped. Never dropped under the lock.
#[derive(Debug)]
struct Charge {
    shared: Arc<Shared>,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.bytes -= self.bytes;
        state.wake();
    }
}

/// One parked call; only the first of its queue is ever woken.
#[derive(Debug)]
struct Ticket {
    /// Trajectories for `take`, bytes for `put`.
    need: usize,
    event: Condvar,
}

#[derive(Debug)]
struct State {
    limits: Limits,
    closed: bool,
    version: i64,
    next_sequence: u64,
    ready: BTreeMap<u64, Arc<Item>>,
    by_version: BTreeSet<(i64, u64)>,
    leased: BTreeMap<u64, (usize, i64)>,
    copying: usize,
    bytes: usize,
    received: u64,
    committed: u64,
    dropped: BTreeMap<&'static str, u64>,
    takers: VecDeque<Arc<Ticket>>,
    putters: VecDeque<Arc<Ticket>>,
}

impl State {
    fn fits(&self, bytes: usize) -> bool {
        self.ready.len() + self.leased.len() + self.copying < self.limits.max_trajectories
            && self.limits.max_bytes - self.bytes >= bytes
    }

    fn may_evict(&self) -> bool {
        matches!(self.limits.policy, Policy::DropOldest | Policy::DropStalest)
            && !self.ready.is_empty()
    }

    /// Wakes whoever is next and can go on now.
    fn wake(&self) {
        if let Some(taker) = self.takers.front() {
            if self.ready.len() >= taker.need {
                taker.event.notify_one();
            }
        }
        if let Some(putter) = self.putters.front() {
            if self.fits(putter.need) || self.may_evict() {
                putter.event.notify_one();
            }
        }
    }

    fn wake_all(&self) {
        self.takers
            .iter()
            .chain(&self.putters)
            .for_each(|ticket| ticket.event.notify_all());
    }

    fn queue(&mut self, side: Side) -> &mut VecDeque<Arc<Ticket>> {
        match side {
            Side::Put => &mut self.putters,
            Side::Take => &mut self.takers,
        }
    }

    fn drop_count(&mut self, reason: &'static str, count: usize) {
        if count > 0 {
            *self.dropped.entry(reason).or_default() += count as u64;
        }
    }

    fn no_room(&self, bytes: usize) -> String {
        format!(
            "no room for {bytes} bytes: {} of {} trajectories and {} of {} bytes are held",
            self.ready.len() + self.leased.len() + self.copying,
            self.limits.max_trajectories,
            self.bytes,
            self.limits.max_bytes
        )
    }

    fn waited_for(&self, side: Side, need: usize) -> String {
        let held = format!(
            "{} ready, {} leased, {} of {} bytes held, {} producers waiting for room",
            self.ready.len(),
            self.leased.len(),
            self.bytes,
            self.limits.max_bytes,
            self.putters.len()
        );
        match side {
            Side::Put => format!("room for a trajectory of {need} bytes ({held})"),
            Side::Take => format!("{need} trajectories ({held})"),
        }
    }

    fn lease(&mut self, n: usize) -> Option<Vec<(u64, Arc<Item>)>> {
        if self.ready.len() < n {
            return None;
        }
        let mut items = Vec::with_capacity(n);
        while items.len() < n {
            let (sequence, item) = self.ready.pop_first()?;
            self.by_version.remove(&(item.min_version, sequence));
            self.leased
                .insert(sequence, (item.charge.bytes, item.min_version));
            items.push((sequence, item));
        }
        Some(items)
    }

    fn insert(&mut self, sequence: u64, item: Arc<Item>) {
        self.by_version.insert((item.min_version, sequence));
        self.ready.insert(sequence, item);
    }

    fn remove(&mut self, sequence: u64) -> Option<Arc<Item>> {
        let item = self.ready.remove(&sequence)?;
        self.by_version.remove(&(item.min_version, sequence));
        Some(item)
    }

    /// Takes the next victim of the policy out; the caller drops it without the lock.
    fn evict(&mut self) -> Option<Arc<Item>> {
        let sequence = match self.limits.policy {
            Policy::Block | Policy::Reject => None,
            Policy::DropOldest => self.ready.first_key_value().map(|(&sequence, _)| sequence),
            Policy::DropStalest => self.by_version.first().map(|&(_, sequence)| sequence),
        }?;
        self.drop_count(self.limits.policy.name(), 1);
        self.remove(sequence)
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        let state = State {
            limits,
            closed: false,
            version: 0,
            next_sequence: 0,
            ready: BTreeMap::new(),
            by_version: BTreeSet::new(),
            leased: BTreeMap::new(),
            copying: 0,
            bytes: 0,
            received: 0,
            committed: 0,
            dropped: BTreeMap::new(),
            takers: VecDeque::new(),
            putters: VecDeque::new(),
        };
        Ok(Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
            }),
        })
    }

    /// Copies one encoded trajectory in; gives the headers of those that the policy dropped for it.
    ///
    /// Policies that drop wait too when everything that is left is leased.
    ///
    /// # Errors
    /// [`Error::Validation`] at once for one that can never fit; [`Error::Full`] by [`Policy::Reject`];
    /// [`Error::Closed`]; what `pace` says. It is not stored then, but room may have been made for it.
    pub fn put(
        &self,
        header: &[u8],
        payload: &[u8],
        min_version: i64,
        pace: &mut dyn Pace,
    ) -> Result<Vec<Vec<u8>>> {
        let bytes = header.len() + payload.len();
        if min_version < 0 {
            return Err(invalid(format!("min_version: {min_version} is negative")));
        }
        let limits = self.shared.lock().limits;
        if bytes > limits.max_bytes {
            return Err(invalid(format!(
                "trajectory: {bytes} bytes can never fit into max_bytes = {}",
                limits.max_bytes
            )));
        }
        let mut evicted = Vec::new();
        let attempt = |state: &mut State| {
            if state.fits(bytes) {
                state.bytes += bytes;
                state.copying += 1;
                return Attempt::Done(());
            }
            match state.evict() {
                Some(victim) => Attempt::Evicted(victim),
                None if limits.policy == Policy::Reject => {
                    Attempt::Failed(Error::Full(state.no_room(bytes)))
                }
                None => Attempt::Wait,
            }
        };
        self.enter(Side::Put, bytes, pace, &mut evicted, attempt)?;
        let slot = Slot {
            charge: Some(Charge {
                shared: self.shared.clone(),
                bytes,
            }),
        };
        slot.publish(header, payload, min_version)?;
        Ok(evicted)
    }

    /// Leases `n` trajectories in order of completion, all or none.
    ///
    /// # Errors
    /// [`Error::Validation`] at once for an `n` that can never be there; [`Error::Closed`]; what `pace` says.
    pub fn take(&self, n: usize, pace: &mut dyn Pace) -> Result<Vec<Lease>> {
        self.check_count(n)?;
        let attempt = |state: &mut State| match state.lease(n) {
            Some(items) => Attempt::Done(items),
            None => Attempt::Wait,
        };
        let items = self.enter(Side::Take, n, pace, &mut Vec::new(), attempt)?;
        Ok(self.leases(items))
    }

    /// [`Self::take`] without waiting: none when fewer than `n` are ready or others wait for theirs.
    ///
    /// # Errors
    /// [`Error::Validation`] and [`Error::Closed`] as [`Self::take`].
    pub fn try_take(&self, n: usize) -> Result<Option<Vec<Lease>>> {
        self.check_count(n.max(1))?;
        let mut state = self.shared.lock();
        if state.closed {
            return Err(closed());
        }
        let items = if state.takers.is_empty() {
            state.lease(n)
        } else {
            None
        };
        drop(state);
        Ok(items.map(|items| self.leases(items)))
    }

    /// Tells the current policy version and drops ready trajectories older than `keep_from`, reason `stale`; gives their
    /// headers.
    ///
    /// # Errors
    /// [`Error::Validation`] when the version goes back; [`Error::Closed`].
    pub fn advance(&self, version: i64, keep_from: Option<i64>) -> Result<Vec<Vec<u8>>> {
        let mut state = self.shared.lock();
        if state.closed {
            return Err(closed());
        }
        if version < state.version {
            return Err(invalid(format!(
                "version: {version} is below the current version {}",
                state.version
            )));
        }
        state.version = version;
        let mut old = Vec::new();
        if let Some(keep_from) = keep_from {
            let sequences: Vec<u64> = state
                .by_version
                .range(..(keep_from, 0))
                .map(|&(_, sequence)| sequence)
                .collect();
            old.extend(
                sequences
                    .into_iter()
                    .filter_map(|sequence| state.remove(sequence)),
            );
            state.drop_count("stale", old.len());
            state.wake();
        }
        drop(state);
        Ok(old.iter().map(|item| item.header().to_vec()).collect())
    }

    /// Ends the buffer: everybody who waits gets [`Error::Closed`], what is ready is freed (reason `closed`). Leases and
    /// views stay valid. A second call changes nothing.
    pub fn close(&self) {
        let mut state = self.shared.lock();
        state.closed = true;
        let ready = std::mem::take(&mut state.ready);
        state.by_version.clear();
        state.drop_count("closed", ready.len());
        state.wake_all();
        drop(state);
        drop(ready);
    }

    /// Counters now; works on a closed buffer too.
    pub fn stats(&self) -> Stats {
        let state = self.shared.lock();
        Stats {
            ready: state.ready.len(),
            leased: state.leased.len(),
            copying: state.copying,
            bytes: state.bytes,
            received: state.received,
            committed: state.committed,
            dropped: state.dropped.clone(),
            waiting: (state.takers.len(), state.putters.len()),
            version: state.version,
            closed: state.closed,
        }
    }

    /// Every trajectory held, in order of completion; for inspection.
    pub fn snapshot(&self) -> Vec<Entry> {
        let state = self.shared.lock();
        let ready = state.ready.iter().map(|(&sequence, item)| Entry {
            sequence,
            leased: false,
            bytes: item.charge.bytes,
            min_version: item.min_version,
        });
        let leased = state
            .leased
            .iter()
            .map(|(&sequence, &(bytes, min_version))| Entry {
                sequence,
                leased: true,
                bytes,
                min_version,
            });
        let mut entries: Vec<Entry> = ready.chain(leased).collect();
        entries.sort_by_key(|entry| entry.sequence);
        entries
    }

    fn check_count(&self, n: usize) -> Result<()> {
        let most = self.shared.lock().limits.max_trajectories;
        if n == 0 || n > most {
            return Err(invalid(format!(
                "n: {n} is not in 1..={most} (max_trajectories)"
            )));
        }
        Ok(())
    }

    fn leases(&self, items: Vec<(u64, Arc<Item>)>) -> Vec<Lease> {
        let lease = |(sequence, item)| Lease {
            shared: self.shared.clone(),
            sequence,
            item: Some(item),
        };
        items.into_iter().map(lease).collect()
    }

    /// Runs `attempt` under the lock when this call is first in its queue, and parks in between.
    fn enter<T>(
        &self,
        side: Side,
        need: usize,
        pace: &mut dyn Pace,
        evicted: &mut Vec<Vec<u8>>,
        mut attempt: impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<T> {
        let ticket = Arc::new(Ticket {
            need,
            event: Condvar::new(),
        });
        let mut queued = false;
        let mut pause = None;
        let mut state = self.shared.lock();
        let outcome = loop {
            if state.closed {
                break Err(closed());
            }
            let first = match state.queue(side).front() {
                Some(front) => Arc::ptr_eq(front, &ticket),
                None => true,
            };
            let attempted = if first {
                attempt(&mut state)
            } else {
                Attempt::Wait
            };
            match attempted {
                Attempt::Done(value) => break Ok(value),
                Attempt::Failed(error) => break Err(error),
                Attempt::Evicted(_) | Attempt::Wait if !queued => {
                    state.queue(side).push_back(ticket.clone());
                    queued = true;
                }
                _ => {}
            }
            if let Attempt::Evicted(victim) = attempted {
                // Its bytes come back when it is dropped, which takes the lock.
                drop(state);
                evicted.push(victim.header().to_vec());
                drop(victim);
                state = self.shared.lock();
            } else if let Some(pause) = pause.take() {
                state = ticket
                    .event
                    .wait_timeout(state, pause)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            } else {
                // Asked without the lock; whether to park is looked at again afterwards, so no event is missed.
                drop(state);
                let answer = pace.next();
                state = self.shared.lock();
                match answer {
                    Ok(longest) => pause = Some(longest),
                    Err(stop) => break Err(stop.error(&state.waited_for(side, need))),
                }
            }
        };
        if queued {
            state
                .queue(side)
                .retain(|other| !Arc::ptr_eq(other, &ticket));
        }
        state.wake();
        outcome
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.close();
    }
}

#[derive(Clone, Copy)]
enum Side {
    Put,
    Take,
}

enum Attempt<T> {
    Done(T),
    Failed(Error),
    Evicted(Arc<Item>),
    Wait,
}

/// Room for one trajectory that is being copied in.
struct Slot {
    charge: Option<Charge>,
}

impl Slot {
    fn publish(mut self, header: &[u8], payload: &[u8], min_version: i64) -> Result<()> {
        let (header, payload) = (Blob::copy(header)?, Blob::copy(payload)?);
        let Some(charge) = self.charge.take() else {
            return Ok(());
        };
        let shared = charge.shared.clone();
        let item = Arc::new(Item {
            header,
            payload,
            min_version,
            charge,
        });
        let mut state = shared.lock();
        state.copying -= 1;
        if state.closed {
            drop(state);
            drop(item);
            return Err(closed());
        }
        let sequence = state.next_sequence;
        state.next_sequence += 1;
        state.received += 1;
        state.insert(sequence, item);
        state.wake();
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            charge.shared.lock().copying -= 1;
            // `charge` is dropped here: it gives the bytes back and wakes.
        }
    }
}

/// One trajectory taken out of the buffer. It must be committed or given back; dropping it gives it back.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
    sequence: u64,
    item: Option<Arc<Item>>,
}

impl Lease {
    /// Its position in the order of completion.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// What is leased; a clone of it keeps the memory (and its share of the budget) beyond the lease.
    pub fn item(&self) -> Option<&Arc<Item>> {
        self.item.as_ref()
    }

    /// The trajectory has been used up.
    pub fn commit(mut self) {
        self.settle(true);
    }

    /// The trajectory goes back to its place in the order of completion.
    pub fn give_back(mut self) {
        self.settle(false);
    }

    fn settle(&mut self, committed: bool) {
        let Some(item) = self.item.take() else { return };
        let mut state = self.shared.lock();
        state.leased.remove(&self.sequence);
        if committed {
            state.committed += 1;
        } else if state.closed {
            state.drop_count("closed", 1);
        } else {
            state.insert(self.sequence, item.clone());
        }
        state.wake();
        drop(state);
        drop(item);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.settle(false);
    }
}
