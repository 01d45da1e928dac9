//! Little-endian fields at fixed offsets, and reading them back from untrusted bytes.

/// Writes `value` at `offset`.
pub(crate) fn put_u32(out: &mut [u8], offset: usize, value: u32) {
    out[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
}

/// Writes `value` at `offset`.
pub(crate) fn put_u64(out: &mut [u8], offset: usize, value: u64) {
    out[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
}

/// The u32 at `offset`.
pub(crate) fn get_u32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(array(bytes, offset))
}

/// The u64 at `offset`.
pub(crate) fn get_u64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(array(bytes, offset))
}

/// The `N` bytes at `offset`.
pub(crate) fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N].try_into().expect("the slice has N bytes")
}

/// CRC-32C of `parts`, one after the other.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        crc.update(part);
    }
    crc.finalize() as u32
}

/// Reads fields one after the other; every read may find the bytes at an end.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        if len > self.0.len() {
            return None;
        }
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        Some(head)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(get_u32(self.take(4)?, 0))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(get_u64(self.take(8)?, 0))
    }
}

/// As hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
