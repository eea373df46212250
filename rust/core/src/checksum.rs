//! The checksum of the wire format: CRC-32C (Castagnoli; iSCSI, RFC 3720).

use crc_fast::{checksum, CrcAlgorithm::Crc32Iscsi, Digest};

/// A checksum under way.
pub(crate) struct Crc(Digest);

impl Crc {
    /// Of nothing so far.
    pub(crate) fn new() -> Self {
        Self(Digest::new(Crc32Iscsi))
    }

    /// Goes on with the next bytes.
    pub(crate) fn update(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    /// CRC-32C of all parts, one after another.
    pub(crate) fn finish(self) -> u32 {
        self.0.finalize() as u32
    }
}

/// CRC-32C of the parts, one after another.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    if let [whole] = parts {
        return checksum(Crc32Iscsi, whole) as u32;
    }
    let mut crc = Crc::new();
    for part in parts {
        crc.update(part);
    }
    crc.finish()
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
