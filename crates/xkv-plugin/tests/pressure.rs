//! More work than there are slots, room or patience for: everything is answered, in the end everything goes through.

// The clone also makes it a `dyn Device`.
#![allow(clippy::cloned_ref_to_slice_refs)]

mod common;

use std::time::{Duration, Instant};

use common::{Client, FRAGMENT, MIB, Memory, Via, config, contents, memory_drives};
use xkv_plugin::Config;
use xkv_store::io::device::testing::{Calls, MemoryDevice, StallDevice};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn one_slot_serves_loads_and_stores_at_the_same_time() {
    let mut client = Client::on(Via::Embedded, &memory_drives(2, 16 * MIB), 1, config());
    let size = 7 * FRAGMENT + 5;
    assert!(client.put("a", 1, size));
    let targets = [Memory::blank(size), Memory::blank(size)];
    let loads = [client.get(&["a"], &targets[..1]), client.get(&["a"], &targets[1..])];
    let stores: Vec<u64> =
        (2..6).map(|seed| client.set(&[&seed.to_string()], &[Memory::new(&contents(seed, size))])).collect();
    for id in loads {
        assert_eq!(client.results(id), [true]);
    }
    for id in stores {
        assert!(client.ok(id));
    }
    assert!(targets.iter().all(|target| target.bytes() == contents(1, size)));
    for seed in 2..6 {
        assert_eq!(client.load(&seed.to_string(), size), Some(contents(seed, size)));
    }
}

#[test]
fn one_set_of_three_times_the_capacity_makes_room_as_it_goes() {
    let mut client = Client::on(Via::Embedded, &memory_drives(1, 16 * MIB), 16, config());
    let slots = client.store_stats()["slots_total"].as_u64().unwrap();
    let objects = 3 * slots / 4;
    let names: Vec<String> = (0..objects).map(|i| i.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let memory: Vec<Memory> = (0..objects).map(|i| Memory::new(&contents(i, 4 * FRAGMENT))).collect();
    let id = client.set(&names, &memory);
    assert!(client.ok(id), "{}", client.connector.stats());
    assert!(client.store_stats()["slots_used"].as_u64().unwrap() <= slots);
    let present = client.present(&names);
    assert!(!present[0] && present[objects as usize - 1]);
    let mut loaded = 0;
    for (i, _) in present.iter().enumerate().filter(|(_, present)| **present) {
        match client.load(names[i], 4 * FRAGMENT) {
            Some(bytes) => {
                assert_eq!(bytes, contents(i as u64, 4 * FRAGMENT));
                loaded += 1;
            }
            // The evictor was still at the last round that the set asked for.
            None => assert_eq!(client.present(&[names[i]]), [false]),
        }
    }
    assert!(loaded * 4 > slots / 2, "{loaded} of {objects}");
}

/// Loads that never end hold every object: nothing can be evicted. Stores are refused, or go through afterwards.
#[test]
fn a_full_store_of_objects_in_use_refuses_and_recovers() {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let patient = Config { wait_timeout: SOON, store_deadline: Duration::from_millis(500), ..config() };
    let mut client = Client::on(Via::Embedded, &[drive.clone()], 4096, patient);
    let size = 64 * FRAGMENT;
    let mut held = 0;
    while client.store_stats()["evicted"] == 0 {
        assert!(client.put(&format!("held {held}"), held, size));
        held += 1;
    }
    drive.stall(Calls::READS);
    let present: Vec<u64> = (0..held).filter(|i| client.present(&[&format!("held {i}")]) == [true]).collect();
    let targets: Vec<(u64, Memory)> = present.iter().map(|&i| (i, Memory::blank(size))).collect();
    let loads: Vec<u64> =
        targets.iter().map(|(i, target)| client.get(&[&format!("held {i}")], &[*target])).collect();
    assert!(drive.await_waiting(1, SOON));
    let started = Instant::now();
    let stores: Vec<u64> =
        (0..8).map(|i| client.set(&[&format!("new {i}")], &[Memory::new(&contents(i, size))])).collect();
    let stored: Vec<bool> = stores.into_iter().map(|id| client.ok(id)).collect();
    assert!(stored.contains(&false), "some had no room: {}", client.connector.stats());
    assert!(started.elapsed() < Duration::from_secs(3));
    drive.resume();
    for (id, (i, target)) in loads.into_iter().zip(&targets) {
        if client.results(id) == [true] {
            assert_eq!(target.bytes(), contents(*i, size));
        }
    }
    for i in 0..8 {
        assert!(client.put(&format!("new {i}"), i, size), "there is room again");
    }
    assert_eq!(client.load("new 7", size), Some(contents(7, size)));
}
