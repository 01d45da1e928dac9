//! A panic below the connector costs the operations in progress, never an answer, and not the next operation.

mod common;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Client, MIB, Memory, config, contents, memory_drives, store_config};
use xkv_plugin::Embedded;
use xkv_plugin::backend::{Backend, Begun, Done, DriveSet, Reading};
use xkv_store::{ObjectKey, Result, Store, StoreStats};

/// An embedded store that panics instead of opening or beginning an object.
struct Panicking {
    store: Embedded,
    panics: AtomicBool,
}

impl Panicking {
    fn check(&self) {
        assert!(!self.panics.load(Ordering::SeqCst), "as the test wants it");
    }
}

impl Backend for Panicking {
    fn fragment_bytes(&self) -> usize {
        self.store.fragment_bytes()
    }

    fn drives(&self) -> usize {
        self.store.drives()
    }

    fn slots(&self) -> usize {
        self.store.slots()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    fn answers_at_once(&self) -> bool {
        self.store.answers_at_once()
    }

    fn lookup(&self, keys: &[ObjectKey], done: Done<Vec<Option<DriveSet>>>) {
        self.store.lookup(keys, done);
    }

    fn open(&self, key: &ObjectKey, done: Done<io::Result<Option<Box<dyn Reading>>>>) {
        self.check();
        self.store.open(key, done);
    }

    fn begin(&self, key: &ObjectKey, size: u64, done: Done<Begun>) {
        self.check();
        self.store.begin(key, size, done);
    }

    fn remove(&self, key: &ObjectKey, done: Done<Result<bool>>) {
        self.store.remove(key, done);
    }

    fn on_space(&self, waker: Arc<dyn Fn() + Send + Sync>) {
        self.store.on_space(waker);
    }

    fn oldest_io(&self) -> Vec<Option<Instant>> {
        self.store.oldest_io()
    }

    fn free_slots(&self) -> (usize, usize) {
        self.store.free_slots()
    }

    fn stats(&self) -> StoreStats {
        self.store.stats()
    }

    fn close(&self, patience: Duration) {
        self.store.close(patience);
    }
}

#[test]
fn a_panic_answers_what_is_in_progress_and_the_next_operation_works() {
    let store = Store::open_on(memory_drives(1, 16 * MIB), &store_config()).unwrap();
    let store = Embedded::on(store, 16).unwrap();
    let backend = Arc::new(Panicking { store, panics: AtomicBool::new(true) });
    let mut client = Client::over(backend.clone(), config());
    let memory = Memory::new(&contents(1, 5000));
    let ids = [client.set(&["a"], &[memory]), client.set(&["b", "c"], &[memory; 2])];
    for id in ids {
        assert!(!client.ok(id));
    }
    let target = Memory::blank(5000);
    let id = client.get(&["a", "b"], &[target; 2]);
    assert_eq!(client.results(id), [false, false]);
    assert!(target.is_stamped());

    backend.panics.store(false, Ordering::SeqCst);
    assert!(client.put("a", 1, 5000));
    assert_eq!(client.load("a", 5000), Some(contents(1, 5000)));
    let started = Instant::now();
    // Counted at the end of the reactor's turn, after the answers.
    while ["loads", "stores"].iter().any(|queue| client.connector.stats()["queue"][queue] != 0) {
        assert!(started.elapsed() < Duration::from_secs(20), "{}", client.connector.stats());
        std::thread::yield_now();
    }
}
