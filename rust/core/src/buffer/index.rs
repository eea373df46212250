//! The state that consumers share under the lock: what is ready, what is leased, and the two queues of those who wait.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};
use std::sync::Arc;

use crate::buffer::limits::{Ask, Entry, Label};
use crate::buffer::ready::{Key, Ready};
use crate::buffer::wanted::Wanted;
use crate::error::{Error, Result};
use crate::sync::Condvar;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Put,
    Take,
}

/// A consumer's selection, checked against what can ever be there.
#[derive(Clone, Debug)]
pub(crate) enum Want {
    Next(usize),
    Tasks(Arc<Wanted>),
}

impl Want {
    /// At least one trajectory and `most` at most.
    pub(crate) fn new(ask: Ask<'_>, most: usize) -> Result<Self> {
        match ask {
            Ask::Next(n) if (1..=most).contains(&n) => Ok(Self::Next(n)),
            Ask::Next(n) => Err(Error::Validation(format!(
                "n: {n} is not in 1..={most} (max_trajectories)"
            ))),
            Ask::Tasks(ordinals) => Ok(Self::Tasks(Arc::new(Wanted::new(ordinals, most)?))),
        }
    }

    pub(crate) fn need(&self) -> usize {
        match self {
            Self::Next(n) => *n,
            Self::Tasks(wanted) => wanted.len(),
        }
    }
}

/// A call that is made when something may have changed: it must be quick and call nothing of the buffer.
pub(crate) type Call = Box<dyn Fn() + Send + Sync>;

/// How a waiting call is woken when its turn may have come.
pub(crate) enum Event {
    Parked(Condvar),
    /// Runs under the lock.
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

/// One waiting call; only the first of its queue is ever woken.
#[derive(Debug)]
pub(crate) struct Ticket {
    /// Trajectories for `take`, bytes for `put`.
    pub(crate) need: usize,
    pub(crate) event: Event,
    /// A parked one was woken and has not looked since: waking it again would cost a system call for nothing. Changes
    /// under the lock only, so the models need not look at it.
    woken: Flag,
}

impl Ticket {
    pub(crate) fn new(need: usize, event: Event) -> Arc<Self> {
        Arc::new(Self {
            need,
            event,
            woken: Flag::new(false),
        })
    }

    pub(crate) fn wake(&self) {
        match &self.event {
            Event::Parked(parked) => {
                if !self.woken.swap(true, Relaxed) {
                    parked.notify_all();
                }
            }
            Event::Call(call) => call(),
        }
    }

    /// It looks now: what comes later has to wake it again.
    pub(crate) fn looks(&self) {
        self.woken.store(false, Relaxed);
    }
}

/// The tasks that the first in the queue of takers waits for, if it waits for tasks. One was missing when all keys were
/// looked at; since then whatever comes in is noted, and nobody looks again before nothing is missing any more. What
/// goes meanwhile (retired, dropped) is not noted: the next look finds out.
#[derive(Debug)]
struct Watch {
    wanted: Arc<Wanted>,
    seen: Vec<bool>,
    missing: usize,
}

impl Watch {
    fn note(&mut self, task: i64) {
        if let Some(place) = self.wanted.place(task) {
            self.missing -= usize::from(!self.seen[place]);
            self.seen[place] = true;
        }
    }

    /// The first task asked for that is missing.
    fn missing(&self) -> Option<i64> {
        let place = self.seen.iter().position(|&seen| !seen)?;
        self.wanted.ordinal(place)
    }
}

/// An arrival that has no place in the order yet, with all that the index asks for, so that nobody has to look for it
/// in cold memory under the lock.
#[derive(Debug)]
pub(crate) struct Arrival<T> {
    pub(crate) label: Label,
    pub(crate) bytes: usize,
    pub(crate) item: T,
}

pub(crate) type Leased<T> = Vec<(u64, T)>;

/// The trajectories held and who waits; `T` is what is kept for each trajectory.
#[derive(Debug)]
pub(crate) struct Index<T> {
    pub(crate) closed: bool,
    pub(crate) version: i64,
    pub(crate) ready: Ready<T>,
    /// Key and version of what is out.
    pub(crate) leased: BTreeMap<u64, (Key, i64)>,
    pub(crate) received: u64,
    pub(crate) committed: u64,
    pub(crate) dropped: BTreeMap<&'static str, u64>,
    pub(crate) takers: VecDeque<Arc<Ticket>>,
    pub(crate) putters: VecDeque<Arc<Ticket>>,
    /// Of the first of `takers`.
    watch: Option<Watch>,
}

impl<T> Index<T> {
    pub(crate) fn new() -> Self {
        Self {
            closed: false,
            version: 0,
            ready: Ready::new(),
            leased: BTreeMap::new(),
            received: 0,
            committed: 0,
            dropped: BTreeMap::new(),
            takers: VecDeque::new(),
            putters: VecDeque::new(),
            watch: None,
        }
    }

    pub(crate) fn queue(&mut self, side: Side) -> &mut VecDeque<Arc<Ticket>> {
        match side {
            Side::Put => &mut self.putters,
            Side::Take => &mut self.takers,
        }
    }

    /// Whether it is this one's turn: it is the first in its queue, or not queued and nobody is.
    pub(crate) fn is_first(&mut self, side: Side, ticket: &Arc<Ticket>) -> bool {
        let front = self.queue(side).front();
        front.is_none_or(|front| Arc::ptr_eq(front, ticket))
    }

    pub(crate) fn leave(&mut self, side: Side, ticket: &Arc<Ticket>) {
        if side == Side::Take && self.is_first(side, ticket) {
            self.watch = None;
        }
        self.queue(side).retain(|other| !Arc::ptr_eq(other, ticket));
    }

    pub(crate) fn count_dropped(&mut self, reason: &'static str, count: usize) {
        if count > 0 {
            *self.dropped.entry(reason).or_default() += count as u64;
        }
    }

    /// Gives an arrival its number and its place; on a closed buffer it is counted as dropped and given back.
    pub(crate) fn arrive(&mut self, arrival: Arrival<T>) -> Option<T> {
        let sequence = self.received;
        self.received += 1;
        if self.closed {
            self.count_dropped("closed", 1);
            return Some(arrival.item);
        }
        let key = Key {
            sequence,
            bytes: arrival.bytes,
            task: arrival.label.task,
        };
        self.admit(key, arrival.label.min_version, arrival.item);
        None
    }

    /// Puts what comes in, or comes back, in its place.
    pub(crate) fn admit(&mut self, key: Key, version: i64, item: T) {
        if let Some(watch) = &mut self.watch {
            watch.note(key.task);
        }
        self.ready.insert(key, version, item);
    }

    /// Leases what is wanted, if all of it is there. `first`: the caller is the first in the queue and waits if it is not.
    pub(crate) fn lease(&mut self, want: &Want, first: bool) -> Option<Leased<T>> {
        let mut leased = Vec::with_capacity(want.need());
        let mut lease = |(key, version, item): (Key, i64, T)| {
            self.leased.insert(key.sequence, (key, version));
            leased.push((key.sequence, item));
        };
        match want {
            Want::Next(n) if self.ready.len() < *n => return None,
            Want::Next(n) => {
                for _ in 0..*n {
                    self.ready.pop_first().map(&mut lease);
                }
            }
            Want::Tasks(_) if first && self.watch.as_ref().is_some_and(|w| w.missing > 0) => {
                return None
            }
            Want::Tasks(wanted) => match self.ready.take_tasks(wanted) {
                Ok(taken) => taken.into_iter().for_each(lease),
                Err(seen) => {
                    if first {
                        self.watch = Some(Watch {
                            wanted: wanted.clone(),
                            missing: seen.iter().filter(|&&seen| !seen).count(),
                            seen,
                        });
                    }
                    return None;
                }
            },
        }
        Some(leased)
    }

    /// The first taker, if it is worth a look whether all that it wants is there.
    pub(crate) fn next_taker(&self) -> Option<&Ticket> {
        let taker = self.takers.front()?;
        let complete = self.watch.as_ref().is_none_or(|watch| watch.missing == 0);
        (complete && self.ready.len() >= taker.need).then_some(taker)
    }

    /// A task that this call waits for, as far as it was its turn to look.
    pub(crate) fn missing(&mut self, side: Side, ticket: &Arc<Ticket>) -> Option<i64> {
        let own = side == Side::Take && self.is_first(side, ticket);
        self.watch.as_ref().filter(|_| own)?.missing()
    }

    /// All that is held, in no order.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let entry = |leased: bool| {
            move |(key, min_version): (Key, i64)| Entry {
                sequence: key.sequence,
                leased,
                bytes: key.bytes,
                min_version,
                task: key.task,
            }
        };
        let ready = self.ready.entries().map(entry(false));
        ready
            .chain(self.leased.values().copied().map(entry(true)))
            .collect()
    }
}
