//! Questions about keys: what can be asked of any session, and so may wait for the next one.

use std::sync::Arc;
use std::time::Instant;

use xkv_session::entry::{Operation, Reply};
use xkv_store::{Digest, ObjectKey, SlotBuf};

use super::link::Link;

/// Bytes of a digest in a slot.
pub const DIGEST_BYTES: usize = 32;
/// Bytes before the namespace and key in a slot.
const KEY_HEAD: usize = 8;

/// What is asked.
pub enum Subject {
    /// Where the objects of these digests lie.
    Lookup(Vec<Digest>),
    /// To open an object.
    Open(ObjectKey),
    /// To begin an object of so many bytes.
    Begin(ObjectKey, u64),
    /// To remove an object.
    Remove(ObjectKey),
}

/// An answer: the gateway's reply, and the slot with what it wrote there.
pub struct Heard {
    pub link: Arc<Link>,
    pub reply: Reply,
    pub slot: SlotBuf,
}

/// Why there is no answer.
pub enum Unanswered {
    /// The key is longer than a slot.
    TooLong,
    /// There is no session, or it ended meanwhile.
    Lost,
}

type Outcome = Result<Heard, Unanswered>;

/// A question and who waits for its answer.
pub struct Question {
    subject: Subject,
    pub asked: Instant,
    /// Whether it is asked a second time.
    pub again: bool,
    done: Box<dyn FnOnce(Outcome) + Send>,
}

impl Question {
    /// `done` is called exactly once, on any thread; it must not block.
    pub fn new(subject: Subject, done: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Self { subject, asked: Instant::now(), again: false, done: Box::new(done) }
    }

    pub fn operation(&self) -> Operation {
        match self.subject {
            Subject::Lookup(_) => Operation::Lookup,
            Subject::Open(_) => Operation::Open,
            Subject::Begin(..) => Operation::Begin,
            Subject::Remove(_) => Operation::Remove,
        }
    }

    pub fn argument(&self) -> u64 {
        match &self.subject {
            Subject::Lookup(digests) => digests.len() as u64,
            Subject::Begin(_, size) => *size,
            Subject::Open(_) | Subject::Remove(_) => 0,
        }
    }

    /// Whether a slot of `slot_bytes` can hold it.
    pub fn fits(&self, slot_bytes: usize) -> bool {
        match &self.subject {
            Subject::Lookup(digests) => digests.len() * DIGEST_BYTES <= slot_bytes,
            Subject::Open(key) | Subject::Begin(key, _) | Subject::Remove(key) => {
                KEY_HEAD + key.namespace().len() + key.key().len() <= slot_bytes
            }
        }
    }

    /// Writes it into a slot, which it must fit.
    pub fn fill(&self, slot: &mut [u8]) {
        match &self.subject {
            Subject::Lookup(digests) => {
                for (place, digest) in slot.chunks_exact_mut(DIGEST_BYTES).zip(digests) {
                    place.copy_from_slice(&digest.0);
                }
            }
            Subject::Open(key) | Subject::Begin(key, _) | Subject::Remove(key) => {
                let (namespace, key) = (key.namespace(), key.key());
                let (head, rest) = slot.split_at_mut(KEY_HEAD);
                head[..4].copy_from_slice(&(namespace.len() as u32).to_le_bytes());
                head[4..].copy_from_slice(&(key.len() as u32).to_le_bytes());
                rest[..namespace.len()].copy_from_slice(namespace);
                rest[namespace.len()..][..key.len()].copy_from_slice(key);
            }
        }
    }

    /// Answers it.
    pub fn answer(self, outcome: Outcome) {
        (self.done)(outcome);
    }
}
