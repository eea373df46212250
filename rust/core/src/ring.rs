//! A bounded queue of many producers and many consumers without a mutex (D. Vyukov's array queue).
//!
//! Each slot has a turn: `position` when it is free for the push of that position, `position + 1` when it holds the value
//! for the pop. Nobody waits, but a thread that is stopped between claiming a slot and handing it over hides that slot,
//! and to the consumers what lies behind it, until it goes on. That makes it mutex-free, not lock-free in the strict sense.
#![allow(unsafe_code)]

use std::cmp::Ordering::{Equal, Greater, Less};

use crate::sync::{AtomicU64, Ordering, UnsafeCell};

/// Positions on cache lines of their own, so that producers and consumers do not slow each other down.
#[derive(Debug)]
#[repr(align(128))]
struct Padded(AtomicU64);

#[derive(Debug)]
struct Slot<T> {
    turn: AtomicU64,
    value: UnsafeCell<Option<T>>,
}

#[derive(Debug)]
pub(crate) struct Ring<T> {
    slots: Box<[Slot<T>]>,
    push: Padded,
    pop: Padded,
}

// SAFETY: a value is reached only by the thread that claimed its slot by a compare-and-swap on `push` or `pop`, and
// claims of one slot follow each other by release (store of `turn`) and acquire (load of `turn`).
unsafe impl<T: Send> Sync for Ring<T> {}
// SAFETY: it owns its values.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T> Ring<T> {
    /// Room for `capacity` values, a power of two of at least 2.
    pub(crate) fn new(capacity: usize) -> Self {
        assert!(capacity >= 2 && capacity.is_power_of_two());
        let slot = |position| Slot {
            turn: AtomicU64::new(position),
            value: UnsafeCell::new(None),
        };
        Self {
            slots: (0..capacity as u64).map(slot).collect(),
            push: Padded(AtomicU64::new(0)),
            pop: Padded(AtomicU64::new(0)),
        }
    }

    fn slot(&self, position: u64) -> &Slot<T> {
        &self.slots[position as usize & (self.slots.len() - 1)]
    }

    /// Adds a value; gives it back when there is no room.
    pub(crate) fn push(&self, value: T) -> Result<(), T> {
        let mut position = self.push.0.load(Ordering::Relaxed);
        loop {
            let slot = self.slot(position);
            let turn = slot.turn.load(Ordering::Acquire);
            match turn.cmp(&position) {
                Equal => match claim(&self.push.0, position) {
                    Ok(()) => {
                        // SAFETY: this thread alone claimed `position`; the slot is empty until `turn` moves on.
                        slot.value.with_mut(|place| unsafe { *place = Some(value) });
                        slot.turn.store(position + 1, Ordering::Release);
                        return Ok(());
                    }
                    Err(now) => position = now,
                },
                Less => return Err(value),
                Greater => position = self.push.0.load(Ordering::Relaxed),
            }
        }
    }

    /// The next value; none when it is empty or its next slot is still being filled.
    pub(crate) fn pop(&self) -> Option<T> {
        let mut position = self.pop.0.load(Ordering::Relaxed);
        loop {
            let slot = self.slot(position);
            let turn = slot.turn.load(Ordering::Acquire);
            match turn.cmp(&(position + 1)) {
                Equal => match claim(&self.pop.0, position) {
                    Ok(()) => {
                        // SAFETY: this thread alone claimed `position`; the slot is full until `turn` moves on.
                        let value = slot.value.with_mut(|place| unsafe { (*place).take() });
                        let next = position + self.slots.len() as u64;
                        slot.turn.store(next, Ordering::Release);
                        return value;
                    }
                    Err(now) => position = now,
                },
                Less => return None,
                Greater => position = self.pop.0.load(Ordering::Relaxed),
            }
        }
    }
}

/// Moves `counter` on from `position`; gives what it is when another thread was faster.
fn claim(counter: &AtomicU64, position: u64) -> Result<(), u64> {
    counter
        .compare_exchange_weak(position, position + 1, Ordering::Relaxed, Ordering::Relaxed)
        .map(drop)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Ring;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicUsize, Ordering};

    proptest! {
        #[test]
        fn alone_it_is_a_bounded_queue(pushes in prop::collection::vec(any::<bool>(), 0..200)) {
            let (ring, mut model) = (Ring::new(4), VecDeque::new());
            for (value, push) in pushes.into_iter().enumerate() {
                if push {
                    let full = model.len() == 4;
                    prop_assert_eq!(ring.push(value), if full { Err(value) } else { Ok(()) });
                    if !full { model.push_back(value); }
                } else {
                    prop_assert_eq!(ring.pop(), model.pop_front());
                }
            }
        }
    }

    #[test]
    fn under_contention_nothing_is_lost_and_each_producer_keeps_its_order() {
        const EACH: usize = 20_000;
        let (ring, taken) = (Ring::new(64), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for producer in 0..3 {
                let ring = &ring;
                scope.spawn(move || {
                    for index in 0..EACH {
                        while ring.push((producer, index)).is_err() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut last = [None; 3];
                    while taken.load(Ordering::Relaxed) < 3 * EACH {
                        let Some((producer, index)) = ring.pop() else {
                            std::thread::yield_now();
                            continue;
                        };
                        assert!(last[producer] < Some(index));
                        last[producer] = Some(index);
                        taken.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(ring.pop(), None);
    }

    #[test]
    fn values_left_inside_are_dropped_with_it() {
        let value = std::sync::Arc::new(());
        let ring = Ring::new(2);
        ring.push(value.clone()).unwrap();
        drop(ring);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::Ring;
    use std::sync::Arc;

    fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    /// Two producers over a ring of two that is emptied meanwhile: it wraps, nothing is lost or doubled.
    #[test]
    fn pushes_meet_a_pop() {
        model(|| {
            let ring = Arc::new(Ring::new(2));
            let producers: Vec<_> = (0..2)
                .map(|value| {
                    let ring = ring.clone();
                    loom::thread::spawn(move || ring.push(value).is_ok())
                })
                .collect();
            let mut seen: Vec<i32> = ring.pop().into_iter().collect();
            assert!(producers
                .into_iter()
                .all(|producer| producer.join().unwrap()));
            assert!(ring.push(2).is_ok() || seen.is_empty());
            seen.extend(std::iter::from_fn(|| ring.pop()));
            seen.sort_unstable();
            assert!(seen == [0, 1] || seen == [0, 1, 2], "{seen:?}");
        });
    }

    /// Two consumers after wrapping: each value goes to exactly one.
    #[test]
    fn pops_meet_pops_and_a_push() {
        model(|| {
            let ring = Arc::new(Ring::new(2));
            assert!(ring.push(-1).is_ok() && ring.pop() == Some(-1));
            assert!(ring.push(0).is_ok());
            let producer = {
                let ring = ring.clone();
                loom::thread::spawn(move || ring.push(1).is_ok())
            };
            let consumer = {
                let ring = ring.clone();
                loom::thread::spawn(move || ring.pop())
            };
            let mut seen: Vec<i32> = ring.pop().into_iter().collect();
            assert!(producer.join().unwrap());
            seen.extend(consumer.join().unwrap());
            seen.extend(std::iter::from_fn(|| ring.pop()));
            seen.sort_unstable();
            assert_eq!(seen, [0, 1]);
        });
    }

    /// A full ring refuses; after a pop in another thread there is room or there is not, never a lost value.
    #[test]
    fn a_full_ring_gives_the_value_back() {
        model(|| {
            let ring = Arc::new(Ring::new(2));
            assert!(ring.push(0).is_ok() && ring.push(1).is_ok());
            let consumer = {
                let ring = ring.clone();
                loom::thread::spawn(move || ring.pop())
            };
            let pushed = ring.push(2).is_ok();
            let mut seen: Vec<i32> = consumer.join().unwrap().into_iter().collect();
            seen.extend(std::iter::from_fn(|| ring.pop()));
            assert_eq!(seen, if pushed { vec![0, 1, 2] } else { vec![0, 1] });
        });
    }
}
