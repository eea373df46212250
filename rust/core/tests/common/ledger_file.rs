/// A ledger's file of fuzzed bytes: as they are (first byte even), or as records with right checksums (odd).
pub fn file_of(data: &[u8]) -> Vec<u8> {
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
