//! Sessions between a client and a gateway in one process: everything a store does, through the ring; and who loses
//! what when one of them goes away.

mod common;

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use xkv_session::control::{self, Frames, Message, Welcome};
use xkv_session::entry::{Operation, Status};
use xkv_session::memory::{Geometry, RingMemory};
use xkv_session::pass::{Access, Handover};
use xkv_session::queue::Consumer;
use xkv_session::{GatewayConfig, Session, client};
use xkv_store::io::device::testing::{Calls, MemoryDevice, StallDevice};

#[test]
fn objects_go_through_the_ring_and_back() {
    let rig = rig();
    let session = rig.open();
    for (i, len) in [1, 4095, 4096, 4097, 100_000, 1 << 20].into_iter().enumerate() {
        let name = key(&format!("{i}"));
        assert_eq!(put(&session, &name, &contents(i as u64, len)).unwrap(), Status::Done);
        assert!(get(&session, &name).unwrap() == Some(contents(i as u64, len)), "{len} bytes");
        assert_eq!(put(&session, &name, b"other").unwrap(), Status::Present);
    }
    assert_eq!(present(&session, &[key("0"), key("none"), key("5")]), [true, false, true]);
    let removed = call(&session, Operation::Remove, Some(key_slot(&session, &key("0"))), 0, 0).reply.unwrap();
    assert_eq!((removed.status, removed.value), (Status::Done, 1));
    assert_eq!(get(&session, &key("0")).unwrap(), None);
    let status = &rig.gateway.status().sessions[0];
    assert_eq!((status.leases, status.transactions, status.in_flight, status.slots_in_use), (0, 0, 0, 0));
    assert_eq!(status.bytes_written, status.bytes_read);
    assert_eq!(
        std::fs::read_dir(rig.folder.path()).unwrap().count(),
        0,
        "no name is left in the shared folder"
    );
}

#[test]
fn several_sessions_at_once_store_and_load_the_same_keys() {
    let rig = rig();
    std::thread::scope(|scope| {
        for client in 0..4u64 {
            let rig = &rig;
            scope.spawn(move || {
                let session = rig.open();
                for i in 0..60u64 {
                    let n = (i * 3 + client) % 40;
                    let name = key(&format!("{n}"));
                    let stored = put(&session, &name, &contents(n, 10_000)).unwrap();
                    assert!(matches!(stored, Status::Done | Status::Present), "{stored:?}");
                    assert!(get(&session, &name).unwrap() == Some(contents(n, 10_000)));
                }
            });
        }
    });
    assert_eq!(rig.store.stats().objects, 40);
    assert_eq!(rig.store.stats().slots_used, 40 * 3);
    await_until("all sessions are gone", || rig.gateway.status().sessions.is_empty());
}

#[test]
fn leases_and_transactions_die_with_their_session() {
    let rig = rig();
    let session = rig.open();
    put(&session, &key("a"), &contents(1, 9000)).unwrap();
    let used = rig.store.stats().slots_used;
    call(&session, Operation::Open, Some(key_slot(&session, &key("a"))), 0, 0).reply.unwrap();
    let begun = call(&session, Operation::Begin, Some(key_slot(&session, &key("b"))), 0, 9000).reply.unwrap();
    assert_eq!(begun.status, Status::Done);
    let other = rig.open();
    assert_eq!(
        call(&other, Operation::Begin, Some(key_slot(&other, &key("b"))), 0, 1).reply.unwrap().status,
        Status::Busy
    );
    assert_eq!(call(&other, Operation::Commit, None, begun.handle, 0).reply.unwrap().status, Status::Invalid);
    await_until("the session's use is seen", || {
        let status = &rig.gateway.status().sessions[0];
        (status.leases, status.transactions) == (1, 1)
    });
    session.close();
    await_until("the transaction's slots are free", || rig.store.stats().slots_used == used);
    assert_eq!(put(&other, &key("b"), b"b").unwrap(), Status::Done);
}

#[test]
fn refusals_name_the_reason_and_the_cure() {
    let change = |config: &mut GatewayConfig| {
        config.token = Some("secret".into());
        config.max_sessions = 1;
    };
    let rig = rig_with(MemoryDevice::new(32 << 20), change);
    let good = client::ClientConfig { token: Some("secret".into()), ..rig.config() };
    let refused = |config: &client::ClientConfig| match Session::open(config) {
        Ok(_) => panic!("the session must be refused"),
        Err(error) => error,
    };
    for token in [None, Some("secreT"), Some("secret "), Some("")] {
        let error = refused(&client::ClientConfig { token: token.map(str::to_owned), ..rig.config() });
        assert!(error.is_permanent() && error.to_string().contains("token"), "{error}");
        assert!(
            client::status(&client::ClientConfig { token: token.map(str::to_owned), ..rig.config() })
                .is_err()
        );
    }
    let error = refused(&client::ClientConfig { fragment_bytes: Some(8192), ..good.clone() });
    assert!(error.is_permanent() && error.to_string().contains("4096"), "{error}");
    let error = refused(&client::ClientConfig { shm_dir: "/proc".into(), ..good.clone() });
    assert!(!error.is_permanent() && error.to_string().contains("another host"), "{error}");
    let session = Session::open(&good).unwrap();
    let error = refused(&good);
    assert!(error.to_string().contains("max_sessions"), "{error}");
    let state = client::status(&good).unwrap();
    assert_eq!(state["sessions"].as_array().unwrap().len(), 1);
    drop(session);
    let dead = client::ClientConfig { port: 1, ..good };
    assert!(refused(&dead).to_string().contains("xkv gateway serve"));
}

#[test]
fn a_token_is_needed_beyond_loopback() {
    let store = rig().store;
    let config = GatewayConfig { listen: vec![([0, 0, 0, 0], 0).into()], ..GatewayConfig::default() };
    let error = xkv_session::Gateway::start(store, config).err().expect("refused");
    assert!(error.to_string().contains("token_file"), "{error}");
}

#[test]
fn a_shared_folder_too_deep_for_a_socket_is_named_on_both_sides() {
    let rig = rig();
    let folder = rig.folder.path().join("d".repeat(100));
    std::fs::create_dir(&folder).unwrap();
    let named = |text: &str| text.contains("shm_dir") && text.contains("bytes shorter");
    let config = GatewayConfig {
        listen: vec![([127, 0, 0, 1], 0).into()],
        shm_dir: folder.clone(),
        ..GatewayConfig::default()
    };
    let error = xkv_session::Gateway::start(rig.store.clone(), config).err().expect("refused");
    assert!(named(&error.to_string()), "{error}");
    let client = client::ClientConfig { shm_dir: folder, ..rig.config() };
    let error = Session::open(&client).err().expect("refused");
    assert!(named(&error.to_string()), "{error}");
}

#[test]
fn the_end_of_the_gateway_answers_everything() {
    let stall = StallDevice::new(MemoryDevice::new(32 << 20));
    let mut rig = rig_with(stall.clone(), |_| ());
    let session = rig.open();
    put(&session, &key("a"), &contents(1, 4096)).unwrap();
    let opened = call(&session, Operation::Open, Some(key_slot(&session, &key("a"))), 0, 0).reply.unwrap();
    stall.stall(Calls::READS);
    let (sender, receiver) = std::sync::mpsc::channel();
    let read = client::Call {
        operation: Operation::Read,
        slots: vec![slot(&session)],
        handle: opened.handle,
        argument: 0,
        sums: Default::default(),
    };
    session.call(read, Box::new(move |answer| _ = sender.send(answer.reply.is_err())));
    assert!(stall.await_waiting(1, PATIENCE));
    rig.gateway.close(Duration::from_millis(500));
    assert!(receiver.recv_timeout(PATIENCE).unwrap(), "the read in flight is answered as failed");
    assert!(!session.is_open());
    assert!(
        call(&session, Operation::Lookup, Some(slot(&session)), 0, 0).reply.is_err(),
        "and so is what comes later"
    );
    stall.resume();
}

#[test]
fn silence_while_something_is_in_flight_ends_the_session() {
    let stall = StallDevice::new(MemoryDevice::new(32 << 20));
    let rig = rig_with(stall.clone(), |_| ());
    let session = rig.open();
    put(&session, &key("a"), &contents(1, 4096)).unwrap();
    let opened = call(&session, Operation::Open, Some(key_slot(&session, &key("a"))), 0, 0).reply.unwrap();
    // Heartbeats go on while nothing is in flight: the session lives.
    std::thread::sleep(rig.config().silence * 2);
    assert!(session.is_open());
    stall.stall(Calls::READS);
    let began = Instant::now();
    let answer = call(&session, Operation::Read, Some(slot(&session)), opened.handle, 0);
    let error = answer.reply.unwrap_err();
    assert!(error.to_string().contains("silent"), "{error}");
    assert!(began.elapsed() >= rig.config().silence && began.elapsed() < rig.config().silence * 3);
    stall.resume();
    let session = rig.open();
    assert_eq!(get(&session, &key("a")).unwrap(), Some(contents(1, 4096)));
}

#[test]
fn a_damaged_object_is_removed_only_when_the_gateway_finds_it_damaged() {
    let memory = MemoryDevice::new(32 << 20);
    let rig = rig_with(memory.clone(), |_| ());
    let session = rig.open();
    let data = contents(3, 5000);
    put(&session, &key("a"), &data).unwrap();
    let complain = || {
        let opened =
            call(&session, Operation::Open, Some(key_slot(&session, &key("a"))), 0, 0).reply.unwrap();
        call(&session, Operation::Discard, None, opened.handle, 0).reply.unwrap().value
    };
    assert_eq!(complain(), 0, "a client's word is not enough");
    assert_eq!(get(&session, &key("a")).unwrap(), Some(data.clone()));
    let mut image = vec![0; 32 << 20];
    xkv_store::io::Device::read_at(&*memory, &mut image, 0).unwrap();
    let at = image.windows(64).position(|window| window == &data[4096..4160]).unwrap();
    memory.flip(at as u64, 1);
    assert_eq!(complain(), 1);
    assert_eq!(get(&session, &key("a")).unwrap(), None);
}

#[test]
fn many_damaged_objects_at_once_are_all_removed() {
    let memory = MemoryDevice::new(32 << 20);
    let rig = rig_with(memory.clone(), |_| ());
    let session = rig.open();
    let names: Vec<_> = (0..50).map(|i| key(&format!("{i}"))).collect();
    for (i, name) in names.iter().enumerate() {
        put(&session, name, &contents(i as u64 + 1, 5000)).unwrap();
    }
    let mut image = vec![0; 32 << 20];
    xkv_store::io::Device::read_at(&*memory, &mut image, 0).unwrap();
    let mut complaints = Vec::new();
    for (i, name) in names.iter().enumerate() {
        let start = &contents(i as u64 + 1, 64)[..];
        let block = image.chunks(FRAGMENT).position(|block| block.starts_with(start)).unwrap();
        memory.flip((block * FRAGMENT) as u64, 1);
        let opened = call(&session, Operation::Open, Some(key_slot(&session, name)), 0, 0).reply.unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let discard = client::Call {
            operation: Operation::Discard,
            slots: Vec::new(),
            handle: opened.handle,
            argument: 0,
            sums: Default::default(),
        };
        session.call(discard, Box::new(move |answer| _ = sender.send(answer.reply.unwrap())));
        complaints.push(receiver);
    }
    for complaint in complaints {
        let reply = complaint.recv_timeout(PATIENCE).unwrap();
        assert_eq!((reply.status, reply.value), (Status::Done, 1));
    }
    assert_eq!(rig.store.stats().objects, 0);
}

/// A client's session with a gateway that hands it over and then does nothing by itself: the session, its memory, the control
/// connection, the one of the handing over.
fn handed_over(folder: &Path) -> (Session, Arc<RingMemory>, TcpStream, UnixStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = client_config(listener.local_addr().unwrap(), folder);
    let opening = std::thread::spawn(move || Session::open(&config).unwrap());
    let (mut control, _) = listener.accept().unwrap();
    assert!(matches!(Frames::default().next(&mut control), Ok(Some(Message::Hello(_)))));
    let (memory, fd) = RingMemory::create(Geometry::new(16, FRAGMENT as u32), 7).unwrap();
    let handover = Handover::listen(folder, "00", 1, Access { mode: 0o600, group: None }).unwrap();
    let welcome = Welcome {
        version: control::VERSION,
        store: "00".into(),
        generation: 7,
        fragment_bytes: FRAGMENT as u32,
        slots: 16,
        drives: 1,
        socket: handover.name(),
        ticket: 9,
        heartbeat_ms: 100,
        description: String::new(),
        straight: false,
    };
    control::send(&mut control, &Message::Welcome(welcome)).unwrap();
    let handed = handover.give(|| vec![fd], 9, PATIENCE, || false).unwrap();
    (opening.join().unwrap(), memory, control, handed)
}

/// What is read straight counts no more, before the client has heard of the end of its session by any other way.
#[test]
fn leases_end_with_the_word_and_with_the_gateways_process() {
    let folder = tempfile::tempdir().unwrap();
    let (session, memory, _control, _handed) = handed_over(folder.path());
    assert!(session.holds_leases());
    memory.set_over();
    assert!(!session.holds_leases() && session.is_open());

    let (session, _memory, _control, handed) = handed_over(folder.path());
    assert!(session.holds_leases());
    drop(handed);
    assert!(!session.holds_leases() && session.is_open());
}

/// Against a gateway that hands a session over and then takes two of five requests out of the ring.
#[test]
fn calls_that_a_gateway_had_not_taken_when_it_left_are_told_apart() {
    for silent in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (session, memory, stream, _handed) = handed_over(folder.path());
        let (sender, receiver) = std::sync::mpsc::channel();
        for number in 0..5 {
            let lookup = client::Call {
                operation: Operation::Lookup,
                slots: vec![slot(&session)],
                handle: 0,
                argument: 0,
                sums: Default::default(),
            };
            let sender = sender.clone();
            let done = move |answer: xkv_session::Answer| {
                _ = sender.send((number, answer.reply.unwrap_err().is_unsent()));
            };
            session.call(lookup, Box::new(done));
        }
        let mut requests = Consumer::new(memory.submissions());
        assert!(requests.pop().unwrap().is_some() && requests.pop().unwrap().is_some());
        let kept = Some(stream).filter(|_| silent);
        let answers: Vec<_> = (0..5).map(|_| receiver.recv_timeout(PATIENCE).unwrap()).collect();
        // Silent, it may take the others later; gone, it cannot.
        assert_eq!(answers, [0, 1, 2, 3, 4].map(|number| (number, number >= 2 && !silent)));
        assert!(call(&session, Operation::Lookup, None, 0, 0).reply.unwrap_err().is_unsent());
        drop(kept);
    }
}

#[test]
fn an_object_that_is_being_doubted_can_be_stored_again() {
    let memory = MemoryDevice::new(32 << 20);
    let rig = rig_with(memory.clone(), |_| ());
    let session = rig.open();
    let data = contents(4, 5000);
    for round in 0..50 {
        assert_eq!(put(&session, &key("a"), &data).unwrap(), Status::Done, "round {round}");
        let mut image = vec![0; 32 << 20];
        xkv_store::io::Device::read_at(&*memory, &mut image, 0).unwrap();
        let copies = (0..image.len()).step_by(4096).filter(|&at| image[at..at + 64] == data[..64]);
        copies.for_each(|at| memory.flip(at as u64, 1));
        let opened =
            call(&session, Operation::Open, Some(key_slot(&session, &key("a"))), 0, 0).reply.unwrap();
        let discard = client::Call {
            operation: Operation::Discard,
            slots: Vec::new(),
            handle: opened.handle,
            argument: 0,
            sums: Default::default(),
        };
        // Not waited for: the next store finds the gateway still reading the object.
        session.call(discard, Box::new(|_| ()));
        assert_eq!((present(&session, &[key("a")]), get(&session, &key("a")).unwrap()), (vec![false], None));
        assert_eq!(put(&session, &key("a"), &data).unwrap(), Status::Done, "round {round}");
        let removed =
            call(&session, Operation::Remove, Some(key_slot(&session, &key("a"))), 0, 0).reply.unwrap();
        assert_eq!(removed.value, 1);
    }
}

#[test]
fn a_full_store_makes_room_through_the_ring() {
    let rig = rig_with(MemoryDevice::new(6 << 20), |_| ());
    let session = rig.open();
    for i in 0..200u64 {
        assert_eq!(put(&session, &key(&format!("{i}")), &contents(i, 65_536)).unwrap(), Status::Done, "{i}");
    }
    assert!(get(&session, &key("199")).unwrap() == Some(contents(199, 65_536)));
    assert!(rig.store.stats().evicted > 0);
    let large =
        call(&session, Operation::Begin, Some(key_slot(&session, &key("large"))), 0, 64 << 20).reply.unwrap();
    assert_eq!(large.status, Status::NoSpace);
}

/// Who was told to wait asks again when an event says so. An event between the store's answer and the reply comes too
/// early to be of use: then another one follows.
#[test]
fn an_event_follows_every_answer_that_tells_to_wait() {
    let rig = rig();
    let config = client::ClientConfig { silence: 2 * PATIENCE, ..rig.config() };
    let (holder, waiter) = (Session::open(&config).unwrap(), Session::open(&config).unwrap());
    // Replies and events in the order in which they came; an event is none.
    let (sender, came) = std::sync::mpsc::channel();
    let event = sender.clone();
    waiter.on_space(Box::new(move || _ = event.send(None)));
    let ask = |name: &xkv_store::ObjectKey| {
        let sender = sender.clone();
        let (operation, slots) = (Operation::Begin, vec![key_slot(&waiter, name)]);
        let call = client::Call { operation, slots, handle: 0, argument: 1, sums: Default::default() };
        waiter.call(call, Box::new(move |answer| _ = sender.send(answer.reply.ok())));
    };
    let (mut waits, mut round) = (0, 0);
    while round < 1_000 || waits <= 50 {
        assert!(round < 100_000, "only {waits} waits: the test shows nothing");
        let name = key(&format!("{round}"));
        round += 1;
        let slot = Some(key_slot(&holder, &name));
        let held = call(&holder, Operation::Begin, slot, 0, 1).reply.unwrap().handle;
        // At the same moment the one asks for the key and the other gives it up.
        ask(&name);
        call(&holder, Operation::Close, None, held, 0).reply.unwrap();
        let mut told_to_wait = false;
        let handle = loop {
            match came.recv_timeout(PATIENCE).expect("an event follows") {
                None if told_to_wait => {
                    ask(&name);
                    told_to_wait = false;
                }
                None => {}
                Some(reply) if reply.status == Status::Done => break reply.handle,
                Some(reply) => {
                    assert_eq!(reply.status, Status::Busy);
                    told_to_wait = true;
                    waits += 1;
                }
            }
        };
        call(&waiter, Operation::Close, None, handle, 0).reply.unwrap();
    }
}
