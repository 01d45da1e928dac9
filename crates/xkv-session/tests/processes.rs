//! Clients as processes of their own, killed and stopped at any moment: the gateway keeps nothing of theirs.
//!
//! The client's process is this test's own program, started with `CLIENT` in its environment.

mod common;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::*;
use rustix::process::{Pid, Signal, kill_process};
use xkv_session::entry::{Operation, Status};
use xkv_session::{ClientConfig, GatewayConfig, Session};
use xkv_store::io::device::testing::MemoryDevice;

const CLIENT: &str = "XKV_TEST_CLIENT";

/// Starts a client's process; it says "open" when its session is.
fn start(rig: &Rig, seed: u64, task: &str) -> Child {
    let (address, folder) = (rig.gateway.addresses()[0], rig.folder.path().display());
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "client", "--ignored", "--nocapture"])
        .env(CLIENT, format!("{address} {seed} {task} {folder}"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn await_line(child: &mut Child, wanted: &str) {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == wanted), "the client did not say {wanted:?}");
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// The client's process, not a test of its own.
#[test]
#[ignore = "started by the tests of this file"]
fn client() {
    let text = std::env::var(CLIENT).expect("started by a test");
    let mut fields = text.splitn(4, ' ');
    let mut field = || fields.next().unwrap();
    let (address, seed): (SocketAddr, u64) = (field().parse().unwrap(), field().parse().unwrap());
    let (task, folder) = (field().to_owned(), field().to_owned());
    let config = ClientConfig { silence: PATIENCE, ..client_config(address, Path::new(&folder)) };
    let session = Session::open(&config).unwrap();
    match &task[..] {
        "work" => work(&session, seed),
        "hold" => hold(&session, &config, seed),
        other => panic!("{other}"),
    }
}

/// Stores, loads, looks up and removes until it is killed.
fn work(session: &Session, seed: u64) {
    let mut rng = Rng::new(seed);
    loop {
        let n = rng.below(60);
        let name = key(&format!("work {n}"));
        match rng.below(8) {
            0 => {
                call(session, Operation::Remove, Some(key_slot(session, &name)), 0, 0).reply.unwrap();
            }
            1 => _ = present(session, &[name]),
            2 | 3 => {
                let opened = call(session, Operation::Open, Some(key_slot(session, &name)), 0, 0);
                _ = opened.reply.unwrap();
            }
            4 | 5 => {
                let found = get(session, &name).unwrap();
                assert!(found.is_none_or(|found| found == contents(n, 30_000)));
            }
            _ => _ = put(session, &name, &contents(n, 30_000)).unwrap(),
        }
    }
}

/// Holds a lease and a transaction, and works on with a new session when that one has ended.
fn hold(session: &Session, config: &ClientConfig, seed: u64) {
    put(session, &key(&format!("held {seed}")), b"held").unwrap();
    let lease = call(session, Operation::Open, Some(key_slot(session, &key(&format!("held {seed}")))), 0, 0);
    let begun = call(session, Operation::Begin, Some(key_slot(session, &key("begun"))), 0, 9_000);
    assert_eq!((lease.reply.unwrap().status, begun.reply.unwrap().status), (Status::Done, Status::Done));
    let (sender, ends) = channel();
    session.on_end(Box::new(move |reason| _ = sender.send(reason)));
    println!("open");
    // A stop shorter than the gateway's patience is no end: the same session goes on.
    if let Ok(reason) = ends.recv_timeout(Duration::from_secs(6)) {
        println!("lost: {reason}");
        assert!(!session.holds_leases());
        let session = Session::open(config).unwrap();
        assert_eq!(put(&session, &key("begun"), b"anew").unwrap(), Status::Done);
        println!("again");
    } else {
        assert!(session.holds_leases());
        assert_eq!(get(session, &key(&format!("held {seed}"))).unwrap().as_deref(), Some(&b"held"[..]));
        println!("kept");
    }
}

#[test]
fn two_hundred_clients_killed_at_random_points_leave_nothing() {
    let _alone = alone();
    let rig = rig_with(MemoryDevice::new(32 << 20), |_| ());
    let witness = Witness::start(&rig);
    let floor = Held::floor();
    let mut rng = Rng::new(1);
    for round in 0..50 {
        let mut clients: Vec<Child> = (0..4).map(|i| start(&rig, 4 * round + i, "work")).collect();
        // From before the first connection to the middle of the work.
        for child in &mut clients {
            std::thread::sleep(Duration::from_millis(rng.below(40)));
            child.kill().unwrap();
        }
        for mut child in clients {
            child.wait().unwrap();
        }
    }
    assert!(rig.gateway.status().sessions_opened > 50, "most of them got far enough to open a session");
    await_until("only the witness is left", || rig.gateway.status().sessions.len() == 1);
    floor.await_again();
    witness.finish();
    await_until("all sessions are gone", || rig.gateway.status().sessions.is_empty());
    assert_eq!(std::fs::read_dir(rig.folder.path()).unwrap().count(), 0, "no socket is left");

    // No transaction holds a key and no lease holds a slot: every key can be removed, and then nothing is used.
    let session = rig.open();
    let names = (0..60).map(|n| format!("work {n}")).chain((0..40).map(|n| format!("witness {n}")));
    for name in names {
        let removed = call(&session, Operation::Remove, Some(key_slot(&session, &key(&name))), 0, 0);
        assert_eq!(removed.reply.unwrap().status, Status::Done);
    }
    await_until("no slot is used", || rig.store.stats().slots_used == 0);
}

#[test]
fn a_client_stopped_for_too_long_loses_its_leases_and_goes_on_with_a_new_session() {
    let _alone = alone();
    let rig = rig_with(MemoryDevice::new(32 << 20), |config: &mut GatewayConfig| {
        config.client_silence = Duration::from_secs(1);
    });
    let mut child = start(&rig, 1, "hold");
    await_line(&mut child, "open");
    let holds =
        || rig.gateway.status().sessions.iter().map(|s| (s.leases, s.transactions)).collect::<Vec<_>>();
    assert_eq!(holds(), [(1, 1)]);
    let used = rig.store.stats().slots_used;
    signal(&child, Signal::STOP);
    let began = Instant::now();
    await_until("the session is gone", || rig.gateway.status().sessions.is_empty());
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    assert_eq!(rig.store.stats().slots_used, used - 3, "the transaction's slots are free");
    let session = rig.open();
    assert_eq!(put(&session, &key("begun"), b"by another").unwrap(), Status::Done);
    let removed = call(&session, Operation::Remove, Some(key_slot(&session, &key("begun"))), 0, 0);
    assert_eq!(removed.reply.unwrap().value, 1);
    signal(&child, Signal::CONT);
    await_line(&mut child, "again");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_client_stopped_for_a_moment_keeps_its_session() {
    let _alone = alone();
    let rig = rig_with(MemoryDevice::new(32 << 20), |config: &mut GatewayConfig| {
        config.client_silence = Duration::from_secs(5);
    });
    let mut child = start(&rig, 2, "hold");
    await_line(&mut child, "open");
    signal(&child, Signal::STOP);
    std::thread::sleep(Duration::from_millis(1_500));
    signal(&child, Signal::CONT);
    await_line(&mut child, "kept");
    assert!(child.wait().unwrap().success());
    assert_eq!(rig.gateway.status().sessions_opened, 1);
}
