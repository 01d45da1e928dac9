//! What is stored comes back, whatever its size, key and company.

// The clone also makes it a `dyn Device`.
#![allow(clippy::cloned_ref_to_slice_refs)]

mod common;

use common::{Client, FRAGMENT, MIB, Memory, Via, both_ways, config, contents, memory_drives};
use xkv_plugin::{Config, Verify};

both_ways! {
    sizes_around_every_boundary_come_back_in_one_mixed_batch,
    every_way_to_verify_loads_and_only_full_and_sample_notice_their_bytes,
    a_buffer_of_another_size_is_a_miss_and_the_object_goes,
    ten_thousand_keys_in_one_batch,
    odd_keys_are_told_apart,
    a_key_that_no_manifest_could_hold_is_refused_alone,
    namespaces_do_not_meet,
    empty_batches_and_useless_buffers_are_answered,
    owners_come_back_with_the_answer,
}

fn sizes_around_every_boundary_come_back_in_one_mixed_batch(via: Via) {
    let sizes = [
        1,
        63,
        64,
        FRAGMENT - 1,
        FRAGMENT,
        FRAGMENT + 1,
        131_071,
        131_072,
        131_073,
        1 << 20,
        14 << 20,
        (64 << 20) + 3,
    ];
    for drives in [1, 3] {
        let mut client = Client::on(via, &memory_drives(drives, 256 * MIB), 256, config());
        let names: Vec<String> = sizes.iter().map(|size| format!("object of {size}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let data: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(i, &n)| contents(i as u64, n)).collect();
        let sources: Vec<Memory> = data.iter().map(|data| Memory::new(data)).collect();
        let id = client.set(&names, &sources);
        let answer = client.answer(id);
        assert!(answer.ok && answer.results.is_none(), "{}", answer.error);
        let targets: Vec<Memory> = sizes.iter().map(|&size| Memory::blank(size)).collect();
        let id = client.get(&names, &targets);
        assert_eq!(client.results(id), vec![true; sizes.len()]);
        for (i, size) in sizes.iter().enumerate() {
            assert!(targets[i].bytes() == data[i], "{size} bytes on {drives} drives");
            assert!(sources[i].bytes() == data[i], "the source of {size} bytes was changed");
        }
    }
}

fn every_way_to_verify_loads_and_only_full_and_sample_notice_their_bytes(via: Via) {
    for (verify, sampled_flip_hits, other_flip_hits) in
        [(Verify::Full, false, false), (Verify::Sample, false, true), (Verify::Off, true, true)]
    {
        let drive = xkv_store::io::device::testing::MemoryDevice::new(16 * MIB);
        let mut client = Client::on(via, &[drive.clone()], 16, Config { verify, ..config() });
        let data = contents(1, 3 * FRAGMENT);
        assert!(client.put("a", 1, data.len()));
        assert_eq!(client.load("a", data.len()).as_deref(), Some(&data[..]));
        // A flip inside a sampled piece, then one outside.
        for (within, hits) in [(10, sampled_flip_hits), (1000, other_flip_hits)] {
            let at = find(&*drive, &data[FRAGMENT..2 * FRAGMENT]) + within;
            drive.flip(at, 1);
            assert_eq!(client.load("a", data.len()).is_some(), hits, "{verify:?}, byte {within}");
            assert!(client.present_in_the_end("a", hits), "a damaged object is removed");
            if hits {
                drive.flip(at, 1);
            }
            assert!(client.put("a", 1, data.len()), "the next store repairs it");
            assert_eq!(client.load("a", data.len()).as_deref(), Some(&data[..]));
        }
    }
}

/// Where `block` starts on the drive. A removed object's slots keep their bytes, which are damaged ones.
fn find(drive: &dyn xkv_store::io::Device, block: &[u8]) -> u64 {
    let mut buf = vec![0; block.len()];
    let offsets = (0..drive.size() - block.len() as u64).step_by(block.len());
    let mut found = offsets.filter(|&offset| {
        drive.read_at(&mut buf, offset).unwrap();
        buf == block
    });
    let at = found.next().expect("the block is on the drive");
    assert_eq!(found.next(), None, "one copy");
    at
}

fn a_buffer_of_another_size_is_a_miss_and_the_object_goes(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    for wrong in [4999, 5001, 1, 50_000] {
        assert!(client.put("a", 1, 5000));
        assert_eq!(client.load("a", wrong), None);
        assert_eq!(client.present(&["a"]), [false]);
    }
    assert_eq!(client.count("load_miss_size"), 4);
}

fn ten_thousand_keys_in_one_batch(via: Via) {
    let mut client = Client::on(via, &memory_drives(2, 128 * MIB), 64, config());
    let names: Vec<String> = (0..10_000).map(|i| format!("model@0100@0@{i:064x}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let data: Vec<Vec<u8>> = (0..10_000).map(|i| contents(i, 100 + i as usize % 5000)).collect();
    let sources: Vec<Memory> = data.iter().map(|data| Memory::new(data)).collect();
    let id = client.set(&names, &sources);
    assert!(client.ok(id));
    // More than are looked up in the submit call.
    assert_eq!(client.present(&names), vec![true; 10_000]);
    let targets: Vec<Memory> = data.iter().map(|data| Memory::blank(data.len())).collect();
    let id = client.get(&names, &targets);
    assert_eq!(client.results(id), vec![true; 10_000]);
    for (target, data) in targets.iter().zip(&data) {
        assert_eq!(target.bytes(), data);
    }
    let id = client.delete(&names);
    assert_eq!(client.results(id), vec![true; 10_000]);
    assert_eq!(client.present(&names), vec![false; 10_000]);
    assert_eq!(client.store_stats()["objects"], 0);
}

fn odd_keys_are_told_apart(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    let long = "m".repeat(300);
    let keys = [
        "a/b@1@0@ff",
        "a/b@1@0@ff@salt",
        "../../etc@1@0@ff",
        "a b@1@0@ff",
        "a\u{0}b@1@0@ff",
        "😀@1@0@ff",
        "-SEP-@1@0@ff",
        "",
        long.as_str(),
    ];
    for (i, key) in keys.iter().enumerate() {
        assert!(client.put(key, i as u64, 5000));
    }
    for (i, key) in keys.iter().enumerate() {
        assert_eq!(client.load(key, 5000), Some(contents(i as u64, 5000)), "{key:?}");
    }
}

fn a_key_that_no_manifest_could_hold_is_refused_alone(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    let long = "k".repeat(40_000);
    let memory = Memory::new(&contents(1, 100));
    let id = client.set(&[&long, "short"], &[memory, memory]);
    assert!(!client.ok(id));
    assert_eq!(client.present(&[&long, "short"]), [false, true]);
    assert_eq!(client.load(&long, 100), None);
}

fn namespaces_do_not_meet(via: Via) {
    let drives = memory_drives(1, 16 * MIB);
    let named = |name: &[u8]| Config { namespace: name.to_vec(), ..config() };
    let mut client = Client::on(via, &drives, 16, named(b"bf16"));
    assert!(client.put("a", 1, 5000));
    drop(client);
    let mut client = Client::on(via, &drives, 16, named(b"fp8"));
    assert_eq!(client.present(&["a"]), [false]);
    drop(client);
    let mut client = Client::on(via, &drives, 16, named(b"bf16"));
    assert_eq!(client.load("a", 5000), Some(contents(1, 5000)));
}

fn empty_batches_and_useless_buffers_are_answered(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    for id in [client.set(&[], &[]), client.get(&[], &[]), client.exists(&[]), client.delete(&[])] {
        assert!(client.ok(id));
    }
    let id = client.set(&["empty"], &[Memory::blank(0)]);
    assert!(!client.ok(id));
    let id = client.get(&["empty"], &[Memory::blank(0)]);
    assert_eq!(client.results(id), [false]);
    assert!(client.put("a", 1, 100));
    let good = Memory::blank(100);
    let keys = vec![b"a".to_vec(), b"a".to_vec()];
    let id = client.connector.submit_get(keys.clone(), vec![None, good.buffer()], Box::new(()));
    assert_eq!(client.results(id), [false, true]);
    let id = client.connector.submit_set(keys.clone(), vec![good.buffer()], Box::new(()));
    assert!(!client.ok(id), "one buffer for two keys");
    let id = client.connector.submit_get(keys, vec![good.buffer()], Box::new(()));
    assert_eq!(client.results(id), [false, false]);
    assert!(good.is_stamped());
}

fn owners_come_back_with_the_answer(via: Via) {
    let mut client = Client::on(via, &memory_drives(1, 16 * MIB), 16, config());
    let memory = Memory::new(&contents(1, 10_000));
    let owner = std::sync::Arc::new(());
    let buffers = vec![memory.buffer()];
    let id = client.connector.submit_set(vec![b"a".to_vec()], buffers, Box::new(owner.clone()));
    let answer = client.answer(id);
    assert_eq!(std::sync::Arc::strong_count(&owner), 2);
    drop(answer);
    assert_eq!(std::sync::Arc::strong_count(&owner), 1);
}
