//! A ledger file from outside: any bytes (first byte even), or records with right checksums and any content (odd).
//! What opens must balance, and open again to the same.
#![no_main]

#[path = "../../core/tests/common/ledger_file.rs"]
mod ledger_file;

use ledger_file::file_of;
use libfuzzer_sys::fuzz_target;
use sao_core::ledger::Ledger;

fuzz_target!(|data: &[u8]| {
    let folder = if std::path::Path::new("/dev/shm").is_dir() {
        "/dev/shm"
    } else {
        "/tmp"
    };
    let path = std::path::PathBuf::from(format!("{folder}/sao-fuzz-{}", std::process::id()));
    std::fs::write(&path, file_of(data)).expect("written");
    if let Ok(ledger) = Ledger::open(Some(&path)) {
        ledger.check().expect("balanced");
        let (counts, tokens) = (ledger.counts(), ledger.tokens().clone());
        drop(ledger);
        let again = Ledger::open(Some(&path)).expect("opens again");
        assert_eq!((again.counts(), again.tokens()), (counts, &tokens));
    }
    let _ = std::fs::remove_file(&path);
});
