//! Threads that call the device's own methods: works with every device and kernel.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::desk::{Desk, panic_text};
use super::{EngineLoad, HAS_TIME, IoEngine, IoRequest, LentRequest, Op, SlotsRequest, taken_back};
use crate::error::{Error, Result};
use crate::io::Device;

/// Threads per drive at most.
const MAX_THREADS: usize = 16;

/// What is read from a drive in memory at once when somebody watches: a core's second cache still has it then. Writes go whole,
/// since those of one file there wait for each other.
const WATCHED_BYTES: usize = 128 * 1024;

/// A pool of threads for one device.
pub(super) struct Pool {
    desk: Arc<Desk>,
}

impl Pool {
    /// Starts up to `depth` threads, 16 at most.
    pub fn start(device: Arc<dyn Device>, depth: usize) -> Result<Self> {
        let threads = depth.clamp(1, MAX_THREADS);
        let desk = Arc::new(Desk::new(&*device, threads, threads));
        let pool = Self { desk: desk.clone() };
        for i in 0..threads {
            let (desk, device) = (desk.clone(), device.clone());
            let spawned = std::thread::Builder::new().name(format!("xkv-io-{i}")).spawn(move || {
                serve(&desk, &*device);
                // Whoever waits for the last thread may open the device again.
                drop(device);
                desk.leave();
            });
            if let Err(error) = spawned {
                (i..threads).for_each(|_| pool.desk.leave());
                return Err(Error::io("cannot start a thread; raise the limit (ulimit -u)", error));
            }
        }
        Ok(pool)
    }
}

fn serve(desk: &Desk, device: &dyn Device) {
    // The others go on with what waits.
    HAS_TIME.set(true);
    while let Some(job) = desk.take() {
        let mut request = job.request;
        let moved = catch_unwind(AssertUnwindSafe(|| {
            if !request.memory.enter() {
                return Err(taken_back());
            }
            let mut watch = request.memory.take_watch();
            let most = if watch.is_some() && request.op == Op::Read && device.in_memory() {
                WATCHED_BYTES
            } else {
                usize::MAX
            };
            let mut tell = |bytes| watch.iter_mut().for_each(|watch| watch(bytes));
            let mut done = 0;
            while done < request.len {
                let (op, offset) = (request.op, request.offset + done as u64);
                let piece = request.piece(done);
                let len = piece.len().min(most);
                let piece = &mut piece[..len];
                match op {
                    Op::Read => device.read_at(piece, offset).map(|()| tell(len)),
                    Op::Write => {
                        tell(len);
                        device.write_at(piece, offset)
                    }
                }?;
                done += len;
            }
            Ok(())
        }));
        let outcome = moved.unwrap_or_else(|panic| {
            Err(io::Error::other(format!("{}: {}", device.name(), panic_text(&*panic))))
        });
        desk.retire([(job.place, request.op)]);
        request.answer(outcome);
    }
}

impl IoEngine for Pool {
    fn submit(&self, request: IoRequest) {
        self.desk.submit(request);
    }

    fn submit_slots(&self, request: SlotsRequest) {
        self.desk.submit(request);
    }

    fn submit_lent(&self, request: LentRequest) {
        self.desk.submit(request);
    }

    fn watches(&self) -> bool {
        true
    }

    fn load(&self) -> EngineLoad {
        self.desk.load()
    }

    fn name(&self) -> &'static str {
        "pool"
    }

    fn shutdown(&self, patience: Duration) -> bool {
        self.desk.close();
        self.desk.await_empty(patience)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.desk.close();
    }
}
