//! Positions in the order of use. A position is the time of the store or of the latest read, microseconds since 1970,
//! doubled, plus one when it is of a read: so the order also says how long ago, and whether an object was ever read,
//! across restarts and without further fields on the drive.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

const READ: u64 = 1;

/// Hands out positions, each larger than the one before, whatever the system's clock does.
#[derive(Debug, Default)]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    /// The next position: of a read, or of a store.
    pub(crate) fn tick(&self, read: bool) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64) * 2;
        let next = |last: u64| Some(last.saturating_add(2).max(now));
        let last =
            self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).unwrap_or_else(|last| last);
        last.saturating_add(2).max(now) | if read { READ } else { 0 }
    }

    /// Makes later positions larger than `recency`.
    pub(crate) fn advance(&self, recency: u64) {
        self.0.fetch_max(recency & !READ, Ordering::Relaxed);
    }
}

/// Whether the position is of a read.
pub(crate) fn is_read(recency: u64) -> bool {
    recency & READ != 0
}

/// Microseconds since 1970 of the position.
pub(crate) fn micros(recency: u64) -> u64 {
    recency / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_grow_also_past_one_from_the_future() {
        let clock = Clock::default();
        let (stored, read) = (clock.tick(false), clock.tick(true));
        assert!(stored < read && !is_read(stored) && is_read(read));
        let future = (stored + 1_000_000_000) | READ;
        clock.advance(future);
        let later = [clock.tick(false), clock.tick(true), clock.tick(false)];
        assert!(future < later[0] && later.is_sorted_by(|a, b| a < b));
        assert_eq!(later.map(is_read), [false, true, false]);
        clock.advance(u64::MAX);
        let _ = clock.tick(true);
    }
}
