/// Books in which nothing is: as a journal begins.
const EMPTY: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0];

/// A segment of a journal of fuzzed bytes: as they are (first byte even), or as records with right checksums and numbers
/// (odd; with its second bit the first record is a snapshot of empty books).
pub fn segment_of(data: &[u8]) -> Vec<u8> {
    let Some((kind, mut rest)) = data.split_first() else {
        return Vec::new();
    };
    if kind % 2 == 0 {
        return rest.to_vec();
    }
    let (mut file, mut number) = (Vec::new(), 0);
    if kind & 2 != 0 {
        record(&mut file, 1, [number, 0, 0], &[EMPTY]);
    }
    while let Some((&[kind, ordinal, owner, part, length], tail)) = rest.split_first_chunk() {
        let (body, after) = tail.split_at(usize::from(length).min(tail.len()));
        let (first, second) = body.split_at(body.len() / 2);
        match kind % 4 + 1 {
            kind @ 1..=2 => {
                number += 1;
                record(&mut file, kind, [number, 0, 0], &[body]);
            }
            kind => {
                let key = [ordinal.into(), owner.into(), part.into()];
                record(&mut file, kind, key, &[first, second]);
            }
        }
        rest = after;
    }
    file
}

fn record(out: &mut Vec<u8>, kind: u8, key: [u64; 3], frames: &[&[u8]]) {
    let table = frames.iter().flat_map(|f| (f.len() as u64).to_le_bytes());
    let body: Vec<u8> = table.chain(frames.concat()).collect();
    let mut head = b"SAO".to_vec();
    head.push(kind);
    head.extend((key[2] as u32).to_le_bytes());
    for number in [key[0], key[1], body.len() as u64] {
        head.extend(number.to_le_bytes());
    }
    head.extend((frames.len() as u32).to_le_bytes());
    head.extend(crc32c::crc32c(&body).to_le_bytes());
    head.extend(crc32c::crc32c(&head).to_le_bytes());
    out.extend(head);
    out.extend(body);
}
