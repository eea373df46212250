//! Memory that was used before, kept for the next trajectory of about the same size.
//!
//! Fresh memory costs a page fault every 4 KiB, which takes many times longer than the copy into it. Sizes are rounded up
//! by at most an eighth, so that they fit again. Every class is a ring, so nobody waits here.

use crate::ring::Ring;
use crate::sync::{AtomicUsize, Ordering};

/// Below this the allocator reuses its memory by itself.
const SMALLEST: usize = 1 << 16;
/// Classes for each doubling.
const STEPS: usize = 8;
#[cfg(not(loom))]
const DOUBLINGS: usize = 10;
#[cfg(loom)]
const DOUBLINGS: usize = 0;
const KEPT_PER_CLASS: usize = 16;

#[derive(Debug)]
pub(crate) struct Pool {
    classes: Vec<Ring<Vec<u8>>>,
    kept: AtomicUsize,
}

/// The class of this many bytes and how many it has.
fn class(bytes: usize) -> (usize, usize) {
    let doubling = (bytes.max(SMALLEST) / SMALLEST).ilog2() as usize;
    let step = (SMALLEST << doubling) / STEPS;
    let steps = bytes.saturating_sub(SMALLEST << doubling).div_ceil(step);
    (
        doubling * STEPS + steps,
        (SMALLEST << doubling) + steps * step,
    )
}

impl Pool {
    pub(crate) fn new() -> Self {
        Self {
            classes: (0..DOUBLINGS * STEPS)
                .map(|_| Ring::new(KEPT_PER_CLASS))
                .collect(),
            kept: AtomicUsize::new(0),
        }
    }

    /// Memory with a capacity of at least `bytes`, if any was kept.
    pub(crate) fn get(&self, bytes: usize) -> Option<Vec<u8>> {
        let memory = self
            .classes
            .get(class(bytes).0)
            .filter(|_| bytes >= SMALLEST)?
            .pop()?;
        self.kept.fetch_sub(memory.capacity(), Ordering::Relaxed);
        Some(memory)
    }

    /// As many bytes as should be allocated for `bytes`, so that they can be kept later.
    pub(crate) fn rounded(&self, bytes: usize) -> usize {
        let (index, size) = class(bytes);
        if bytes >= SMALLEST && index < self.classes.len() {
            size
        } else {
            bytes
        }
    }

    /// Keeps the memory, if its size is that of a class and there is a place.
    pub(crate) fn give(&self, memory: Vec<u8>) {
        let (index, size) = class(memory.capacity());
        if memory.capacity() < SMALLEST || size != memory.capacity() {
            return;
        }
        if let Some(ring) = self.classes.get(index) {
            self.kept.fetch_add(size, Ordering::Relaxed);
            if ring.push(memory).is_err() {
                self.kept.fetch_sub(size, Ordering::Relaxed);
            }
        }
    }

    /// Frees until at most `bytes` are kept.
    pub(crate) fn shrink(&self, bytes: usize) {
        for ring in self.classes.iter().rev() {
            while self.kept() > bytes {
                let Some(memory) = ring.pop() else { break };
                self.kept.fetch_sub(memory.capacity(), Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{class, Pool, SMALLEST};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn classes_hold_what_they_are_for_and_waste_little(bytes in SMALLEST..(100 << 20)) {
            let (index, size) = class(bytes);
            prop_assert!(size >= bytes && size - bytes <= bytes / 8);
            prop_assert_eq!(class(size), (index, size));
            prop_assert!(class(size + 1).0 == index + 1);
        }
    }

    #[test]
    fn what_is_given_comes_back_and_is_bounded() {
        let pool = Pool::new();
        assert!(pool.get(100_000).is_none());
        let size = pool.rounded(100_000);
        for _ in 0..20 {
            pool.give(vec![7; size]);
        }
        assert_eq!(pool.kept(), 16 * size);
        assert_eq!(pool.get(100_000).unwrap().capacity(), size);
        pool.give(vec![7; 100_001]); // of no class
        pool.give(vec![7; 10]);
        pool.shrink(3 * size);
        assert_eq!(pool.kept(), 3 * size);
        pool.shrink(0);
        assert_eq!((pool.kept(), pool.get(100_000)), (0, None));
    }
}
