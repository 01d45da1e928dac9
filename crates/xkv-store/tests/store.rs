//! The store's promises on healthy drives: what was acknowledged is there, byte for byte, also after a restart;
//! usage is the sum of the live objects; capacity is kept.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use xkv_store::io::Device;
use xkv_store::io::device::testing::MemoryDevice;
use xkv_store::{Begin, Store, StoreConfig};

fn memory(sizes: &[u64]) -> Vec<Arc<dyn Device>> {
    sizes.iter().map(|&size| MemoryDevice::new(size) as Arc<dyn Device>).collect()
}

#[test]
fn objects_of_every_size_come_back_also_after_a_restart() {
    for drives in [&[256 * MIB][..], &[96 * MIB, 200 * MIB, 64 * MIB]] {
        let devices = memory(drives);
        let config = StoreConfig { fragment_bytes: Some(131_072), ..config() };
        let sizes = [1, 4095, 4096, 4097, 131_071, 131_072, 131_073, 1 << 20, 14 << 20, (64 << 20) + 3];
        let store = open_on(&devices, &config);
        for (i, &size) in sizes.iter().enumerate() {
            assert!(matches!(put(&store, &key(format!("o{i}")), &contents(i as u64, size)), Put::Stored));
        }
        for reopened in [false, true] {
            let store = if reopened {
                store.close(Duration::from_secs(5));
                open_on(&devices, &config)
            } else {
                store.clone()
            };
            for (i, &size) in sizes.iter().enumerate() {
                let loaded = get(&store, &key(format!("o{i}")));
                assert!(loaded == Get::Data(contents(i as u64, size)), "{size} bytes, reopened: {reopened}");
            }
            let stats = store.stats();
            assert_eq!(stats.objects, sizes.len() as u64);
            assert_eq!(stats.slots_used, slots_of(sizes.iter().map(|&s| s as u64), 131_072));
        }
    }
}

#[test]
fn a_present_object_is_not_written_again_and_a_key_has_one_writer() {
    let store = open_on(&memory(&[16 * MIB]), &config());
    assert!(matches!(put(&store, &key("a"), b"first"), Put::Stored));
    assert!(matches!(put(&store, &key("a"), b"second, longer"), Put::Present));
    assert_eq!(get(&store, &key("a")), Get::Data(b"first".to_vec()));

    let Begin::Txn(txn) = store.begin(&key("b"), 10) else { panic!("b is new") };
    assert!(matches!(store.begin(&key("b"), 10), Begin::Busy));
    assert!(!store.contains(&key("b")) && store.lease(&key("b")).is_none());
    let used = store.stats().slots_used;
    drop(txn);
    assert_eq!(store.stats().slots_used, used - 1, "an aborted transaction gives its slots back");
    assert!(matches!(put(&store, &key("b"), b"again"), Put::Stored));
}

#[test]
fn keys_differ_by_every_byte_and_by_namespace() {
    let store = open_on(&memory(&[16 * MIB]), &config());
    let names = ["m@1@0@aa", "m@1@0@ab", "m@1@0@aa@salt", "../m", "m m", "\u{1F600}", ""];
    for (i, name) in names.iter().enumerate() {
        assert!(matches!(put(&store, &key(name), &[i as u8; 9]), Put::Stored), "{name}");
    }
    let other = xkv_store::ObjectKey::new(&Arc::from(&b"tes"[..]), b"tm@1@0@aa");
    assert!(store.lease(&other).is_none(), "the border between namespace and key counts");
    for (i, name) in names.iter().enumerate() {
        assert_eq!(get(&store, &key(name)), Get::Data(vec![i as u8; 9]));
    }
    let long = vec![b'k'; xkv_store::MAX_KEY_BYTES + 1];
    assert!(matches!(store.begin(&key(long), 1), Begin::NoSpace));
    assert!(matches!(store.begin(&key("empty"), 0), Begin::NoSpace));
}

#[test]
fn removal_ends_objects_and_transactions() {
    let devices = memory(&[16 * MIB]);
    let store = open_on(&devices, &config());
    put(&store, &key("a"), b"a");
    assert_eq!(remove(&store, &key("a")), Ok(true));
    assert_eq!(remove(&store, &key("a")), Ok(false));
    assert_eq!(get(&store, &key("a")), Get::Absent);

    let Begin::Txn(txn) = store.begin(&key("b"), 4096) else { panic!("b is new") };
    assert_eq!(remove(&store, &key("b")), Ok(true));
    let buf = xkv_store::SlotPool::new(1, 4096).unwrap().try_take().unwrap();
    let (tx, rx) = std::sync::mpsc::channel();
    txn.write(0, buf, Box::new(move |_, outcome| tx.send(outcome).unwrap()));
    rx.recv().unwrap().unwrap();
    let (tx, rx) = std::sync::mpsc::channel();
    txn.commit(vec![Default::default()], Box::new(move |outcome| tx.send(outcome).unwrap()));
    assert_eq!(rx.recv().unwrap().unwrap_err().kind(), xkv_store::ErrorKind::Removed);
    assert!(!store.contains(&key("b")));
    await_until("the slots of b are free", || store.stats().slots_used == 0);
    assert!(matches!(put(&store, &key("b"), b"new"), Put::Stored));
    drop(store);
    let store = open_on(&devices, &config());
    assert_eq!((get(&store, &key("a")), get(&store, &key("b"))), (Get::Absent, Get::Data(b"new".to_vec())));
}

#[test]
fn three_times_the_capacity_keeps_the_newest_also_after_a_restart() {
    let devices = memory(&[24 * MIB]);
    let object = 64 * 1024;
    let store = open_on(&devices, &config());
    let total = store.stats().slots_total;
    let count = total * 4096 / object * 3;
    for i in 0..count {
        assert!(
            matches!(put(&store, &key(format!("{i}")), &contents(i, object as usize)), Put::Stored),
            "{i}"
        );
        assert!(store.stats().slots_used <= total);
    }
    let check = |store: &Store| {
        let present: Vec<bool> = (0..count).map(|i| store.contains(&key(format!("{i}")))).collect();
        let first = present.iter().position(|&p| p).unwrap();
        assert!(present[first..].iter().all(|&p| p), "eviction takes the oldest first");
        let kept = count - first as u64;
        assert!(kept * object / 4096 >= total * 9 / 10, "{kept} objects of {object} bytes in {total} slots");
        for i in first as u64..count {
            assert!(get(store, &key(format!("{i}"))) == Get::Data(contents(i, object as usize)), "{i}");
        }
        assert_eq!(store.stats().slots_used, kept * object / 4096);
        first
    };
    // The evictor's last round may still be running.
    std::thread::sleep(Duration::from_millis(50));
    let first = check(&store);
    drop(store);
    let store = open_on(&devices, &config());
    assert!(check(&store) >= first);
    assert!(store.stats().evicted <= count);
}

#[test]
fn use_counts_for_eviction_also_after_a_restart() {
    let devices = memory(&[24 * MIB]);
    let mut store = open_on(&devices, &config());
    let total = store.stats().slots_total;
    let count = total / 2 / 16;
    for i in 0..count {
        put(&store, &key(format!("{i}")), &contents(i, 65_536));
    }
    assert!(matches!(get(&store, &key("0")), Get::Data(_)));
    store.close(Duration::from_secs(5));
    store = open_on(&devices, &config());
    let mut i = count;
    while store.stats().evicted < 10 {
        put(&store, &key(format!("{i}")), &contents(i, 65_536));
        i += 1;
    }
    assert!(store.contains(&key("0")), "it was used last before the restart");
    assert!(!store.contains(&key("1")));
}

#[test]
fn what_is_being_read_is_not_evicted() {
    let store = open_on(&memory(&[24 * MIB]), &config());
    let total = store.stats().slots_total;
    put(&store, &key("held"), &contents(7, 65_536));
    let lease = store.lease(&key("held")).unwrap();
    for i in 0..total / 16 * 2 {
        assert!(matches!(put(&store, &key(format!("{i}")), &contents(i, 65_536)), Put::Stored));
    }
    assert!(store.stats().evicted > 0);
    assert!(get(&store, &key("held")) == Get::Data(contents(7, 65_536)));
    drop(lease);
}

#[test]
fn an_object_that_leaves_no_reserve_is_refused_and_the_largest_other_is_kept() {
    let store = open_on(&memory(&[16 * MIB]), &StoreConfig { fragment_bytes: Some(65_536), ..config() });
    let slots = store.stats().slots_total;
    let largest = (slots - slots / 4) * 65_536;
    assert!(matches!(store.begin(&key("big"), largest + 1), Begin::NoSpace));
    for i in 0..5 {
        let name = key(format!("{i}"));
        assert!(matches!(put(&store, &name, &contents(i, largest as usize)), Put::Stored));
        assert!(get(&store, &name) == Get::Data(contents(i, largest as usize)), "{i}");
        assert!(i == 0 || !store.contains(&key(format!("{}", i - 1))));
    }
}

#[test]
fn the_log_goes_round_many_times_and_forgets_nothing() {
    let devices = memory(&[16 * MIB]);
    let mut live = HashMap::new();
    let mut store = open_on(&devices, &config());
    // Long keys fill the areas of 1 MiB quickly.
    let name = |i: u64| format!("{i}-{}", "x".repeat(3000));
    for i in 0..2_000u64 {
        put(&store, &key(name(i)), &contents(i, 100));
        live.insert(i, 100);
        if i >= 50 {
            assert_eq!(remove(&store, &key(name(i - 50))), Ok(true));
            live.remove(&(i - 50));
        }
        if i % 500 == 499 {
            drop(store);
            store = open_on(&devices, &config());
        }
    }
    assert_eq!(store.stats().damaged, 0);
    assert_eq!(store.stats().objects, live.len() as u64);
    for &i in live.keys() {
        assert_eq!(get(&store, &key(name(i))), Get::Data(contents(i, 100)));
    }
}

#[test]
fn manifests_that_fill_the_log_are_evicted_like_data() {
    let store = open_on(&memory(&[16 * MIB]), &config());
    for i in 0..1_000u64 {
        let put = put(&store, &key(format!("{i}-{}", "x".repeat(3000))), b"x");
        assert!(matches!(put, Put::Stored), "{i}: {put:?}");
    }
    let stats = store.stats();
    assert!(stats.objects >= 200 && stats.evicted > 0, "{stats:?}");
    assert!(store.contains(&key(format!("999-{}", "x".repeat(3000)))));
}

#[test]
fn many_threads_store_load_and_remove_at_once() {
    let store = open_on(&memory(&[32 * MIB, 32 * MIB]), &config());
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let store = &store;
            scope.spawn(move || {
                for i in 0..300 {
                    let n = (i * 7 + thread) % 97;
                    let name = key(format!("{n}"));
                    match (i + thread) % 5 {
                        0 => drop(remove(store, &name)),
                        1 | 2 => drop(put(store, &name, &contents(n, 1000 + n as usize * 500))),
                        _ => match get(store, &name) {
                            Get::Data(data) => {
                                assert!(data == contents(n, 1000 + n as usize * 500))
                            }
                            Get::Absent => {}
                            Get::Discarded => panic!("a healthy drive gave wrong bytes"),
                        },
                    }
                }
            });
        }
    });
    let sizes = (0..97u64).filter(|n| store.contains(&key(format!("{n}")))).map(|n| 1000 + n * 500);
    assert_eq!(store.stats().slots_used, slots_of(sizes, 4096));
}

#[test]
fn after_closing_everything_is_refused_and_nothing_hangs() {
    let store = open_on(&memory(&[16 * MIB]), &config());
    put(&store, &key("a"), b"a");
    store.close(Duration::from_secs(5));
    store.close(Duration::from_secs(5));
    assert!(matches!(put(&store, &key("b"), b"b"), Put::ReadOnly));
    assert!(remove(&store, &key("a")).is_err());
}
