//! Steps taken back: their tasks are issued again, no task is lost or trained twice, tokens are conserved, and a crash at
//! any byte leaves a ledger from which the same is reached.

#[path = "common/ledger.rs"]
mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use common::{facts, text, train, unfinished, Calls};
use proptest::prelude::*;
use sao_core::ledger::{history, Ledger, Phase, REWOUND};

fn open(path: &Path) -> Ledger {
    Ledger::open(Some(path), 1 << 20).unwrap()
}

fn members(path: &Path, after: u64) -> Vec<(u64, Vec<(u64, u64)>)> {
    let steps = history(path, after).unwrap().steps;
    steps.into_iter().map(|s| (s.step, s.members)).collect()
}

#[test]
fn steps_are_taken_back_newest_first_and_their_tasks_start_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut ledger = open(&path);
    train(&mut ledger, 1, &[1, 0]);
    train(&mut ledger, 3, &[2, 4]); // 3 is dropped: a gap
    ledger.issue(3).unwrap();
    ledger.drop_task(3, 0, "env:down", Some(7)).unwrap();
    train(&mut ledger, 4, &[5, 6]);
    let sampled = ledger.books().tokens.sampled;
    let (trained_1, masked_1) = (5, 2);

    let back = ledger.rewind(1).unwrap();
    assert_eq!(back.iter().map(|s| s.step).collect::<Vec<_>>(), [4, 3]);
    assert_eq!(back[0].members, [(5, 0), (6, 0)]);
    assert_eq!(ledger.books().last_step, Some(1));
    let requeued = [2, 4, 5, 6].map(|ordinal| (ordinal, 1, Phase::Requeued));
    assert_eq!(unfinished(&ledger), requeued);
    assert_eq!(
        ledger.books().where_is(3),
        "finished",
        "what was dropped stays so"
    );
    let tokens = &ledger.books().tokens;
    assert_eq!(
        (tokens.sampled, tokens.trained, tokens.masked),
        (sampled, trained_1, masked_1)
    );
    assert_eq!(tokens.dropped[REWOUND], 5 + 7 + 8 + 9);
    ledger.books().check().unwrap();
    assert!(
        ledger.rewind(1).unwrap().is_empty(),
        "nothing is left to do"
    );

    ledger.flush().unwrap();
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
    let read = history(&path, 2).unwrap();
    assert_eq!(read.trained_before(), [(0, 2), (4, 6)]);
    let expected = facts(&ledger);
    drop(ledger);
    assert_eq!(facts(&open(&path)), expected);
}

#[test]
fn what_cannot_be_taken_back_is_named_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut ledger = open(&path);
    train(&mut ledger, 2, &[0, 1]);
    let before = facts(&ledger);
    assert_eq!(
        text(ledger.rewind(3)),
        "cannot go back to step 3: the last committed step is 2"
    );
    assert_eq!(facts(&ledger), before);
    let mut in_memory = Ledger::open(None, 0).unwrap();
    train(&mut in_memory, 2, &[0, 1]);
    assert!(text(in_memory.rewind(1)).contains("without a journal"));
    assert!(in_memory.rewind(2).unwrap().is_empty());
    let missing = folder.path().join("none");
    assert!(text(history(&missing, 0)).contains("none: cannot be read"));
}

#[test]
fn all_the_way_back_is_a_ledger_on_which_nothing_was_trained() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut ledger = open(&path);
    for step in 1..=4 {
        train(&mut ledger, step, &[2 * step, 2 * step + 1]);
    }
    assert_eq!(ledger.rewind(0).unwrap().len(), 4);
    assert_eq!(ledger.books().last_step, None);
    assert_eq!(
        (ledger.books().tokens.trained, ledger.books().tokens.masked),
        (0, 0)
    );
    assert_eq!(unfinished(&ledger).len(), 8);
    train(&mut ledger, 1, &[2, 3]);
    ledger.flush().unwrap();
    assert_eq!(members(&path, 0), [(1, vec![(2, 1), (3, 1)])]);
}

#[test]
fn a_crash_at_any_byte_while_going_back_goes_all_the_way_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let segment = path.join("00000001.journal");
    let mut ledger = open(&path);
    for step in 1..=5 {
        train(&mut ledger, step, &[3 * step, 3 * step + 2]);
    }
    ledger.flush().unwrap();
    let (start, before) = (
        fs::metadata(&segment).unwrap().len() as usize,
        facts(&ledger),
    );
    ledger.rewind(2).unwrap();
    let expected = facts(&ledger);
    drop(ledger);
    let whole = fs::read(&segment).unwrap();
    for length in start..=whole.len() {
        fs::write(&segment, &whole[..length]).unwrap();
        let mut ledger = open(&path);
        let found = if length < whole.len() {
            &before
        } else {
            &expected
        };
        assert_eq!(&facts(&ledger), found, "cut at {length}");
        ledger.rewind(2).unwrap();
        assert_eq!(facts(&ledger), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Steps and losses in any order, with the file read anew at any time: a plain list of steps is the model.
    #[test]
    fn history_is_the_steps_that_survive(moves in prop::collection::vec((0u8..5, 0usize..6, 1usize..4), 1..40)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let mut ledger = open(&path);
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
                ledger = open(&path);
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
            ledger.books().check().unwrap();
        }
        ledger.flush().unwrap();
        let found: Vec<_> = members(&path, 0)
            .into_iter()
            .map(|(step, m)| (step, m.into_iter().map(|(o, _)| o).collect::<Vec<_>>()))
            .collect();
        prop_assert_eq!(&found, &model);
        let open: BTreeSet<u64> = unfinished(&ledger).iter().map(|(o, ..)| *o).collect();
        prop_assert_eq!(open, waiting);
        let half = model.get(model.len() / 2).map_or(0, |(step, _)| *step);
        let mut before: BTreeSet<u64> = BTreeSet::new();
        for (a, b) in history(&path, half).unwrap().trained_before() {
            before.extend(a..b);
        }
        let expected = model.iter().filter(|(s, _)| *s <= half).flat_map(|(_, o)| o.clone()).collect();
        prop_assert_eq!(before, expected);
    }
}
