//! From the log's records to the live objects: no slot twice, nothing that cannot be right.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::Result;
use crate::key::{DigestMap, MAX_KEY_BYTES, ObjectKey};
use crate::log::Log;
use crate::record::{Manifest, Record};

/// An object that the log says is there.
pub(crate) struct Live {
    pub(crate) key: ObjectKey,
    pub(crate) manifest: Manifest,
}

/// Outcome of a recovery.
pub(crate) struct Recovery {
    pub(crate) live: Vec<Live>,
    /// Damaged blocks and records of the log.
    pub(crate) log_damage: u64,
    /// Objects dropped since a newer one has one of their slots.
    pub(crate) overlapping: u64,
    /// Objects dropped since they cannot be right: impossible size, slots or key.
    pub(crate) implausible: u64,
    /// False when no log could be found.
    pub(crate) complete: bool,
}

impl Recovery {
    /// Everything that was found wrong.
    pub(crate) fn damaged(&self) -> u64 {
        self.log_damage + self.overlapping + self.implausible
    }
}

/// Reads the log of a store with `slots` slots of `fragment_bytes`.
pub(crate) fn recover(log: &mut Log, slots: usize, fragment_bytes: usize) -> Result<Recovery> {
    let replay = std::cell::RefCell::new(Replay::new(slots, fragment_bytes));
    let found = log.recover(
        || *replay.borrow_mut() = Replay::new(slots, fragment_bytes),
        |record| replay.borrow_mut().apply(record),
    )?;
    let replay = replay.into_inner();
    Ok(Recovery {
        live: replay.objects.into_iter().flatten().collect(),
        log_damage: found.damaged,
        overlapping: replay.overlapping,
        implausible: replay.implausible,
        complete: found.complete,
    })
}

struct Replay {
    fragment_bytes: u64,
    objects: Vec<Option<Live>>,
    by_digest: DigestMap<u32>,
    /// Object of each slot, plus one; 0 is free.
    owner: Vec<u32>,
    namespaces: HashMap<Vec<u8>, Arc<[u8]>>,
    free: Vec<u32>,
    overlapping: u64,
    implausible: u64,
}

impl Replay {
    fn new(slots: usize, fragment_bytes: usize) -> Self {
        Self {
            fragment_bytes: fragment_bytes as u64,
            objects: Vec::new(),
            by_digest: DigestMap::default(),
            owner: vec![0; slots],
            namespaces: HashMap::new(),
            free: Vec::new(),
            overlapping: 0,
            implausible: 0,
        }
    }

    fn apply(&mut self, record: Record) {
        match record {
            Record::Commit(manifest) => self.commit(manifest),
            Record::Remove(digest) => {
                if let Some(&id) = self.by_digest.get(&digest) {
                    self.remove(id);
                }
            }
            Record::Touch(digest, recency) => {
                if let Some(&id) = self.by_digest.get(&digest)
                    && let Some(live) = &mut self.objects[id as usize]
                {
                    live.manifest.recency = recency;
                }
            }
            Record::SnapshotEnd(_) => {}
        }
    }

    fn commit(&mut self, manifest: Manifest) {
        if !self.plausible(&manifest) {
            self.implausible += 1;
            return;
        }
        let namespace = match self.namespaces.get(&manifest.namespace) {
            Some(namespace) => namespace.clone(),
            None => {
                let shared: Arc<[u8]> = manifest.namespace.clone().into();
                self.namespaces.insert(manifest.namespace.clone(), shared.clone());
                shared
            }
        };
        let key = ObjectKey::new(&namespace, &manifest.key);
        if let Some(&older) = self.by_digest.get(key.digest()) {
            self.remove(older);
        }
        // A slot that belongs to somebody means that the record of its removal was lost: the newer object is right.
        for (slot, _) in &manifest.fragments {
            if let Some(older) = self.owner[*slot as usize].checked_sub(1) {
                self.remove(older);
                self.overlapping += 1;
            }
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.objects.push(None);
            self.objects.len() as u32 - 1
        });
        for (slot, _) in &manifest.fragments {
            self.owner[*slot as usize] = id + 1;
        }
        self.by_digest.insert(*key.digest(), id);
        let manifest = Manifest { namespace: Vec::new(), key: Vec::new(), ..manifest };
        self.objects[id as usize] = Some(Live { key, manifest });
    }

    fn remove(&mut self, id: u32) {
        if let Some(live) = self.objects[id as usize].take() {
            self.by_digest.remove(live.key.digest());
            for (slot, _) in &live.manifest.fragments {
                self.owner[*slot as usize] = 0;
            }
            self.free.push(id);
        }
    }

    fn plausible(&self, manifest: &Manifest) -> bool {
        let mut slots: Vec<u32> = manifest.fragments.iter().map(|f| f.0).collect();
        slots.sort_unstable();
        manifest.size > 0
            && manifest.size.div_ceil(self.fragment_bytes) == slots.len() as u64
            && slots.last().is_some_and(|&slot| (slot as usize) < self.owner.len())
            && slots.windows(2).all(|pair| pair[0] < pair[1])
            && manifest.namespace.len() + manifest.key.len() <= MAX_KEY_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::FragmentSums;

    fn manifest(key: &[u8], slots: &[u32], recency: u64) -> Manifest {
        let fragments = slots.iter().map(|&slot| (slot, FragmentSums::default())).collect();
        let size = slots.len() as u64 * 4096;
        Manifest { recency, size, namespace: b"ns".to_vec(), key: key.to_vec(), fragments }
    }

    #[test]
    fn a_lost_removal_leaves_no_slot_with_two_owners() {
        let mut replay = Replay::new(8, 4096);
        replay.apply(Record::Commit(manifest(b"old", &[1, 2], 1)));
        replay.apply(Record::Commit(manifest(b"new", &[2, 3], 2)));
        assert_eq!(replay.owner, [0, 0, 1, 1, 0, 0, 0, 0]);
        assert_eq!(replay.objects.iter().flatten().count(), 1);
        assert_eq!((replay.overlapping, replay.implausible), (1, 0));
    }

    #[test]
    fn what_cannot_be_right_is_dropped() {
        let mut replay = Replay::new(8, 4096);
        replay.apply(Record::Commit(manifest(b"beyond", &[8], 1)));
        replay.apply(Record::Commit(manifest(b"twice", &[1, 1], 1)));
        replay.apply(Record::Commit(Manifest { size: 4097, ..manifest(b"size", &[1], 1) }));
        replay.apply(Record::Commit(Manifest { size: 0, ..manifest(b"none", &[], 1) }));
        assert_eq!((replay.implausible, replay.by_digest.len()), (4, 0));
    }

    #[test]
    fn order_counts() {
        let mut replay = Replay::new(8, 4096);
        let digest = *ObjectKey::new(&b"ns"[..].into(), b"a").digest();
        replay.apply(Record::Commit(manifest(b"a", &[1], 1)));
        replay.apply(Record::Touch(digest, 9));
        assert_eq!(replay.objects[0].as_ref().unwrap().manifest.recency, 9);
        replay.apply(Record::Remove(digest));
        replay.apply(Record::Touch(digest, 10));
        assert!(replay.objects.iter().flatten().next().is_none());
        replay.apply(Record::Commit(manifest(b"a", &[1], 11)));
        assert_eq!(replay.objects.iter().flatten().count(), 1);
    }
}
