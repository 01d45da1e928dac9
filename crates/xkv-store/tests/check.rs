//! Offline examination: it finds what is damaged, changes nothing unless asked, and repairs what can be repaired.
//! And making a store on purpose, also where something else is.

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use common::*;
use xkv_store::check::{Progress, Report, check_on};
use xkv_store::format::{Content, survey};
use xkv_store::io::device::testing::{Calls, Effect, Fault, FaultyDevice, MemoryDevice};
use xkv_store::io::{BLOCK, Device};
use xkv_store::layout::{DATA_START, Superblock};
use xkv_store::{ErrorKind, Store, StoreConfig, check};

const FRAGMENT: usize = 4096;

fn image(device: &dyn Device) -> Vec<u8> {
    let mut bytes = vec![0; device.size() as usize];
    device.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Sizes of objects, some of several fragments, some not of whole ones.
fn size(i: u64) -> usize {
    1 + (i as usize * 2711) % (5 * FRAGMENT)
}

/// Drives of a closed store with `count` objects.
fn filled(drives: usize, count: u64) -> Vec<Arc<MemoryDevice>> {
    let drives: Vec<_> = (0..drives).map(|i| MemoryDevice::named(&format!("d{i}"), 16 * MIB)).collect();
    let store = open(&drives);
    for i in 0..count {
        assert!(matches!(put(&store, &key(i.to_le_bytes()), &contents(i, size(i))), Put::Stored));
    }
    drives
}

fn devices(drives: &[Arc<MemoryDevice>]) -> Vec<Arc<dyn Device>> {
    drives.iter().map(|drive| drive.clone() as Arc<dyn Device>).collect()
}

fn open(drives: &[Arc<MemoryDevice>]) -> Store {
    open_on(&devices(drives), &config())
}

fn examine(devices: Vec<Arc<dyn Device>>, repair: bool) -> Report {
    check_on(devices, &StoreConfig::default(), repair, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// Examines without and with repair, and again; what is found the first time. Without repair nothing is changed.
fn examine_and_repair(drives: &[Arc<MemoryDevice>]) -> Report {
    let before: Vec<Vec<u8>> = drives.iter().map(|drive| image(&**drive)).collect();
    let found = examine(devices(drives), false);
    let after: Vec<Vec<u8>> = drives.iter().map(|drive| image(&**drive)).collect();
    assert!(before == after, "an examination changes nothing");
    assert!(!found.repaired);
    let repaired = examine(devices(drives), true);
    assert_eq!(repaired.repaired, !found.is_clean());
    let again = examine(devices(drives), false);
    assert!(again.is_clean(), "{again:?}");
    assert_eq!(again.objects, found.objects - found.damaged.len() as u64);
    found
}

/// Where the fragment that begins like `data` is on the drive.
fn find(drive: &MemoryDevice, data: &[u8]) -> Option<u64> {
    let all = image(drive);
    let wanted = &data[..data.len().min(64)];
    (0..all.len()).step_by(FRAGMENT).find(|&at| all[at..].starts_with(wanted)).map(|at| at as u64)
}

#[test]
fn a_sound_store_is_clean_and_all_of_it_is_counted() {
    let drives = filled(2, 40);
    let mut last = None;
    let report = check_on(devices(&drives), &config(), false, &mut |progress| {
        last = Some(progress);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(report.is_clean(), "{report:?}");
    let bytes: u64 = (0..40).map(|i| size(i) as u64).sum();
    assert_eq!((report.objects, report.bytes), (40, bytes));
    assert_eq!(report.slots_used, slots_of((0..40).map(|i| size(i) as u64), FRAGMENT as u64));
    assert_eq!(report.drives.iter().map(|d| d.name.as_str()).collect::<Vec<_>>(), ["d0", "d1"]);
    assert_eq!(report.slots_total, report.drives.iter().map(|d| d.slots).sum::<u64>());
    assert_eq!(report.store, open(&drives).id());
    let Progress { done, total, damaged } = last.expect("progress is told");
    assert_eq!((done, total, damaged), (bytes, bytes, 0));
    examine_and_repair(&drives);
}

#[test]
fn every_flipped_byte_is_found_and_only_its_object_is_lost() {
    let drives = filled(2, 40);
    let hit = [3, 11, 12, 39];
    for (n, &i) in hit.iter().enumerate() {
        let data = contents(i, size(i));
        // Another fragment each time, and its first, some or its last byte.
        let index = n % data.len().div_ceil(FRAGMENT);
        let fragment = &data[index * FRAGMENT..][..(data.len() - index * FRAGMENT).min(FRAGMENT)];
        let (drive, at) =
            drives.iter().find_map(|d| find(d, fragment).map(|at| (d, at))).expect("it is on a drive");
        drive.flip(at + ((fragment.len() - 1) * n / 3) as u64, 1 << n);
    }
    let report = examine_and_repair(&drives);
    let mut found: Vec<u64> = report
        .damaged
        .iter()
        .map(|object| u64::from_le_bytes(object.key.key().try_into().unwrap()))
        .collect();
    found.sort_unstable();
    assert_eq!(found, hit);
    assert!(report.damaged.iter().all(|object| (object.mismatched, object.unreadable) == (1, 0)));
    let store = open(&drives);
    for i in 0..40u64 {
        let key = key(i.to_le_bytes());
        if hit.contains(&i) {
            assert_eq!(get(&store, &key), Get::Absent);
        } else {
            assert!(get(&store, &key) == Get::Data(contents(i, size(i))), "object {i} is unharmed");
        }
    }
    assert_eq!(store.stats().damaged, 0);
}

#[test]
fn a_flipped_byte_behind_the_object_is_no_damage() {
    let drives = filled(1, 1);
    let data = contents(0, size(0));
    assert_eq!(data.len(), 1);
    let whole = contents(1, 2 * FRAGMENT + 10);
    put(&open(&drives), &key("o"), &whole);
    let last = find(&drives[0], &whole[2 * FRAGMENT..]).unwrap();
    drives[0].flip(last + 10, 0xff);
    assert!(examine(devices(&drives), false).is_clean());
}

#[test]
fn a_torn_header_is_mended() {
    for (drive, copy) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let drives = filled(2, 3);
        drives[drive].flip(copy * BLOCK as u64 + 80, 0x40);
        let report = examine_and_repair(&drives);
        assert_eq!(report.drives.iter().filter(|d| !d.header_whole).count(), 1);
        assert!(!report.drives[drive].header_whole && report.damaged.is_empty());
    }
}

#[test]
fn damage_to_the_log_costs_what_it_spoke_of() {
    let drives = filled(1, 300);
    let block = (0..)
        .map(|i| DATA_START + i * BLOCK as u64)
        .find(|&at| {
            let mut block = vec![0; BLOCK];
            drives[0].read_at(&mut block, at).unwrap();
            // The log's block that speaks of object 150.
            block.starts_with(b"XKVL")
                && block.windows(12).any(|w| w[..4] == *b"test" && w[4..] == 150u64.to_le_bytes())
        })
        .unwrap();
    drives[0].flip(block + 100, 1);
    let report = examine_and_repair(&drives);
    assert!(report.log_found && report.log_damage >= 1, "{report:?}");
    assert!((200..300).contains(&report.objects), "{} objects are left", report.objects);
    let store = open(&drives);
    assert_eq!(get(&store, &key(150u64.to_le_bytes())), Get::Absent);
    assert_eq!((store.stats().objects, store.stats().damaged), (report.objects, 0));
}

#[test]
fn a_log_that_is_gone_is_told_from_an_empty_store() {
    let drives = filled(1, 3);
    let header = {
        let mut block = vec![0; BLOCK];
        drives[0].read_at(&mut block, 0).unwrap();
        Superblock::decode(&block).unwrap().unwrap()
    };
    drives[0].write_at(&vec![0; 2 * header.area_bytes as usize], DATA_START).unwrap();
    let report = examine_and_repair(&drives);
    assert_eq!((report.log_found, report.objects), (false, 0));

    let empty = examine_and_repair(&filled(1, 0));
    assert_eq!((empty.log_found, empty.objects), (true, 0));
}

#[test]
fn what_the_drive_cannot_read_is_told_from_what_is_wrong() {
    let drives = filled(1, 20);
    let data = contents(7, size(7));
    let at = find(&drives[0], &data).unwrap();
    let faulty = FaultyDevice::new(drives[0].clone());
    faulty.inject(Fault { offsets: at..at + 1, ..Fault::every(Calls::READS, Effect::Errno(5)) });
    let report = examine(vec![faulty], false);
    let [object] = &report.damaged[..] else { panic!("one object: {report:?}") };
    assert_eq!(object.key, key(7u64.to_le_bytes()));
    assert_eq!((object.mismatched, object.unreadable), (0, 1));
    assert!(object.error.as_ref().unwrap().contains("os error 5"), "{object:?}");
}

#[test]
fn it_can_be_interrupted_and_has_changed_nothing_then() {
    let drives = filled(1, 20);
    drives[0].flip(find(&drives[0], &contents(7, size(7))).unwrap(), 1);
    let before = image(&*drives[0]);
    let error = check_on(devices(&drives), &config(), true, &mut |_| ControlFlow::Break(())).unwrap_err();
    assert!(error.to_string().contains("interrupted"), "{error}");
    assert!(image(&*drives[0]) == before);
}

fn on(path: &Path) -> StoreConfig {
    StoreConfig { paths: vec![path.to_owned()], file_bytes: 16 * MIB, ..config() }
}

fn refused(config: &StoreConfig, repair: bool) -> xkv_store::Error {
    check(config, repair, &mut |_| ControlFlow::Continue(())).expect_err("there is nothing to examine")
}

#[test]
fn files_are_found_locked_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    for repair in [false, true] {
        for path in [folder.path().join("missing"), folder.path().to_owned()] {
            let error = refused(&on(&path), repair);
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains("there is no store"), "{error}");
        }
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was made");

    let config = on(folder.path());
    let store = Store::open(&config).unwrap();
    put(&store, &key("o"), &contents(1, 9000));
    let error = refused(&config, false);
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    drop(store);
    let file = folder.path().join("xkv-store.dat");
    let before = (fs::read(&file).unwrap(), fs::metadata(&file).unwrap().modified().unwrap());
    let report = check(&config, false, &mut |_| ControlFlow::Continue(())).unwrap();
    assert!(report.is_clean() && report.objects == 1, "{report:?}");
    let after = (fs::read(&file).unwrap(), fs::metadata(&file).unwrap().modified().unwrap());
    assert!(before == after, "nothing was changed");
}

#[test]
fn a_store_is_made_on_purpose_over_anything() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let config = on(&path);
    assert_eq!(survey(&config).unwrap(), [(path.clone(), Content::Missing)]);
    let store = Store::format(&config, false, false).unwrap();
    let id = store.id();
    put(&store, &key("o"), &contents(1, 9000));
    drop(store);

    let [(_, Content::Store { id: found, drive: 1, drives: 1 })] = &survey(&config).unwrap()[..] else {
        panic!("a store is recognised")
    };
    assert_eq!(*found, id);
    let file = path.join("xkv-store.dat");
    let before = fs::read(&file).unwrap();
    let error = Store::format(&config, false, false).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains(&id) && error.to_string().contains("--force"), "{error}");
    let small = StoreConfig { file_bytes: MIB, ..config.clone() };
    let error = Store::format(&small, true, true).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooSmall, "{error}");
    assert!(fs::read(&file).unwrap() == before, "a store that cannot be made costs nothing");

    let larger = StoreConfig { file_bytes: 24 * MIB, ..config.clone() };
    let store = Store::format(&larger, true, false).unwrap();
    assert_ne!(store.id(), id);
    assert_eq!(get(&store, &key("o")), Get::Absent);
    assert_eq!(fs::metadata(&file).unwrap().len(), 16 * MIB, "the file keeps its size");
    drop(store);
    let store = Store::format(&larger, true, true).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().len(), 24 * MIB);
    put(&store, &key("new"), &contents(2, 9000));
    drop(store);
    assert_eq!(get(&Store::open(&config).unwrap(), &key("new")), Get::Data(contents(2, 9000)));
}

#[test]
fn an_old_store_does_not_shine_through_a_new_one() {
    let drives = filled(1, 50);
    let store = Store::format_on(devices(&drives), &config(), true).unwrap();
    assert_eq!(store.stats().objects, 0);
    drop(store);
    assert_eq!(open(&drives).stats().objects, 0);
    let report = examine_and_repair(&drives);
    assert!(report.is_clean(), "{report:?}");
}
