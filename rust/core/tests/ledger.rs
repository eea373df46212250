//! The ledger: legal steps only, tokens conserved, and a file that survives a crash at any byte.

#[path = "common/ledger.rs"]
mod common;

use common::{facts, start, text, Calls};
use proptest::prelude::*;
use sao_core::ledger::{Event, Ledger};

fn in_memory() -> Ledger {
    Ledger::open(None, 0).unwrap()
}

fn count(ledger: &Ledger, state: &str) -> u64 {
    let mut counts = ledger.books().counts();
    counts.find(|(name, _)| *name == state).unwrap().1
}

/// A run with every kind of event; `seen` is called after each.
fn story(ledger: &mut Ledger, mut seen: impl FnMut(&mut Ledger)) {
    for ordinal in 0..6 {
        ledger.issue(ordinal).unwrap();
        seen(ledger);
        ledger.generating(ordinal, 0).unwrap();
        seen(ledger);
    }
    for ordinal in [3, 1, 0, 2] {
        assert!(ledger.ready(ordinal, 0, 10 + ordinal).unwrap());
        seen(ledger);
    }
    ledger.lease(&[3, 1], 9).unwrap();
    seen(ledger);
    ledger.give_back(9).unwrap();
    seen(ledger);
    ledger.lease(&[3, 1, 0], 10).unwrap();
    seen(ledger);
    assert!(ledger.drop_task(1, 0, "stale", None).unwrap());
    seen(ledger);
    let (trained, masked) = ledger.total(10, &[13, 4], &[0, 6]).unwrap();
    ledger.trained(10, 1, trained, masked).unwrap();
    seen(ledger);
    ledger.requeue(4, "generator_died", Some(5)).unwrap();
    seen(ledger);
    ledger.issue(4).unwrap();
    seen(ledger);
    assert!(ledger.drop_task(5, 0, "env:timeout", Some(3)).unwrap());
    seen(ledger);
    ledger.waste("late", 8).unwrap();
    seen(ledger);
}

#[test]
fn a_story_ends_with_the_right_numbers() {
    let mut ledger = in_memory();
    story(&mut ledger, |_| ());
    let tokens = &ledger.books().tokens;
    assert_eq!((tokens.sampled, tokens.held), (62, 12));
    assert_eq!((tokens.trained, tokens.masked), (17, 6));
    let dropped = tokens.dropped.iter().map(|(r, n)| (r.as_str(), *n));
    assert_eq!(
        dropped.collect::<Vec<_>>(),
        [
            ("env:timeout", 3),
            ("generator_died", 5),
            ("late", 8),
            ("stale", 11)
        ]
    );
    assert_eq!(
        (count(&ledger, "trained"), count(&ledger, "dropped")),
        (2, 2)
    );
    let states = [0, 1, 2, 4, 6].map(|ordinal| ledger.books().where_is(ordinal));
    assert_eq!(
        states,
        ["finished", "finished", "ready", "issued", "unknown"]
    );
}

#[test]
fn impossible_steps_name_task_state_and_wish_and_change_nothing() {
    let mut l = in_memory();
    assert_eq!(
        text(l.generating(0, 0)),
        "task 0 is unknown; wanted: generating of attempt 0"
    );
    assert_eq!(text(l.ready(0, 0, 1)), "task 0 is unknown; wanted: ready");
    start(&mut l, 0);
    start(&mut l, 1);
    let before = facts(&l);
    assert_eq!(
        text(l.issue(0)),
        "task 0 is generating (attempt 0); wanted: issued"
    );
    assert_eq!(
        text(l.ready(0, 1, 5)),
        "task 0 is generating (attempt 0); wanted: ready of attempt 1"
    );
    assert_eq!(
        text(l.lease(&[0], 1)),
        "task 0 is generating (attempt 0); wanted: leased, once, by lease 1"
    );
    assert!(text(l.lease(&[], 1)).contains("no tasks"));
    assert!(text(l.give_back(1)).contains("lease 1 is not open"));
    assert!(text(l.trained(1, 0, 0, 0)).contains("lease 1 is not open"));
    assert!(text(l.drop_task(0, 0, "", None)).contains("reason: \"\" has 0 bytes"));
    assert!(text(l.waste("x", u64::MAX)).contains("overflow"));
    assert_eq!(facts(&l), before);
    assert!(l.ready(0, 0, 5).unwrap());
    assert!(l.ready(1, 0, 2).unwrap());
    let before = facts(&l);
    assert!(!l.ready(0, 0, 5).unwrap(), "the same trajectory twice");
    assert!(text(l.lease(&[0, 1, 0], 1)).contains("task 0 is ready"));
    assert!(text(l.drop_task(0, 0, "x", Some(4))).contains("tokens 4, but 5 were reported"));
    assert_eq!(facts(&l), before);
    l.lease(&[0, 1], 1).unwrap();
    let before = facts(&l);
    assert!(text(l.lease(&[0], 1)).contains("lease 1 is open already"));
    let holds =
        |trained, masked| format!("trained {trained} + masked {masked} tokens, but it holds 7");
    assert!(text(l.trained(1, 0, 6, 0)).contains(&holds(6, 0)));
    assert!(text(l.trained(1, 0, u64::MAX, 8)).contains(&holds(u64::MAX, 8)));
    let wrong: [(&[u64], &[u64], &str); 3] = [
        (
            &[7],
            &[0],
            "lease 1 holds 2 tasks, but trained_tokens has 1 entries",
        ),
        (
            &[5, 2],
            &[0],
            "trained_tokens has 2 entries, masked_tokens 1",
        ),
        (&[4, 3], &[0, 0], "task 0: trained 4"),
    ];
    for (trained, masked, expected) in wrong {
        let message = text(l.total(1, trained, masked));
        assert!(message.contains(expected), "{message}");
    }
    assert_eq!(facts(&l), before);
    l.trained(1, 0, 7, 0).unwrap();
    assert_eq!(text(l.issue(0)), "task 0 is finished; wanted: issued");
    assert!(text(l.requeue(0, "x", None)).contains("task 0 is finished; wanted: requeued"));
    assert!(!l.ready(0, 0, 5).unwrap(), "late");
    start(&mut l, 2);
    l.ready(2, 0, 1).unwrap();
    l.lease(&[2], 2).unwrap();
    let message = text(l.trained(2, 0, 1, 0));
    assert_eq!(message, "step: 0 is not after the last committed step 0");
    assert!(text(l.issue(u64::MAX)).contains("below 2^63 - 1"));
}

#[test]
fn answers_of_an_earlier_attempt_are_late() {
    let mut l = in_memory();
    start(&mut l, 0);
    l.requeue(0, "lost", Some(4)).unwrap();
    assert!(!l.ready(0, 0, 9).unwrap());
    assert!(text(l.ready(0, 1, 9)).contains("task 0 is requeued (attempt 1)"));
    assert_eq!(start(&mut l, 0), 1);
    assert!(!l.ready(0, 0, 9).unwrap());
    assert!(!l.drop_task(0, 0, "x", Some(9)).unwrap());
    assert!(l.ready(0, 1, 9).unwrap());
    assert_eq!((l.books().tokens.sampled, l.books().tokens.held), (13, 9));
}

#[test]
fn reasons_are_codes() {
    let mut l = in_memory();
    for number in 0..256 {
        l.waste(&format!("code{number}"), 1).unwrap();
    }
    assert!(text(l.waste("one more", 1)).contains("at most 256"));
    l.waste("code7", 1).unwrap();
    assert!(text(l.waste(&"x".repeat(129), 1)).contains("has 129 bytes"));
    assert_eq!(l.books().tokens.sampled, 257);
}

#[test]
fn memory_follows_the_unfinished_tasks() {
    let mut l = in_memory();
    start(&mut l, 0); // a straggler at the front the whole time
    for step in 0..5_000u64 {
        let ordinals: Vec<u64> = (1 + 4 * step..5 + 4 * step).collect();
        for ordinal in ordinals.iter().rev() {
            start(&mut l, *ordinal);
            l.ready(*ordinal, 0, 3).unwrap();
        }
        l.lease(&ordinals, step).unwrap();
        l.trained(step, step, 12, 0).unwrap();
        assert!(
            l.books().entries() <= 2,
            "{} entries at step {step}",
            l.books().entries()
        );
    }
    l.books().check().unwrap();
    assert_eq!(count(&l, "trained"), 20_000);
}

#[derive(Debug, Clone)]
enum Step {
    Issue(u64),
    Generating(u64, u64),
    Ready(u64, u64, u64),
    Lease(Vec<u64>, u64),
    GiveBack(u64),
    Trained(u64, u64),
    Drop(u64, u64, Option<u64>),
    Requeue(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (task, attempt, lease) = (0u64..6, 0u64..3, 0u64..3);
    let tasks = prop::collection::vec(task.clone(), 1..3);
    prop_oneof![
        3 => task.clone().prop_map(Step::Issue),
        3 => (task.clone(), attempt.clone()).prop_map(|(t, a)| Step::Generating(t, a)),
        3 => (task.clone(), attempt.clone(), 0u64..50).prop_map(|(t, a, n)| Step::Ready(t, a, n)),
        2 => (tasks, lease.clone()).prop_map(|(t, l)| Step::Lease(t, l)),
        1 => lease.clone().prop_map(Step::GiveBack),
        2 => (lease, 0u64..100).prop_map(|(l, share)| Step::Trained(l, share)),
        1 => (task.clone(), attempt, prop::option::of(0u64..50)).prop_map(|(t, a, n)| Step::Drop(t, a, n)),
        1 => task.prop_map(Step::Requeue),
    ]
}

/// `Some(true)` when the ledger took the step.
fn perform(l: &mut Ledger, step: &Step, clock: u64) -> Option<bool> {
    let done = match step {
        Step::Issue(t) => l.issue(*t),
        Step::Generating(t, a) => l.generating(*t, *a),
        Step::Ready(t, a, n) => l.ready(*t, *a, *n),
        Step::Lease(t, lease) => l.lease(t, *lease),
        Step::GiveBack(lease) => l.give_back(*lease),
        Step::Trained(lease, share) => {
            // The tokens of one lease are not told, so the right total is searched.
            let tried = (0..=l.books().tokens.held).find(|total| {
                let trained = total * share / 100;
                l.trained(*lease, clock, trained, total - trained).is_ok()
            });
            return tried.map(|_| true);
        }
        Step::Drop(t, a, n) => l.drop_task(*t, *a, "dropped", *n),
        Step::Requeue(t) => l.requeue(*t, "requeued", None),
    };
    done.ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_order_of_calls_conserves_tokens_and_recovers(steps in prop::collection::vec(step(), 1..120)) {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(Some(folder.path()), 1 << 20).unwrap();
        for (clock, step) in steps.iter().enumerate() {
            let before = facts(&ledger);
            if perform(&mut ledger, step, clock as u64) != Some(true) {
                prop_assert_eq!(facts(&ledger), before, "a refused or late step changed something: {:?}", step);
            }
            ledger.books().check().unwrap();
        }
        let end = facts(&ledger);
        drop(ledger);
        prop_assert_eq!(facts(&Ledger::open(Some(folder.path()), 1 << 20).unwrap()), end);
    }
}

#[test]
fn ends_of_attempts_are_remembered_until_there_are_too_many() {
    let mut l = in_memory();
    assert!(l.record(&Event::Answered(0, 0)).unwrap());
    assert!(!l.record(&Event::Answered(0, 0)).unwrap());
    assert!(l.record(&Event::Answered(0, 1)).unwrap());
    for ordinal in 1..1 << 14 {
        assert!(l.record(&Event::Answered(ordinal, 0)).unwrap());
    }
    assert!(!l.record(&Event::Answered(0, 1)).unwrap());
    assert!(
        l.record(&Event::Answered(0, 0)).unwrap(),
        "the oldest is forgotten"
    );
}
