//! A gateway that comes, goes, freezes or refuses: every operation is answered in time, no first one fails for an idle
//! restart, and what comes late lands nowhere.

// The clone also makes it a `dyn Device`.
#![allow(clippy::cloned_ref_to_slice_refs)]

mod common;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Client, FRAGMENT, MIB, Memory, Rig, config, contents, memory_drives};
use xkv_plugin::{Config, Gateway};
use xkv_store::StoreConfig;
use xkv_store::io::Device;
use xkv_store::io::device::testing::{Calls, MemoryDevice, StallDevice};

const SOON: Duration = Duration::from_secs(20);

fn quick() -> Config {
    Config { wait_timeout: Duration::from_millis(400), ..config() }
}

fn session(client: &Client, field: &str) -> serde_json::Value {
    client.connector.stats()["session"][field].clone()
}

fn await_state(client: &Client, state: &str) {
    await_that(state, || session(client, "state") == state);
}

fn await_that(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < SOON, "not within {SOON:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn no_first_operation_fails_for_a_restart_while_idle() {
    let mut rig = Rig::on(&memory_drives(2, 32 * MIB));
    let mut client = Client::of(&rig, 16, config());
    assert!(client.put("a", 1, 10_000));
    // Each operation first, and all at once; submitted after the start, and while nobody listens.
    for round in 0..10 {
        let late = round % 2 == 1;
        rig.stop();
        if !late {
            rig.start();
        }
        let (source, target) = (Memory::new(&contents(round, 9000)), Memory::blank(10_000));
        let name = format!("new {round}");
        let mut ids = [None; 4];
        for i in (0..4).map(|i| (i + round as usize / 2) % 4) {
            ids[i] = Some(match i {
                0 => client.set(&[&name], &[source]),
                1 => client.get(&["a"], &[target]),
                2 => client.exists(&["a", "none"]),
                _ => client.delete(&["none"]),
            });
        }
        if late {
            await_state(&client, "lost");
            rig.start();
        }
        let [set, get, exists, delete] = ids.map(Option::unwrap);
        assert!(client.ok(set), "{}", client.connector.stats());
        assert_eq!(client.results(get), [true]);
        assert_eq!(target.bytes(), contents(1, 10_000));
        assert_eq!(client.results(exists), [true, false]);
        assert_eq!(client.results(delete), [true]);
        assert_eq!(client.load(&name, 9000), Some(contents(round, 9000)));
    }
    assert_eq!(session(&client, "reopened"), 10);
    assert_eq!(session(&client, "unanswered"), 0);
}

#[test]
fn operations_wait_for_a_lost_gateway_once_and_not_longer_than_wait_timeout() {
    let mut rig = Rig::on(&memory_drives(1, 16 * MIB));
    let patience = Duration::from_millis(600);
    let mut client = Client::of(&rig, 16, Config { wait_timeout: patience, ..config() });
    assert!(client.put("a", 1, 5000));
    rig.stop();
    await_state(&client, "lost");
    let started = Instant::now();
    let target = Memory::blank(5000);
    let (get, set) = (client.get(&["a"], &[target]), client.set(&["b"], &[Memory::new(&contents(2, 5000))]));
    let (exists, delete) = (client.exists(&["a"]), client.delete(&["a"]));
    assert!(client.answer_within(get, Duration::from_millis(50)).is_none(), "it waits");
    assert_eq!(client.results(get), [false]);
    assert!(!client.ok(set));
    assert_eq!(client.results(exists), [false]);
    assert_eq!(client.results(delete), [false]);
    assert!(started.elapsed() < patience + Duration::from_millis(400), "{:?}", started.elapsed());
    assert!(target.is_stamped());
    assert_eq!((client.count("load_miss_unreachable"), client.count("store_unreachable")), (1, 1));
    // Nobody waits any more.
    let started = Instant::now();
    for _ in 0..10 {
        assert_eq!(client.load("a", 5000), None);
        assert_eq!(client.present(&["a"]), [false]);
        assert!(!client.put("b", 2, 5000));
    }
    assert!(started.elapsed() < patience / 2, "{:?}", started.elapsed());
    rig.start();
    await_state(&client, "open");
    assert_eq!(client.load("a", 5000), Some(contents(1, 5000)));
    assert!(client.put("b", 2, 5000));
}

#[test]
fn a_gateway_that_comes_later_is_picked_up() {
    let mut rig = Rig::stopped(&memory_drives(3, 32 * MIB));
    let started = Instant::now();
    let mut client = Client::of(&rig, 16, config());
    assert!(!client.put("a", 1, 50_000));
    assert_eq!(client.load("a", 50_000), None);
    assert_eq!(client.present(&["a"]), [false]);
    let id = client.delete(&["a"]);
    assert_eq!(client.results(id), [false], "nobody knows");
    assert!(started.elapsed() < Duration::from_secs(1), "without a wait: {:?}", started.elapsed());
    assert!(session(&client, "reason").as_str().unwrap().contains("xkv gateway serve"));
    rig.start();
    await_state(&client, "open");
    assert!(client.put("a", 1, 50_000));
    assert_eq!(client.load("a", 50_000), Some(contents(1, 50_000)));
}

#[test]
fn a_listener_that_never_answers_holds_nobody_up() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut rig = Rig::stopped(&memory_drives(1, 16 * MIB));
    rig.config.listen = vec![silent.local_addr().unwrap()];
    let started = Instant::now();
    let mut client = Client::of(&rig, 16, quick());
    assert!(started.elapsed() < Duration::from_secs(2));
    assert_eq!(client.load("a", 100), None);
    let closing = Instant::now();
    client.connector.close();
    assert!(closing.elapsed() < Duration::from_secs(1), "{:?}", closing.elapsed());
}

#[test]
fn a_frozen_gateway_costs_one_wait_and_late_data_lands_nowhere() {
    let drive = StallDevice::new(MemoryDevice::new(32 * MIB));
    let rig = Rig::on(&[drive.clone()]);
    let mut client = Client::of(&rig, 16, quick());
    let names: Vec<String> = (0..8).map(|i| i.to_string()).collect();
    for (i, name) in names.iter().enumerate() {
        assert!(client.put(name, i as u64, 5 * FRAGMENT));
    }
    drive.stall(Calls::ALL);
    let targets: Vec<Memory> = names.iter().map(|_| Memory::blank(5 * FRAGMENT)).collect();
    let started = Instant::now();
    let ids: Vec<u64> =
        names.iter().zip(&targets).map(|(name, target)| client.get(&[name], &[*target])).collect();
    let source = Memory::new(&contents(99, 5 * FRAGMENT));
    // No delete: it is committed at once, and a gateway that is flushing is no frozen one.
    let set = client.set(&["new"], &[source]);
    for id in ids {
        assert_eq!(client.results(id), [false]);
    }
    assert!(!client.ok(set));
    assert!(started.elapsed() < quick().wait_timeout * 3, "{:?}", started.elapsed());
    let unfilled: Vec<Vec<u8>> = targets.iter().map(|target| target.bytes().to_vec()).collect();
    assert!(targets.iter().all(Memory::is_stamped));

    drive.resume();
    await_state(&client, "open");
    for (i, name) in names.iter().enumerate() {
        await_that("hits again", || {
            client.load(name, 5 * FRAGMENT) == Some(contents(i as u64, 5 * FRAGMENT))
        });
    }
    for (target, before) in targets.iter().zip(&unfilled) {
        assert_eq!(target.bytes(), before, "the late read did not reach the buffer");
    }
    assert_eq!(source.bytes(), contents(99, 5 * FRAGMENT));
    await_that("stores again", || client.put("new", 99, 5 * FRAGMENT));
    assert_eq!(client.load("new", 5 * FRAGMENT), Some(contents(99, 5 * FRAGMENT)));
}

#[test]
fn a_lost_session_is_opened_again_at_once() {
    let drive = StallDevice::new(MemoryDevice::new(32 * MIB));
    let rig = Rig::on(&[drive.clone()]);
    let never = Duration::from_secs(3600);
    let backend = Gateway::open(rig.client_config(16, &quick()), never).unwrap();
    let mut client = Client::over(Arc::new(backend), quick());
    assert!(client.put("a", 1, 5000));
    drive.stall(Calls::READS);
    assert_eq!(client.load("a", 5000), None);
    await_that("without a pause", || session(&client, "reopened") == 1);
    drive.resume();
    await_that("hits again", || client.load("a", 5000) == Some(contents(1, 5000)));
    assert_eq!(session(&client, "lost"), 1);
}

/// Stalled means silent for `wait_timeout`, by drive, as long as the gateway has something else to do.
#[test]
fn a_stalled_drive_of_a_busy_gateway_costs_its_own_objects_only() {
    let stalling = StallDevice::new(MemoryDevice::named("stalling", 16 * MIB));
    let drives: [Arc<dyn Device>; 2] = [MemoryDevice::named("good", 16 * MIB), stalling.clone()];
    let rig = Rig::on(&drives);
    let mut client = Client::of(&rig, 32, quick());
    let names: Vec<String> = (0..8).map(|i| i.to_string()).collect();
    for (i, name) in names.iter().enumerate() {
        assert!(client.put(name, i as u64, FRAGMENT));
    }
    stalling.stall(Calls::ALL);
    let targets: Vec<Memory> = names.iter().map(|_| Memory::blank(FRAGMENT)).collect();
    let ids: Vec<u64> =
        names.iter().zip(&targets).map(|(name, target)| client.get(&[name], &[*target])).collect();
    let mut loaded = Vec::new();
    for id in ids {
        // Lookups meanwhile are the gateway's other signs of life.
        loaded.push(loop {
            if let Some(answer) = client.answer_within(id, Duration::from_millis(5)) {
                break answer.results.unwrap() == [true];
            }
            client.present(&["0"]);
        });
    }
    let good: Vec<&String> =
        names.iter().zip(&loaded).filter(|(_, loaded)| **loaded).map(|(n, _)| n).collect();
    let bad: Vec<&String> =
        names.iter().zip(&loaded).filter(|(_, loaded)| !**loaded).map(|(n, _)| n).collect();
    assert!(!good.is_empty() && !bad.is_empty(), "{loaded:?}");
    assert_eq!(client.count("load_miss_stalled"), bad.len() as u64);
    assert_eq!(client.present(&[good[0], bad[0]]), [true, false]);
    assert_eq!(client.load(bad[0], FRAGMENT), None);
    assert!(!client.put("on both", 1, 4 * FRAGMENT));
    assert_eq!(session(&client, "lost"), 0);
    stalling.resume();
    for (i, name) in names.iter().enumerate() {
        await_that("the drive is used again", || {
            client.load(name, FRAGMENT) == Some(contents(i as u64, FRAGMENT))
        });
    }
    await_that("stores on both", || client.put("on both", 1, 4 * FRAGMENT));
}

#[test]
fn lookups_find_a_slot_while_loads_hold_all_they_may() {
    let drive = StallDevice::new(MemoryDevice::new(32 * MIB));
    let rig = Rig::on(&[drive.clone()]);
    for slots in [2, 3, 64] {
        let mut client = Client::of(&rig, slots, Config { wait_timeout: SOON, ..config() });
        assert!(client.put("a", 1, 200 * FRAGMENT));
        drive.stall(Calls::READS);
        let stuck: Vec<u64> = (0..8).map(|_| client.get(&["a"], &[Memory::blank(200 * FRAGMENT)])).collect();
        assert!(drive.await_waiting(1, SOON));
        let names: Vec<String> = (0..1000).map(|i| i.to_string()).collect();
        let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
        names.push("a");
        let started = Instant::now();
        let present = client.present(&names);
        assert!(started.elapsed() < Duration::from_secs(5), "{slots} slots");
        assert_eq!(present.iter().filter(|&&present| present).count(), 1);
        assert!(present[1000], "in the last of several slots");
        drive.resume();
        for id in stuck {
            assert_eq!(client.results(id), [true]);
        }
    }
}

#[test]
fn a_key_longer_than_a_slot_is_absent_and_cannot_be_stored() {
    let rig = Rig::on(&memory_drives(1, 16 * MIB));
    let mut client = Client::of(&rig, 16, config());
    let (fits, long) = ("k".repeat(FRAGMENT - 8), "k".repeat(FRAGMENT - 7));
    assert!(client.put(&fits, 1, 5000));
    assert_eq!(client.load(&fits, 5000), Some(contents(1, 5000)));
    assert!(!client.put(&long, 1, 5000));
    assert_eq!(client.load(&long, 5000), None);
    assert_eq!(client.present(&[&fits, &long]), [true, false]);
    let id = client.delete(&[&long, &fits]);
    assert_eq!(client.results(id), [false, true]);
    assert_eq!(client.count("store_rejected_by_card"), 1);
    assert_eq!(session(&client, "keys_too_long"), 3);
}

#[test]
fn the_gateway_may_grant_fewer_slots_than_wanted() {
    let mut rig = Rig::stopped(&memory_drives(2, 32 * MIB));
    rig.config.max_slots = 3;
    rig.start();
    let mut client = Client::of(&rig, 1000, config());
    let id = client
        .set(&["a", "b"], &[Memory::new(&contents(1, MIB as usize)), Memory::new(&contents(2, 100_000))]);
    assert!(client.ok(id));
    assert_eq!(client.load("a", MIB as usize), Some(contents(1, MIB as usize)));
    assert_eq!(client.load("b", 100_000), Some(contents(2, 100_000)));
    assert_eq!(client.connector.stats()["queue"]["slots"], 2, "one is for questions");
    rig.stop();
    rig.config.max_slots = 1;
    rig.start();
    await_that("refused by name", || session(&client, "reason").as_str().unwrap().contains("grants 1 slots"));
    assert_eq!(client.load("a", 100), None);
}

#[test]
fn wrong_settings_fail_the_constructor_with_the_gateways_reason() {
    let mut rig = Rig::stopped(&memory_drives(1, 16 * MIB));
    rig.config.token = Some("secret".into());
    rig.start();
    let open = |change: fn(&mut xkv_plugin::ClientConfig)| {
        let mut client = rig.client_config(16, &config());
        change(&mut client);
        Gateway::open(client, Duration::from_millis(50)).map(drop)
    };
    open(|_| ()).unwrap();
    let error = open(|client| client.token = None).unwrap_err();
    assert!(error.to_string().contains("token"), "{error}");
    let error = open(|client| client.token = Some("guess".into())).unwrap_err();
    assert!(error.to_string().contains("token"), "{error}");
    let error = open(|client| client.fragment_bytes = Some(8192)).unwrap_err();
    assert!(error.to_string().contains("fragment_bytes=4096"), "{error}");
    // Not for good: it starts without.
    open(|client| client.shm_dir = "/proc".into()).unwrap();
}

#[test]
fn another_store_is_used_and_another_fragment_size_waited_out() {
    let (first, second) = (memory_drives(2, 16 * MIB), memory_drives(1, 16 * MIB));
    let larger: Vec<Arc<dyn Device>> = memory_drives(3, 32 * MIB);
    let mut rig = Rig::on(&first);
    let mut client = Client::of(&rig, 16, config());
    assert!(client.put("a", 1, 50_000));
    rig.stop();
    rig.drives = second;
    rig.start();
    assert_eq!(client.load("a", 50_000), None, "another store");
    assert!(client.put("a", 2, 50_000));
    assert_eq!(client.load("a", 50_000), Some(contents(2, 50_000)));
    rig.stop();
    let small = std::mem::replace(&mut rig.drives, larger);
    rig.store_config = StoreConfig { fragment_bytes: Some(8192), ..rig.store_config };
    rig.start();
    await_that("refused by name", || {
        session(&client, "reason").as_str().unwrap().contains("fragment_bytes=8192")
    });
    let started = Instant::now();
    assert_eq!(client.load("a", 50_000), None);
    assert!(!client.put("b", 1, 5000));
    assert!(started.elapsed() < Duration::from_secs(1), "waiting is of no use: {:?}", started.elapsed());
    rig.stop();
    rig.drives = small;
    rig.store_config.fragment_bytes = None;
    rig.start();
    await_state(&client, "open");
    assert_eq!(client.load("a", 50_000), Some(contents(2, 50_000)));
}

#[test]
fn two_connectors_store_and_load_the_same_keys_at_once() {
    let rig = Rig::on(&memory_drives(2, 64 * MIB));
    let run = |seed: usize| {
        let mut client = Client::of(&rig, 32, config());
        let sets: Vec<u64> = (0..100)
            .map(|i| {
                let n = (i * 7 + seed * 13) % 100;
                client.set(&[&n.to_string()], &[Memory::new(&contents(n as u64, 20_000))])
            })
            .collect();
        for id in sets {
            let answer = client.answer(id);
            assert!(answer.ok, "{}", answer.error);
        }
        for n in 0..100 {
            assert_eq!(client.load(&n.to_string(), 20_000), Some(contents(n, 20_000)));
        }
        client.count("store_stored") + client.count("store_skipped")
    };
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3).map(|seed| scope.spawn(move || run(seed))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert_eq!(counts, [100; 3]);
    assert_eq!(rig.status()["committed"], 100, "never written twice");
    await_that("all sessions are gone", || rig.status()["sessions"].as_array().unwrap().is_empty());
}

#[test]
fn closing_ends_the_session_and_is_bounded_with_a_frozen_drive() {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let rig = Rig::on(&[drive.clone()]);
    let mut client = Client::of(&rig, 16, config());
    assert!(client.put("a", 1, 5000));
    drive.stall(Calls::READS);
    let target = Memory::blank(5000);
    let get = client.get(&["a"], &[target]);
    assert!(drive.await_waiting(1, SOON));
    let started = Instant::now();
    client.connector.close();
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(client.results(get), [false]);
    let before = target.bytes().to_vec();
    await_that("the gateway knows", || rig.status()["sessions"].as_array().unwrap().is_empty());
    drive.resume();
    assert_eq!(client.load("a", 5000), None);
    assert_eq!(client.present(&["a"]), [false]);
    assert!(!client.put("b", 1, 5000));
    let id = client.delete(&["a"]);
    assert_eq!(client.results(id), [false]);
    assert_eq!(session(&client, "state"), "closed");
    assert_eq!(target.bytes(), before);
}
