//! Memory that was used before, kept for the next trajectory of about the same size.
//!
//! Fresh memory costs a page fault every 4 KiB, which takes many times longer than the copy into it. Sizes are rounded up
//! by at most an eighth, so that they fit again.

use std::collections::BTreeMap;

use crate::sync::{lock, AtomicUsize, Mutex, Ordering};

/// Below this the allocator reuses its memory by itself.
const SMALLEST: usize = 1 << 16;
/// Sizes for each doubling.
const STEPS: usize = 8;
const KEPT_PER_SIZE: usize = 16;

#[derive(Debug)]
pub(crate) struct Pool {
    by_size: Mutex<BTreeMap<usize, Vec<Vec<u8>>>>,
    kept: AtomicUsize,
}

impl Pool {
    pub(crate) fn new() -> Self {
        Self {
            by_size: Mutex::new(BTreeMap::new()),
            kept: AtomicUsize::new(0),
        }
    }

    /// As many bytes as should be allocated for `bytes`, so that they can be kept later.
    pub(crate) fn rounded(bytes: usize) -> usize {
        match bytes.checked_ilog2() {
            Some(doubling) if bytes >= SMALLEST => bytes.next_multiple_of((1 << doubling) / STEPS),
            _ => bytes,
        }
    }

    /// Memory with a capacity of at least `bytes`, if any was kept.
    pub(crate) fn get(&self, bytes: usize) -> Option<Vec<u8>> {
        if bytes < SMALLEST || self.kept() == 0 {
            return None;
        }
        let memory = lock(&self.by_size)
            .get_mut(&Self::rounded(bytes))
            .and_then(Vec::pop)?;
        self.kept.fetch_sub(memory.capacity(), Ordering::Relaxed);
        Some(memory)
    }

    /// Keeps the memory, if its size is one that is asked for again and there is a place.
    pub(crate) fn give(&self, memory: Vec<u8>) {
        let size = memory.capacity();
        if size < SMALLEST || Self::rounded(size) != size {
            return;
        }
        let mut by_size = lock(&self.by_size);
        let alike = by_size.entry(size).or_default();
        if alike.len() < KEPT_PER_SIZE {
            alike.push(memory);
            self.kept.fetch_add(size, Ordering::Relaxed);
        }
    }

    /// Frees until at most `bytes` are kept, the largest first.
    pub(crate) fn shrink(&self, bytes: usize) {
        let mut freed = Vec::new();
        let mut by_size = lock(&self.by_size);
        while self.kept() > bytes {
            let Some(mut largest) = by_size.last_entry() else {
                break;
            };
            match largest.get_mut().pop() {
                Some(memory) => {
                    self.kept.fetch_sub(memory.capacity(), Ordering::Relaxed);
                    freed.push(memory);
                }
                None => drop(largest.remove()),
            }
        }
        drop(by_size);
        drop(freed);
    }

    pub(crate) fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{Pool, SMALLEST};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sizes_waste_little_and_stay_what_they_are(bytes in SMALLEST..(100 << 20)) {
            let size = Pool::rounded(bytes);
            prop_assert!(size >= bytes && size - bytes <= bytes / 8);
            prop_assert_eq!(Pool::rounded(size), size);
        }
    }

    #[test]
    fn what_is_given_comes_back_and_is_bounded() {
        let pool = Pool::new();
        assert!(pool.get(100_000).is_none());
        let size = Pool::rounded(100_000);
        for _ in 0..20 {
            pool.give(vec![7; size]);
        }
        assert_eq!(pool.kept(), 16 * size);
        assert_eq!(pool.get(100_000).unwrap().capacity(), size);
        pool.give(vec![7; 100_001]); // of no size that is asked for
        pool.give(vec![7; 10]);
        pool.shrink(3 * size);
        assert_eq!(pool.kept(), 3 * size);
        pool.shrink(0);
        assert_eq!((pool.kept(), pool.get(100_000)), (0, None));
    }
}
