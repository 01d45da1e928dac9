//! Messages for people, written by the reporter's thread alone, so that neither LMCache's threads nor the reactor wait
//! for a log; repeated failures are counted instead of repeated.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use tracing::Level;

/// A failure of the same kind within this time after one that was logged is only counted.
const QUIET: Duration = Duration::from_secs(10);

/// One line.
pub struct Line {
    pub level: Level,
    pub text: String,
}

impl Line {
    /// Gives it to the log.
    pub fn write(&self) {
        match self.level {
            Level::ERROR => tracing::error!("{}", self.text),
            Level::WARN => tracing::warn!("{}", self.text),
            _ => tracing::info!("{}", self.text),
        }
    }
}

#[derive(Default)]
struct Kind {
    last: Option<Instant>,
    unsaid: u64,
}

/// Takes messages from any thread; never blocks on the log itself.
pub struct Log {
    lines: Sender<Line>,
    kinds: Mutex<HashMap<&'static str, Kind>>,
}

impl Log {
    /// Lines go to `lines`.
    pub fn new(lines: Sender<Line>) -> Self {
        Self { lines, kinds: Mutex::default() }
    }

    /// Says something once: a change of state.
    pub fn say(&self, level: Level, text: String) {
        // The reporter is gone only after close.
        let _ = self.lines.send(Line { level, text });
    }

    /// Says that `count` things of `kind` failed: in full the first time, counted while it repeats.
    pub fn failed(&self, kind: &'static str, count: u64, text: impl FnOnce() -> String) {
        let now = Instant::now();
        let mut kinds = self.kinds.lock();
        let state = kinds.entry(kind).or_default();
        if state.last.is_some_and(|last| now.duration_since(last) < QUIET) {
            state.unsaid += count;
            return;
        }
        state.last = Some(now);
        let unsaid = std::mem::take(&mut state.unsaid);
        drop(kinds);
        let more = if unsaid > 0 { format!(" (and {unsaid} like it before)") } else { String::new() };
        self.say(Level::WARN, text() + &more);
    }

    /// Says what was only counted so far.
    pub fn flush(&self) {
        for (kind, state) in self.kinds.lock().iter_mut() {
            let unsaid = std::mem::take(&mut state.unsaid);
            if unsaid > 0 {
                self.say(Level::WARN, format!("{kind}: {unsaid} more"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_are_counted_and_said_at_a_flush() {
        let (lines, said) = crossbeam_channel::unbounded();
        let log = Log::new(lines);
        for i in 0..100 {
            log.failed("loads", 2, || format!("load {i} failed"));
        }
        log.failed("stores", 1, || "store failed".into());
        log.flush();
        log.flush();
        let texts: Vec<String> = said.try_iter().map(|line| line.text).collect();
        assert_eq!(texts, ["load 0 failed", "store failed", "loads: 198 more"]);
    }
}
