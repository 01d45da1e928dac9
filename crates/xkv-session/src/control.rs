//! The control connection: frames of a length (u32, little-endian) and a JSON body. Unknown fields are ignored;
//! 64-bit numbers travel as hexadecimal strings, since many JSON readers keep 53 bits.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

/// Version of the protocol that this code speaks.
pub const VERSION: u32 = 1;
/// Largest body, bytes.
pub const MAX_FRAME: usize = 64 * 1024;

/// Every message of the control connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Message {
    /// Client, first.
    Hello(Hello),
    /// Gateway's answer: the session is open once the shared memory was fetched.
    Welcome(Welcome),
    /// Gateway's answer: there will be no session. The connection ends.
    Refused(Refusal),
    /// Both, at least once per `heartbeat_ms`.
    Heartbeat(Heartbeat),
    /// Client, instead of hello or during a session: asks for the gateway's state.
    Status(StatusRequest),
    /// Client, instead of hello: asks what is in the store, by namespace and model.
    List(StatusRequest),
    /// Client, instead of hello: removes objects.
    Clear(ClearRequest),
    /// Gateway's answer to these.
    State(serde_json::Value),
    /// Either: the session ends.
    Bye(Bye),
}

/// A client introduces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the protocol.
    pub version: u32,
    /// For people: who this is.
    #[serde(default)]
    pub client: String,
    /// Shared secret, when the gateway wants one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Slots wanted.
    #[serde(default)]
    pub slots: u32,
    /// Fragment size the client insists on, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fragment_bytes: Option<u32>,
    /// Takes the drives' descriptors as well, to read leased slots without the gateway.
    #[serde(default, skip_serializing_if = "is_false")]
    pub straight: bool,
}

/// A gateway accepts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version of the protocol.
    pub version: u32,
    /// The store, hexadecimal UUID.
    pub store: String,
    /// Number of this run of the gateway: differs after a restart.
    #[serde(with = "hex64")]
    pub generation: u64,
    /// Bytes of a fragment and of a slot.
    pub fragment_bytes: u32,
    /// Slots granted, at most what was wanted.
    pub slots: u32,
    /// Drives of the store.
    pub drives: u32,
    /// Name of the Unix socket in the shared folder that hands out the session's memory.
    pub socket: String,
    /// To be sent over that socket first (u64, little-endian).
    #[serde(with = "hex64")]
    pub ticket: u64,
    /// Longest pause between two heartbeats, either way.
    pub heartbeat_ms: u32,
    /// One line about the store, for the client's log.
    pub description: String,
    /// The drives' descriptors are handed out as well, and the slots of `Open` say where fragments are.
    #[serde(default, skip_serializing_if = "is_false")]
    pub straight: bool,
}

/// Why there is no session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// For programs.
    pub code: RefusalCode,
    /// For people, with the cure.
    pub reason: String,
}

/// Reasons to refuse, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalCode {
    /// The versions differ.
    Version,
    /// The token is missing or wrong.
    Token,
    /// The store has another fragment size.
    FragmentBytes,
    /// Too many sessions or no memory for the ring.
    Limit,
    /// The gateway is closing.
    Closing,
    /// The message made no sense.
    Malformed,
    /// Any other, from a newer gateway.
    #[serde(other)]
    Other,
}

/// A sign of life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Gateway: I/O operations completed so far. Client: 0.
    #[serde(default, with = "hex64")]
    pub io: u64,
    /// Gateway: a flush is in progress.
    #[serde(default)]
    pub flushing: bool,
}

/// Removes the objects of a namespace, of a model, or all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearRequest {
    /// Version of the protocol.
    pub version: u32,
    /// Shared secret, when the gateway wants one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Only objects of this namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Only objects of this model: those whose key begins with it, up to the first `@`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// Asks for the gateway's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusRequest {
    /// Version of the protocol.
    pub version: u32,
    /// Shared secret, when the gateway wants one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

/// The end, with a reason for the other side's log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bye {
    /// For people.
    #[serde(default)]
    pub reason: String,
}

// As serde hands it over.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(value: &bool) -> bool {
    !value
}

mod hex64 {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:#x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.strip_prefix("0x").ok_or_else(|| serde::de::Error::custom("not a 0x... number"))?;
        u64::from_str_radix(digits, 16).map_err(serde::de::Error::custom)
    }
}

/// Writes one frame.
///
/// # Errors
/// The connection's, or a body larger than [`MAX_FRAME`].
pub fn send(to: &mut impl Write, message: &Message) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    if body.len() > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a frame of {} bytes", body.len())));
    }
    let mut frame = (body.len() as u32).to_le_bytes().to_vec();
    frame.extend(body);
    to.write_all(&frame)
}

/// Whether the other side has closed the connection, or is no more, as far as can be known.
pub fn has_left(stream: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&stream, PollFlags::RDHUP)];
    !matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
}

/// Takes frames out of a stream of bytes that arrives in any pieces, also over time-outs.
#[derive(Default)]
pub struct Frames {
    bytes: Vec<u8>,
}

impl Frames {
    /// The next message; none when it is not whole yet, after one read at most: whoever sends a frame byte by byte
    /// keeps nobody from looking at the clock.
    ///
    /// # Errors
    /// The connection's; `UnexpectedEof` when it ended; `InvalidData` for a body that is too large or makes no sense.
    pub fn next(&mut self, from: &mut impl Read) -> io::Result<Option<Message>> {
        if let Some(message) = self.take()? {
            return Ok(Some(message));
        }
        let mut piece = [0; 4096];
        match from.read(&mut piece) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => {
                self.bytes.extend_from_slice(&piece[..len]);
                self.take()
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            },
        }
    }

    fn take(&mut self) -> io::Result<Option<Message>> {
        let Some(head) = self.bytes.first_chunk() else { return Ok(None) };
        let len = u32::from_le_bytes(*head) as usize;
        if len > MAX_FRAME {
            return Err(malformed(format!("a frame of {len} bytes; at most {MAX_FRAME} are allowed")));
        }
        let Some(body) = self.bytes.get(4..4 + len) else { return Ok(None) };
        let message = serde_json::from_slice(body).map_err(|error| malformed(error.to_string()))?;
        self.bytes.drain(..4 + len);
        Ok(Some(message))
    }
}

fn malformed(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(message: &Message) -> String {
        let mut bytes = Vec::new();
        send(&mut bytes, message).unwrap();
        assert_eq!(bytes.len() - 4, u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize);
        String::from_utf8(bytes[4..].to_vec()).unwrap()
    }

    #[test]
    fn golden_frames() {
        let hello = Message::Hello(Hello {
            version: 1,
            client: "lmcache-0".into(),
            token: None,
            slots: 1024,
            fragment_bytes: Some(131_072),
            straight: false,
        });
        assert_eq!(
            encoded(&hello),
            r#"{"type":"hello","version":1,"client":"lmcache-0","slots":1024,"fragment_bytes":131072}"#
        );
        let welcome = Message::Welcome(Welcome {
            version: 1,
            store: "00ff".into(),
            generation: u64::MAX,
            fragment_bytes: 131_072,
            slots: 512,
            drives: 2,
            socket: "xkv-1.sock".into(),
            ticket: 16,
            heartbeat_ms: 500,
            description: "d".into(),
            straight: true,
        });
        assert_eq!(
            encoded(&welcome),
            r#"{"type":"welcome","version":1,"store":"00ff","generation":"0xffffffffffffffff","fragment_bytes":131072,"slots":512,"drives":2,"socket":"xkv-1.sock","ticket":"0x10","heartbeat_ms":500,"description":"d","straight":true}"#
        );
        let heartbeat = Message::Heartbeat(Heartbeat { io: 255, flushing: false });
        assert_eq!(encoded(&heartbeat), r#"{"type":"heartbeat","io":"0xff","flushing":false}"#);
        let refusal = Message::Refused(Refusal { code: RefusalCode::FragmentBytes, reason: "no".into() });
        assert_eq!(encoded(&refusal), r#"{"type":"refused","code":"fragment_bytes","reason":"no"}"#);
    }

    #[test]
    fn a_state_passes_its_numbers_on_as_they_came() {
        let state = r#"{"type":"state","x":8.888888888888889e+55}"#;
        let frame = [&(state.len() as u32).to_le_bytes(), state.as_bytes()].concat();
        let read = Frames::default().next(&mut &frame[..]).unwrap().unwrap();
        assert_eq!(encoded(&read), state);
        // The nearest number to this text is one that a quick parser misses.
        let long =
            r#"{"type":"state","x":88888888888888888888888888888888888888888888888888888888.88888888}"#;
        let frame = [&(long.len() as u32).to_le_bytes(), long.as_bytes()].concat();
        assert_eq!(Frames::default().next(&mut &frame[..]).unwrap().unwrap(), read);
    }

    #[test]
    fn frames_arrive_in_any_pieces_and_unknown_fields_are_ignored() {
        struct Pieces(Vec<u8>, usize);
        impl Read for Pieces {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                self.1 += 1;
                if self.1.is_multiple_of(2) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                let len = self.0.len().min(3).min(buf.len());
                buf[..len].copy_from_slice(&self.0[..len]);
                self.0.drain(..len);
                Ok(len)
            }
        }
        let mut bytes = Vec::new();
        for body in [r#"{"type":"heartbeat","io":"0x7","new_field":[1]}"#, r#"{"type":"bye"}"#] {
            bytes.extend((body.len() as u32).to_le_bytes());
            bytes.extend(body.as_bytes());
        }
        let (mut frames, mut from, mut found) = (Frames::default(), Pieces(bytes, 0), Vec::new());
        let end = loop {
            match frames.next(&mut from) {
                Ok(message) => found.extend(message),
                Err(error) => break error.kind(),
            }
        };
        assert_eq!(end, io::ErrorKind::UnexpectedEof);
        assert_eq!(
            found,
            [Message::Heartbeat(Heartbeat { io: 7, flushing: false }), Message::Bye(Bye::default())]
        );
    }

    #[test]
    fn hostile_frames_are_refused_before_memory_is_taken() {
        for bytes in [
            &u32::MAX.to_le_bytes()[..],
            b"\x05\0\0\0hello",
            b"\x02\0\0\0{}",
            b"\x0e\0\0\0{\"type\":\"bye\"\xff",
        ] {
            let error = Frames::default().next(&mut &bytes[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
    }
}
