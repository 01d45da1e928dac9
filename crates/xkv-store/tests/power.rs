//! Power cuts and kill -9 at every kind of moment, against a plain map: what was acknowledged is there byte for byte,
//! what else is visible is right too, no slot is lost or used twice.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::*;
use proptest::prelude::*;
use xkv_store::Store;
use xkv_store::io::Device;
use xkv_store::io::device::testing::{CrashDevice, MemoryDevice};

#[derive(Clone, Debug)]
enum Step {
    Put(u8, u16),
    Remove(u8),
    Get(u8),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..24u8, 1..20_000u16).prop_map(|(k, len)| Step::Put(k, len)),
        2 => (0..24u8).prop_map(Step::Remove),
        2 => (0..24u8).prop_map(Step::Get),
        1 => Just(Step::Reopen),
    ]
}

/// Contents depend on key and version: an old version of a key is a wrong byte.
fn data(k: u8, version: u64, len: u16) -> Vec<u8> {
    contents(u64::from(k) << 32 | version, usize::from(len))
}

/// What may be found under a key after a crash.
#[derive(Clone, Default)]
struct Expected {
    /// Acknowledged last; none: absent.
    acknowledged: Option<(u64, u16)>,
    /// Not acknowledged: may or may not have happened. None in it: a removal.
    possible: Vec<Option<(u64, u16)>>,
}

fn check(store: &Store, expected: &HashMap<u8, Expected>) {
    let mut sizes = Vec::new();
    for k in 0..24u8 {
        let expected = expected.get(&k).cloned().unwrap_or_default();
        let found = match get(store, &key([k])) {
            Get::Data(data) => Some(data),
            Get::Absent => None,
            Get::Discarded => {
                panic!("key {k}: a visible object must have right bytes when flushes are honoured")
            }
        };
        let allowed = std::iter::once(&expected.acknowledged).chain(&expected.possible);
        let right = allowed.into_iter().any(|a| a.map(|(version, len)| data(k, version, len)) == found);
        assert!(right, "key {k}: {:?} bytes found", found.map(|f| f.len()));
        sizes.extend(found.map(|f| f.len() as u64));
    }
    await_until("usage is the sum of the live objects", || {
        store.stats().slots_used == slots_of(sizes.iter().copied(), 4096)
    });
}

/// Runs steps on drives that freeze after `writes` writes; then cuts the power and looks.
fn run(steps: &[Step], drives: usize, writes: u64, seed: u64) {
    let base: Vec<Arc<MemoryDevice>> = (0..drives).map(|_| MemoryDevice::new(6 * MIB)).collect();
    // The store exists before the power can fail.
    drop(open_on(&base.iter().map(|d| d.clone() as Arc<dyn Device>).collect::<Vec<_>>(), &config()));
    let crash: Vec<Arc<CrashDevice>> = base.iter().map(|image| CrashDevice::new(image)).collect();
    let devices: Vec<Arc<dyn Device>> = crash.iter().map(|d| d.clone() as Arc<dyn Device>).collect();
    let mut store = open_on(&devices, &config());
    for drive in &crash {
        drive.freeze_after(writes);
    }
    let mut expected: HashMap<u8, Expected> = HashMap::new();
    for (version, step) in steps.iter().enumerate() {
        let version = version as u64;
        match *step {
            Step::Put(k, len) => {
                let entry = expected.entry(k).or_default();
                match put(&store, &key([k]), &data(k, version, len)) {
                    Put::Stored => {
                        *entry = Expected { acknowledged: Some((version, len)), possible: Vec::new() }
                    }
                    Put::Present => {}
                    _ => entry.possible.push(Some((version, len))),
                }
            }
            Step::Remove(k) => {
                let entry = expected.entry(k).or_default();
                match remove(&store, &key([k])) {
                    Ok(_) => *entry = Expected::default(),
                    Err(_) => entry.possible.push(None),
                }
            }
            Step::Get(k) => {
                if let Get::Data(found) = get(&store, &key([k])) {
                    let acknowledged = expected.get(&k).and_then(|e| e.acknowledged);
                    assert_eq!(acknowledged.map(|(version, len)| data(k, version, len)), Some(found));
                }
            }
            Step::Reopen if crash.iter().all(|drive| !drive.is_frozen()) => {
                drop(store);
                match Store::open_on(devices.clone(), &config()) {
                    Ok(reopened) => store = reopened,
                    // The power went while opening.
                    Err(_) => {
                        verify(&crash, &expected, seed);
                        return;
                    }
                }
            }
            Step::Reopen => {}
        }
    }
    drop(store);
    verify(&crash, &expected, seed);
}

fn verify(crash: &[Arc<CrashDevice>], expected: &HashMap<u8, Expected>, seed: u64) {
    let images: [fn(&CrashDevice, u64) -> Arc<MemoryDevice>; 3] =
        [|d, _| d.live(), |d, _| d.durable(), |d, seed| d.crash(seed)];
    for image in images {
        let devices: Vec<Arc<dyn Device>> =
            crash.iter().zip(seed..).map(|(d, seed)| image(d, seed) as Arc<dyn Device>).collect();
        let store = open_on(&devices, &config());
        check(&store, expected);
        drop(store);
        // Opening twice gives the same: recovery leaves a whole log.
        let store = open_on(&devices, &config());
        check(&store, expected);
        assert_eq!(store.stats().damaged, 0);
    }
}

/// A short campaign by default; `PROPTEST_CASES` sets its length.
fn campaign() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(96);
    ProptestConfig { cases, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(campaign())]

    #[test]
    fn what_was_acknowledged_survives_a_power_cut(
        steps in prop::collection::vec(step(), 1..60),
        drives in 1..3usize,
        writes in 1..200u64,
        seed in any::<u64>(),
    ) {
        run(&steps, drives, writes, seed >> 1);
    }
}

#[test]
fn many_writers_lose_nothing_when_the_power_goes() {
    for round in 0..12u64 {
        let base = MemoryDevice::new(12 * MIB);
        drop(open_on(&[base.clone() as Arc<dyn Device>], &config()));
        let crash = CrashDevice::new(&base);
        let store = open_on(&[crash.clone() as Arc<dyn Device>], &config());
        crash.freeze_after(40 + round * 37);
        let acknowledged: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..6u64)
                .map(|writer| {
                    let store = &store;
                    scope.spawn(move || {
                        let mut done = Vec::new();
                        for i in 0..60 {
                            let n = writer * 1000 + i;
                            match put(store, &key(n.to_le_bytes()), &contents(n, 6000)) {
                                Put::Stored => done.push(n),
                                _ => break,
                            }
                        }
                        done
                    })
                })
                .collect();
            writers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        let acknowledged: Vec<u64> = acknowledged.into_iter().flatten().collect();
        assert!(crash.is_frozen() && !acknowledged.is_empty(), "round {round}: {}", acknowledged.len());
        drop(store);
        for seed in 0..4 {
            let store = open_on(&[crash.crash(seed)], &config());
            for n in &acknowledged {
                assert!(
                    get(&store, &key(n.to_le_bytes())) == Get::Data(contents(*n, 6000)),
                    "round {round}, object {n}"
                );
            }
        }
    }
}
