//! Records of the manifest log: what happened to an object.

use crate::bytes::{Reader, array, crc32c, get_u32};
use crate::checksum::FragmentSums;
use crate::key::Digest;

/// Bytes in front of every record's body: length (u32, all of the record), CRC-32C of what follows (u32), kind (u32).
pub const HEADER: usize = 12;
/// Bytes of a manifest's fixed fields: recency, size (u64 each), namespace length, key length, fragments (u32 each).
const MANIFEST_FIXED: usize = 28;
/// Bytes per fragment: slot, full checksum, sample checksum (u32 each).
const FRAGMENT: usize = 12;

const COMMIT: u32 = 1;
const REMOVE: u32 = 2;
const TOUCH: u32 = 3;
const SNAPSHOT_END: u32 = 4;

/// The record that says an object is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Position in the order of use; larger is more recent.
    pub recency: u64,
    /// Bytes of the object.
    pub size: u64,
    /// Namespace of the key.
    pub namespace: Vec<u8>,
    /// The key.
    pub key: Vec<u8>,
    /// Slot (numbered over all drives) and checksums of each fragment.
    pub fragments: Vec<(u32, FragmentSums)>,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The object exists.
    Commit(Manifest),
    /// The object with this digest does not.
    Remove(Digest),
    /// The object was used.
    Touch(Digest, u64),
    /// A snapshot of so many live objects ends here.
    SnapshotEnd(u64),
}

/// Bytes of a manifest's record.
pub fn manifest_bytes(key_bytes: usize, fragments: usize) -> usize {
    HEADER + MANIFEST_FIXED + key_bytes + fragments * FRAGMENT
}

/// Borrowed view of a manifest, for encoding without copies.
pub struct ManifestRef<'a> {
    /// See [`Manifest`].
    pub recency: u64,
    /// See [`Manifest`].
    pub size: u64,
    /// See [`Manifest`].
    pub namespace: &'a [u8],
    /// See [`Manifest`].
    pub key: &'a [u8],
    /// Slots of the fragments.
    pub slots: &'a [u32],
    /// Their checksums.
    pub sums: &'a [FragmentSums],
}

/// Appends a commit record.
pub fn put_commit(out: &mut Vec<u8>, manifest: &ManifestRef<'_>) {
    frame(out, COMMIT, |out| {
        out.extend(manifest.recency.to_le_bytes());
        out.extend(manifest.size.to_le_bytes());
        out.extend((manifest.namespace.len() as u32).to_le_bytes());
        out.extend((manifest.key.len() as u32).to_le_bytes());
        out.extend((manifest.slots.len() as u32).to_le_bytes());
        out.extend(manifest.namespace);
        out.extend(manifest.key);
        for (slot, sums) in manifest.slots.iter().zip(manifest.sums) {
            out.extend(slot.to_le_bytes());
            out.extend(sums.full.to_le_bytes());
            out.extend(sums.sample.to_le_bytes());
        }
    });
}

/// Appends a removal.
pub fn put_remove(out: &mut Vec<u8>, digest: &Digest) {
    frame(out, REMOVE, |out| out.extend(digest.0));
}

/// Appends a use.
pub fn put_touch(out: &mut Vec<u8>, digest: &Digest, recency: u64) {
    frame(out, TOUCH, |out| {
        out.extend(digest.0);
        out.extend(recency.to_le_bytes());
    });
}

/// Appends the end of a snapshot of `count` objects.
pub fn put_snapshot_end(out: &mut Vec<u8>, count: u64) {
    frame(out, SNAPSHOT_END, |out| out.extend(count.to_le_bytes()));
}

fn frame(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend([0; 8]);
    out.extend(kind.to_le_bytes());
    body(out);
    let len = (out.len() - start) as u32;
    out[start..start + 4].copy_from_slice(&len.to_le_bytes());
    let crc = crc32c(&[&out[start + 8..]]);
    out[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
}

/// What stands at the start of some bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed {
    /// A record and its length.
    Record(Record, usize),
    /// A record of this length that is damaged or unknown.
    Damaged(usize),
    /// The bytes end before the record does.
    Incomplete,
    /// The length itself cannot be right.
    Lost,
}

/// Reads the record at the start of `bytes`. `limit` is the largest length that can be right.
pub fn parse(bytes: &[u8], limit: usize) -> Parsed {
    if bytes.len() < 4 {
        return Parsed::Incomplete;
    }
    let len = get_u32(bytes, 0) as usize;
    if len < HEADER || len > limit {
        return Parsed::Lost;
    }
    if bytes.len() < len {
        return Parsed::Incomplete;
    }
    let record = &bytes[..len];
    if crc32c(&[&record[8..]]) != get_u32(record, 4) {
        return Parsed::Damaged(len);
    }
    match parse_body(get_u32(record, 8), &record[HEADER..]) {
        Some(parsed) => Parsed::Record(parsed, len),
        None => Parsed::Damaged(len),
    }
}

fn parse_body(kind: u32, body: &[u8]) -> Option<Record> {
    let mut reader = Reader(body);
    let record = match kind {
        COMMIT => {
            let (recency, size) = (reader.u64()?, reader.u64()?);
            let (namespace_len, key_len, count) = (reader.u32()?, reader.u32()?, reader.u32()?);
            let namespace = reader.take(namespace_len as usize)?.to_vec();
            let key = reader.take(key_len as usize)?.to_vec();
            let table = reader.take((count as usize).checked_mul(FRAGMENT)?)?;
            let fragments = table
                .chunks_exact(FRAGMENT)
                .map(|f| (get_u32(f, 0), FragmentSums { full: get_u32(f, 4), sample: get_u32(f, 8) }))
                .collect();
            Record::Commit(Manifest { recency, size, namespace, key, fragments })
        }
        REMOVE => Record::Remove(Digest(array(reader.take(32)?, 0))),
        TOUCH => Record::Touch(Digest(array(reader.take(32)?, 0)), reader.u64()?),
        SNAPSHOT_END => Record::SnapshotEnd(reader.u64()?),
        _ => return None,
    };
    reader.0.is_empty().then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(manifest: &Manifest) -> Vec<u8> {
        let slots: Vec<u32> = manifest.fragments.iter().map(|f| f.0).collect();
        let sums: Vec<FragmentSums> = manifest.fragments.iter().map(|f| f.1).collect();
        let mut out = Vec::new();
        let (namespace, key) = (&manifest.namespace[..], &manifest.key[..]);
        let (recency, size) = (manifest.recency, manifest.size);
        put_commit(&mut out, &ManifestRef { recency, size, namespace, key, slots: &slots, sums: &sums });
        out
    }

    fn manifest() -> impl Strategy<Value = Manifest> {
        let sums = (any::<u32>(), any::<u32>()).prop_map(|(full, sample)| FragmentSums { full, sample });
        (
            any::<u64>(),
            any::<u64>(),
            prop::collection::vec(any::<u8>(), 0..40),
            prop::collection::vec(any::<u8>(), 0..300),
            prop::collection::vec((any::<u32>(), sums), 0..30),
        )
            .prop_map(|(recency, size, namespace, key, fragments)| Manifest {
                recency,
                size,
                namespace,
                key,
                fragments,
            })
    }

    proptest! {
        #[test]
        fn manifests_survive_the_round_trip(manifest in manifest(), tail in prop::collection::vec(any::<u8>(), 0..9)) {
            let mut bytes = encode(&manifest);
            let len = bytes.len();
            prop_assert_eq!(len, manifest_bytes(manifest.namespace.len() + manifest.key.len(), manifest.fragments.len()));
            bytes.extend(tail);
            prop_assert_eq!(parse(&bytes, 1 << 20), Parsed::Record(Record::Commit(manifest), len));
            prop_assert_eq!(parse(&bytes[..len - 1], 1 << 20), Parsed::Incomplete);
        }

        #[test]
        fn damage_is_noticed(manifest in manifest(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut bytes = encode(&manifest);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(!matches!(parse(&bytes, 1 << 20), Parsed::Record(..)));
        }

        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes, 1 << 20);
        }
    }

    #[test]
    fn the_other_records_survive_too() {
        let digest = Digest([5; 32]);
        let mut out = Vec::new();
        put_remove(&mut out, &digest);
        put_touch(&mut out, &digest, 77);
        put_snapshot_end(&mut out, 3);
        let mut found = Vec::new();
        let mut rest = &out[..];
        while let Parsed::Record(record, len) = parse(rest, 1024) {
            found.push(record);
            rest = &rest[len..];
        }
        assert_eq!(found, [Record::Remove(digest), Record::Touch(digest, 77), Record::SnapshotEnd(3)]);
        assert!(rest.is_empty());
    }
}
