//! What is counted, and the thread that reports it. `docs/stats.md` is the reference of the JSON.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::Receiver;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::connector::Shared;
use crate::log::Line;
use crate::process;
use crate::task::{Class, Operation};

/// Version of the JSON's form: grows when something that was there changes or goes, not when something is added.
const SCHEMA_VERSION: u32 = 1;

/// Upper bounds of the latencies' buckets, microseconds.
const BUCKETS_US: [u64; 17] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 30_000_000,
];

/// How long a failed load or store shows in the connector's health: whoever asks every ten seconds, as is usual, sees it.
const FAILURE_SHOWS: Duration = Duration::from_secs(15);

/// Why a key was not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// There is no such object.
    Absent,
    /// The object has another size than the buffer.
    Size,
    /// A fragment does not match its checksum.
    NotVerified,
    /// The drive answered with an error.
    IoError,
    /// The operation got too old.
    Deadline,
    /// A drive of the object does not answer.
    Stalled,
    /// The buffer cannot be filled, or the connector is closed.
    Refused,
    /// The gateway cannot be reached, or was lost meanwhile.
    Unreachable,
}

impl Miss {
    const NAMES: [&str; 8] =
        ["absent", "size", "not_verified", "io_error", "deadline", "stalled", "refused", "unreachable"];

    /// The causes that a lookup can have.
    const OF_LOOKUPS: [Miss; 5] =
        [Miss::Absent, Miss::Deadline, Miss::Stalled, Miss::Refused, Miss::Unreachable];

    /// Whether the way to the store or the store failed, rather than the object.
    fn is_failure(self) -> bool {
        matches!(self, Miss::IoError | Miss::Deadline | Miss::Stalled | Miss::Unreachable)
    }

    /// What such loads are, for the log.
    pub fn plural(self) -> &'static str {
        match self {
            Miss::Absent => "loads of absent objects",
            Miss::Size => "loads of another size",
            Miss::NotVerified => "loads not verified",
            Miss::IoError => "loads with I/O errors",
            Miss::Deadline => "loads past their deadline",
            Miss::Stalled => "loads from stalled drives",
            Miss::Refused => "loads refused",
            Miss::Unreachable => "loads without a gateway",
        }
    }
}

/// What became of a key that was to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Written and committed.
    Stored,
    /// Present already.
    Skipped,
    /// Stored by another set of the same key.
    Deduped,
    /// Beyond `max_pending_store_mb`.
    Dropped,
    /// The buffer carries the stamp of a failed load.
    Poisoned,
    /// No room.
    Rejected,
    /// The operation got too old.
    TooOld,
    /// A drive that it needs does not answer.
    Stalled,
    /// A delete of the key came in between.
    Deleted,
    /// The gateway cannot be reached, or was lost meanwhile.
    Unreachable,
    /// Anything else: I/O errors, a read-only store, unusable buffers, a closed connector.
    Failed,
}

impl Outcome {
    const NAMES: [&str; 11] = [
        "store_stored",
        "store_skipped",
        "store_deduped",
        "store_dropped",
        "store_poisoned",
        "store_rejected_by_card",
        "store_too_old",
        "store_stalled",
        "store_deleted",
        "store_unreachable",
        "store_failed",
    ];

    /// Its name in statistics.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Whether the object is in the store.
    pub fn ok(self) -> bool {
        matches!(self, Outcome::Stored | Outcome::Skipped | Outcome::Deduped)
    }

    /// Whether the way to the store or the store failed, rather than this object or its timing.
    fn is_failure(self) -> bool {
        matches!(
            self,
            Outcome::Rejected | Outcome::TooOld | Outcome::Stalled | Outcome::Unreachable | Outcome::Failed
        )
    }
}

#[derive(Default)]
struct PerOperation {
    tasks: AtomicU64,
    keys: AtomicU64,
    hits: AtomicU64,
    bytes: AtomicU64,
    /// Sum of the latencies, microseconds.
    latency: AtomicU64,
}

/// What the last line of statistics was made from, for rates.
struct Said {
    at: Instant,
    loaded: u64,
    written: u64,
}

/// All counters of a connector. Updated from any thread.
pub struct Stats {
    started: Instant,
    operations: [PerOperation; 4],
    latencies: [Mutex<Histogram<u64>>; 4],
    misses: [AtomicU64; Miss::NAMES.len()],
    lookup_misses: [AtomicU64; Miss::NAMES.len()],
    stored: [AtomicU64; Outcome::NAMES.len()],
    discarded: AtomicU64,
    withheld: AtomicU64,
    /// By class, milliseconds from `started` to the latest failure; 0 before the first.
    failed_at: [AtomicU64; 2],
    /// CPU time of the thread that reports, microseconds.
    reporting_cpu: AtomicU64,
    said: Mutex<Said>,
}

impl Default for Stats {
    fn default() -> Self {
        // Microseconds up to an hour, two digits.
        let histogram = || {
            Mutex::new(Histogram::new_with_bounds(1, 3_600_000_000, 2).expect("constant bounds are valid"))
        };
        let started = Instant::now();
        Self {
            started,
            operations: Default::default(),
            latencies: std::array::from_fn(|_| histogram()),
            misses: Default::default(),
            lookup_misses: Default::default(),
            stored: Default::default(),
            discarded: AtomicU64::new(0),
            withheld: AtomicU64::new(0),
            failed_at: Default::default(),
            reporting_cpu: AtomicU64::new(0),
            said: Mutex::new(Said { at: started, loaded: 0, written: 0 }),
        }
    }
}

impl Stats {
    /// Counts a submitted operation.
    pub fn submitted(&self, operation: Operation, keys: usize) {
        let counters = &self.operations[operation as usize];
        counters.tasks.fetch_add(1, Relaxed);
        counters.keys.fetch_add(keys as u64, Relaxed);
    }

    /// Counts an answered operation.
    pub fn answered(&self, operation: Operation, submitted: Instant) {
        let micros = submitted.elapsed().as_micros().max(1) as u64;
        self.operations[operation as usize].latency.fetch_add(micros, Relaxed);
        self.latencies[operation as usize].lock().saturating_record(micros);
    }

    /// Counts keys of a get, exists or delete that went well, and the bytes loaded.
    pub fn hit(&self, operation: Operation, keys: u64, bytes: u64) {
        self.operations[operation as usize].hits.fetch_add(keys, Relaxed);
        self.operations[operation as usize].bytes.fetch_add(bytes, Relaxed);
    }

    /// Counts keys not loaded.
    pub fn missed(&self, miss: Miss, keys: u64) {
        self.misses[miss as usize].fetch_add(keys, Relaxed);
        if miss.is_failure() && keys > 0 {
            self.failed(Class::Load);
        }
    }

    /// Counts keys that a lookup did not find.
    pub fn lookup_missed(&self, miss: Miss, keys: u64) {
        self.lookup_misses[miss as usize].fetch_add(keys, Relaxed);
        if miss.is_failure() && keys > 0 {
            self.failed(Class::Load);
        }
    }

    /// Counts a fragment that came too late: its key was answered without it.
    pub fn withheld(&self) {
        self.withheld.fetch_add(1, Relaxed);
    }

    fn failed(&self, class: Class) {
        self.failed_at[class as usize].store(self.started.elapsed().as_millis().max(1) as u64, Relaxed);
    }

    /// How long ago the latest load or store failed.
    fn failed_ago(&self, class: Class) -> Option<Duration> {
        let at = self.failed_at[class as usize].load(Relaxed);
        (at > 0).then(|| self.started.elapsed().saturating_sub(Duration::from_millis(at)))
    }

    /// Counts the outcome of keys to be stored, and the bytes written.
    pub fn stored(&self, outcome: Outcome, keys: u64, bytes: u64) {
        self.stored[outcome as usize].fetch_add(keys, Relaxed);
        if outcome.is_failure() && keys > 0 {
            self.failed(Class::Store);
        }
        if outcome == Outcome::Stored {
            self.hit(Operation::Set, keys, bytes);
        }
    }

    /// Counts an object removed as damaged.
    pub fn discarded(&self) {
        self.discarded.fetch_add(1, Relaxed);
    }

    /// Keys with that outcome so far.
    pub fn count(&self, outcome: Outcome) -> u64 {
        self.stored[outcome as usize].load(Relaxed)
    }

    fn operation(&self, operation: Operation) -> (Value, [u64; 5]) {
        let counters = &self.operations[operation as usize];
        let histogram = self.latencies[operation as usize].lock();
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|q| histogram.value_at_quantile(q));
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let (tasks, keys, hits, bytes) =
            (get(&counters.tasks), get(&counters.keys), get(&counters.hits), get(&counters.bytes));
        let value = json!({
            "tasks": tasks, "answered": histogram.len(), "keys": keys, "hits": hits, "bytes": bytes,
            "latency_us": {
                "p50": p50, "p90": p90, "p99": p99, "max": histogram.max(), "sum": get(&counters.latency),
                "buckets": buckets(&histogram),
            },
        });
        (value, [keys, hits, bytes, p50, p99])
    }

    /// Everything as JSON: per operation tasks, keys, hits, bytes, latencies in microseconds; the outcomes of stores,
    /// loads and lookups; the process.
    pub fn snapshot(&self) -> Map<String, Value> {
        let mut all = Map::new();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        all.insert("schema_version".into(), json!(SCHEMA_VERSION));
        all.insert("version".into(), json!(env!("CARGO_PKG_VERSION")));
        all.insert("time_s".into(), json!(now));
        all.insert("uptime_s".into(), json!(self.started.elapsed().as_secs_f64()));
        let operations =
            Operation::ALL.map(|operation| (operation.name().to_string(), self.operation(operation).0));
        all.insert("operations".into(), Value::Object(Map::from_iter(operations)));
        for (name, counter) in Outcome::NAMES.iter().zip(&self.stored) {
            all.insert((*name).into(), json!(counter.load(Relaxed)));
        }
        for (name, counter) in Miss::NAMES.iter().zip(&self.misses) {
            all.insert(format!("load_miss_{name}"), json!(counter.load(Relaxed)));
        }
        for miss in Miss::OF_LOOKUPS {
            let counter = &self.lookup_misses[miss as usize];
            all.insert(format!("lookup_miss_{}", Miss::NAMES[miss as usize]), json!(counter.load(Relaxed)));
        }
        all.insert("discarded".into(), json!(self.discarded.load(Relaxed)));
        all.insert("withheld".into(), json!(self.withheld.load(Relaxed)));
        let reporting = Duration::from_micros(self.reporting_cpu.load(Relaxed));
        all.insert("process".into(), process::usage(reporting));
        all
    }

    /// Whether the tier does its work at the moment; `reasons` are what is known to be wrong with the way to the store.
    pub fn health(&self, mut reasons: Vec<String>) -> Value {
        let mut failed = |class, what| {
            let ago = self.failed_ago(class);
            if let Some(ago) = ago.filter(|&ago| ago < FAILURE_SHOWS) {
                reasons.push(format!("a {what} failed {:.0} s ago", ago.as_secs_f64()));
            }
            ago.map(|ago| ago.as_secs_f64())
        };
        let (load, store) = (failed(Class::Load, "load or lookup"), failed(Class::Store, "store"));
        json!({
            "ready": reasons.is_empty(), "reasons": reasons,
            "load_failed_ago_s": load, "store_failed_ago_s": store,
        })
    }

    /// The line for the log; `queue` are bytes of pending stores, free and all slots; `session` is the state of the way
    /// to the store.
    fn line(&self, queue: (u64, usize, usize), session: Option<&Value>) -> String {
        let [asked, found, ..] = self.operation(Operation::Exists).1;
        let [keys, hits, loaded, get_p50, get_p99] = self.operation(Operation::Get).1;
        let [.., written, set_p50, set_p99] = self.operation(Operation::Set).1;
        let now = Instant::now();
        let said = std::mem::replace(&mut *self.said.lock(), Said { at: now, loaded, written });
        let seconds = now.duration_since(said.at).as_secs_f64().max(0.001);
        let mib = |bytes: u64| bytes as f64 / (1u64 << 20) as f64;
        let gib = |bytes: u64| mib(bytes) / 1024.0;
        let ms = |us: u64| us as f64 / 1e3;
        let stored = |outcome: Outcome| self.count(outcome);
        let (pending, free, slots) = queue;
        let session = session.map_or(String::new(), |session| {
            let (state, seconds) = (&session["state"], session["for_s"].as_f64().unwrap_or(0.0));
            format!("; gateway {} for {seconds:.0} s", state.as_str().unwrap_or("?"))
        });
        format!(
            "lookups {found}/{asked} hit; loads {hits}/{keys} hit, {:.3} GiB in, {:.1} MiB/s, p50 {:.1} ms p99 {:.1} ms; \
             stores {} stored {} skipped {} deduped, {:.3} GiB out, {:.1} MiB/s, p50 {:.1} ms p99 {:.1} ms, \
             {:.1} MiB pending; {} dropped {} poisoned {} rejected {} failed; {} not verified {} discarded; \
             slots {}/{slots} used{session}",
            gib(loaded),
            mib(loaded.saturating_sub(said.loaded)) / seconds,
            ms(get_p50),
            ms(get_p99),
            stored(Outcome::Stored),
            stored(Outcome::Skipped),
            stored(Outcome::Deduped),
            gib(written),
            mib(written.saturating_sub(said.written)) / seconds,
            ms(set_p50),
            ms(set_p99),
            mib(pending),
            stored(Outcome::Dropped),
            stored(Outcome::Poisoned),
            stored(Outcome::Rejected),
            [Outcome::TooOld, Outcome::Stalled, Outcome::Deleted, Outcome::Unreachable, Outcome::Failed]
                .map(stored)
                .iter()
                .sum::<u64>(),
            self.misses[Miss::NotVerified as usize].load(Relaxed),
            self.discarded.load(Relaxed),
            slots.saturating_sub(free),
        )
    }
}

/// How many latencies are at most each of [`BUCKETS_US`].
fn buckets(histogram: &Histogram<u64>) -> Vec<(u64, u64)> {
    let mut counts = BUCKETS_US.map(|bound| (bound, 0));
    for step in histogram.iter_recorded() {
        let bucket = BUCKETS_US.partition_point(|&bound| bound < step.value_iterated_to());
        if let Some((_, count)) = counts.get_mut(bucket) {
            *count += step.count_at_value();
        }
    }
    let mut sum = 0;
    for (_, count) in &mut counts {
        sum += *count;
        *count = sum;
    }
    counts.to_vec()
}

/// Writes log lines, and every `interval` the statistics, until nobody is left to send lines.
pub(crate) fn report(shared: &Arc<Shared>, lines: &Receiver<Line>, stop: &Receiver<()>, interval: Duration) {
    let mut next = Instant::now() + interval;
    loop {
        crossbeam_channel::select! {
            recv(lines) -> line => if let Ok(line) = line { line.write() },
            recv(stop) -> _ => break,
            default(next.saturating_duration_since(Instant::now())) => {
                next += interval.max(Duration::from_millis(1));
                shared.log.flush();
                tracing::info!("{}", line(shared));
                write_file(shared);
                shared.stats.reporting_cpu.store(process::thread_cpu().as_micros() as u64, Relaxed);
            }
        }
    }
    shared.log.flush();
    lines.try_iter().for_each(|line| line.write());
    tracing::info!("closed; {}", line(shared));
    write_file(shared);
}

fn line(shared: &Arc<Shared>) -> String {
    let (free, _) = shared.backend.free_slots();
    let queue = (shared.pending_store_bytes(), free, shared.backend.slots());
    shared.stats.line(queue, shared.backend.session().as_ref())
}

fn write_file(shared: &Arc<Shared>) {
    let Some(path) = &shared.config.stats_path else {
        return;
    };
    if let Err(error) = replace(path, &shared.snapshot().to_string()) {
        let cure = "name a file in a folder that can be written";
        shared.log.failed("stats_path", 1, || format!("stats_path={path:?}: cannot write: {error}; {cure}"));
    }
}

/// Readers see the old content or the new one.
fn replace(path: &Path, content: &str) -> std::io::Result<()> {
    let mut name = path.file_name().ok_or(std::io::ErrorKind::InvalidInput)?.to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    fs::write(&temporary, content)?;
    fs::rename(&temporary, path).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}
