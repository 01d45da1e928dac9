//! The drives of a store: recognised by their headers, never by name or order; foreign content is refused.

use std::fs::File;
use std::io::Read;

use crate::buf::SlotPool;
use crate::error::{Error, ErrorKind, Result};
use crate::io::device::{is_blank, signature};
use crate::io::{BLOCK, Device};
use crate::layout::{self, DEFAULT_FRAGMENT_BYTES, SUPERBLOCKS, Superblock, Uuid};

/// What a set of drives turned out to be.
#[derive(Debug)]
pub(crate) enum Found {
    /// Nothing on any of them (or a store whose making was cut short).
    Blank,
    /// A store. Headers in the store's order of drives, each with the position of its drive in the caller's list.
    Store(Vec<(Superblock, usize)>),
}

/// Looks at the headers of all drives; changes nothing. `fragment_bytes` is what was asked for.
///
/// # Errors
/// Foreign content, drives of different stores, missing drives, a truncated drive, another fragment size, a damaged
/// header.
pub(crate) fn recognise(devices: &[&dyn Device], fragment_bytes: Option<u32>) -> Result<Found> {
    if devices.is_empty() || devices.len() > u16::MAX as usize {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{} drives; a store needs at least one", devices.len()),
        ));
    }
    if let Some(bytes) = fragment_bytes {
        layout::check_fragment_bytes(bytes)?;
    }
    let found = compare(devices)?;
    if let Found::Store(headers) = &found
        && let Some(asked) = fragment_bytes
        && asked != headers[0].0.fragment_bytes
    {
        return Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{}: this store has fragment_bytes={}, not {asked}; leave fragment_bytes at auto, or make a new store \
                 in another place",
                devices[headers[0].1].name(),
                headers[0].0.fragment_bytes
            ),
        ));
    }
    Ok(found)
}

/// [`recognise`] where there must be a store. Headers in the store's order of drives, as in [`Found::Store`].
///
/// # Errors
/// Blank drives, and those of [`recognise`].
pub(crate) fn recognise_store(
    devices: &[&dyn Device],
    fragment_bytes: Option<u32>,
) -> Result<Vec<(Superblock, usize)>> {
    match recognise(devices, fragment_bytes)? {
        Found::Store(headers) => Ok(headers),
        Found::Blank => {
            let names: Vec<&str> = devices.iter().map(|device| device.name()).collect();
            Err(Error::new(
                ErrorKind::Invalid,
                format!("{}: blank, there is no store; name the drives of one", names.join(", ")),
            ))
        }
    }
}

fn compare(devices: &[&dyn Device]) -> Result<Found> {
    let mut headers = Vec::new();
    let mut blank = Vec::new();
    for (position, device) in devices.iter().enumerate() {
        match read(*device)? {
            Some(header) => headers.push((header, position)),
            None if is_blank(*device)? => blank.push(position),
            None => return Err(foreign(*device)),
        }
    }
    headers.sort_by_key(|h| h.0.index);
    if headers.iter().all(|(header, _)| !header.formed) {
        return Ok(Found::Blank);
    }
    let (first, at) = &headers[0];
    let name = devices[*at].name();
    for (header, position) in &headers {
        let device = devices[*position];
        if header.set != first.set {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "{} and {name} belong to different stores; name the drives of one store",
                    device.name()
                ),
            ));
        }
        if header.end() > device.size() || header.slots == 0 {
            return Err(Error::new(
                ErrorKind::TooSmall,
                format!(
                    "{}: {} bytes, but its header speaks of {}; the drive was truncated or is not the one it was",
                    device.name(),
                    device.size(),
                    header.end()
                ),
            ));
        }
    }
    if let Some(&position) = blank.first() {
        return Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{} is blank, but {name} is drive {} of a store of {}; name exactly its drives, or make a new store on \
                 blank drives",
                devices[position].name(),
                first.index + 1,
                first.count
            ),
        ));
    }
    let complete = headers.len() == first.count as usize
        && headers.iter().enumerate().all(|(i, (h, _))| h.index as usize == i && h.count == first.count);
    if !complete {
        let mut have: Vec<String> = headers.iter().map(|(h, _)| (h.index + 1).to_string()).collect();
        have.dedup();
        return Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{name}: the store has {} drives, {} were named (drive {}); name each of its drives once",
                first.count,
                headers.len(),
                have.join(", ")
            ),
        ));
    }
    Ok(Found::Store(headers))
}

fn foreign(device: &dyn Device) -> Error {
    Error::new(
        ErrorKind::Foreign,
        format!(
            "{}: holds {}; nothing was changed. Name a blank drive, or, if you are sure, overwrite this one with \
             `xkv gateway format --force`",
            device.name(),
            foreign_content(device)
        ),
    )
}

/// What a drive that is not ours holds, in words.
pub(crate) fn foreign_content(device: &dyn Device) -> String {
    signature(device)
        .map_or_else(|| "data that is not ours".to_owned(), |name| format!("what looks like {name}"))
}

/// The newest valid header of a drive. None: there is none.
pub(crate) fn read(device: &dyn Device) -> Result<Option<Superblock>> {
    Ok(copies(device)?.into_iter().flatten().max_by_key(|header| header.sequence))
}

/// Whether both copies of the header are valid and say that the store is made.
pub(crate) fn is_whole(device: &dyn Device) -> Result<bool> {
    Ok(copies(device)?.iter().all(|copy| copy.as_ref().is_some_and(|header| header.formed)))
}

fn copies(device: &dyn Device) -> Result<[Option<Superblock>; 2]> {
    let mut block = SlotPool::new(1, BLOCK)?.try_take().expect("the only slot of a new pool is free");
    let mut copies = [None, None];
    for (copy, offset) in copies.iter_mut().zip(SUPERBLOCKS) {
        if device.size() < offset + BLOCK as u64 {
            continue;
        }
        match device.read_at(&mut block, offset) {
            Ok(()) => *copy = Superblock::decode(&block)?,
            // One unreadable copy is what the other is for.
            Err(error) => {
                tracing::warn!(drive = device.name(), offset, %error, "cannot read a superblock")
            }
        }
    }
    Ok(copies)
}

/// Writes a header to the copy whose turn it is, and flushes.
pub(crate) fn write(device: &dyn Device, header: &Superblock) -> std::io::Result<()> {
    let mut block = SlotPool::new(1, BLOCK)
        .map_err(std::io::Error::other)?
        .try_take()
        .expect("a new pool has a free slot");
    block.copy_from_slice(&header.encode());
    device.write_at(&block, SUPERBLOCKS[header.sequence as usize % 2])?;
    device.flush()
}

/// Headers for a new store on these drives, not yet written.
///
/// # Errors
/// Those of [`layout::plan`].
pub(crate) fn plan(devices: &[&dyn Device], fragment_bytes: Option<u32>) -> Result<Vec<Superblock>> {
    let names: Vec<&str> = devices.iter().map(|d| d.name()).collect();
    let sizes: Vec<u64> = devices.iter().map(|d| d.size()).collect();
    let drives = devices.iter().map(|_| uuid()).collect::<Result<Vec<Uuid>>>()?;
    layout::plan(&names, &sizes, fragment_bytes.unwrap_or(DEFAULT_FRAGMENT_BYTES), uuid()?, &drives)
}

fn uuid() -> Result<Uuid> {
    let mut uuid = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut uuid))
        .map_err(|error| Error::io("/dev/urandom: cannot read", error))?;
    Ok(uuid)
}
