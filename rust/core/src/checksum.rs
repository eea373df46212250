//! The checksum of wire and ledger: CRC-32C (Castagnoli; iSCSI, RFC 3720).

use crc_fast::{checksum, CrcAlgorithm::Crc32Iscsi, Digest};

/// CRC-32C of the parts, one after another.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    if let [whole] = parts {
        return checksum(Crc32Iscsi, whole) as u32;
    }
    let mut digest = Digest::new(Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::crc32c;
    use proptest::prelude::*;

    #[test]
    fn it_is_the_one_of_the_standard() {
        assert_eq!(crc32c(&[b"123456789"]), 0xe306_9283);
        assert_eq!(crc32c(&[&[0; 32]]), 0x8a91_36aa); // RFC 3720, B.4
    }

    proptest! {
        #[test]
        fn it_agrees_with_another_implementation(
            data in prop::collection::vec(any::<u8>(), 0..5000), cut in 0usize..5000
        ) {
            let cut = cut.min(data.len());
            prop_assert_eq!(crc32c(&[&data]), crc32c::crc32c(&data));
            prop_assert_eq!(crc32c(&[&data[..cut], &data[cut..]]), crc32c::crc32c(&data));
        }
    }
}
