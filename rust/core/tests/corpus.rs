//! The corpora of the fuzz targets and seeded mutations of them, as a short run of what `scripts/fuzz.sh` does for long.

#[path = "common/repair.rs"]
mod repair;
#[path = "common/segment.rs"]
mod segment;

use repair::repair;
use segment::segment_of;
use std::path::PathBuf;

use proptest::test_runner::{RngAlgorithm, TestRng};
use rand_core::Rng;
use sao_core::ledger::Ledger;
use sao_core::wire::{decode, encode, summary, Limits};

const MUTATIONS: usize = 3000;

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let mut files: Vec<_> = std::fs::read_dir(folder.join(target))
        .expect("the corpus is part of the repository")
        .map(|entry| entry.expect("readable").path())
        .collect();
    files.sort();
    assert!(
        files.len() >= 4,
        "{target}: a corpus of {} files",
        files.len()
    );
    files
        .into_iter()
        .map(|file| std::fs::read(file).expect("readable"))
        .collect()
}

/// Each file as it is, then with a few bytes changed, inserted, removed or repeated.
fn each_mutated(target: &str, mut run: impl FnMut(&[u8])) {
    let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut below = |n: usize| rng.next_u64() as usize % n.max(1);
    for file in corpus(target) {
        run(&file);
        for _ in 0..MUTATIONS {
            let mut data = file.clone();
            for _ in 0..=below(4) {
                let at = below(data.len());
                match below(5) {
                    0 if !data.is_empty() => data[at] = below(256) as u8,
                    1 if !data.is_empty() => data[at] ^= 1 << below(8),
                    2 => data.insert(at, [0, 1, 0x7f, 0xff][below(4)]),
                    3 => data.truncate(at),
                    _ => {
                        let part = data[at..(at + below(20)).min(data.len())].to_vec();
                        let to = below(data.len());
                        data.splice(to..to, part);
                    }
                }
            }
            run(&data);
        }
    }
}

#[test]
fn no_bytes_break_the_decoder_and_what_decodes_encodes() {
    let limits = Limits {
        max_bytes: 1 << 20,
        max_segments: 64,
    };
    let mut decoded = 0;
    each_mutated("wire", |data| {
        let Some((length, rest)) = data.split_at_checked(2) else {
            return;
        };
        let length = usize::from(u16::from_le_bytes([length[0], length[1]])).min(rest.len());
        let (header, payload) = rest.split_at(length);
        let mut header = header.to_vec();
        repair(&mut header);
        let _ = summary(&header, limits);
        if let Ok((trajectory, _)) = decode(&header, payload, limits) {
            decoded += 1;
            let (_, bytes) = encode(&trajectory).expect("what was decoded is valid");
            assert_eq!(bytes, payload);
        }
    });
    assert!(decoded > 100, "{decoded}: the mutations are too wild");
}

#[test]
fn no_bytes_break_the_ledger_and_what_opens_balances() {
    // In memory where there is such a folder: opening waits for the disk.
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() {
        memory
    } else {
        std::env::temp_dir()
    };
    let folder = tempfile::tempdir_in(parent).expect("a folder");
    let path = folder.path().join("ledger");
    let mut opened = 0;
    each_mutated("ledger", |data| {
        if data.is_empty() {
            return;
        }
        let _ = std::fs::create_dir(&path);
        std::fs::write(path.join("00000001.journal"), segment_of(data)).expect("written");
        if let Ok(mut ledger) = Ledger::open(Some(&path), 1) {
            opened += 1;
            ledger.books().check().expect("balanced");
            let _ = ledger.rewind(0);
            ledger.books().check().expect("balanced after the way back");
        }
    });
    assert!(opened > 100, "{opened}: the mutations are too wild");
}
