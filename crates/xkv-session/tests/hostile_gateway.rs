//! Gateways that break every rule, against the client half: it loses its session (or gets none), every call is
//! answered once, and nothing of the session is left.

mod common;

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::raw::{frame, read_frame};
use common::*;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use serde_json::{Value, json};
use xkv_session::entry::{NO_SLOT, Operation, Reply, Request, Status};
use xkv_session::memory::{Geometry, RingMemory, SharedQueue};
use xkv_session::pass::{Access, Handover};
use xkv_session::queue::{Consumer, Producer, QueueMemory};
use xkv_session::{Answer, Call, ClientConfig, Session, SessionError};
use xkv_store::FragmentSums;

const SLOTS: u32 = 16;
const GENERATION: u64 = 7;
const TICKET: u64 = 9;
const ACCESS: Access = Access { mode: 0o600, group: None };

fn geometry() -> Geometry {
    Geometry::new(SLOTS, FRAGMENT as u32)
}

fn welcome(socket: &str) -> Value {
    json!({
        "type": "welcome", "version": 1, "store": "00", "generation": "0x7", "fragment_bytes": FRAGMENT,
        "slots": SLOTS, "drives": 1, "socket": socket, "ticket": "0x9", "heartbeat_ms": 100, "description": "",
    })
}

/// Opens a session with a gateway that does what `act` says with the connection, after it took the hello.
fn open_with(act: impl FnOnce(TcpStream, &std::path::Path) + Send) -> Result<Session, SessionError> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = client_config(listener.local_addr().unwrap(), folder.path());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let hello = read_frame(&mut stream).unwrap();
            assert_eq!(
                (hello["type"].as_str(), hello["slots"].as_u64()),
                (Some("hello"), Some(SLOTS.into()))
            );
            act(stream, folder.path());
        });
        Session::open(&config)
    })
}

/// The text of an error that came in time and left nothing behind.
fn refused(what: &str, act: impl FnOnce(TcpStream, &std::path::Path) + Send) -> String {
    let (floor, began) = (Held::floor(), Instant::now());
    let error = match open_with(act) {
        Ok(_) => panic!("{what}: a session was opened"),
        Err(error) => error.to_string(),
    };
    assert!(began.elapsed() < Duration::from_secs(8), "{what}: {:?}", began.elapsed());
    floor.await_again();
    error
}

fn say(stream: &mut TcpStream, message: &Value) {
    stream.write_all(&frame(message.to_string().as_bytes())).unwrap();
}

/// Holds the connection until the client closes it.
fn hold(mut stream: TcpStream) {
    while read_frame(&mut stream).is_ok() {}
}

#[test]
fn answers_that_make_no_sense_open_no_session() {
    let _alone = alone();
    let change = |field: &str, value: Value| {
        let mut message = welcome("xkv-1.sock");
        message[field] = value;
        message
    };
    let answers = [
        ("another version", change("version", json!(2)), "version 2"),
        ("odd fragments", change("fragment_bytes", json!(5000)), "fragment_bytes=5000"),
        ("no fragments", change("fragment_bytes", json!(0)), "fragment_bytes=0"),
        ("huge fragments", change("fragment_bytes", json!(1 << 25)), "fragment_bytes=33554432"),
        ("small fragments", change("fragment_bytes", json!(2048)), "fragment_bytes=2048"),
        ("no slots", change("slots", json!(0)), "0 slots"),
        ("more slots than asked for", change("slots", json!(SLOTS + 1)), "17 slots"),
        ("no heartbeat", change("heartbeat_ms", json!(0)), "every 0 ms"),
        ("a rare heartbeat", change("heartbeat_ms", json!(u32::MAX)), "too rarely"),
        ("numbers as numbers", change("ticket", json!(9)), "invalid type"),
        ("another folder", change("socket", json!("../xkv-1.sock")), "not one of ours"),
        ("an absolute path", change("socket", json!("/tmp/xkv-1.sock")), "not one of ours"),
        ("another name", change("socket", json!("docker.sock")), "not one of ours"),
        ("no name", change("socket", json!("")), "not one of ours"),
        ("a name that cannot be", change("socket", json!("xkv-\u{0}")), "shared folder"),
        ("a long name", change("socket", json!(format!("xkv-{}", "x".repeat(300)))), "shared folder"),
        ("a name of nothing", change("socket", json!("xkv-1.sock")), "shared folder"),
        ("another message", json!({"type": "state"}), "is it a gateway?"),
        ("an unknown message", json!({"type": "dance"}), "unknown variant"),
        ("nothing at all", json!(null), "invalid type"),
        ("a refusal", json!({"type": "refused", "code": "of the future", "reason": "because"}), "because"),
    ];
    for (what, answer, text) in answers {
        let error = refused(what, |mut stream, _| {
            say(&mut stream, &answer);
            hold(stream);
        });
        assert!(error.contains(text), "{what}: {error}");
    }
    for bytes in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], &[0xff; 100], &[2, 0, 0, 0, b'{', b'}'], b""] {
        refused("bytes", |mut stream, _| stream.write_all(bytes).unwrap());
    }
    let error = refused("silence", |stream, _| hold(stream));
    assert!(error.contains("no answer within 1000 ms"), "{error}");
    refused("an answer byte by byte", |mut stream, _| {
        let bytes = [&60_000u32.to_le_bytes()[..], &[b' '; 60_000]].concat();
        for byte in bytes {
            if stream.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
}

fn memfd(flags: MemfdFlags, bytes: u64, reserve: bool, seals: SealFlags) -> Option<OwnedFd> {
    let fd = rustix::fs::memfd_create("hostile", MemfdFlags::ALLOW_SEALING | flags).ok()?;
    rustix::fs::ftruncate(&fd, bytes).ok()?;
    if reserve {
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes).unwrap();
    }
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    Some(fd)
}

#[test]
fn memory_that_could_fault_or_is_not_a_ring_is_refused() {
    let _alone = alone();
    let bytes = geometry().bytes();
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let plain = tempfile::tempfile().unwrap();
    plain.set_len(bytes).unwrap();
    let none = MemfdFlags::empty();
    let huge = (bytes + (2 << 20) - 1) & !((2 << 20) - 1);
    let other = |geometry, generation| Some(RingMemory::create(geometry, generation).unwrap().1);
    let offers: Vec<(&str, Option<OwnedFd>, &str)> = vec![
        ("a file", Some(plain.into()), "not a memfd"),
        ("a device", Some(File::open("/dev/zero").unwrap().into()), "not a memfd"),
        ("a folder", Some(File::open("/tmp").unwrap().into()), "not a memfd"),
        ("unsealed", memfd(none, bytes, true, SealFlags::empty()), "not sealed"),
        ("sealed against growing alone", memfd(none, bytes, true, SealFlags::GROW), "not sealed"),
        ("a byte short", memfd(none, bytes - 1, true, sealed), "unexpected size"),
        ("a page long", memfd(none, bytes + 4096, true, sealed), "unexpected size"),
        ("empty", memfd(none, 0, false, sealed), "unexpected size"),
        ("without pages", memfd(none, bytes, false, sealed), "not reserved"),
        ("huge pages", memfd(MemfdFlags::HUGETLB, huge, false, sealed), "not plain memory"),
        ("zeros", memfd(none, bytes, true, sealed), "unknown layout"),
        ("another generation's", other(geometry(), GENERATION + 1), "another session"),
        ("fewer slots", other(Geometry::new(SLOTS - 1, FRAGMENT as u32), GENERATION), "unexpected size"),
    ];
    for (what, fd, text) in offers {
        let fd = fd.unwrap_or_else(|| panic!("{what}: this machine cannot make it"));
        let error = refused(what, |mut stream, folder| {
            let handover = Handover::listen(folder, "0", 1, ACCESS).unwrap();
            say(&mut stream, &welcome(&handover.name()));
            handover.give(|| vec![fd], TICKET, PATIENCE, || false).unwrap();
            let bye = read_frame(&mut stream).unwrap();
            assert_eq!(bye["type"], "bye", "the gateway is told");
        });
        assert!(error.contains(text), "{what}: {error}");
    }
}

#[test]
fn a_socket_that_hands_out_nothing_holds_nobody_up() {
    let _alone = alone();
    refused("no descriptor", |mut stream, folder| {
        let listener = UnixListener::bind(folder.join("xkv-1.sock")).unwrap();
        say(&mut stream, &welcome("xkv-1.sock"));
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(&[1]).unwrap();
        hold(stream);
    });
    refused("no answer", |mut stream, folder| {
        let listener = UnixListener::bind(folder.join("xkv-1.sock")).unwrap();
        say(&mut stream, &welcome("xkv-1.sock"));
        let _client = listener.accept().unwrap();
        hold(stream);
    });
    refused("nobody accepts", |mut stream, folder| {
        let path = folder.join("xkv-1.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        // Connections that fill the queue: the next connect would wait for ever.
        let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
        let mut held = Vec::new();
        loop {
            let flags = rustix::net::SocketFlags::NONBLOCK;
            let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM);
            let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
            if rustix::net::connect(&socket, &address).is_err() {
                break;
            }
            held.push(socket);
        }
        say(&mut stream, &welcome("xkv-1.sock"));
        hold(stream);
    });
}

/// A gateway that opened a session in order, and what the client saw of its end.
struct Opened {
    session: Session,
    control: TcpStream,
    memory: Arc<RingMemory>,
    requests: Consumer<SharedQueue>,
    replies: Producer<SharedQueue>,
    ends: Receiver<String>,
}

fn opened(change: impl FnOnce(&mut ClientConfig)) -> Opened {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut config = client_config(listener.local_addr().unwrap(), folder.path());
    change(&mut config);
    let (memory, fd) = RingMemory::create(geometry(), GENERATION).unwrap();
    let (session, control) = std::thread::scope(|scope| {
        let gateway = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            read_frame(&mut stream).unwrap();
            let handover = Handover::listen(folder.path(), "0", 1, ACCESS).unwrap();
            say(&mut stream, &welcome(&handover.name()));
            handover.give(|| vec![fd.try_clone().unwrap()], TICKET, PATIENCE, || false).unwrap();
            stream
        });
        (Session::open(&config).unwrap(), gateway.join().unwrap())
    });
    let (sender, ends) = channel();
    session.on_end(Box::new(move |reason| _ = sender.send(reason.to_string())));
    Opened {
        requests: Consumer::new(memory.submissions()),
        replies: Producer::new(memory.completions()),
        session,
        control,
        memory,
        ends,
    }
}

impl Opened {
    /// Makes a call that has so many slots; the request as it came.
    fn call(&mut self, operation: Operation, slots: usize) -> (Request, Receiver<Answer>) {
        let (sender, receiver) = channel();
        let slots = std::iter::repeat_with(|| slot_of(&self.session)).take(slots).collect();
        let call = Call { operation, slots, handle: 1, argument: 0, sums: FragmentSums::default() };
        self.session.call(call, Box::new(move |answer| _ = sender.send(answer)));
        loop {
            match self.requests.pop().unwrap() {
                Some(entry) => break (Request::decode(&entry).unwrap(), receiver),
                None => self.requests.wait(PATIENCE).unwrap(),
            }
        }
    }

    fn reply(&mut self, reply: Reply) {
        assert!(self.replies.push(&reply.encode()).unwrap());
        self.replies.publish();
    }

    fn beat(&mut self, io: u64, flushing: bool) {
        say(&mut self.control, &json!({"type": "heartbeat", "io": format!("{io:#x}"), "flushing": flushing}));
    }
}

fn slot_of(session: &Session) -> xkv_store::SlotBuf {
    common::slot(session)
}

fn honest(request: &Request) -> Reply {
    Reply {
        number: request.number,
        operation: request.operation,
        status: Status::Done,
        slot: request.slot,
        handle: 0,
        value: 0,
        sums: Default::default(),
    }
}

/// What the gateway does while a read is in flight, and what the client must say of it.
type Breach = (&'static str, fn(&mut Opened, Request), &'static str);

#[test]
fn a_breach_of_the_ring_ends_the_session_and_answers_every_call_once() {
    let _alone = alone();
    let breaches: &[Breach] = &[
        ("a reply to nothing", |o, r| o.reply(Reply { number: 99, ..honest(&r) }), "a reply to nothing"),
        (
            "a second reply",
            |o, r| {
                let (other, _) = o.call(Operation::Close, 0);
                o.reply(honest(&other));
                o.reply(honest(&other));
                _ = r;
            },
            "a reply to nothing",
        ),
        ("another slot", |o, r| o.reply(Reply { slot: r.slot ^ 1, ..honest(&r) }), "another slot"),
        ("no slot", |o, r| o.reply(Reply { slot: NO_SLOT, ..honest(&r) }), "another slot"),
        (
            "another operation",
            |o, r| o.reply(Reply { operation: Operation::Open, ..honest(&r) }),
            "another operation",
        ),
        (
            "more bytes than asked for",
            |o, r| o.reply(Reply { value: (r.slots().count() * FRAGMENT) as u64 + 1, ..honest(&r) }),
            "more than the slots hold",
        ),
        (
            "an unknown operation",
            |o, r| {
                let mut entry = honest(&r).encode();
                entry[1] |= 0xff;
                assert!(o.replies.push(&entry).unwrap());
                o.replies.publish();
            },
            "an unknown reply",
        ),
        (
            "an unknown status",
            |o, r| {
                let mut entry = honest(&r).encode();
                entry[1] |= 0xff00;
                assert!(o.replies.push(&entry).unwrap());
                o.replies.publish();
            },
            "an unknown reply",
        ),
        ("an unknown event", |o, r| o.reply(Reply { number: 0, ..honest(&r) }), "an unknown event"),
        (
            "replies that never were",
            |o, _| {
                o.memory.completions().tail().store(1 << 20, Ordering::SeqCst);
                o.memory.completions().wake();
            },
            "the ring is corrupt",
        ),
        (
            "requests taken that never were",
            |o, _| {
                o.memory.submissions().head().store(1 << 20, Ordering::SeqCst);
                let call = Call {
                    operation: Operation::Close,
                    slots: Vec::new(),
                    handle: 1,
                    argument: 0,
                    sums: FragmentSums::default(),
                };
                o.session.call(call, Box::new(|_| ()));
            },
            "the ring is corrupt",
        ),
        ("a frame too large", |o, _| o.control.write_all(&[0xff; 4]).unwrap(), "frame of 4294967295 bytes"),
        ("an unknown message", |o, _| say(&mut o.control, &json!({"type": "dance"})), "unknown variant"),
        ("a goodbye", |o, _| say(&mut o.control, &json!({"type": "bye", "reason": "enough"})), "enough"),
        (
            "a closed connection",
            |o, _| o.control.shutdown(std::net::Shutdown::Both).unwrap(),
            "closed the connection",
        ),
    ];
    // A read of several slots is answered as one: with its first slot, and as much as they hold together.
    for (slots, (what, breach, text)) in
        [1, 4].into_iter().flat_map(|slots| breaches.iter().map(move |each| (slots, each)))
    {
        let floor = Held::floor();
        let mut o = opened(|_| ());
        let (request, answer) = o.call(Operation::Read, slots);
        breach(&mut o, request);
        let reason = o.ends.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what}: no end"));
        assert!(reason.contains(text), "{what}: {reason}");
        let answered = answer.recv_timeout(PATIENCE).unwrap();
        assert!(answered.reply.is_err() && answered.slots.len() == slots, "{what}");
        assert!(answer.recv().is_err() && o.ends.recv().is_err(), "{what}: told twice");
        assert!(!o.session.is_open());
        drop((o, answered));
        floor.await_again();
    }
}

#[test]
fn random_replies_and_indices_cost_only_the_session() {
    let _alone = alone();
    let floor = Held::floor();
    for seed in 1..=300 {
        let rng = &mut Rng::new(seed);
        let mut o = opened(|_| ());
        let (request, answer) = o.call(Operation::Read, 1 + rng.below(4) as usize);
        let completions = o.memory.completions();
        for _ in 0..1 + rng.below(4) {
            let mut entry = honest(&request).encode();
            for _ in 0..rng.below(3) {
                let word = rng.below(8) as usize;
                entry[word] ^= 1 << rng.below(64);
            }
            if rng.below(4) == 0 {
                entry = std::array::from_fn(|_| rng.next());
            }
            assert!(o.replies.push(&entry).unwrap());
        }
        o.replies.publish();
        if rng.below(3) == 0 {
            completions.tail().store(rng.next() as u32, Ordering::SeqCst);
        }
        completions.waiting().store(rng.next() as u32, Ordering::SeqCst);
        completions.wake();
        o.control.shutdown(std::net::Shutdown::Both).unwrap();
        let answered = answer.recv_timeout(PATIENCE).expect("answered");
        assert!(!answered.slots.is_empty(), "seed {seed}");
        o.ends.recv_timeout(PATIENCE).expect("the end is told");
    }
    floor.await_again();
}

#[test]
fn bytes_that_are_no_heartbeat_are_no_life() {
    let _alone = alone();
    let o = opened(|_| ());
    let began = Instant::now();
    let mut control = o.control.try_clone().unwrap();
    let dripping = std::thread::spawn(move || {
        _ = control.write_all(&60_000u32.to_le_bytes());
        while control.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let reason = o.ends.recv_timeout(PATIENCE).unwrap();
    assert!(reason.contains("silent"), "{reason}");
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    dripping.join().unwrap();
}

#[test]
fn a_flush_is_life_from_its_beginning_and_for_so_long() {
    let _alone = alone();
    let (silence, patience) = (Duration::from_millis(600), Duration::from_millis(2_000));
    let mut o = opened(|config| (config.silence, config.flush_patience) = (silence, patience));
    let (_, answer) = o.call(Operation::Commit, 0);
    let beats = |o: &mut Opened, during: Duration, io: fn(u64) -> u64, flushing: bool| {
        let began = Instant::now();
        while began.elapsed() < during {
            o.beat(io(began.elapsed().as_micros() as u64), flushing);
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    // Busy for longer than the patience with a flush, the counter advancing.
    beats(&mut o, patience + silence, |t| t, false);
    assert!(o.session.is_open());
    // Only now a flush begins: it has all its time.
    let began = Instant::now();
    beats(&mut o, patience - silence, |_| 1, true);
    assert!(o.session.is_open(), "the flush began later than the client was busy");
    while o.session.is_open() && began.elapsed() < PATIENCE {
        _ = o.control.write_all(&frame(br#"{"type":"heartbeat","io":"0x1","flushing":true}"#));
        std::thread::sleep(Duration::from_millis(50));
    }
    let took = began.elapsed();
    assert!(took >= patience && took < patience + 4 * silence, "{took:?}");
    assert!(o.ends.recv().unwrap().contains("silent"));
    assert!(answer.recv().unwrap().reply.is_err());
}

#[test]
fn hooks_may_use_the_session() {
    let _alone = alone();
    let mut o = opened(|_| ());
    let told = Arc::new(AtomicUsize::new(0));
    let (held, count) = (Arc::new(Mutex::new(Some(o.session.clone()))), told.clone());
    let in_hook = held.clone();
    o.session.on_space(Box::new(move || {
        let session = in_hook.lock().unwrap().clone().unwrap();
        session.on_space(Box::new(|| ()));
        let close = Call {
            operation: Operation::Close,
            slots: Vec::new(),
            handle: 0,
            argument: 0,
            sums: FragmentSums::default(),
        };
        session.call(close, Box::new(|_| ()));
        count.fetch_add(1, Ordering::SeqCst);
    }));
    let event = Reply {
        number: 0,
        operation: Operation::Space,
        status: Status::Done,
        slot: NO_SLOT,
        handle: 0,
        value: 0,
        sums: Default::default(),
    };
    o.reply(event);
    await_until("the hook ran through", || told.load(Ordering::SeqCst) == 1);
    o.session.close();
    let session = o.session.clone();
    let (sender, receiver) = channel();
    // Set after the end: called at once, on this thread, and it asks the session.
    o.session.on_end(Box::new(move |_| {
        let sender = sender.clone();
        let call = Call {
            operation: Operation::Close,
            slots: Vec::new(),
            handle: 0,
            argument: 0,
            sums: FragmentSums::default(),
        };
        session.call(call, Box::new(move |answer| _ = sender.send(answer.reply.is_err())));
    }));
    assert!(receiver.recv_timeout(PATIENCE).unwrap());
    held.lock().unwrap().take();
}
