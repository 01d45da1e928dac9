//! Drives that refuse, lie, or are not what they were: right bytes or a miss, a clear refusal, and no way back that
//! needs a restart where the fault allows it.

#![allow(
    clippy::cloned_ref_to_slice_refs,
    reason = "the suggested call would not coerce to a slice of dyn devices"
)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use xkv_store::io::device::testing::{
    Calls, CrashDevice, Effect, Fault, FaultyDevice, MemoryDevice, StallDevice,
};
use xkv_store::io::{BLOCK, Device};
use xkv_store::layout::{DATA_START, Superblock};
use xkv_store::{ErrorKind, Store, StoreConfig};

fn read(device: &dyn Device, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    device.read_at(&mut bytes, offset).unwrap();
    bytes
}

fn header(device: &dyn Device) -> Superblock {
    let copies = [0, BLOCK as u64].map(|at| Superblock::decode(&read(device, at, BLOCK)).unwrap());
    copies.into_iter().flatten().max_by_key(|h| h.sequence).expect("a valid header")
}

fn image(device: &dyn Device) -> Vec<u8> {
    read(device, 0, device.size() as usize)
}

fn refusal(devices: &[Arc<dyn Device>], config: &StoreConfig) -> xkv_store::Error {
    match Store::open_on(devices.to_vec(), config) {
        Ok(_) => panic!("the store must not open"),
        Err(error) => error,
    }
}

#[test]
fn every_flipped_byte_of_an_object_is_a_miss_and_the_next_store_repairs_it() {
    let memory = MemoryDevice::new(16 * MIB);
    let store = open_on(&[memory.clone()], &config());
    let data = contents(5, 3 * 4096 + 100);
    let slots = header(&*memory).slots_offset;
    let mut flipped = 0;
    for round in 0..400u64 {
        assert!(matches!(put(&store, &key("o"), &data), Put::Stored));
        // Where the object's bytes are is found by looking for them; free slots hold older copies.
        let offset = round * 31 % data.len() as u64;
        let all = read(&*memory, slots, (memory.size() - slots) as usize);
        let fragment = &data[offset as usize / 4096 * 4096..][..100];
        let copies: Vec<usize> =
            (0..all.len()).step_by(4096).filter(|&at| &all[at..at + 100] == fragment).collect();
        assert!(!copies.is_empty(), "the object is on the drive");
        for at in copies {
            memory.flip(slots + at as u64 + offset % 4096, 1 << (round % 8));
        }
        flipped += 1;
        assert_eq!(get(&store, &key("o")), Get::Discarded);
        assert_eq!(get(&store, &key("o")), Get::Absent);
    }
    assert_eq!((flipped, store.stats().discarded), (400, 400));
    put(&store, &key("o"), &data);
    assert_eq!(get(&store, &key("o")), Get::Data(data));
}

#[test]
fn foreign_content_is_refused_and_left_as_it_is() {
    for at in [1080, 0, 500_000, 16 * MIB - 4096] {
        let memory = MemoryDevice::new(16 * MIB);
        let offset = at / 4096 * 4096;
        let mut block = vec![0; 4096];
        block[(at - offset) as usize..][..2].copy_from_slice(&[0x53, 0xEF]);
        memory.write_at(&block, offset).unwrap();
        let before = image(&*memory);
        let error = refusal(&[memory.clone()], &config());
        assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
        assert!(image(&*memory) == before, "nothing was changed");
        let error = Store::format_on(vec![memory.clone()], &config(), false).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
        assert!(image(&*memory) == before, "nothing was changed");
        Store::format_on(vec![memory], &config(), true).expect("force overwrites");
    }
}

#[test]
fn drives_are_known_by_their_headers() {
    let drives: Vec<Arc<dyn Device>> =
        (0..3).map(|i| MemoryDevice::named(&format!("d{i}"), 16 * MIB) as _).collect();
    let store = open_on(&drives, &config());
    put(&store, &key("o"), &contents(1, 50_000));
    drop(store);
    let swapped = [drives[2].clone(), drives[0].clone(), drives[1].clone()];
    let store = open_on(&swapped, &config());
    assert!(
        get(&store, &key("o")) == Get::Data(contents(1, 50_000)),
        "another order of the same drives is fine"
    );
    drop(store);

    let other: Arc<dyn Device> = MemoryDevice::named("other", 16 * MIB);
    drop(open_on(&[other.clone()], &config()));
    let blank: Arc<dyn Device> = MemoryDevice::named("blank", 16 * MIB);
    let before: Vec<Vec<u8>> = drives.iter().map(|d| image(&**d)).collect();
    let cases: [(&str, Vec<Arc<dyn Device>>); 5] = [
        ("a drive is missing", vec![drives[0].clone(), drives[1].clone()]),
        ("the first drive is missing", vec![drives[1].clone(), drives[2].clone()]),
        ("a drive is named twice", vec![drives[0].clone(), drives[1].clone(), drives[1].clone()]),
        ("a drive of another store", vec![drives[0].clone(), drives[1].clone(), other]),
        ("a blank drive", vec![drives[0].clone(), drives[1].clone(), blank]),
    ];
    for (case, devices) in cases {
        let error = refusal(&devices, &config());
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{case}: {error}");
        assert!(error.to_string().contains("d0") || error.to_string().contains("d1"), "{case}: {error}");
    }
    let error = refusal(&drives, &StoreConfig { fragment_bytes: Some(8192), ..config() });
    assert!(error.kind() == ErrorKind::Mismatch && error.to_string().contains("4096"), "{error}");
    for (drive, before) in drives.iter().zip(before) {
        assert!(image(&**drive) == before, "a refusal changes nothing");
    }
    open_on(&drives, &StoreConfig { fragment_bytes: None, ..config() });
}

#[test]
fn one_torn_superblock_is_enough_two_are_refused() {
    let memory = MemoryDevice::new(16 * MIB);
    let store = open_on(&[memory.clone()], &config());
    put(&store, &key("o"), b"data");
    drop(store);
    for copy in [0, BLOCK as u64] {
        memory.flip(copy + 100, 0xff);
        let store = open_on(&[memory.clone()], &config());
        assert_eq!(
            get(&store, &key("o")),
            Get::Data(b"data".to_vec()),
            "copy at {copy}; the other one was mended"
        );
        drop(store);
    }
    memory.flip(100, 0xff);
    memory.flip(BLOCK as u64 + 100, 0xff);
    assert_eq!(refusal(&[memory], &config()).kind(), ErrorKind::Foreign);
}

#[test]
fn a_truncated_drive_is_refused() {
    let memory = MemoryDevice::new(16 * MIB);
    drop(open_on(&[memory.clone()], &config()));
    let shorter = MemoryDevice::new(8 * MIB);
    shorter.write_at(&read(&*memory, 0, 8 << 20), 0).unwrap();
    assert_eq!(refusal(&[shorter], &config()).kind(), ErrorKind::TooSmall);
}

#[test]
fn a_damaged_block_of_the_log_costs_only_its_own_objects() {
    let memory = MemoryDevice::new(16 * MIB);
    let store = open_on(&[memory.clone()], &config());
    for i in 0..40u64 {
        // One group each: committed one after the other.
        put(&store, &key(format!("{i}")), &contents(i, 5000));
    }
    drop(store);
    let area = DATA_START;
    memory.flip(area + 10 * BLOCK as u64 + 60, 1);
    let store = open_on(&[memory.clone()], &config());
    let lost: Vec<u64> = (0..40).filter(|i| !store.contains(&key(format!("{i}")))).collect();
    assert_eq!(lost.len(), 1, "{lost:?}");
    assert_eq!(store.stats().damaged, 1);
    for i in (0..40u64).filter(|i| !lost.contains(i)) {
        assert!(get(&store, &key(format!("{i}"))) == Get::Data(contents(i, 5000)));
    }
    assert_eq!(store.stats().slots_used, 39 * 2);
    drop(store);
    assert_eq!(open_on(&[memory], &config()).stats().damaged, 0, "a snapshot replaced the damaged log");
}

#[test]
fn both_areas_unreadable_is_an_empty_store_not_wrong_bytes() {
    let memory = MemoryDevice::new(16 * MIB);
    let store = open_on(&[memory.clone()], &config());
    put(&store, &key("o"), b"data");
    drop(store);
    let area_bytes = header(&*memory).area_bytes;
    for at in (DATA_START..DATA_START + 2 * area_bytes).step_by(BLOCK) {
        memory.flip(at + 40, 0x55);
    }
    let store = open_on(&[memory], &config());
    assert_eq!((store.stats().objects, store.stats().slots_used), (0, 0));
    assert!(matches!(put(&store, &key("o"), b"data"), Put::Stored));
}

#[test]
fn a_failing_data_drive_fails_its_stores_and_loads_only() {
    let faulty = FaultyDevice::new(MemoryDevice::new(32 * MIB));
    let store = open_on(&[faulty.clone()], &config());
    put(&store, &key("old"), &contents(1, 9000));
    let slots = header(&*faulty).slots_offset;
    let data = slots..faulty.size();
    faulty
        .inject(Fault { offsets: data.clone(), ..Fault::every(Calls::WRITES, Effect::Errno(libc::ENOSPC)) });
    assert!(matches!(put(&store, &key("new"), &contents(2, 9000)), Put::Failed(_)));
    assert_eq!(get(&store, &key("old")), Get::Data(contents(1, 9000)));
    await_until("the slots of the failed store are free", || store.stats().slots_used == 3);
    faulty.heal();
    assert!(matches!(put(&store, &key("new"), &contents(2, 9000)), Put::Stored));
    faulty.inject(Fault { offsets: data, ..Fault::every(Calls::READS, Effect::Errno(libc::EIO)) });
    assert_eq!(get(&store, &key("old")), Get::Discarded);
    faulty.heal();
    assert_eq!(get(&store, &key("old")), Get::Absent);
    assert_eq!(get(&store, &key("new")), Get::Data(contents(2, 9000)));
}

#[test]
fn a_failed_flush_acknowledges_nothing_that_was_written_before_it() {
    let faulty = FaultyDevice::new(MemoryDevice::new(16 * MIB));
    let store = open_on(&[faulty.clone()], &config());
    faulty.inject(Fault { times: 1, ..Fault::every(Calls::FLUSHES, Effect::Errno(libc::EIO)) });
    assert!(matches!(put(&store, &key("a"), b"a"), Put::Failed(_)));
    assert_eq!(get(&store, &key("a")), Get::Absent);
    assert!(matches!(put(&store, &key("a"), b"a"), Put::Stored));
}

/// Stores "a", and "b" while a's first flush is under way, with `fault` on the drive from then on; what became of them, the
/// store, and the flushes it took.
fn two_groups(fault: Option<Fault>) -> ([Put; 2], Store, u64) {
    let crash = CrashDevice::new(&MemoryDevice::new(16 * MIB));
    let faulty = FaultyDevice::new(crash.clone());
    let stall = StallDevice::new(faulty.clone());
    let store = open_on(&[stall.clone()], &config());
    let before = crash.flushes();
    stall.stall(Calls::FLUSHES);
    let puts = std::thread::scope(|scope| {
        let a = scope.spawn(|| put(&store, &key("a"), &contents(1, 9000)));
        assert!(stall.await_waiting(1, Duration::from_secs(10)));
        let b = scope.spawn(|| put(&store, &key("b"), &contents(2, 9000)));
        await_until("b waits for the log", || store.stats().commits_queued == 1);
        fault.into_iter().for_each(|fault| faulty.inject(fault));
        stall.resume();
        [a.join().unwrap(), b.join().unwrap()]
    });
    (puts, store, crash.flushes() - before)
}

#[test]
fn one_flush_is_for_the_records_of_a_group_and_the_fragments_of_the_next() {
    let (puts, store, flushes) = two_groups(None);
    assert!(matches!(puts, [Put::Stored, Put::Stored]), "{puts:?}");
    assert_eq!((flushes, store.stats().commit_groups), (3, 2));
}

#[test]
fn when_the_flush_of_two_groups_fails_neither_is_acknowledged() {
    let fault = Fault { after: 1, times: 1, ..Fault::every(Calls::FLUSHES, Effect::Errno(libc::EIO)) };
    let (puts, store, _) = two_groups(Some(fault));
    assert!(matches!(puts, [Put::Failed(_), Put::Failed(_)]), "{puts:?}");
    for name in ["a", "b"] {
        assert_eq!(get(&store, &key(name)), Get::Absent);
    }
    await_until("the store takes changes again", || !store.stats().read_only);
    assert!(matches!(put(&store, &key("a"), b"a"), Put::Stored));
    assert_eq!(get(&store, &key("a")), Get::Data(b"a".to_vec()));
}

#[test]
fn a_failing_log_makes_the_store_read_only_until_it_works_again() {
    let memory = MemoryDevice::new(16 * MIB);
    let faulty = FaultyDevice::new(memory.clone());
    let store = open_on(&[faulty.clone()], &config());
    put(&store, &key("old"), b"old");
    let header = header(&*faulty);
    faulty.inject(Fault {
        offsets: DATA_START..DATA_START + 2 * header.area_bytes,
        ..Fault::every(Calls::WRITES, Effect::Errno(libc::EIO))
    });
    assert!(matches!(put(&store, &key("new"), b"new"), Put::Failed(_)));
    assert!(store.stats().read_only);
    assert!(matches!(put(&store, &key("new"), b"new"), Put::ReadOnly));
    assert_eq!(get(&store, &key("old")), Get::Data(b"old".to_vec()));
    assert!(remove(&store, &key("old")).is_err());
    assert_eq!(
        get(&store, &key("old")),
        Get::Absent,
        "a removal that could not be made durable is a miss all the same"
    );
    faulty.heal();
    await_until("the store takes changes again", || !store.stats().read_only);
    assert!(matches!(put(&store, &key("new"), b"new"), Put::Stored));
    drop(store);
    let store = open_on(&[memory], &config());
    assert_eq!(get(&store, &key("new")), Get::Data(b"new".to_vec()));
    assert_eq!((get(&store, &key("old")), store.stats().slots_used), (Get::Absent, 1));
}

#[test]
fn a_hanging_drive_does_not_hold_up_closing_and_recovers() {
    let stall = StallDevice::new(MemoryDevice::new(16 * MIB));
    let store = open_on(&[stall.clone()], &config());
    put(&store, &key("a"), b"a");
    stall.stall(Calls::FLUSHES);
    let (tx, rx) = std::sync::mpsc::channel();
    store.remove(&key("a"), Box::new(move |outcome| _ = tx.send(outcome.map_err(|e| e.to_string()))));
    assert!(!store.contains(&key("a")), "a removal is visible at once");
    assert!(stall.await_waiting(1, Duration::from_secs(5)));
    assert!(store.stats().committing_for.is_some());
    let began = std::time::Instant::now();
    store.close(Duration::from_millis(300));
    assert!(began.elapsed() < Duration::from_secs(3));
    assert!(rx.try_recv().is_err(), "not acknowledged while it is not durable");
    stall.resume();
    assert_eq!(rx.recv_timeout(Duration::from_secs(5)).unwrap(), Ok(true));
}

#[test]
fn a_drive_named_twice_is_refused_before_anything_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let paths = vec![folder.path().to_path_buf(), folder.path().join("."), folder.path().join("other")];
    let config = StoreConfig { paths, file_bytes: 64 << 20, ..config() };
    for outcome in [Store::open(&config).map(|_| ()), Store::probe(&config)] {
        let error = outcome.unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("same drive"), "{error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// The key is removed while its first object is being committed, and stored again before the log has heard of that.
#[test]
fn a_store_after_a_removal_survives_a_restart() {
    let memory = MemoryDevice::new(16 * MIB);
    let stall = StallDevice::new(memory.clone());
    let store = open_on(&[stall.clone()], &config());
    stall.stall(Calls::FLUSHES);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| put(&store, &key("a"), &contents(1, 9000)));
        assert!(stall.await_waiting(1, Duration::from_secs(10)));
        let (sender, removed) = std::sync::mpsc::channel();
        store.remove(&key("a"), Box::new(move |outcome| _ = sender.send(outcome.is_ok())));
        let second = scope.spawn(|| put(&store, &key("a"), &contents(2, 9000)));
        await_until("both wait for the log", || store.stats().commits_queued == 2);
        stall.resume();
        assert!(matches!(first.join().unwrap(), Put::Failed(_)) && removed.recv().unwrap());
        assert!(matches!(second.join().unwrap(), Put::Stored));
    });
    assert_eq!(get(&store, &key("a")), Get::Data(contents(2, 9000)));
    store.close(Duration::from_secs(5));
    drop(store);
    let store = open_on(&[memory.clone()], &config());
    assert_eq!(get(&store, &key("a")), Get::Data(contents(2, 9000)));
}

/// A drive tells of lost writes once, whoever flushes it: here for the superblock, when the log goes to its other area.
#[test]
fn a_flush_that_fails_for_the_superblock_counts() {
    let fill = |objects: usize| {
        let memory = MemoryDevice::new(16 * MIB);
        let faulty = FaultyDevice::new(memory.clone());
        let stall = StallDevice::new(faulty.clone());
        let store = open_on(&[stall.clone()], &config());
        let before = header(&*memory).sequence;
        let mut count = 0;
        while count < objects && header(&*memory).sequence == before {
            assert!(matches!(put(&store, &key(format!("{count}")), b"x"), Put::Stored));
            count += 1;
        }
        (count, store, stall, faulty)
    };
    let (full, ..) = fill(usize::MAX);
    let (_, store, stall, faulty) = fill(full - 1);
    stall.stall(Calls::FLUSHES);
    let puts = std::thread::scope(|scope| {
        let a = scope.spawn(|| put(&store, &key("a"), b"a"));
        assert!(stall.await_waiting(1, Duration::from_secs(10)));
        let b = scope.spawn(|| put(&store, &key("b"), b"b"));
        await_until("b waits for the log", || store.stats().commits_queued == 1);
        // The first is a's, the second that of the snapshot.
        faulty.inject(Fault { after: 2, times: 1, ..Fault::every(Calls::FLUSHES, Effect::Errno(libc::EIO)) });
        stall.resume();
        [a.join().unwrap(), b.join().unwrap()]
    });
    assert!(
        matches!(puts, [Put::Stored, Put::Failed(_)]),
        "b was written before a flush that failed: {puts:?}"
    );
}
