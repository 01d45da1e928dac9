//! Fragment checksums: CRC-32C bound to the object's digest and the fragment's position, so that a swapped or
//! stale fragment fails like a damaged one.

use crate::key::Digest;

/// Distance of the sampled pieces, bytes.
pub const SAMPLE_STRIDE: usize = 4096;
/// Length of a sampled piece, bytes.
pub const SAMPLE_BYTES: usize = 64;

/// Both checksums of a fragment, as the manifest keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentSums {
    /// CRC-32C of digest, fragment index (u32), length (u32) and every byte of data.
    pub full: u32,
    /// The same over the first 64 bytes of every 4 KiB of the fragment (fewer at its end).
    pub sample: u32,
}

/// Which of the checksums a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// Both, as a store needs.
    Both,
    /// The full one alone.
    Full,
    /// The sample alone.
    Sample,
    /// None: the sums stay those of the empty fragment.
    None,
}

/// Computes the checksums of one fragment, piece by piece.
pub struct Summer {
    full: crc_fast::Digest,
    sample: crc_fast::Digest,
    coverage: Coverage,
    position: usize,
}

impl Summer {
    /// Starts fragment `index` of the object, `len` bytes long.
    pub fn new(digest: &Digest, index: u32, len: u32, coverage: Coverage) -> Self {
        let mut start = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        start.update(&digest.0);
        start.update(&index.to_le_bytes());
        start.update(&len.to_le_bytes());
        Self { full: start, sample: start, coverage, position: 0 }
    }

    /// Takes the next piece. Every piece but the last must be a multiple of 4 KiB long.
    pub fn update(&mut self, piece: &[u8]) {
        debug_assert_eq!(self.position % SAMPLE_STRIDE, 0, "a short piece must be the last");
        self.position += piece.len();
        if matches!(self.coverage, Coverage::Both | Coverage::Full) {
            self.full.update(piece);
        }
        if matches!(self.coverage, Coverage::Both | Coverage::Sample) {
            for block in piece.chunks(SAMPLE_STRIDE) {
                self.sample.update(&block[..block.len().min(SAMPLE_BYTES)]);
            }
        }
    }

    /// The sums of all pieces so far.
    pub fn finish(self) -> FragmentSums {
        FragmentSums { full: self.full.finalize() as u32, sample: self.sample.finalize() as u32 }
    }
}

/// Both sums of a whole fragment.
pub fn fragment_sums(digest: &Digest, index: u32, data: &[u8]) -> FragmentSums {
    let mut summer = Summer::new(digest, index, data.len() as u32, Coverage::Both);
    summer.update(data);
    summer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_depend_on_key_position_and_every_byte() {
        let (a, b) = (Digest([1; 32]), Digest([2; 32]));
        let data: Vec<u8> = (0..10_000u32).map(|i| (i * 7 + i / 255) as u8).collect();
        let sums = fragment_sums(&a, 3, &data);
        assert_ne!(sums, fragment_sums(&b, 3, &data));
        assert_ne!(sums, fragment_sums(&a, 4, &data));
        for at in [0, 63, 64, 4095, 4096, 9_999] {
            let mut flipped = data.clone();
            flipped[at] ^= 0x10;
            assert_ne!(sums.full, fragment_sums(&a, 3, &flipped).full, "byte {at}");
            let sampled = at % SAMPLE_STRIDE < SAMPLE_BYTES;
            assert_eq!(sums.sample != fragment_sums(&a, 3, &flipped).sample, sampled, "byte {at}");
        }
    }

    #[test]
    fn pieces_and_whole_agree_and_the_polynomial_is_castagnoli() {
        let digest = Digest([9; 32]);
        let data = vec![0x5a; 3 * 4096 + 17];
        let mut summer = Summer::new(&digest, 0, data.len() as u32, Coverage::Both);
        for piece in data.chunks(4096) {
            summer.update(piece);
        }
        assert_eq!(summer.finish(), fragment_sums(&digest, 0, &data));
        // Check value of CRC-32C ("123456789"), RFC 3720 appendix B.4.
        assert_eq!(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, b"123456789"), 0xE306_9283);
    }
}
