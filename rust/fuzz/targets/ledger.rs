//! A ledger file from outside: any bytes (first byte even), or records with right checksums and any content (odd).
//! What opens must balance, and open again to the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sao_core::ledger::Ledger;

fn file_of(data: &[u8]) -> Vec<u8> {
    let Some((kind, rest)) = data.split_first() else {
        return Vec::new();
    };
    if kind % 2 == 0 {
        return rest.to_vec();
    }
    let mut file = b"SAOLEDGR\x01\0\0\0".to_vec();
    file.extend(crc32c::crc32c(&file).to_le_bytes());
    let mut rest = rest;
    while let Some((length, tail)) = rest.split_first() {
        let (record, after) = tail.split_at(usize::from(*length).min(tail.len()));
        let length = (record.len() as u32).to_le_bytes();
        let crc = crc32c::crc32c_append(crc32c::crc32c(&length), record);
        file.extend(length);
        file.extend(crc.to_le_bytes());
        file.extend(record);
        rest = after;
    }
    file
}

fuzz_target!(|data: &[u8]| {
    let folder = if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
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
