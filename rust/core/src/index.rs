//! What is ready and what is leased, by version and by order of completion.
//!
//! One bucket of trajectories per policy version, each in order of completion, and the fronts of the buckets in order:
//! the next in order, the next of the oldest version and the retirement of whole versions all cost the logarithm of the
//! number of versions, however many trajectories are held.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Trajectories by version and sequence number; `T` is what is kept for each.
#[derive(Debug)]
pub(crate) struct Ready<T> {
    buckets: BTreeMap<i64, VecDeque<(u64, T)>>,
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
    pub(crate) fn insert(&mut self, sequence: u64, version: i64, item: T) {
        let bucket = self.buckets.entry(version).or_default();
        let front = bucket.front().map(|&(front, _)| front);
        let at = match bucket.back() {
            Some(&(back, _)) if back > sequence => {
                bucket.partition_point(|&(other, _)| other < sequence)
            }
            _ => bucket.len(),
        };
        bucket.insert(at, (sequence, item));
        if at == 0 {
            if let Some(front) = front {
                self.fronts.remove(&(front, version));
            }
            self.fronts.insert((sequence, version));
        }
        self.len += 1;
    }

    /// Takes out the first in order.
    pub(crate) fn pop_first(&mut self) -> Option<(u64, T)> {
        let &(_, version) = self.fronts.first()?;
        self.pop_of(version)
    }

    /// Takes out the first of the oldest version.
    pub(crate) fn pop_stalest(&mut self) -> Option<(u64, T)> {
        let version = *self.buckets.first_key_value()?.0;
        self.pop_of(version)
    }

    fn pop_of(&mut self, version: i64) -> Option<(u64, T)> {
        let bucket = self.buckets.get_mut(&version)?;
        let (sequence, item) = bucket.pop_front()?;
        self.fronts.remove(&(sequence, version));
        match bucket.front() {
            Some(&(next, _)) => {
                self.fronts.insert((next, version));
            }
            None => {
                self.buckets.remove(&version);
            }
        }
        self.len -= 1;
        Some((sequence, item))
    }

    /// Takes out all of versions below `keep_from`, whole buckets at a time.
    pub(crate) fn retire(&mut self, keep_from: i64) -> Vec<VecDeque<(u64, T)>> {
        let mut retired = Vec::new();
        while let Some(entry) = self.buckets.first_entry() {
            if *entry.key() >= keep_from {
                break;
            }
            let (version, bucket) = entry.remove_entry();
            if let Some(&(front, _)) = bucket.front() {
                self.fronts.remove(&(front, version));
            }
            self.len -= bucket.len();
            retired.push(bucket);
        }
        retired
    }

    /// The first sequence number not below `from`.
    pub(crate) fn next_from(&self, from: u64) -> Option<u64> {
        let next = |bucket: &VecDeque<(u64, T)>| {
            let at = bucket.partition_point(|&(sequence, _)| sequence < from);
            bucket.get(at).map(|&(sequence, _)| sequence)
        };
        self.buckets.values().filter_map(next).min()
    }

    /// All with sequence numbers in `from..to`, bucket by bucket.
    pub(crate) fn window(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, i64, &T)> {
        self.buckets.iter().flat_map(move |(&version, bucket)| {
            let start = bucket.partition_point(|&(sequence, _)| sequence < from);
            let entries = bucket.range(start..);
            entries
                .take_while(move |(sequence, _)| *sequence < to)
                .map(move |(sequence, item)| (*sequence, version, item))
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Ready;
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

    proptest! {
        #[test]
        fn it_is_an_ordered_map_with_a_second_order(ops in ops()) {
            let (mut ready, mut model) = (Ready::new(), BTreeMap::new());
            let (mut next, mut out) = (0u64, Vec::new());
            for op in ops {
                match op {
                    Op::Insert(version) => {
                        ready.insert(next, version, version);
                        model.insert(next, version);
                        next += 1;
                    }
                    Op::PutBack => if let Some((sequence, version)) = out.pop() {
                        ready.insert(sequence, version, version);
                        model.insert(sequence, version);
                    },
                    Op::First => {
                        let got = ready.pop_first();
                        prop_assert_eq!(got, model.pop_first());
                        out.extend(got);
                    }
                    Op::Stalest => {
                        let want = model.iter().map(|(&s, &v)| (v, s)).min().map(|(v, s)| (s, v));
                        if let Some((sequence, _)) = want { model.remove(&sequence); }
                        let got = ready.pop_stalest();
                        prop_assert_eq!(got, want);
                        out.extend(got);
                    }
                    Op::Retire(keep_from) => {
                        let mut got: Vec<(u64, i64)> = ready.retire(keep_from).into_iter().flatten().collect();
                        got.sort_unstable();
                        let want: Vec<(u64, i64)> =
                            model.iter().filter(|(_, &v)| v < keep_from).map(|(&s, &v)| (s, v)).collect();
                        model.retain(|_, v| *v >= keep_from);
                        prop_assert_eq!(got, want);
                    }
                }
                prop_assert_eq!(ready.len(), model.len());
                let middle = next / 2;
                prop_assert_eq!(ready.next_from(middle), model.range(middle..).next().map(|(&s, _)| s));
                let mut window: Vec<(u64, i64)> = ready.window(middle, next).map(|(s, v, _)| (s, v)).collect();
                window.sort_unstable();
                prop_assert!(window.into_iter().eq(model.range(middle..).map(|(&s, &v)| (s, v))));
            }
        }
    }
}
