//! What is in the store: digest to entry, and the order of use. Never locked across I/O.

use std::collections::BTreeMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::alloc::Slots;
use crate::checksum::FragmentSums;
use crate::key::{Digest, DigestMap, ObjectKey};
use crate::recency::{self, Clock};
use crate::record::ManifestRef;

const SHARDS: usize = 64;

/// A committed object. Its slots are free again when the last holder lets go.
pub struct Entry {
    pub(crate) key: ObjectKey,
    pub(crate) size: u64,
    pub(crate) slots: Slots,
    pub(crate) sums: Box<[FragmentSums]>,
    /// Position in the order of use, see [`crate::recency`].
    pub(crate) recency: AtomicU64,
    /// Under which recency the order knows this entry; changed under the order's lock.
    ordered: AtomicU64,
    /// Readers. An entry that has any is not evicted.
    pub(crate) leases: AtomicU32,
    /// Whether the log will hear of the latest use.
    pub(crate) touched: AtomicBool,
}

impl Entry {
    pub(crate) fn new(
        key: ObjectKey,
        size: u64,
        slots: Slots,
        sums: Box<[FragmentSums]>,
        recency: u64,
    ) -> Self {
        let recency = AtomicU64::new(recency);
        let (ordered, leases, touched) = (AtomicU64::new(0), AtomicU32::new(0), AtomicBool::new(false));
        Self { key, size, slots, sums, recency, ordered, leases, touched }
    }

    pub(crate) fn manifest(&self) -> ManifestRef<'_> {
        ManifestRef {
            recency: self.recency.load(Ordering::Relaxed),
            size: self.size,
            namespace: self.key.namespace(),
            key: self.key.key(),
            slots: self.slots.numbers(),
            sums: &self.sums,
        }
    }
}

/// Stands for one transaction; compared by address.
pub(crate) type Token = Arc<()>;

enum State {
    Writing(Token),
    Present(Arc<Entry>),
}

/// Outcome of [`Index::claim`].
pub(crate) enum Claim<T> {
    Claimed(T),
    Present,
    Busy,
    Refused,
}

/// What [`Index::take`] took out.
pub(crate) enum Taken {
    Nothing,
    Transaction,
    Object(Arc<Entry>),
}

type Shard = RwLock<DigestMap<State>>;

/// The index of a store.
pub(crate) struct Index {
    shards: Box<[Shard]>,
    order: Mutex<BTreeMap<u64, Arc<Entry>>>,
    clock: Clock,
    objects: AtomicU64,
    /// Of the objects, those never read, and their slots.
    never_read: AtomicU64,
    never_read_slots: AtomicU64,
}

impl Index {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        let (order, clock, objects) = (Mutex::default(), Clock::default(), AtomicU64::new(0));
        let (never_read, never_read_slots) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { shards, order, clock, objects, never_read, never_read_slots }
    }

    fn shard(&self, digest: &Digest) -> &Shard {
        &self.shards[digest.0[31] as usize % SHARDS]
    }

    /// Objects present.
    pub(crate) fn objects(&self) -> u64 {
        self.objects.load(Ordering::Relaxed)
    }

    /// Objects present that were never read since they were written, and their slots.
    pub(crate) fn never_read(&self) -> (u64, u64) {
        (self.never_read.load(Ordering::Relaxed), self.never_read_slots.load(Ordering::Relaxed))
    }

    /// The position of an object that is stored now.
    pub(crate) fn tick(&self) -> u64 {
        self.clock.tick(false)
    }

    /// Looks at a present object.
    pub(crate) fn with<T>(&self, key: &ObjectKey, look: impl FnOnce(&Arc<Entry>) -> T) -> Option<T> {
        self.with_digest(key.digest(), |entry| (entry.key == *key).then(|| look(entry))).flatten()
    }

    /// Looks at a present object known by digest alone.
    pub(crate) fn with_digest<T>(&self, digest: &Digest, look: impl FnOnce(&Arc<Entry>) -> T) -> Option<T> {
        match self.shard(digest).read().get(digest) {
            Some(State::Present(entry)) => Some(look(entry)),
            _ => None,
        }
    }

    /// Marks a key as being written, when it is absent and `reserve` finds room.
    pub(crate) fn claim<T>(
        &self,
        key: &ObjectKey,
        token: &Token,
        reserve: impl FnOnce() -> Option<T>,
    ) -> Claim<T> {
        let mut shard = self.shard(key.digest()).write();
        match shard.entry(*key.digest()) {
            MapEntry::Occupied(slot) => match slot.get() {
                State::Present(_) => Claim::Present,
                State::Writing(_) => Claim::Busy,
            },
            MapEntry::Vacant(slot) => match reserve() {
                Some(reserved) => {
                    slot.insert(State::Writing(token.clone()));
                    Claim::Claimed(reserved)
                }
                None => Claim::Refused,
            },
        }
    }

    /// Whether the transaction still has its key.
    pub(crate) fn claimed(&self, digest: &Digest, token: &Token) -> bool {
        matches!(self.shard(digest).read().get(digest), Some(State::Writing(t)) if Arc::ptr_eq(t, token))
    }

    /// Gives a key up, when the transaction still has it.
    pub(crate) fn unclaim(&self, digest: &Digest, token: &Token) {
        let mut shard = self.shard(digest).write();
        if matches!(shard.get(digest), Some(State::Writing(t)) if Arc::ptr_eq(t, token)) {
            shard.remove(digest);
        }
    }

    /// Makes an object visible, when its transaction still has the key.
    pub(crate) fn publish(&self, token: &Token, entry: &Arc<Entry>) -> bool {
        let digest = *entry.key.digest();
        let mut shard = self.shard(&digest).write();
        if !matches!(shard.get(&digest), Some(State::Writing(t)) if Arc::ptr_eq(t, token)) {
            return false;
        }
        self.order_in(entry);
        shard.insert(digest, State::Present(entry.clone()));
        true
    }

    /// Puts the objects in that recovery found, each digest once, into an index that is still empty.
    pub(crate) fn restore(&self, entries: Vec<Arc<Entry>>) {
        // Sorted, the order is built in one go; one by one, every insertion would wait for memory.
        let mut sorted: Vec<(u64, Arc<Entry>)> = Vec::with_capacity(entries.len());
        for entry in &entries {
            let recency = entry.recency.load(Ordering::Relaxed);
            entry.ordered.store(recency, Ordering::Relaxed);
            self.count_in(entry, recency);
            self.clock.advance(recency);
            sorted.push((recency, entry.clone()));
        }
        sorted.sort_unstable_by_key(|(recency, _)| *recency);
        let mut twice = Vec::new();
        sorted.dedup_by(|(recency, entry), (before, _)| {
            let same = recency == before;
            if same {
                twice.push(entry.clone());
            }
            same
        });
        let mut order: BTreeMap<u64, Arc<Entry>> = sorted.into_iter().collect();
        for entry in twice {
            Self::order_at(&mut order, &entry, entry.recency.load(Ordering::Relaxed), &self.clock);
        }
        *self.order.lock() = order;
        for shard in &self.shards {
            shard.write().reserve(entries.len() / SHARDS);
        }
        for entry in entries {
            self.shard(entry.key.digest()).write().insert(*entry.key.digest(), State::Present(entry));
        }
    }

    /// Opens an object for reading.
    pub(crate) fn lease(&self, key: &ObjectKey) -> Option<Arc<Entry>> {
        self.with(key, |entry| {
            // Counted under the shard's lock, so that the evictor either sees it or has taken the entry already.
            entry.leases.fetch_add(1, Ordering::Relaxed);
            let before = entry.recency.swap(self.clock.tick(true), Ordering::Relaxed);
            if !recency::is_read(before) {
                self.never_read.fetch_sub(1, Ordering::Relaxed);
                self.never_read_slots.fetch_sub(entry.slots.numbers().len() as u64, Ordering::Relaxed);
            }
            entry.clone()
        })
    }

    /// Takes whatever is under a digest, and hands it to `then` before anybody can see that it is gone.
    pub(crate) fn take<T>(&self, digest: &Digest, then: impl FnOnce(Taken) -> T) -> T {
        let mut shard = self.shard(digest).write();
        then(match shard.remove(digest) {
            None => Taken::Nothing,
            Some(State::Writing(_)) => Taken::Transaction,
            Some(State::Present(entry)) => {
                self.order_out(&entry);
                Taken::Object(entry)
            }
        })
    }

    /// Takes this very entry, when it is still there and `allowed`; calls `then` before anybody can see that it is gone.
    pub(crate) fn take_entry(
        &self,
        entry: &Arc<Entry>,
        allowed: impl FnOnce(&Entry) -> bool,
        then: impl FnOnce(),
    ) -> bool {
        let digest = entry.key.digest();
        let mut shard = self.shard(digest).write();
        match shard.get(digest) {
            Some(State::Present(there)) if Arc::ptr_eq(there, entry) && allowed(entry) => {
                shard.remove(digest);
                self.order_out(entry);
                then();
                true
            }
            _ => false,
        }
    }

    /// Least recently used objects that nobody reads, until `enough` has seen its fill.
    pub(crate) fn victims(&self, mut enough: impl FnMut(&Entry) -> bool) -> Vec<Arc<Entry>> {
        let mut victims = Vec::new();
        let mut order = self.order.lock();
        let mut from = 0;
        while let Some((&at, entry)) = order.range(from..).next() {
            let entry = entry.clone();
            let recency = entry.recency.load(Ordering::Relaxed);
            if recency != at {
                // Used since it was put in order: put it where it belongs now.
                order.remove(&at);
                Self::order_at(&mut order, &entry, recency, &self.clock);
            } else if entry.leases.load(Ordering::Relaxed) == 0 {
                let done = enough(&entry);
                victims.push(entry);
                if done {
                    break;
                }
            }
            from = at + 1;
        }
        victims
    }

    /// All present entries, shard by shard.
    pub(crate) fn for_each_shard<E>(
        &self,
        mut each: impl FnMut(Vec<Arc<Entry>>) -> Result<(), E>,
    ) -> Result<(), E> {
        for shard in &self.shards {
            let entries = shard
                .read()
                .values()
                .filter_map(|state| match state {
                    State::Present(entry) => Some(entry.clone()),
                    State::Writing(_) => None,
                })
                .collect();
            each(entries)?;
        }
        Ok(())
    }

    fn order_in(&self, entry: &Arc<Entry>) {
        let recency = entry.recency.load(Ordering::Relaxed);
        self.count_in(entry, recency);
        Self::order_at(&mut self.order.lock(), entry, recency, &self.clock);
    }

    fn count_in(&self, entry: &Entry, recency: u64) {
        self.objects.fetch_add(1, Ordering::Relaxed);
        if !recency::is_read(recency) {
            self.never_read.fetch_add(1, Ordering::Relaxed);
            self.never_read_slots.fetch_add(entry.slots.numbers().len() as u64, Ordering::Relaxed);
        }
    }

    fn order_at(order: &mut BTreeMap<u64, Arc<Entry>>, entry: &Arc<Entry>, recency: u64, clock: &Clock) {
        let mut at = recency;
        if order.contains_key(&at) {
            at = clock.tick(recency::is_read(recency));
            // Whoever used it meanwhile knows better.
            _ = entry.recency.compare_exchange(recency, at, Ordering::Relaxed, Ordering::Relaxed);
        }
        entry.ordered.store(at, Ordering::Relaxed);
        order.insert(at, entry.clone());
    }

    fn order_out(&self, entry: &Arc<Entry>) {
        let mut order = self.order.lock();
        order.remove(&entry.ordered.load(Ordering::Relaxed));
        drop(order);
        self.objects.fetch_sub(1, Ordering::Relaxed);
        if !recency::is_read(entry.recency.load(Ordering::Relaxed)) {
            self.never_read.fetch_sub(1, Ordering::Relaxed);
            self.never_read_slots.fetch_sub(entry.slots.numbers().len() as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::Allocator;

    /// Recency says little about two objects of one position, but both must be found, evicted, and removed for good.
    #[test]
    fn restored_objects_are_in_order_also_two_of_the_same_position() {
        let allocator = Arc::new(Allocator::new(&[8], |_| false, Box::new(|| ())));
        let entry = |name: &[u8], recency| {
            let key = ObjectKey::new(&b"ns"[..].into(), name);
            let sums = Box::new([FragmentSums::default()]);
            Arc::new(Entry::new(key, 1, allocator.reserve(1, 1).unwrap(), sums, recency))
        };
        // The lowest bit says that it was read.
        let entries = [entry(b"d", 80), entry(b"b", 20), entry(b"a", 11), entry(b"c", 20)];
        let index = Index::new();
        index.restore(entries.to_vec());
        assert_eq!((index.objects(), index.never_read()), (4, (3, 3)));
        assert!(index.tick() > 80);
        let names = |index: &Index| -> Vec<String> {
            let victims = index.victims(|_| false);
            victims.iter().map(|entry| String::from_utf8(entry.key.key().to_vec()).unwrap()).collect()
        };
        let order = names(&index);
        assert!(order == ["a", "b", "d", "c"] || order == ["a", "c", "d", "b"], "{order:?}");
        for entry in &entries {
            assert!(index.with(&entry.key, |there| Arc::ptr_eq(there, entry)).unwrap());
            assert!(index.take_entry(entry, |_| true, || ()));
        }
        assert_eq!((index.objects(), index.never_read()), (0, (0, 0)));
        assert!(names(&index).is_empty());
    }

    /// Whoever finds nothing must find the removal of what was there queued before.
    #[test]
    fn nobody_sees_an_object_gone_before_its_taker_has_dealt_with_it() {
        let allocator = Arc::new(Allocator::new(&[8], |_| false, Box::new(|| ())));
        let key = ObjectKey::new(&b"ns"[..].into(), b"a");
        let sums = Box::new([FragmentSums::default()]);
        let entry = Arc::new(Entry::new(key, 1, allocator.reserve(1, 1).unwrap(), sums, 1));
        for by_digest in [true, false] {
            let index = Index::new();
            index.restore(vec![entry.clone()]);
            let dealt = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let mut other = None;
                let mut then = || {
                    other = Some(scope.spawn(|| {
                        assert!(index.with(&entry.key, |_| ()).is_none());
                        assert!(dealt.load(Ordering::SeqCst));
                    }));
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    dealt.store(true, Ordering::SeqCst);
                };
                if by_digest {
                    index.take(entry.key.digest(), |taken| {
                        then();
                        assert!(matches!(taken, Taken::Object(_)));
                    });
                } else {
                    assert!(index.take_entry(&entry, |_| true, then));
                }
                other.unwrap().join().unwrap();
            });
        }
    }
}
