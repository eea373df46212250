//! Taking by task under threads: all or none, in the order asked, woken by events alone, in one queue with the others.

#[path = "common/waits.rs"]
mod waits;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{mpsc, Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use sao_core::buffer::{Buffer, Label, Lease, Limits, Policy, Waiter};
use sao_core::wait::Stop;
use sao_core::Error;
use waits::{at_once, events_only, within};

fn buffer(max_trajectories: usize, policy: Policy) -> Buffer {
    Buffer::new(Limits {
        max_trajectories,
        max_bytes: 1 << 20,
        policy,
    })
    .expect("valid limits")
}

fn of(task: i64, min_version: i64) -> Label {
    Label { min_version, task }
}

fn put(buffer: &Buffer, task: i64) {
    buffer
        .put(&task.to_le_bytes(), &[], of(task, 0), &mut events_only())
        .expect("room comes");
}

fn tasks(leases: &[Lease]) -> Vec<i64> {
    let items = leases.iter().map(|lease| lease.item().expect("open"));
    items
        .map(|item| {
            let header: [u8; 8] = item.header().try_into().expect("8 bytes");
            assert_eq!(i64::from_le_bytes(header), item.label().task);
            item.label().task
        })
        .collect()
}

fn until_waiting(buffer: &Buffer, takes: usize) {
    while buffer.stats().waiting.0 < takes {
        std::thread::yield_now();
    }
}

#[test]
fn they_come_in_the_order_asked_and_go_back_to_their_places() {
    let buffer = buffer(8, Policy::Block);
    for task in [5, 3, 8, 1] {
        put(&buffer, task);
    }
    assert!(buffer.try_take(&[1, 2]).expect("open").is_none());
    let leases = buffer.try_take(&[1, 5, 8]).expect("open");
    let leases = leases.expect("all are there");
    assert_eq!(tasks(&leases), [1, 5, 8]);
    assert_eq!(buffer.stats().leased, 3);
    drop(leases);
    let rest = buffer.take(4, &mut at_once()).expect("ready");
    assert_eq!(tasks(&rest), [5, 3, 8, 1]);
}

#[test]
fn of_two_of_one_task_the_one_that_finished_first_goes() {
    let buffer = buffer(8, Policy::Block);
    for (number, version) in [4, 2, 3].into_iter().enumerate() {
        buffer
            .put(&[number as u8], &[], of(7, version), &mut at_once())
            .expect("there is room");
    }
    for number in 0..3 {
        let leases = buffer.take(&[7], &mut at_once()).expect("ready");
        assert_eq!(leases[0].item().expect("open").header(), [number]);
        leases.into_iter().for_each(Lease::commit);
    }
}

#[test]
fn what_can_never_be_served_is_refused_before_anything_happens() {
    let buffer = buffer(3, Policy::Block);
    put(&buffer, 1);
    for (asked, text) in [
        (&[][..], "ordinals: 0 tasks are not in 1..=3"),
        (&[1, 2, 3, 4], "ordinals: 4 tasks are not in 1..=3"),
        (&[1, -1], "ordinals[1]: -1 is negative"),
        (&[1, 2, 1], "ordinals[2]: 1 was asked for at ordinals[0]"),
    ] {
        for result in [
            buffer.take(asked, &mut events_only()).map(drop),
            buffer.try_take(asked).map(drop),
            buffer.wait_to_take(asked, Box::new(|| ())).map(drop),
        ] {
            match result {
                Err(Error::Validation(message)) => assert!(message.starts_with(text), "{message}"),
                other => panic!("{other:?}"),
            }
        }
    }
    let stats = buffer.stats();
    assert_eq!((stats.ready, stats.leased, stats.waiting), (1, 0, (0, 0)));
    match buffer.put(&[], &[], of(-2, 0), &mut at_once()) {
        Err(Error::Validation(message)) => assert!(message.starts_with("task: -2 is"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_deadline_names_a_task_that_is_missing() {
    let buffer = buffer(4, Policy::Block);
    put(&buffer, 1);
    match buffer.take(&[1, 9], &mut at_once()) {
        Err(Error::Deadline(message)) => assert!(
            message
                .starts_with("waited 0 s for 2 trajectories by task, that of task 9 is missing (1"),
            "{message}"
        ),
        other => panic!("{other:?}"),
    }
    assert_eq!((buffer.stats().ready, buffer.stats().waiting), (1, (0, 0)));
}

#[test]
fn it_is_not_overtaken_and_those_behind_it_go_on_when_it_leaves() {
    within(60, || {
        let buffer = buffer(8, Policy::Block);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                let leases = buffer.take(&[9, 1], &mut events_only());
                let leases = leases.expect("served");
                let got = tasks(&leases);
                leases.into_iter().for_each(Lease::commit);
                got
            });
            until_waiting(&buffer, 1);
            let second =
                scope.spawn(|| tasks(&buffer.take(2, &mut events_only()).expect("served")));
            until_waiting(&buffer, 2);
            for task in [1, 2, 3] {
                put(&buffer, task);
            }
            // Enough for the one behind, but it is not its turn: had it taken these, the first would wait for ever.
            assert!(buffer.try_take(1).expect("open").is_none());
            assert!(buffer.try_take(&[1]).expect("open").is_none());
            put(&buffer, 9);
            assert_eq!(first.join().expect("no panic"), [9, 1]);
            assert_eq!(second.join().expect("no panic"), [2, 3]);
        });
    });
}

#[test]
fn one_that_gives_up_lets_those_behind_it_go_on() {
    within(60, || {
        let buffer = buffer(8, Policy::Block);
        let gives_up = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                let mut pace = || {
                    if gives_up.load(Ordering::SeqCst) {
                        return Err(Stop::Interrupted);
                    }
                    Ok(Duration::from_millis(1))
                };
                buffer.take(&[9], &mut pace).is_err()
            });
            until_waiting(&buffer, 1);
            let behind = [[1].as_slice(), &[2, 0]].map(|asked| {
                let (buffer, before) = (&buffer, buffer.stats().waiting.0);
                let take = move || tasks(&buffer.take(asked, &mut events_only()).expect("served"));
                let thread = scope.spawn(take);
                until_waiting(buffer, before + 1);
                thread
            });
            for task in [0, 1, 2] {
                put(&buffer, task);
            }
            gives_up.store(true, Ordering::SeqCst);
            assert!(first.join().expect("no panic"));
            let got = behind.map(|thread| thread.join().expect("no panic"));
            assert_eq!(got, [vec![1], vec![2, 0]]);
        });
    });
}

#[test]
fn what_went_while_it_waited_is_waited_for_again() {
    within(60, || {
        let buffer = buffer(8, Policy::Block);
        std::thread::scope(|scope| {
            put(&buffer, 1);
            let taker = scope.spawn(|| {
                let leases = buffer.take(&[1, 2], &mut events_only());
                tasks(&leases.expect("served"))
            });
            until_waiting(&buffer, 1);
            assert_eq!(buffer.advance(1, Some(1)).expect("open").len(), 1);
            for task in [2, 1] {
                let label = of(task, 1);
                let none = buffer.put(&task.to_le_bytes(), &[], label, &mut at_once());
                assert_eq!(none.expect("there is room").len(), 0);
            }
            assert_eq!(taker.join().expect("no panic"), [1, 2]);
        });
    });
}

/// It is called when the last one comes, not for each that comes, and not for one that comes twice.
#[test]
fn a_waiter_without_a_thread_is_called_when_all_are_there() {
    let buffer = buffer(64, Policy::Block);
    let (waiter, calls) = counting(&buffer, &[7, 30]);
    assert!(waiter.take().expect("open").is_none());
    for task in (0..30).chain([7, 7]) {
        put(&buffer, task);
    }
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    put(&buffer, 30);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let leases = waiter.take().expect("open").expect("all are there");
    assert_eq!(tasks(&leases), [7, 30]);
    drop(waiter);
    assert_eq!(buffer.stats().waiting, (0, 0));
    buffer.close();
    assert!(matches!(buffer.try_take(&[1]), Err(Error::Closed(_))));
}

/// Who was called for nothing, because one had gone again, is not called before that one comes.
#[test]
fn what_went_is_missing_after_the_next_look() {
    let buffer = buffer(8, Policy::Block);
    let (waiter, calls) = counting(&buffer, &[1, 2]);
    let put = |task: i64, version: i64| {
        let result = buffer.put(&task.to_le_bytes(), &[], of(task, version), &mut at_once());
        assert_eq!(result.expect("there is room").len(), 0);
    };
    assert!(waiter.take().expect("open").is_none());
    put(1, 0);
    assert_eq!(buffer.advance(1, Some(1)).expect("open").len(), 1);
    put(5, 1);
    put(2, 1);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert!(waiter.take().expect("open").is_none());
    put(6, 1);
    put(2, 1);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    put(1, 1);
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    assert_eq!(tasks(&waiter.take().expect("open").expect("all")), [1, 2]);
}

/// A place in the queue for these tasks, and how often it was called.
fn counting(buffer: &Buffer, asked: &[i64]) -> (Waiter, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let call = move || {
        counter.fetch_add(1, Ordering::SeqCst);
    };
    let waiter = buffer.wait_to_take(asked, Box::new(call));
    (waiter.expect("valid"), calls)
}

/// Producers bring groups in another order than they are asked for, and somebody takes and gives back whatever comes:
/// who asks for a group gets all of it or waits.
#[test]
fn all_or_none_under_churn() {
    within(120, || {
        const GROUPS: i64 = 600;
        const SIZE: i64 = 4;
        // Room for all: a producer that is ahead must not keep out what is waited for.
        let buffer = buffer((GROUPS * SIZE) as usize, Policy::Block);
        let group = |number: i64| (0..SIZE).map(move |i| number * SIZE + i);
        let (turn, taken) = (Mutex::new((0, false)), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for producer in 0..2 {
                let buffer = &buffer;
                scope.spawn(move || {
                    for number in 0..GROUPS {
                        let own = group(number).filter(|task| task % 2 == producer);
                        own.rev().for_each(|task| put(buffer, task));
                    }
                });
            }
            for consumer in 0..2 {
                let (buffer, turn, taken) = (&buffer, &turn, &taken);
                scope.spawn(move || loop {
                    let mut now = turn.lock().expect("no panic");
                    let (number, again) = *now;
                    if number == GROUPS {
                        return buffer.close();
                    }
                    let asked: Vec<i64> = group(number).rev().collect();
                    let leases = if number % 3 == consumer {
                        buffer.try_take(&asked).expect("open")
                    } else {
                        let leases = buffer.take(&asked, &mut events_only());
                        Some(leases.expect("they come"))
                    };
                    let Some(leases) = leases else {
                        drop(now);
                        std::thread::yield_now();
                        continue;
                    };
                    assert_eq!(tasks(&leases), asked);
                    if number % 5 == 0 && !again {
                        // Back, and out again for whoever comes next.
                        drop(leases);
                        *now = (number, true);
                    } else {
                        *now = (number + 1, false);
                        taken.lock().expect("no panic").extend(asked);
                        leases.into_iter().for_each(Lease::commit);
                    }
                });
            }
            // Fewer than a group, so that it is never in the way of the last one.
            scope.spawn(|| while buffer.take(3, &mut events_only()).is_ok() {});
        });
        let mut taken = taken.into_inner().expect("no panic");
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..GROUPS * SIZE));
        let stats = buffer.stats();
        assert_eq!((stats.ready, stats.leased, stats.bytes), (0, 0, 0));
        assert_eq!(stats.committed as i64, GROUPS * SIZE);
    });
}

/// Each producer brings its task again when it was used or retired; one that takes and gives back is in the same queue.
#[test]
fn no_wake_up_is_lost_when_what_is_awaited_comes_goes_and_comes_back() {
    within(120, || {
        const ROUNDS: usize = 2000;
        let buffer = buffer(3, Policy::Block);
        let version = AtomicI64::new(0);
        std::thread::scope(|scope| {
            let (buffer, version) = (&buffer, &version);
            let producers: Vec<mpsc::Sender<()>> = (0..3i64)
                .map(|task| {
                    let (again, answer) = mpsc::channel();
                    scope.spawn(move || loop {
                        let label = of(task, version.load(Ordering::SeqCst));
                        let header = task.to_le_bytes();
                        if buffer.put(&header, &[], label, &mut events_only()).is_err()
                            || answer.recv().is_err()
                        {
                            return;
                        }
                    });
                    again
                })
                .collect();
            scope.spawn(|| while buffer.take(1, &mut events_only()).is_ok() {});
            let again = producers.clone();
            scope.spawn(move || {
                for next in 1..500 {
                    version.store(next, Ordering::SeqCst);
                    let Ok(retired) = buffer.advance(next, Some(next)) else {
                        return;
                    };
                    for task in retired {
                        // Its producer may have gone with the end.
                        let _ = again[task as usize].send(());
                    }
                    std::thread::yield_now();
                }
            });
            for round in 0..ROUNDS {
                let mut asked = [0, 1, 2];
                asked.rotate_left(round % 3);
                let leases = buffer.take(&asked, &mut events_only()).expect("open");
                assert_eq!(tasks(&leases), asked);
                leases.into_iter().for_each(Lease::commit);
                for producer in &producers {
                    producer.send(()).expect("it goes on until the end");
                }
            }
            buffer.close();
        });
        let stats = buffer.stats();
        let settled = stats.committed + stats.dropped.values().sum::<u64>();
        assert_eq!((stats.received, stats.leased), (settled, 0));
        assert_eq!(stats.committed, 3 * ROUNDS as u64);
    });
}

#[derive(Clone, Debug)]
enum Step {
    Put { task: i64, version: i64 },
    Take(usize),
    Tasks(Vec<i64>),
    Commit(usize),
    GiveBack(usize),
    KeepFrom(i64),
    Close,
}

fn step() -> impl Strategy<Value = Step> {
    let asked = prop::sample::subsequence((0..6).collect::<Vec<i64>>(), 1..4).prop_shuffle();
    prop_oneof![
        12 => (-1i64..6, 0i64..5).prop_map(|(task, version)| Step::Put { task, version }),
        2 => (1usize..4).prop_map(Step::Take),
        8 => asked.prop_map(Step::Tasks),
        3 => any::<usize>().prop_map(Step::Commit),
        3 => any::<usize>().prop_map(Step::GiveBack),
        2 => (0i64..5).prop_map(Step::KeepFrom),
        1 => Just(Step::Close),
    ]
}

/// One by one, as a list of (sequence, task, version) would do it.
#[derive(Default)]
struct Model {
    ready: BTreeMap<u64, (i64, i64)>,
    leased: Vec<(Lease, u64, (i64, i64))>,
    next: u64,
    closed: bool,
}

impl Model {
    fn victim(&self, policy: Policy) -> Option<u64> {
        match policy {
            Policy::Block | Policy::Reject => None,
            Policy::DropOldest => self.ready.keys().next().copied(),
            Policy::DropStalest => {
                let stalest = self
                    .ready
                    .iter()
                    .min_by_key(|(&at, &(_, version))| (version, at));
                stalest.map(|(&at, _)| at)
            }
        }
    }

    /// The first of each task, if all are there.
    fn first_of(&self, asked: &[i64]) -> Option<Vec<u64>> {
        let first = |&task: &i64| self.ready.iter().find(|(_, &(of, _))| of == task);
        asked
            .iter()
            .map(|task| first(task).map(|(&at, _)| at))
            .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Any sequence of operations, with a waiter that asks for tasks after each: what is there all the while is called
    /// for, and nothing else is handed out.
    #[test]
    fn behaves_like_a_list(
        steps in prop::collection::vec(step(), 1..60),
        policy in 0usize..4,
        awaited in prop::sample::subsequence((0..6).collect::<Vec<i64>>(), 1..4).prop_shuffle(),
        waits in any::<bool>(),
    ) {
        let policy = [Policy::Block, Policy::Reject, Policy::DropOldest, Policy::DropStalest][policy];
        let most = 6;
        let buffer = buffer(most, policy);
        let mut model = Model::default();
        let called = Arc::new(AtomicBool::new(true));
        let mut waiter = waits.then(|| {
            let called = called.clone();
            let call = move || called.store(true, Ordering::SeqCst);
            buffer.wait_to_take(&awaited, Box::new(call)).expect("valid")
        });
        for step in steps {
            match step {
                Step::Put { task, version } => {
                    let header = model.next.to_le_bytes();
                    let result = buffer.put(&header, &[], of(task, version), &mut at_once());
                    if model.closed {
                        prop_assert!(matches!(result, Err(Error::Closed(_))));
                        continue;
                    }
                    if model.ready.len() + model.leased.len() == most {
                        if let Some(victim) = model.victim(policy) {
                            let (dropped, _) = model.ready.remove(&victim).expect("it is ready");
                            prop_assert_eq!(&result.as_ref().expect("room was made")[..], [dropped]);
                        }
                    }
                    let room = model.ready.len() + model.leased.len() < most;
                    prop_assert_eq!(result.is_ok(), room);
                    if room {
                        model.ready.insert(model.next, (task, version));
                        model.next += 1;
                    }
                }
                Step::Take(n) => {
                    let result = buffer.try_take(n);
                    if model.closed {
                        prop_assert!(matches!(result, Err(Error::Closed(_))));
                        continue;
                    }
                    let leases = result.expect("open").unwrap_or_default();
                    let served = waiter.is_none() && model.ready.len() >= n;
                    prop_assert_eq!(leases.len(), if served { n } else { 0 });
                    for lease in leases {
                        let (at, entry) = model.ready.pop_first().expect("not empty");
                        prop_assert_eq!(lease.sequence(), at);
                        model.leased.push((lease, at, entry));
                    }
                }
                Step::Tasks(asked) => {
                    let blocking = model.next % 2 == 0;
                    let result = if blocking && waiter.is_none() {
                        match buffer.take(&asked, &mut at_once()) {
                            Err(Error::Deadline(_)) => Ok(None),
                            other => other.map(Some),
                        }
                    } else {
                        buffer.try_take(&asked)
                    };
                    if model.closed {
                        prop_assert!(matches!(result, Err(Error::Closed(_))));
                        continue;
                    }
                    let want = if waiter.is_none() { model.first_of(&asked) } else { None };
                    let leases = result.expect("open");
                    prop_assert_eq!(leases.is_some(), want.is_some());
                    for (lease, at) in leases.into_iter().flatten().zip(want.into_iter().flatten()) {
                        let entry = model.ready.remove(&at).expect("there");
                        prop_assert_eq!((lease.sequence(), lease.item().expect("open").label().task), (at, entry.0));
                        model.leased.push((lease, at, entry));
                    }
                }
                Step::Commit(which) if !model.leased.is_empty() => {
                    let (lease, ..) = model.leased.remove(which % model.leased.len());
                    lease.commit();
                }
                Step::GiveBack(which) if !model.leased.is_empty() => {
                    let (lease, at, entry) = model.leased.remove(which % model.leased.len());
                    lease.give_back();
                    if !model.closed {
                        model.ready.insert(at, entry);
                    }
                }
                Step::Commit(_) | Step::GiveBack(_) => {}
                Step::KeepFrom(version) => {
                    let result = buffer.advance(5, Some(version));
                    if model.closed {
                        prop_assert!(matches!(result, Err(Error::Closed(_))));
                        continue;
                    }
                    let before = model.ready.len();
                    model.ready.retain(|_, &mut (_, of)| of >= version);
                    prop_assert_eq!(result.expect("open").len(), before - model.ready.len());
                }
                Step::Close => {
                    buffer.close();
                    model.closed = true;
                    model.ready.clear();
                }
            }
            // Whoever waits looks when it is called and only then: a call that does not come shows below.
            if let Some(waits) = waiter.take() {
                let want = model.first_of(&awaited);
                if model.closed {
                    prop_assert!(called.load(Ordering::SeqCst) && waits.take().is_err());
                } else if called.swap(false, Ordering::SeqCst) {
                    let leases = waits.take().expect("open");
                    prop_assert_eq!(leases.is_some(), want.is_some());
                    if let Some(leases) = leases {
                        for (lease, at) in leases.into_iter().zip(want.expect("served")) {
                            let entry = model.ready.remove(&at).expect("there");
                            prop_assert_eq!((lease.sequence(), lease.item().expect("open").label().task), (at, entry.0));
                            model.leased.push((lease, at, entry));
                        }
                    } else {
                        waiter = Some(waits);
                    }
                } else {
                    prop_assert!(want.is_none(), "it was not called");
                    waiter = Some(waits);
                }
            }
            let stats = buffer.stats();
            prop_assert_eq!((stats.ready, stats.leased), (model.ready.len(), model.leased.len()));
            let settled = stats.committed + stats.dropped.values().sum::<u64>();
            prop_assert_eq!(stats.received, (stats.ready + stats.leased) as u64 + settled);
            let shown: Vec<(u64, i64, i64)> =
                buffer.snapshot().iter().filter(|e| !e.leased).map(|e| (e.sequence, e.task, e.min_version)).collect();
            prop_assert!(shown.into_iter().eq(model.ready.iter().map(|(&at, &(task, version))| (at, task, version))));
        }
    }
}
