//! What travels in the ring: requests of the client, replies of the gateway. 64 bytes each, little-endian.
//!
//! | bytes | request | reply |
//! |---|---|---|
//! | 0..8 | number, chosen by the client, not 0 | the request's number; 0 is an event |
//! | 8 | operation | the request's operation, or the event |
//! | 9 | 0 | status |
//! | 10..12 | 0 | 0 |
//! | 12..16 | slot, or 0xFFFFFFFF | the request's slot |
//! | 16..24 | handle | handle |
//! | 24..32 | argument | value |
//! | 32..36 | full checksum | full checksum |
//! | 36..40 | sample checksum | sample checksum |
//! | 40..52 | further slots, u32 each: 0 none, else slot + 1 | 40..64: checksums of further fragments, as 32..40 |
//! | 52..64 | 0 | |

use xkv_store::FragmentSums;

use crate::queue::Entry;

/// No slot belongs to the entry.
pub const NO_SLOT: u32 = u32::MAX;

/// Fragments that one `Read` may ask for.
pub const MAX_RUN: usize = 4;

/// Drives that the ring can tell apart.
pub const MOST_DRIVES: usize = 1 + DRIVE_BITS as usize;

/// In the byte of a fragment in the slot of `Open` and `Begin`: the number of its drive.
pub const DRIVE_BITS: u8 = 0x7f;
/// As above: it lies right behind the fragment before it on its drive.
pub const FOLLOWS: u8 = 0x80;

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $code:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $code,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// From its code on the wire.
            pub fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    /// What a request asks for.
    Operation {
        /// Slot: `argument` digests of 32 bytes, at most a slot full. Reply: the slot holds a u64 each: 0 absent, else the set of
        /// drives (bit i of drive i; drives from 63 on share bit 63).
        Lookup = 1,
        /// Slot: namespace length (u32), key length (u32), namespace, key. Reply: handle of a lease, `value` = object
        /// size; the slot holds a byte per fragment, as far as a slot reaches: its drive mod 128, plus 128 when it lies
        /// right behind the fragment before it on that drive. In a session that reads straight, [`Place`]s follow.
        Open = 2,
        /// Handle of a lease, `argument` = fragment (u32), step (u32, above). Reply: the slot holds the fragment, the entry
        /// its checksums, `value` = bytes. With further slots: fragment + step goes to the first of them, and so on; each
        /// must lie right behind the one before it.
        Read = 3,
        /// Slot as in `Open`, `argument` = object size. Reply: handle of a transaction; slot as in `Open`.
        Begin = 4,
        /// Handle of a transaction, `argument` = fragment; the slot holds it, the entry its checksums.
        Write = 5,
        /// Handle of a transaction. Reply: the object is durable and visible.
        Commit = 6,
        /// Handle of a lease or transaction, which ends; of a lease, `argument` = bytes that were read straight.
        Close = 7,
        /// Slot as in `Open`. Reply: `value` = 1 when there was an object; the removal is durable.
        Remove = 8,
        /// Handle of a lease: the gateway reads the object itself and removes it when it is damaged. The lease ends.
        /// Reply: `value` = 1 when it was removed.
        Discard = 9,
        /// Event, number 0: asking `Begin` again may help.
        Space = 64,
    }
}

codes! {
    /// How a request went.
    Status {
        /// As asked for.
        Done = 0,
        /// No such object.
        Absent = 1,
        /// `Begin`: the object is there already.
        Present = 2,
        /// `Begin`: the key is being written; ask again after `Space`.
        Busy = 3,
        /// `Begin`: room is being made; ask again after `Space`.
        Wait = 4,
        /// `Begin`: the object cannot fit.
        NoSpace = 5,
        /// The store takes no changes.
        ReadOnly = 6,
        /// The drive refused; `value` = errno, or 0.
        Io = 7,
        /// `Commit`: the object was removed meanwhile.
        Removed = 8,
        /// The request makes no sense: unknown handle, fragment, slot, or operation.
        Invalid = 9,
        /// Too many leases and transactions at once.
        Limit = 10,
    }
}

/// Where a fragment is, and its checksums: what a client that has the drives reads by. In the slot of `Open`, behind the bytes
/// of the fragments and up to a multiple of 4: for each of them 12 bytes, slot on its drive (u32), full and sample checksum.
/// None where the slot does not hold those of all fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// On its drive.
    pub slot: u32,
    /// Of its bytes.
    pub sums: FragmentSums,
}

impl Place {
    const BYTES: usize = 12;

    /// Writes those of all fragments into `slot`, if they fit.
    pub fn put(slot: &mut [u8], places: impl ExactSizeIterator<Item = Place>) {
        let Some(room) = Self::room(places.len(), slot.len()) else { return };
        for (bytes, Place { slot, sums }) in slot[room].chunks_exact_mut(Self::BYTES).zip(places) {
            for (bytes, value) in bytes.chunks_exact_mut(4).zip([slot, sums.full, sums.sample]) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
    }

    /// Reads those of all `fragments`; none where they do not fit.
    pub fn take(slot: &[u8], fragments: usize) -> Option<Box<[Place]>> {
        let word = |bytes: &[u8], at| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let places = slot[Self::room(fragments, slot.len())?].chunks_exact(Self::BYTES).map(|bytes| Place {
            slot: word(bytes, 0),
            sums: FragmentSums { full: word(bytes, 4), sample: word(bytes, 8) },
        });
        Some(places.collect())
    }

    fn room(fragments: usize, slot_bytes: usize) -> Option<std::ops::Range<usize>> {
        let start = fragments.next_multiple_of(4);
        let end = start + fragments * Self::BYTES;
        (end <= slot_bytes).then_some(start..end)
    }
}

/// A request of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Chosen by the client, unique among its requests in flight, not 0.
    pub number: u64,
    /// What is asked for.
    pub operation: Operation,
    /// The slot that goes with it, or [`NO_SLOT`].
    pub slot: u32,
    /// Lease or transaction.
    pub handle: u64,
    /// See [`Operation`].
    pub argument: u64,
    /// Checksums of a written fragment.
    pub sums: FragmentSums,
    /// Further slots of a read, each plus 1; 0 where there is none.
    pub more: [u32; MAX_RUN - 1],
}

impl Request {
    /// All its slots, in their order; further ones are a read's alone, behind a first.
    pub fn slots(&self) -> impl Iterator<Item = u32> {
        let first = (self.slot != NO_SLOT).then_some(self.slot);
        let several = first.is_some() && self.operation == Operation::Read;
        let further = self.more.into_iter().take_while(move |&slot| several && slot != 0);
        first.into_iter().chain(further.map(|slot| slot - 1))
    }

    /// As an entry.
    pub fn encode(&self) -> Entry {
        let head = u64::from(self.operation as u8) | u64::from(self.slot) << 32;
        let [a, b, c] = self.more.map(u64::from);
        [self.number, head, self.handle, self.argument, encode_sums(self.sums), a | b << 32, c, 0]
    }

    /// From an entry. None: unknown operation or number 0.
    pub fn decode(entry: &Entry) -> Option<Self> {
        let operation = Operation::from_code(entry[1] as u8).filter(|&o| o != Operation::Space)?;
        (entry[0] != 0).then_some(Self {
            number: entry[0],
            operation,
            slot: (entry[1] >> 32) as u32,
            handle: entry[2],
            argument: entry[3],
            sums: decode_sums(entry[4]),
            more: [entry[5] as u32, (entry[5] >> 32) as u32, entry[6] as u32],
        })
    }
}

/// A reply of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request's number; 0 for an event.
    pub number: u64,
    /// The request's operation.
    pub operation: Operation,
    /// How it went.
    pub status: Status,
    /// The request's slot, the client's again.
    pub slot: u32,
    /// Lease or transaction.
    pub handle: u64,
    /// See [`Operation`].
    pub value: u64,
    /// Checksums of each fragment read; what is left is 0.
    pub sums: [FragmentSums; MAX_RUN],
}

impl Reply {
    /// As an entry.
    pub fn encode(&self) -> Entry {
        let head =
            u64::from(self.operation as u8) | u64::from(self.status as u8) << 8 | u64::from(self.slot) << 32;
        let [a, b, c, d] = self.sums.map(encode_sums);
        [self.number, head, self.handle, self.value, a, b, c, d]
    }

    /// From an entry. None: unknown operation or status.
    pub fn decode(entry: &Entry) -> Option<Self> {
        Some(Self {
            number: entry[0],
            operation: Operation::from_code(entry[1] as u8)?,
            status: Status::from_code((entry[1] >> 8) as u8)?,
            slot: (entry[1] >> 32) as u32,
            handle: entry[2],
            value: entry[3],
            sums: [4, 5, 6, 7].map(|word| decode_sums(entry[word])),
        })
    }
}

fn encode_sums(sums: FragmentSums) -> u64 {
    u64::from(sums.full) | u64::from(sums.sample) << 32
}

fn decode_sums(word: u64) -> FragmentSums {
    FragmentSums { full: word as u32, sample: (word >> 32) as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_entries() {
        let sums = FragmentSums { full: 0x0403_0201, sample: 0x0807_0605 };
        let request = Request {
            number: 0x1122_3344_5566_7788,
            operation: Operation::Write,
            slot: 7,
            handle: 9,
            argument: 3,
            sums,
            more: [0x0c0b_0a09, 2, 0],
        };
        let bytes: Vec<u8> = request.encode().iter().flat_map(|word| word.to_le_bytes()).collect();
        let expected = [
            &[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11][..],
            &[5, 0, 0, 0, 7, 0, 0, 0],
            &[9, 0, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0, 0, 0, 0, 0],
            &[1, 2, 3, 4, 5, 6, 7, 8],
            &[9, 10, 11, 12, 2, 0, 0, 0],
            &[0; 16],
        ];
        assert_eq!(bytes, expected.concat());
        let reply = Reply {
            number: 1,
            operation: Operation::Read,
            status: Status::Io,
            slot: NO_SLOT,
            handle: 0,
            value: 5,
            sums: [FragmentSums::default(), FragmentSums::default(), sums, FragmentSums::default()],
        };
        let bytes: Vec<u8> = reply.encode().iter().flat_map(|word| word.to_le_bytes()).collect();
        let expected = [
            &[1, 0, 0, 0, 0, 0, 0, 0][..],
            &[3, 7, 0, 0, 0xff, 0xff, 0xff, 0xff],
            &[0; 8],
            &[5, 0, 0, 0, 0, 0, 0, 0],
            &[0; 16],
            &[1, 2, 3, 4, 5, 6, 7, 8],
            &[0; 8],
        ];
        assert_eq!(bytes, expected.concat());
    }

    #[test]
    fn places_come_back_where_they_fit() {
        let place = |i: u32| Place { slot: 7 * i, sums: FragmentSums { full: i + 1, sample: !i } };
        let mut slot = [0xee; 4096];
        for fragments in [0, 1, 3, 4, 315] {
            Place::put(&mut slot, (0..fragments).map(place));
            let taken = Place::take(&slot, fragments as usize).unwrap();
            assert_eq!(taken.to_vec(), (0..fragments).map(place).collect::<Vec<_>>());
        }
        slot.fill(0xee);
        Place::put(&mut slot, (0..316).map(place));
        assert_eq!(Place::take(&slot, 316), None);
        assert_eq!(slot, [0xee; 4096], "nothing by halves");
        Place::put(&mut slot, [place(2)].into_iter());
        let golden = [0xee, 0xee, 0xee, 0xee, 14, 0, 0, 0, 3, 0, 0, 0, 0xfd, 0xff, 0xff, 0xff, 0xee];
        assert_eq!(slot[..17], golden);
    }

    proptest! {
        #[test]
        fn entries_survive_the_round_trip_and_hostile_ones_are_refused(entry in any::<[u64; 8]>()) {
            if let Some(request) = Request::decode(&entry) {
                prop_assert_eq!(Request::decode(&request.encode()), Some(request));
            }
            if let Some(reply) = Reply::decode(&entry) {
                prop_assert_eq!(Reply::decode(&reply.encode()), Some(reply));
            }
            let code = entry[1] as u8;
            let known = Operation::ALL.iter().any(|&o| o as u8 == code && o != Operation::Space);
            prop_assert_eq!(Request::decode(&entry).is_some(), known && entry[0] != 0);
        }
    }
}
