//! The sliding window: which fragment gets the next free slot.
//!
//! One window over all objects and batches, no barrier between them. Loads go first: stores have an eighth of the slots at
//! most, also when there are no loads, since what a drive was given stands before the next load. Where slots are short the two
//! take turns. No drive holds so many slots that its stall would take them all.

use std::collections::VecDeque;

use crate::task::{Class, Piece};

/// Fragments queued by drive, and slots in use.
pub struct Window {
    slots: usize,
    drives: usize,
    lanes: [Lane; 2],
    store_had_last: bool,
    /// Classes that found no slot since the last [`Window::fit`], in their order.
    refused: Vec<Class>,
}

struct Lane {
    queues: Vec<VecDeque<Piece>>,
    /// Fragments under way, by drive.
    busy: Vec<usize>,
    turn: usize,
}

/// What one of `drives` may hold of `slots`.
fn drive_cap(slots: usize, drives: usize) -> usize {
    (2 * slots).div_ceil(drives + 1).min(slots)
}

impl Window {
    /// A window of `slots` over `drives`.
    pub fn new(slots: usize, drives: usize) -> Self {
        let lane = || Lane { queues: Vec::new(), busy: Vec::new(), turn: 0 };
        let mut window =
            Self { slots, drives, lanes: [lane(), lane()], store_had_last: false, refused: Vec::new() };
        window.fit(slots, drives);
        window
    }

    /// Goes on with so many slots and drives, some of which may be free again; fragments of drives that are no more keep their
    /// queues.
    pub fn fit(&mut self, slots: usize, drives: usize) {
        (self.slots, self.drives) = (slots, drives);
        // Who was refused first is first, or the others would always find the slot that is free.
        if let Some(&class) = self.refused.first() {
            self.store_had_last = class == Class::Load;
        }
        self.refused.clear();
        self.cover(drives);
    }

    fn cover(&mut self, drives: usize) {
        for lane in &mut self.lanes {
            if drives > lane.queues.len() {
                lane.queues.resize(drives, VecDeque::new());
                lane.busy.resize(drives, 0);
            }
        }
    }

    /// Fragments of both classes that a drive holds.
    fn busy(&self, drive: usize) -> usize {
        self.lanes.iter().map(|lane| lane.busy[drive]).sum()
    }

    /// Queues a fragment.
    pub fn push(&mut self, piece: Piece) {
        self.cover(piece.drive as usize + 1);
        self.lanes[piece.class as usize].queues[piece.drive as usize].push_back(piece);
    }

    /// The next fragment that may have a slot; it holds it until [`Window::landed`].
    pub fn next(&mut self) -> Option<Piece> {
        let first = if self.store_had_last { Class::Load } else { Class::Store };
        let other = if self.store_had_last { Class::Store } else { Class::Load };
        let piece = self.pop(first).or_else(|| self.pop(other))?;
        self.store_had_last = piece.class == Class::Store;
        self.lanes[piece.class as usize].busy[piece.drive as usize] += piece.run.count as usize;
        Some(piece)
    }

    /// The next of a class.
    fn pop(&mut self, class: Class) -> Option<Piece> {
        if self.refused.contains(&class) {
            return None;
        }
        let share = (self.slots / 8).max(1);
        let drives = self.lanes[class as usize].queues.len();
        for _ in 0..drives {
            let busy = |lane: &Lane| lane.busy.iter().sum::<usize>();
            let lane = &self.lanes[class as usize];
            let drive = lane.turn;
            let fits = |piece: &Piece| {
                let count = piece.run.count as usize;
                // One store on every drive at least: what another drive does not give back must not stop it.
                let may = class == Class::Load
                    || lane.busy[drive] == 0
                    || fits(lane.busy[drive], count, drive_cap(share, self.drives))
                        && fits(busy(lane), count, share);
                may && fits(self.busy(drive), count, drive_cap(self.slots, self.drives))
            };
            let fits = lane.queues[drive].front().is_some_and(fits);
            let lane = &mut self.lanes[class as usize];
            lane.turn = (drive + 1) % drives;
            if fits {
                return lane.queues[drive].pop_front();
            }
        }
        None
    }

    /// Takes back the slot of `piece`.
    pub fn landed(&mut self, piece: &Piece) {
        self.lanes[piece.class as usize].busy[piece.drive as usize] -= piece.run.count as usize;
    }

    /// Puts a fragment that [`Window::next`] gave back to the front: there was no slot. Its class waits for [`Window::fit`]; the
    /// other one may need none.
    pub fn put_back(&mut self, piece: Piece) {
        self.landed(&piece);
        self.refused.push(piece.class);
        let lane = &mut self.lanes[piece.class as usize];
        lane.queues[piece.drive as usize].push_front(piece);
        lane.turn = piece.drive as usize;
    }

    /// Puts the fragments of a run that [`Window::next`] gave back to the front, by `most`.
    pub fn split(&mut self, piece: Piece, most: u32) {
        self.landed(&piece);
        for part in piece.split(most).rev() {
            self.lanes[piece.class as usize].queues[piece.drive as usize].push_front(part);
        }
    }

    /// Forgets what is queued for a drive.
    pub fn clear(&mut self, drive: usize) {
        for lane in &mut self.lanes {
            lane.queues[drive].clear();
        }
    }

    /// Pieces that wait for a slot alone, not for a drive that has its share.
    pub fn ready(&self, class: Class) -> usize {
        let cap = drive_cap(self.slots, self.drives);
        let queues = self.lanes[class as usize].queues.iter().enumerate();
        queues.filter(|&(drive, _)| self.busy(drive) < cap).map(|(_, queue)| queue.len()).sum()
    }

    /// Fragments that hold slots.
    pub fn in_flight(&self) -> usize {
        self.lanes.iter().flat_map(|lane| &lane.busy).sum()
    }
}

/// Whether `more` may join `used` below `most`. A run that is larger than that goes alone.
fn fits(used: usize, more: usize, most: usize) -> bool {
    used == 0 || used + more <= most
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
    fn stores_have_an_eighth_with_loads_and_without() {
        let mut window = Window::new(64, 1);
        fill(&mut window, Class::Load, 1, 500);
        fill(&mut window, Class::Store, 1, 500);
        let taken = take_all(&mut window, 64);
        assert_eq!((count(&taken, Class::Load), count(&taken, Class::Store)), (56, 8));

        let mut window = Window::new(64, 1);
        fill(&mut window, Class::Store, 1, 500);
        assert_eq!(take_all(&mut window, 64).len(), 8);
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
    fn runs_keep_the_same_bounds() {
        for count in [4, 8] {
            let run = |drive, class| {
                let run = Run { first: 0, count, step: 1 };
                Piece { class, ticket: 1, run, drive }
            };
            let in_flight = |taken: &[Piece]| taken.iter().map(|piece| piece.run.count).sum::<u32>();
            // A stalled drive does not take what the other one's stores need.
            let mut window = Window::new(64, 2);
            (0..100).for_each(|_| window.push(run(0, Class::Store)));
            let stuck = take_all(&mut window, 100);
            assert!(in_flight(&stuck) <= 8, "{} fragments", in_flight(&stuck));
            window.push(run(1, Class::Store));
            assert_eq!(window.next().map(|piece| piece.drive), Some(1));
            // Stores have their eighth beside loads.
            let mut window = Window::new(64, 1);
            (0..100).for_each(|_| window.push(run(0, Class::Load)));
            (0..100).for_each(|_| window.push(run(0, Class::Store)));
            let taken = take_all(&mut window, 100);
            let stores: Vec<Piece> = taken.iter().filter(|p| p.class == Class::Store).copied().collect();
            assert_eq!((in_flight(&taken), in_flight(&stores)), (64, 8));
        }
        // One that is larger than all of it goes alone.
        let mut window = Window::new(16, 1);
        let run = Run { first: 0, count: 100, step: 1 };
        (0..2).for_each(|_| window.push(Piece { class: Class::Store, ticket: 1, run, drive: 0 }));
        let alone = window.next().unwrap();
        assert!(window.next().is_none());
        window.landed(&alone);
        assert!(window.next().is_some());
    }

    #[test]
    fn stores_are_not_starved_where_slots_are_what_is_short() {
        for drives in 1..=4u16 {
            let mut window = Window::new(64, drives as usize);
            let (mut under_way, mut free, mut stored) = (VecDeque::new(), 64, 0);
            for landing in 0..4000 {
                for (class, drive) in
                    [Class::Load, Class::Store].into_iter().flat_map(|c| (0..drives).map(move |d| (c, d)))
                {
                    window.push(Piece { class, ticket: 1, run: Run::one(landing), drive });
                }
                // As the reactor does, with slots that loads alone would fill.
                window.fit(64, drives as usize);
                while let Some(piece) = window.next() {
                    if free == 0 {
                        window.put_back(piece);
                    } else {
                        free -= 1;
                        under_way.push_back(piece);
                    }
                }
                let landed: Piece = under_way.pop_front().unwrap();
                window.landed(&landed);
                free += 1;
                stored += usize::from(landed.class == Class::Store);
            }
            assert!((250..3750).contains(&stored), "{drives} drives: {stored} of 4000");
        }
    }

    #[test]
    fn who_finds_no_slot_does_not_stop_those_that_need_none() {
        let mut window = Window::new(64, 2);
        fill(&mut window, Class::Store, 2, 1);
        fill(&mut window, Class::Load, 2, 100);
        let mut loads = Vec::new();
        while let Some(piece) = window.next() {
            match piece.class {
                Class::Store => window.put_back(piece),
                Class::Load => loads.push(piece),
            }
        }
        assert!(loads.len() >= 64, "{} loads went straight", loads.len());
        loads.iter().for_each(|piece| window.landed(piece));
        window.fit(64, 2);
        assert_eq!(window.next().map(|piece| piece.class), Some(Class::Store), "refused first, so first now");
    }

    #[test]
    fn put_back_keeps_the_order() {
        let mut window = Window::new(4, 1);
        fill(&mut window, Class::Load, 1, 2);
        let first = window.next().unwrap();
        window.put_back(first);
        assert_eq!(window.in_flight(), 0);
        window.fit(4, 1);
        assert_eq!(window.next().unwrap().run.first, 0);
        window.clear(0);
        assert!(window.next().is_none());
    }
}
