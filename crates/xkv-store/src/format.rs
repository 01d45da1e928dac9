//! Making a store on purpose, also where something else is.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::buf::SlotPool;
use crate::config::StoreConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::io::Device;
use crate::io::device::open::{inspect, open, open_read_only};
use crate::io::device::{FileDevice, is_blank};
use crate::layout;
use crate::set;
use crate::store::Store;

/// Bytes at both ends of a drive that are made zero, so that nothing recognises what was there before.
const ENDS: usize = 1 << 20;

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: it would be made.
    Missing,
    /// Nothing but zeros.
    Blank,
    /// A drive of a store.
    Store {
        /// Identity of the store, hexadecimal.
        id: String,
        /// Position of this drive in it, from 1.
        drive: u32,
        /// Its number of drives.
        drives: u32,
    },
    /// Something that is not ours, in words.
    Foreign(String),
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("does not exist yet"),
            Self::Blank => f.write_str("blank"),
            Self::Store { id, drive, drives } => {
                write!(f, "holds drive {drive} of {drives} of the store {id}")
            }
            Self::Foreign(what) => f.write_str(what),
        }
    }
}

/// What is at each path of `config`; changes nothing.
///
/// # Errors
/// A path that cannot be a store, is in use, or may not be written.
pub fn survey(config: &StoreConfig) -> Result<Vec<(PathBuf, Content)>> {
    let options = config.open_options()?;
    let look = |path: &PathBuf| {
        inspect(path, &options)?;
        let content = match open_read_only(path)? {
            Some(file) => content(&file)?,
            None => Content::Missing,
        };
        Ok((path.clone(), content))
    };
    config.paths.iter().map(look).collect()
}

pub(crate) fn content(device: &dyn Device) -> Result<Content> {
    Ok(match set::read(device) {
        Ok(Some(header)) => Content::Store {
            id: header.set.iter().map(|byte| format!("{byte:02x}")).collect(),
            drive: header.index + 1,
            drives: header.count,
        },
        Ok(None) if is_blank(device)? => Content::Blank,
        Ok(None) => Content::Foreign(format!("holds {}", set::foreign_content(device))),
        Err(error) if error.kind() == ErrorKind::Mismatch => Content::Foreign(error.to_string()),
        Err(error) => return Err(error),
    })
}

impl Store {
    /// Makes a new store on `config.paths` and opens it. Files that exist keep their size unless `resize`; then, and
    /// where they are made, they get `config.file_bytes` together. What is there already is refused without `force`
    /// and lost with it.
    ///
    /// # Errors
    /// Those of [`Store::open`], and content that is not blank, without `force`.
    pub fn format(config: &StoreConfig, force: bool, resize: bool) -> Result<Store> {
        let options = config.open_options()?;
        let fragment_bytes = config.fragment_bytes.unwrap_or(layout::DEFAULT_FRAGMENT_BYTES);
        layout::check_fragment_bytes(fragment_bytes)?;
        // Before anything is made, and again when all is locked.
        for (path, content) in survey(config)? {
            refuse(&path.display().to_string(), &content, force)?;
        }
        let mut files = Vec::new();
        for path in &config.paths {
            files.push(open(path, &options)?);
        }
        for file in &files {
            refuse(file.name(), &content(file)?, force)?;
        }
        let size = |file: &FileDevice| {
            if resize && !file.is_block_device() { options.file_bytes } else { file.size() }
        };
        // A store that cannot be made must not cost what is there.
        let names: Vec<&str> = files.iter().map(|file| file.name()).collect();
        let sizes: Vec<u64> = files.iter().map(size).collect();
        let uuids = vec![[0; 16]; files.len()];
        layout::plan(&names, &sizes, fragment_bytes, [0; 16], &uuids)?;
        for (file, bytes) in files.iter_mut().zip(sizes) {
            file.empty(bytes)?;
            wipe(file)?;
        }
        let devices: Vec<&dyn Device> = files.iter().map(|file| file as &dyn Device).collect();
        let headers = set::plan(&devices, config.fragment_bytes)?;
        for (header, file) in headers.iter().zip(&files) {
            file.set_direct(config.direct, true)?;
            file.reserve(0, header.slots_offset)?;
        }
        let device = |file: FileDevice| Arc::new(file) as Arc<dyn Device>;
        Self::start(headers.into_iter().zip(files.into_iter().map(device)).collect(), true, config)
    }

    /// Makes a new store on devices made by the caller (tests).
    ///
    /// # Errors
    /// Those of [`Store::format`].
    pub fn format_on(devices: Vec<Arc<dyn Device>>, config: &StoreConfig, force: bool) -> Result<Store> {
        for device in &devices {
            refuse(device.name(), &content(&**device)?, force)?;
        }
        for device in &devices {
            wipe(&**device)?;
        }
        let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device).collect();
        let headers = set::plan(&refs, config.fragment_bytes)?;
        Self::start(headers.into_iter().zip(devices).collect(), true, config)
    }
}

fn refuse(name: &str, content: &Content, force: bool) -> Result<()> {
    match content {
        _ if force => Ok(()),
        Content::Missing | Content::Blank => Ok(()),
        Content::Store { .. } => Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{name}: {content}; nothing was changed. Name a blank drive, or destroy that store with --force"
            ),
        )),
        Content::Foreign(_) => Err(Error::new(
            ErrorKind::Foreign,
            format!(
                "{name}: {content}; nothing was changed. Name a blank drive, or destroy what is there with --force"
            ),
        )),
    }
}

/// Makes both ends zero, and that durable before anything new is written.
pub(crate) fn wipe(device: &dyn Device) -> Result<()> {
    let zeros = SlotPool::new(1, ENDS)?.try_take().expect("the only slot of a new pool is free");
    let bytes = ENDS.min(device.size() as usize);
    for offset in [0, device.size() - bytes as u64] {
        device
            .write_at(&zeros[..bytes], offset)
            .map_err(|error| Error::io(format!("{}: cannot be written", device.name()), error))?;
    }
    device.flush().map_err(|error| Error::io(format!("{}: cannot be flushed", device.name()), error))
}
