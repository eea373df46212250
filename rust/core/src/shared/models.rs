//! Every interleaving of a receiver with one or two senders, up to a number of preemptions. Whoever sleeps here waits to
//! be rung for and for nothing else, so a lost wake-up is a deadlock, which loom reports; and loom knows who reads and
//! writes each block of data, so a place that is used again too soon is a race, which it reports too.

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::{Place, Reader, Region, Writer};

fn check(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(run);
}

/// A socket: what was rung stays until it is heard.
struct Bell(Mutex<bool>, Condvar);

impl Bell {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(false), Condvar::new()))
    }

    fn ring(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }

    fn sleep(&self) {
        let mut rung = self.0.lock().unwrap();
        while !*rung {
            rung = self.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

struct Sender {
    writer: Writer,
    wakes_me: Arc<Bell>,
    wakes_receiver: Arc<Bell>,
}

impl Sender {
    fn send(&mut self, byte: u8) {
        let place = loop {
            match self.writer.reserve(1, 1, 0).unwrap() {
                Some(place) => break place,
                None => self.wakes_me.sleep(),
            }
        };
        self.writer.fill(&place, &[byte + 100], &[byte]);
        if self.writer.publish(place) {
            self.wakes_receiver.ring();
        }
    }

    fn flush(&mut self) {
        while self.writer.unreleased().unwrap() > 0 {
            self.wakes_me.sleep();
        }
    }
}

struct Receiver {
    senders: Vec<(Reader, Arc<Bell>)>,
    wakes_me: Arc<Bell>,
}

impl Receiver {
    fn take(&mut self) -> (usize, Place) {
        loop {
            for (index, (reader, bell)) in self.senders.iter_mut().enumerate() {
                reader.rise();
                if let Some(place) = reader.take().unwrap() {
                    if reader.must_tell(false) {
                        bell.ring();
                    }
                    return (index, place);
                }
            }
            for (reader, bell) in &mut self.senders {
                if reader.must_tell(true) {
                    bell.ring();
                }
            }
            if self.senders.iter().all(|(reader, _)| reader.doze()) {
                self.wakes_me.sleep();
            }
        }
    }

    fn release(&mut self, (index, place): (usize, Place)) -> u8 {
        let (reader, bell) = &mut self.senders[index];
        let (mut payload, mut header) = ([0], [0]);
        reader.region().read(place.payload().0, &mut payload);
        reader.region().read(place.header().0, &mut header);
        assert_eq!(header[0], payload[0] + 100);
        reader.release(&place);
        if reader.must_tell(false) {
            bell.ring();
        }
        payload[0]
    }
}

/// Bytes for two payloads, and bytes for more than there are places (four).
const TWO: usize = 320;
const FOUR: usize = 1024;

fn connected(senders: usize, capacity: usize) -> (Vec<Sender>, Receiver) {
    let wakes_receiver = Bell::new();
    let (mut all, mut readers) = (Vec::new(), Vec::new());
    for _ in 0..senders {
        let (region, bell) = (Arc::new(Region::model(capacity)), Bell::new());
        all.push(Sender {
            writer: Writer::new(region.clone()),
            wakes_me: bell.clone(),
            wakes_receiver: wakes_receiver.clone(),
        });
        readers.push((Reader::new(region), bell));
    }
    let receiver = Receiver {
        senders: readers,
        wakes_me: wakes_receiver,
    };
    (all, receiver)
}

/// A receiver that sleeps is woken by whatever is published.
#[test]
fn what_is_published_wakes_the_receiver() {
    check(3, || {
        let (mut senders, mut receiver) = connected(1, TWO);
        let mut sender = senders.remove(0);
        let sending = thread::spawn(move || (0..2).for_each(|byte| sender.send(byte)));
        for byte in 0..2 {
            let got = receiver.take();
            assert_eq!(receiver.release(got), byte);
        }
        sending.join().unwrap();
    });
}

/// Four payloads through two places: the sender sleeps for room and is woken, nothing is overwritten.
#[test]
fn what_is_released_wakes_the_sender() {
    check(2, || {
        let (mut senders, mut receiver) = connected(1, TWO);
        let mut sender = senders.remove(0);
        let sending = thread::spawn(move || (0..4).for_each(|byte| sender.send(byte)));
        for byte in 0..4 {
            let got = receiver.take();
            assert_eq!(receiver.release(got), byte);
        }
        sending.join().unwrap();
    });
}

/// The receiver holds all that there is and then releases one of it: it must not keep that to itself until it sleeps.
#[test]
fn one_released_of_all_that_are_held_wakes_the_sender() {
    check(2, || {
        let (mut senders, mut receiver) = connected(1, FOUR);
        let mut sender = senders.remove(0);
        let sending = thread::spawn(move || (0..5).for_each(|byte| sender.send(byte)));
        let mut held: Vec<_> = (0..4).map(|_| receiver.take()).collect();
        assert_eq!(receiver.release(held.remove(0)), 0);
        sending.join().unwrap();
        held.push(receiver.take());
        for (byte, got) in (1..).zip(held) {
            assert_eq!(receiver.release(got), byte);
        }
    });
}

/// Half is what a sender waits for; less of it is told with the last payload that is taken.
#[test]
fn what_was_kept_back_is_told_when_nothing_is_left_to_take() {
    check(2, || {
        let (mut senders, mut receiver) = connected(1, FOUR);
        let mut sender = senders.remove(0);
        let sending = thread::spawn(move || (0..5).for_each(|byte| sender.send(byte)));
        let first = receiver.take();
        assert_eq!(receiver.release(first), 0);
        let held: Vec<_> = (0..3).map(|_| receiver.take()).collect();
        sending.join().unwrap();
        let last = receiver.take();
        assert_eq!(receiver.release(last), 4);
        for (byte, got) in (1..).zip(held) {
            assert_eq!(receiver.release(got), byte);
        }
    });
}

/// A flush ends when all is released, in whatever order.
#[test]
fn the_last_release_ends_a_flush() {
    check(3, || {
        let (mut senders, mut receiver) = connected(1, TWO);
        let mut sender = senders.remove(0);
        let sending = thread::spawn(move || {
            (0..2).for_each(|byte| sender.send(byte));
            sender.flush();
        });
        let (first, second) = (receiver.take(), receiver.take());
        assert_eq!((receiver.release(second), receiver.release(first)), (1, 0));
        sending.join().unwrap();
    });
}

/// Two senders and one sleeper: whichever comes first wakes it, and neither is missed.
#[test]
fn either_of_two_senders_wakes_the_receiver() {
    check(2, || {
        let (senders, mut receiver) = connected(2, TWO);
        let sending: Vec<_> = (5..)
            .zip(senders)
            .map(|(byte, mut sender)| {
                thread::spawn(move || {
                    sender.send(byte);
                    sender.flush();
                })
            })
            .collect();
        let mut got: Vec<u8> = (0..2)
            .map(|_| {
                let got = receiver.take();
                receiver.release(got)
            })
            .collect();
        got.sort_unstable();
        assert_eq!(got, [5, 6]);
        sending.into_iter().for_each(|one| one.join().unwrap());
    });
}
