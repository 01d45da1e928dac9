//! What a set does beside writing: skip, join, drop, reject, refuse poison, give way to a delete.

// The clone also makes it a `dyn Device`.
#![allow(clippy::cloned_ref_to_slice_refs)]

mod common;

use std::time::Duration;

use common::{Client, FRAGMENT, MIB, Memory, Via, both_ways, config, contents, memory_drives};
use xkv_plugin::Config;
use xkv_store::io::device::testing::{Calls, MemoryDevice, StallDevice};

const SOON: Duration = Duration::from_secs(20);

both_ways! {
    a_present_object_is_skipped_and_never_replaced,
    a_key_that_is_being_stored_is_joined_in_the_same_batch_and_from_another,
    what_exceeds_the_backlog_is_dropped_at_once_and_the_rest_stored,
    three_times_the_capacity_evicts_the_oldest_and_keeps_the_newest,
    an_object_larger_than_the_store_is_rejected,
    a_failed_loads_buffer_is_refused_as_a_store_until_it_was_filled,
    a_delete_ends_the_store_before_it_and_not_the_one_after,
    deletes_of_present_and_absent_keys_are_answered_true_and_hold,
}

fn a_present_object_is_skipped_and_never_replaced(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    assert!(client.put("a", 1, 5000));
    assert!(client.put("a", 2, 5000));
    assert_eq!(client.load("a", 5000), Some(contents(1, 5000)));
    assert_eq!((client.count("store_stored"), client.count("store_skipped")), (1, 1));
}

fn a_key_that_is_being_stored_is_joined_in_the_same_batch_and_from_another(via: Via) {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let mut client = Client::on(via, &[drive.clone()], 16, config());
    drive.stall(Calls::WRITES);
    let memory = Memory::new(&contents(1, 5000));
    let first = client.set(&["a", "a", "b"], &[memory, memory, memory]);
    assert!(drive.await_waiting(1, SOON));
    let second = client.set(&["a"], &[memory]);
    assert_eq!(client.present(&["a", "b"]), [false, false], "not before the manifest");
    assert_eq!(client.load("a", 5000), None, "a load of a key still being stored is a miss");
    drive.resume();
    assert!(client.ok(first) && client.ok(second));
    assert_eq!((client.count("store_stored"), client.count("store_deduped")), (2, 2));
    assert_eq!(client.store_stats()["committed"], 2);
}

fn what_exceeds_the_backlog_is_dropped_at_once_and_the_rest_stored(via: Via) {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let limit = Config { max_pending_store_bytes: 3 * 5000, ..config() };
    let mut client = Client::on(via, &[drive.clone()], 16, limit);
    drive.stall(Calls::WRITES);
    let memory = Memory::new(&contents(1, 5000));
    let slow = client.set(&["a", "b"], &[memory; 2]);
    let partly = client.set(&["c", "d", "e"], &[memory; 3]);
    let dropped = client.set(&["f"], &[memory]);
    let answer = client.answer_within(dropped, SOON).expect("answered while the drive stalls");
    assert!(!answer.ok);
    drive.resume();
    assert!(client.ok(slow));
    assert!(!client.ok(partly));
    assert_eq!(client.count("store_dropped"), 3);
    assert_eq!(client.present(&["a", "b", "c", "d", "e", "f"]), [true, true, true, false, false, false]);
    assert!(client.put("f", 1, 5000), "the backlog is gone");
}

fn three_times_the_capacity_evicts_the_oldest_and_keeps_the_newest(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    let slots = client.store_stats()["slots_total"].as_u64().unwrap();
    let objects = 3 * slots / 4;
    for i in 0..objects {
        assert!(client.put(&format!("{i}"), i, 4 * FRAGMENT), "object {i}");
        assert!(client.store_stats()["slots_used"].as_u64().unwrap() <= slots);
    }
    let newest = objects - 1;
    assert_eq!(client.load(&format!("{newest}"), 4 * FRAGMENT), Some(contents(newest, 4 * FRAGMENT)));
    assert_eq!(client.present(&["0"]), [false]);
}

fn an_object_larger_than_the_store_is_rejected(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    assert!(!client.put("large", 1, 32 << 20));
    assert_eq!(client.count("store_rejected_by_card"), 1);
    assert!(client.put("small", 1, 5000));
}

/// LMCache 0.5.4 hands the unfilled buffer of a failed load back as a store under the same key.
fn a_failed_loads_buffer_is_refused_as_a_store_until_it_was_filled(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    let mut memory = Memory::blank(5000);
    let id = client.get(&["a"], &[memory]);
    assert_eq!(client.results(id), [false]);

    let fresh = Memory::new(&contents(2, 5000));
    let id = client.set(&["a", "b"], &[memory, fresh]);
    assert_eq!(
        client.connector.drain().iter().map(|answer| answer.id).collect::<Vec<_>>(),
        [id],
        "inside submit"
    );
    assert_eq!(client.count("store_poisoned"), 1);
    assert_eq!(client.present(&["a", "b"]), [false, false]);

    memory.write(&contents(1, 5000));
    let id = client.set(&["a"], &[memory]);
    assert!(client.ok(id), "a recomputed object under the same key and address");
    assert_eq!(client.load("a", 5000), Some(contents(1, 5000)));
}

fn a_delete_ends_the_store_before_it_and_not_the_one_after(via: Via) {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let mut client = Client::on(via, &[drive.clone()], 16, config());
    drive.stall(Calls::WRITES);
    let (old, new) = (Memory::new(&contents(1, 5000)), Memory::new(&contents(2, 5000)));
    let before = client.set(&["a"], &[old]);
    let joined = client.set(&["a"], &[old]);
    assert!(drive.await_waiting(1, SOON));
    let delete = client.delete(&["a"]);
    let after = client.set(&["a"], &[new]);
    assert!(!client.ok(before) && !client.ok(joined));
    assert_eq!(client.count("store_deleted"), 2);
    drive.resume();
    assert_eq!(client.results(delete), [true]);
    assert!(client.ok(after));
    assert_eq!(client.load("a", 5000), Some(contents(2, 5000)));
}

fn deletes_of_present_and_absent_keys_are_answered_true_and_hold(via: Via) {
    let drives = memory_drives(1, 16 * MIB);
    let mut client = Client::on(via, &drives, 16, config());
    assert!(client.put("a", 1, 5000));
    let id = client.delete(&["a", "absent", "a"]);
    assert_eq!(client.results(id), [true; 3]);
    assert_eq!(client.load("a", 5000), None);
    drop(client);
    let mut client = Client::on(via, &drives, 16, config());
    assert_eq!(client.present(&["a"]), [false]);
}
