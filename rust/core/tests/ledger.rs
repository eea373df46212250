//! The ledger: legal steps only, tokens conserved, and a file that survives a crash at any byte.

#[path = "common/facts.rs"]
mod facts;
#[path = "common/fault.rs"]
mod fault;

use facts::facts;
use fault::text;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use sao_core::ledger::{Ledger, Use};

fn count(ledger: &Ledger, state: &str) -> u64 {
    let counts = ledger.counts();
    counts
        .into_iter()
        .find(|(name, _)| *name == state)
        .unwrap()
        .1
}

fn start(ledger: &mut Ledger, ordinal: u64) -> u64 {
    let attempt = ledger.issue(ordinal).unwrap();
    ledger.generating(ordinal, attempt).unwrap();
    attempt
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
    let used = Use::Each(vec![(13, 0), (4, 6)]);
    ledger.trained(10, 1, &used).unwrap();
    seen(ledger);
    ledger.requeue(4, "generator_died", Some(5)).unwrap();
    seen(ledger);
    assert_eq!(ledger.issue(4).unwrap(), 1);
    seen(ledger);
    assert!(ledger.drop_task(5, 0, "env:timeout", Some(3)).unwrap());
    seen(ledger);
    ledger.waste("late", 8).unwrap();
    seen(ledger);
}

#[test]
fn a_story_ends_with_the_right_numbers() {
    let mut ledger = Ledger::open(None).unwrap();
    story(&mut ledger, |_| ());
    let tokens = ledger.tokens();
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
    let states = [0, 1, 2, 4, 6].map(|ordinal| ledger.state(ordinal));
    assert_eq!(
        states,
        ["finished", "finished", "ready", "issued", "unknown"]
    );
}

#[test]
fn impossible_steps_name_task_state_and_wish_and_change_nothing() {
    let mut l = Ledger::open(None).unwrap();
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
    assert!(text(l.trained(1, 0, &Use::Total(0, 0))).contains("lease 1 is not open"));
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
    let wrong = [
        (
            Use::Total(6, 0),
            "trained 6 + masked 0 tokens, but it holds 7",
        ),
        (Use::Total(u64::MAX, 8), "but it holds 7"),
        (Use::Each(vec![(7, 0)]), "1 tasks given, it holds 2"),
        (Use::Each(vec![(4, 0), (3, 0)]), "task 0: trained 4"),
    ];
    for (used, expected) in wrong {
        let message = text(l.trained(1, 0, &used));
        assert!(message.contains(expected), "{message}");
    }
    assert_eq!(facts(&l), before);
    l.trained(1, 0, &Use::Total(7, 0)).unwrap();
    assert_eq!(text(l.issue(0)), "task 0 is finished; wanted: issued");
    assert!(text(l.requeue(0, "x", None)).contains("task 0 is finished; wanted: requeued"));
    assert!(!l.ready(0, 0, 5).unwrap(), "late");
    start(&mut l, 2);
    l.ready(2, 0, 1).unwrap();
    l.lease(&[2], 2).unwrap();
    let message = text(l.trained(2, 0, &Use::Total(1, 0)));
    assert_eq!(message, "step: 0 is not after the last committed step 0");
    assert!(text(l.issue(u64::MAX)).contains("below 2^63 - 1"));
}

#[test]
fn answers_of_an_earlier_attempt_are_late() {
    let mut l = Ledger::open(None).unwrap();
    start(&mut l, 0);
    l.requeue(0, "lost", Some(4)).unwrap();
    assert!(!l.ready(0, 0, 9).unwrap());
    assert!(text(l.ready(0, 1, 9)).contains("task 0 is requeued (attempt 1)"));
    assert_eq!(start(&mut l, 0), 1);
    assert!(!l.ready(0, 0, 9).unwrap());
    assert!(!l.drop_task(0, 0, "x", Some(9)).unwrap());
    assert!(l.ready(0, 1, 9).unwrap());
    assert_eq!((l.tokens().sampled, l.tokens().held), (13, 9));
}

#[test]
fn reasons_are_codes() {
    let mut l = Ledger::open(None).unwrap();
    for number in 0..256 {
        l.waste(&format!("code{number}"), 1).unwrap();
    }
    assert!(text(l.waste("one more", 1)).contains("at most 256"));
    l.waste("code7", 1).unwrap();
    assert!(text(l.waste(&"x".repeat(129), 1)).contains("has 129 bytes"));
    assert_eq!(l.tokens().sampled, 257);
}

#[test]
fn memory_follows_the_unfinished_tasks() {
    let mut l = Ledger::open(None).unwrap();
    start(&mut l, 0); // a straggler at the front the whole time
    for step in 0..5_000u64 {
        let ordinals: Vec<u64> = (1 + 4 * step..5 + 4 * step).collect();
        for ordinal in ordinals.iter().rev() {
            start(&mut l, *ordinal);
            l.ready(*ordinal, 0, 3).unwrap();
        }
        l.lease(&ordinals, step).unwrap();
        l.trained(step, step, &Use::Total(12, 0)).unwrap();
        assert!(l.entries() <= 2, "{} entries at step {step}", l.entries());
    }
    l.check().unwrap();
    assert_eq!(count(&l, "trained"), 20_000);
}

/// A file with the whole story, and after each event its length and what the ledger said then.
fn written(folder: &tempfile::TempDir) -> (PathBuf, Vec<(u64, String)>) {
    let path = folder.path().join("ledger.log");
    let mut states = Vec::new();
    let mut note = |ledger: &mut Ledger| {
        ledger.flush().unwrap();
        states.push((fs::metadata(&path).unwrap().len(), facts(ledger)));
    };
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    note(&mut ledger);
    story(&mut ledger, note);
    (path, states)
}

#[test]
fn a_file_cut_at_any_byte_recovers_the_last_whole_record_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (path, states) = written(&folder);
    let whole = fs::read(&path).unwrap();
    for length in 0..=whole.len() {
        // A crash may also leave zeros behind the cut; a file without a whole header and with more is not a ledger.
        let tails: &[&[u8]] = if length < 16 {
            &[b""]
        } else {
            &[b"", &[0; 40]]
        };
        for tail in tails {
            let torn = [&whole[..length], tail].concat();
            fs::write(&path, &torn).unwrap();
            let same = torn.iter().zip(&whole).take_while(|(a, b)| a == b).count();
            let mut ledger = Ledger::open(Some(&path)).unwrap();
            let last = states.iter().rfind(|(end, _)| *end <= same as u64);
            let expected = &last.or(states.first()).unwrap().1;
            assert_eq!(&facts(&ledger), expected, "cut at {length}");
            ledger.issue(1000).unwrap();
            let after = facts(&ledger);
            drop(ledger);
            assert_eq!(facts(&Ledger::open(Some(&path)).unwrap()), after);
        }
    }
}

#[test]
fn damage_in_the_middle_is_refused_with_its_offset() {
    let folder = tempfile::tempdir().unwrap();
    let (path, states) = written(&folder);
    let whole = fs::read(&path).unwrap();
    let last = states[states.len() - 2].0 as usize;
    for at in 16..last {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(&path, &damaged).unwrap();
        let start = states.iter().rfind(|(end, _)| *end <= at as u64).unwrap().0;
        let message = text(Ledger::open(Some(&path)));
        let expected = format!("corrupt record at byte {start} of");
        assert!(message.contains(&expected), "{message}");
        let kept = fs::read(&path).unwrap();
        assert_eq!(kept, damaged, "a refused file stays as it is");
    }
}

#[test]
fn other_files_and_impossible_records_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.log");
    for foreign in [&b"{\"a\": 1}"[..], b"SAOLEDGR\x02\0\0\0\0\0\0\0", &[0; 64]] {
        fs::write(&path, foreign).unwrap();
        assert!(text(Ledger::open(Some(&path))).contains("not a ledger file of format 1"));
        assert_eq!(fs::read(&path).unwrap(), foreign);
    }
    fs::remove_file(&path).unwrap();
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    ledger.issue(0).unwrap();
    drop(ledger);
    let mut twice = fs::read(&path).unwrap();
    twice.extend_from_within(16..);
    fs::write(&path, twice).unwrap();
    let message = text(Ledger::open(Some(&path)));
    let expected = "the record at byte 26 is impossible: task 0 is issued";
    assert!(message.contains(expected), "{message}");
    let missing = folder.path().join("none/ledger.log");
    assert!(text(Ledger::open(Some(&missing))).contains("none/ledger.log: cannot be opened"));
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
        Step::Issue(t) => l.issue(*t).map(|_| true),
        Step::Generating(t, a) => l.generating(*t, *a).map(|()| true),
        Step::Ready(t, a, n) => l.ready(*t, *a, *n),
        Step::Lease(t, lease) => l.lease(t, *lease).map(|()| true),
        Step::GiveBack(lease) => l.give_back(*lease).map(|()| true),
        Step::Trained(lease, share) => {
            // The tokens of one lease are not told, so the right total is searched.
            let tried = (0..=l.tokens().held).find(|total| {
                let trained = total * share / 100;
                let used = Use::Total(trained, total - trained);
                l.trained(*lease, clock, &used).is_ok()
            });
            return tried.map(|_| true);
        }
        Step::Drop(t, a, n) => l.drop_task(*t, *a, "dropped", *n),
        Step::Requeue(t) => l.requeue(*t, "requeued", None).map(|()| true),
    };
    done.ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_order_of_calls_conserves_tokens_and_recovers(steps in prop::collection::vec(step(), 1..120)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.log");
        let mut ledger = Ledger::open(Some(&path)).unwrap();
        for (clock, step) in steps.iter().enumerate() {
            let before = facts(&ledger);
            if perform(&mut ledger, step, clock as u64) != Some(true) {
                prop_assert_eq!(facts(&ledger), before, "a refused or late step changed something: {:?}", step);
            }
            ledger.check().unwrap();
        }
        let end = facts(&ledger);
        drop(ledger);
        prop_assert_eq!(facts(&Ledger::open(Some(&path)).unwrap()), end);
    }
}
