//! Packing of segments as they come: a bounded number of open bins, closed for good one after another.

use crate::pack::{invalid, Bins};
use crate::Result;

#[derive(Debug)]
struct Open {
    room: i64,
    items: Vec<i64>,
}

/// Best fit over a few open bins. A bin is closed when it is full, or as the fullest when an item fits into none and as
/// many as allowed are open; the same lengths give the same bins however they are cut into calls.
#[derive(Debug)]
pub struct Stream {
    capacity: i64,
    most_open: usize,
    open: Vec<Open>,
    next: i64,
}

impl Stream {
    /// A stream without any item.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] for a capacity or a number of open bins below 1, or more than 65,536 of those.
    pub fn new(capacity: i64, most_open: usize) -> Result<Self> {
        if capacity < 1 {
            return Err(invalid(format!("capacity: {capacity} must be at least 1")));
        }
        if !(1..=1 << 16).contains(&most_open) {
            return Err(invalid(format!(
                "open_bins: {most_open} is not in 1..=65536"
            )));
        }
        Ok(Self {
            capacity,
            most_open,
            open: Vec::new(),
            next: 0,
        })
    }

    /// Adds items, numbered on from those before; gives the bins that this closed.
    ///
    /// # Errors
    /// [`crate::Error::Validation`] names the first length that is not in `1..=capacity`; nothing was added then.
    pub fn add(&mut self, lengths: &[i64]) -> Result<Bins> {
        let bad = lengths
            .iter()
            .position(|length| !(1..=self.capacity).contains(length));
        if let Some(at) = bad {
            return Err(invalid(format!(
                "lengths[{at}]: {} is not in 1..={} (capacity)",
                lengths[at], self.capacity
            )));
        }
        let mut closed = Bins::none();
        for &length in lengths {
            let fits = self
                .open
                .iter()
                .enumerate()
                .filter(|(_, bin)| bin.room >= length);
            let best = fits
                .min_by_key(|(at, bin)| (bin.room, *at))
                .map(|(at, _)| at);
            let at = best.unwrap_or_else(|| {
                if self.open.len() == self.most_open {
                    let fullest = self
                        .open
                        .iter()
                        .enumerate()
                        .min_by_key(|(at, bin)| (bin.room, *at));
                    let fullest = fullest.map_or(0, |(at, _)| at);
                    closed.push(&self.open.remove(fullest).items);
                }
                self.open.push(Open {
                    room: self.capacity,
                    items: Vec::new(),
                });
                self.open.len() - 1
            });
            let bin = &mut self.open[at];
            bin.room -= length;
            bin.items.push(self.next);
            self.next += 1;
            if bin.room == 0 {
                closed.push(&self.open.remove(at).items);
            }
        }
        Ok(closed)
    }

    /// Closes and gives the bins that are open, oldest first. Numbers go on.
    pub fn finish(&mut self) -> Bins {
        let mut closed = Bins::none();
        for bin in self.open.drain(..) {
            closed.push(&bin.items);
        }
        closed
    }
}

#[cfg(test)]
mod tests {
    use super::Stream;
    use crate::pack::{pack, Bins};
    use proptest::prelude::*;

    fn gather(all: &mut Vec<Vec<i64>>, bins: &Bins) {
        all.extend((0..bins.count()).map(|bin| bins.bin(bin).to_vec()));
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_over_and_calls_do_not_matter(
            lengths in prop::collection::vec(1i64..=100, 0..300), open in 1usize..9, cut in 0usize..300
        ) {
            let (mut once, mut twice) = (Stream::new(100, open).unwrap(), Stream::new(100, open).unwrap());
            let (mut a, mut b) = (Vec::new(), Vec::new());
            gather(&mut a, &once.add(&lengths).unwrap());
            gather(&mut a, &once.finish());
            let cut = cut.min(lengths.len());
            gather(&mut b, &twice.add(&lengths[..cut]).unwrap());
            gather(&mut b, &twice.add(&lengths[cut..]).unwrap());
            gather(&mut b, &twice.finish());
            prop_assert_eq!(&a, &b);
            let mut seen: Vec<i64> = a.iter().flatten().copied().collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..lengths.len() as i64));
            for bin in &a {
                prop_assert!(!bin.is_empty());
                prop_assert!(bin.iter().map(|item| lengths[*item as usize]).sum::<i64>() <= 100);
            }
            // Two bins that were ever open together are together fuller than one, as with any best fit.
            let offline = pack(&lengths, 100).unwrap().count();
            if open >= 8 {
                prop_assert!(a.len() <= offline + offline / 4 + 2, "{} of {}", a.len(), offline);
            }
        }
    }

    #[test]
    fn what_cannot_be_added_is_named() {
        assert!(Stream::new(0, 1).is_err() && Stream::new(1, 0).is_err());
        let mut stream = Stream::new(10, 2).unwrap();
        let error = stream.add(&[3, 11]).unwrap_err().to_string();
        assert!(error.contains("lengths[1]: 11 is not in 1..=10"), "{error}");
        assert_eq!(stream.finish().count(), 0, "nothing was added");
    }
}
