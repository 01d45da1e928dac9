//! Runs: fragments of one object that lie one behind another on a drive, moved by one I/O.

/// Bytes of a run at most: what costs by the I/O hardly shows any more, and a core's caches still hold it.
pub const RUN_BYTES: usize = 1024 * 1024;

/// Fragments `first`, `first + step`, ... of an object, `count` of them, whose slots lie one behind another on one drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first fragment.
    pub first: u32,
    /// Number of fragments, at least 1.
    pub count: u32,
    /// From one fragment to the next; 1 where the object is on one drive.
    pub step: u32,
}

impl Run {
    /// A fragment alone.
    pub fn one(index: u32) -> Self {
        Self { first: index, count: 1, step: 1 }
    }

    /// Its fragments, in the order of the drive.
    pub fn fragments(self) -> impl DoubleEndedIterator<Item = u32> {
        (0..self.count).map(move |i| self.first + i * self.step)
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.count {
            1 => write!(text, "fragment {}", self.first),
            _ => write!(text, "fragments {} to {}", self.first, self.first + (self.count - 1) * self.step),
        }
    }
}

/// Puts fragments, each with its drive (below `drives`) and its slot there, into runs of up to `most` (at least 1). None: a
/// fragment that stays alone.
pub fn runs(
    places: impl ExactSizeIterator<Item = Option<(usize, u32)>>,
    most: usize,
    drives: usize,
) -> Vec<Run> {
    // Two at least: a small object is read and checked by more than one thread as well.
    let most = most.min(places.len().div_ceil(2)).max(1) as u32;
    let mut runs: Vec<Run> = Vec::new();
    // By drive: its newest run, and the slot of that run's first fragment.
    let mut newest: Vec<Option<(usize, u32)>> = vec![None; drives];
    for (index, place) in (0..).zip(places) {
        if let Some((drive, slot)) = place {
            if let Some((at, start)) = newest[drive] {
                let run = &mut runs[at];
                let step = index - run.first;
                let in_step = run.count == 1 || step == run.count * run.step;
                if run.count < most && start.checked_add(run.count) == Some(slot) && in_step {
                    run.step = if run.count == 1 { step } else { run.step };
                    run.count += 1;
                    continue;
                }
            }
            newest[drive] = Some((runs.len(), slot));
        }
        runs.push(Run::one(index));
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(places: &[Option<(usize, u32)>]) -> Vec<Vec<u32>> {
        let runs = runs(places.iter().copied(), 4, 3);
        runs.into_iter().map(|run| run.fragments().collect()).collect()
    }

    #[test]
    fn neighbours_are_joined_up_to_the_limit_and_to_half_of_the_object() {
        let places: Vec<_> = (0..6).map(|slot| Some((0, 10 + slot))).collect();
        assert_eq!(found(&places), [vec![0, 1, 2], vec![3, 4, 5]]);
        let places: Vec<_> = (0..9).map(|slot| Some((0, 10 + slot))).collect();
        assert_eq!(found(&places), [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8]]);
    }

    #[test]
    fn nothing_follows_the_last_slot_there_can_be() {
        let places: Vec<_> = [u32::MAX, 0, 1, 2].map(|slot| Some((0, slot))).into();
        assert_eq!(found(&places), [vec![0], vec![1, 2], vec![3]]);
    }

    #[test]
    fn stripes_are_joined_on_each_drive() {
        let places: Vec<_> = (0..6).map(|i| Some((i as usize % 3, 10 + i / 3))).collect();
        assert_eq!(found(&places), [vec![0, 3], vec![1, 4], vec![2, 5]]);
    }

    #[test]
    fn what_is_apart_stays_apart() {
        let slots =
            [Some((0, 5)), Some((0, 7)), Some((0, 8)), None, Some((0, 9)), Some((1, 10)), Some((0, 10))];
        // 4 is behind 2 on the drive, but not as far from it in the object as 2 from 1.
        assert_eq!(found(&slots), [vec![0], vec![1, 2], vec![3], vec![4, 6], vec![5]]);
        assert_eq!(found(&[Some((0, 8)), Some((0, 7))]), [vec![0], vec![1]]);
    }
}
