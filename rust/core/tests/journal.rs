//! The journal: a crash at any byte leaves what was committed, damage is named, and the disk is bounded by what lives.

#[path = "common/ledger.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use common::{facts, start, text, train, unfinished, Calls};
use proptest::prelude::*;
use sao_core::ledger::{history, Event, Ledger, Phase};

const HEAD_BYTES: usize = 44;

fn open(path: &Path) -> Ledger {
    Ledger::open(Some(path), 1 << 20).unwrap()
}

fn segment(path: &Path, number: u64) -> PathBuf {
    path.join(format!("{number:08}.journal"))
}

/// All frames that are kept, as one comparable text.
fn kept(ledger: &Ledger) -> String {
    let tasks = unfinished(ledger).into_iter();
    let frames = tasks.map(|(ordinal, ..)| {
        let found = ledger.frames(ordinal).unwrap();
        let frames: Vec<Vec<Vec<u8>>> = found
            .iter()
            .map(|one| one.frames().into_iter().map(<[u8]>::to_vec).collect())
            .collect();
        format!("{ordinal}: {frames:?}\n")
    });
    frames.collect()
}

/// A run with transactions of every kind; `seen` is called after each.
fn story(ledger: &mut Ledger, mut seen: impl FnMut(&mut Ledger)) {
    for ordinal in 0..3 {
        start(ledger, ordinal);
    }
    seen(ledger);
    for part in 0..2 {
        let turn: [&[u8]; 3] = [b"numbers", b"header", &[part; 20]];
        ledger.turn(1, part.into(), &turn).unwrap();
        seen(ledger);
    }
    for ordinal in [0, 2] {
        ledger.ready(ordinal, 0, 10).unwrap();
        ledger
            .trajectory(ordinal, &[b"header", &[7; 30], b""])
            .unwrap();
    }
    ledger.record(&Event::Note(b"a note".to_vec())).unwrap();
    ledger.record(&Event::Answered(0, 0)).unwrap();
    seen(ledger);
    ledger.lease(&[0], 1).unwrap();
    seen(ledger);
    ledger.trained(1, 1, 10, 0).unwrap();
    seen(ledger);
    ledger.requeue(1, "generator_lost", None).unwrap();
    seen(ledger);
}

/// A journal with the whole story, and after each transaction its length and what the ledger said then.
fn written(path: &Path) -> Vec<(u64, String)> {
    let mut states = Vec::new();
    let mut note = |ledger: &mut Ledger| {
        ledger.flush().unwrap();
        let length = fs::metadata(segment(path, 1)).unwrap().len();
        states.push((length, facts(ledger) + &kept(ledger)));
    };
    let mut ledger = open(path);
    note(&mut ledger);
    story(&mut ledger, note);
    states
}

#[test]
fn a_segment_cut_at_any_byte_recovers_the_last_whole_transaction_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let states = written(&path);
    let whole = fs::read(segment(&path, 1)).unwrap();
    for length in states[0].0 as usize..=whole.len() {
        for tail in [&b""[..], &[0; 60]] {
            let torn = [&whole[..length], tail].concat(); // a crash may also leave zeros behind the cut
            fs::write(segment(&path, 1), &torn).unwrap();
            let same = torn.iter().zip(&whole).take_while(|(a, b)| a == b).count();
            let (end, expected) = states.iter().rfind(|(end, _)| *end <= same as u64).unwrap();
            let mut ledger = open(&path);
            assert_eq!(
                &(facts(&ledger) + &kept(&ledger)),
                expected,
                "cut at {length}"
            );
            assert!(ledger.damage().is_empty());
            assert_eq!(fs::metadata(segment(&path, 1)).unwrap().len(), *end);
            ledger.issue(1000).unwrap();
            let after = facts(&ledger);
            drop(ledger);
            assert_eq!(facts(&open(&path)), after);
        }
    }
    for length in 0..states[0].0 as usize {
        fs::write(segment(&path, 1), &whole[..length]).unwrap();
        let refused = text(Ledger::open(Some(&path), 1));
        assert!(
            refused.contains("the snapshot at its beginning is missing"),
            "{refused}"
        );
    }
}

#[test]
fn damage_is_refused_in_the_books_and_named_in_frames_and_the_rest_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let states = written(&path);
    let whole = fs::read(segment(&path, 1)).unwrap();
    let last = states[states.len() - 2].0 as usize;
    let magic: Vec<usize> = (0..whole.len())
        .filter(|at| whole[*at..].starts_with(b"SAO"))
        .collect();
    let (mut refused, mut named) = (0, 0);
    for at in 0..last {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(segment(&path, 1), &damaged).unwrap();
        let begins = *magic.iter().rfind(|start| **start <= at).unwrap();
        match Ledger::open(Some(&path), 1 << 20) {
            Ok(ledger) => {
                assert!(
                    matches!(whole[begins + 3], 3 | 4),
                    "only frames can be missed"
                );
                assert!(facts(&ledger) == facts(&ledger));
                let expected = &states.last().unwrap().1;
                assert!(expected.starts_with(&facts(&ledger)), "the books are whole");
                // Those of task 0, which is finished, are missed by nobody where their head says whose they are.
                let texts = ledger.damage();
                let place = format!("{} byte {begins}: ", segment(&path, 1).display());
                assert!(texts.iter().all(|one| one.starts_with(&place)), "{texts:?}");
                if at >= begins + HEAD_BYTES && whole[begins + 8] == 2 {
                    assert!(texts[0].ends_with("trajectory of task 2 attempt 0 is damaged"));
                    assert!(
                        ledger.frames(2).unwrap().is_empty()
                            && ledger.frames(1).unwrap().len() == 2
                    );
                }
                named += usize::from(!texts.is_empty());
            }
            Err(error) => {
                let message = error.to_string();
                let place = format!("corrupt transaction at byte {begins} of {}", whole.len());
                assert!(
                    message.contains(&place) && whole[begins + 3] <= 2,
                    "{message}"
                );
                assert_eq!(
                    fs::read(segment(&path, 1)).unwrap(),
                    damaged,
                    "it stays as it is"
                );
                refused += 1;
            }
        }
    }
    assert!(refused > 300 && named > 200, "{refused} {named}");
}

#[test]
fn other_files_are_left_alone_and_impossible_transactions_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut ledger = open(&path);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0);
    ledger.issue(0).unwrap();
    drop(ledger);
    let snapshot = fs::metadata(segment(&path, 1)).unwrap().len();
    for stray in ["00000002 (copy).journal", "7.journal", "notes.txt"] {
        fs::write(path.join(stray), b"not ours").unwrap();
    }
    fs::write(
        path.join("00000002.new"),
        b"half a segment of a broker that was killed",
    )
    .unwrap();
    let mut ledger = open(&path);
    ledger.roll(0).unwrap();
    ledger.issue(1).unwrap();
    drop(ledger);
    assert_eq!(unfinished(&open(&path)).len(), 2);
    assert_eq!(
        fs::read(path.join("00000002 (copy).journal")).unwrap(),
        b"not ours"
    );
    let newest = segment(&path, 2);
    let data = fs::read(&newest).unwrap();
    fs::write(&newest, [&data[..], &data[..]].concat()).unwrap();
    assert!(
        text(Ledger::open(Some(&path), 1)).contains("corrupt transaction at byte"),
        "a snapshot in the middle"
    );
    fs::write(&newest, b"{\"a\": 1}").unwrap();
    assert!(text(Ledger::open(Some(&path), 1)).contains("no segment of a journal"));
    assert!(snapshot > 0);
    let file = folder.path().join("file");
    fs::write(&file, b"SAOLEDGR").unwrap();
    for wrong in [file.clone(), folder.path().join("none/journal")] {
        let message = text(Ledger::open(Some(&wrong), 1));
        assert!(
            message.starts_with(&format!("{}: cannot be opened", wrong.display())),
            "{message}"
        );
    }
}

#[test]
fn a_new_segment_is_short_and_says_what_it_no_longer_lists() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut ledger = open(&path);
    for step in 1..=200 {
        let first = 8 * (step - 1);
        train(&mut ledger, step, &(first..first + 8).collect::<Vec<_>>());
    }
    let expected = facts(&ledger);
    ledger.flush().unwrap();
    let before = ledger.bytes();
    ledger.roll(190).unwrap();
    assert!(
        ledger.bytes() < before / 5,
        "{before} to {} bytes",
        ledger.bytes()
    );
    assert_eq!(
        fs::metadata(segment(&path, 2)).unwrap().len(),
        ledger.bytes()
    );
    assert!(!segment(&path, 1).exists());
    assert_eq!(facts(&ledger), expected);
    assert!(text(ledger.rewind(189)).contains("steps up to 190 are no longer listed"));
    assert_eq!(facts(&ledger), expected, "a refused call changes nothing");
    assert_eq!(ledger.rewind(190).unwrap().len(), 10);
    let requeued = unfinished(&ledger);
    assert_eq!(requeued.len(), 80);
    train(&mut ledger, 191, &[requeued[0].0]);
    ledger.flush().unwrap();
    let found = history(&path, 190).unwrap();
    assert_eq!(
        (found.steps.len(), found.trained_before()),
        (1, vec![(0, 190 * 8)])
    );
    let message = text(history(&path, 189));
    assert!(message.starts_with(&path.display().to_string()) && message.contains("up to 190"));
    let expected = facts(&ledger);
    drop(ledger);
    assert_eq!(facts(&open(&path)), expected);
    Ledger::open(None, 0).unwrap().roll(3).unwrap();
}

/// A second sync of the same file may succeed without what the first has lost, so a new one is written.
#[test]
fn after_a_sync_that_failed_everything_that_lives_is_written_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut ledger = open(&path);
    story(&mut ledger, |_| {});
    ledger.flush().unwrap();
    let before = (facts(&ledger), kept(&ledger));
    assert!(!ledger.broken());
    ledger.mend().unwrap();
    assert!(segment(&path, 1).exists(), "nothing was to be mended");

    let failure = std::io::Error::from_raw_os_error(5);
    let told = ledger.failed(&failure).to_string();
    assert!(
        told.contains("00000001.journal: cannot be synced"),
        "{told}"
    );
    assert!(ledger.broken());
    let refused = ledger.record(&Event::Note(b"lost".to_vec())).unwrap_err();
    assert_eq!(refused.to_string(), told);
    assert_eq!(ledger.flush().unwrap_err().to_string(), told);

    ledger.mend().unwrap();
    assert!(!ledger.broken() && !segment(&path, 1).exists());
    assert_eq!((facts(&ledger), kept(&ledger)), before);
    start(&mut ledger, 3);
    ledger.flush().unwrap();
    let after = (facts(&ledger), kept(&ledger));
    drop(ledger);
    let again = open(&path);
    assert_eq!((facts(&again), kept(&again)), after);
    assert!(again.damage().is_empty());
}

#[test]
fn the_disk_is_bounded_by_what_lives() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut ledger = Ledger::open(Some(&path), 10_000).unwrap();
    let (mut alive, mut largest, mut rolls) = (BTreeMap::new(), 0, 0);
    for ordinal in 0..3000u64 {
        let attempt = start(&mut ledger, ordinal);
        let body = vec![ordinal as u8; 1 + (ordinal * 7919 % 400) as usize];
        ledger.ready(ordinal, attempt, 1).unwrap();
        ledger.trajectory(ordinal, &[b"header", &body]).unwrap();
        alive.insert(ordinal, body);
        while alive.len() > 20 {
            let index = 1 + (ordinal * 31 % 20) as usize; // the first one lives for ever
            let gone = *alive.keys().nth(index).unwrap();
            ledger.drop_task(gone, 0, "stale", None).unwrap();
            alive.remove(&gone);
        }
        ledger.flush().unwrap();
        if ledger.full() {
            ledger.roll(0).unwrap();
            rolls += 1;
        }
        let files = fs::read_dir(&path)
            .unwrap()
            .map(|file| file.unwrap().metadata().unwrap().len());
        assert_eq!(files.sum::<u64>(), ledger.bytes());
        largest = largest.max(ledger.bytes());
    }
    assert!(largest < 70_000 && rolls > 30, "{largest} {rolls}");
    drop(ledger);
    let again = Ledger::open(Some(&path), 10_000).unwrap();
    assert_eq!(unfinished(&again).len(), alive.len());
    for (ordinal, body) in alive {
        let found = again.frames(ordinal).unwrap();
        assert_eq!(found[0].frames(), [b"header", &body[..]]);
    }
}

/// One thing that a broker may do next; the number picks among the tasks to which it applies.
#[derive(Debug, Clone)]
enum Op {
    Issue,
    Generating(usize),
    Turn(usize),
    Anew(usize),
    Ready(usize),
    Lease(usize),
    GiveBack,
    Train,
    Drop(usize),
    Requeue(usize, bool),
    Note(u8),
    Rewind(u64),
    Flush,
    Roll(u64),
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    let any = any::<usize>;
    prop_oneof![
        4 => Just(Op::Issue),
        4 => any().prop_map(Op::Generating),
        5 => any().prop_map(Op::Turn),
        1 => any().prop_map(Op::Anew),
        4 => any().prop_map(Op::Ready),
        3 => (1usize..4).prop_map(Op::Lease),
        1 => Just(Op::GiveBack),
        3 => Just(Op::Train),
        1 => any().prop_map(Op::Drop),
        2 => (any(), prop::bool::ANY).prop_map(|(index, ready)| Op::Requeue(index, ready)),
        1 => prop::num::u8::ANY.prop_map(Op::Note),
        1 => (0u64..3).prop_map(Op::Rewind),
        6 => Just(Op::Flush),
        2 => (0u64..3).prop_map(Op::Roll),
        1 => Just(Op::Reopen),
    ]
}

/// A ledger with a journal, and a plain model of the frames that it must keep.
struct Run {
    path: PathBuf,
    ledger: Ledger,
    folded: u64,
    frames: BTreeMap<u64, Vec<Vec<u8>>>,
    turns: BTreeMap<u64, Vec<Vec<u8>>>,
    written: u8,
}

impl Run {
    fn pick(&self, wanted: Phase, index: usize) -> Option<(u64, u64)> {
        let tasks = unfinished(&self.ledger).into_iter();
        let found: Vec<_> = tasks.filter(|(.., phase)| *phase == wanted).collect();
        (!found.is_empty()).then(|| (found[index % found.len()].0, found[index % found.len()].1))
    }

    fn body(&mut self) -> Vec<u8> {
        self.written = self.written.wrapping_add(1);
        vec![self.written; 1 + self.written as usize % 50]
    }

    #[allow(clippy::too_many_lines)] // one arm an operation
    fn act(&mut self, op: &Op) {
        let last = self.ledger.books().last_step.unwrap_or(0);
        match *op {
            Op::Issue => {
                let next = self.ledger.books().next_ordinal;
                let again = self.pick(Phase::Requeued, 0);
                self.ledger
                    .issue(again.map_or(next + next % 2, |(ordinal, _)| ordinal))
                    .unwrap();
            }
            Op::Generating(index) => {
                if let Some((ordinal, attempt)) = self.pick(Phase::Issued, index) {
                    self.ledger.generating(ordinal, attempt).unwrap();
                }
            }
            Op::Turn(index) => {
                if let Some((ordinal, _)) = self.pick(Phase::Generating, index) {
                    let body = self.body();
                    let turns = self.turns.entry(ordinal).or_default();
                    self.ledger
                        .turn(ordinal, turns.len() as u32, &[b"h", &body])
                        .unwrap();
                    turns.push(body);
                }
            }
            Op::Anew(index) => {
                if let Some((ordinal, _)) = self.pick(Phase::Generating, index) {
                    self.ledger.record(&Event::Anew(ordinal)).unwrap();
                    self.turns.remove(&ordinal);
                }
            }
            Op::Ready(index) => {
                if let Some((ordinal, attempt)) = self.pick(Phase::Generating, index) {
                    let body = self.body();
                    self.ledger.ready(ordinal, attempt, 3 + ordinal).unwrap();
                    self.ledger.trajectory(ordinal, &[b"h", &body]).unwrap();
                    self.frames.insert(ordinal, vec![body]);
                    self.turns.remove(&ordinal);
                }
            }
            Op::Lease(count) => {
                let ready = unfinished(&self.ledger).into_iter();
                let ready = ready
                    .filter(|(.., phase)| *phase == Phase::Ready)
                    .map(|(o, ..)| o);
                let ready: Vec<u64> = ready.take(count).collect();
                let leases = &self.ledger.books().leases;
                let lease = (0..1 << 20)
                    .find(|lease| !leases.contains_key(lease))
                    .unwrap();
                if ready.len() == count {
                    self.ledger.lease(&ready, lease).unwrap();
                }
            }
            Op::GiveBack => {
                let lease = self.ledger.books().leases.keys().next().copied();
                lease.map(|lease| self.ledger.give_back(lease).unwrap());
            }
            Op::Train => {
                let lease = self.ledger.books().leases.last_key_value();
                if let Some((lease, members)) = lease.map(|(lease, tasks)| (*lease, tasks.clone()))
                {
                    let total: u64 = members.iter().map(|ordinal| 3 + ordinal).sum();
                    self.ledger
                        .trained(lease, last + 1, total - total / 3, total / 3)
                        .unwrap();
                }
            }
            Op::Drop(index) => {
                if let Some((ordinal, attempt)) = self.pick(Phase::Leased, index) {
                    self.ledger
                        .drop_task(ordinal, attempt, "env:down", None)
                        .unwrap();
                }
            }
            Op::Requeue(index, ready) => {
                let phase = if ready {
                    Phase::Ready
                } else {
                    Phase::Generating
                };
                if let Some((ordinal, _)) = self.pick(phase, index) {
                    self.ledger.requeue(ordinal, "lost", None).unwrap();
                    self.frames.remove(&ordinal);
                }
            }
            Op::Note(byte) => drop(self.ledger.record(&Event::Note(vec![byte; 9])).unwrap()),
            Op::Rewind(back) => {
                let step = last.saturating_sub(back).max(self.folded);
                for taken in self.ledger.rewind(step.min(last)).unwrap() {
                    taken.members.iter().for_each(|(ordinal, _)| {
                        self.frames.remove(ordinal);
                    });
                }
            }
            Op::Flush => drop(self.ledger.flush().unwrap()),
            Op::Roll(back) => {
                let upto = last.saturating_sub(back);
                self.ledger.roll(upto).unwrap();
                self.folded = self.folded.max(upto);
            }
            Op::Reopen => {
                self.ledger.flush().unwrap();
                self.ledger = Ledger::open(Some(&self.path), 1 << 20).unwrap();
            }
        }
    }

    /// The state that the journal must have kept.
    fn expected(&self) -> String {
        let frame = |body: &Vec<u8>| vec![b"h".to_vec(), body.clone()];
        let tasks = unfinished(&self.ledger).into_iter();
        let frames = tasks.map(|(ordinal, _, phase)| {
            let of = if phase < Phase::Ready {
                &self.turns
            } else {
                &self.frames
            };
            let bodies: Vec<_> = of.get(&ordinal).into_iter().flatten().map(frame).collect();
            format!("{ordinal}: {bodies:?}\n")
        });
        facts(&self.ledger) + &frames.collect::<String>()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Everything that a broker does in any order, then a kill at any byte of what was written last.
    #[test]
    fn a_kill_at_any_byte_leaves_the_committed_prefix(
        ops in prop::collection::vec(op(), 1..150), cut in 0.0f64..1.0
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let mut run = Run {
            ledger: open(&path), path: path.clone(), folded: 0, frames: BTreeMap::new(), turns: BTreeMap::new(), written: 0,
        };
        let mut commits = vec![(1, fs::metadata(segment(&path, 1)).unwrap().len(), run.expected())];
        for op in &ops {
            run.act(op);
            if matches!(op, Op::Flush | Op::Roll(_) | Op::Reopen) {
                let files = fs::read_dir(&path).unwrap().map(|file| file.unwrap().file_name());
                let newest: u64 = files.max().unwrap().to_str().unwrap()[..8].parse().unwrap();
                let length = fs::metadata(segment(&path, newest)).unwrap().len();
                commits.push((newest, length, run.expected()));
                prop_assert_eq!(kept(&run.ledger) , run.expected()[facts(&run.ledger).len()..].to_owned());
            }
        }
        let newest = commits.last().unwrap().0;
        let data = fs::read(segment(&path, newest)).unwrap();
        std::mem::forget(run.ledger); // killed: what waits for `flush` is lost
        let first = commits.iter().find(|(segment, ..)| *segment == newest).unwrap().1;
        let length = first + ((data.len() as u64 - first) as f64 * cut) as u64;
        fs::write(segment(&path, newest), &data[..length as usize]).unwrap();
        let (.., expected) = commits.iter().rfind(|(n, end, _)| *n == newest && *end <= length).unwrap();
        let again = open(&path);
        prop_assert_eq!(&(facts(&again) + &kept(&again)), expected);
        prop_assert!(again.damage().is_empty());
    }
}
