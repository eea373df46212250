//! The ready trajectories, by version and by order of completion.
//!
//! One bucket of trajectories per policy version, each in order of completion, and the fronts of the buckets in order:
//! the next in order, the next of the oldest version and the retirement of whole versions all cost the logarithm of the
//! number of versions, however many trajectories are held. Those of certain tasks are found by a look at every key: a map
//! from tasks to places would cost every put, take and retirement, to save a scan in the call that asks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::buffer::wanted::Wanted;

/// The facts of a trajectory that are known without touching its memory, which is cold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) sequence: u64,
    pub(crate) bytes: usize,
    /// The ordinal of its task, or -1.
    pub(crate) task: i64,
}

/// Trajectories of one version in order of completion. Their keys lie by themselves, so that a range of them is copied
/// as plain numbers.
#[derive(Debug)]
pub(crate) struct Bucket<T> {
    pub(crate) keys: VecDeque<Key>,
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

/// Where the trajectory of a task lies.
#[derive(Clone, Copy, Debug)]
struct Place {
    version: i64,
    at: usize,
    sequence: u64,
}

/// Takes out what is at `places`, which ascend: one pass over the side from which fewer have to move up. What is taken
/// out comes in an order that depends on nothing but `places`.
fn extract<U>(all: &mut VecDeque<U>, places: &[usize]) -> Vec<U> {
    let (Some(&first), Some(&last)) = (places.first(), places.last()) else {
        return Vec::new();
    };
    let (n, end) = (places.len(), all.len());
    if last < end - first {
        let mut to = last;
        for (i, &place) in places.iter().enumerate().rev() {
            let before = i.checked_sub(1).map_or(0, |i| places[i] + 1);
            for from in (before..place).rev() {
                all.swap(from, to);
                to -= 1;
            }
        }
        all.drain(..n).collect()
    } else {
        let mut to = first;
        for (i, &place) in places.iter().enumerate() {
            for from in place + 1..places.get(i + 1).copied().unwrap_or(end) {
                all.swap(from, to);
                to += 1;
            }
        }
        all.drain(end - n..).collect()
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

    /// Takes out one trajectory of each wanted task, in the order asked, all or none: of several the one that finished
    /// first. When some are not there it says which are.
    #[allow(clippy::type_complexity)] // what `pop_first` gives, for each
    pub(crate) fn take_tasks(&mut self, wanted: &Wanted) -> Result<Vec<(Key, i64, T)>, Vec<bool>> {
        let mut found: Vec<Option<Place>> = vec![None; wanted.len()];
        for (&version, bucket) in &self.buckets {
            let (front, back) = bucket.keys.as_slices();
            for (at, key) in front.iter().chain(back).enumerate() {
                if let Some(place) = wanted.place(key.task) {
                    let sequence = key.sequence;
                    if found[place].is_none_or(|earlier| sequence < earlier.sequence) {
                        found[place] = Some(Place {
                            version,
                            at,
                            sequence,
                        });
                    }
                }
            }
        }
        let all: Option<Vec<Place>> = found.iter().copied().collect();
        let Some(mut places) = all else {
            return Err(found.iter().map(Option::is_some).collect());
        };
        places.sort_unstable_by_key(|place| (place.version, place.at));
        let mut taken: Vec<Option<(Key, i64, T)>> = found.iter().map(|_| None).collect();
        for group in places.chunk_by(|one, next| one.version == next.version) {
            for (key, version, item) in self.pop_at(group) {
                if let Some(place) = wanted.place(key.task) {
                    taken[place] = Some((key, version, item));
                }
            }
        }
        Ok(taken.into_iter().flatten().collect())
    }

    /// Takes out what is at `places` of one version.
    fn pop_at(&mut self, places: &[Place]) -> Vec<(Key, i64, T)> {
        let Some(&Place { version, .. }) = places.first() else {
            return Vec::new();
        };
        let Some(bucket) = self.buckets.get_mut(&version) else {
            return Vec::new();
        };
        let before = bucket.front();
        let places: Vec<usize> = places.iter().map(|place| place.at).collect();
        let keys = extract(&mut bucket.keys, &places);
        let items = extract(&mut bucket.items, &places);
        let after = bucket.front();
        if before != after {
            if let Some(front) = before {
                self.fronts.remove(&(front, version));
            }
            match after {
                Some(front) => drop(self.fronts.insert((front, version))),
                None => drop(self.buckets.remove(&version)),
            }
        }
        self.len -= places.len();
        let out = keys.into_iter().zip(items);
        out.map(|(key, item)| (key, version, item)).collect()
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

    /// All keys with their versions, bucket by bucket.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Key, i64)> + '_ {
        let buckets = self.buckets.iter();
        buckets.flat_map(|(&version, bucket)| bucket.keys.iter().map(move |&key| (key, version)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{extract, Key, Ready, Wanted};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};

    #[derive(Clone, Debug)]
    enum Op {
        Insert(i64),
        PutBack,
        First,
        Stalest,
        Retire(i64),
        Tasks(Vec<i64>),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            4 => (0i64..5).prop_map(Op::Insert),
            2 => Just(Op::PutBack),
            2 => Just(Op::First),
            1 => Just(Op::Stalest),
            1 => (0i64..6).prop_map(Op::Retire),
            3 => asked().prop_map(Op::Tasks),
        ];
        prop::collection::vec(op, 0..200)
    }

    /// Distinct tasks in any order; 0 to 7 exist.
    fn asked() -> impl Strategy<Value = Vec<i64>> {
        let tasks: Vec<i64> = (0..9).collect();
        prop::sample::subsequence(tasks, 1..5).prop_shuffle()
    }

    /// Of every nine in a row one belongs to no task, and two that are nine apart to the same.
    fn task(sequence: u64) -> i64 {
        (sequence * 5 % 9) as i64 - 1
    }

    fn key(sequence: u64) -> Key {
        Key {
            sequence,
            bytes: sequence as usize * 7,
            task: task(sequence),
        }
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
                    Op::Tasks(asked) => {
                        let first = |&of: &i64| model.iter().find(|(&s, _)| task(s) == of).map(|(&s, &v)| (s, v));
                        let want: Vec<Option<(u64, i64)>> = asked.iter().map(first).collect();
                        match ready.take_tasks(&Wanted::new(&asked, 9).expect("valid")) {
                            Ok(got) => {
                                let want: Vec<(u64, i64)> = want.into_iter().flatten().collect();
                                let all: Vec<_> = want.iter().map(|&(s, v)| (key(s), v, v)).collect();
                                prop_assert_eq!(got, all);
                                model.retain(|s, _| !want.iter().any(|(of, _)| of == s));
                                out.extend(want);
                            }
                            Err(there) => {
                                prop_assert!(there.iter().copied().eq(want.iter().map(Option::is_some)));
                                prop_assert!(there.contains(&false));
                            }
                        }
                    }
                }
                prop_assert_eq!(ready.len(), model.len());
                let mut entries: Vec<(Key, i64)> = ready.entries().collect();
                entries.sort_by_key(|(key, _)| key.sequence);
                prop_assert!(entries.into_iter().eq(model.iter().map(|(&s, &v)| (key(s), v))));
            }
        }

        /// From a deque that begins anywhere in its memory.
        #[test]
        fn what_is_taken_out_leaves_the_others_in_order(n in 1usize..40, begin in 0usize..40, which in any::<u64>(), few in any::<u64>()) {
            let mut all: VecDeque<usize> = VecDeque::with_capacity(40);
            all.extend(0..begin);
            all.drain(..);
            all.extend(0..n);
            let places: Vec<usize> = (0..n).filter(|&at| which & few >> at & 1 == 1).collect();
            let mut out = extract(&mut all, &places);
            out.sort_unstable();
            prop_assert_eq!(&out, &places);
            prop_assert!(all.into_iter().eq((0..n).filter(|at| !places.contains(at))));
        }

        /// The filter never hides a task, and what passes it is looked up.
        #[test]
        fn every_wanted_task_has_its_place(asked in prop::collection::btree_set(prop_oneof![0i64..200, 0..i64::MAX], 1..100), others in prop::collection::vec(prop_oneof![-1i64..200, any::<i64>()], 0..200)) {
            let asked: Vec<i64> = asked.into_iter().rev().collect();
            let wanted = Wanted::new(&asked, 100).expect("valid");
            prop_assert_eq!(wanted.len(), asked.len());
            for (place, &task) in asked.iter().enumerate() {
                prop_assert_eq!((wanted.place(task), wanted.ordinal(place)), (Some(place), Some(task)));
            }
            for other in others {
                prop_assert_eq!(wanted.place(other), asked.iter().position(|&task| task == other));
            }
        }
    }
}
