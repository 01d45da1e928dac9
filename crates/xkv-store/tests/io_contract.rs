//! One contract, held by every pair of device and engine; then what only certain devices can show: order of the
//! classes, stalls, faults, short transfers.

mod drives;

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use drives::LoopDrive;
use xkv_store::io::device::testing::{
    Calls, Effect, Fault, FaultyDevice, MemoryDevice, StallDevice, ThrottledDevice,
};
use xkv_store::io::device::{self, OpenOptions};
use xkv_store::io::engine::{self, EngineLoad, IoEngine, IoRequest, LentRequest, SlotsRequest, has_time};
use xkv_store::io::{BLOCK, Device, DirectIo, EngineKind, Op};
use xkv_store::{Lender, Lent, Shape, SlotBuf, SlotPool};

const MIB: u64 = 1 << 20;
const DRIVE: u64 = 16 * MIB;
const SLOT: usize = MIB as usize;
/// Far beyond what any step takes; reached only when an answer is lost.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the bytes of a test live.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Memory,
    File(DirectIo),
    Loop { sector: u32 },
}

/// A device, its engine, memory, and an inbox for answers.
struct Rig {
    device: Arc<dyn Device>,
    engine: Arc<dyn IoEngine>,
    slots: SlotPool,
    inbox: Inbox,
}

struct Inbox {
    tx: Sender<Answer>,
    rx: Receiver<Answer>,
}

struct Answer {
    id: u64,
    buf: SlotBuf,
    outcome: io::Result<()>,
}

impl Inbox {
    fn new() -> Self {
        let (tx, rx) = unbounded();
        Self { tx, rx }
    }

    fn request(&self, id: u64, op: Op, offset: u64, len: usize, buf: SlotBuf) -> IoRequest {
        let tx = self.tx.clone();
        let done = Box::new(move |buf, outcome| tx.send(Answer { id, buf, outcome }).unwrap());
        IoRequest { op, offset, len, buf, done }
    }

    fn next(&self) -> Answer {
        self.rx.recv_timeout(PATIENCE).expect("an answer is missing")
    }
}

fn make(place: Place) -> Option<Arc<dyn Device>> {
    let mut options = OpenOptions { file_bytes: DRIVE, direct: DirectIo::On, ..OpenOptions::default() };
    let device = match place {
        Place::Memory => return Some(MemoryDevice::new(DRIVE)),
        Place::File(direct) => {
            options.direct = direct;
            let folder = drives::scratch();
            device::open(folder.path(), &options).unwrap()
        }
        Place::Loop { sector } => {
            if !drives::possible() {
                return None;
            }
            let drive = LoopDrive::new(DRIVE, sector);
            device::open(drive.node(), &options).unwrap()
        }
    };
    device.set_direct(options.direct, true).unwrap();
    assert_eq!(device.is_direct(), place != Place::File(DirectIo::Off));
    assert_eq!(device.size(), DRIVE);
    Some(Arc::new(device))
}

/// An engine; none where the kernel refuses io_uring to this process, which a seccomp filter or the sysctl must prove.
fn start(device: Arc<dyn Device>, kind: EngineKind, depth: usize) -> Option<Arc<dyn IoEngine>> {
    match engine::start(device, kind, depth) {
        Ok(engine) => {
            let name = if kind == EngineKind::Pool { "pool" } else { "io_uring" };
            assert_eq!(engine.name(), name);
            Some(engine)
        }
        Err(error) if matches!(error.errno(), Some(libc::EPERM | libc::ENOSYS)) => {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let sysctl = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            let switched_off = sysctl.is_ok_and(|value| value.trim() != "0");
            assert!(status.contains("Seccomp:\t2") || switched_off, "{error}");
            eprintln!("not run: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

impl Rig {
    fn new(place: Place, kind: EngineKind, slots: usize) -> Option<Self> {
        let device = make(place)?;
        let engine = start(device.clone(), kind, 32)?;
        let slots = SlotPool::new(slots, SLOT).unwrap();
        Some(Self { device, engine, slots, inbox: Inbox::new() })
    }

    fn submit(&self, id: u64, op: Op, offset: u64, len: usize, buf: SlotBuf) {
        self.engine.submit(self.inbox.request(id, op, offset, len, buf));
    }

    fn slot(&self) -> SlotBuf {
        self.slots.try_take().expect("a free slot")
    }
}

/// The byte that belongs at a position of the drive in a round: never repeats within a test.
fn pattern(round: u64, offset: u64, bytes: &mut [u8]) {
    for (i, word) in bytes.chunks_mut(8).enumerate() {
        let mut z = (round << 48) ^ (offset / 8 + i as u64);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
}

fn holds_pattern(round: u64, offset: u64, bytes: &[u8]) -> bool {
    let mut wanted = vec![0; bytes.len()];
    pattern(round, offset, &mut wanted);
    wanted == bytes
}

/// Adjoining ranges of the whole drive, of one block up to a slot.
fn ranges() -> Vec<Range<u64>> {
    let sizes = [1, 2, 3, 8, 31, 32, 33, 255, 256];
    let mut all = Vec::new();
    let mut start = 0;
    for blocks in sizes.iter().cycle() {
        let end = (start + blocks * BLOCK as u64).min(DRIVE);
        all.push(start..end);
        if end == DRIVE {
            return all;
        }
        start = end;
    }
    unreachable!("the sizes go on for ever")
}

/// Every byte of the drive is written once and comes back, many requests at a time; memory past the length that was
/// asked for is left alone.
fn bytes_come_back(rig: &Rig, round: u64) {
    const GUARD: u8 = 0xa5;
    let ranges = ranges();
    for op in [Op::Write, Op::Read] {
        let mut answered = HashSet::new();
        let mut sent = 0;
        while answered.len() < ranges.len() {
            while sent < ranges.len() {
                let Some(mut buf) = rig.slots.try_take() else {
                    break;
                };
                let range = ranges[sent].clone();
                let len = (range.end - range.start) as usize;
                buf.fill(GUARD);
                if op == Op::Write {
                    pattern(round, range.start, &mut buf[..len]);
                }
                rig.submit(sent as u64, op, range.start, len, buf);
                sent += 1;
            }
            let answer = rig.inbox.next();
            answer.outcome.unwrap();
            assert!(answered.insert(answer.id), "{} answered twice", answer.id);
            let range = &ranges[answer.id as usize];
            let len = (range.end - range.start) as usize;
            assert!(holds_pattern(round, range.start, &answer.buf[..len]), "{op:?} {range:?}");
            assert!(answer.buf[len..].iter().all(|&b| b == GUARD), "{op:?} {range:?}");
        }
    }
    assert_eq!(rig.engine.load(), EngineLoad::default());
}

/// Pages that live as long as the test, lent in pieces.
struct Pages {
    start: NonNull<u8>,
    shape: Shape,
}

// SAFETY: plain memory, which is never freed.
unsafe impl Send for Pages {}
// SAFETY: as above; nobody touches it while it is lent.
unsafe impl Sync for Pages {}

// SAFETY: the memory is never freed, and `Pages::bytes` is only called before and after a transfer.
unsafe impl Lender for Pages {
    fn enter(&self) -> Option<NonNull<u8>> {
        Some(self.start)
    }

    fn leave(&self) {}

    fn shape(&self) -> Shape {
        self.shape
    }
}

impl Pages {
    /// Memory of `shape`, filled with `byte` also between its pieces.
    fn new(shape: Shape, byte: u8) -> Self {
        let memory = Box::leak(vec![byte; shape.span() + BLOCK].into_boxed_slice());
        let skip = memory.as_ptr().align_offset(BLOCK);
        Self { start: NonNull::from(&mut memory[skip]), shape }
    }

    fn lend(&self) -> Lent {
        Lent::new(Box::new(Self { ..*self }))
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `span` bytes were made in `new`, and nothing has them at the moment.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.shape.span()) }
    }

    /// The bytes of all pieces.
    fn joined(&mut self) -> Vec<u8> {
        let Shape { len, piece, stride } = self.shape;
        let mut joined: Vec<u8> =
            self.bytes().chunks(stride).flat_map(|chunk| &chunk[..chunk.len().min(piece)]).copied().collect();
        joined.truncate(len);
        joined
    }

    fn fill(&mut self, joined: &[u8]) {
        let Shape { piece, stride, .. } = self.shape;
        for (place, bytes) in self.bytes().chunks_mut(stride).zip(joined.chunks(piece)) {
            place[..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Whether every byte between the pieces is `byte`.
    fn untouched_between(&mut self, byte: u8) -> bool {
        let Shape { piece, stride, .. } = self.shape;
        self.bytes().chunks(stride).all(|chunk| chunk.iter().skip(piece).all(|&b| b == byte))
    }
}

/// Moves lent memory, and waits for it.
fn move_lent(engine: &dyn IoEngine, op: Op, offset: u64, memory: Lent) -> io::Result<()> {
    let (tx, rx) = unbounded();
    let done = Box::new(move |outcome| tx.send(outcome).unwrap());
    engine.submit_lent(LentRequest { op, offset, memory, done });
    rx.recv_timeout(PATIENCE).expect("an answer is missing")
}

const SHAPES: [Shape; 4] = [
    Shape { len: 5 * BLOCK, piece: 5 * BLOCK, stride: 5 * BLOCK },
    Shape { len: 8 * BLOCK, piece: 2 * BLOCK, stride: 2 * BLOCK },
    Shape { len: 8 * BLOCK, piece: 2 * BLOCK, stride: 6 * BLOCK },
    // The last one is shorter.
    Shape { len: 10 * BLOCK, piece: 3 * BLOCK, stride: 4 * BLOCK },
];

/// Memory of somebody else, in one piece and in several, goes to one place of the drive and back.
fn pieces_go_where_they_belong(rig: &Rig) {
    for (round, shape) in SHAPES.into_iter().enumerate() {
        let (round, offset) = (round as u64, 7 * BLOCK as u64);
        let mut wanted = vec![0; shape.len];
        pattern(round, offset, &mut wanted);
        let mut source = Pages::new(shape, 1);
        source.fill(&wanted);
        move_lent(&*rig.engine, Op::Write, offset, source.lend()).unwrap();
        rig.submit(round, Op::Read, offset, shape.len, rig.slot());
        let answer = rig.inbox.next();
        answer.outcome.unwrap();
        assert!(holds_pattern(round, offset, &answer.buf[..shape.len]), "{shape:?}");
        drop(answer.buf);
        let mut target = Pages::new(shape, 2);
        move_lent(&*rig.engine, Op::Read, offset, target.lend()).unwrap();
        assert!(target.joined() == wanted, "{shape:?}");
        assert!(target.untouched_between(2), "{shape:?}");
    }
}

/// Who gets a lone completion may use its thread; nobody else's thread is said to have time.
fn a_lone_completion_has_time(rig: &Rig) {
    let (tx, rx) = unbounded();
    let done = Box::new(move |slot, outcome: io::Result<()>| {
        drop(slot);
        tx.send((has_time(), outcome)).unwrap();
    });
    rig.engine.submit(IoRequest { op: Op::Read, offset: 0, len: BLOCK, buf: rig.slot(), done });
    let (has_time_there, outcome) = rx.recv_timeout(PATIENCE).expect("an answer is missing");
    outcome.unwrap();
    assert!(has_time_there);
    assert!(!has_time());
}

/// Several slots of one request go to one place of the drive and back, each to its own.
fn slots_go_where_they_belong(rig: &Rig) {
    let offset = 5 * BLOCK as u64;
    // The last one is not full.
    let len = 2 * SLOT + 3 * BLOCK;
    for op in [Op::Write, Op::Read] {
        let mut slots: Vec<SlotBuf> = (0..3).map(|_| rig.slot()).collect();
        if op == Op::Write {
            let mut position = offset;
            for slot in &mut slots {
                pattern(1, position, slot);
                position += SLOT as u64;
            }
        } else {
            slots.iter_mut().for_each(|slot| slot.fill(0));
            // They come back in the order in which they were given, whatever their addresses.
            slots.reverse();
        }
        let numbers: Vec<u32> = slots.iter().map(SlotBuf::slot).collect();
        let (tx, rx) = unbounded();
        let done = Box::new(move |slots, outcome: io::Result<()>| tx.send((slots, outcome)).unwrap());
        rig.engine.submit_slots(SlotsRequest { op, offset, len, slots, done });
        let (slots, outcome): (Vec<SlotBuf>, _) = rx.recv_timeout(PATIENCE).expect("an answer is missing");
        outcome.unwrap();
        assert_eq!(slots.iter().map(SlotBuf::slot).collect::<Vec<_>>(), numbers);
        for (number, slot) in slots.iter().enumerate() {
            let start = number * SLOT;
            let bytes = &slot[..SLOT.min(len - start)];
            assert!(holds_pattern(1, offset + start as u64, bytes), "{op:?}, slot {number}");
        }
        if op == Op::Read {
            assert!(slots[2][3 * BLOCK..].iter().all(|&byte| byte == 0), "nothing beyond the length");
        }
    }
}

/// Several threads at once, each on its own part of the drive: what was answered as written is read.
fn threads_do_not_disturb_each_other(rig: &Rig) {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 40;
    let part = DRIVE / THREADS;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let inbox = Inbox::new();
                let len = 33 * BLOCK;
                for round in 0..ROUNDS {
                    let offset = thread * part + round % 7 * len as u64;
                    for op in [Op::Write, Op::Read] {
                        let mut buf = rig.slot();
                        if op == Op::Write {
                            pattern(round, offset, &mut buf[..len]);
                        } else {
                            buf.fill(0);
                        }
                        rig.engine.submit(inbox.request(round, op, offset, len, buf));
                        let answer = inbox.next();
                        answer.outcome.unwrap();
                        assert_eq!(answer.id, round);
                        assert!(holds_pattern(round, offset, &answer.buf[..len]));
                    }
                }
            });
        }
    });
}

/// What cannot be a transfer of whole blocks inside the drive is refused, and nothing is moved.
fn bad_requests_are_refused(rig: &Rig) {
    let block = BLOCK as u64;
    let wrong = [
        (512, BLOCK),
        (0, 0),
        (0, 100),
        (0, SLOT + BLOCK),
        (DRIVE, BLOCK),
        (DRIVE - block, 2 * BLOCK),
        (u64::MAX - block + 1, BLOCK),
    ];
    for (offset, len) in wrong {
        for op in [Op::Read, Op::Write] {
            let mut buf = rig.slot();
            buf.fill(7);
            rig.submit(1, op, offset, len, buf);
            let answer = rig.inbox.next();
            let error = answer.outcome.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{op:?} {offset} {len}");
            assert!(error.to_string().contains(rig.device.name()), "{error}");
            assert!(answer.buf.iter().all(|&b| b == 7));
        }
    }
    rig.submit(2, Op::Read, DRIVE - block, BLOCK, rig.slot());
    rig.inbox.next().outcome.unwrap();
}

/// Every request is answered once, whether its turn came before the shutdown or not; then nothing holds the device.
fn shutdown_answers_everything(rig: Rig) {
    let count = rig.slots.slots();
    for id in 0..count as u64 {
        let op = if id % 2 == 0 { Op::Write } else { Op::Read };
        rig.submit(id, op, id * SLOT as u64 % DRIVE, SLOT, rig.slot());
    }
    assert!(rig.engine.shutdown(PATIENCE));
    assert!(rig.engine.shutdown(Duration::ZERO), "a second time");
    assert_eq!(rig.engine.load(), EngineLoad::default());
    let answers: Vec<Answer> = rig.inbox.rx.try_iter().collect();
    let ids: HashSet<u64> = answers.iter().map(|a| a.id).collect();
    assert_eq!((answers.len(), ids.len()), (count, count));
    for answer in &answers {
        if let Err(error) = &answer.outcome {
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        }
    }
    drop(answers);
    rig.submit(1, Op::Read, 0, BLOCK, rig.slot());
    let late = rig.inbox.rx.try_recv().expect("answered at once");
    assert_eq!(late.outcome.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    drop(late.buf);
    assert_eq!(rig.slots.free(), count);
    assert_eq!(Arc::strong_count(&rig.device), 1, "the engine still has the device");
}

/// An engine that is dropped answers what it was given.
fn drop_answers_everything(rig: Rig) {
    let count = rig.slots.slots();
    for id in 0..count as u64 {
        rig.submit(id, Op::Write, id * SLOT as u64 % DRIVE, SLOT, rig.slot());
    }
    drop(rig.engine);
    let ids: HashSet<u64> = (0..count).map(|_| rig.inbox.next().id).collect();
    assert_eq!(ids.len(), count);
    assert_eq!(rig.slots.free(), count);
}

/// A completion that panics costs nobody else an answer.
fn a_panic_in_a_completion_stays_there(rig: &Rig) {
    for id in 0..64 {
        if id % 4 == 0 {
            eventually("a slot comes back", || rig.slots.free() > 1);
            rig.engine.submit(IoRequest {
                op: Op::Read,
                offset: 0,
                len: BLOCK,
                buf: rig.slot(),
                done: Box::new(|_, _| panic!("a completion of this test")),
            });
        }
        rig.submit(id, Op::Read, id * BLOCK as u64, BLOCK, rig.slot());
        rig.inbox.next().outcome.unwrap();
    }
}

macro_rules! contract {
    ($($name:ident: $place:expr, $kind:expr;)*) => {$(
        mod $name {
            use super::*;

            fn rig(slots: usize) -> Option<Rig> {
                Rig::new($place, $kind, slots)
            }

            #[test]
            fn bytes_come_back() {
                let Some(rig) = rig(48) else { return };
                super::bytes_come_back(&rig, 1);
                super::bytes_come_back(&rig, 2);
            }

            #[test]
            fn pieces_go_where_they_belong() {
                let Some(rig) = rig(1) else { return };
                super::pieces_go_where_they_belong(&rig);
            }

            #[test]
            fn slots_go_where_they_belong() {
                let Some(rig) = rig(3) else { return };
                super::slots_go_where_they_belong(&rig);
            }

            #[test]
            fn a_lone_completion_has_time() {
                let Some(rig) = rig(1) else { return };
                super::a_lone_completion_has_time(&rig);
            }

            #[test]
            fn threads_do_not_disturb_each_other() {
                let Some(rig) = rig(8) else { return };
                super::threads_do_not_disturb_each_other(&rig);
            }

            #[test]
            fn bad_requests_are_refused() {
                let Some(rig) = rig(1) else { return };
                super::bad_requests_are_refused(&rig);
            }

            #[test]
            fn shutdown_answers_everything() {
                let Some(rig) = rig(100) else { return };
                super::shutdown_answers_everything(rig);
            }

            #[test]
            fn drop_answers_everything() {
                let Some(rig) = rig(100) else { return };
                super::drop_answers_everything(rig);
            }

            #[test]
            fn a_panic_in_a_completion_stays_there() {
                let Some(rig) = rig(3) else { return };
                super::a_panic_in_a_completion_stays_there(&rig);
            }
        }
    )*};
}

contract! {
    memory_pool: Place::Memory, EngineKind::Pool;
    buffered_file_pool: Place::File(DirectIo::Off), EngineKind::Pool;
    buffered_file_uring: Place::File(DirectIo::Off), EngineKind::Uring;
    direct_file_pool: Place::File(DirectIo::On), EngineKind::Pool;
    direct_file_uring: Place::File(DirectIo::On), EngineKind::Uring;
    loop_512_pool: Place::Loop { sector: 512 }, EngineKind::Pool;
    loop_512_uring: Place::Loop { sector: 512 }, EngineKind::Uring;
    loop_4096_pool: Place::Loop { sector: 4096 }, EngineKind::Pool;
    loop_4096_uring: Place::Loop { sector: 4096 }, EngineKind::Uring;
}

/// What one engine wrote the other reads, and the file itself holds.
#[test]
fn engines_agree_on_positions() {
    let Some(device) = make(Place::File(DirectIo::On)) else {
        return;
    };
    let slots = SlotPool::new(1, SLOT).unwrap();
    let inbox = Inbox::new();
    for (round, (writer, reader)) in
        [(EngineKind::Pool, EngineKind::Uring), (EngineKind::Uring, EngineKind::Pool)].into_iter().enumerate()
    {
        let offset = (17 + round * 300) as u64 * BLOCK as u64;
        let (round, len) = (round as u64, 5 * BLOCK);
        let mut buf = slots.try_take().unwrap();
        pattern(round, offset, &mut buf[..len]);
        for (op, kind) in [(Op::Write, writer), (Op::Read, reader)] {
            let Some(engine) = start(device.clone(), kind, 4) else {
                return;
            };
            engine.submit(inbox.request(0, op, offset, len, buf));
            let answer = inbox.next();
            answer.outcome.unwrap();
            buf = answer.buf;
            assert!(holds_pattern(round, offset, &buf[..len]));
            buf.fill(0);
            assert!(engine.shutdown(PATIENCE));
        }
        device.read_at(&mut buf[..len], offset).unwrap();
        assert!(holds_pattern(round, offset, &buf[..len]));
    }
}

/// The automatic choice takes the pool for a device without a descriptor; asking for io_uring there is an error.
#[test]
fn devices_without_descriptor_get_the_pool() {
    let device = MemoryDevice::named("a drive in memory", DRIVE);
    let engine = engine::start(device.clone(), EngineKind::Auto, 4).unwrap();
    assert_eq!(engine.name(), "pool");
    let error = engine::start(device, EngineKind::Uring, 4).err().unwrap();
    assert_eq!(error.kind(), xkv_store::ErrorKind::Invalid);
    assert!(error.to_string().contains("a drive in memory"), "{error}");
}

/// Makes io_uring_setup fail with `errno` in this thread and those it starts, as a container's seccomp profile does.
fn refuse_io_uring(errno: i32) {
    let step = |code: u32, yes, no, k| libc::sock_filter { code: code as u16, jt: yes, jf: no, k };
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_setup as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program and its steps live through the calls, which copy them; only this thread is bound.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

/// A kernel that refuses io_uring: the automatic choice works with threads, asking for io_uring says what helps.
#[test]
fn a_refused_io_uring_falls_back_to_the_pool() {
    for (errno, cure) in [(libc::EPERM, "seccomp"), (libc::ENOSYS, "5.6"), (libc::ENOMEM, "ulimit -l")] {
        std::thread::spawn(move || {
            let device = make(Place::File(DirectIo::On)).unwrap();
            refuse_io_uring(errno);
            let error = engine::start(device.clone(), EngineKind::Uring, 4).err().unwrap();
            assert_eq!(error.errno(), Some(errno));
            assert!(error.to_string().contains(cure), "{error}");

            let engine = engine::start(device.clone(), EngineKind::Auto, 4).unwrap();
            assert_eq!(engine.name(), "pool");
            let slots = SlotPool::new(1, BLOCK).unwrap();
            let inbox = Inbox::new();
            engine.submit(inbox.request(1, Op::Write, 0, BLOCK, slots.try_take().unwrap()));
            inbox.next().outcome.unwrap();
            assert!(engine.shutdown(PATIENCE));
            assert_eq!(Arc::strong_count(&device), 1);
        })
        .join()
        .unwrap();
    }
}

/// A drive whose transfers wait for the test: reads take what the test sends, writes go to the test.
/// Engines must use offset 0, since sockets refuse any other.
struct StreamDevice {
    ours: UnixStream,
}

impl StreamDevice {
    fn pair() -> (Arc<dyn Device>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(PATIENCE)).unwrap();
        theirs.set_write_timeout(Some(PATIENCE)).unwrap();
        (Arc::new(Self { ours }), theirs)
    }
}

impl Device for StreamDevice {
    fn name(&self) -> &str {
        "stream"
    }

    fn size(&self) -> u64 {
        DRIVE
    }

    fn read_at(&self, buf: &mut [u8], _offset: u64) -> io::Result<()> {
        (&self.ours).read_exact(buf)
    }

    fn write_at(&self, buf: &[u8], _offset: u64) -> io::Result<()> {
        (&self.ours).write_all(buf)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.ours.as_raw_fd())
    }
}

const BOTH: [EngineKind; 2] = [EngineKind::Pool, EngineKind::Uring];

/// Waits for a state that an engine's own thread brings about.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// With one request in flight the order of answers is the order of dispatch: reads overtake the writes that wait, and
/// a write goes after seven of them.
#[test]
fn reads_overtake_writes_but_do_not_starve_them() {
    for kind in BOTH {
        let (device, mut peer) = StreamDevice::pair();
        let Some(engine) = start(device, kind, 1) else {
            continue;
        };
        let slots = SlotPool::new(32, BLOCK).unwrap();
        let inbox = Inbox::new();
        let submit = |id, op| {
            engine.submit(inbox.request(id, op, 0, BLOCK, slots.try_take().unwrap()));
        };
        submit(0, Op::Read);
        eventually("the first read is given to the device", || engine.load().in_flight == 1);
        (100..103).for_each(|id| submit(id, Op::Write));
        (1..17).for_each(|id| submit(id, Op::Read));
        let load = engine.load();
        assert_eq!((load.queued_reads, load.queued_writes, load.in_flight), (16, 3, 1));
        peer.write_all(&[0; 17 * BLOCK]).unwrap();
        let order: Vec<u64> = (0..20).map(|_| inbox.next().id).collect();
        let expected: Vec<u64> = (0..=7).chain([100]).chain(8..=14).chain([101, 15, 16, 102]).collect();
        assert_eq!(order, expected, "{kind:?}");
    }
}

/// Writes that are stuck in the drive leave room for reads, and few are in flight while reads wait.
#[test]
fn reads_pass_writes_that_are_stuck() {
    let device = StallDevice::new(MemoryDevice::new(DRIVE));
    let engine = start(device.clone(), EngineKind::Pool, 16).unwrap();
    let slots = SlotPool::new(200, BLOCK).unwrap();
    let inbox = Inbox::new();
    device.stall(Calls::WRITES);
    let submit = |id, op| {
        let offset = id * BLOCK as u64;
        engine.submit(inbox.request(id, op, offset, BLOCK, slots.try_take().unwrap()));
    };
    (0..100).for_each(|id| submit(id, Op::Write));
    assert!(device.await_waiting(12, PATIENCE));
    (100..150).for_each(|id| submit(id, Op::Read));
    for _ in 100..150 {
        let answer = inbox.next();
        assert!(answer.id >= 100, "a write was answered");
        answer.outcome.unwrap();
    }
    let load = engine.load();
    assert_eq!((load.in_flight, load.queued_writes, device.waiting()), (12, 88, 12));
    device.resume();
    for _ in 0..100 {
        inbox.next().outcome.unwrap();
    }
}

/// A drive that stops answering shows in the load; a shutdown gives up in time; when the drive comes back, the answer
/// and the buffer do, too.
#[test]
fn a_stalled_drive_is_seen_and_left_behind() {
    for kind in BOTH {
        let (device, mut peer) = StreamDevice::pair();
        let Some(engine) = start(device.clone(), kind, 2) else {
            continue;
        };
        let slots = SlotPool::new(5, BLOCK).unwrap();
        let inbox = Inbox::new();
        let before = Instant::now();
        for id in 0..4 {
            engine.submit(inbox.request(id, Op::Read, 0, BLOCK, slots.try_take().unwrap()));
        }
        eventually("two reads are in flight", || engine.load().in_flight == 2);
        let after = Instant::now();
        let load = engine.load();
        let oldest = load.oldest.expect("something is in flight");
        assert!(before <= oldest && oldest <= after);
        assert_eq!(load.queued_reads, 2);

        let began = Instant::now();
        assert!(!engine.shutdown(Duration::from_millis(100)), "{kind:?}");
        assert!(began.elapsed() < PATIENCE / 2);
        for _ in 0..2 {
            let error = inbox.next().outcome.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        }
        let load = engine.load();
        assert_eq!((load.in_flight, load.oldest, load.queued_reads), (2, Some(oldest), 0));
        assert_eq!(slots.free(), 3, "buffers in flight stay taken");
        assert!(inbox.rx.is_empty());
        drop(engine);

        peer.write_all(&[9; 2 * BLOCK]).unwrap();
        for _ in 0..2 {
            let answer = inbox.next();
            answer.outcome.unwrap();
            assert!(answer.buf.iter().all(|&b| b == 9));
        }
        eventually("the engine lets go of the device", || Arc::strong_count(&device) == 1);
        assert_eq!(slots.free(), 5);
    }
}

/// The oldest request in flight is the oldest, not the first of the table.
#[test]
fn the_oldest_request_is_exact() {
    let device = StallDevice::new(MemoryDevice::new(DRIVE));
    let engine = start(device.clone(), EngineKind::Pool, 4).unwrap();
    let slots = SlotPool::new(4, BLOCK).unwrap();
    let inbox = Inbox::new();
    let submit = |id, op| {
        engine.submit(inbox.request(id, op, 0, BLOCK, slots.try_take().unwrap()));
    };
    device.stall(Calls::ALL);
    submit(1, Op::Read);
    assert!(device.await_waiting(1, PATIENCE));
    let first = engine.load().oldest.unwrap();
    submit(2, Op::Write);
    assert!(device.await_waiting(2, PATIENCE));
    assert_eq!(engine.load().oldest, Some(first));
    device.stall(Calls::WRITES);
    assert_eq!(inbox.next().id, 1);
    let second = engine.load().oldest.unwrap();
    assert!(second > first);
    device.stall(Calls::ALL);
    submit(3, Op::Read);
    assert!(device.await_waiting(2, PATIENCE));
    assert_eq!(engine.load().oldest, Some(second));
    device.resume();
    inbox.next();
    inbox.next();
    assert_eq!(engine.load(), EngineLoad::default());
}

/// A descriptor whose transfers stop short: one end of a pipe (the offset does not matter there), a file of the kernel.
struct ShortDevice(File);

impl ShortDevice {
    fn on(end: impl Into<OwnedFd>) -> Arc<dyn Device> {
        Arc::new(Self(File::from(end.into())))
    }
}

impl Device for ShortDevice {
    fn name(&self) -> &str {
        "pipe"
    }

    fn size(&self) -> u64 {
        DRIVE
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self.0.read_exact_at(buf, offset) {
            Err(e) if e.raw_os_error() == Some(libc::ESPIPE) => (&self.0).read_exact(buf),
            outcome => outcome,
        }
    }

    fn write_at(&self, buf: &[u8], _offset: u64) -> io::Result<()> {
        (&self.0).write_all(buf)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.0.as_raw_fd())
    }
}

/// Transfers that stop short go on where they stopped.
#[test]
fn short_transfers_are_completed() {
    let mut wanted = vec![0; SLOT];
    pattern(1, 0, &mut wanted);
    let slots = SlotPool::new(1, SLOT).unwrap();
    let inbox = Inbox::new();
    for kind in BOTH {
        let (ours, mut theirs) = io::pipe().unwrap();
        let Some(engine) = start(ShortDevice::on(ours), kind, 4) else {
            continue;
        };
        engine.submit(inbox.request(1, Op::Read, 0, SLOT, slots.try_take().unwrap()));
        let sent = wanted.clone();
        std::thread::spawn(move || sent.chunks(30_011).try_for_each(|p| theirs.write_all(p)));
        let answer = inbox.next();
        answer.outcome.unwrap();
        assert!(answer.buf[..] == wanted[..], "{kind:?}");

        let (mut theirs, ours) = io::pipe().unwrap();
        let Some(engine) = start(ShortDevice::on(ours), kind, 4) else {
            continue;
        };
        engine.submit(inbox.request(2, Op::Write, 0, SLOT, answer.buf));
        let (tx, rx) = unbounded();
        std::thread::spawn(move || {
            let mut written = vec![0; SLOT];
            let outcome = theirs.read_exact(&mut written);
            tx.send((outcome, written))
        });
        inbox.next().outcome.unwrap();
        let (outcome, written) = rx.recv_timeout(PATIENCE).unwrap();
        outcome.unwrap();
        assert!(written == wanted, "{kind:?}");
    }
}

/// As above, where the memory lies in pieces and the transfer stops in the middle of one.
#[test]
fn short_transfers_go_on_within_a_piece() {
    let shape = Shape { len: 40 * BLOCK, piece: 3 * BLOCK, stride: 5 * BLOCK };
    let mut wanted = vec![0; shape.len];
    pattern(1, 0, &mut wanted);
    for kind in BOTH {
        let (ours, mut theirs) = io::pipe().unwrap();
        let Some(engine) = start(ShortDevice::on(ours), kind, 4) else {
            continue;
        };
        let sent = wanted.clone();
        std::thread::spawn(move || sent.chunks(5_003).try_for_each(|p| theirs.write_all(p)));
        let mut pages = Pages::new(shape, 3);
        move_lent(&*engine, Op::Read, 0, pages.lend()).unwrap();
        assert!(pages.joined() == wanted, "{kind:?}");
        assert!(pages.untouched_between(3), "{kind:?}");

        let (mut theirs, ours) = io::pipe().unwrap();
        let Some(engine) = start(ShortDevice::on(ours), kind, 4) else {
            continue;
        };
        let (tx, rx) = unbounded();
        std::thread::spawn(move || {
            let mut written = vec![0; 40 * BLOCK];
            let outcome = theirs.read_exact(&mut written);
            tx.send((outcome, written))
        });
        move_lent(&*engine, Op::Write, 0, pages.lend()).unwrap();
        let (outcome, written) = rx.recv_timeout(PATIENCE).unwrap();
        outcome.unwrap();
        assert!(written == wanted, "{kind:?}");
    }
}

/// The rest of a short transfer comes from where the first part ended. The kernel's list of symbols is a file that is
/// read in pieces of a page or less.
#[test]
fn short_reads_go_on_at_the_right_offset() {
    let path = "/proc/kallsyms";
    let Ok(wanted) = fs::read(path) else {
        eprintln!("not run: no {path} here");
        return;
    };
    let offset = 5 * BLOCK;
    let len = (wanted.len() - offset).min(SLOT) / BLOCK * BLOCK;
    assert!(len > 4 * BLOCK, "{path} is too short to tell");
    for kind in BOTH {
        let device = ShortDevice::on(File::open(path).unwrap());
        let Some(engine) = start(device, kind, 4) else { continue };
        let slots = SlotPool::new(1, SLOT).unwrap();
        let inbox = Inbox::new();
        let buf = slots.try_take().unwrap();
        engine.submit(inbox.request(1, Op::Read, offset as u64, len, buf));
        let answer = inbox.next();
        answer.outcome.unwrap();
        assert!(answer.buf[..len] == wanted[offset..][..len], "{kind:?}");
    }
}

/// A drive that ends early is an error, not a loop.
#[test]
fn an_early_end_is_an_error() {
    for kind in BOTH {
        let slots = SlotPool::new(1, SLOT).unwrap();
        let inbox = Inbox::new();
        let (ours, mut theirs) = io::pipe().unwrap();
        let Some(engine) = start(ShortDevice::on(ours), kind, 4) else {
            continue;
        };
        engine.submit(inbox.request(1, Op::Read, 0, SLOT, slots.try_take().unwrap()));
        theirs.write_all(&[1; 5000]).unwrap();
        drop(theirs);
        let answer = inbox.next();
        let error = answer.outcome.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{kind:?}");

        let (theirs, ours) = io::pipe().unwrap();
        let Some(engine) = start(ShortDevice::on(ours), kind, 4) else {
            continue;
        };
        drop(theirs);
        engine.submit(inbox.request(2, Op::Write, 0, BLOCK, answer.buf));
        let error = inbox.next().outcome.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE), "{kind:?}");
    }
}

/// A full drive answers ENOSPC through both engines.
#[test]
fn no_space_is_reported() {
    struct Full(File);
    impl Device for Full {
        fn name(&self) -> &str {
            "/dev/full"
        }
        fn size(&self) -> u64 {
            DRIVE
        }
        fn read_at(&self, buf: &mut [u8], _offset: u64) -> io::Result<()> {
            (&self.0).read_exact(buf)
        }
        fn write_at(&self, buf: &[u8], _offset: u64) -> io::Result<()> {
            (&self.0).write_all(buf)
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
        fn fd(&self) -> Option<RawFd> {
            Some(self.0.as_raw_fd())
        }
    }
    for kind in BOTH {
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let Some(engine) = start(Arc::new(Full(full)), kind, 4) else {
            continue;
        };
        let slots = SlotPool::new(1, BLOCK).unwrap();
        let inbox = Inbox::new();
        engine.submit(inbox.request(1, Op::Write, 0, BLOCK, slots.try_take().unwrap()));
        let answer = inbox.next();
        assert_eq!(answer.outcome.unwrap_err().raw_os_error(), Some(libc::ENOSPC), "{kind:?}");
        engine.submit(inbox.request(2, Op::Read, 0, BLOCK, answer.buf));
        inbox.next().outcome.unwrap();
    }
}

/// A block device whose medium fails in part: EIO there, bytes elsewhere. The loop device's file is cut short under it.
#[test]
fn a_failing_medium_is_reported() {
    if !drives::possible() {
        return;
    }
    for kind in BOTH {
        let drive = LoopDrive::new(DRIVE, 512);
        let options = OpenOptions { direct: DirectIo::On, ..OpenOptions::default() };
        let device = device::open(drive.node(), &options).unwrap();
        let Some(engine) = start(Arc::new(device), kind, 4) else {
            continue;
        };
        drive.file().set_len(DRIVE / 2).unwrap();
        let slots = SlotPool::new(1, BLOCK).unwrap();
        let inbox = Inbox::new();
        let mut buf = slots.try_take().unwrap();
        for (offset, expected) in [(DRIVE - MIB, Some(libc::EIO)), (0, None)] {
            engine.submit(inbox.request(1, Op::Read, offset, BLOCK, buf));
            let answer = inbox.next();
            let errno = answer.outcome.err().and_then(|e| e.raw_os_error());
            assert_eq!(errno, expected, "{kind:?}");
            buf = answer.buf;
        }
    }
}

/// Faults hit the calls and places they are meant for, for as long as they are meant to.
#[test]
fn faults_hit_what_they_are_meant_for() {
    let device = FaultyDevice::new(MemoryDevice::new(DRIVE));
    let engine = start(device.clone(), EngineKind::Pool, 4).unwrap();
    let slots = SlotPool::new(1, SLOT).unwrap();
    let inbox = Inbox::new();
    let go = |op, offset, fill: u8| {
        let mut buf = slots.try_take().unwrap();
        buf.fill(fill);
        engine.submit(inbox.request(0, op, offset, SLOT, buf));
        let answer = inbox.next();
        (answer.outcome, answer.buf)
    };
    go(Op::Write, 0, 1).0.unwrap();

    device.inject(Fault {
        calls: Calls::READS,
        offsets: 10 * MIB..11 * MIB,
        after: 1,
        times: 2,
        effect: Effect::Errno(libc::EIO),
    });
    let outcomes: Vec<bool> = (0..4).map(|_| go(Op::Read, 10 * MIB, 0).0.is_ok()).collect();
    assert_eq!(outcomes, [true, false, false, true]);
    device.inject(Fault::every(Calls::WRITES, Effect::Errno(libc::ENOSPC)));
    let (outcome, _) = go(Op::Write, 0, 2);
    assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    let (outcome, buf) = go(Op::Read, 0, 0);
    outcome.unwrap();
    assert!(buf.iter().all(|&b| b == 1), "nothing was written");
    drop(buf);

    device.heal();
    device.inject(Fault::every(Calls::WRITES, Effect::Short));
    assert_eq!(go(Op::Write, 0, 3).0.unwrap_err().kind(), io::ErrorKind::WriteZero);
    device.heal();
    let (_, buf) = go(Op::Read, 0, 0);
    assert!(buf[..SLOT / 2].iter().all(|&b| b == 3) && buf[SLOT / 2..].iter().all(|&b| b == 1));
    drop(buf);

    device.inject(Fault::every(Calls::WRITES, Effect::Lie));
    go(Op::Write, 0, 4).0.unwrap();
    device.heal();
    device.inject(Fault::every(Calls::READS, Effect::Lie));
    let (outcome, lie) = go(Op::Read, 0, 0);
    outcome.unwrap();
    let wrong = lie.iter().enumerate().filter(|&(i, &b)| b != if i < SLOT / 2 { 3 } else { 1 });
    assert_eq!(wrong.count(), 1);
}

/// A device that panics (a fault of the device's code) is an error of that request.
#[test]
fn a_panic_in_a_device_is_an_error() {
    struct Broken;
    impl Device for Broken {
        fn name(&self) -> &str {
            "broken"
        }
        fn size(&self) -> u64 {
            DRIVE
        }
        fn read_at(&self, _buf: &mut [u8], _offset: u64) -> io::Result<()> {
            panic!("a device of this test")
        }
        fn write_at(&self, _buf: &[u8], _offset: u64) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }
    let engine = start(Arc::new(Broken), EngineKind::Pool, 2).unwrap();
    let slots = SlotPool::new(1, BLOCK).unwrap();
    let inbox = Inbox::new();
    for _ in 0..10 {
        engine.submit(inbox.request(0, Op::Read, 0, BLOCK, slots.try_take().unwrap()));
        let error = inbox.next().outcome.unwrap_err();
        assert!(error.to_string().contains("a device of this test"), "{error}");
    }
    engine.submit(inbox.request(0, Op::Write, 0, BLOCK, slots.try_take().unwrap()));
    inbox.next().outcome.unwrap();
}

/// The throttled device takes the time it is told to take.
#[test]
fn a_throttled_drive_is_slow() {
    let device = ThrottledDevice::new(MemoryDevice::new(DRIVE), 10 * MIB);
    let engine = start(device, EngineKind::Pool, 8).unwrap();
    let slots = SlotPool::new(4, SLOT).unwrap();
    let inbox = Inbox::new();
    let began = Instant::now();
    for id in 0..4 {
        engine.submit(inbox.request(id, Op::Read, 0, SLOT, slots.try_take().unwrap()));
    }
    (0..4).for_each(|_| inbox.next().outcome.unwrap());
    assert!(began.elapsed() >= Duration::from_millis(400));
}
