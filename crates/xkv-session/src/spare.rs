//! How much memory a new session's ring may take: the machine's, and what every memory limit over this process leaves.

use std::io;
use std::path::{Path, PathBuf};

/// Memory that must stay available beside a new session's ring: one part in so many of what it takes, at least 64 MiB.
const SPARE_SHARE: u64 = 8;

/// Refuses a ring that would leave the machine or the container without memory: its pages are taken at once and for
/// good, and who takes too many is killed rather than told.
///
/// # Errors
/// The text names the bytes available and needed.
pub(crate) fn check(bytes: u64) -> io::Result<()> {
    let needed = bytes + (bytes / SPARE_SHARE).max(64 << 20);
    match machine().into_iter().chain(limits()).min() {
        Some(available) if available < needed => Err(io::Error::other(format!(
            "a ring of {bytes} bytes does not fit: {available} bytes of memory are available, {needed} are needed; \
             lower batch_slots"
        ))),
        _ => Ok(()),
    }
}

fn machine() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(kib.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// What the tightest control group leaves, version 2 or 1.
fn limits() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let root = Path::new("/sys/fs/cgroup");
    let second = groups(root, &own, "").into_iter();
    let first = groups(&root.join("memory"), &own, "memory").into_iter();
    second
        .filter_map(|folder| left(&folder, "memory.max", "memory.current"))
        .chain(first.filter_map(|folder| left(&folder, "memory.limit_in_bytes", "memory.usage_in_bytes")))
        .min()
}

/// The folders of the control groups over this process, from its own up to `root`, of the hierarchy that has
/// `controller`; `own` is what /proc/self/cgroup says.
fn groups(root: &Path, own: &str, controller: &str) -> Vec<PathBuf> {
    let path = own.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(":/")?;
        controllers.split(',').any(|each| each == controller).then_some(path)
    });
    // Without a namespace of its own a container sees the host's path, which is not below its root: then the root counts.
    let leaf = path.map(|path| root.join(path)).filter(|leaf| leaf.exists()).unwrap_or_else(|| root.into());
    leaf.ancestors().take_while(|folder| folder.starts_with(root)).map(Path::to_owned).collect()
}

/// Limit less use, where page cache counts as free. None: no limit.
fn left(folder: &Path, limit: &str, used: &str) -> Option<u64> {
    let number = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number(limit)?, number(used)?);
    let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cache: u64 = stat
        .lines()
        .filter_map(|line| line.strip_prefix("inactive_file ").or(line.strip_prefix("active_file ")))
        .filter_map(|value| value.parse::<u64>().ok())
        .sum();
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_leaves_what_is_not_used_or_only_cache() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let left = || left(folder.path(), "memory.max", "memory.current");
        assert_eq!(left(), None);
        put("memory.max", "max\n");
        put("memory.current", "700\n");
        assert_eq!(left(), None);
        put("memory.max", "1000\n");
        assert_eq!(left(), Some(300));
        put("memory.stat", "anon 5\ninactive_file 150\nactive_file 50\ninactive_anon 9\n");
        assert_eq!(left(), Some(500));
        put("memory.current", "1500\n");
        assert_eq!(left(), Some(0));
    }

    #[test]
    fn the_groups_over_a_process_are_found_in_either_hierarchy() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        let own = "9:cpu,memory:/a/b\n3:pids:/a\n0::/a\n";
        let found = |controller| groups(root, own, controller);
        assert_eq!(found("memory"), [root.join("a/b"), root.join("a"), root.into()]);
        assert_eq!(found(""), [root.join("a"), root.into()]);
        assert_eq!(found("devices"), [root]);
        // The host's path, seen from a container.
        assert_eq!(groups(root, "4:memory:/host/path\n", "memory"), [root]);
    }

    #[test]
    fn what_cannot_fit_is_refused_by_numbers() {
        let error = check(1 << 50).unwrap_err().to_string();
        assert!(error.contains("1125899906842624") && error.contains("batch_slots"), "{error}");
        check(4096).unwrap();
    }
}
