//! What is on a drive that is not ours: never overwritten unasked, and named in the refusal.

use std::io;

use super::Device;
use crate::buf::SlotPool;
use crate::error::{Error, Result};
use crate::io::BLOCK;

/// Both ends of a drive that must be zero for it to count as blank: every format that `blkid` knows leaves a trace
/// there.
const END_BYTES: u64 = 1 << 20;

/// Whether the first and the last MiB hold nothing but zeros.
///
/// # Errors
/// `Io` when they cannot be read.
pub fn is_blank(device: &dyn Device) -> Result<bool> {
    let pool = SlotPool::new(1, END_BYTES as usize)?;
    let mut buf = pool.try_take().expect("a new pool has its slot");
    let size = device.size();
    let bytes = END_BYTES.min(size) as usize;
    for offset in [0, size - bytes as u64] {
        device
            .read_at(&mut buf[..bytes], offset)
            .map_err(|e| Error::io(format!("{}: cannot read at {offset}", device.name()), e))?;
        if buf[..bytes].iter().any(|&b| b != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Name, position, bytes. From the formats' own documentation, as collected in util-linux's libblkid.
const MAGICS: &[(&str, u64, &[u8])] = &[
    ("an ext2/3/4 filesystem", 1080, b"\x53\xef"),
    ("an XFS filesystem", 0, b"XFSB"),
    ("a btrfs filesystem", 65_536 + 64, b"_BHRfS_M"),
    ("an f2fs filesystem", 1024, b"\x10\x20\xf5\xf2"),
    ("a bcachefs or bcache member", 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    ("an LVM2 physical volume", 0, b"LABELONE"),
    ("an LVM2 physical volume", 512, b"LABELONE"),
    ("an LVM2 physical volume", 1024, b"LABELONE"),
    ("an LVM2 physical volume", 1536, b"LABELONE"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("swap space", 4096 - 10, b"SWAPSPACE2"),
    ("swap space", 4096 - 10, b"SWAP-SPACE"),
    ("a Linux RAID member", 0, b"\xfc\x4e\x2b\xa9"),
    ("a Linux RAID member", 4096, b"\xfc\x4e\x2b\xa9"),
    ("a Ceph OSD", 0, b"bluestore block device"),
    ("a VDO volume", 0, b"dmvdo001"),
    ("a squashfs image", 0, b"hsqs"),
    ("an ISO 9660 image", 32_769, b"CD001"),
    ("a qcow2 image", 0, b"QFI\xfb"),
    ("a BitLocker volume", 3, b"-FVE-FS-"),
    ("an NTFS filesystem", 3, b"NTFS    "),
    ("an exFAT filesystem", 3, b"EXFAT   "),
    ("a FAT filesystem", 82, b"FAT32   "),
    ("a FAT filesystem", 54, b"FAT16   "),
    ("a FAT filesystem", 54, b"FAT12   "),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("an MBR partition table", 510, b"\x55\xaa"),
];

/// ZFS keeps uberblocks in its label, at 1 KiB steps from here, in the byte order of the machine that wrote them.
const ZFS_UBERBLOCKS: std::ops::Range<u64> = 128 * 1024..256 * 1024;
const ZFS_MAGIC: u64 = 0x00ba_b10c;
const RAID_MAGIC: &[u8] = b"\xfc\x4e\x2b\xa9";

/// What the drive looks like, for a message; none when nothing known is found. A best effort: decide with
/// [`is_blank`].
pub fn signature(device: &dyn Device) -> Option<&'static str> {
    let find = |offset: u64, magic: &[u8]| holds(device, offset, magic).unwrap_or(false);
    if let Some((name, ..)) = MAGICS.iter().find(|(_, offset, magic)| find(*offset, magic)) {
        return Some(name);
    }
    let zfs = ZFS_UBERBLOCKS
        .step_by(1024)
        .any(|offset| find(offset, &ZFS_MAGIC.to_le_bytes()) || find(offset, &ZFS_MAGIC.to_be_bytes()));
    if zfs {
        return Some("a ZFS member");
    }
    let size = device.size();
    let sectors = size / 512;
    // Positions of the superblock in versions 1.0 and 0.90, from the end.
    let raid = [(sectors.saturating_sub(16) & !7) * 512, (size & !0xffff).saturating_sub(0x1_0000)];
    if raid.iter().any(|&offset| find(offset, RAID_MAGIC)) {
        return Some("a Linux RAID member");
    }
    [512, 4096]
        .iter()
        .any(|sector| find(size.saturating_sub(*sector), b"EFI PART"))
        .then_some("a GPT partition table (the copy at the end)")
}

fn holds(device: &dyn Device, offset: u64, magic: &[u8]) -> io::Result<bool> {
    let start = offset - offset % BLOCK as u64;
    let within = (offset - start) as usize;
    if start + BLOCK as u64 > device.size() || within + magic.len() > BLOCK {
        return Ok(false);
    }
    let pool = SlotPool::new(1, BLOCK).map_err(io::Error::other)?;
    let mut block = pool.try_take().expect("a new pool has its slot");
    device.read_at(&mut block, start)?;
    Ok(block[within..].starts_with(magic))
}
