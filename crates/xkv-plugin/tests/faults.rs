//! Drives that stall, fail, or come back late: every operation is answered by its deadline, other keys go on, and the
//! drive is used again once it works.

// The clone also makes it a `dyn Device`.
#![allow(clippy::cloned_ref_to_slice_refs)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Client, FRAGMENT, MIB, Memory, Via, both_ways, config, contents, memory_drives};
use xkv_plugin::Config;
use xkv_store::io::Device;
use xkv_store::io::device::testing::{Calls, Effect, Fault, FaultyDevice, MemoryDevice, StallDevice};

const SOON: Duration = Duration::from_secs(20);

both_ways! {
    at_a_loads_deadline_what_is_done_counts,
    a_stalled_drive_does_not_take_the_slots_of_the_others,
    a_store_past_its_deadline_is_refused_and_leaves_nothing,
    a_read_error_is_a_miss_for_that_object_which_the_next_store_repairs,
    a_write_error_fails_the_set_and_leaves_nothing,
    closing_with_a_stuck_drive_is_bounded_and_final,
}

fn quick() -> Config {
    Config { wait_timeout: Duration::from_millis(200), ..config() }
}

/// Two drives, the second of which can stall, and single-fragment objects on each: names by drive.
fn two_drives(via: Via, config: Config) -> (Client, Arc<StallDevice>, [Vec<String>; 2]) {
    let stalling = StallDevice::new(MemoryDevice::named("stalling", 16 * MIB));
    let drives: [Arc<dyn Device>; 2] = [MemoryDevice::named("good", 16 * MIB), stalling.clone()];
    let mut client = Client::on(via, &drives, 16, config);
    let mut names = [Vec::new(), Vec::new()];
    for i in 0..8 {
        let name = format!("{i}");
        assert!(client.put(&name, i, FRAGMENT));
        // The drive shows in whether a read of it gets stuck.
        stalling.stall(Calls::READS);
        let id = client.get(&[&name], &[Memory::blank(FRAGMENT)]);
        let good = client.answer_within(id, Duration::from_millis(100)).is_some_and(|answer| answer.ok);
        stalling.resume();
        if !good {
            client.answer_within(id, SOON);
        }
        names[usize::from(!good)].push(name);
    }
    assert!(names.iter().all(|names| names.len() >= 2), "{names:?}");
    (client, stalling, names)
}

fn seed(name: &str) -> u64 {
    name.parse().unwrap()
}

#[test]
fn a_stalled_drive_costs_its_own_objects_only_and_recovers() {
    let (mut client, drive, [good, bad]) = two_drives(Via::Embedded, quick());
    drive.stall(Calls::ALL);
    let memory = [Memory::blank(FRAGMENT), Memory::blank(FRAGMENT)];
    let started = Instant::now();
    let id = client.get(&[&bad[0], &good[0]], &memory);
    assert_eq!(client.results(id), [false, true]);
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(memory[0].is_stamped());
    assert_eq!(memory[1].bytes(), contents(seed(&good[0]), FRAGMENT));
    // Known as stalled now: misses at once, absent for lookups, refused for stores.
    assert_eq!(client.present(&[&bad[0], &bad[1], &good[1]]), [false, false, true]);
    let started = Instant::now();
    assert_eq!(client.load(&bad[1], FRAGMENT), None);
    assert!(started.elapsed() < Duration::from_millis(150));
    assert_eq!(client.load(&good[1], FRAGMENT), Some(contents(seed(&good[1]), FRAGMENT)));
    assert!(!client.put("on both drives", 1, 4 * FRAGMENT));
    assert!(client.count("load_miss_stalled") >= 2);

    drive.resume();
    let recovered = Instant::now();
    while client.present(&[&bad[0]]) != [true] {
        assert!(recovered.elapsed() < SOON, "the drive is used again");
        std::thread::yield_now();
    }
    for name in &bad {
        assert_eq!(client.load(name, FRAGMENT), Some(contents(seed(name), FRAGMENT)), "nothing was removed");
    }
    assert!(client.put("on both drives", 1, 4 * FRAGMENT));
    assert!(memory[0].is_stamped(), "the late read did not reach the buffer");
}

fn a_stalled_drive_does_not_take_the_slots_of_the_others(via: Via) {
    let (mut client, drive, [good, bad]) = two_drives(via, Config { wait_timeout: SOON, ..config() });
    drive.stall(Calls::READS);
    // Many more loads from the stalled drive than there are slots.
    let stuck: Vec<u64> =
        (0..64).map(|i| client.get(&[&bad[i % bad.len()]], &[Memory::blank(FRAGMENT)])).collect();
    for i in 0..64 {
        let name = &good[i % good.len()];
        assert_eq!(client.load(name, FRAGMENT), Some(contents(seed(name), FRAGMENT)));
    }
    drive.resume();
    for id in stuck {
        assert_eq!(client.results(id), [true]);
    }
}

fn at_a_loads_deadline_what_is_done_counts(via: Via) {
    let deadline = Duration::from_millis(300);
    let (mut client, drive, [good, bad]) =
        two_drives(via, Config { load_deadline: deadline, wait_timeout: SOON, ..config() });
    drive.stall(Calls::READS);
    let memory = [Memory::blank(FRAGMENT), Memory::blank(FRAGMENT), Memory::blank(FRAGMENT)];
    let started = Instant::now();
    let id = client.get(&[&good[0], &bad[0], &good[1]], &memory);
    assert_eq!(client.results(id), [true, false, true]);
    assert!((deadline..deadline + Duration::from_secs(2)).contains(&started.elapsed()));
    assert_eq!(memory[0].bytes(), contents(seed(&good[0]), FRAGMENT));
    assert!(memory[1].is_stamped());
    assert_eq!(client.count("load_miss_deadline"), 1);
    drive.resume();
    assert_eq!(client.load(&bad[0], FRAGMENT), Some(contents(seed(&bad[0]), FRAGMENT)), "still there");
    assert!(memory[1].is_stamped(), "the late read did not reach the buffer");
}

fn a_store_past_its_deadline_is_refused_and_leaves_nothing(via: Via) {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let deadline = Duration::from_millis(300);
    let mut client = Client::on(
        via,
        &[drive.clone()],
        16,
        Config { store_deadline: deadline, wait_timeout: SOON, ..config() },
    );
    drive.stall(Calls::WRITES);
    let memory = Memory::new(&contents(1, 40 * FRAGMENT));
    let started = Instant::now();
    let (first, joined) = (client.set(&["a"], &[memory]), client.set(&["a"], &[memory]));
    assert!(!client.ok(first) && !client.ok(joined));
    assert!((deadline..deadline + Duration::from_secs(2)).contains(&started.elapsed()));
    assert_eq!(client.count("store_too_old"), 2);
    drive.resume();
    assert!(client.put("a", 1, 40 * FRAGMENT), "the next store goes through");
    assert_eq!(client.load("a", 40 * FRAGMENT), Some(contents(1, 40 * FRAGMENT)));
    assert_eq!(client.store_stats()["slots_used"], 40);
}

#[test]
fn a_delete_that_the_drive_does_not_answer_ends_at_its_deadline() {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let mut client = Client::on(Via::Embedded, &[drive.clone()], 16, quick());
    assert!(client.put("a", 1, 5000));
    drive.stall(Calls::ALL);
    let started = Instant::now();
    let id = client.delete(&["a"]);
    assert_eq!(client.results(id), [false]);
    assert!(started.elapsed() < Duration::from_secs(2));
    assert_eq!(client.present(&["a"]), [false]);
    drive.resume();
    assert!(client.put("a", 2, 5000));
    assert_eq!(client.load("a", 5000), Some(contents(2, 5000)));
}

fn a_read_error_is_a_miss_for_that_object_which_the_next_store_repairs(via: Via) {
    let drive = FaultyDevice::new(MemoryDevice::new(16 * MIB));
    let mut client = Client::on(via, &[drive.clone()], 16, config());
    assert!(client.put("a", 1, 10 * FRAGMENT) && client.put("b", 2, 10 * FRAGMENT));
    drive.inject(Fault { times: 1, ..Fault::every(Calls::READS, Effect::Errno(libc::EIO)) });
    let memory = [Memory::blank(10 * FRAGMENT), Memory::blank(10 * FRAGMENT)];
    let id = client.get(&["a", "b"], &memory);
    let mut results = client.results(id);
    results.sort();
    assert_eq!(results, [false, true], "one fragment of one object failed");
    assert_eq!((client.count("load_miss_io_error"), client.count("discarded")), (1, 1));
    assert!(client.put("a", 1, 10 * FRAGMENT) && client.put("b", 2, 10 * FRAGMENT));
    assert_eq!(client.load("a", 10 * FRAGMENT), Some(contents(1, 10 * FRAGMENT)));
    assert_eq!(client.load("b", 10 * FRAGMENT), Some(contents(2, 10 * FRAGMENT)));
}

fn a_write_error_fails_the_set_and_leaves_nothing(via: Via) {
    for (errno, outcome) in [(libc::EIO, "store_failed"), (libc::ENOSPC, "store_rejected_by_card")] {
        let drive = FaultyDevice::new(MemoryDevice::new(16 * MIB));
        let mut client = Client::on(via, &[drive.clone()], 16, config());
        drive.inject(Fault { after: 3, times: 1, ..Fault::every(Calls::WRITES, Effect::Errno(errno)) });
        assert!(!client.put("a", 1, 10 * FRAGMENT));
        assert_eq!(client.count(outcome), 1);
        assert_eq!(client.present(&["a"]), [false]);
        assert!(client.put("a", 1, 10 * FRAGMENT));
        assert_eq!(client.load("a", 10 * FRAGMENT), Some(contents(1, 10 * FRAGMENT)));
        assert_eq!(client.store_stats()["slots_used"], 10);
    }
}

#[test]
fn a_lying_drive_is_a_miss_never_wrong_bytes() {
    let drive = FaultyDevice::new(MemoryDevice::new(16 * MIB));
    let mut client = Client::on(Via::Embedded, &[drive.clone()], 16, config());
    assert!(client.put("a", 1, 10 * FRAGMENT));
    drive.inject(Fault { after: 4, times: 1, ..Fault::every(Calls::READS, Effect::Lie) });
    assert_eq!(client.load("a", 10 * FRAGMENT), None);
    assert_eq!((client.count("load_miss_not_verified"), client.count("discarded")), (1, 1));
    assert_eq!(client.present(&["a"]), [false]);
}

/// Closing answers what is open, gives the owners back, and nothing reaches a buffer afterwards.
fn closing_with_a_stuck_drive_is_bounded_and_final(via: Via) {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let mut client = Client::on(via, &[drive.clone()], 16, config());
    assert!(client.put("a", 1, 10 * FRAGMENT));
    drive.stall(Calls::ALL);
    let memory = Memory::blank(10 * FRAGMENT);
    let owner = Arc::new(());
    let get =
        client.connector.submit_get(vec![b"a".to_vec()], vec![memory.buffer()], Box::new(owner.clone()));
    let source = Memory::new(&contents(2, 5000));
    let set = client.set(&["b"], &[source]);
    let delete = client.delete(&["a"]);
    assert!(drive.await_waiting(2, SOON));

    let started = Instant::now();
    let owners = client.connector.close();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(Arc::strong_count(&owner), 2, "handed out, not dropped");
    drop(owners);
    assert_eq!(Arc::strong_count(&owner), 1);
    assert_eq!(client.results(get), [false]);
    assert!(!client.ok(set));
    assert_eq!(client.results(delete), [false]);

    let before = memory.bytes().to_vec();
    drive.resume();
    assert!(client.connector.close().is_empty(), "again");
    let id = client.exists(&["a"]);
    assert_eq!(client.results(id), [false]);
    let id = client.get(&["a"], &[Memory::blank(100)]);
    assert_eq!(client.results(id), [false]);
    let id = client.set(&["c"], &[source]);
    assert!(!client.ok(id));
    assert_eq!(memory.bytes(), before);
}

#[test]
fn two_connectors_in_one_process_know_each_others_unfilled_buffers() {
    let mut one = Client::on(Via::Embedded, &memory_drives(1, 16 * MIB), 16, config());
    let mut two = Client::on(Via::Embedded, &memory_drives(1, 16 * MIB), 16, config());
    let memory = Memory::blank(5000);
    let id = one.get(&["a"], &[memory]);
    assert_eq!(one.results(id), [false]);
    let id = two.set(&["a"], &[memory]);
    assert!(!two.ok(id));
    assert_eq!(two.count("store_poisoned"), 1);
}
