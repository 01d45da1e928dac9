//! Who goes next: reads before writes, writes never starved.

use std::collections::VecDeque;

use super::Op;

/// While both wait, one of this many dispatches is a write.
const WRITE_SHARE: usize = 8;

/// Requests that wait, in two classes, and how many of each may be in flight.
#[derive(Debug)]
pub(crate) struct ClassQueue<T> {
    reads: VecDeque<T>,
    writes: VecDeque<T>,
    depth: usize,
    reads_in_flight: usize,
    writes_in_flight: usize,
    reads_since_write: usize,
}

impl<T> ClassQueue<T> {
    /// An empty queue in front of a device that gets up to `depth` requests at once (at least 1).
    pub fn new(depth: usize) -> Self {
        assert!(depth > 0, "a device needs at least one request in flight");
        Self {
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            depth,
            reads_in_flight: 0,
            writes_in_flight: 0,
            reads_since_write: 0,
        }
    }

    /// Takes a request to wait.
    pub fn push(&mut self, op: Op, item: T) {
        match op {
            Op::Read => self.reads.push_back(item),
            Op::Write => self.writes.push_back(item),
        }
    }

    /// The next request that may be given to the device, counted as in flight until [`ClassQueue::finish`].
    pub fn pop(&mut self) -> Option<(Op, T)> {
        if self.reads_in_flight + self.writes_in_flight >= self.depth {
            return None;
        }
        let write_allowed = self.writes_in_flight < self.write_limit() && !self.writes.is_empty();
        let write_due = self.reads_since_write + 1 >= WRITE_SHARE;
        if write_allowed && (self.reads.is_empty() || write_due) {
            self.reads_since_write = 0;
            self.writes_in_flight += 1;
            return self.writes.pop_front().map(|item| (Op::Write, item));
        }
        let item = self.reads.pop_front()?;
        self.reads_since_write = if self.writes.is_empty() { 0 } else { self.reads_since_write + 1 };
        self.reads_in_flight += 1;
        Some((Op::Read, item))
    }

    /// A request that was given to the device is done.
    pub fn finish(&mut self, op: Op) {
        match op {
            Op::Read => self.reads_in_flight -= 1,
            Op::Write => self.writes_in_flight -= 1,
        }
    }

    /// Writes that may be in flight: few while reads wait, and never all of the depth, so that a read that arrives
    /// next finds the device's queue short.
    fn write_limit(&self) -> usize {
        if self.reads.is_empty() { self.depth - self.depth / 4 } else { (self.depth / 8).max(1) }
    }

    /// Everything that waits, reads first.
    pub fn drain(&mut self) -> Vec<T> {
        self.reads.drain(..).chain(self.writes.drain(..)).collect()
    }

    /// Reads that wait.
    pub fn reads(&self) -> usize {
        self.reads.len()
    }

    /// Writes that wait.
    pub fn writes(&self) -> usize {
        self.writes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_overtake_writes_that_wait() {
        let mut queue = ClassQueue::new(1);
        queue.push(Op::Write, 1);
        queue.push(Op::Read, 2);
        assert_eq!(queue.pop(), Some((Op::Read, 2)));
        assert_eq!(queue.pop(), None);
        queue.finish(Op::Read);
        assert_eq!(queue.pop(), Some((Op::Write, 1)));
    }

    #[test]
    fn fewer_writes_are_in_flight_while_reads_wait() {
        let mut queue = ClassQueue::new(32);
        for i in 0..100 {
            queue.push(Op::Write, i);
        }
        let alone = std::iter::from_fn(|| queue.pop()).count();
        assert_eq!(alone, 24);
        for i in 0..1000 {
            queue.push(Op::Read, i);
        }
        for _ in 0..alone {
            queue.finish(Op::Write);
        }
        let mix: Vec<Op> = std::iter::from_fn(|| queue.pop()).map(|(op, _)| op).collect();
        assert_eq!(mix.len(), 32);
        assert_eq!(mix.iter().filter(|&&op| op == Op::Write).count(), 4);
    }

    proptest! {
        /// Whatever arrives and finishes in whatever order: everything goes out once and in the order of its class,
        /// the depth holds, and a write that may go waits for at most seven reads.
        #[test]
        fn nothing_is_lost_reordered_or_starved(
            depth in 1usize..40,
            steps in proptest::collection::vec(0u8..4, 0..600),
        ) {
            let mut queue = ClassQueue::new(depth);
            let (mut pushed, mut popped) = ([0u32; 2], [0u32; 2]);
            let mut flying: Vec<Op> = Vec::new();
            let mut reads_in_row = 0;
            let mut pop = |queue: &mut ClassQueue<u32>, flying: &mut Vec<Op>| {
                let writes_wait = queue.writes() > 0;
                let reads_wait = queue.reads() > 0;
                let writes_flying = flying.iter().filter(|&&op| op == Op::Write).count();
                let Some((op, item)) = queue.pop() else {
                    prop_assert!(
                        flying.len() == depth || !reads_wait && (!writes_wait || writes_flying > 0)
                    );
                    return Ok(false);
                };
                prop_assert_eq!(item, popped[op as usize]);
                popped[op as usize] += 1;
                flying.push(op);
                prop_assert!(flying.len() <= depth);
                let held_back = writes_flying >= (depth / 8).max(1);
                reads_in_row = match op {
                    Op::Read if writes_wait && !held_back => reads_in_row + 1,
                    _ => 0,
                };
                prop_assert!(reads_in_row < WRITE_SHARE);
                Ok(true)
            };
            for step in steps {
                match step {
                    0 | 1 => {
                        let op = if step == 0 { Op::Read } else { Op::Write };
                        queue.push(op, pushed[step as usize]);
                        pushed[step as usize] += 1;
                    }
                    2 => {
                        pop(&mut queue, &mut flying)?;
                    }
                    _ if !flying.is_empty() => queue.finish(flying.remove(flying.len() / 2)),
                    _ => {}
                }
            }
            loop {
                while pop(&mut queue, &mut flying)? {}
                let Some(op) = flying.pop() else { break };
                queue.finish(op);
            }
            prop_assert_eq!(popped, pushed);
        }
    }
}
