//! Entries of any bytes, and a queue whose other side writes any index at any time: never a place out of bounds, and
//! an honest pair of ends loses nothing.
#![no_main]

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use xkv_session::entry::{Reply, Request};
use xkv_session::queue::{Consumer, Entry, Producer, QueueMemory};

const CAPACITY: u32 = 4;

struct Words {
    indices: [AtomicU32; 3],
    entries: [[AtomicU64; 8]; CAPACITY as usize],
}

#[derive(Clone)]
struct Heap(Rc<Words>);

impl QueueMemory for Heap {
    fn tail(&self) -> &AtomicU32 {
        &self.0.indices[0]
    }

    fn head(&self) -> &AtomicU32 {
        &self.0.indices[1]
    }

    fn waiting(&self) -> &AtomicU32 {
        &self.0.indices[2]
    }

    fn capacity(&self) -> u32 {
        CAPACITY
    }

    fn word(&self, place: u32, word: usize) -> &AtomicU64 {
        &self.0.entries[place as usize][word]
    }

    fn sleep(&self, _seen: u32, _patience: Duration) {}

    fn wake(&self) {}
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut entries = bytes.chunks_exact(64).map(|chunk| -> Entry {
        std::array::from_fn(|i| u64::from_le_bytes(chunk[8 * i..8 * i + 8].try_into().expect("eight bytes")))
    });
    for entry in entries.clone() {
        if let Some(request) = Request::decode(&entry) {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        if let Some(reply) = Reply::decode(&entry) {
            assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }
    }
    let Some((start, steps)) = bytes.split_first_chunk::<4>() else { return };
    let start = u32::from_le_bytes(*start);
    let words = Words {
        indices: [AtomicU32::new(start), AtomicU32::new(start), AtomicU32::new(0)],
        entries: Default::default(),
    };
    let heap = Heap(Rc::new(words));
    let (mut producer, mut consumer) = (Producer::at(heap.clone(), start), Consumer::at(heap.clone(), start));
    let (mut pushed, mut shown, mut honest) = (VecDeque::new(), 0, true);
    for (i, &step) in steps.iter().enumerate() {
        match step % 8 {
            0..=2 => {
                let entry = entries.next().unwrap_or([i as u64; 8]);
                match producer.push(&entry) {
                    Ok(true) => pushed.push_back(entry),
                    Ok(false) => assert!(!honest || pushed.len() == CAPACITY as usize),
                    Err(_) => assert!(!honest),
                }
            }
            3 => {
                producer.publish();
                shown = pushed.len();
            }
            4 | 5 => match consumer.pop() {
                Ok(Some(entry)) if honest => {
                    assert_eq!(Some(entry), pushed.pop_front());
                    shown -= 1;
                }
                Ok(None) => assert!(!honest || shown == 0),
                Ok(Some(_)) => {}
                Err(_) => assert!(!honest),
            },
            6 => assert!(consumer.wait(Duration::ZERO).is_ok() || !honest),
            _ => {
                honest = false;
                let value = start.wrapping_add((i as u32).wrapping_mul(u32::from(step)));
                heap.0.indices[usize::from(step >> 3) % 3].store(value, Ordering::SeqCst);
            }
        }
    }
});
