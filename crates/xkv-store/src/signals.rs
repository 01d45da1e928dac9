//! Who waits for room, and who makes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex, RwLock};

/// Connects those who wait for room or for a key with the evictor.
#[derive(Default)]
pub(crate) struct Signals {
    waiting: AtomicBool,
    waker: RwLock<Option<Arc<dyn Fn() + Send + Sync>>>,
    request: Mutex<Request>,
    kicked: Condvar,
}

/// What the evictor is asked for.
#[derive(Default, Clone, Copy)]
pub(crate) struct Request {
    /// Look again.
    kicked: bool,
    /// Largest number of slots somebody waits for.
    pub(crate) slots: usize,
    /// Largest number of manifest bytes somebody waits for.
    pub(crate) manifest_bytes: u64,
    /// End.
    pub(crate) closing: bool,
}

impl Signals {
    pub(crate) fn set_waker(&self, waker: Arc<dyn Fn() + Send + Sync>) {
        *self.waker.write() = Some(waker);
    }

    /// Somebody is about to wait: the next [`Signals::changed`] calls the waker.
    pub(crate) fn wait(&self) {
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// A key or room may have become free, or evictable: whoever waits asks again.
    pub(crate) fn changed(&self) {
        if self.waiting.swap(false, Ordering::SeqCst) {
            let waker = self.waker.read().clone();
            if let Some(waker) = waker {
                waker();
            }
        }
    }

    /// Asks the evictor for room.
    pub(crate) fn ask(&self, slots: usize, manifest_bytes: u64) {
        let mut request = self.request.lock();
        request.kicked = true;
        request.slots = request.slots.max(slots);
        request.manifest_bytes = request.manifest_bytes.max(manifest_bytes);
        self.kicked.notify_one();
    }

    /// Makes the evictor look again.
    pub(crate) fn kick(&self) {
        self.ask(0, 0);
    }

    pub(crate) fn close(&self) {
        self.request.lock().closing = true;
        self.kicked.notify_all();
    }

    /// The evictor's wait for the next request. Its wishes are the evictor's from now on.
    pub(crate) fn next(&self) -> Request {
        let mut request = self.request.lock();
        while !request.kicked && !request.closing {
            self.kicked.wait(&mut request);
        }
        let closing = request.closing;
        std::mem::replace(&mut *request, Request { closing, ..Request::default() })
    }
}
