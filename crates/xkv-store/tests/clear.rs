//! Clearing a namespace: only what is meant goes, and a crash at any moment leaves the rest whole and the job to be
//! finished. Listing: what is where, and what was never read, also after a restart.

mod common;

use std::sync::Arc;

use common::*;
use xkv_store::io::Device;
use xkv_store::io::device::testing::{CrashDevice, MemoryDevice};
use xkv_store::usage::now_us;
use xkv_store::{Cleared, ObjectKey, Selection, Store};

const OBJECTS: u64 = 200;
const SIZE: usize = 5000;

fn object(namespace: &str, model: &str, number: u64) -> ObjectKey {
    ObjectKey::new(&Arc::from(namespace.as_bytes()), format!("{model}@00000001@0@{number:08x}").as_bytes())
}

fn filled() -> Arc<MemoryDevice> {
    let image = MemoryDevice::new(16 * MIB);
    let store = open_on(&[image.clone() as Arc<dyn Device>], &config());
    for number in 0..OBJECTS {
        for (namespace, model) in [("old", "m"), ("old", "other"), ("new", "m")] {
            let stored = put(&store, &object(namespace, model, number), &contents(number, SIZE));
            assert!(matches!(stored, Put::Stored), "{stored:?}");
        }
    }
    image
}

fn selection(namespace: Option<&str>, model: Option<&str>) -> Selection {
    let bytes = |text: &str| text.as_bytes().to_vec();
    Selection { namespace: namespace.map(bytes), model: model.map(bytes) }
}

/// Objects that are there, each with the right bytes.
fn present(store: &Store, namespace: &str, model: &str) -> u64 {
    let there = |number: &u64| match get(store, &object(namespace, model, *number)) {
        Get::Data(data) => {
            assert_eq!(data, contents(*number, SIZE));
            true
        }
        Get::Absent => false,
        Get::Discarded => panic!("{namespace} {model} {number} is damaged"),
    };
    (0..OBJECTS).filter(there).count() as u64
}

#[test]
fn only_what_is_meant_goes() {
    for (meant, left) in [
        (selection(Some("old"), None), [0, 0, OBJECTS]),
        (selection(None, Some("m")), [0, OBJECTS, 0]),
        (selection(Some("old"), Some("m")), [0, OBJECTS, OBJECTS]),
        (selection(Some("none"), None), [OBJECTS; 3]),
        (selection(None, None), [0; 3]),
    ] {
        let image = filled();
        let store = open_on(&[image.clone() as Arc<dyn Device>], &config());
        let gone = 3 * OBJECTS - left.iter().sum::<u64>();
        let cleared = store.clear(&meant).unwrap();
        assert_eq!(cleared, Cleared { objects: gone, bytes: gone * SIZE as u64 }, "{meant:?}");
        for reopened in [false, true] {
            let again = reopened.then(|| image.copy());
            let store =
                again.map_or_else(|| store.clone(), |image| open_on(&[image as Arc<dyn Device>], &config()));
            let found = [("old", "m"), ("old", "other"), ("new", "m")].map(|(n, m)| present(&store, n, m));
            assert_eq!(found, left, "{meant:?}");
            assert_eq!(
                store.stats().slots_used,
                slots_of(vec![SIZE as u64; left.iter().sum::<u64>() as usize], 4096)
            );
        }
    }
}

#[test]
fn a_crash_half_way_leaves_the_rest_whole_and_the_next_clear_finishes() {
    let image = filled();
    let (mut half_way, mut finished) = (0, 0);
    for writes in 1..12 {
        let crash = CrashDevice::new(&image);
        let store = open_on(&[crash.clone() as Arc<dyn Device>], &config());
        crash.freeze_after(writes);
        let outcome = store.clear(&selection(Some("old"), None));
        drop(store);
        for after in [crash.live(), crash.durable(), crash.crash(writes)] {
            let store = open_on(&[after as Arc<dyn Device>], &config());
            let left = present(&store, "old", "m") + present(&store, "old", "other");
            assert_eq!(present(&store, "new", "m"), OBJECTS);
            if outcome.is_ok() {
                assert_eq!(left, 0, "acknowledged after {writes} writes");
                finished += 1;
            }
            half_way += u64::from(0 < left && left < 2 * OBJECTS);
            assert_eq!(store.clear(&selection(Some("old"), None)).unwrap().objects, left);
            assert_eq!(present(&store, "new", "m"), OBJECTS);
            assert_eq!(store.stats().objects, OBJECTS);
        }
    }
    assert!(
        half_way > 0 && finished > 0,
        "{half_way} crashes half-way, {finished} clears that were finished"
    );
}

#[test]
fn what_is_where_and_what_was_never_read_outlive_a_restart() {
    let begun = now_us();
    let image = filled();
    let store = open_on(&[image.clone() as Arc<dyn Device>], &config());
    for number in 0..OBJECTS / 4 {
        assert!(matches!(get(&store, &object("new", "m", number)), Get::Data(_)));
        // A second read changes nothing.
        assert!(matches!(get(&store, &object("new", "m", number)), Get::Data(_)));
    }
    let read = now_us();
    drop(store);
    let store = open_on(&[image as Arc<dyn Device>], &config());
    let listed = store.list();
    let names: Vec<(&[u8], &[u8])> =
        listed.usage.iter().map(|each| (&each.namespace[..], &each.model[..])).collect();
    assert_eq!(names, [(&b"new"[..], &b"m"[..]), (b"old", b"m"), (b"old", b"other")]);
    for each in &listed.usage {
        let never_read = if each.namespace == b"new" { OBJECTS * 3 / 4 } else { OBJECTS };
        assert_eq!((each.objects, each.bytes, each.slots), (OBJECTS, OBJECTS * SIZE as u64, 2 * OBJECTS));
        assert_eq!((each.never_read, each.never_read_bytes), (never_read, never_read * SIZE as u64));
        assert!(begun <= each.oldest_use_us && each.oldest_use_us <= each.newest_use_us);
        assert!(each.newest_use_us <= read);
    }
    let stats = store.stats();
    let never_read = OBJECTS * 3 - OBJECTS / 4;
    assert_eq!((stats.never_read, stats.never_read_slots), (never_read, 2 * never_read));
    store.clear(&selection(Some("new"), None)).unwrap();
    assert_eq!(store.stats().never_read, 2 * OBJECTS);
}
