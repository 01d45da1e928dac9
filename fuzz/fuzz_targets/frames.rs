//! The control connection: any bytes, in any pieces. What is read survives being written and read again.
#![no_main]

use std::io::{self, Read};

use xkv_session::control::{self, Frames, MAX_FRAME, Message};

struct Pieces<'a> {
    bytes: &'a [u8],
    piece: usize,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.bytes.len().min(self.piece).min(buf.len());
        buf[..len].copy_from_slice(&self.bytes[..len]);
        self.bytes = &self.bytes[len..];
        Ok(len)
    }
}

fn messages(bytes: &[u8], piece: usize) -> (Vec<Message>, io::ErrorKind) {
    let (mut frames, mut from, mut found) = (Frames::default(), Pieces { bytes, piece }, Vec::new());
    loop {
        match frames.next(&mut from) {
            Ok(message) => found.extend(message),
            Err(error) => return (found, error.kind()),
        }
    }
}

// The input is the first byte, for the pieces, and one frame's body for each line of the rest; or the stream itself.
libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((&piece, rest)) = input.split_first() else { return };
    let framed: Vec<u8> = rest
        .split(|&byte| byte == b'\n')
        .flat_map(|body| [&(body.len() as u32).to_le_bytes(), body].concat())
        .collect();
    for bytes in [rest, &framed] {
        let (found, end) = messages(bytes, usize::from(piece) + 1);
        assert_eq!((found.clone(), end), messages(bytes, usize::MAX), "pieces change nothing");
        let mut written = Vec::new();
        for message in &found {
            // Escapes can make a body longer than it came.
            if let Err(error) = control::send(&mut written, message) {
                assert!(serde_len(message) > MAX_FRAME, "{error}");
                return;
            }
        }
        assert_eq!(messages(&written, usize::MAX), (found, io::ErrorKind::UnexpectedEof));
    }
});

fn serde_len(message: &Message) -> usize {
    format!("{message:?}").len() * 6
}
