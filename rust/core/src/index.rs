//! What is ready, by version and by order of completion.
//!
//! One bucket of trajectories per policy version, each in order of completion, and the fronts of the buckets in order:
//! the next in order, the next of the oldest version and the retirement of whole versions all cost the logarithm of the
//! number of versions, however many trajectories are held.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What is known of a trajectory without touching its memory, which is cold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) sequence: u64,
    pub(crate) bytes: usize,
}

/// Trajectories of one version in order of completion. Their keys lie by themselves, so that a range of them is copied
/// as plain numbers.
#[derive(Debug)]
pub(crate) struct Bucket<T> {
    keys: VecDeque<Key>,
    pub(crate) items: VecDeque<T>,
}

impl<T> Bucket<T> {
    fn new() -> Self {
        Self {
            keys: VecDeque::new(),
            items: VecDeque::new(),
        }
    }

    fn front(&self) -> Option<u64> {
        self.keys.front().map(|key| key.sequence)
    }

    fn back(&self) -> Option<u64> {
        self.keys.back().map(|key| key.sequence)
    }

    /// How many come before `sequence`.
    fn before(&self, sequence: u64) -> usize {
        match (self.front(), self.back()) {
            (Some(front), _) if front >= sequence => 0,
            (_, Some(back)) if back >= sequence => {
                self.keys.partition_point(|key| key.sequence < sequence)
            }
            _ => self.keys.len(),
        }
    }
}

/// Trajectories by version and sequence number; `T` is what is kept for each.
#[derive(Debug)]
pub(crate) struct Ready<T> {
    buckets: BTreeMap<i64, Bucket<T>>,
    fronts: BTreeSet<(u64, i64)>,
    len: usize,
}

impl<T> Ready<T> {
    pub(crate) fn new() -> Self {
        Self {
            buckets: BTreeMap::new(),
            fronts: BTreeSet::new(),
            len: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Puts a trajectory at its place in the order, which mostly is the end.
    pub(crate) fn insert(&mut self, key: Key, version: i64, item: T) {
        let bucket = self.buckets.entry(version).or_insert_with(Bucket::new);
        let front = bucket.front();
        let at = bucket.before(key.sequence);
        bucket.keys.insert(at, key);
        bucket.items.insert(at, item);
        if at == 0 {
            if let Some(front) = front {
                self.fronts.remove(&(front, version));
            }
            self.fronts.insert((key.sequence, version));
        }
        self.len += 1;
    }

    /// Takes out the first in order, with its version.
    pub(crate) fn pop_first(&mut self) -> Option<(Key, i64, T)> {
        let &(_, version) = self.fronts.first()?;
        self.pop_of(version)
    }

    /// Takes out the first of the oldest version.
    pub(crate) fn pop_stalest(&mut self) -> Option<(Key, i64, T)> {
        let version = *self.buckets.first_key_value()?.0;
        self.pop_of(version)
    }

    fn pop_of(&mut self, version: i64) -> Option<(Key, i64, T)> {
        let bucket = self.buckets.get_mut(&version)?;
        let (key, item) = (bucket.keys.pop_front()?, bucket.items.pop_front()?);
        self.fronts.remove(&(key.sequence, version));
        match bucket.front() {
            Some(next) => {
                self.fronts.insert((next, version));
            }
            None => {
                self.buckets.remove(&version);
            }
        }
        self.len -= 1;
        Some((key, version, item))
    }

    /// Takes out all of versions below `keep_from`, whole buckets at a time.
    pub(crate) fn retire(&mut self, keep_from: i64) -> Vec<Bucket<T>> {
        let mut retired = Vec::new();
        while let Some(entry) = self.buckets.first_entry() {
            if *entry.key() >= keep_from {
                break;
            }
            let (version, bucket) = entry.remove_entry();
            if let Some(front) = bucket.front() {
                self.fronts.remove(&(front, version));
            }
            self.len -= bucket.items.len();
            retired.push(bucket);
        }
        retired
    }

    /// The first sequence number not below `from`.
    pub(crate) fn next_from(&self, from: u64) -> Option<u64> {
        let next = |bucket: &Bucket<T>| Some(bucket.keys.get(bucket.before(from))?.sequence);
        self.buckets.values().filter_map(next).min()
    }

    /// Appends the keys with sequence numbers in `from..to`, bucket by bucket; `runs` says which version the keys up to
    /// which position have.
    pub(crate) fn window(
        &self,
        from: u64,
        to: u64,
        keys: &mut Vec<Key>,
        runs: &mut Vec<(i64, usize)>,
    ) {
        for (&version, bucket) in &self.buckets {
            let (start, stop) = (bucket.before(from), bucket.before(to));
            if start < stop {
                keys.extend(bucket.keys.range(start..stop));
                runs.push((version, keys.len()));
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{Key, Ready};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Op {
        Insert(i64),
        PutBack,
        First,
        Stalest,
        Retire(i64),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            4 => (0i64..5).prop_map(Op::Insert),
            2 => Just(Op::PutBack),
            2 => Just(Op::First),
            1 => Just(Op::Stalest),
            1 => (0i64..6).prop_map(Op::Retire),
        ];
        prop::collection::vec(op, 0..200)
    }

    fn key(sequence: u64) -> Key {
        let bytes = sequence as usize * 7;
        Key { sequence, bytes }
    }

    proptest! {
        #[test]
        fn it_is_an_ordered_map_with_a_second_order(ops in ops()) {
            let (mut ready, mut model) = (Ready::new(), BTreeMap::new());
            let (mut next, mut out) = (0u64, Vec::new());
            for op in ops {
                match op {
                    Op::Insert(version) => {
                        ready.insert(key(next), version, version);
                        model.insert(next, version);
                        next += 1;
                    }
                    Op::PutBack => if let Some((sequence, version)) = out.pop() {
                        ready.insert(key(sequence), version, version);
                        model.insert(sequence, version);
                    },
                    Op::First => {
                        let got = ready.pop_first();
                        let want = model.pop_first();
                        prop_assert_eq!(got, want.map(|(s, v)| (key(s), v, v)));
                        out.extend(want);
                    }
                    Op::Stalest => {
                        let want = model.iter().map(|(&s, &v)| (v, s)).min().map(|(v, s)| (s, v));
                        if let Some((sequence, _)) = want { model.remove(&sequence); }
                        let got = ready.pop_stalest();
                        prop_assert_eq!(got, want.map(|(s, v)| (key(s), v, v)));
                        out.extend(want);
                    }
                    Op::Retire(keep_from) => {
                        let got: Vec<(Key, i64)> =
                            ready.retire(keep_from).into_iter().flat_map(|of| of.keys.into_iter().zip(of.items)).collect();
                        let mut want: Vec<(Key, i64)> =
                            model.iter().filter(|(_, &v)| v < keep_from).map(|(&s, &v)| (key(s), v)).collect();
                        want.sort_by_key(|&(_, version)| version);
                        model.retain(|_, v| *v >= keep_from);
                        prop_assert_eq!(got, want);
                    }
                }
                prop_assert_eq!(ready.len(), model.len());
                let middle = next / 2;
                prop_assert_eq!(ready.next_from(middle), model.range(middle..).next().map(|(&s, _)| s));
                let (mut keys, mut runs, stop) = (Vec::new(), Vec::new(), next - next / 4);
                ready.window(middle, stop, &mut keys, &mut runs);
                let (mut window, mut from) = (Vec::new(), 0);
                for (version, to) in runs {
                    window.extend(keys[from..to].iter().map(|&of| (of.sequence, version)));
                    prop_assert!(keys[from..to].iter().all(|&of| of == key(of.sequence)));
                    from = to;
                }
                prop_assert_eq!(from, keys.len());
                window.sort_unstable();
                prop_assert!(window.into_iter().eq(model.range(middle..stop).map(|(&s, &v)| (s, v))));
            }
        }
    }
}
