//! The evictor: one thread that keeps slots free, so that a store rarely waits for room.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::inner::Inner;
use crate::recency;
use crate::signals::Request;

/// Share of the slots that is kept free: one in so many.
const RESERVE_SHARE: usize = 50;
/// The reserve never takes more than one in so many slots.
const RESERVE_CAP: usize = 4;
/// Longest wait for the commit of a round of removals before looking again.
const PATIENCE: Duration = Duration::from_secs(5);

/// Slots to keep free: 2 % or twice the largest object seen, at most a quarter.
pub(crate) fn reserve(slots: usize, largest: usize) -> usize {
    (slots / RESERVE_SHARE).max(2 * largest).min(slots / RESERVE_CAP)
}

/// Fragments of the largest object that the reserve leaves room for.
pub(crate) fn largest_object(slots: usize) -> usize {
    slots - slots / RESERVE_CAP
}

/// Runs on the evictor's thread until the store closes. One round per request: whoever still finds no room after it
/// asks again. To look twice for the same request would evict for a wish that was fulfilled meanwhile.
pub(crate) fn run(inner: &Arc<Inner>) {
    loop {
        let request = inner.signals.next();
        if request.closing {
            return;
        }
        if !inner.read_only() {
            round(inner, &request);
        }
    }
}

fn round(inner: &Arc<Inner>, request: &Request) {
    let largest = inner.largest.load(Ordering::Relaxed);
    let wanted = reserve(inner.allocator.slots(), largest).max(request.slots);
    let mut slots = wanted.saturating_sub(inner.allocator.free());
    let goal = inner.manifest_goal(request.manifest_bytes);
    let mut bytes = inner.allocator.manifest_bytes().saturating_sub(goal);
    let mut removals = 0;
    let (sender, receiver) = crossbeam_channel::unbounded();
    if slots > 0 || bytes > 0 {
        let victims = inner.index.victims(|entry| {
            slots = slots.saturating_sub(entry.slots.numbers().len());
            bytes = bytes.saturating_sub(entry.slots.manifest_bytes());
            slots == 0 && bytes == 0
        });
        for entry in victims {
            let sender = sender.clone();
            let done = Box::new(move |_| _ = sender.send(()));
            if !inner.take_out(&entry, |e| e.leases.load(Ordering::Relaxed) == 0, done) {
                continue;
            }
            inner.counters.evicted.fetch_add(1, Ordering::Relaxed);
            if !recency::is_read(entry.recency.load(Ordering::Relaxed)) {
                inner.counters.evicted_never_read.fetch_add(1, Ordering::Relaxed);
            }
            removals += 1;
        }
    }
    for _ in 0..removals {
        if receiver.recv_timeout(PATIENCE).is_err() {
            break;
        }
    }
    if removals > 0 || slots == 0 && bytes == 0 {
        inner.signals.changed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_follows_the_largest_object_within_bounds() {
        assert_eq!(reserve(10_000, 1), 200);
        assert_eq!(reserve(10_000, 112), 224);
        assert_eq!(reserve(1_000, 512), 250);
    }
}
