//! The poison guard's stamp: what a buffer carries whose load failed.

use std::io::Read;
use std::sync::OnceLock;

/// Bytes of the stamp; smaller buffers are exempt.
pub const STAMP_BYTES: usize = 64;

const MAGIC: [u8; 16] = *b"xkv:unfilled-L1\0";

/// The first bytes of a buffer that a failed load left unfilled: a magic word and a number drawn once per process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stamp(pub(crate) [u8; STAMP_BYTES]);

impl Stamp {
    /// The stamp of this process, the same for all its connectors: one adapter's failed load comes back as a store to
    /// every adapter.
    pub fn of_this_process() -> Stamp {
        static STAMP: OnceLock<Stamp> = OnceLock::new();
        *STAMP.get_or_init(|| {
            let mut stamp = [0; STAMP_BYTES];
            stamp[..16].copy_from_slice(&MAGIC);
            if std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut stamp[16..])).is_err() {
                // Not secret, only unlikely to be anybody's data: process, time and address space layout will do.
                let seed = format!("{}{:?}{:p}", std::process::id(), std::time::SystemTime::now(), &STAMP);
                for (i, byte) in seed.bytes().enumerate() {
                    stamp[16 + i % 48] ^= byte.rotate_left(i as u32 / 48);
                }
            }
            Stamp(stamp)
        })
    }
}
