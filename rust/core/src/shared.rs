//! Payloads from one process to another through memory that both have mapped: copied in once, read in place.
//!
//! One sender, one receiver: counters of what was published and what is released, an entry for each payload, and the
//! bytes. Neither side waits here. Whoever finds nothing to do announces that in the memory, passes a full fence and
//! looks again; whoever makes something available publishes it, passes a full fence and looks for the announcement, and
//! is told to ring. How to ring and how to sleep is the caller's affair, and so is that a peer may vanish.
//!
//! Nothing that the other side writes is trusted: counters must move on and stay within what can be under way, places
//! must lie inside. What this side itself wrote is never read back.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::sync::{fence, Ordering};
use crate::wire::MAX_HEADER_BYTES;
use crate::{Error, Result};

mod region;

use region::{places, ALIGN};
pub use region::{total_bytes, Region};

/// Some CPUs copy 10 to 25 times slower with `rep movsb` when the destination lies up to a cache line behind the source,
/// modulo this.
const PAGE: usize = 4096;

fn invalid(text: String) -> Error {
    Error::Validation(text)
}

fn garbage(text: &str) -> Error {
    Error::Transport(format!("shared memory: {text}"))
}

/// Where a payload and, at a multiple of 64 behind it, its header lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The number of the payload.
    ticket: u64,
    start: usize,
    payload: usize,
    header: usize,
}

impl Place {
    /// First byte and number of bytes.
    pub fn payload(&self) -> (usize, usize) {
        (self.start, self.payload)
    }

    /// First byte and number of bytes.
    pub fn header(&self) -> (usize, usize) {
        (
            self.start + self.payload.next_multiple_of(ALIGN),
            self.header,
        )
    }

    fn stop(&self) -> usize {
        self.start + taken(self.header, self.payload)
    }
}

/// The sending end.
#[derive(Debug)]
pub struct Writer {
    region: Arc<Region>,
    published: u64,
    /// Starts and stops of what is not released, oldest first.
    used: VecDeque<(usize, usize)>,
    announced: bool,
}

impl Writer {
    /// Of memory that nobody has written to.
    pub fn new(region: Arc<Region>) -> Self {
        Self {
            region,
            published: 0,
            used: VecDeque::new(),
            announced: false,
        }
    }

    /// Room for a payload (copied from address `from`) and a header, or none: then the receiver will say so to this
    /// side when something has been released.
    ///
    /// # Errors
    /// [`Error::Validation`] for what can never fit; [`Error::Transport`] when the other side breaks the protocol.
    pub fn reserve(&mut self, header: usize, payload: usize, from: usize) -> Result<Option<Place>> {
        let capacity = self.region.capacity();
        if header > MAX_HEADER_BYTES {
            return Err(invalid(format!(
                "header: {header} bytes, at most {MAX_HEADER_BYTES}"
            )));
        }
        if payload > capacity || need(header, payload) > capacity {
            return Err(invalid(format!(
                "payload: {payload} bytes with a header of {header} can never fit into {capacity}"
            )));
        }
        self.look()?;
        let mut start = self.room(need(header, payload));
        if start.is_none() {
            // Half of it, so that the two do not take turns for each payload; told earlier where that would not come.
            self.announce(self.used.len().div_ceil(2));
            self.look()?;
            start = self.room(need(header, payload));
        }
        Ok(start.map(|start| {
            self.withdraw();
            let to = self.region.address(start, 0) as usize;
            let slow = (1..ALIGN).contains(&(to.wrapping_sub(from) % PAGE));
            Place {
                ticket: self.published,
                start: if slow { start + ALIGN } else { start },
                payload,
                header,
            }
        }))
    }

    /// Copies into a place that was reserved.
    ///
    /// # Panics
    /// When it was reserved for other lengths.
    pub fn fill(&self, place: &Place, header: &[u8], payload: &[u8]) {
        assert!(header.len() == place.header && payload.len() == place.payload);
        self.region.write(place.start, payload);
        self.region.write(place.header().0, header);
    }

    /// Hands what was filled over. True: the receiver sleeps and must be woken.
    ///
    /// # Panics
    /// When another place was reserved since.
    #[must_use]
    pub fn publish(&mut self, place: Place) -> bool {
        assert_eq!(place.ticket, self.published);
        let entry = self.region.entry(place.ticket);
        entry.start.store(place.start as u64, Ordering::Relaxed);
        entry.payload.store(place.payload as u64, Ordering::Relaxed);
        entry.header.store(place.header as u64, Ordering::Relaxed);
        self.used.push_back((place.start, place.stop()));
        self.published += 1;
        let control = self.region.control();
        control.published.0.store(self.published, Ordering::Release);
        fence(Ordering::SeqCst);
        let asleep = &control.asleep.0;
        asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::Relaxed) != 0
    }

    /// How many are not released. Unless none, the receiver will say so to this side when all are.
    ///
    /// # Errors
    /// [`Error::Transport`] when the other side breaks the protocol.
    pub fn unreleased(&mut self) -> Result<usize> {
        self.look()?;
        if !self.used.is_empty() {
            self.announce(self.used.len());
            self.look()?;
        }
        if self.used.is_empty() {
            self.withdraw();
        }
        Ok(self.used.len())
    }

    fn announce(&mut self, more: usize) {
        let oldest = self.published - self.used.len() as u64;
        let wanted = &self.region.control().wanted.0;
        wanted.store(oldest + more as u64, Ordering::Relaxed);
        self.announced = true;
        fence(Ordering::SeqCst);
    }

    fn withdraw(&mut self) {
        if std::mem::take(&mut self.announced) {
            self.region.control().wanted.0.store(0, Ordering::Relaxed);
        }
    }

    /// Forgets what has been released.
    fn look(&mut self) -> Result<()> {
        let below = self.region.control().released.0.load(Ordering::Acquire);
        let oldest = self.published - self.used.len() as u64;
        if !(oldest..=self.published).contains(&below) {
            return Err(garbage(&format!(
                "{below} payloads released, expected {oldest} to {}",
                self.published
            )));
        }
        self.used.drain(..(below - oldest) as usize);
        Ok(())
    }

    /// Where `bytes` fit in a row: at the start when all is free (that memory is in the caches), else behind the newest
    /// up to the oldest or the end, else at the start.
    fn room(&self, bytes: usize) -> Option<usize> {
        let (Some(oldest), Some(newest)) = (self.used.front(), self.used.back()) else {
            return Some(0);
        };
        if self.used.len() == places(self.region.capacity()) {
            return None;
        }
        let start = newest.1.next_multiple_of(ALIGN);
        let wrapped = newest.0 < oldest.0;
        let stop = if wrapped {
            oldest.0
        } else {
            self.region.capacity()
        };
        if start + bytes <= stop {
            return Some(start);
        }
        (!wrapped && bytes <= oldest.0).then_some(0)
    }
}

/// What a payload takes from its start on; not nothing, so that places differ.
fn taken(header: usize, payload: usize) -> usize {
    (payload.next_multiple_of(ALIGN) + header).max(1)
}

/// What it takes at most: a place one cache line on may be the better one.
fn need(header: usize, payload: usize) -> usize {
    ALIGN + taken(header, payload)
}

/// The receiving end.
#[derive(Debug)]
pub struct Reader {
    region: Arc<Region>,
    /// The next payload to be taken.
    head: u64,
    /// What was published when this side looked last.
    seen: u64,
    /// All below are released.
    below: u64,
    /// What the sender was told of that when it waited.
    told: u64,
    /// Of `below` and those after it up to `head`: whether it is released.
    done: VecDeque<bool>,
}

impl Reader {
    /// Of memory from which nobody has read.
    pub fn new(region: Arc<Region>) -> Self {
        Self {
            region,
            head: 0,
            seen: 0,
            below: 0,
            told: 0,
            done: VecDeque::new(),
        }
    }

    /// The memory in which places lie.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The next payload, none when there is none now.
    ///
    /// # Errors
    /// [`Error::Transport`] when the other side breaks the protocol; it is of no use any more.
    pub fn take(&mut self) -> Result<Option<Place>> {
        if self.head == self.seen {
            let published = self.published();
            let most = places(self.region.capacity()) as u64;
            if published < self.head || published - self.below > most {
                return Err(garbage(&format!(
                    "{published} payloads published, expected {} to {}",
                    self.head,
                    self.below + most
                )));
            }
            if published == self.head {
                return Ok(None);
            }
            self.seen = published;
        }
        let entry = self.region.entry(self.head);
        let number = |value: &crate::sync::AtomicU64| value.load(Ordering::Relaxed);
        let (start, payload, header) = (
            number(&entry.start),
            number(&entry.payload),
            number(&entry.header),
        );
        let capacity = self.region.capacity() as u64;
        let inside = start <= capacity
            && start.is_multiple_of(ALIGN as u64)
            && payload <= capacity - start
            && header <= MAX_HEADER_BYTES as u64
            && (start + payload).next_multiple_of(ALIGN as u64) + header <= capacity;
        if !inside {
            return Err(garbage(&format!(
                "{payload} bytes and a header of {header} at {start} of {capacity}"
            )));
        }
        let place = Place {
            ticket: self.head,
            start: start as usize,
            payload: payload as usize,
            header: header as usize,
        };
        self.head += 1;
        self.done.push_back(false);
        Ok(Some(place))
    }

    /// The sender may use the place again. Twice is a fault of the caller's that changes nothing.
    pub fn release(&mut self, place: &Place) {
        let index = place.ticket.checked_sub(self.below);
        if let Some(done) = index.and_then(|index| self.done.get_mut(index as usize)) {
            *done = true;
        }
        let before = self.below;
        while self.done.front() == Some(&true) {
            self.done.pop_front();
            self.below += 1;
        }
        if self.below != before {
            let released = &self.region.control().released.0;
            released.store(self.below, Ordering::Release);
            fence(Ordering::SeqCst);
        }
    }

    /// Whether the sender waits and is to be told of what was released: when that is as much as it wants, and of
    /// anything when there is nothing more to take (`pause`: now). To be asked after each `take` and `release`.
    #[must_use]
    pub fn must_tell(&mut self, pause: bool) -> bool {
        if self.told == self.below {
            return false;
        }
        let wanted = &self.region.control().wanted.0;
        let least = wanted.load(Ordering::Relaxed);
        if least == 0 || !(pause || self.below >= least || self.is_empty()) {
            return false;
        }
        self.told = self.below;
        wanted.swap(0, Ordering::Relaxed) != 0
    }

    /// Announces that this side is about to sleep. False: something was published meanwhile.
    #[must_use]
    pub fn doze(&self) -> bool {
        let asleep = &self.region.control().asleep.0;
        asleep.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.is_empty()
    }

    /// Takes that back.
    pub fn rise(&self) {
        self.region.control().asleep.0.store(0, Ordering::Relaxed);
    }

    /// Whether there is nothing to take now.
    pub fn is_empty(&self) -> bool {
        self.published() == self.head
    }

    fn published(&self) -> u64 {
        self.region.control().published.0.load(Ordering::Acquire)
    }
}

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
