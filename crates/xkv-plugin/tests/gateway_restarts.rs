//! Fifty restarts of a gateway under a connector that stays: descriptors, threads and session memories are back at the
//! floor afterwards. Alone in its process, which it counts.

mod common;

use std::time::{Duration, Instant};

use common::{Client, FRAGMENT, MIB, Memory, Rig, config, contents, memory_drives};
use xkv_plugin::Config;

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    descriptors: usize,
    threads: usize,
    memories: usize,
}

fn held() -> Held {
    let count = |folder| std::fs::read_dir(folder).expect("/proc is there").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc is there");
    Held {
        descriptors: count("/proc/self/fd"),
        threads: count("/proc/self/task"),
        memories: maps.matches("memfd:xkv-session").count(),
    }
}

fn at_most(held: &Held, floor: &Held) -> bool {
    held.descriptors <= floor.descriptors && held.threads <= floor.threads && held.memories <= floor.memories
}

#[test]
fn fifty_restarts_leave_nothing_behind() {
    let mut rig = Rig::on(&memory_drives(2, 32 * MIB));
    // Some restarts find nothing in flight, some everything; no loss may last for long.
    let mut client = Client::of(&rig, 16, Config { wait_timeout: Duration::from_secs(2), ..config() });
    assert!(client.put("a", 1, 50 * FRAGMENT));
    let floor = held();
    assert_eq!(floor.memories, 2, "one session, both sides in this process");
    for round in 0..50 {
        let busy = round % 2 == 1;
        let targets: Vec<Memory> = (0..8).map(|_| Memory::blank(50 * FRAGMENT)).collect();
        let name = format!("{round}");
        let mut ids = Vec::new();
        if busy {
            ids.extend(targets.iter().map(|target| client.get(&["a"], &[*target])));
            ids.push(client.set(&[&name], &[Memory::new(&contents(round, 50 * FRAGMENT))]));
            ids.push(client.delete(&["none"]));
        }
        rig.stop();
        rig.start();
        for id in ids {
            client.answer(id);
        }
        let started = Instant::now();
        while client.load("a", 50 * FRAGMENT) != Some(contents(1, 50 * FRAGMENT)) {
            assert!(busy, "an idle restart costs nothing");
            assert!(started.elapsed() < Duration::from_secs(20), "{}", client.connector.stats());
        }
    }
    let started = Instant::now();
    while !at_most(&held(), &floor) {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}, at first {floor:?}", held());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(client.connector.stats()["session"]["reopened"], 50);
    assert_eq!(client.connector.stats()["queue"]["slots_free"], 16);
    client.connector.close();
    drop(client);
    let started = Instant::now();
    while held().memories > 0 || !rig.status()["sessions"].as_array().expect("a list").is_empty() {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", held());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(std::fs::read_dir(rig.folder.path()).expect("a folder").count(), 0);
}
