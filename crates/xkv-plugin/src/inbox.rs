//! Where messages come in. Whoever brings one does the work that it makes, if nobody is at it at that moment: a message
//! costs no wake-up, and no wait for a thread to be scheduled.
//!
//! A thread of the worker's own remains ([`Inbox::serve`]). It works when time is what there is to react to, and it alone takes
//! what was left ([`Inbox::leave`]) by those who cannot stay.
//!
//! No message is lost. Whoever works looks into the queue once more after it has let go of the worker; a bringer that
//! finds the worker taken goes away. The queue's lock puts that look and the bringer's push in order: a look that comes
//! later sees the message, and one that came before makes the bringer see the worker free, or taken by somebody else,
//! whose look is still to come.

use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Messages that a turn takes at most; a bringer hands over to the worker's thread after so many.
const MOST: usize = 64;

/// The same of those who have little time.
const FEW: usize = 8;

/// Who reacts to messages.
pub trait Work: Send {
    type Message: Send;

    /// Reacts to messages, taken one by one, and to what the clock says. It may [`Inbox::post`], and must not panic.
    /// Returns when it wants its next turn if no message comes before.
    fn turn(&mut self, messages: &mut dyn Iterator<Item = Self::Message>) -> Option<Instant>;
}

/// The messages of a worker, and the worker itself.
pub struct Inbox<W: Work> {
    /// Held for a turn; there while the inbox is served. Bringers only try to lock it, and so can neither wait for each
    /// other nor, inside of a turn, for themselves.
    worker: Mutex<Option<W>>,
    /// Held for moments; nobody locks anything, or drops a message, while holding it.
    queue: Mutex<Queue<W::Message>>,
    /// Rings for the worker's thread.
    bell: Condvar,
}

/// Messages, each with its place in the order of all.
type Line<M> = VecDeque<(u64, M)>;

struct Queue<M> {
    messages: Line<M>,
    /// For the worker's thread.
    left: Line<M>,
    /// Messages so far.
    count: u64,
    /// Until when the worker's thread may sleep: the earliest wish of all turns since it last woke up for one. A wish
    /// that was withdrawn wakes it once in vain; in return, turns under load need not wake it.
    alarm: Option<Instant>,
    /// No turns any more.
    closed: bool,
    /// No messages any more.
    ended: bool,
}

impl<M> Queue<M> {
    fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.left.is_empty()
    }

    /// Where the oldest message is.
    fn any(&mut self) -> &mut Line<M> {
        let first = |line: &Line<M>| line.front().map_or(u64::MAX, |(number, _)| *number);
        if first(&self.left) < first(&self.messages) { &mut self.left } else { &mut self.messages }
    }
}

impl<W: Work> Inbox<W> {
    pub fn new() -> Self {
        let (messages, left) = Default::default();
        let queue = Queue { messages, left, count: 0, alarm: None, closed: false, ended: false };
        Self { worker: Mutex::new(None), queue: Mutex::new(queue), bell: Condvar::new() }
    }

    /// Brings a message, and works if nobody does. The caller holds no lock that the work may want.
    pub fn post(&self, message: W::Message) {
        self.push(message, |queue| &mut queue.messages);
        self.work(MOST);
    }

    /// As [`Inbox::post`], of somebody who has little time, and behind everything that was left.
    pub fn offer(&self, message: W::Message) {
        self.push(message, |queue| if queue.left.is_empty() { &mut queue.messages } else { &mut queue.left });
        self.work(FEW);
    }

    /// Works on up to `most` messages, if nobody does.
    fn work(&self, most: usize) {
        let mut taken = 0;
        loop {
            // Who has it has that look before it, see above.
            let Some(mut worker) = self.worker.try_lock() else { return };
            let turn =
                worker.as_mut().map(|worker| self.turn(worker, most - taken, |queue| &mut queue.messages));
            drop(worker);
            if let Some((count, wish)) = turn {
                taken += count;
                if !self.look(wish) {
                    return;
                }
            }
            // Without a worker, its thread is about to look, or waits for what still comes.
            if turn.is_none() || taken >= most {
                self.bell.notify_one();
                return;
            }
        }
    }

    /// Leaves a message to the worker's thread.
    pub fn leave(&self, message: W::Message) {
        self.push(message, |queue| &mut queue.left);
        self.bell.notify_one();
    }

    /// Works, and lends the worker to those who bring messages, until the inbox is closed.
    pub fn serve(&self, worker: W) -> W {
        *self.worker.lock() = Some(worker);
        while self.sleep() {
            let wish = self.worker.lock().as_mut().and_then(|worker| self.turn(worker, MOST, Queue::any).1);
            self.look(wish);
        }
        self.worker.lock().take().expect("nobody else takes it out")
    }

    /// No turns after the one in progress; what comes is for [`Inbox::wait`].
    pub fn close(&self) {
        self.queue.lock().closed = true;
        self.bell.notify_one();
    }

    /// The next message of a closed inbox, waited for until `deadline`.
    pub fn wait(&self, deadline: Instant) -> Option<W::Message> {
        let mut queue = self.queue.lock();
        while queue.is_empty() && !self.bell.wait_until(&mut queue, deadline).timed_out() {}
        queue.any().pop_front().map(|(_, message)| message)
    }

    /// Drops what there is and what still comes.
    pub fn end(&self) {
        let left = {
            let mut queue = self.queue.lock();
            queue.ended = true;
            (std::mem::take(&mut queue.messages), std::mem::take(&mut queue.left))
        };
        drop(left);
    }

    fn push(&self, message: W::Message, place: impl FnOnce(&mut Queue<W::Message>) -> &mut Line<W::Message>) {
        let mut queue = self.queue.lock();
        if queue.ended {
            // Only now may it drop what it holds.
            drop(queue);
            return drop(message);
        }
        queue.count += 1;
        let number = queue.count;
        place(&mut queue).push_back((number, message));
    }

    /// Until there is a message, or it is time for a wish. False once closed.
    fn sleep(&self) -> bool {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return false;
            }
            if !queue.is_empty() {
                return true;
            }
            match queue.alarm {
                None => self.bell.wait(&mut queue),
                Some(at) if at <= Instant::now() => {
                    queue.alarm = None;
                    return true;
                }
                Some(at) => _ = self.bell.wait_until(&mut queue, at),
            }
        }
    }

    /// After a turn: notes its wish, and says whether there is more to do.
    fn look(&self, wish: Option<Instant>) -> bool {
        let mut queue = self.queue.lock();
        if let Some(at) = wish
            && queue.alarm.is_none_or(|alarm| at < alarm)
        {
            queue.alarm = Some(at);
            self.bell.notify_one();
        }
        !queue.messages.is_empty() && !queue.closed
    }

    /// Number of messages taken, `most` of those in `place`, and the worker's wish.
    fn turn(
        &self,
        worker: &mut W,
        most: usize,
        place: impl Fn(&mut Queue<W::Message>) -> &mut Line<W::Message>,
    ) -> (usize, Option<Instant>) {
        let mut count = 0;
        let next = || {
            let mut queue = self.queue.lock();
            let message = if queue.closed { None } else { place(&mut queue).pop_front() };
            let message = message.map(|(_, message)| message);
            count += usize::from(message.is_some());
            message
        };
        let wish = worker.turn(&mut std::iter::from_fn(next).take(most));
        (count, wish)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::{self, JoinHandle, ThreadId};
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    enum Note {
        /// The poster's number, and its count of posts.
        From(usize, u32),
        /// To be posted again inside of the turn, so many times.
        Again(u32),
        /// Somebody else posts once this turn's messages are taken.
        Meet,
        /// To be woken for, after a while.
        Later(Duration),
        Held(#[allow(dead_code)] Arc<()>),
    }

    struct Clerk {
        inbox: Arc<Inbox<Clerk>>,
        seen: Arc<AtomicUsize>,
        /// Of each poster: the latest count.
        latest: Vec<u32>,
        due: Option<Instant>,
        woken: Arc<AtomicUsize>,
        /// Where messages were taken.
        on: Vec<ThreadId>,
    }

    impl Work for Clerk {
        type Message = Note;

        fn turn(&mut self, messages: &mut dyn Iterator<Item = Note>) -> Option<Instant> {
            let mut meets = false;
            for note in messages {
                match note {
                    Note::From(poster, count) => {
                        assert_eq!(count, self.latest[poster] + 1, "in order, each once");
                        self.latest[poster] = count;
                        if count % 3 == 0 {
                            self.inbox.post(Note::Again(2));
                        }
                    }
                    Note::Again(0) | Note::Held(_) => {}
                    Note::Again(more) => self.inbox.post(Note::Again(more - 1)),
                    Note::Meet => meets = true,
                    Note::Later(after) => self.due = Some(Instant::now() + after),
                }
                self.on.push(thread::current().id());
                self.seen.fetch_add(1, Ordering::SeqCst);
            }
            if meets {
                let inbox = self.inbox.clone();
                thread::spawn(move || inbox.post(Note::Again(0))).join().unwrap();
            }
            if self.due.is_some_and(|due| due <= Instant::now()) {
                self.due = None;
                self.woken.fetch_add(1, Ordering::SeqCst);
            }
            self.due
        }
    }

    struct Office {
        inbox: Arc<Inbox<Clerk>>,
        seen: Arc<AtomicUsize>,
        woken: Arc<AtomicUsize>,
        serving: JoinHandle<Clerk>,
    }

    fn hire(posters: usize) -> (Arc<Inbox<Clerk>>, Clerk) {
        let inbox = Arc::new(Inbox::new());
        let clerk = Clerk {
            inbox: inbox.clone(),
            seen: Arc::default(),
            latest: vec![0; posters],
            due: None,
            woken: Arc::default(),
            on: Vec::new(),
        };
        (inbox, clerk)
    }

    impl Office {
        fn open(posters: usize) -> Self {
            let (inbox, clerk) = hire(posters);
            let (seen, woken) = (clerk.seen.clone(), clerk.woken.clone());
            let its = inbox.clone();
            let serving = thread::spawn(move || its.serve(clerk));
            until(|| inbox.worker.lock().is_some());
            Self { inbox, seen, woken, serving }
        }

        fn close(self) -> Clerk {
            self.inbox.close();
            self.serving.join().unwrap()
        }
    }

    fn until(done: impl Fn() -> bool) {
        let started = Instant::now();
        while !done() {
            assert!(started.elapsed() < LONG, "never happens");
            thread::yield_now();
        }
    }

    #[test]
    fn no_message_is_lost_and_each_poster_keeps_its_order() {
        const POSTERS: usize = 4;
        const POSTS: u32 = 30_000;
        let office = Office::open(POSTERS);
        thread::scope(|scope| {
            for poster in 0..POSTERS {
                let inbox = &office.inbox;
                scope.spawn(move || {
                    for count in 1..=POSTS {
                        if count % 1000 == 0 {
                            inbox.leave(Note::From(poster, count));
                        } else {
                            inbox.offer(Note::From(poster, count));
                        }
                    }
                });
            }
        });
        // Every third one is followed by three that are posted inside of turns.
        let all = POSTERS * (POSTS + POSTS / 3 * 3) as usize;
        until(|| office.seen.load(Ordering::SeqCst) == all);
        assert_eq!(office.close().latest, [POSTS; POSTERS]);
    }

    #[test]
    fn what_is_posted_while_a_turn_ends_is_seen_by_whoever_has_it() {
        let (inbox, clerk) = hire(1);
        let seen = clerk.seen.clone();
        *inbox.worker.lock() = Some(clerk);
        inbox.post(Note::Meet);
        assert_eq!(seen.load(Ordering::SeqCst), 2, "no thread is there that could do it instead");
    }

    #[test]
    fn a_message_is_worked_on_where_it_is_posted() {
        let (inbox, clerk) = hire(1);
        *inbox.worker.lock() = Some(clerk);
        inbox.post(Note::From(0, 1));
        let here = thread::current().id();
        assert_eq!(inbox.worker.lock().as_ref().unwrap().on, [here]);
    }

    #[test]
    fn what_was_left_is_for_the_thread_and_nothing_offered_overtakes_it() {
        let (inbox, clerk) = hire(1);
        let seen = clerk.seen.clone();
        *inbox.worker.lock() = Some(clerk);
        inbox.leave(Note::From(0, 1));
        inbox.offer(Note::From(0, 2));
        inbox.post(Note::Again(0));
        assert_eq!(seen.load(Ordering::SeqCst), 1, "what was posted alone");
        let clerk = inbox.worker.lock().take().unwrap();
        let serving = thread::spawn({
            let inbox = inbox.clone();
            move || inbox.serve(clerk)
        });
        until(|| seen.load(Ordering::SeqCst) == 3);
        inbox.close();
        assert_eq!(serving.join().unwrap().latest, [2]);
    }

    #[test]
    fn many_messages_are_handed_over() {
        const MANY: u32 = 4 * MOST as u32;
        let office = Office::open(1);
        let (here, there) = (thread::current().id(), office.serving.thread().id());
        office.inbox.post(Note::Again(MANY));
        until(|| office.seen.load(Ordering::SeqCst) == MANY as usize + 1);
        let clerk = office.close();
        let (mine, its): (Vec<ThreadId>, Vec<_>) = clerk.on.iter().partition(|&&id| id == here);
        assert!(mine.len() <= MOST && its.iter().all(|&id| id == there), "{} here", mine.len());
    }

    #[test]
    fn the_thread_wakes_up_for_the_earliest_wish_and_sleeps_otherwise() {
        let office = Office::open(1);
        office.inbox.post(Note::Later(Duration::from_secs(3600)));
        // Earlier than what it sleeps for by now, and again after that.
        for woken in 1..=2 {
            let started = Instant::now();
            office.inbox.post(Note::Later(Duration::from_millis(20)));
            until(|| office.woken.load(Ordering::SeqCst) == woken);
            assert!(started.elapsed() >= Duration::from_millis(20));
        }
        // Nothing is wished for any more.
        until(|| office.inbox.queue.lock().alarm.is_none());
        let clerk = office.close();
        assert_eq!((clerk.due, clerk.on.len()), (None, 3));
    }

    #[test]
    fn what_is_posted_after_the_close_waits_for_the_thread_and_is_dropped_after_the_end() {
        let office = Office::open(1);
        let inbox = office.inbox.clone();
        office.inbox.close();
        inbox.post(Note::From(0, 1));
        let clerk = office.close();
        assert_eq!(clerk.latest, [0], "no turn any more");
        assert!(matches!(inbox.wait(Instant::now()), Some(Note::From(0, 1))));
        assert!(inbox.wait(Instant::now()).is_none());
        let late = thread::spawn({
            let inbox = inbox.clone();
            move || {
                thread::sleep(Duration::from_millis(20));
                inbox.post(Note::From(0, 2));
            }
        });
        assert!(matches!(inbox.wait(Instant::now() + LONG), Some(Note::From(0, 2))));
        late.join().unwrap();

        let held = Arc::new(());
        inbox.post(Note::Held(held.clone()));
        inbox.end();
        inbox.post(Note::Held(held.clone()));
        inbox.leave(Note::Held(held.clone()));
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
