//! A client that knows the protocol from `docs/protocol.md` alone and may break every rule of it: JSON by hand, the
//! ring through reads and writes of the descriptor.
#![allow(dead_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use xkv_session::memory::{Geometry, RingMemory};
use xkv_session::pass;
use xkv_session::queue::QueueMemory;

use super::{PATIENCE, Rig};

pub const SUBMISSION: u64 = 4096;
pub const COMPLETION: u64 = 4096 + 3 * 128;
const HEAD: u64 = 128;
const ENTRIES: u64 = 8192;
pub const NO_SLOT: u32 = u32::MAX;

/// What a reply's 64 bytes say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    pub number: u64,
    pub operation: u8,
    pub status: u8,
    pub slot: u32,
    pub handle: u64,
    pub value: u64,
}

pub struct Raw {
    pub control: TcpStream,
    pub welcome: Value,
    pub file: File,
    pub entries: u32,
    pub slots: u32,
    pub slot_bytes: u64,
    memory: Arc<RingMemory>,
    tail: u32,
    head: u32,
    next: u64,
}

pub fn frame(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

pub fn read_frame(stream: &mut TcpStream) -> io::Result<Value> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let mut body = vec![0; u32::from_le_bytes(len) as usize];
    stream.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

/// Says hello; the gateway's answer.
pub fn hello(rig: &Rig) -> io::Result<(TcpStream, Value)> {
    let mut control = TcpStream::connect(rig.gateway.addresses()[0])?;
    control.set_read_timeout(Some(PATIENCE))?;
    let hello = json!({"type": "hello", "version": 1, "client": "raw", "slots": 16, "from": "the future"});
    control.write_all(&frame(hello.to_string().as_bytes()))?;
    let answer = read_frame(&mut control)?;
    Ok((control, answer))
}

fn hex(value: &Value) -> u64 {
    u64::from_str_radix(value.as_str().unwrap().strip_prefix("0x").unwrap(), 16).unwrap()
}

impl Raw {
    pub fn open(rig: &Rig) -> io::Result<Raw> {
        let (control, welcome) = hello(rig)?;
        if welcome["type"] != "welcome" {
            return Err(io::Error::other(welcome.to_string()));
        }
        let number = |name: &str| welcome[name].as_u64().unwrap() as u32;
        let (slots, slot_bytes) = (number("slots"), number("fragment_bytes"));
        let socket = welcome["socket"].as_str().unwrap();
        let fd = pass::fetch(rig.folder.path(), socket, hex(&welcome["ticket"]), PATIENCE)?.memory;
        let memory = RingMemory::attach(&fd, Geometry::new(slots, slot_bytes), hex(&welcome["generation"]))?;
        let entries = (2 * slots).max(256).next_power_of_two();
        let file = File::from(fd);
        Ok(Raw {
            control,
            file,
            entries,
            slots,
            slot_bytes: slot_bytes.into(),
            memory,
            welcome,
            tail: 0,
            head: 0,
            next: 1,
        })
    }

    pub fn put(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).unwrap();
    }

    pub fn get<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    pub fn slot_offset(&self, slot: u32) -> u64 {
        let slots = (ENTRIES + 2 * 64 * u64::from(self.entries)).next_multiple_of(4096);
        slots + u64::from(slot) * self.slot_bytes
    }

    pub fn bytes(&self) -> u64 {
        self.slot_offset(self.slots)
    }

    pub fn put_slot(&self, slot: u32, bytes: &[u8]) {
        self.put(self.slot_offset(slot), bytes);
    }

    /// A key in a slot, as `Open`, `Begin` and `Remove` want it.
    pub fn put_key(&self, slot: u32, key: &str) {
        let head = [2u32.to_le_bytes(), (key.len() as u32).to_le_bytes()].concat();
        self.put_slot(slot, &[&head, &b"ns"[..], key.as_bytes()].concat());
    }

    /// Writes an entry at the submission queue's end without showing it.
    pub fn push(&mut self, entry: &[u8; 64]) {
        self.put(ENTRIES + u64::from(self.tail & (self.entries - 1)) * 64, entry);
        self.tail = self.tail.wrapping_add(1);
    }

    pub fn publish(&self) {
        self.set_tail(self.tail);
    }

    pub fn set_tail(&self, tail: u32) {
        self.put(SUBMISSION, &tail.to_le_bytes());
        self.memory.submissions().wake();
    }

    pub fn set_completion_head(&self, head: u32) {
        self.put(COMPLETION + HEAD, &head.to_le_bytes());
    }

    /// Entries the gateway has not taken yet.
    pub fn waiting(&self) -> u32 {
        self.tail.wrapping_sub(u32::from_le_bytes(self.get(SUBMISSION + HEAD)))
    }

    pub fn entry(&mut self, operation: u8, slot: u32, handle: u64, argument: u64) -> [u8; 64] {
        let mut entry = [0; 64];
        entry[..8].copy_from_slice(&self.next.to_le_bytes());
        entry[8] = operation;
        entry[12..16].copy_from_slice(&slot.to_le_bytes());
        entry[16..24].copy_from_slice(&handle.to_le_bytes());
        entry[24..32].copy_from_slice(&argument.to_le_bytes());
        self.next += 1;
        entry
    }

    pub fn send(&mut self, operation: u8, slot: u32, handle: u64, argument: u64) -> u64 {
        let entry = self.entry(operation, slot, handle, argument);
        self.push(&entry);
        self.publish();
        self.next - 1
    }

    /// Sends a request that names slots beside the first; returns its number.
    pub fn send_slots(&mut self, operation: u8, slots: &[u32], handle: u64, argument: u64) -> u64 {
        let mut entry = self.entry(operation, slots[0], handle, argument);
        for (place, slot) in entry[40..].chunks_mut(4).zip(&slots[1..]) {
            place.copy_from_slice(&(slot + 1).to_le_bytes());
        }
        self.push(&entry);
        self.publish();
        self.next - 1
    }

    /// As [`Raw::call`], with several slots.
    pub fn call_slots(&mut self, operation: u8, slots: &[u32], handle: u64, argument: u64) -> Option<Reply> {
        _ = self.heartbeat();
        let number = self.send_slots(operation, slots, handle, argument);
        let reply = self.reply()?;
        assert_eq!((reply.number, reply.operation, reply.slot), (number, operation, slots[0]));
        Some(reply)
    }

    /// The next reply; events are passed over. None: the session has ended, or nothing came for long.
    pub fn reply(&mut self) -> Option<Reply> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let tail = u32::from_le_bytes(self.get(COMPLETION));
            if tail == self.head {
                if Instant::now() > deadline || self.has_ended() {
                    return None;
                }
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            let places = ENTRIES + 64 * u64::from(self.entries);
            let entry: [u8; 64] = self.get(places + u64::from(self.head & (self.entries - 1)) * 64);
            self.head = self.head.wrapping_add(1);
            self.set_completion_head(self.head);
            let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap());
            if word(0) != 0 {
                let (operation, status, slot) = (entry[8], entry[9], (word(8) >> 32) as u32);
                return Some(Reply {
                    number: word(0),
                    operation,
                    status,
                    slot,
                    handle: word(16),
                    value: word(24),
                });
            }
        }
    }

    /// Sends a request and awaits its reply; the heartbeat that goes with it keeps the session.
    pub fn call(&mut self, operation: u8, slot: u32, handle: u64, argument: u64) -> Option<Reply> {
        _ = self.heartbeat();
        let number = self.send(operation, slot, handle, argument);
        let reply = self.reply()?;
        assert_eq!((reply.number, reply.operation, reply.slot), (number, operation, slot));
        Some(reply)
    }

    pub fn heartbeat(&mut self) -> io::Result<()> {
        self.control.write_all(&frame(br#"{"type":"heartbeat"}"#))
    }

    /// Whether the gateway has closed the connection. Throws away what it says.
    pub fn has_ended(&mut self) -> bool {
        self.control.set_nonblocking(true).unwrap();
        let mut bytes = [0; 4096];
        let ended = loop {
            match self.control.read(&mut bytes) {
                Ok(0) => break true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break false,
                Err(_) => break true,
            }
        };
        self.control.set_nonblocking(false).unwrap();
        ended
    }

    pub fn await_end(&mut self, what: &str) {
        super::await_until(what, || self.has_ended());
    }
}
