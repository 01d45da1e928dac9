//! What the process and a thread of it use.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// CPU time of the calling thread.
pub fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Memory and CPU time of this process as JSON, and `reporting`, the CPU time of the thread that reports. Zeros where
/// /proc does not tell.
pub fn usage(reporting: Duration) -> Value {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    json!({
        "pid": std::process::id(),
        "rss_bytes": number("VmRSS") * 1024,
        "rss_peak_bytes": number("VmHWM") * 1024,
        "threads": number("Threads"),
        "cpu_s": cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
        "reporting_cpu_s": reporting.as_secs_f64(),
    })
}
