//! The sliding window: which fragment gets the next free slot.
//!
//! One window over all objects and batches, no barrier between them. Loads go first; stores keep an eighth of the slots
//! while loads wait, so that they are never starved, and three quarters otherwise, so that a load finds slots at once.
//! No drive holds so many slots that its stall would take them all.

use std::collections::VecDeque;

use crate::task::{Class, Piece};

/// Fragments queued by drive, and slots in use.
pub struct Window {
    slots: usize,
    drive_cap: usize,
    busy: Vec<usize>,
    lanes: [Lane; 2],
    store_had_last: bool,
}

struct Lane {
    queues: Vec<VecDeque<Piece>>,
    turn: usize,
    in_flight: usize,
}

impl Window {
    /// A window of `slots` over `drives`.
    pub fn new(slots: usize, drives: usize) -> Self {
        let lane = || Lane { queues: Vec::new(), turn: 0, in_flight: 0 };
        let mut window =
            Self { slots: 0, drive_cap: 0, busy: Vec::new(), lanes: [lane(), lane()], store_had_last: false };
        window.fit(slots, drives);
        window
    }

    /// Goes on with so many slots and drives; fragments of drives that are no more keep their queues.
    pub fn fit(&mut self, slots: usize, drives: usize) {
        self.slots = slots;
        self.drive_cap = (2 * slots).div_ceil(drives + 1).min(slots);
        self.cover(drives);
    }

    fn cover(&mut self, drives: usize) {
        if drives > self.busy.len() {
            self.busy.resize(drives, 0);
            self.lanes.iter_mut().for_each(|lane| lane.queues.resize(drives, VecDeque::new()));
        }
    }

    /// Queues a fragment.
    pub fn push(&mut self, piece: Piece) {
        self.cover(piece.drive as usize + 1);
        self.lanes[piece.class as usize].queues[piece.drive as usize].push_back(piece);
    }

    /// The next fragment that may have a slot; it holds it until [`Window::landed`].
    pub fn next(&mut self) -> Option<Piece> {
        let stores = self.lanes[Class::Store as usize].in_flight;
        let share = (self.slots / 8).max(1);
        let mut piece = None;
        if stores < share && !self.store_had_last {
            piece = self.pop(Class::Store);
        }
        piece = piece.or_else(|| self.pop(Class::Load));
        if piece.is_none() && stores < (self.slots * 3 / 4).max(share) {
            piece = self.pop(Class::Store);
        }
        let piece = piece?;
        self.store_had_last = piece.class == Class::Store;
        let fragments = piece.run.count as usize;
        self.busy[piece.drive as usize] += fragments;
        self.lanes[piece.class as usize].in_flight += fragments;
        Some(piece)
    }

    fn pop(&mut self, class: Class) -> Option<Piece> {
        let lane = &mut self.lanes[class as usize];
        for _ in 0..lane.queues.len() {
            let drive = lane.turn;
            lane.turn = (lane.turn + 1) % lane.queues.len();
            if self.busy[drive] < self.drive_cap
                && let Some(piece) = lane.queues[drive].pop_front()
            {
                return Some(piece);
            }
        }
        None
    }

    /// Takes back the slot of `piece`.
    pub fn landed(&mut self, piece: &Piece) {
        let fragments = piece.run.count as usize;
        self.busy[piece.drive as usize] -= fragments;
        self.lanes[piece.class as usize].in_flight -= fragments;
    }

    /// Puts a fragment that [`Window::next`] gave back to the front: there was no slot.
    pub fn put_back(&mut self, piece: Piece) {
        self.landed(&piece);
        self.lanes[piece.class as usize].queues[piece.drive as usize].push_front(piece);
    }

    /// Puts the fragments of a run that [`Window::next`] gave back to the front, one by one.
    pub fn split(&mut self, piece: Piece) {
        self.landed(&piece);
        for alone in piece.split().rev() {
            self.lanes[piece.class as usize].queues[piece.drive as usize].push_front(alone);
        }
    }

    /// Forgets what is queued for a drive.
    pub fn clear(&mut self, drive: usize) {
        for lane in &mut self.lanes {
            lane.queues[drive].clear();
        }
    }

    /// I/Os that wait for a slot alone, not for a drive that has its share.
    pub fn ready(&self, class: Class) -> usize {
        let queues = self.lanes[class as usize].queues.iter().zip(&self.busy);
        queues.filter(|(_, busy)| **busy < self.drive_cap).map(|(queue, _)| queue.len()).sum()
    }

    /// Fragments that hold slots.
    pub fn in_flight(&self) -> usize {
        self.busy.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xkv_store::Run;

    fn fill(window: &mut Window, class: Class, drives: u16, per_drive: u32) {
        for index in 0..per_drive {
            for drive in 0..drives {
                window.push(Piece { class, ticket: 1, run: Run::one(index), drive });
            }
        }
    }

    fn take_all(window: &mut Window, slots: usize) -> Vec<Piece> {
        let mut taken = Vec::new();
        while taken.len() < slots
            && let Some(piece) = window.next()
        {
            taken.push(piece);
        }
        taken
    }

    fn count(pieces: &[Piece], class: Class) -> usize {
        pieces.iter().filter(|piece| piece.class == class).count()
    }

    #[test]
    fn stores_keep_an_eighth_while_loads_wait_and_three_quarters_otherwise() {
        let mut window = Window::new(64, 1);
        fill(&mut window, Class::Load, 1, 500);
        fill(&mut window, Class::Store, 1, 500);
        let taken = take_all(&mut window, 64);
        assert_eq!((count(&taken, Class::Load), count(&taken, Class::Store)), (56, 8));

        let mut window = Window::new(64, 1);
        fill(&mut window, Class::Store, 1, 500);
        assert_eq!(take_all(&mut window, 64).len(), 48);
    }

    #[test]
    fn one_slot_serves_both() {
        let mut window = Window::new(1, 1);
        fill(&mut window, Class::Load, 1, 3);
        fill(&mut window, Class::Store, 1, 3);
        let mut order = Vec::new();
        while let Some(piece) = window.next() {
            order.push(piece.class);
            window.landed(&piece);
        }
        use Class::{Load, Store};
        assert_eq!(order, [Store, Load, Store, Load, Store, Load]);
    }

    #[test]
    fn a_stalled_drive_leaves_slots_for_the_others() {
        for drives in 2..=8 {
            let mut window = Window::new(64, drives as usize);
            for index in 0..1000 {
                window.push(Piece { class: Class::Load, ticket: 1, run: Run::one(index), drive: 0 });
            }
            let stuck = take_all(&mut window, 64).len();
            assert!(stuck <= 44, "{drives} drives: {stuck} slots");
            assert_eq!(window.ready(Class::Load), 0);
            fill(&mut window, Class::Load, drives, 100);
            let rest = take_all(&mut window, 64 - stuck);
            assert_eq!(rest.len(), 64 - stuck);
            assert!(rest.iter().all(|piece| piece.drive != 0));
        }
    }

    #[test]
    fn put_back_keeps_the_order() {
        let mut window = Window::new(4, 1);
        fill(&mut window, Class::Load, 1, 2);
        let first = window.next().unwrap();
        window.put_back(first);
        assert_eq!(window.in_flight(), 0);
        assert_eq!(window.next().unwrap().run.first, 0);
        window.clear(0);
        assert!(window.next().is_none());
    }
}
