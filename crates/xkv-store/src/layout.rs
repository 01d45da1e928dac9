//! What is where on a drive: the superblock, the manifest areas, the slots. `docs/design.md` has the byte table.

use crate::bytes::{array, crc32c, get_u32, get_u64, put_u32, put_u64};
use crate::error::{Error, ErrorKind, Result};
use crate::io::BLOCK;

/// First bytes of a superblock.
pub const MAGIC: &[u8; 8] = b"XKVSTORE";
/// Version of the on-disk format that this code reads and writes.
pub const VERSION: u32 = 1;
/// Offsets of the two copies of the superblock; they are written in turn and the newest valid one counts.
pub const SUPERBLOCKS: [u64; 2] = [0, BLOCK as u64];
/// Block that may be rewritten at any time, to probe direct writes.
pub const SCRATCH: u64 = 2 * BLOCK as u64;
/// Where the manifest areas (first drive) or the slots (others) begin.
pub const DATA_START: u64 = 1 << 20;
/// Fragment size of a new store where none was asked for, bytes.
pub const DEFAULT_FRAGMENT_BYTES: u32 = 128 * 1024;
/// Smallest and largest fragment size, bytes; a power of two.
pub const FRAGMENT_BYTES: std::ops::RangeInclusive<u32> = 4096..=16 << 20;
/// Room in a manifest area per slot, bytes: twice to three times a usual manifest of one fragment, since live
/// manifests may take three quarters of an area. Objects of more fragments need less per slot.
const AREA_BYTES_PER_SLOT: u64 = 512;
/// Smallest manifest area, bytes.
const AREA_MIN: u64 = 1 << 20;
/// Fewest slots of a drive.
const MIN_SLOTS: u64 = 8;

/// Identifies a store or a drive, random.
pub type Uuid = [u8; 16];

/// Header of one drive. All fields little-endian at fixed offsets, see [`Superblock::encode`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Counts the writes of this header.
    pub sequence: u64,
    /// The store.
    pub set: Uuid,
    /// This drive.
    pub drive: Uuid,
    /// Position of this drive in the store, from 0.
    pub index: u32,
    /// Drives in the store.
    pub count: u32,
    /// Bytes per fragment.
    pub fragment_bytes: u32,
    /// False while the store is being made. A store is made when one of its drives says so.
    pub formed: bool,
    /// Slots of this drive.
    pub slots: u64,
    /// Where they begin.
    pub slots_offset: u64,
    /// Bytes of a manifest area (two of them, from [`DATA_START`]); 0 on all drives but the first.
    pub area_bytes: u64,
    /// Newest epoch of the manifest log when this header was written.
    pub epoch: u64,
}

impl Superblock {
    /// The header as one block.
    pub fn encode(&self) -> [u8; BLOCK] {
        let mut out = [0; BLOCK];
        out[..8].copy_from_slice(MAGIC);
        put_u32(&mut out, 8, VERSION);
        put_u64(&mut out, 16, self.sequence);
        out[24..40].copy_from_slice(&self.set);
        out[40..56].copy_from_slice(&self.drive);
        put_u32(&mut out, 56, self.index);
        put_u32(&mut out, 60, self.count);
        put_u32(&mut out, 64, self.fragment_bytes);
        put_u32(&mut out, 68, self.formed.into());
        put_u64(&mut out, 72, self.slots);
        put_u64(&mut out, 80, self.slots_offset);
        put_u64(&mut out, 88, self.area_bytes);
        put_u64(&mut out, 96, self.epoch);
        let crc = crc32c(&[&out[..12], &out[16..]]);
        put_u32(&mut out, 12, crc);
        out
    }

    /// Reads a header. None: not ours, or damaged.
    ///
    /// # Errors
    /// A header of ours of a version this code does not know.
    pub fn decode(block: &[u8]) -> Result<Option<Self>> {
        if block.len() < BLOCK || &block[..8] != MAGIC {
            return Ok(None);
        }
        let block = &block[..BLOCK];
        if crc32c(&[&block[..12], &block[16..]]) != get_u32(block, 12) {
            return Ok(None);
        }
        let version = get_u32(block, 8);
        if version != VERSION {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "store format version {version}, this program knows version {VERSION}; use the program that made the store"
                ),
            ));
        }
        Ok(Some(Self {
            sequence: get_u64(block, 16),
            set: array(block, 24),
            drive: array(block, 40),
            index: get_u32(block, 56),
            count: get_u32(block, 60),
            fragment_bytes: get_u32(block, 64),
            formed: get_u32(block, 68) != 0,
            slots: get_u64(block, 72),
            slots_offset: get_u64(block, 80),
            area_bytes: get_u64(block, 88),
            epoch: get_u64(block, 96),
        }))
    }

    /// First byte after the last slot.
    pub fn end(&self) -> u64 {
        self.slots_offset.saturating_add(self.slots.saturating_mul(u64::from(self.fragment_bytes)))
    }

    /// Where manifest area 0 or 1 begins.
    pub fn area_offset(&self, area: usize) -> u64 {
        DATA_START + area as u64 * self.area_bytes
    }
}

/// Checks a fragment size.
///
/// # Errors
/// Not a power of two between 4 KiB and 16 MiB.
pub fn check_fragment_bytes(bytes: u32) -> Result<()> {
    if bytes.is_power_of_two() && FRAGMENT_BYTES.contains(&bytes) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "fragment_bytes={bytes} is not a power of two between 4096 and 16777216; the default is 131072"
        ),
    ))
}

/// Headers of a new store on drives of `sizes` bytes, named `names` for errors.
///
/// # Errors
/// A drive too small for the headers, the manifest areas and a few slots; too many slots.
pub fn plan(
    names: &[&str],
    sizes: &[u64],
    fragment_bytes: u32,
    set: Uuid,
    drives: &[Uuid],
) -> Result<Vec<Superblock>> {
    check_fragment_bytes(fragment_bytes)?;
    let fragment = u64::from(fragment_bytes);
    let upper: u64 = sizes.iter().map(|size| size.saturating_sub(DATA_START) / fragment).sum();
    let area_bytes = (upper * AREA_BYTES_PER_SLOT).next_multiple_of(BLOCK as u64).max(AREA_MIN);
    let align = fragment.min(1 << 20);
    let mut total = 0;
    let mut headers = Vec::with_capacity(sizes.len());
    for (index, &size) in sizes.iter().enumerate() {
        let area = if index == 0 { area_bytes } else { 0 };
        let slots_offset = (DATA_START + 2 * area).next_multiple_of(align);
        let slots = size.saturating_sub(slots_offset) / fragment;
        if slots < MIN_SLOTS {
            return Err(Error::new(
                ErrorKind::TooSmall,
                format!(
                    "{}: {size} bytes are too few for a store of {fragment_bytes}-byte fragments; \
                     give it at least {} bytes (store_gb for files) or smaller fragments",
                    names[index],
                    slots_offset + MIN_SLOTS * fragment
                ),
            ));
        }
        total += slots;
        headers.push(Superblock {
            sequence: 1,
            set,
            drive: drives[index],
            index: index as u32,
            count: sizes.len() as u32,
            fragment_bytes,
            formed: false,
            slots,
            slots_offset,
            area_bytes: area,
            epoch: 0,
        });
    }
    if total > u64::from(u32::MAX) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{total} slots of {fragment_bytes} bytes are more than {}; take larger fragments",
                u32::MAX
            ),
        ));
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_round_trip_and_no_flipped_bit() {
        let header = plan(&["a"], &[64 << 20], 4096, [7; 16], &[[8; 16]]).unwrap().remove(0);
        let block = header.encode();
        assert_eq!(Superblock::decode(&block).unwrap(), Some(header));
        for at in 0..BLOCK {
            let mut damaged = block;
            damaged[at] ^= 1;
            assert!(!matches!(Superblock::decode(&damaged), Ok(Some(_))), "byte {at}");
        }
    }

    #[test]
    fn regions_do_not_overlap_and_end_inside_the_drive() {
        for (size, fragment) in
            [(8 << 20, 4096), (64 << 20, 131_072), (16u64 << 30, 131_072), (1 << 40, 1 << 20)]
        {
            let headers =
                plan(&["a", "b"], &[size, 2 * size], fragment, [1; 16], &[[2; 16], [3; 16]]).unwrap();
            for (header, size) in headers.iter().zip([size, 2 * size]) {
                assert!(header.slots_offset >= DATA_START + 2 * header.area_bytes);
                assert!(header.end() <= size && header.end() + u64::from(fragment) > size);
            }
        }
        assert_eq!(
            plan(&["a"], &[1 << 20], 4096, [1; 16], &[[2; 16]]).unwrap_err().kind(),
            ErrorKind::TooSmall
        );
        assert_eq!(check_fragment_bytes(5000).unwrap_err().kind(), ErrorKind::Invalid);
    }
}
