//! Entry points for the fuzzers (`fuzz/`): on-disk structures made of any bytes, also ones whose checksums are right.
//! They panic when something read from them cannot be right.

use std::collections::HashSet;
use std::sync::Arc;

use crate::bytes::{Reader, crc32c, get_u32, put_u32, put_u64};
use crate::checksum::FragmentSums;
use crate::io::device::testing::MemoryDevice;
use crate::io::{BLOCK, Device};
use crate::key::Digest;
use crate::layout::{self, Superblock};
use crate::log::Log;
use crate::record::{self, ManifestRef, Parsed, Record};
use crate::recover::{Live, recover};

const FRAGMENT: u32 = 4096;
const DRIVE: u64 = 8 << 20;
/// Bytes in front of a log block's payload.
const HEAD: usize = 32;

/// A superblock, as it is and with its checksum put right.
pub fn superblock(bytes: &[u8]) {
    let mut block = [0; BLOCK];
    let len = bytes.len().min(BLOCK);
    block[..len].copy_from_slice(&bytes[..len]);
    let mut mended = block;
    mended[..8].copy_from_slice(layout::MAGIC);
    let crc = crc32c(&[&mended[..12], &mended[16..]]);
    put_u32(&mut mended, 12, crc);
    for block in [&block[..], &mended[..], bytes] {
        if let Ok(Some(header)) = Superblock::decode(block) {
            assert!(header.end() >= header.slots_offset);
            let again = Superblock::decode(&header.encode());
            assert!(matches!(again, Ok(Some(again)) if again == header));
        }
    }
}

/// Records one after the other, as they are and with their checksums put right.
pub fn records(bytes: &[u8]) {
    let mut mended = bytes.to_vec();
    mend_records(&mut mended);
    for bytes in [bytes, &mended] {
        let mut rest = bytes;
        loop {
            match record::parse(rest, 1 << 20) {
                Parsed::Record(parsed, len) => {
                    assert!((record::HEADER..=rest.len()).contains(&len));
                    assert_eq!(encode(&parsed), &rest[..len], "another record says the same");
                    rest = &rest[len..];
                }
                Parsed::Damaged(len) => rest = &rest[len..],
                Parsed::Incomplete | Parsed::Lost => break,
            }
        }
    }
}

/// A manifest log of blocks that the input describes, recovered, written anew and recovered again.
pub fn log(bytes: &[u8]) {
    let drives = [[2; 16]];
    let planned = layout::plan(&["fuzz"], &[DRIVE], FRAGMENT, [1; 16], &drives).expect("the sizes are right");
    let header = planned.into_iter().next().expect("one drive");
    let device: Arc<dyn Device> = MemoryDevice::new(DRIVE);
    let mut reader = Reader(bytes);
    while put_block(&*device, &header, &mut reader).is_some() {}

    let slots = header.slots as usize;
    let open = || Log::new(device.clone(), header.clone()).expect("memory for the log");
    let mut log = open();
    let Ok(found) = recover(&mut log, slots, FRAGMENT as usize) else { return };
    let mut used = HashSet::new();
    for live in &found.live {
        let fragments = &live.manifest.fragments;
        assert_eq!(live.manifest.size.div_ceil(FRAGMENT.into()), fragments.len() as u64);
        assert!(fragments.iter().all(|&(slot, _)| (slot as usize) < slots && used.insert(slot)));
    }
    let written = log.snapshot(|put| {
        let mut all = Vec::new();
        for live in &found.live {
            commit(&mut all, live);
        }
        record::put_snapshot_end(&mut all, found.live.len() as u64);
        put(&all)
    });
    if written.is_err() {
        return;
    }
    let again = recover(&mut open(), slots, FRAGMENT as usize).expect("memory can be read");
    assert!(again.complete && again.damaged() == 0);
    assert_eq!(known(&again.live), known(&found.live));
}

fn known(live: &[Live]) -> HashSet<(Digest, u64, u64)> {
    live.iter().map(|live| (*live.key.digest(), live.manifest.size, live.manifest.recency)).collect()
}

fn commit(out: &mut Vec<u8>, live: &Live) {
    let (slots, sums): (Vec<u32>, Vec<FragmentSums>) = live.manifest.fragments.iter().copied().unzip();
    let (recency, size) = (live.manifest.recency, live.manifest.size);
    let (namespace, key) = (live.key.namespace(), live.key.key());
    record::put_commit(out, &ManifestRef { recency, size, namespace, key, slots: &slots, sums: &sums });
}

fn encode(record: &Record) -> Vec<u8> {
    let mut out = Vec::new();
    match record {
        Record::Commit(manifest) => {
            let (slots, sums): (Vec<u32>, Vec<FragmentSums>) = manifest.fragments.iter().copied().unzip();
            let (recency, size) = (manifest.recency, manifest.size);
            let (namespace, key) = (&manifest.namespace[..], &manifest.key[..]);
            let (slots, sums) = (&slots[..], &sums[..]);
            record::put_commit(&mut out, &ManifestRef { recency, size, namespace, key, slots, sums });
        }
        Record::Remove(digest) => record::put_remove(&mut out, digest),
        Record::Touch(digest, recency) => record::put_touch(&mut out, digest, *recency),
        Record::SnapshotEnd(count) => record::put_snapshot_end(&mut out, *count),
    }
    out
}

/// Takes one block's description from the input: a byte each for area, epoch, number in the area, what is put right,
/// and how many records; then the records. None at the input's end.
fn put_block(device: &dyn Device, header: &Superblock, input: &mut Reader<'_>) -> Option<()> {
    let [area, epoch, number, mend, count] = *input.take(5)? else { return None };
    let mut payload = Vec::new();
    for _ in 0..count % 8 {
        put_record(&mut payload, input);
    }
    let used = payload.len().min(BLOCK - HEAD);
    let mut block = [0; BLOCK];
    block[..4].copy_from_slice(b"XKVL");
    put_u64(&mut block, 8, epoch.into());
    put_u64(&mut block, 16, number.into());
    block[24..26].copy_from_slice(&(u16::from(mend >> 4) * 7).to_le_bytes());
    block[26..28].copy_from_slice(&(used as u16).to_le_bytes());
    block[HEAD..HEAD + used].copy_from_slice(&payload[..used]);
    if mend & 1 != 0 {
        mend_records(&mut block[HEAD + usize::from(mend >> 4) * 7..]);
    }
    if mend & 2 != 0 {
        let at = input.take(2)?;
        block[usize::from(u16::from_le_bytes([at[0], at[1]])) % BLOCK] ^= 1 << (mend >> 5);
    }
    let crc = crc32c(&[&header.set, &block[8..]]);
    put_u32(&mut block, 4, crc);
    let offset = header.area_offset((area % 2).into()) + u64::from(number) * BLOCK as u64;
    device.write_at(&block, offset).ok()
}

/// A record that is likely to be right: few keys, few slots.
fn put_record(out: &mut Vec<u8>, input: &mut Reader<'_>) -> Option<()> {
    let [kind, key, small] = *input.take(3)? else { return None };
    let digest = *crate::ObjectKey::new(&Arc::from(&b"n"[..]), &[key % 16]).digest();
    match kind % 8 {
        0..=3 => {
            let slots: Vec<u32> = input.take((small % 6).into())?.iter().map(|&slot| slot.into()).collect();
            let sums = vec![FragmentSums::default(); slots.len()];
            let size = (slots.len() as u64 * u64::from(FRAGMENT)).saturating_sub((kind / 8).into());
            let (recency, key) = (small.into(), &[key % 16][..]);
            let manifest = ManifestRef { recency, size, namespace: b"n", key, slots: &slots, sums: &sums };
            record::put_commit(out, &manifest);
        }
        4 => record::put_remove(out, &digest),
        5 => record::put_touch(out, &digest, small.into()),
        6 => record::put_snapshot_end(out, small.into()),
        _ => out.extend(input.take(small.into())?),
    }
    Some(())
}

/// Puts the checksums of the records at the start of `bytes` right, as far as their lengths can be.
fn mend_records(bytes: &mut [u8]) {
    let mut at = 0;
    while bytes.len() - at >= record::HEADER {
        let len = get_u32(bytes, at) as usize;
        if len < record::HEADER || len > bytes.len() - at {
            break;
        }
        let crc = crc32c(&[&bytes[at + 8..at + len]]);
        put_u32(bytes, at + 4, crc);
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_entry_points_hold_for_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            superblock(&bytes);
            records(&bytes);
            log(&bytes);
        }
    }

    /// The fuzzer's own words reach the recovery: what they describe is found.
    #[test]
    fn a_described_log_is_recovered() {
        // Area 0, epoch 3, block 0, nothing mended, two records: a commit of key 5 in slots 9 and 4, the snapshot's end.
        let input = [0, 3, 0, 0, 2, 0, 5, 2, 9, 4, 6, 0, 1];
        let device: Arc<dyn Device> = MemoryDevice::new(DRIVE);
        let planned = layout::plan(&["fuzz"], &[DRIVE], FRAGMENT, [1; 16], &[[2; 16]]).unwrap();
        assert!(put_block(&*device, &planned[0], &mut Reader(&input)).is_some());
        let mut log = Log::new(device, planned[0].clone()).unwrap();
        let found = recover(&mut log, planned[0].slots as usize, FRAGMENT as usize).unwrap();
        assert!(found.complete);
        assert_eq!(found.live.len(), 1);
        assert_eq!((found.live[0].key.key(), found.live[0].manifest.size), (&[5][..], 8192));
    }
}
