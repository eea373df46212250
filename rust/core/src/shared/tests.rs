//! Against a queue, and against a peer that writes whatever it likes.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use proptest::prelude::*;
use rustix::fs::{fcntl_add_seals, ftruncate, memfd_create, MemfdFlags, SealFlags};

use super::region::places;
use super::{total_bytes, Place, Reader, Region, Writer};
use crate::wire::MAX_HEADER_BYTES;
use crate::Error;

fn memory(bytes: usize, seals: SealFlags) -> std::os::fd::OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes as u64).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// Two mappings of one memory, as two processes have.
fn mapped(capacity: usize) -> (Arc<Region>, Arc<Region>) {
    let fd = memory(total_bytes(capacity).unwrap(), SealFlags::SHRINK);
    let map = |populate| Arc::new(Region::map(fd.as_fd(), capacity, populate).unwrap());
    (map(true), map(false))
}

/// Header and payload.
type Content = (Vec<u8>, Vec<u8>);

#[derive(Debug, Clone)]
enum Step {
    /// Header, payload, and in which cache line of its page that one ends.
    Send(usize, usize, usize),
    Take,
    Release(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let payload = prop_oneof![Just(0), 1usize..200, 500usize..2500, Just(4032), Just(4096)];
    let step = prop_oneof![
        4 => (prop_oneof![Just(0usize), 0usize..100], payload, 0usize..64).prop_map(|(h, p, line)| Step::Send(h, p, line)),
        3 => Just(Step::Take),
        3 => any::<prop::sample::Index>().prop_map(Step::Release),
    ];
    prop::collection::vec(step, 0..300)
}

fn bytes(reader: &Reader, place: &Place) -> Content {
    let read = |(start, bytes)| {
        let mut out = vec![0; bytes];
        reader.region().read(start, &mut out);
        out
    };
    (read(place.header()), read(place.payload()))
}

proptest! {
    /// What is sent comes out whole and in order, stays as it is until it is released, and bounds the sender.
    #[test]
    fn it_is_a_bounded_queue_with_releases_in_any_order(steps in steps()) {
        let (left, right) = mapped(4096);
        let (mut writer, mut reader) = (Writer::new(left), Reader::new(right));
        let mut queue: VecDeque<Content> = VecDeque::new();
        let mut held: Vec<(Place, Content, u64)> = Vec::new();
        let (mut sent, mut taken, mut done) = (0u64, 0u64, std::collections::BTreeSet::new());
        for step in steps {
            match step {
                Step::Send(h, p, line) => {
                    let content = (vec![sent as u8; h], vec![!(sent as u8); p]);
                    let unreleased = (0..sent).find(|ticket| !done.contains(ticket)).map_or(0, |first| sent - first);
                    let from = writer.region.address(0, 0) as usize + line * 64 - 1;
                    match writer.reserve(h, p, from) {
                        Ok(Some(place)) => {
                            writer.fill(&place, &content.0, &content.1);
                            prop_assert!(!writer.publish(place), "nobody sleeps");
                            queue.push_back(content);
                            sent += 1;
                            let mut used: Vec<_> = writer.used.iter().copied().collect();
                            used.sort_unstable();
                            prop_assert!(used.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{used:?}");
                            prop_assert!(used.iter().all(|&(start, stop)| start < stop && stop <= 4096), "{used:?}");
                        }
                        Ok(None) => prop_assert!(unreleased > 0),
                        Err(error) => {
                            prop_assert!(matches!(error, Error::Validation(_)));
                            prop_assert!(64 + p.next_multiple_of(64) + h > 4096);
                        }
                    }
                }
                Step::Take => {
                    let place = reader.take().unwrap();
                    prop_assert_eq!(place.is_some(), !queue.is_empty());
                    if let Some(place) = place {
                        let content = queue.pop_front().unwrap();
                        prop_assert_eq!(&bytes(&reader, &place), &content);
                        held.push((place, content, taken));
                        taken += 1;
                    }
                }
                Step::Release(index) if !held.is_empty() => {
                    let (place, content, ticket) = held.swap_remove(index.index(held.len()));
                    prop_assert_eq!(bytes(&reader, &place), content);
                    reader.release(&place);
                    reader.release(&place);
                    done.insert(ticket);
                }
                Step::Release(_) => {}
            }
            let unreleased = (0..sent).find(|ticket| !done.contains(ticket)).map_or(0, |first| sent - first);
            prop_assert_eq!(writer.unreleased().unwrap() as u64, unreleased);
        }
        for (place, content, _) in held {
            prop_assert_eq!(bytes(&reader, &place), content);
        }
    }

    /// Whatever a sender writes: an error or bytes inside, and never more at a time than there are places.
    #[test]
    fn a_reader_survives_any_sender(
        published in prop_oneof![0u64..600, any::<u64>()],
        entries in prop::collection::vec(
            (prop_oneof![0u64..5000, any::<u64>()], prop_oneof![0u64..5000, any::<u64>()], prop_oneof![0u64..5000, any::<u64>()]),
            1..300,
        ),
        wanted in any::<u64>(),
    ) {
        let (left, right) = mapped(4096);
        let mut reader = Reader::new(right);
        let control = left.control();
        control.published.0.store(published, Relaxed);
        control.wanted.0.store(wanted, Relaxed);
        control.released.0.store(wanted, Relaxed);
        for (ticket, (start, payload, header)) in (0..).zip(&entries) {
            let entry = left.entry(ticket);
            entry.start.store(*start, Relaxed);
            entry.payload.store(*payload, Relaxed);
            entry.header.store(*header, Relaxed);
        }
        let mut got = Vec::new();
        while let Ok(Some(place)) = reader.take() {
            let (header, payload) = bytes(&reader, &place);
            prop_assert!(header.len() + payload.len() <= 4096);
            let _ = reader.must_tell(false);
            got.push(place);
        }
        prop_assert!(got.len() <= places(4096));
        prop_assert!(published <= places(4096) as u64 || got.is_empty());
        got.iter().rev().for_each(|place| reader.release(place));
        prop_assert_eq!(left.control().released.0.load(Relaxed), if got.is_empty() { wanted } else { got.len() as u64 });
    }

    /// Whatever a receiver writes: an error, or room that is free.
    #[test]
    fn a_writer_survives_any_receiver(released in prop::collection::vec(prop_oneof![0u64..9, any::<u64>()], 1..20)) {
        let (left, right) = mapped(4096);
        let mut writer = Writer::new(left);
        let (mut sent, mut before) = (0, 0);
        for released in released {
            right.control().released.0.store(released, Relaxed);
            right.control().asleep.0.store(released, Relaxed);
            match writer.reserve(10, 1000, 0) {
                Ok(place) => {
                    prop_assert!((before..=sent).contains(&released));
                    before = released;
                    if let Some(place) = place {
                        writer.fill(&place, &[0; 10], &[0; 1000]);
                        prop_assert_eq!(writer.publish(place), released != 0);
                        sent += 1;
                    }
                }
                Err(error) => {
                    prop_assert!(matches!(error, Error::Transport(_)));
                    prop_assert!(!(before..=sent).contains(&released));
                    break;
                }
            }
        }
    }
}

#[test]
fn two_threads_pass_payloads_and_use_their_places_again() {
    const ALL: u64 = 20_000;
    // One mapping for both, so that a sanitizer sees both sides at the same addresses.
    let (region, _) = mapped(1 << 14);
    let (mut writer, mut reader) = (Writer::new(region.clone()), Reader::new(region));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..ALL {
                let payload = vec![number as u8; (number * 7919 % 3000) as usize];
                let header = number.to_le_bytes();
                let place = loop {
                    let from = payload.as_ptr() as usize;
                    if let Some(place) = writer.reserve(8, payload.len(), from).unwrap() {
                        break place;
                    }
                    std::thread::yield_now();
                };
                writer.fill(&place, &header, &payload);
                let _ = writer.publish(place);
            }
        });
        let mut held = VecDeque::new();
        for number in 0..ALL {
            let place = loop {
                if let Some(place) = reader.take().unwrap() {
                    break place;
                }
                // Kept for a while as long as there is more to take.
                held.drain(..).for_each(|place| reader.release(&place));
                std::thread::yield_now();
            };
            let (header, payload) = bytes(&reader, &place);
            assert_eq!(header, number.to_le_bytes());
            assert!(payload.len() as u64 == number * 7919 % 3000);
            assert!(payload.iter().all(|&byte| byte == number as u8));
            held.push_back(place);
        }
    });
}

#[test]
fn a_copy_does_not_begin_within_a_cache_line_behind_its_source() {
    let (left, _) = mapped(8192);
    let mut writer = Writer::new(left.clone());
    for offset in 0..4096 {
        let from = left.address(0, 0) as usize + 4096 - offset;
        let place = writer.reserve(3, 4000, from).unwrap().unwrap();
        let distance = (left.address(place.payload().0, 0) as usize).wrapping_sub(from) % 4096;
        assert!(!(1..64).contains(&distance), "{offset}: {distance}");
        assert!(place.payload().0.is_multiple_of(64) && place.header().0.is_multiple_of(64));
    }
}

#[test]
fn all_places_may_be_taken_by_nothing_and_one_release_makes_room() {
    let (left, right) = mapped(1 << 16);
    let (mut writer, mut reader) = (Writer::new(left), Reader::new(right));
    for _ in 0..places(1 << 16) {
        let place = writer.reserve(0, 0, 0).unwrap().unwrap();
        let _ = writer.publish(place);
    }
    assert_eq!(writer.reserve(0, 0, 0).unwrap(), None);
    let first = reader.take().unwrap().unwrap();
    reader.release(&first);
    assert!(
        !reader.must_tell(false),
        "half is waited for, and there is more to take"
    );
    assert!(reader.must_tell(true), "before a pause all is told");
    assert!(!reader.must_tell(true), "once");
    assert!(writer.reserve(0, 0, 0).unwrap().is_some());
}

#[test]
fn headers_are_bounded_and_what_can_never_fit_is_refused() {
    let (left, _) = mapped(4 << 20);
    let mut writer = Writer::new(left);
    let refused = |result: crate::Result<Option<Place>>| match result {
        Err(Error::Validation(text)) => text,
        other => panic!("{other:?}"),
    };
    assert!(refused(writer.reserve(MAX_HEADER_BYTES + 1, 0, 0)).starts_with("header: 1048577"));
    assert!(refused(writer.reserve(0, usize::MAX, 0)).contains("can never fit"));
    assert!(refused(writer.reserve(65, (4 << 20) - 128, 0)).contains("can never fit"));
    assert!(writer.reserve(64, (4 << 20) - 128, 0).unwrap().is_some());
}

#[test]
fn memory_that_could_shrink_or_is_of_another_size_is_not_mapped() {
    let right = total_bytes(8192).unwrap();
    for (bytes, seals, capacity) in [
        (right, SealFlags::GROW, 8192),
        (right - 1, SealFlags::SHRINK, 8192),
        (right, SealFlags::SHRINK, 4096),
        (right, SealFlags::SHRINK, 8191),
        (right, SealFlags::SHRINK, 0),
        (right, SealFlags::SHRINK, usize::MAX),
    ] {
        let fd = memory(bytes, seals);
        let refused = Region::map(fd.as_fd(), capacity, false).unwrap_err();
        assert!(matches!(refused, Error::Transport(_)), "{refused}");
    }
    let file = tempfile::tempfile().unwrap();
    file.set_len(right as u64).unwrap();
    assert!(Region::map(file.as_fd(), 8192, false).is_err());
}
