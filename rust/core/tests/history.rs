//! Steps taken back: their tasks are issued again, no task is lost or trained twice, tokens are conserved, and a crash at
//! any byte leaves a ledger from which the same is reached.

#[path = "common/fault.rs"]
mod fault;

use fault::text;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use sao_core::history::{History, REWOUND};
use sao_core::ledger::{Ledger, Phase, Use};

fn facts(ledger: &Ledger) -> String {
    ledger.check().unwrap();
    format!(
        "{:?} {:?} {:?} {:?}",
        ledger.counts(),
        ledger.tokens(),
        ledger.unfinished(),
        ledger.last_step()
    )
}

/// Plays these tasks to the end and commits them as a step; a third of the tokens are masked.
fn train(ledger: &mut Ledger, step: u64, ordinals: &[u64]) {
    for ordinal in ordinals {
        let attempt = ledger.issue(*ordinal).unwrap();
        ledger.generating(*ordinal, attempt).unwrap();
        assert!(ledger.ready(*ordinal, attempt, 3 + *ordinal).unwrap());
    }
    ledger.lease(ordinals, step % 3).unwrap(); // numbers of leases repeat, as they do when a broker is started again
    let total: u64 = ordinals.iter().map(|o| 3 + o).sum();
    ledger
        .trained(step % 3, step, &Use::Total(total - total / 3, total / 3))
        .unwrap();
}

fn members(path: &Path, after: u64) -> Vec<(u64, Vec<(u64, u64)>)> {
    let steps = History::read(path, after).unwrap().steps;
    steps.into_iter().map(|s| (s.step, s.members)).collect()
}

#[test]
fn steps_are_taken_back_newest_first_and_their_tasks_start_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.log");
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    train(&mut ledger, 1, &[1, 0]);
    train(&mut ledger, 3, &[2, 4]); // 3 is dropped: a gap
    ledger.issue(3).unwrap();
    ledger.drop_task(3, 0, "env:down", Some(7)).unwrap();
    train(&mut ledger, 4, &[5, 6]);
    let sampled = ledger.tokens().sampled;
    let (trained_1, masked_1) = (5, 2);

    let back = ledger.rewind(1).unwrap();
    assert_eq!(back.iter().map(|s| s.step).collect::<Vec<_>>(), [4, 3]);
    assert_eq!(back[0].members, [(5, 0), (6, 0)]);
    assert_eq!(ledger.last_step(), Some(1));
    let requeued = [2, 4, 5, 6].map(|ordinal| (ordinal, 1, Phase::Requeued));
    assert_eq!(ledger.unfinished(), requeued);
    assert_eq!(ledger.state(3), "finished", "what was dropped stays so");
    let tokens = ledger.tokens();
    assert_eq!(
        (tokens.sampled, tokens.trained, tokens.masked),
        (sampled, trained_1, masked_1)
    );
    assert_eq!(tokens.dropped[REWOUND], 5 + 7 + 8 + 9);
    ledger.check().unwrap();
    assert!(
        ledger.rewind(1).unwrap().is_empty(),
        "nothing is left to do"
    );

    train(&mut ledger, 2, &[4, 5]);
    train(&mut ledger, 3, &[2, 6]);
    let all = [
        (1, vec![(1, 0), (0, 0)]),
        (2, vec![(4, 1), (5, 1)]),
        (3, vec![(2, 1), (6, 1)]),
    ];
    assert_eq!(members(&path, 0), all[..1], "the rest is not flushed");
    ledger.flush().unwrap();
    assert_eq!(members(&path, 0), all);
    assert_eq!(members(&path, 2), all[2..]);
    let read = History::read(&path, 2).unwrap();
    assert_eq!(read.trained_before(), [(0, 2), (4, 6)]);
    let expected = facts(&ledger);
    drop(ledger);
    assert_eq!(facts(&Ledger::open(Some(&path)).unwrap()), expected);
}

#[test]
fn what_cannot_be_taken_back_is_named_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.log");
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    train(&mut ledger, 2, &[0, 1]);
    let before = facts(&ledger);
    assert_eq!(
        text(ledger.rewind(3)),
        "cannot go back to step 3: the last committed step is 2"
    );
    assert_eq!(facts(&ledger), before);
    let mut in_memory = Ledger::open(None).unwrap();
    train(&mut in_memory, 2, &[0, 1]);
    assert!(text(in_memory.rewind(1)).contains("without a file"));
    assert!(in_memory.rewind(2).unwrap().is_empty());
    let missing = folder.path().join("none");
    assert!(text(History::read(&missing, 0)).contains("none: cannot be read"));
}

#[test]
fn all_the_way_back_is_a_ledger_on_which_nothing_was_trained() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.log");
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    for step in 1..=4 {
        train(&mut ledger, step, &[2 * step, 2 * step + 1]);
    }
    assert_eq!(ledger.rewind(0).unwrap().len(), 4);
    assert_eq!(ledger.last_step(), None);
    assert_eq!((ledger.tokens().trained, ledger.tokens().masked), (0, 0));
    assert_eq!(ledger.unfinished().len(), 8);
    train(&mut ledger, 1, &[2, 3]);
    ledger.flush().unwrap();
    assert_eq!(members(&path, 0), [(1, vec![(2, 1), (3, 1)])]);
}

#[test]
fn a_crash_at_any_byte_while_going_back_reaches_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.log");
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    for step in 1..=5 {
        train(&mut ledger, step, &[3 * step, 3 * step + 2]);
    }
    ledger.flush().unwrap();
    let start = fs::metadata(&path).unwrap().len() as usize;
    ledger.rewind(2).unwrap();
    let expected = facts(&ledger);
    drop(ledger);
    let whole = fs::read(&path).unwrap();
    for length in start..=whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let mut ledger = Ledger::open(Some(&path)).unwrap();
        ledger.check().unwrap();
        ledger.rewind(2).unwrap();
        assert_eq!(facts(&ledger), expected, "cut at {length}");
    }
}

#[test]
fn a_record_that_takes_back_what_was_not_committed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.log");
    let mut ledger = Ledger::open(Some(&path)).unwrap();
    train(&mut ledger, 1, &[0, 1]);
    ledger.flush().unwrap();
    let start = fs::metadata(&path).unwrap().len() as usize;
    ledger.rewind(0).unwrap();
    drop(ledger);
    let mut twice = fs::read(&path).unwrap();
    twice.extend_from_within(start..);
    fs::write(&path, &twice).unwrap();
    let message = text(Ledger::open(Some(&path)));
    assert!(
        message.contains("step 1 after None cannot be taken back"),
        "{message}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Steps and losses in any order, with the file read anew at any time: a plain list of steps is the model.
    #[test]
    fn history_is_the_steps_that_survive(moves in prop::collection::vec((0u8..5, 0usize..6, 1usize..4), 1..40)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.log");
        let mut ledger = Ledger::open(Some(&path)).unwrap();
        let mut model: Vec<(u64, Vec<u64>)> = Vec::new();
        let (mut waiting, mut next) = (BTreeSet::new(), 0u64);
        for (kind, back, size) in moves {
            if kind == 0 {
                let keep = model.len().saturating_sub(back);
                let step = if keep == 0 { 0 } else { model[keep - 1].0 };
                ledger.rewind(step).unwrap();
                for (_, ordinals) in model.drain(keep..) {
                    waiting.extend(ordinals);
                }
            } else if kind == 1 {
                drop(ledger);
                ledger = Ledger::open(Some(&path)).unwrap();
            } else {
                let mut ordinals: Vec<u64> = waiting.iter().copied().take(size - 1).collect();
                for ordinal in &ordinals {
                    waiting.remove(ordinal);
                }
                ordinals.push(next);
                next += 1 + (back as u64 % 2); // ordinals with gaps
                let step = model.last().map_or(0, |(step, _)| *step) + 1 + (back as u64 % 3);
                train(&mut ledger, step, &ordinals);
                model.push((step, ordinals));
            }
            ledger.check().unwrap();
        }
        ledger.flush().unwrap();
        let found: Vec<_> = members(&path, 0)
            .into_iter()
            .map(|(step, m)| (step, m.into_iter().map(|(o, _)| o).collect::<Vec<_>>()))
            .collect();
        prop_assert_eq!(&found, &model);
        let open: BTreeSet<u64> = ledger.unfinished().iter().map(|(o, ..)| *o).collect();
        prop_assert_eq!(open, waiting);
        let half = model.get(model.len() / 2).map_or(0, |(step, _)| *step);
        let mut before: BTreeSet<u64> = BTreeSet::new();
        for (a, b) in History::read(&path, half).unwrap().trained_before() {
            before.extend(a..b);
        }
        let expected = model.iter().filter(|(s, _)| *s <= half).flat_map(|(_, o)| o.clone()).collect();
        prop_assert_eq!(before, expected);
    }
}
