//! The buffer under loom: every interleaving of two or three threads up to a number of preemptions (2, stated in
//! `check`), with the loads that the memory model allows. Whoever waits here waits for events only, so a lost wake-up is
//! a deadlock, which loom reports. `scripts/loom.sh` runs them.
#![cfg(loom)]

use std::sync::Arc;
use std::time::Duration;

use loom::thread;
use sao_core::buffer::{Buffer, Label, Lease, Limits, Policy};
use sao_core::wait::{Pace, Stop};
use sao_core::Error;

/// Two preemptions: on top of the switches at which a thread blocks or ends, which are free.
fn check(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(run);
}

fn buffer(max_trajectories: usize, max_bytes: usize, policy: Policy) -> Arc<Buffer> {
    let limits = Limits {
        max_trajectories,
        max_bytes,
        policy,
    };
    Arc::new(Buffer::new(limits).unwrap())
}

fn events_only() -> impl Pace {
    || Ok(Duration::from_secs(3600))
}

fn at_once() -> impl Pace {
    || Err(Stop::Deadline { waited_s: 0.0 })
}

fn put(buffer: &Buffer, version: i64) {
    buffer.put(b"h", b"p", version, &mut events_only()).unwrap();
}

fn put_of(buffer: &Buffer, task: i64, min_version: i64) {
    let label = Label { min_version, task };
    buffer.put(b"h", b"p", label, &mut events_only()).unwrap();
}

fn tasks(leases: &[Lease]) -> Vec<i64> {
    let items = leases.iter().map(|lease| lease.item().unwrap());
    items.map(|item| item.label().task).collect()
}

/// A consumer that parks is notified of a trajectory that arrives through the ring.
#[test]
fn a_put_wakes_a_take() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        let producer = {
            let buffer = buffer.clone();
            thread::spawn(move || put(&buffer, 0))
        };
        let leases = buffer.take(1, &mut events_only()).unwrap();
        assert_eq!(leases[0].item().unwrap().header(), b"h");
        leases.into_iter().for_each(|lease| lease.commit());
        producer.join().unwrap();
        let stats = buffer.stats();
        assert_eq!((stats.committed, stats.ready, stats.bytes), (1, 0, 0));
    });
}

/// A consumer of two is notified by whichever of two producers comes last.
#[test]
fn two_puts_wake_a_take_of_both() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        let producers: Vec<_> = (0..2)
            .map(|version| {
                let buffer = buffer.clone();
                thread::spawn(move || put(&buffer, version))
            })
            .collect();
        assert_eq!(buffer.take(2, &mut events_only()).unwrap().len(), 2);
        producers
            .into_iter()
            .for_each(|producer| producer.join().unwrap());
        assert_eq!(buffer.stats().ready, 2);
    });
}

/// A producer that parks for room is notified when the bytes of a settled trajectory come back.
#[test]
fn freed_bytes_wake_a_put() {
    check(|| {
        let buffer = buffer(2, 2, Policy::Block);
        put(&buffer, 0);
        let lease = buffer.try_take(1).unwrap().unwrap().remove(0);
        let producer = {
            let buffer = buffer.clone();
            thread::spawn(move || put(&buffer, 1))
        };
        lease.commit();
        producer.join().unwrap();
        let stats = buffer.stats();
        assert_eq!((stats.ready, stats.committed, stats.bytes), (1, 1, 2));
    });
}

/// A view that outlives its lease gives its bytes back when it goes, and that too wakes.
#[test]
fn a_dropped_view_wakes_a_put() {
    check(|| {
        let buffer = buffer(2, 2, Policy::Block);
        put(&buffer, 0);
        let lease = buffer.try_take(1).unwrap().unwrap().remove(0);
        let view = lease.item().unwrap().clone();
        lease.commit();
        let producer = {
            let buffer = buffer.clone();
            thread::spawn(move || put(&buffer, 1))
        };
        assert_eq!(view.payload(), b"p");
        drop(view);
        producer.join().unwrap();
        assert_eq!(buffer.stats().bytes, 2);
    });
}

/// A new version that retires meets a take and a lease that goes back: everything is somewhere, once.
#[test]
fn retiring_meets_a_take_and_a_give_back() {
    check(|| {
        let buffer = buffer(3, 6, Policy::Block);
        put(&buffer, 0);
        put(&buffer, 1);
        let lease = buffer.try_take(1).unwrap().unwrap().remove(0);
        let consumer = {
            let buffer = buffer.clone();
            thread::spawn(move || {
                lease.give_back();
                buffer
                    .try_take(1)
                    .unwrap()
                    .map_or(0, |leases| leases.into_iter().map(|l| l.commit()).count())
            })
        };
        let retired = buffer.advance(2, Some(1)).unwrap().len();
        let taken = consumer.join().unwrap();
        let stats = buffer.stats();
        assert_eq!(
            stats.dropped.get("stale").copied().unwrap_or(0),
            retired as u64
        );
        assert_eq!(stats.ready + retired + taken, 2);
        assert_eq!(stats.leased, 0);
        assert_eq!(stats.bytes, 2 * stats.ready);
    });
}

/// Memory that was retired is room for a producer that waits, whoever of the two comes first.
#[test]
fn what_was_retired_is_room_for_a_put() {
    check(|| {
        let buffer = buffer(2, 2, Policy::Block);
        put(&buffer, 0);
        let producer = {
            let buffer = buffer.clone();
            thread::spawn(move || put(&buffer, 1))
        };
        assert_eq!(buffer.advance(1, Some(1)).unwrap().len(), 1);
        producer.join().unwrap();
        let stats = buffer.stats();
        assert_eq!((stats.ready, stats.bytes), (1, 2));
    });
}

/// The end meets a new version: what was retired is freed, whoever of the two comes last.
#[test]
fn closing_meets_retiring() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        put(&buffer, 0);
        let learner = {
            let buffer = buffer.clone();
            thread::spawn(move || buffer.advance(1, Some(1)).is_ok())
        };
        buffer.close();
        let reason = if learner.join().unwrap() {
            "stale"
        } else {
            "closed"
        };
        let stats = buffer.stats();
        assert_eq!(stats.bytes, 0);
        assert_eq!(stats.dropped.get(reason), Some(&1));
    });
}

/// The end meets a put: it is refused or it is counted as dropped, and no byte stays behind.
#[test]
fn closing_meets_a_put() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        let producer = {
            let buffer = buffer.clone();
            thread::spawn(
                move || match buffer.put(b"h", b"p", 0, &mut events_only()) {
                    Ok(_) => 1,
                    Err(Error::Closed(_)) => 0,
                    Err(other) => panic!("{other}"),
                },
            )
        };
        buffer.close();
        let received = producer.join().unwrap();
        let stats = buffer.stats();
        assert_eq!(stats.received, received);
        assert_eq!(stats.dropped.get("closed").copied().unwrap_or(0), received);
        assert_eq!((stats.bytes, stats.copying, stats.ready), (0, 0, 0));
    });
}

/// The end wakes whoever waits, on both sides.
#[test]
fn closing_wakes_those_who_wait() {
    check(|| {
        let buffer = buffer(1, 2, Policy::Block);
        let consumer = {
            let buffer = buffer.clone();
            thread::spawn(move || buffer.take(1, &mut events_only()).is_err())
        };
        buffer.close();
        assert!(consumer.join().unwrap());
        assert!(matches!(
            buffer.put(b"h", b"p", 0, &mut at_once()),
            Err(Error::Closed(_))
        ));
    });
}

/// A policy that drops makes room for two producers at once; nothing is dropped twice.
#[test]
fn two_puts_drop_what_is_old() {
    check(|| {
        let buffer = buffer(1, 2, Policy::DropOldest);
        put(&buffer, 0);
        let producer = {
            let buffer = buffer.clone();
            thread::spawn(move || put(&buffer, 1))
        };
        put(&buffer, 2);
        producer.join().unwrap();
        let stats = buffer.stats();
        assert_eq!((stats.received, stats.ready, stats.bytes), (3, 1, 2));
        assert_eq!(stats.dropped.get("drop_oldest"), Some(&2));
    });
}

/// A waiter without a thread is called when its turn comes, whichever way the race with the producer goes.
#[test]
fn a_put_calls_a_waiter() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        let (notified, called) = (
            Arc::new(loom::sync::Mutex::new(false)),
            Arc::new(loom::sync::Condvar::new()),
        );
        let waiter = {
            let (notified, called) = (notified.clone(), called.clone());
            let call = move || {
                *notified.lock().unwrap() = true;
                called.notify_one();
            };
            buffer.wait_to_take(1, Box::new(call)).unwrap()
        };
        let producer = {
            let buffer = buffer.clone();
            thread::spawn(move || put(&buffer, 0))
        };
        let leases = loop {
            if let Some(leases) = waiter.take().unwrap() {
                break leases;
            }
            let mut now = notified.lock().unwrap();
            while !*now {
                now = called.wait(now).unwrap();
            }
            *now = false;
        };
        assert_eq!(leases.len(), 1);
        producer.join().unwrap();
    });
}

/// A consumer of two tasks is notified by whichever of two producers comes last, and gets them in the order asked.
#[test]
fn two_puts_wake_a_take_of_tasks() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        let producers: Vec<_> = (0..2)
            .map(|task| {
                let buffer = buffer.clone();
                thread::spawn(move || put_of(&buffer, task, 0))
            })
            .collect();
        let leases = buffer.take(&[1, 0], &mut events_only()).unwrap();
        assert_eq!(tasks(&leases), [1, 0]);
        producers
            .into_iter()
            .for_each(|producer| producer.join().unwrap());
    });
}

/// The end meets a put and a consumer that waits for its task: it gets it or is notified of the end.
#[test]
fn closing_and_a_put_meet_a_take_of_tasks() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        let consumer = {
            let buffer = buffer.clone();
            thread::spawn(move || match buffer.take(&[7], &mut events_only()) {
                Ok(leases) => leases.into_iter().map(|lease| lease.commit()).count(),
                Err(Error::Closed(_)) => 0,
                Err(other) => panic!("{other}"),
            })
        };
        put_of(&buffer, 7, 0);
        buffer.close();
        let taken = consumer.join().unwrap() as u64;
        let stats = buffer.stats();
        let dropped = stats.dropped.get("closed").copied().unwrap_or(0);
        assert_eq!((stats.committed, dropped), (taken, 1 - taken));
        assert_eq!((stats.bytes, stats.leased), (0, 0));
    });
}

/// A consumer of whatever comes and one of a task are in one queue: whoever comes first, both are notified.
#[test]
fn a_take_of_tasks_and_a_take_in_one_queue() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        let of_a_task = {
            let buffer = buffer.clone();
            thread::spawn(move || {
                let leases = buffer.take(&[1], &mut events_only()).unwrap();
                assert_eq!(tasks(&leases), [1]);
                leases.into_iter().for_each(|lease| lease.commit());
            })
        };
        let of_any = {
            let buffer = buffer.clone();
            thread::spawn(move || {
                let leases = buffer.take(1, &mut events_only()).unwrap();
                assert_eq!(tasks(&leases), [0]);
                leases.into_iter().for_each(|lease| lease.commit());
            })
        };
        put_of(&buffer, 0, 0);
        put_of(&buffer, 1, 0);
        of_a_task.join().unwrap();
        of_any.join().unwrap();
        assert_eq!(buffer.stats().committed, 2);
    });
}

/// A trajectory that a consumer has seen is retired before the rest is there: it looks again, and waits for what comes again.
#[test]
fn retiring_meets_a_take_of_tasks() {
    check(|| {
        let buffer = buffer(3, 6, Policy::Block);
        put_of(&buffer, 0, 0);
        let consumer = {
            let buffer = buffer.clone();
            thread::spawn(move || {
                let leases = buffer.take(&[0, 1], &mut events_only()).unwrap();
                assert_eq!(tasks(&leases), [0, 1]);
                assert_eq!(leases[0].item().unwrap().label().min_version, 1);
            })
        };
        assert_eq!(buffer.advance(1, Some(1)).unwrap().len(), 1);
        put_of(&buffer, 1, 1);
        put_of(&buffer, 0, 1);
        consumer.join().unwrap();
        assert_eq!(buffer.stats().ready, 2);
    });
}

/// A lease that goes back brings the task that a consumer waits for.
#[test]
fn a_give_back_wakes_a_take_of_tasks() {
    check(|| {
        let buffer = buffer(2, 4, Policy::Block);
        put_of(&buffer, 3, 0);
        let leases = buffer.try_take(&[3]).unwrap().unwrap();
        let consumer = {
            let buffer = buffer.clone();
            thread::spawn(move || {
                let leases = buffer.take(&[3], &mut events_only()).unwrap();
                leases.into_iter().for_each(|lease| lease.commit());
            })
        };
        drop(leases);
        consumer.join().unwrap();
        assert_eq!(buffer.stats().committed, 1);
    });
}
