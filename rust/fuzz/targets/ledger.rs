//! A journal's segment from outside: any bytes (first byte even), or records with right checksums and any content (odd).
//! Every journal that opens must balance, and open again to the same state.
#![no_main]

#[path = "../../core/tests/common/segment.rs"]
mod segment;

use libfuzzer_sys::fuzz_target;
use sao_core::ledger::Ledger;
use segment::segment_of;

fuzz_target!(|data: &[u8]| {
    let folder = if std::path::Path::new("/dev/shm").is_dir() {
        "/dev/shm"
    } else {
        "/tmp"
    };
    let path = std::path::PathBuf::from(format!("{folder}/sao-fuzz-{}", std::process::id()));
    let segment = path.join("00000001.journal");
    let _ = std::fs::create_dir(&path);
    std::fs::write(&segment, segment_of(data)).expect("written");
    if let Ok(mut ledger) = Ledger::open(Some(&path), 1) {
        ledger.books().check().expect("balanced");
        let opened = ledger.books().clone();
        for (ordinal, ..) in opened.unfinished() {
            let _ = ledger.frames(ordinal);
        }
        ledger.roll(0).expect("there is room");
        drop(ledger);
        let mut again = Ledger::open(Some(&path), 1).expect("opens again");
        assert_eq!(again.books(), &opened);
        let _ = again.rewind(0);
        again.books().check().expect("balanced after the way back");
    }
    let _ = std::fs::remove_dir_all(&path);
});
