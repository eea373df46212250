//! The rules of every token, and the checksums of the arrays that hold them, block by block.

use multiversion::multiversion;

use crate::checksum::{crc32c, Crc};

/// Bytes that are read twice, for the checksum and for the rules, are read in parts that fit a first-level cache; the checksum
/// works on 384 bytes at a time.
const PART_BYTES: usize = 40 * 384;

const LINE_BYTES: usize = 64;

/// Tokens that are judged together.
const LANES: usize = 64;

const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 1 << 31;

/// Whether all ids are >= 0, all mask bytes 0 or 1, and all log-probs finite and <= 0 where the mask is 1 and NaN where
/// it is 0; then it gives the number of ones. `ids` and `logprobs` are 4 bytes for each of `mask`.
pub(crate) fn kept(ids: &[u8], logprobs: &[u8], mask: &[u8]) -> Option<usize> {
    let actions = logprobs_pass(logprobs, mask, |_| {});
    actions.filter(|_| ids_kept(ids))
}

/// CRC-32C of the three, and their count of sampled tokens by `kept`.
pub(crate) fn sealed(ids: &[u8], logprobs: &[u8], mask: &[u8]) -> ([u32; 3], Option<usize>) {
    let (of_ids, ids_kept) = ids_sealed(ids);
    let (of_mask, mut of_logprobs) = (crc32c(&[mask]), Crc::new());
    let actions = logprobs_pass(logprobs, mask, |part| of_logprobs.update(part));
    let crcs = [of_ids, of_logprobs.finish(), of_mask];
    (crcs, actions.filter(|_| ids_kept))
}

fn ids_sealed(ids: &[u8]) -> (u32, bool) {
    let (mut crc, mut kept) = (Crc::new(), true);
    for part in parts(ids) {
        crc.update(part);
        kept &= ids_kept(part);
    }
    (crc.finish(), kept)
}

/// Judges part by part, each after it was shown to the caller.
fn logprobs_pass(logprobs: &[u8], mask: &[u8], mut show: impl FnMut(&[u8])) -> Option<usize> {
    let (mut kept, mut flags, mut actions) = (true, mask, 0);
    for part in parts(logprobs) {
        show(part);
        let (of_part, rest) = flags.split_at(part.len() / 4);
        match logprobs_kept(part, of_part) {
            Some(count) => actions += count,
            None => kept = false,
        }
        flags = rest;
    }
    kept.then_some(actions)
}

/// Bytes up to the first line of the cache, since a wide load that reaches over the end of a line takes two; 0 where a
/// line does not begin with a number.
fn to_line(array: &[u8]) -> usize {
    match array.as_ptr().align_offset(LINE_BYTES) {
        head if head % 4 == 0 && head < array.len() => head,
        _ => 0,
    }
}

/// The array in parts, the first of which ends where a line begins.
fn parts(array: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (head, rest) = array.split_at(to_line(array));
    let head = std::iter::once(head).filter(|head| !head.is_empty());
    head.chain(rest.chunks(PART_BYTES))
}

/// A negative id shows in the sign of all together.
#[multiversion(targets(
    "x86_64+avx2+bmi1+bmi2+fma+lzcnt+popcnt+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+bmi1+bmi2+fma+lzcnt+popcnt"
))]
fn ids_kept(ids: &[u8]) -> bool {
    let (blocks, rest) = ids.as_chunks::<4>().0.as_chunks::<LANES>();
    let mut all = [0; LANES];
    for block in blocks {
        for (all, id) in all.iter_mut().zip(block) {
            *all |= u32::from_le_bytes(*id);
        }
    }
    let last = rest.iter().fold(0, |all, id| all | u32::from_le_bytes(*id));
    all.iter().fold(last, |all, id| all | id) < SIGN
}

/// Turns are long, so most blocks are all context or all sampled, and then one or two comparisons a token do.
#[multiversion(targets(
    "x86_64+avx2+bmi1+bmi2+fma+lzcnt+popcnt+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+bmi1+bmi2+fma+lzcnt+popcnt"
))]
fn logprobs_kept(logprobs: &[u8], mask: &[u8]) -> Option<usize> {
    let (blocks, rest) = logprobs.as_chunks::<4>().0.as_chunks::<LANES>();
    let (masks, mask_rest) = mask.as_chunks::<LANES>();
    let blocks = &blocks[..masks.len()];
    let (mut wrong, mut at, mut actions) = (false, 0, 0);
    while at < masks.len() {
        if masks[at] == [0; LANES] {
            let mut least = [u32::MAX; LANES];
            while at < masks.len() && masks[at] == [0; LANES] {
                for (least, value) in least.iter_mut().zip(&blocks[at]) {
                    *least = (*least).min(u32::from_le_bytes(*value) << 1); // without the sign
                }
                at += 1;
            }
            let least = least.into_iter().fold(u32::MAX, u32::min);
            wrong |= least <= INFINITY << 1;
        } else if masks[at] == [1; LANES] {
            // A positive number is one above 0 with a sign; infinity and NaN are the largest of all without one.
            let (mut signed, mut most) = ([i32::MIN; LANES], [0; LANES]);
            let start = at;
            while at < masks.len() && masks[at] == [1; LANES] {
                for ((signed, most), value) in signed.iter_mut().zip(&mut most).zip(&blocks[at]) {
                    *signed = (*signed).max(i32::from_le_bytes(*value));
                    *most = (*most).max(u32::from_le_bytes(*value));
                }
                at += 1;
            }
            actions += LANES * (at - start);
            wrong |= signed.into_iter().fold(i32::MIN, i32::max) > 0;
            wrong |= most.into_iter().fold(0, u32::max) >= INFINITY | SIGN;
        } else {
            wrong |= block_wrong(&blocks[at], &masks[at]);
            actions += count(&masks[at]);
            at += 1;
        }
    }
    wrong |= block_wrong(rest, mask_rest);
    (!wrong).then_some(actions + count(mask_rest))
}

/// On the bits, in which everything that is wrong shows in the sign.
#[allow(clippy::inline_always)] // compiled anew for each kind of CPU
#[inline(always)]
fn block_wrong(logprobs: &[[u8; 4]], mask: &[u8]) -> bool {
    let mut wrong = 0;
    for (logprob, flag) in logprobs.iter().zip(mask) {
        let (bits, flag) = (i32::from_le_bytes(*logprob), i32::from(*flag));
        // -1, and 0 for a sampled token.
        let context = flag - 1;
        // Below 0 for a finite number where the token is sampled and for NaN where it is context.
        let apart = ((bits & i32::MAX) - INFINITY as i32).wrapping_add(context) ^ context;
        // Below 0 for a number that is not positive.
        let below = bits | bits.wrapping_sub(1) | context;
        wrong |= !(apart & below) | (1 - flag);
    }
    wrong < 0
}

/// Number of set flags of a block; a sum of them fits a byte.
#[allow(clippy::inline_always)] // compiled anew for each kind of CPU
#[inline(always)]
fn count(mask: &[u8]) -> usize {
    usize::from(mask.iter().fold(0u8, |sum, flag| sum.wrapping_add(*flag)))
}

#[cfg(test)]
mod tests {
    use super::{kept, sealed, PART_BYTES};
    use crate::checksum::crc32c;
    use proptest::prelude::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    }

    fn right(value: f32, flag: u8) -> bool {
        match flag {
            0 => value.is_nan(),
            1 => value.is_finite() && value <= 0.0,
            _ => false,
        }
    }

    /// A mask in runs with log-probs that fit it, except at the places given: there `value` stands, or else `flag`.
    fn arrays(runs: &[usize], places: &[(usize, f32, Option<u8>)]) -> (Vec<u8>, Vec<f32>, Vec<u8>) {
        let mut mask: Vec<u8> = runs
            .iter()
            .enumerate()
            .flat_map(|(index, run)| vec![(index % 2) as u8; *run])
            .collect();
        let mut logprobs: Vec<f32> = mask
            .iter()
            .map(|flag| if *flag == 1 { -0.5 } else { f32::NAN })
            .collect();
        let tokens = mask.len();
        for (at, value, flag) in places.iter().filter(|_| tokens > 0) {
            let at = at % tokens;
            logprobs[at] = *value;
            mask[at] = flag.unwrap_or(mask[at]);
        }
        (vec![7; 4 * mask.len()], logprobs, mask)
    }

    const EDGES: [f32; 14] = [
        0.0,
        -0.0,
        f32::MIN,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -f32::NAN,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::from_bits(0x8000_0001),
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xff80_0001),
        f32::from_bits(0xffff_ffff),
    ];

    fn values() -> impl Strategy<Value = f32> {
        prop_oneof![
            prop::sample::select(EDGES.to_vec()),
            any::<u32>().prop_map(f32::from_bits)
        ]
    }

    /// Blocks of one kind and of both, and what is left after the last.
    #[test]
    fn every_edge_is_judged_in_every_kind_of_block() {
        for value in EDGES {
            for at in 0..470 {
                let (ids, logprobs, mask) =
                    arrays(&[150, 150, 20, 20, 70, 60], &[(at, value, None)]);
                let found = kept(&ids, &bytes(&logprobs), &mask).is_some();
                assert_eq!(
                    found,
                    right(value, mask[at]),
                    "{value} at {at}, {}",
                    mask[at]
                );
            }
        }
    }

    proptest! {
        #[test]
        fn they_are_those_of_each_token(
            runs in prop::collection::vec(0usize..200, 0..8),
            places in prop::collection::vec(
                (any::<usize>(), values(), prop::option::weighted(0.3, 0u8..4)), 0..3
            ),
        ) {
            let (ids, logprobs, mask) = arrays(&runs, &places);
            let each = logprobs.iter().zip(&mask).all(|(value, flag)| right(*value, *flag));
            let flags = mask.iter().map(|flag| usize::from(*flag)).sum();
            prop_assert_eq!(kept(&ids, &bytes(&logprobs), &mask), each.then_some(flags));
        }

        #[test]
        fn the_checksum_pass_tells_the_same(
            tokens in PART_BYTES / 4 - 2..PART_BYTES / 4 + 66,
            // At the ends, which lines of the cache and steps leave over, more often than in between.
            at in prop_oneof![0usize..20, (0usize..20).prop_map(|back| usize::MAX - back), any::<usize>()],
            kind in 0..4,
            shift in 0usize..64,
        ) {
            let (mut ids, mut logprobs, mut mask) = arrays(&[tokens / 3, tokens - tokens / 3], &[]);
            let at = if at > usize::MAX - 20 { tokens - 1 - (usize::MAX - at) } else { at % tokens };
            match kind {
                0 => ids[4 * at + 3] = 0x80,
                1 => logprobs[at] = 0.25,
                2 => mask[at] = 2,
                _ => {}
            }
            let logprobs = bytes(&logprobs);
            // Arrays begin anywhere in a line, as in a payload that somebody cut out of a message.
            let shifted = |array: &[u8]| [&[0xff; 64][..shift], array].concat();
            let (ids, logprobs, mask) = (shifted(&ids), shifted(&logprobs), shifted(&mask));
            let (ids, logprobs, mask) = (&ids[shift..], &logprobs[shift..], &mask[shift..]);
            let (crcs, kept) = sealed(ids, logprobs, mask);
            prop_assert_eq!(crcs, [crc32c(&[ids]), crc32c(&[logprobs]), crc32c(&[mask])]);
            let flags = mask.iter().map(|flag| usize::from(*flag)).sum();
            prop_assert_eq!(kept, (kind == 3).then_some(flags));
        }
    }
}
