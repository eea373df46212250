//! The buffer under threads: woken by events alone, never asking its caller with the lock held, nothing lost.

#[path = "common/waits.rs"]
mod waits;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use sao_core::buffer::{Buffer, Label, Lease, Limits, Policy};
use sao_core::wait::Stop;
use sao_core::Error;
use waits::{at_once, events_only, within};

fn buffer(max_trajectories: usize, max_bytes: usize, policy: Policy) -> Buffer {
    Buffer::new(Limits {
        max_trajectories,
        max_bytes,
        policy,
    })
    .expect("valid limits")
}

fn taken(buffer: &Buffer) -> Lease {
    let mut leases = buffer.take(1, &mut at_once()).expect("ready");
    leases.pop().expect("one")
}

fn number(lease: &Lease) -> u64 {
    let header = lease.item().expect("open").header();
    u64::from_le_bytes(header.try_into().expect("8 bytes"))
}

#[test]
fn no_wake_up_is_lost_between_producers_and_consumers() {
    within(60, || {
        const EACH: u64 = 3000;
        for (max_trajectories, max_bytes) in [(1, 1 << 20), (3, 1 << 20), (64, 600), (7, 64)] {
            let buffer = buffer(max_trajectories, max_bytes, Policy::Block);
            let (sum, count) = (AtomicU64::new(0), AtomicU64::new(0));
            std::thread::scope(|scope| {
                for producer in 0..3 {
                    let buffer = &buffer;
                    scope.spawn(move || {
                        for i in 0..EACH {
                            let number = producer * EACH + i;
                            let payload = vec![number as u8; (number % 50) as usize];
                            buffer
                                .put(&number.to_le_bytes(), &payload, 0, &mut events_only())
                                .expect("room comes");
                        }
                    });
                }
                for consumer in 0..3u64 {
                    let (buffer, sum, count) = (&buffer, &sum, &count);
                    scope.spawn(move || {
                        for i in 0..EACH {
                            let mut leases = buffer
                                .take(1, &mut events_only())
                                .expect("trajectories come");
                            let lease = leases.pop().expect("one");
                            let (value, item) = (number(&lease), lease.item().expect("open"));
                            assert_eq!(item.payload(), vec![value as u8; (value % 50) as usize]);
                            if (i + consumer) % 5 == 0 {
                                // Back to its place, and out again for whoever comes.
                                lease.give_back();
                                leases = buffer
                                    .take(1, &mut events_only())
                                    .expect("trajectories come");
                            } else {
                                leases.push(lease);
                            }
                            let lease = leases.pop().expect("one");
                            sum.fetch_add(number(&lease), Ordering::Relaxed);
                            count.fetch_add(1, Ordering::Relaxed);
                            lease.commit();
                        }
                    });
                }
            });
            assert_eq!(count.into_inner(), 3 * EACH);
            assert_eq!(sum.into_inner(), (0..3 * EACH).sum::<u64>());
            let stats = buffer.stats();
            assert_eq!(
                (stats.ready, stats.leased, stats.copying, stats.bytes),
                (0, 0, 0, 0)
            );
        }
    });
}

#[test]
fn large_takes_are_not_starved_by_small_ones() {
    within(30, || {
        let buffer = buffer(8, 1 << 20, Policy::Block);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..4000u64 {
                    if buffer
                        .put(&i.to_le_bytes(), &[], 0, &mut events_only())
                        .is_err()
                    {
                        return;
                    }
                }
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    while let Ok(leases) = buffer.take(1, &mut events_only()) {
                        leases.into_iter().for_each(Lease::commit);
                    }
                });
            }
            for _ in 0..100 {
                let leases = buffer.take(8, &mut events_only()).expect("served");
                assert_eq!(leases.len(), 8);
                leases.into_iter().for_each(Lease::commit);
            }
            buffer.close();
        });
    });
}

#[test]
fn the_caller_is_asked_without_the_lock() {
    within(10, || {
        let buffer = buffer(1, 100, Policy::Block);
        let mut asked = 0;
        let result = buffer.take(1, &mut || {
            asked += 1;
            assert_eq!(buffer.stats().waiting.0, 1);
            if asked == 3 {
                buffer
                    .put(&[], &[1], 0, &mut at_once())
                    .expect("there is room");
            }
            Ok(Duration::from_millis(1))
        });
        // What happened while the caller was asked is seen without another wait.
        assert_eq!((result.expect("served").len(), asked), (1, 3));
    });
}

#[test]
fn an_interrupted_wait_takes_and_stores_nothing() {
    let buffer = buffer(1, 100, Policy::Block);
    let interrupted = |error| matches!(error, Error::Interrupted(_));
    assert!(buffer
        .take(1, &mut || Err(Stop::Interrupted))
        .is_err_and(interrupted));
    buffer
        .put(&[], &[1], 0, &mut at_once())
        .expect("there is room");
    assert!(buffer
        .put(&[], &[2], 0, &mut || Err(Stop::Interrupted))
        .is_err_and(interrupted));
    let stats = buffer.stats();
    assert_eq!(
        (stats.ready, stats.received, stats.bytes, stats.waiting),
        (1, 1, 1, (0, 0))
    );
}

#[test]
fn closing_while_copies_and_waits_are_under_way_leaves_no_bytes() {
    within(30, || {
        for _ in 0..200 {
            let buffer = buffer(3, 1 << 20, Policy::Block);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while buffer.put(&[], &[7; 4096], 0, &mut events_only()).is_ok() {}
                    });
                }
                scope.spawn(|| while buffer.take(2, &mut events_only()).is_ok() {});
                std::thread::sleep(Duration::from_micros(300));
                buffer.close();
            });
            let stats = buffer.stats();
            assert_eq!(
                (stats.ready, stats.leased, stats.copying, stats.bytes),
                (0, 0, 0, 0)
            );
            assert_eq!(
                stats.received,
                stats.committed + stats.dropped.values().sum::<u64>()
            );
        }
    });
}

#[test]
fn memory_that_is_still_viewed_stays_charged_when_dropped() {
    let buffer = buffer(4, 100, Policy::DropOldest);
    buffer
        .put(&[], &[1; 60], 0, &mut at_once())
        .expect("there is room");
    let lease = taken(&buffer);
    let viewed = lease.item().expect("open").clone();
    lease.give_back();
    // It is dropped to make room, but its bytes cannot be used while somebody reads them.
    assert!(matches!(
        buffer.put(&[], &[2; 60], 0, &mut at_once()),
        Err(Error::Deadline(_))
    ));
    assert_eq!((buffer.stats().ready, buffer.stats().bytes), (0, 60));
    assert_eq!(viewed.payload(), [1; 60]);
    drop(viewed);
    buffer
        .put(&[], &[2; 60], 0, &mut at_once())
        .expect("there is room");
}

#[test]
fn leases_and_views_outlive_the_buffer() {
    let buffer = buffer(4, 100, Policy::Block);
    buffer
        .put(&[9], &[1, 2, 3], 0, &mut at_once())
        .expect("there is room");
    let lease = taken(&buffer);
    let item = lease.item().expect("open").clone();
    drop(buffer);
    lease.give_back();
    assert_eq!((item.header(), item.payload()), (&[9][..], &[1, 2, 3][..]));
}

#[test]
fn payloads_start_at_a_multiple_of_64() {
    let buffer = buffer(64, 1 << 30, Policy::Block);
    let mut leases = Vec::new();
    for size in [1, 2, 63, 64, 65, 1000, 4096, 100_000, 1 << 20, 3 << 20] {
        buffer
            .put(&[], &vec![5; size], 0, &mut at_once())
            .expect("there is room");
        leases.extend(buffer.take(1, &mut at_once()).expect("ready"));
    }
    for lease in &leases {
        assert_eq!(
            lease.item().expect("open").payload().as_ptr() as usize % 64,
            0
        );
    }
}

/// A buffer full of `count` of version 0, each of `bytes`, with the header of its number.
fn full(count: usize, bytes: usize, policy: Policy) -> Buffer {
    let buffer = buffer(count, count * bytes, policy);
    for number in 0..count as u64 {
        buffer
            .put(
                &number.to_le_bytes(),
                &vec![0; bytes - 8],
                0,
                &mut at_once(),
            )
            .expect("there is room");
    }
    buffer
}

#[test]
fn what_is_retired_is_freed_and_told_by_task() {
    let buffer = buffer(1000, 16_000, Policy::Block);
    for task in 0..1000 {
        let label = Label {
            min_version: task % 2,
            task,
        };
        buffer
            .put(&[0; 8], &[1; 8], label, &mut at_once())
            .expect("there is room");
    }
    let retired = buffer.advance(1, Some(1)).expect("open");
    assert!(retired.into_iter().eq((0..500).map(|n| 2 * n)));
    let stats = buffer.stats();
    assert_eq!((stats.ready, stats.dropped["stale"]), (500, 500));
    assert_eq!((stats.bytes, stats.copying), (500 * 16, 0));
}

#[test]
fn a_producer_that_waits_is_told_of_what_was_retired() {
    within(30, || {
        for _ in 0..50 {
            let buffer = full(300, 16, Policy::Block);
            std::thread::scope(|scope| {
                let producer = scope.spawn(|| {
                    buffer
                        .put(&[], &[0; 4000], 1, &mut events_only())
                        .expect("room comes")
                });
                while buffer.stats().waiting.1 == 0 {
                    std::thread::yield_now();
                }
                assert_eq!(buffer.advance(1, Some(1)).expect("open").len(), 300);
                assert_eq!(producer.join().expect("no panic").len(), 0);
            });
            assert_eq!(buffer.stats().bytes, 4000);
        }
    });
}

#[test]
fn retired_memory_that_is_still_viewed_stays_charged() {
    let buffer = full(200, 16, Policy::Block);
    let lease = taken(&buffer);
    let viewed = lease.item().expect("open").clone();
    lease.give_back();
    buffer.advance(1, Some(1)).expect("open").len();
    assert!(matches!(
        buffer.put(&[], &[0; 200 * 16], 1, &mut at_once()),
        Err(Error::Deadline(_))
    ));
    let stats = buffer.stats();
    assert_eq!((stats.ready, stats.bytes), (0, 16));
    drop(viewed);
    buffer
        .put(&[], &[0; 200 * 16], 1, &mut at_once())
        .expect("there is room");
}

#[derive(Clone, Debug)]
enum Step {
    Put { bytes: usize, version: i64 },
    Take(usize),
    Commit(usize),
    GiveBack(usize),
    KeepFrom(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0usize..40, 0i64..5).prop_map(|(bytes, version)| Step::Put { bytes, version }),
        2 => (1usize..4).prop_map(Step::Take),
        1 => any::<usize>().prop_map(Step::Commit),
        1 => any::<usize>().prop_map(Step::GiveBack),
        1 => (0i64..5).prop_map(Step::KeepFrom),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Any sequence of operations, compared with a map from sequence to (bytes, version).
    #[test]
    fn behaves_like_a_sorted_map(steps in prop::collection::vec(step(), 1..60), policy in 0usize..4) {
        let policy = [Policy::Block, Policy::Reject, Policy::DropOldest, Policy::DropStalest][policy];
        let (most, most_bytes) = (4, 100);
        let buffer = buffer(most, most_bytes, policy);
        let mut ready: BTreeMap<u64, (usize, i64)> = BTreeMap::new();
        let mut leased: Vec<(Lease, usize, i64)> = Vec::new();
        let mut next = 0;
        for step in steps {
            let held = |ready: &BTreeMap<u64, (usize, i64)>, leased: &[(Lease, usize, i64)]| {
                ready.values().map(|&(bytes, _)| bytes).sum::<usize>() + leased.iter().map(|&(_, bytes, _)| bytes).sum::<usize>()
            };
            match step {
                Step::Put { bytes, version } => {
                    let bytes = bytes + 8;
                    let fits = |ready: &BTreeMap<u64, (usize, i64)>, leased: &[(Lease, usize, i64)]| {
                        ready.len() + leased.len() < most && held(ready, leased) + bytes <= most_bytes
                    };
                    let mut expected = 0;
                    while !fits(&ready, &leased) && !ready.is_empty() {
                        let victim = match policy {
                            Policy::Block | Policy::Reject => break,
                            Policy::DropOldest => *ready.keys().next().expect("not empty"),
                            Policy::DropStalest => *ready.iter().min_by_key(|(&at, &(_, version))| (version, at)).expect("not empty").0,
                        };
                        ready.remove(&victim);
                        expected += 1;
                    }
                    match buffer.put(&u64::to_le_bytes(next), &vec![0; bytes - 8], version, &mut at_once()) {
                        Ok(dropped) => {
                            prop_assert!(fits(&ready, &leased));
                            prop_assert_eq!(dropped.len(), expected);
                            ready.insert(next, (bytes, version));
                            next += 1;
                        }
                        Err(error) => {
                            prop_assert!(!fits(&ready, &leased));
                            prop_assert_eq!(matches!(error, Error::Full(_)), policy == Policy::Reject);
                        }
                    }
                }
                Step::Take(n) => {
                    let leases = buffer.try_take(n).expect("open").unwrap_or_default();
                    prop_assert_eq!(leases.len(), if ready.len() >= n { n } else { 0 });
                    for lease in leases {
                        let (sequence, (bytes, version)) = ready.pop_first().expect("not empty");
                        prop_assert_eq!(lease.sequence(), sequence);
                        leased.push((lease, bytes, version));
                    }
                }
                Step::Commit(which) if !leased.is_empty() => {
                    let (lease, ..) = leased.remove(which % leased.len());
                    lease.commit();
                }
                Step::GiveBack(which) if !leased.is_empty() => {
                    let (lease, bytes, version) = leased.remove(which % leased.len());
                    ready.insert(lease.sequence(), (bytes, version));
                    lease.give_back();
                }
                Step::Commit(_) | Step::GiveBack(_) => {}
                Step::KeepFrom(version) => {
                    let stale = buffer.advance(5, Some(version)).expect("open").len();
                    let before = ready.len();
                    ready.retain(|_, &mut (_, of)| of >= version);
                    prop_assert_eq!(stale, before - ready.len());
                }
            }
            let stats = buffer.stats();
            prop_assert_eq!((stats.ready, stats.leased, stats.bytes), (ready.len(), leased.len(), held(&ready, &leased)));
            let settled = stats.committed + stats.dropped.values().sum::<u64>();
            prop_assert_eq!(stats.received, (stats.ready + stats.leased) as u64 + settled);
        }
    }
}
