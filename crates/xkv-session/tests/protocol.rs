//! `docs/protocol.md` against the code: the frames and entries that it shows, and its tables of codes.

use xkv_session::control::{self, Frames};
use xkv_session::entry::{NO_SLOT, Operation, Reply, Request, Status};
use xkv_session::memory::Geometry;
use xkv_store::FragmentSums;

const PAGE: &str = include_str!("../../../docs/protocol.md");

#[test]
fn every_frame_shown_is_read_and_written_as_it_stands() {
    let mut kinds = Vec::new();
    for body in PAGE.lines().map(str::trim).filter(|line| line.starts_with("{\"type\"")) {
        let frame = [&(body.len() as u32).to_le_bytes(), body.as_bytes()].concat();
        let message = Frames::default().next(&mut &frame[..]).unwrap().expect("whole");
        let mut written = Vec::new();
        control::send(&mut written, &message).unwrap();
        assert_eq!(String::from_utf8_lossy(&written[4..]), body);
        kinds.push(body.split('"').nth(3).unwrap());
    }
    assert_eq!(kinds, ["hello", "welcome", "refused", "heartbeat", "status", "list", "clear", "bye"]);
}

#[test]
fn the_entries_shown_are_those_of_the_code() {
    let is_hex = |line: &&str| line.split_whitespace().count() == 32;
    let bytes: Vec<u8> = PAGE
        .lines()
        .filter(is_hex)
        .flat_map(|line| line.split_whitespace().filter_map(|byte| u8::from_str_radix(byte, 16).ok()))
        .collect();
    let sums = FragmentSums { full: 0x0403_0201, sample: 0x0807_0605 };
    let request = Request {
        number: 0x1122_3344_5566_7788,
        operation: Operation::Write,
        slot: 7,
        handle: 9,
        argument: 3,
        sums,
        more: [0; 3],
    };
    let read = Request {
        number: 2,
        operation: Operation::Read,
        slot: 7,
        handle: 9,
        argument: 3 | 2 << 32,
        sums: FragmentSums::default(),
        more: [5 + 1, 0, 0],
    };
    let done = Reply {
        number: 2,
        operation: Operation::Read,
        status: Status::Done,
        slot: 7,
        handle: 0,
        value: 0x2000,
        sums: [
            sums,
            FragmentSums { full: 0x0c0b_0a09, sample: 0x100f_0e0d },
            Default::default(),
            Default::default(),
        ],
    };
    let reply = Reply {
        number: 1,
        operation: Operation::Read,
        status: Status::Io,
        slot: NO_SLOT,
        handle: 0,
        value: 5,
        sums: Default::default(),
    };
    let expected = [request, read].map(|r| r.encode()).into_iter().chain([done, reply].map(|r| r.encode()));
    let expected: Vec<u64> = expected.flatten().collect();
    assert_eq!(bytes, expected.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>());
}

/// Codes of a table whose rows begin with a code and a name.
fn codes(heading: &str) -> Vec<(u8, String)> {
    let table = PAGE.split_once(heading).expect("the table is there").1;
    table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| {
            let mut cells = line.split('|').map(str::trim).skip(1);
            Some((cells.next()?.parse().ok()?, cells.next()?.replace([' ', '-'], "")))
        })
        .collect()
}

#[test]
fn the_tables_name_every_operation_and_status() {
    let named = |name: String| name.to_lowercase();
    let operations = Operation::ALL.iter().filter(|&&operation| operation != Operation::Space);
    let expected: Vec<_> = operations.map(|&o| (o as u8, named(format!("{o:?}")))).collect();
    assert_eq!(codes("| code | operation |"), expected);
    let expected: Vec<_> = Status::ALL.iter().map(|&s| (s as u8, named(format!("{s:?}")))).collect();
    assert_eq!(codes("| code | status |"), expected);
    assert!(PAGE.contains("operation 64 (space)") && Operation::Space as u8 == 64);
}

#[test]
fn the_sizes_shown_are_those_of_the_code() {
    let geometry = Geometry::new(16, 4096);
    assert_eq!((geometry.entries, geometry.bytes()), (256, 106_496));
    assert!(PAGE.contains("E = 256, slots from 40,960, 106,496 bytes in all"));
    assert_eq!(geometry.bytes() - 16 * 4096, 40_960);
}
