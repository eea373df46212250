//! Bytes from outside: length of the header (2 bytes), header, payload. What decodes must encode to the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sao_core::wire::{decode, encode, summary, Limits};

/// Puts the checksum that the header should have, or no mutation would get past it.
fn repair(header: &mut [u8]) {
    let Some(key) = header.windows(7).position(|part| part == b"\xa6crc32c") else {
        return;
    };
    let at = key + 8;
    if header.len() < at + 4 || header[at - 1] != 0xce {
        return;
    }
    let crc = crc32c::crc32c_append(crc32c::crc32c(&header[..at]), &header[at + 4..]);
    header[at..at + 4].copy_from_slice(&crc.to_be_bytes());
}

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
