//! I/O straight into L1 and out of it: what goes there and what does not, that no late byte reaches a buffer that was given
//! back, and that nothing is stored of one that was taken back.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Client, FRAGMENT, MIB, Memory, Via, Witness, config, contents};
use xkv_plugin::Config;
use xkv_store::RUN_BYTES;
use xkv_store::io::Device;
use xkv_store::io::device::testing::{Calls, Effect, Fault, FaultyDevice, MemoryDevice, StallDevice};

const SOON: Duration = Duration::from_secs(20);

fn client(drive: Arc<dyn Device>, config: Config) -> Client {
    Client::on(Via::Embedded, &[drive], 16, config)
}

fn quick() -> Config {
    Config { wait_timeout: Duration::from_millis(200), ..config() }
}

#[test]
fn whole_blocks_of_aligned_buffers_go_straight_and_the_rest_through_slots() {
    let drive = Witness::new(MemoryDevice::new(16 * MIB));
    let mut client = client(drive.clone(), config());
    // Neighbouring fragments go in one, up to half of the object.
    let run = RUN_BYTES / FRAGMENT;
    let cases = [
        (3 * FRAGMENT, 2, 3, 0),
        (3 * FRAGMENT + 100, 2, 3, 1),
        ((2 * run + 1) * FRAGMENT, 3, 2 * run + 1, 0),
        (100, 0, 0, 1),
    ];
    for (len, straight, whole, through_slots) in cases {
        let name = len.to_string();
        let mut memory = Memory::aligned(len);
        memory.write(&contents(len as u64, len));
        drive.writes_from(&memory);
        let id = client.set(&[&name], &[memory]);
        assert!(client.ok(id));
        assert_eq!(drive.writes_from(&memory), straight, "{len} bytes");
        let memory = Memory::aligned(len);
        drive.reads(&memory);
        let id = client.get(&[&name], &[memory]);
        assert_eq!(client.results(id), [true]);
        assert_eq!(memory.bytes(), contents(len as u64, len));
        assert_eq!(drive.reads(&memory), (straight, through_slots), "{len} bytes");
        let memory = Memory::blank(len);
        let id = client.get(&[&name], &[memory]);
        assert_eq!(client.results(id), [true]);
        assert_eq!(memory.bytes(), contents(len as u64, len));
        assert_eq!(drive.reads(&memory), (0, whole + through_slots), "{len} bytes, not aligned");
    }
}

/// Striped over drives, an object's neighbours on a drive are apart in memory; each drive is asked once for them all.
#[test]
fn stripes_go_straight_in_one_go_per_drive() {
    let drives: Vec<_> = (0..3).map(|_| Witness::new(MemoryDevice::new(16 * MIB))).collect();
    let devices: Vec<Arc<dyn Device>> = drives.iter().map(|drive| drive.clone() as Arc<dyn Device>).collect();
    let mut client = Client::on(Via::Embedded, &devices, 16, config());
    // Not a multiple of the number of drives, and with a tail that goes through a slot.
    let len = 20 * FRAGMENT + 100;
    for seed in 1..=3 {
        let mut memory = Memory::aligned(len);
        memory.write(&contents(seed, len));
        let id = client.set(&[&seed.to_string()], &[memory]);
        assert!(client.ok(id));
    }
    for seed in 1..=3 {
        let memory = Memory::aligned(len);
        drives.iter().for_each(|drive| _ = drive.reads(&Memory::blank(1)));
        let id = client.get(&[&seed.to_string()], &[memory]);
        assert_eq!(client.results(id), [true]);
        assert_eq!(memory.bytes(), contents(seed, len));
        // The threads of these drives read every piece by itself.
        let read = drives
            .iter()
            .map(|drive| drive.reads(&memory))
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert_eq!(read, (20, 1));
    }
}

#[test]
fn what_the_system_does_not_read_straight_goes_through_a_slot() {
    // Two runs of many fragments: one of them falls apart.
    let len = 2 * RUN_BYTES;
    for errno in [libc::EINVAL, libc::EFAULT] {
        let faulty = FaultyDevice::new(MemoryDevice::new(16 * MIB));
        let mut client = client(faulty.clone(), config());
        assert!(client.put("a", 1, len));
        faulty.inject(Fault { times: 1, ..Fault::every(Calls::READS, Effect::Errno(errno)) });
        let memory = Memory::aligned(len);
        let id = client.get(&["a"], &[memory]);
        assert_eq!(client.results(id), [true], "{errno}");
        assert_eq!(memory.bytes(), contents(1, len));
        assert_eq!(client.present(&["a"]), [true], "not taken for damaged");

        faulty.inject(Fault { times: 1, ..Fault::every(Calls::WRITES, Effect::Errno(errno)) });
        let mut memory = Memory::aligned(len);
        memory.write(&contents(2, len));
        let id = client.set(&["b"], &[memory]);
        assert!(client.ok(id), "{errno}");
        assert_eq!(client.load("b", len), Some(contents(2, len)));
    }
}

#[test]
fn a_wrong_bit_and_an_error_are_misses_that_leave_a_stamp() {
    // Within a run.
    let len = 2 * RUN_BYTES;
    for effect in [Effect::Lie, Effect::Errno(libc::EIO)] {
        let faulty = FaultyDevice::new(MemoryDevice::new(16 * MIB));
        let mut client = client(faulty.clone(), config());
        assert!(client.put("a", 1, len));
        faulty.inject(Fault { times: 1, ..Fault::every(Calls::READS, effect) });
        let memory = Memory::aligned(len);
        let id = client.get(&["a"], &[memory]);
        assert_eq!(client.results(id), [false], "{effect:?}");
        assert!(memory.is_stamped());
        assert_eq!(client.present(&["a"]), [false], "removed: the next store repairs it");
    }
}

/// The one exception to the deadline: nothing takes the buffer from the drive, so LMCache does not get it either.
#[test]
fn a_buffer_that_a_stalled_drive_has_is_given_back_when_the_drive_has_let_go() {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let mut client = client(drive.clone(), quick());
    assert!(client.put("a", 1, FRAGMENT));
    assert!(client.put("b", 2, FRAGMENT));
    drive.stall(Calls::READS);
    let held = Memory::aligned(FRAGMENT);
    let first = client.get(&["a"], &[held]);
    assert!(drive.await_waiting(1, SOON));
    // The drive counts as stalled: others are answered at once and without it.
    let noticed = Instant::now();
    while client.present(&["b"]) != [false] {
        assert!(noticed.elapsed() < SOON, "the stall is noticed");
        std::thread::yield_now();
    }
    let other = Memory::aligned(FRAGMENT);
    let second = client.get(&["b"], &[other]);
    assert_eq!(client.results(second), [false]);
    assert!(other.is_stamped());
    assert_eq!(drive.waiting(), 1, "nothing more was asked of the stalled drive");
    assert!(
        client.answer_within(first, Duration::from_millis(600)).is_none(),
        "the drive still has its buffer"
    );

    drive.resume();
    assert_eq!(client.results(first), [false], "late is a miss");
    assert!(held.is_stamped(), "what came late was stamped over");
    assert_eq!(held.bytes()[64..], contents(1, FRAGMENT)[64..], "it came before the answer");
    let recovered = Instant::now();
    while client.present(&["a"]) != [true] {
        assert!(recovered.elapsed() < SOON, "the drive is used again");
        std::thread::yield_now();
    }
    let again = Memory::aligned(FRAGMENT);
    let id = client.get(&["a"], &[again]);
    assert_eq!(client.results(id), [true]);
    assert_eq!(again.bytes(), contents(1, FRAGMENT));
}

/// As soon as a drive is slow, long before it counts as stalled, it gets slots: those loads keep their deadline.
#[test]
fn loads_that_come_while_a_drive_is_slow_keep_their_deadline() {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let wait_timeout = Duration::from_secs(2);
    let mut client = client(drive.clone(), Config { wait_timeout, ..config() });
    assert!(client.put("a", 1, FRAGMENT));
    assert!(client.put("b", 2, FRAGMENT));
    drive.stall(Calls::READS);
    let held = client.get(&["a"], &[Memory::aligned(FRAGMENT)]);
    assert!(drive.await_waiting(1, SOON));
    // Slow from a quarter of the timeout on: what is asked for from then on is not read straight.
    assert!(client.answer_within(held, Duration::from_millis(1200)).is_none());
    let memory = Memory::aligned(FRAGMENT);
    let started = Instant::now();
    let id = client.get(&["b"], &[memory]);
    assert_eq!(client.results(id), [false]);
    assert!(started.elapsed() < wait_timeout + Duration::from_secs(3));
    assert_eq!(drive.waiting(), 2, "its read is stuck, in a slot");
    assert!(memory.is_stamped());
    drive.resume();
    assert_eq!(client.results(held), [false]);
    assert!(memory.is_stamped(), "the late read did not reach the buffer");
}

/// L1 hands a buffer on while a stalled drive is about to write from it: the store was refused by then, and nothing of it
/// becomes visible.
#[test]
fn a_store_whose_buffer_was_taken_back_leaves_nothing() {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let deadline = Duration::from_millis(300);
    let mut client = client(drive.clone(), Config { store_deadline: deadline, ..config() });
    let mut memory = Memory::aligned(2 * FRAGMENT);
    memory.write(&contents(1, 2 * FRAGMENT));
    drive.stall(Calls::WRITES);
    let id = client.set(&["a"], &[memory]);
    assert!(drive.await_waiting(1, SOON));
    assert!(!client.ok(id), "answered while the drive still has the buffer");
    memory.write(&contents(2, 2 * FRAGMENT));
    drive.resume();
    assert_eq!(client.load("a", 2 * FRAGMENT), None);
    let started = Instant::now();
    while !client.put("a", 3, 2 * FRAGMENT) {
        assert!(started.elapsed() < SOON, "the key and its slots are free again");
    }
    assert_eq!(client.load("a", 2 * FRAGMENT), Some(contents(3, 2 * FRAGMENT)));
}

#[test]
fn closing_with_a_buffer_in_a_stalled_drive_is_bounded() {
    let drive = StallDevice::new(MemoryDevice::new(16 * MIB));
    let mut client = client(drive.clone(), config());
    assert!(client.put("a", 1, FRAGMENT));
    drive.stall(Calls::READS);
    client.get(&["a"], &[Memory::aligned(FRAGMENT)]);
    assert!(drive.await_waiting(1, SOON));
    let started = Instant::now();
    drop(client.connector.close());
    assert!(started.elapsed() < Duration::from_secs(5));
    drive.resume();
}
