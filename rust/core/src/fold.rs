//! CRC-32C and the union of all bits of an array in one pass, where the CPU has 512-bit polynomial multiplication.
//!
//! Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009): three
//! registers of remainders are carried over the array, each multiplied by x to the power of the distance it moves. What
//! they hold at the end has the same checksum as all that they went over, so the rest is left to `checksum`. The
//! multiplier is what bounds the speed; other work on the same bytes costs nothing there.

use crate::cpu::folding;

folding! {
    /// CRC-32C of what has the checksum `crc` and the bytes behind it, and all lines of 64 bytes or-ed together; `None`
    /// where the CPU cannot. The bytes behind the last whole step are in the checksum, but not in the union.
    pub(crate) fn crc_and_union(crc: u32, bytes: &[u8]) -> Option<(u32, [u8; 64])> = folded;
}

/// Bytes of a step: three lines.
pub(crate) const STEP_BYTES: usize = 192;

#[cfg(target_arch = "x86_64")]
#[target_feature(
    enable = "avx2,bmi1,bmi2,fma,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl,vpclmulqdq"
)]
fn folded(crc: u32, bytes: &[u8]) -> (u32, [u8; 64]) {
    use crate::checksum::Crc;
    use crate::cpu::{load, store};
    use std::arch::x86_64::{
        _mm512_castsi128_si512, _mm512_clmulepi64_epi128, _mm512_or_si512, _mm512_set4_epi32,
        _mm512_setzero_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512, _mm_cvtsi32_si128,
    };
    const XOR: i32 = 0x96;
    // x^(8 * 192 + 31) and x^(8 * 192 - 33) modulo the polynomial, bits reversed, for the halves of 128 bits.
    let distance = _mm512_set4_epi32(0, 0xab7a_ff2a_u32 as i32, 0, 0xa87a_b8a8_u32 as i32);
    let (steps, rest) = bytes.as_chunks::<STEP_BYTES>();
    let mut union = _mm512_setzero_si512();
    // To begin with the register of the checksum is the same as to xor it into the first four bytes.
    let mut carried = [union; 3];
    let first = _mm512_castsi128_si512(_mm_cvtsi32_si128(!crc as i32));
    for (index, step) in steps.iter().enumerate() {
        for (carried, line) in carried.iter_mut().zip(step.as_chunks::<64>().0) {
            let line = load(line);
            union = _mm512_or_si512(union, line);
            let low = _mm512_clmulepi64_epi128::<0x00>(*carried, distance);
            let high = _mm512_clmulepi64_epi128::<0x11>(*carried, distance);
            *carried = _mm512_ternarylogic_epi64::<XOR>(low, high, line);
        }
        if index == 0 {
            carried[0] = _mm512_xor_si512(carried[0], first);
        }
    }
    let mut last = [0; STEP_BYTES];
    for (line, carried) in last.as_chunks_mut::<64>().0.iter_mut().zip(carried) {
        store(line, carried);
    }
    let mut all = [0; 64];
    store(&mut all, union);
    let mut crc = Crc::resume(if steps.is_empty() { !crc } else { 0 });
    if !steps.is_empty() {
        crc.update(&last);
    }
    crc.update(rest);
    (crc.finish(), all)
}

#[cfg(test)]
mod tests {
    use super::{crc_and_union, STEP_BYTES};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_the_checksum_and_the_union(
            bytes in prop::collection::vec(any::<u8>(), 0..3000), cut in 0usize..64, head in 0usize..99
        ) {
            let whole = &bytes[cut.min(bytes.len())..];
            let (head, bytes) = whole.split_at(head.min(whole.len()));
            let Some((crc, union)) = crc_and_union(crc32c::crc32c(head), bytes) else {
                return Ok(()); // not on this CPU
            };
            prop_assert_eq!(crc, crc32c::crc32c(whole));
            let mut all = [0; 64];
            for line in bytes.chunks_exact(STEP_BYTES).flatten().copied().collect::<Vec<u8>>().chunks(64) {
                for (all, byte) in all.iter_mut().zip(line) {
                    *all |= byte;
                }
            }
            prop_assert_eq!(union, all);
        }
    }
}
