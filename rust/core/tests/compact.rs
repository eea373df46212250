//! A compacted ledger is the ledger it was: same state, same later history, same way back, from a fraction of the bytes.

#[path = "common/facts.rs"]
mod facts;
#[path = "common/fault.rs"]
mod fault;

use facts::facts;
use fault::text;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use sao_core::history::History;
use sao_core::ledger::{Ledger, Phase, Use};

/// One thing that a broker may do next; the number picks among the tasks to which it applies.
#[derive(Debug, Clone)]
enum Op {
    Issue,
    Generating(usize),
    Ready(usize),
    Lease(usize),
    GiveBack,
    Train,
    Drop(usize),
    Requeue(usize),
    Waste,
    Rewind(u64),
    Compact(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => Just(Op::Issue),
        4 => any::<usize>().prop_map(Op::Generating),
        4 => any::<usize>().prop_map(Op::Ready),
        3 => (1usize..4).prop_map(Op::Lease),
        1 => Just(Op::GiveBack),
        3 => Just(Op::Train),
        1 => any::<usize>().prop_map(Op::Drop),
        1 => any::<usize>().prop_map(Op::Requeue),
        1 => Just(Op::Waste),
        1 => (0u64..3).prop_map(Op::Rewind),
        2 => (0u64..3).prop_map(Op::Compact),
    ]
}

fn of(ledger: &Ledger, wanted: Phase) -> Vec<(u64, u64)> {
    let all = ledger.unfinished().into_iter();
    all.filter(|(_, _, phase)| *phase == wanted)
        .map(|(ordinal, attempt, _)| (ordinal, attempt))
        .collect()
}

/// Does `op` if it is possible; both ledgers are in the same state, so it is possible in both or in none.
fn act(ledger: &mut Ledger, op: &Op, folded: u64) {
    let pick = |phase: Phase, index: usize| {
        let found = of(ledger, phase);
        (!found.is_empty()).then(|| found[index % found.len()])
    };
    let tokens = |ordinal: u64, attempt: u64| 3 + ordinal + attempt;
    match *op {
        Op::Issue => {
            let again = of(ledger, Phase::Requeued)
                .first()
                .map(|(ordinal, _)| *ordinal);
            let ordinal = again.unwrap_or(ledger.next_ordinal() + ledger.next_ordinal() % 2);
            ledger.issue(ordinal).unwrap();
        }
        Op::Generating(index) => {
            if let Some((ordinal, attempt)) = pick(Phase::Issued, index) {
                ledger.generating(ordinal, attempt).unwrap();
            }
        }
        Op::Ready(index) => {
            if let Some((ordinal, attempt)) = pick(Phase::Generating, index) {
                ledger
                    .ready(ordinal, attempt, tokens(ordinal, attempt))
                    .unwrap();
            }
        }
        Op::Lease(count) => {
            let ready: Vec<u64> = of(ledger, Phase::Ready).iter().map(|(o, _)| *o).collect();
            let lease = (0..999)
                .find(|l| !ledger.leases().iter().any(|(n, _)| n == l))
                .unwrap();
            if ready.len() >= count {
                ledger.lease(&ready[..count], lease).unwrap();
            }
        }
        Op::GiveBack => {
            if let Some((lease, _)) = ledger.leases().first() {
                ledger.give_back(*lease).unwrap();
            }
        }
        Op::Train => {
            if let Some((lease, members)) = ledger.leases().last().cloned() {
                let leased = of(ledger, Phase::Leased);
                let all = leased
                    .iter()
                    .filter(|(ordinal, _)| members.contains(ordinal));
                let total: u64 = all
                    .map(|(ordinal, attempt)| tokens(*ordinal, *attempt))
                    .sum();
                let step = ledger.last_step().unwrap_or(0) + 1;
                ledger
                    .trained(lease, step, &Use::Total(total - total / 3, total / 3))
                    .unwrap();
            }
        }
        Op::Drop(index) => {
            if let Some((ordinal, attempt)) = pick(Phase::Leased, index) {
                ledger
                    .drop_task(ordinal, attempt, "env:down", None)
                    .unwrap();
            }
        }
        Op::Requeue(index) => {
            if let Some((ordinal, _)) = pick(Phase::Ready, index) {
                ledger.requeue(ordinal, "lost", None).unwrap();
            }
        }
        Op::Waste => ledger.waste("late", 5).unwrap(),
        Op::Rewind(back) => {
            let step = ledger
                .last_step()
                .unwrap_or(0)
                .saturating_sub(back)
                .max(folded);
            if ledger.last_step().unwrap_or(0) >= step {
                ledger.rewind(step).unwrap();
            }
        }
        Op::Compact(_) => {}
    }
}

fn same_history(a: &Path, b: &Path, after: u64) {
    let (a, b) = (
        History::read(a, after).unwrap(),
        History::read(b, after).unwrap(),
    );
    assert_eq!(a.steps, b.steps);
    assert_eq!(a.trained_before(), b.trained_before());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn it_is_the_ledger_it_was(ops in prop::collection::vec(op(), 1..120)) {
        let folder = tempfile::tempdir().unwrap();
        let (long, short) = (folder.path().join("long.log"), folder.path().join("short.log"));
        let mut whole = Ledger::open(Some(&long)).unwrap();
        let mut compacted = Ledger::open(Some(&short)).unwrap();
        let mut folded = 0;
        for op in &ops {
            act(&mut whole, op, folded);
            act(&mut compacted, op, folded);
            if let Op::Compact(back) = op {
                let upto = whole.last_step().unwrap_or(0).saturating_sub(*back);
                let (before, after) = compacted.compact(upto).unwrap();
                prop_assert_eq!(fs::metadata(&short).unwrap().len(), after);
                prop_assert!(after <= before || before < 4096);
                folded = folded.max(upto);
            }
            prop_assert_eq!(facts(&compacted), facts(&whole));
        }
        whole.flush().unwrap();
        compacted.flush().unwrap();
        for after in folded..=folded + 2 {
            same_history(&long, &short, after);
        }
        let expected = facts(&whole);
        drop((whole, compacted));
        let again = Ledger::open(Some(&short)).unwrap();
        prop_assert_eq!(facts(&again), expected);
    }
}

fn train(ledger: &mut Ledger, step: u64, ordinals: &[u64]) {
    for ordinal in ordinals {
        let attempt = ledger.issue(*ordinal).unwrap();
        ledger.generating(*ordinal, attempt).unwrap();
        assert!(ledger.ready(*ordinal, attempt, 3).unwrap());
    }
    ledger.lease(ordinals, 0).unwrap();
    let used = Use::Total(3 * ordinals.len() as u64, 0);
    ledger.trained(0, step, &used).unwrap();
}

#[test]
fn a_long_file_becomes_short_and_its_old_steps_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.log");
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    for step in 1..=200 {
        let first = 8 * (step - 1);
        train(&mut ledger, step, &(first..first + 8).collect::<Vec<_>>());
    }
    let expected = facts(&ledger);
    let (before, after) = ledger.compact(190).unwrap();
    assert!(after < before / 10, "{before} to {after} bytes");
    assert_eq!(facts(&ledger), expected);
    assert_eq!(
        ledger.compact(190).unwrap(),
        (after, after),
        "nothing is left to do"
    );
    assert_eq!(
        ledger.compact(5).unwrap(),
        (after, after),
        "it never goes back"
    );
    assert!(text(ledger.rewind(189)).contains("steps up to 190 are no longer listed"));
    assert_eq!(facts(&ledger), expected, "a refused call changes nothing");
    assert_eq!(ledger.rewind(190).unwrap().len(), 10);
    let requeued = ledger.unfinished();
    assert_eq!(requeued.len(), 80);
    train(&mut ledger, 191, &[requeued[0].0]);
    ledger.flush().unwrap();
    assert_eq!(History::read(&path, 190).unwrap().steps.len(), 1);
    assert_eq!(
        History::read(&path, 190).unwrap().trained_before(),
        [(0, 190 * 8)]
    );
    let expected = facts(&ledger);
    drop(ledger);
    assert_eq!(facts(&Ledger::open(Some(&path)).unwrap()), expected);
    assert_eq!(
        Ledger::open(None).unwrap().compact(3).unwrap(),
        (0, 0),
        "no file"
    );
}

#[test]
fn cut_at_any_byte_it_is_refused_or_as_whole_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.log");
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    for step in 1..=6 {
        train(&mut ledger, step, &[3 * step, 3 * step + 1]);
    }
    ledger.issue(100).unwrap();
    ledger.waste("late", 9).unwrap();
    ledger.compact(5).unwrap();
    ledger.flush().unwrap();
    let data = fs::read(&path).unwrap();
    let mut opened = 0;
    for stop in 17..data.len() {
        fs::write(&path, &data[..stop]).unwrap();
        match Ledger::open(Some(&path)) {
            Ok(found) => {
                found.check().unwrap();
                assert!(found.last_step() >= Some(5), "the picture is whole");
                opened += 1;
            }
            Err(error) => assert!(error.to_string().contains("cut short"), "{error}"),
        }
        assert!(
            opened > 0 || fs::read(&path).unwrap() == data[..stop],
            "a refused file is left as it is"
        );
    }
    assert!(opened > 20);
    // A file that was being written when the machine stopped is no obstacle.
    fs::write(&path, &data).unwrap();
    fs::write(folder.path().join("ledger.log.compacting"), b"half").unwrap();
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    let before = facts(&ledger);
    ledger.compact(6).unwrap();
    assert_eq!(facts(&ledger), before);
}
