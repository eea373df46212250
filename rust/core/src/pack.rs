//! Packing of ragged segments into few rows: best fit decreasing in nearly linear time, by a radix sort, a bitset over the
//! free room, and one heap of bins per room.

use crate::error::{Error, Result};

/// Bins of a packing: bin `b` holds the items `order[offsets[b]..offsets[b + 1]]`, in ascending index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bins {
    /// Item indices, bin after bin.
    pub order: Vec<i64>,
    /// Where each bin starts; one more than there are bins.
    pub offsets: Vec<i64>,
}

impl Bins {
    /// Number of bins.
    pub fn count(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The items of one bin.
    pub fn bin(&self, index: usize) -> &[i64] {
        &self.order[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    fn from_assignment(bin_of: &[u32], bins: usize) -> Self {
        // Counting sort: stable, so items stay in ascending index inside a bin.
        let mut offsets = vec![0i64; bins + 1];
        for &bin in bin_of {
            offsets[bin as usize + 1] += 1;
        }
        for bin in 0..bins {
            offsets[bin + 1] += offsets[bin];
        }
        let mut next = offsets.clone();
        let mut order = vec![0i64; bin_of.len()];
        for (item, &bin) in bin_of.iter().enumerate() {
            order[next[bin as usize] as usize] = item as i64;
            next[bin as usize] += 1;
        }
        Self { order, offsets }
    }
}

pub(crate) fn check_lengths(lengths: &[i64], capacity: i64, name: &'static str) -> Result<()> {
    if capacity < 1 {
        return Err(Error::Validation(format!(
            "{name}: {capacity} must be at least 1"
        )));
    }
    if u32::try_from(lengths.len()).is_err() {
        return Err(Error::Validation(format!(
            "lengths: {} segments are too many",
            lengths.len()
        )));
    }
    for (index, &length) in lengths.iter().enumerate() {
        if length < 1 {
            return Err(Error::Validation(format!(
                "lengths[{index}]: {length} is not a positive number of tokens"
            )));
        }
        if length > capacity {
            return Err(Error::Validation(format!(
                "lengths[{index}]: {length} tokens do not fit into {name} = {capacity}"
            )));
        }
    }
    Ok(())
}

/// Packs `lengths` into few bins of `capacity`: best fit, longest first; ties go to the smaller index, so equal input
/// gives equal output.
///
/// # Errors
/// [`Error::Validation`] names the first length that is not in `1..=capacity`.
pub fn pack(lengths: &[i64], capacity: i64) -> Result<Bins> {
    check_lengths(lengths, capacity, "capacity")?;
    let (bin_of, bins) = best_fit_decreasing(lengths, capacity);
    Ok(Bins::from_assignment(&bin_of, bins))
}

/// Largest capacity for which rooms are table indices; above it the table would cost more than the search saves.
const MAX_TABLE: i64 = 1 << 22;
const NONE: u32 = u32::MAX;

/// Items by falling length, equal ones by rising index. Lengths are positive, fewer than 2^32.
pub(crate) fn longest_first(lengths: &[i64]) -> Vec<u32> {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let Ok(range) = u32::try_from(longest) else {
        let mut items: Vec<u32> = (0..lengths.len() as u32).collect();
        items.sort_by_key(|&item| std::cmp::Reverse(lengths[item as usize]));
        return items;
    };
    // Key and index in one word, so that every pass reads in order; least significant digit first keeps ties in order.
    let mut from: Vec<u64> = (0u64..)
        .zip(lengths)
        .map(|(index, &length)| ((longest - length) as u64) << 32 | index)
        .collect();
    if lengths.len() < 256 {
        from.sort_unstable();
        return from.into_iter().map(|word| word as u32).collect();
    }
    let bits = 32 - range.leading_zeros();
    let passes = bits.div_ceil(11);
    let width = bits.div_ceil(passes);
    let mask = (1usize << width) - 1;
    let mut to = vec![0u64; from.len()];
    for pass in 0..passes {
        let shift = 32 + pass * width;
        let mut starts = [0u32; 1 << 11];
        for word in &from {
            starts[(word >> shift) as usize & mask] += 1;
        }
        let mut total = 0;
        for start in &mut starts[..=mask] {
            total += std::mem::replace(start, total);
        }
        for &word in &from {
            let start = &mut starts[(word >> shift) as usize & mask];
            to[*start as usize] = word;
            *start += 1;
        }
        std::mem::swap(&mut from, &mut to);
    }
    from.into_iter().map(|word| word as u32).collect()
}

/// The bin of each item and the number of bins: best fit, longest first, the older of equally full bins.
pub(crate) fn best_fit_decreasing(lengths: &[i64], capacity: i64) -> (Vec<u32>, usize) {
    if capacity <= MAX_TABLE {
        fill(lengths, Table::new(capacity as usize), capacity)
    } else {
        fill(lengths, std::collections::BTreeSet::new(), capacity)
    }
}

/// Open bins by the room they have left.
trait Open {
    /// Takes out the bin with the least room of at least `length`, the older of equals, and gives (room, bin).
    fn best(&mut self, length: i64) -> Option<(i64, u32)>;
    fn insert(&mut self, room: i64, bin: u32);
}

impl Open for std::collections::BTreeSet<(i64, u32)> {
    fn best(&mut self, length: i64) -> Option<(i64, u32)> {
        let entry = self.range((length, 0)..).next().copied()?;
        self.remove(&entry);
        Some(entry)
    }

    fn insert(&mut self, room: i64, bin: u32) {
        Self::insert(self, (room, bin));
    }
}

fn fill(lengths: &[i64], mut open: impl Open, capacity: i64) -> (Vec<u32>, usize) {
    let mut bin_of = vec![0u32; lengths.len()];
    let order = longest_first(lengths);
    let shortest = order.last().map_or(0, |&item| lengths[item as usize]);
    let mut bins = 0u32;
    for item in order {
        let length = lengths[item as usize];
        let (room, bin) = open.best(length).unwrap_or_else(|| {
            bins += 1;
            (capacity, bins - 1)
        });
        // A bin without room for the shortest item is full.
        if room - length >= shortest {
            open.insert(room - length, bin);
        }
        bin_of[item as usize] = bin;
    }
    (bin_of, bins as usize)
}

/// A heap of bins for every room, and which of them are not empty.
struct Table {
    rooms: Bits,
    /// Oldest bin with that room.
    top: Vec<u32>,
    /// Children of a bin in its heap.
    children: Vec<[u32; 2]>,
}

impl Table {
    fn new(capacity: usize) -> Self {
        Self {
            rooms: Bits::new(capacity + 1),
            top: vec![NONE; capacity + 1],
            children: Vec::new(),
        }
    }

    /// Skew heap: smallest bin on top, both operations in amortised logarithmic time.
    fn merge(&mut self, mut a: u32, mut b: u32) -> u32 {
        let mut root = NONE;
        // Where the merged rest hangs: below this bin, on its left.
        let mut parent = NONE;
        loop {
            if a == NONE || b == NONE {
                let rest = if a == NONE { b } else { a };
                if parent == NONE {
                    return rest;
                }
                self.children[parent as usize][0] = rest;
                return root;
            }
            if b < a {
                (a, b) = (b, a);
            }
            if parent == NONE {
                root = a;
            } else {
                self.children[parent as usize][0] = a;
            }
            let [left, right] = self.children[a as usize];
            self.children[a as usize] = [NONE, left];
            (parent, a) = (a, right);
        }
    }
}

impl Open for Table {
    fn best(&mut self, length: i64) -> Option<(i64, u32)> {
        let room = self.rooms.next(length as usize)?;
        let bin = self.top[room];
        let [left, right] = self.children[bin as usize];
        let top = self.merge(left, right);
        self.top[room] = top;
        if top == NONE {
            self.rooms.clear(room);
        }
        Some((room as i64, bin))
    }

    fn insert(&mut self, room: i64, bin: u32) {
        let (room, at) = (room as usize, bin as usize);
        if self.children.len() <= at {
            self.children.resize(at + 1, [NONE; 2]);
        }
        self.children[at] = [NONE; 2];
        if self.top[room] == NONE {
            self.top[room] = bin;
            self.rooms.set(room);
        } else {
            self.top[room] = self.merge(self.top[room], bin);
        }
    }
}

/// A set of small integers; a bit of a level says whether the 64 below it are all empty.
struct Bits(Vec<Vec<u64>>);

impl Bits {
    fn new(mut size: usize) -> Self {
        let mut levels = Vec::new();
        loop {
            size = size.div_ceil(64);
            levels.push(vec![0; size]);
            if size <= 1 {
                return Self(levels);
            }
        }
    }

    fn set(&mut self, mut at: usize) {
        for level in &mut self.0 {
            let word = &mut level[at / 64];
            let was_empty = *word == 0;
            *word |= 1 << (at % 64);
            if !was_empty {
                return;
            }
            at /= 64;
        }
    }

    fn clear(&mut self, mut at: usize) {
        for level in &mut self.0 {
            let word = &mut level[at / 64];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// The smallest member not below `at`.
    fn next(&self, mut at: usize) -> Option<usize> {
        for (height, level) in self.0.iter().enumerate() {
            let word = level.get(at / 64)? & (!0 << (at % 64));
            if word != 0 {
                let mut found = at / 64 * 64 + word.trailing_zeros() as usize;
                for below in self.0[..height].iter().rev() {
                    found = found * 64 + below[found].trailing_zeros() as usize;
                }
                return Some(found);
            }
            at = at / 64 + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::{best_fit_decreasing, fill, longest_first, Bits};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn the_bitset_is_a_set(size in 1usize..9000, ops in prop::collection::vec((any::<bool>(), 0usize..9000), 0..200)) {
            let (mut bits, mut set) = (Bits::new(size), BTreeSet::new());
            for (insert, at) in ops {
                let at = at % size;
                if insert { bits.set(at); set.insert(at); } else if set.remove(&at) { bits.clear(at); }
                prop_assert_eq!(bits.next(at), set.range(at..).next().copied());
                prop_assert_eq!(bits.next(at + 1), set.range(at + 1..).next().copied());
            }
        }

        #[test]
        fn the_table_packs_as_the_tree(lengths in prop::collection::vec(1i64..400, 0..600), capacity in 400i64..3000) {
            let tree = fill(&lengths, BTreeSet::new(), capacity);
            prop_assert_eq!(best_fit_decreasing(&lengths, capacity), tree);
        }

        #[test]
        fn sorting_is_stable_for_short_and_huge(
            lengths in prop::collection::vec(prop_oneof![1i64..50, 1i64..100_000, 1i64..i64::MAX], 0..700)
        ) {
            let mut want: Vec<u32> = (0..lengths.len() as u32).collect();
            want.sort_by_key(|&item| std::cmp::Reverse(lengths[item as usize]));
            prop_assert_eq!(longest_first(&lengths), want.clone());
            let small: Vec<i64> = lengths.iter().map(|length| length % 5000 + 1).collect();
            want.sort_by_key(|&item| (std::cmp::Reverse(small[item as usize]), item));
            prop_assert_eq!(longest_first(&small), want);
        }
    }
}
