//! How to open a store.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::error::{Error, ErrorKind, Result};
use crate::io::device::open::{OpenOptions, Target};
use crate::io::{DirectIo, EngineKind};

/// How to open a store.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Block devices, store files, or folders (made when missing) that get a store file each.
    pub paths: Vec<PathBuf>,
    /// Size of all files together, bytes; block devices are used whole. Only used when a store is made.
    pub file_bytes: u64,
    /// Bytes per fragment; none takes the store's own, 131,072 for a new one. Another value than the store's is refused.
    pub fragment_bytes: Option<u32>,
    /// How bytes move.
    pub engine: EngineKind,
    /// Whether the page cache is bypassed.
    pub direct: DirectIo,
    /// Requests in flight per drive.
    pub depth: usize,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            paths: Vec::new(),
            file_bytes: 16 << 30,
            fragment_bytes: None,
            engine: EngineKind::Auto,
            direct: DirectIo::Auto,
            depth: 32,
        }
    }
}

impl StoreConfig {
    pub(crate) fn open_options(&self) -> Result<OpenOptions> {
        if self.paths.is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "no store path; name at least one drive, file or folder",
            ));
        }
        let targets = self.paths.iter().map(|path| Target::of(path)).collect::<Result<Vec<_>>>()?;
        let mut named = BTreeMap::new();
        for (target, path) in targets.iter().zip(&self.paths) {
            let file = target.file();
            let real = file.canonicalize().unwrap_or(file);
            if let Some(twice) = named.insert(real, path) {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!(
                        "{} and {} are the same drive; name each drive once",
                        twice.display(),
                        path.display()
                    ),
                ));
            }
        }
        let files = targets.iter().filter(|target| !matches!(target, Target::BlockDevice(_))).count() as u64;
        let file_bytes = self.file_bytes / files.max(1);
        Ok(OpenOptions { file_bytes, direct: self.direct, ..OpenOptions::default() })
    }

    pub(crate) fn warn_of_other_size(&self, have: &u64) {
        if *have > 0 && have.abs_diff(self.file_bytes) > self.file_bytes / 100 {
            tracing::warn!(
                have_bytes = have,
                asked_bytes = self.file_bytes,
                "the store exists with another size than asked for (store_gb) and keeps it; remove its files to make a new one"
            );
        }
    }
}
