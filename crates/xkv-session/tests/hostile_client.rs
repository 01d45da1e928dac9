//! Clients that break every rule, against a real gateway. Each may lose its own session; the gateway must not crash,
//! hang or keep anything of theirs, and another session stores and loads byte-checked all the while.
//!
//! `XKV_ROUNDS` multiplies the rounds of the random campaigns (`scripts/fuzz long`).

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::raw::{COMPLETION, NO_SLOT, Raw, SUBMISSION, frame, hello, read_frame};
use common::*;
use rustix::fs::{FallocateFlags, SealFlags};
use xkv_session::entry::Operation::{self, *};
use xkv_session::entry::Status;
use xkv_session::{ClientConfig, GatewayConfig, Session};
use xkv_store::io::device::testing::{Calls, MemoryDevice, StallDevice};

fn rounds(usual: u64) -> u64 {
    usual * std::env::var("XKV_ROUNDS").map_or(1, |text| text.parse().expect("XKV_ROUNDS is a number"))
}

fn large_rig() -> Rig {
    rig_with(MemoryDevice::new(64 << 20), |_| ())
}

/// Nothing of any client is left: no session, and room for everything again, so no lease or transaction either.
fn assert_floor(rig: &Rig) {
    await_until("all sessions are gone", || rig.gateway.status().sessions.is_empty());
    let session = Session::open(&ClientConfig { silence: PATIENCE, ..rig.config() }).unwrap();
    let object = 1 << 20;
    for i in 0..3 * rig.store.stats().slots_total * FRAGMENT as u64 / object {
        let name = key(&format!("floor {i}"));
        assert_eq!(put(&session, &name, &contents(i, object as usize)).unwrap(), Status::Done, "{i}");
    }
    drop(session);
    await_until("all sessions are gone", || rig.gateway.status().sessions.is_empty());
    let stats = rig.store.stats();
    assert_eq!(stats.slots_used, stats.objects * object / FRAGMENT as u64, "every used slot is an object's");
}

fn invalid(raw: &mut Raw, operation: Operation, slot: u32, handle: u64, argument: u64) {
    let reply = raw.call(operation as u8, slot, handle, argument).expect("the session lives on");
    assert_eq!(reply.status, Status::Invalid as u8, "{operation:?} {slot} {handle} {argument}");
}

fn done(raw: &mut Raw, operation: Operation, slot: u32, handle: u64, argument: u64) -> raw::Reply {
    let reply = raw.call(operation as u8, slot, handle, argument).expect("the session lives on");
    assert_eq!(reply.status, Status::Done as u8, "{operation:?} {slot} {handle} {argument}");
    reply
}

#[test]
fn senseless_requests_are_answered_as_invalid() {
    let _alone = alone();
    let rig = large_rig();
    let witness = Witness::start(&rig);
    let (mut raw, mut other) = (Raw::open(&rig).unwrap(), Raw::open(&rig).unwrap());

    raw.put_key(0, "a");
    let txn = done(&mut raw, Begin, 0, 0, 9000).handle;
    for argument in [3, 1 << 32, u64::MAX] {
        invalid(&mut raw, Write, 1, txn, argument);
    }
    invalid(&mut other, Write, 1, txn, 0);
    invalid(&mut other, Commit, NO_SLOT, txn, 0);
    invalid(&mut raw, Write, NO_SLOT, txn, 0);
    invalid(&mut raw, Read, 1, txn, 0);
    invalid(&mut raw, Commit, 1, txn, 0);
    done(&mut raw, Write, 1, txn, 0);
    invalid(&mut raw, Write, 1, txn, 0);
    invalid(&mut raw, Commit, NO_SLOT, txn, 0);
    invalid(&mut raw, Write, 1, txn, 1);

    raw.put_key(0, "a");
    let txn = done(&mut raw, Begin, 0, 0, 4096).handle;
    done(&mut raw, Write, 1, txn, 0);
    done(&mut raw, Commit, NO_SLOT, txn, 0);
    invalid(&mut raw, Commit, NO_SLOT, txn, 0);
    invalid(&mut raw, Write, 1, txn, 0);
    raw.put_key(0, "a");
    assert_eq!(raw.call(Begin as u8, 0, 0, 4096).unwrap().status, Status::Present as u8);
    raw.put_key(0, "a");
    let lease = done(&mut raw, Open, 0, 0, 0);
    assert_eq!(lease.value, 4096);
    for argument in [1, 1 << 32, u64::MAX] {
        invalid(&mut raw, Read, 1, lease.handle, argument);
    }
    invalid(&mut other, Read, 1, lease.handle, 0);
    invalid(&mut other, Discard, NO_SLOT, lease.handle, 0);
    invalid(&mut raw, Commit, NO_SLOT, lease.handle, 0);
    done(&mut raw, Close, NO_SLOT, lease.handle, 0);
    invalid(&mut raw, Read, 1, lease.handle, 0);
    invalid(&mut raw, Discard, NO_SLOT, lease.handle, 0);
    for handle in [0, 1, lease.handle, u64::MAX] {
        done(&mut raw, Close, NO_SLOT, handle, 0);
        invalid(&mut raw, Close, 3, handle, 0);
    }

    let lookups = raw.slot_bytes / 32;
    done(&mut raw, Lookup, 2, 0, lookups);
    done(&mut raw, Lookup, 2, 0, 0);
    for count in [lookups + 1, 1 << 59, u64::MAX] {
        invalid(&mut raw, Lookup, 2, 0, count);
    }
    invalid(&mut raw, Lookup, NO_SLOT, 0, 1);

    for (namespace, key) in
        [(u32::MAX, u32::MAX), (0, 4089), (4089, 0), (2048, 2041), (u32::MAX, 1), (1, u32::MAX)]
    {
        raw.put_slot(4, &[namespace.to_le_bytes(), key.to_le_bytes()].concat());
        for operation in [Open, Begin, Remove] {
            invalid(&mut raw, operation, 4, 0, 1);
        }
    }
    raw.put_slot(4, &[0; 8]);
    assert_eq!(raw.call(Open as u8, 4, 0, 0).unwrap().status, Status::Absent as u8);
    for size in [0, 1 << 40, u64::MAX] {
        raw.put_key(4, "size");
        assert_eq!(raw.call(Begin as u8, 4, 0, size).unwrap().status, Status::NoSpace as u8, "{size}");
    }
    witness.finish();
    drop((raw, other));
    assert_floor(&rig);
}

#[test]
fn a_run_is_read_where_it_lies_together_and_nowhere_else() {
    let _alone = alone();
    let rig = large_rig();
    let witness = Witness::start(&rig);
    let mut raw = Raw::open(&rig).unwrap();
    let txns: Vec<u64> = ["a", "b"]
        .map(|name| {
            raw.put_key(0, name);
            done(&mut raw, Begin, 0, 0, 4 * 4096 + 100).handle
        })
        .into();
    for (&txn, name) in txns.iter().zip(1u8..) {
        for index in 0..5 {
            raw.put_slot(1, &[16 * name + index; 4096]);
            done(&mut raw, Write, 1, txn, u64::from(index));
        }
        done(&mut raw, Commit, NO_SLOT, txn, 0);
    }
    raw.put_key(0, "a");
    let lease = done(&mut raw, Open, 0, 0, 0).handle;
    // Drive 0, and all but the first lie behind the one before them.
    assert_eq!(raw.get::<5>(raw.slot_offset(0)), [0, 0x80, 0x80, 0x80, 0x80]);

    let run = |first: u64, step: u64| first | step << 32;
    let read = raw.call_slots(Read as u8, &[7, 2, 5, 3], lease, run(1, 1)).unwrap();
    assert_eq!((read.status, read.value), (Status::Done as u8, 3 * 4096 + 100));
    for (slot, index) in [(7, 1), (2, 2), (5, 3), (3, 4)] {
        assert_eq!(raw.get::<64>(raw.slot_offset(slot)), [16 + index; 64], "slot {slot}");
    }
    // The first half of a run, in other slots.
    let read = raw.call_slots(Read as u8, &[3, 7], lease, run(0, 1)).unwrap();
    assert_eq!((read.status, read.value), (Status::Done as u8, 2 * 4096));
    assert_eq!((raw.get::<64>(raw.slot_offset(3)), raw.get::<64>(raw.slot_offset(7))), ([16; 64], [17; 64]));

    let senseless = [
        (vec![1, 2], run(0, 0)),
        (vec![1, 2], run(0, 2)),
        (vec![1, 2], run(4, 1)),
        (vec![1, 2, 3, 4], run(2, 1)),
        (vec![1, 2], run(1, u64::from(u32::MAX))),
        (vec![1, 2], run(u64::from(u32::MAX), 1)),
        (vec![1], run(0, 1)),
    ];
    for (slots, argument) in senseless {
        let reply = raw.call_slots(Read as u8, &slots, lease, argument).expect("the session lives on");
        assert_eq!(reply.status, Status::Invalid as u8, "{slots:?} {argument:#x}");
    }
    // Of other operations further slots mean nothing, and of a read without a first one.
    let reply = raw.call_slots(Lookup as u8, &[1, 1, 70_000], 0, 0).unwrap();
    assert_eq!(reply.status, Status::Done as u8);
    let reply = raw.call_slots(Read as u8, &[NO_SLOT, 1], lease, run(0, 1)).unwrap();
    assert_eq!(reply.status, Status::Invalid as u8);
    witness.finish();
    drop(raw);
    assert_floor(&rig);
}

/// What the client writes, and what the gateway says of it in its log.
type Breach = (&'static str, fn(&mut Raw));

#[test]
fn a_breach_of_the_ring_ends_the_session_and_no_other() {
    let _alone = alone();
    let rig = large_rig();
    let witness = Witness::start(&rig);
    let floor = Held::floor();
    let breaches: &[Breach] = &[
        ("more entries than places", |raw| raw.set_tail(raw.entries + 1)),
        ("an index that jumps", |raw| raw.set_tail(1 << 31)),
        ("an index before the start", |raw| raw.set_tail(u32::MAX)),
        ("an index taken back", |raw| {
            assert!(raw.call(Close as u8, NO_SLOT, 1, 0).is_some());
            raw.set_tail(0);
        }),
        ("replies taken that never came", |raw| {
            raw.set_completion_head(7);
            raw.send(Close as u8, NO_SLOT, 1, 0);
        }),
        ("a slot beyond the last", |raw| _ = raw.send(Lookup as u8, raw.slots, 0, 1)),
        ("a slot far beyond the last", |raw| _ = raw.send(Lookup as u8, u32::MAX - 1, 0, 1)),
        ("a further slot beyond the last", |raw| {
            let beyond = raw.slots;
            raw.send_slots(Read as u8, &[0, beyond], 1, 0);
        }),
        ("a further slot far beyond the last", |raw| {
            raw.send_slots(Read as u8, &[0, 1, u32::MAX - 1], 1, 0);
        }),
        ("a slot twice in one request", |raw| _ = raw.send_slots(Read as u8, &[3, 4, 3], 1, 0)),
        ("an empty entry", |raw| {
            raw.push(&[0; 64]);
            raw.publish();
        }),
        ("number 0", |raw| {
            let mut entry = raw.entry(Close as u8, NO_SLOT, 1, 0);
            entry[..8].fill(0);
            raw.push(&entry);
            raw.publish();
        }),
        ("an unknown operation", |raw| _ = raw.send(10, NO_SLOT, 0, 0)),
        ("the last operation", |raw| _ = raw.send(255, NO_SLOT, 0, 0)),
        ("an event as a request", |raw| _ = raw.send(Space as u8, NO_SLOT, 0, 0)),
        ("a frame too large", |raw| raw.control.write_all(&65_537u32.to_le_bytes()).unwrap()),
        ("a frame that is no JSON", |raw| raw.control.write_all(&frame(b"\xff{]")).unwrap()),
        ("an unknown message", |raw| raw.control.write_all(&frame(br#"{"type":"dance"}"#)).unwrap()),
        ("nesting without end", |raw| raw.control.write_all(&frame(&[b'['; 60_000])).unwrap()),
        ("half a frame and the end", |raw| {
            raw.control.write_all(&[9, 0, 0, 0, b'{']).unwrap();
            raw.control.shutdown(Shutdown::Write).unwrap();
        }),
        ("a closed connection", |raw| raw.control.shutdown(Shutdown::Both).unwrap()),
    ];
    for (what, breach) in breaches {
        let mut raw = Raw::open(&rig).unwrap();
        breach(&mut raw);
        raw.await_end(what);
        witness.await_rounds(1);
    }
    floor.await_again();
    witness.finish();
    assert_floor(&rig);
}

#[test]
fn a_slot_in_use_cannot_be_named_again() {
    let _alone = alone();
    let stall = StallDevice::new(MemoryDevice::new(64 << 20));
    let rig = rig_with(stall.clone(), |_| ());
    let mut raw = Raw::open(&rig).unwrap();
    raw.put_key(0, "a");
    let txn = done(&mut raw, Begin, 0, 0, 4096).handle;
    stall.stall(Calls::WRITES);
    raw.send(Write as u8, 1, txn, 0);
    assert!(stall.await_waiting(1, PATIENCE));
    raw.send(Lookup as u8, 1, 0, 1);
    raw.await_end("the session of a slot used twice");
    // The drive still reads from the dead session's memory: it stays until the drive is done.
    assert_eq!(Held::now().rings, 1 + 1, "the gateway's mapping and this test's");
    stall.resume();
    await_until("the gateway's mapping is gone", || Held::now().rings == 1);
    drop(raw);
    assert_floor(&rig);
}

#[test]
fn a_session_has_so_many_leases_and_no_more() {
    let _alone = alone();
    let rig = large_rig();
    let session = rig.open();
    put(&session, &key("a"), b"a").unwrap();
    let mut raw = Raw::open(&rig).unwrap();
    let mut opened = 0;
    let status = loop {
        raw.put_key(0, "a");
        let reply = raw.call(Open as u8, 0, 0, 0).unwrap();
        if reply.status != Status::Done as u8 {
            break reply.status;
        }
        opened += 1;
    };
    assert_eq!((opened, status), (16_384, Status::Limit as u8));
    raw.put_key(0, "b");
    assert_eq!(raw.call(Begin as u8, 0, 0, 1).unwrap().status, Status::Limit as u8);
    drop((raw, session));
    assert_floor(&rig);
}

#[test]
fn a_client_that_takes_no_replies_stops_only_itself() {
    let _alone = alone();
    // So small that the witness waits for room, and events are told to everybody.
    let rig = rig_with(MemoryDevice::new(6 << 20), |_| ());
    let witness = Witness::start(&rig);
    let mut raw = Raw::open(&rig).unwrap();
    let entries = raw.entries;
    for slot in 0..2 * entries {
        raw.send(Lookup as u8, slot % 16, 0, 1);
        await_until("the request is taken, or the ring is full", || {
            raw.waiting() == 0 || slot + 4 >= entries
        });
        _ = raw.heartbeat();
        if raw.waiting() == entries {
            break;
        }
    }
    let held = raw.waiting();
    assert!(held >= entries - 4, "the gateway took {} more than it can answer", entries - held);
    let session = rig.open();
    for i in 0..40u64 {
        assert_eq!(put(&session, &key(&format!("{i}")), &contents(i, 100_000)).unwrap(), Status::Done);
        _ = raw.heartbeat();
    }
    witness.await_rounds(10);
    assert!(!raw.has_ended(), "events do not overflow the ring of a slow client");
    // Now it takes them: every request is answered, and the events it missed come too.
    for _ in 0..entries {
        assert_eq!(raw.reply().expect("every request is answered").status, Status::Done as u8);
        _ = raw.heartbeat();
    }
    witness.finish();
}

#[test]
fn random_bytes_cost_only_the_session() {
    let _alone = alone();
    let rig = large_rig();
    let witness = Witness::start(&rig);
    let floor = Held::floor();
    for seed in 1..=rounds(1_500) {
        let rng = &mut Rng::new(seed);
        let Ok(mut raw) = Raw::open(&rig) else { panic!("seed {seed}: no session") };
        for _ in 0..=rng.below(3) {
            attack(&mut raw, rng);
        }
        let deadline = Instant::now() + Duration::from_millis(rng.below(6));
        while raw.waiting() != 0 && Instant::now() < deadline && !raw.has_ended() {
            std::thread::yield_now();
        }
        if seed % 100 == 0 {
            drop(raw);
            witness.await_rounds(1);
            floor.await_again();
        }
    }
    floor.await_again();
    witness.finish();
    assert_floor(&rig);
}

fn attack(raw: &mut Raw, rng: &mut Rng) {
    match rng.below(10) {
        0 => {
            let offset = rng.below(raw.bytes() - 256);
            raw.put(offset, &rng.bytes(256));
        }
        1 => {
            let at = rng.pick(&[SUBMISSION, COMPLETION]) + 128 * rng.below(3);
            raw.put(at, &rng.bytes(4));
            raw.set_tail(rng.next() as u32);
        }
        2 => {
            for _ in 0..rng.below(20) {
                let entry = rng.bytes(64).try_into().unwrap();
                raw.push(&entry);
            }
            raw.publish();
        }
        3 => {
            let len = rng.below(300) as usize;
            let body = rng.bytes(len);
            _ = raw.control.write_all(&if rng.below(2) == 0 { body } else { frame(&body) });
        }
        4 => {
            let whole = frame(br#"{"type":"status","version":1,"token":"x","io":"0x1","reason":[]}"#);
            let mut bytes = whole.repeat(1 + rng.below(4) as usize);
            for _ in 0..rng.below(4) {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] = rng.next() as u8;
            }
            bytes.truncate(rng.below(bytes.len() as u64) as usize + 1);
            _ = raw.control.write_all(&bytes);
        }
        5 => _ = raw.control.shutdown(rng.pick(&[Shutdown::Write, Shutdown::Both])),
        _ => {
            // Nearly right: what a broken client would send.
            for _ in 0..rng.below(60) {
                let slot = rng.below(17) as u32;
                match rng.below(4) {
                    0 => raw.put_key(slot.min(15), &format!("hostile {}", rng.below(8))),
                    1 => raw.put_slot(slot.min(15), &rng.bytes(64)),
                    _ => {}
                }
                let slot = if rng.below(3) == 0 { NO_SLOT } else { slot };
                let handle = if rng.below(20) == 0 { rng.next() } else { rng.below(6) };
                let argument = rng.pick(&[0, 0, 1, 2, 3, 128, 129, 4096, 9_000, u64::MAX]);
                let entry = raw.entry(1 + rng.below(9) as u8, slot, handle, argument);
                raw.push(&entry);
            }
            raw.publish();
            if rng.below(2) == 0 {
                let taken = rng.below(9) as u32;
                raw.set_completion_head(taken);
            }
        }
    }
}

#[test]
fn connections_that_say_nothing_or_little_are_dropped() {
    let _alone = alone();
    let rig = large_rig();
    let witness = Witness::start(&rig);
    let floor = Held::floor();
    let address = rig.gateway.addresses()[0];
    let mut held = Vec::new();
    // The last one is one too many, and is told so; unless it came so late that the first ones were gone: it ends as they do.
    let (last, refused) = (0..10)
        .find_map(|_| {
            held.extend((0..1_000).map(|_| TcpStream::connect(address).unwrap()));
            let mut last = held.pop()?;
            last.set_read_timeout(Some(PATIENCE)).unwrap();
            let refused = read_frame(&mut last).ok()?;
            Some((last, refused))
        })
        .expect("one is refused");
    assert_eq!((refused["type"].as_str(), refused["code"].as_str()), (Some("refused"), Some("limit")));
    witness.await_rounds(5);
    // Some of the others send a byte now and then: that does not prolong their stay.
    let began = Instant::now();
    let ended = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        matches!(stream.read(&mut [0; 512]), Ok(0)) || stream.take_error().is_ok_and(|error| error.is_some())
    };
    await_until("the slow ones are dropped", || held[0].write_all(b" ").is_err() || ended(&mut held[0]));
    assert!(began.elapsed() < Duration::from_secs(10));
    drop((held, last));
    floor.await_again();
    let session = rig.open();
    assert_eq!(put(&session, &key("after"), b"after").unwrap(), Status::Done);
    witness.finish();
}

#[test]
fn a_frame_sent_byte_by_byte_is_silence() {
    let _alone = alone();
    let rig = large_rig();
    let mut raw = Raw::open(&rig).unwrap();
    raw.put_key(0, "a");
    done(&mut raw, Begin, 0, 0, 4096);
    let began = Instant::now();
    raw.control.write_all(&60_000u32.to_le_bytes()).unwrap();
    await_until("the session ends", || {
        std::thread::sleep(Duration::from_millis(20));
        raw.control.write_all(b" ").is_err() || raw.has_ended()
    });
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    assert_floor(&rig);
}

#[test]
fn a_client_without_heartbeats_loses_its_session() {
    let _alone = alone();
    let rig = large_rig();
    let mut raw = Raw::open(&rig).unwrap();
    raw.put_key(0, "a");
    done(&mut raw, Begin, 0, 0, 4096);
    let began = Instant::now();
    // Requests are no heartbeats: the ring may be alive while the process behind the connection is not.
    await_until("the session ends", || {
        raw.send(Close as u8, NO_SLOT, 99, 0);
        raw.reply();
        raw.has_ended()
    });
    let took = began.elapsed();
    assert!(took > Duration::from_millis(1_500) && took < Duration::from_secs(6), "{took:?}");
    assert_floor(&rig);
}

#[test]
fn memory_that_is_not_fetched_or_fetched_wrongly_is_given_back() {
    let _alone = alone();
    let rig = large_rig();
    let witness = Witness::start(&rig);
    let floor = Held::floor();
    let socket = |welcome: &serde_json::Value| rig.folder.path().join(welcome["socket"].as_str().unwrap());

    // Never fetched: refused after a while, and the name is gone.
    let (mut control, welcome) = hello(&rig).unwrap();
    let path = socket(&welcome);
    let refused = read_frame(&mut control).unwrap();
    assert_eq!(refused["type"], "refused");
    assert!(!path.exists());

    // Wrong tickets, short ones, slow ones, none at all; then the right one still gets it.
    let (_control, welcome) = hello(&rig).unwrap();
    for ticket in [&[7; 8][..], &[], &[1, 2, 3]] {
        let mut stream = UnixStream::connect(socket(&welcome)).unwrap();
        stream.write_all(ticket).unwrap();
        drop(stream);
    }
    let slow = UnixStream::connect(socket(&welcome)).unwrap();
    let ticket = u64::from_str_radix(&welcome["ticket"].as_str().unwrap()[2..], 16).unwrap();
    let name = welcome["socket"].as_str().unwrap();
    let fd = xkv_session::pass::fetch(rig.folder.path(), name, ticket, PATIENCE).unwrap();
    drop((fd, slow));

    // Clients that leave in between keep neither memory nor a place.
    for _ in 0..50 {
        drop(hello(&rig).unwrap());
    }
    drop((control, _control));
    floor.await_again();
    witness.finish();
    assert_eq!(std::fs::read_dir(rig.folder.path()).unwrap().count(), 0, "no socket is left");
}

#[test]
fn the_memory_can_be_neither_shrunk_nor_sealed_and_holes_harm_nobody() {
    let _alone = alone();
    let rig = large_rig();
    let witness = Witness::start(&rig);
    let raw = Raw::open(&rig).unwrap();
    let bytes = raw.bytes();
    for len in [0, bytes - 1, bytes + 1] {
        assert!(raw.file.set_len(len).is_err(), "{len}");
    }
    for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE, SealFlags::SEAL] {
        assert!(rustix::fs::fcntl_add_seals(&raw.file, seal).is_err(), "{seal:?}");
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&raw.file, hole, 0, bytes).unwrap();
    raw.set_tail(1);
    let mut raw = raw;
    raw.await_end("an entry of zeros");
    witness.finish();
    drop(raw);
    assert_floor(&rig);
}

#[test]
fn many_sessions_at_once_find_their_limit() {
    let _alone = alone();
    let rig = rig_with(MemoryDevice::new(32 << 20), |config: &mut GatewayConfig| config.max_sessions = 5);
    let floor = Held::floor();
    let outcomes: Vec<bool> = std::thread::scope(|scope| {
        let tries: Vec<_> = (0..12).map(|_| scope.spawn(|| Raw::open(&rig).ok())).collect();
        let opened: Vec<_> = tries.into_iter().map(|one| one.join().unwrap()).collect();
        opened.iter().map(Option::is_some).collect()
    });
    assert_eq!(outcomes.iter().filter(|&&opened| opened).count(), 5);
    floor.await_again();
}

#[test]
fn a_long_name_breaks_no_status() {
    let _alone = alone();
    let rig = large_rig();
    let mut held = Vec::new();
    for _ in 0..20 {
        let mut control = TcpStream::connect(rig.gateway.addresses()[0]).unwrap();
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        let name = "\\u0007".repeat(9_000);
        let hello = format!(r#"{{"type":"hello","version":1,"client":"{name}","slots":1}}"#);
        control.write_all(&frame(hello.as_bytes())).unwrap();
        let welcome = read_frame(&mut control).unwrap();
        let ticket = u64::from_str_radix(&welcome["ticket"].as_str().unwrap()[2..], 16).unwrap();
        let socket = welcome["socket"].as_str().unwrap();
        xkv_session::pass::fetch(rig.folder.path(), socket, ticket, PATIENCE).unwrap();
        held.push(control);
    }
    await_until("all are open", || rig.gateway.status().sessions.len() == 20);
    let state = xkv_session::client::status(&rig.config()).unwrap();
    assert_eq!(state["sessions"].as_array().unwrap().len(), 20);
    assert_eq!(state["sessions"][0]["client"], "");
}
