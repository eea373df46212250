//! Bytes and places reserved before anything is copied; atomic, so a reservation waits for nobody.

use crate::sync::{AtomicUsize, Ordering};

/// The bytes reserved, and how many may be.
#[derive(Debug)]
pub(crate) struct Budget {
    max_places: usize,
    max_bytes: usize,
    places: AtomicUsize,
    bytes: AtomicUsize,
}

impl Budget {
    pub(crate) fn new(max_places: usize, max_bytes: usize) -> Self {
        Self {
            max_places,
            max_bytes,
            places: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
        }
    }

    /// Reserves one place and `bytes`, or nothing. Never above the limits, not even for a moment; a reservation that
    /// fails at the bytes holds a place meanwhile.
    pub(crate) fn reserve(&self, bytes: usize) -> bool {
        if !add(&self.places, 1, self.max_places) {
            return false;
        }
        if add(&self.bytes, bytes, self.max_bytes) {
            return true;
        }
        self.places.fetch_sub(1, Ordering::SeqCst);
        false
    }

    /// Whether `reserve` would succeed now.
    pub(crate) fn fits(&self, bytes: usize) -> bool {
        self.places() < self.max_places && self.max_bytes.saturating_sub(self.bytes()) >= bytes
    }

    pub(crate) fn release_places(&self, count: usize) {
        self.places.fetch_sub(count, Ordering::SeqCst);
    }

    pub(crate) fn release_bytes(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::SeqCst);
    }

    pub(crate) fn places(&self) -> usize {
        self.places.load(Ordering::SeqCst)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::SeqCst)
    }
}

fn add(counter: &AtomicUsize, amount: usize, most: usize) -> bool {
    let more = |now: usize| now.checked_add(amount).filter(|&sum| sum <= most);
    counter
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
        .is_ok()
}

#[cfg(all(test, loom))]
mod models {
    use super::Budget;
    use std::sync::Arc;

    /// Reservations and releases of two threads never pass the limit and come back to zero.
    #[test]
    fn reserve_meets_release() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let budget = Arc::new(Budget::new(2, 10));
            let once = |budget: &Budget, bytes: usize| {
                let got = budget.reserve(bytes);
                assert!(budget.bytes() <= 10 && budget.places() <= 2);
                if got {
                    budget.release_bytes(bytes);
                    budget.release_places(1);
                }
            };
            let other = {
                let budget = budget.clone();
                loom::thread::spawn(move || once(&budget, 7))
            };
            once(&budget, 6);
            once(&budget, 3);
            other.join().unwrap();
            assert_eq!((budget.bytes(), budget.places()), (0, 0));
            assert!(budget.reserve(10) && !budget.fits(1));
        });
    }
}
