/// Puts the checksum that the header should have, or no mutation would get past it.
pub fn repair(header: &mut [u8]) {
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
