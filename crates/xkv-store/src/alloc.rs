//! Which slots are free. Slots are numbered over all drives, in the order of the drives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Hands out slots and takes them back.
pub struct Allocator {
    /// First slot number of each drive, and one more: the number of slots.
    bases: Vec<u32>,
    state: Mutex<State>,
    /// Bytes of manifests of all objects and transactions.
    manifest_bytes: AtomicU64,
    on_release: Box<dyn Fn() + Send + Sync>,
}

struct State {
    /// Free slots of each drive; the last is handed out next.
    free: Vec<Vec<u32>>,
    total: usize,
    start: usize,
}

impl Allocator {
    /// All slots free but those that `used` holds for (by slot number). `on_release` is called after slots came back.
    pub fn new(slots: &[u64], used: impl Fn(u32) -> bool, on_release: Box<dyn Fn() + Send + Sync>) -> Self {
        let mut bases = vec![0];
        let mut free = Vec::new();
        for &count in slots {
            let base = *bases.last().expect("never empty");
            let end = base + count as u32;
            free.push((base..end).rev().filter(|&slot| !used(slot)).collect::<Vec<_>>());
            bases.push(end);
        }
        let total = free.iter().map(Vec::len).sum();
        let state = Mutex::new(State { free, total, start: 0 });
        Self { bases, state, manifest_bytes: AtomicU64::new(0), on_release }
    }

    /// Slots in all.
    pub fn slots(&self) -> usize {
        *self.bases.last().expect("never empty") as usize
    }

    /// Slots free now.
    pub fn free(&self) -> usize {
        self.state.lock().total
    }

    /// Slots in all and in use, of each drive.
    pub fn by_drive(&self) -> Vec<(u64, u64)> {
        let state = self.state.lock();
        let totals = self.bases.windows(2).map(|pair| u64::from(pair[1] - pair[0]));
        totals.zip(&state.free).map(|(total, free)| (total, total - free.len() as u64)).collect()
    }

    /// Bytes of manifests of all objects and transactions.
    pub fn manifest_bytes(&self) -> u64 {
        self.manifest_bytes.load(Ordering::Relaxed)
    }

    /// Drive of a slot, and its number there.
    pub fn place(&self, slot: u32) -> (usize, u32) {
        let drive = self.bases.partition_point(|&base| base <= slot) - 1;
        (drive, slot - self.bases[drive])
    }

    /// Takes `count` slots for an object whose manifest takes `manifest_bytes`: fragment i on drive (start + i) mod n,
    /// or the next drive with room. Start rotates. None when there are not enough.
    pub fn reserve(self: &Arc<Self>, count: usize, manifest_bytes: u64) -> Option<Slots> {
        let mut state = self.state.lock();
        if state.total < count {
            return None;
        }
        let drives = state.free.len();
        let start = state.start;
        state.start = (start + 1) % drives;
        let numbers = (start..start + count)
            .map(|i| {
                let drive = (0..drives).map(|step| (i + step) % drives).find(|&d| !state.free[d].is_empty());
                state.free[drive.expect("a drive has a free slot")].pop().expect("this one has")
            })
            .collect();
        state.total -= count;
        drop(state);
        Some(self.adopt(numbers, manifest_bytes))
    }

    /// Takes over slots that were never free (recovery).
    pub fn adopt(self: &Arc<Self>, numbers: Box<[u32]>, manifest_bytes: u64) -> Slots {
        self.manifest_bytes.fetch_add(manifest_bytes, Ordering::Relaxed);
        Slots { numbers, manifest_bytes, allocator: self.clone() }
    }
}

/// The slots of one object; dropping them makes them free.
pub struct Slots {
    numbers: Box<[u32]>,
    manifest_bytes: u64,
    allocator: Arc<Allocator>,
}

impl Slots {
    /// Slot number of each fragment.
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// Bytes of the object's manifest in the log.
    pub fn manifest_bytes(&self) -> u64 {
        self.manifest_bytes
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let mut state = self.allocator.state.lock();
        for &slot in self.numbers.iter().rev() {
            let drive = self.allocator.place(slot).0;
            state.free[drive].push(slot);
        }
        state.total += self.numbers.len();
        drop(state);
        self.allocator.manifest_bytes.fetch_sub(self.manifest_bytes, Ordering::Relaxed);
        (self.allocator.on_release)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_striped_and_small_drives_do_not_end_the_space() {
        let allocator = Arc::new(Allocator::new(&[8, 2], |_| false, Box::new(|| ())));
        let object = allocator.reserve(4, 10).unwrap();
        let drives: Vec<usize> = object.numbers().iter().map(|&s| allocator.place(s).0).collect();
        assert_eq!(drives, [0, 1, 0, 1]);
        let rest = allocator.reserve(6, 1).unwrap();
        assert!(rest.numbers().iter().all(|&s| allocator.place(s).0 == 0));
        assert!(allocator.reserve(1, 1).is_none());
        assert_eq!((allocator.free(), allocator.manifest_bytes()), (0, 11));
        drop((object, rest));
        assert_eq!((allocator.free(), allocator.manifest_bytes()), (10, 0));
    }

    #[test]
    fn every_slot_is_handed_out_once() {
        let allocator = Arc::new(Allocator::new(&[5, 7, 3], |slot| slot == 6, Box::new(|| ())));
        let held: Vec<Slots> = (0..7).map(|_| allocator.reserve(2, 0).unwrap()).collect();
        let mut seen: Vec<u32> = held.iter().flat_map(|s| s.numbers().to_vec()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..15).filter(|&s| s != 6).collect::<Vec<_>>());
    }
}
