//! Bytes from outside: length of the header (2 bytes), header, payload. What decodes must encode to the same bytes.
#![no_main]

#[path = "../../core/tests/common/repair.rs"]
mod repair;

use libfuzzer_sys::fuzz_target;
use repair::repair;
use sao_core::wire::{decode, encode, summary, Limits};

fuzz_target!(|data: &[u8]| {
    let Some((length, rest)) = data.split_at_checked(2) else {
        return;
    };
    let length = usize::from(u16::from_le_bytes([length[0], length[1]])).min(rest.len());
    let (header, payload) = rest.split_at(length);
    let mut header = header.to_vec();
    let limits = Limits {
        max_bytes: 1 << 20,
        max_segments: 64,
    };
    let _ = decode(&header, payload, limits);
    repair(&mut header);
    let _ = summary(&header, limits);
    if let Ok((trajectory, _)) = decode(&header, payload, limits) {
        let (again, bytes) = encode(&trajectory).expect("what was decoded is valid");
        assert_eq!(bytes, payload);
        let (same, _) = decode(&again, &bytes, limits).expect("what was encoded decodes");
        assert_eq!(format!("{same:?}"), format!("{trajectory:?}"));
    }
});
