//! Identity of an object: namespace and key, and the digest that stands for both in memory.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::bytes::get_u64;

/// Longest namespace plus key, in bytes. LMCache's keys are some 100 to 1,500 bytes; the bound only keeps a
/// manifest from filling the log.
pub const MAX_KEY_BYTES: usize = 32 * 1024;

/// BLAKE3-256 of the namespace's length (u64, little-endian), the namespace and the key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..8] {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A map from digests. A digest is random already: its first bytes are its hash.
pub(crate) type DigestMap<V> = HashMap<Digest, V, BuildHasherDefault<DigestHasher>>;

#[derive(Default)]
pub(crate) struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn write(&mut self, bytes: &[u8]) {
        if bytes.len() >= 8 {
            self.0 = get_u64(bytes, 0);
        }
    }

    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Namespace and full key of an object, cheap to clone.
#[derive(Clone, Debug)]
pub struct ObjectKey {
    namespace: Arc<[u8]>,
    key: Arc<[u8]>,
    digest: Digest,
}

impl ObjectKey {
    /// Joins a namespace and a key. Any bytes are allowed in both.
    pub fn new(namespace: &Arc<[u8]>, key: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(namespace.len() as u64).to_le_bytes());
        hasher.update(namespace);
        hasher.update(key);
        Self { namespace: namespace.clone(), key: key.into(), digest: Digest(*hasher.finalize().as_bytes()) }
    }

    /// The namespace.
    pub fn namespace(&self) -> &[u8] {
        &self.namespace
    }

    /// The key as the client gave it.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// The digest of both.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }
}

impl PartialEq for ObjectKey {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest && self.key == other.key && self.namespace == other.namespace
    }
}

impl Eq for ObjectKey {}
