//! A gateway that shares its drives: clients read what they lease themselves, and through the gateway where that cannot be.

mod common;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Client, FRAGMENT, MIB, Memory, Rig, Witness, config, contents};
use xkv_plugin::Config;
use xkv_session::ShareDrives;
use xkv_store::io::device::{self, OpenOptions};
use xkv_store::io::{Device, DirectIo};

/// Memory that has a descriptor, or a drive: the folder says which.
fn drive(folder: &Path, bytes: u64) -> Arc<dyn Device> {
    let options = OpenOptions { file_bytes: bytes, ..OpenOptions::default() };
    let device = device::open(folder, &options).expect("a new file");
    device.set_direct(DirectIo::Auto, true).expect("it has a scratch block");
    assert!(device.goes_straight(), "{}", folder.display());
    Arc::new(device)
}

fn scratch(folder: &str) -> tempfile::TempDir {
    tempfile::tempdir_in(folder).expect("a folder")
}

fn device(witness: &Arc<Witness>) -> Arc<dyn Device> {
    witness.clone()
}

fn read_by_gateway(drives: &[Arc<Witness>]) -> usize {
    drives.iter().map(|drive| drive.reads(&Memory::blank(1)).1).sum()
}

fn sharing(drives: &[Arc<dyn Device>]) -> Rig {
    let mut rig = Rig::stopped(drives);
    rig.config.share_drives = ShareDrives::All;
    rig.start();
    rig
}

/// The only session, which the gateway counts a moment after the client has it.
fn session(rig: &Rig) -> serde_json::Value {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(session) = rig.status()["sessions"].get(0) {
            return session.clone();
        }
        assert!(Instant::now() < deadline, "no session");
        std::thread::yield_now();
    }
}

/// Loads `len` bytes into `memory`, and compares them.
fn loads(client: &mut Client, name: &str, memory: Memory, len: usize) {
    let id = client.get(&[name], &[memory]);
    assert_eq!(client.results(id), [true], "{}", client.connector.stats());
    assert!(memory.bytes() == contents(len as u64, len));
}

#[test]
fn whole_blocks_of_aligned_buffers_are_read_without_the_gateway() {
    for folder in [env!("CARGO_TARGET_TMPDIR"), "/dev/shm"] {
        for drives in [1, 3] {
            let folders: Vec<_> = (0..drives).map(|_| scratch(folder)).collect();
            let drives: Vec<Arc<Witness>> =
                folders.iter().map(|folder| Witness::new(drive(folder.path(), 16 * MIB))).collect();
            let devices: Vec<Arc<dyn Device>> = drives.iter().map(|drive| drive.clone() as _).collect();
            let rig = sharing(&devices);
            let mut client = Client::of(&rig, 64, config());
            assert_eq!(session(&rig)["straight"], true);
            let mut all = 0;
            // The last is longer than a slot has room for places.
            for (len, tail) in [(3 * FRAGMENT, 0), (300 * FRAGMENT + 100, 1), (700 * FRAGMENT, usize::MAX)] {
                let name = len.to_string();
                assert!(client.put(&name, len as u64, len));
                read_by_gateway(&drives);
                loads(&mut client, &name, Memory::aligned(len), len);
                assert_eq!(read_by_gateway(&drives).min(1), tail.min(1), "{len} bytes on {folder}");
                if tail <= 1 {
                    all += len - len % FRAGMENT + tail * 100;
                    let told = || session(&rig)["bytes_read"].as_u64();
                    let deadline = Instant::now() + Duration::from_secs(10);
                    while told() != Some(all as u64) {
                        assert!(Instant::now() < deadline, "{:?} of {all} bytes", told());
                        std::thread::yield_now();
                    }
                    loads(&mut client, &name, Memory::blank(len), len);
                    assert!(read_by_gateway(&drives) > 0, "a buffer that is not aligned");
                    all += len;
                }
            }
        }
    }
}

#[test]
fn a_gateway_may_keep_its_drives_to_itself() {
    let folder = scratch("/dev/shm");
    let witness = Witness::new(drive(folder.path(), 16 * MIB));
    let mut rig = Rig::stopped(&[device(&witness)]);
    // What the default is for files.
    rig.start();
    let mut client = Client::of(&rig, 64, config());
    assert_eq!(session(&rig)["straight"], false);
    assert!(client.put("a", 3 * FRAGMENT as u64, 3 * FRAGMENT));
    read_by_gateway(std::slice::from_ref(&witness));
    loads(&mut client, "a", Memory::aligned(3 * FRAGMENT), 3 * FRAGMENT);
    assert!(read_by_gateway(&[witness]) > 0);
}

/// What arrives is looked at before it is trusted: objects are read through the gateway then.
#[test]
fn drives_that_are_others_are_not_read() {
    let (folder, another) = (scratch("/dev/shm"), scratch("/dev/shm"));
    let other = drive(another.path(), 16 * MIB);
    drop(Client::on(common::Via::Embedded, std::slice::from_ref(&other), 16, config()));
    let written = File::create(folder.path().join("written")).expect("a file");
    let short = File::open("/proc/self/exe").expect("a program");
    let pipe = std::io::pipe().expect("a pipe").0;
    let others = [other.share().expect("a file"), written.into(), short.into(), pipe.into()];
    let witness = Witness::new(drive(folder.path(), 16 * MIB));
    for (number, other) in others.into_iter().enumerate() {
        *witness.other.lock() = Some(other);
        let rig = sharing(&[device(&witness)]);
        let mut client = Client::of(&rig, 64, config());
        let len = (3 + number) * FRAGMENT;
        assert!(client.put(&len.to_string(), len as u64, len));
        read_by_gateway(std::slice::from_ref(&witness));
        loads(&mut client, &len.to_string(), Memory::aligned(len), len);
        assert!(read_by_gateway(std::slice::from_ref(&witness)) > 0, "number {number}");
    }
}

/// A byte that was changed on the drive is found by the client, and the object removed by the gateway.
#[test]
fn damage_is_found_and_the_object_removed() {
    let folder = scratch("/dev/shm");
    let drive = drive(folder.path(), 16 * MIB);
    let rig = sharing(std::slice::from_ref(&drive));
    let mut client = Client::of(&rig, 64, config());
    let len = 20 * FRAGMENT;
    assert!(client.put("a", len as u64, len));
    let (wanted, mut block) = (contents(len as u64, len), vec![0; FRAGMENT]);
    let at = (0..16 * MIB).step_by(FRAGMENT).find(|&at| {
        drive.read_at(&mut block, at).expect("a file");
        block == wanted[7 * FRAGMENT..8 * FRAGMENT]
    });
    block[100] ^= 1;
    drive.write_at(&block, at.expect("it is there")).expect("a file");
    let memory = Memory::aligned(len);
    let id = client.get(&["a"], &[memory]);
    assert_eq!(client.results(id), [false]);
    assert!(memory.is_stamped());
    assert!(client.present_in_the_end("a", false));
    assert!(client.put("a", len as u64, len));
    loads(&mut client, "a", Memory::aligned(len), len);
}

/// Slots are used again all the time, and gateways come and go. Nothing is verified here: what counts is whether the lease did.
#[test]
fn no_slot_is_read_that_holds_something_else() {
    const OBJECTS: u64 = 60;
    let folder = scratch("/dev/shm");
    let mut rig = sharing(&[drive(folder.path(), 4 * MIB)]);
    let settings =
        Config { verify: xkv_plugin::Verify::Off, wait_timeout: Duration::from_secs(1), ..config() };
    let mut reader = Client::of(&rig, 64, settings.clone());
    let mut writer = Client::of(&rig, 64, settings);
    let size = |object: u64| (20 + object as usize % 30) * FRAGMENT;
    let (mut hits, mut restarts) = (0, 0);
    let end = Instant::now() + Duration::from_secs(6);
    for round in 0.. {
        if Instant::now() > end {
            break;
        }
        let asked: Vec<(u64, Memory)> = (0..12)
            .map(|i| (round * 7 + i * 5) % OBJECTS)
            .map(|object| (object, Memory::aligned(size(object))))
            .collect();
        let names: Vec<String> = asked.iter().map(|(object, _)| object.to_string()).collect();
        let memory: Vec<Memory> = asked.iter().map(|(_, memory)| *memory).collect();
        let id = reader.get(&names.iter().map(String::as_str).collect::<Vec<_>>(), &memory);
        for i in 0..4 {
            let object = (round * 11 + i) % OBJECTS;
            writer.put(&object.to_string(), object, size(object));
        }
        if round % 16 == 15 {
            rig.stop();
            rig.start();
            restarts += 1;
        }
        for ((object, memory), hit) in asked.iter().zip(reader.results(id)) {
            if hit {
                hits += 1;
                assert!(memory.bytes() == contents(*object, size(*object)), "object {object}, round {round}");
            }
        }
    }
    println!("{hits} objects loaded, {restarts} restarts");
    assert!(hits > 100 && restarts > 3, "{hits} objects, {restarts} restarts");
}
