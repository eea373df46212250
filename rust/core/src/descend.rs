//! Even ranks and short micro-batches at once: the search that `balance` makes first.
//!
//! What is made smaller is the time in lock step plus `WEIGHT` times what each rank is above the limit. Segments of the
//! rank that is furthest above it, then of the slowest cell of each step, go to other cells or change places with
//! segments there, the best change first, until none is worth it. A cell is a micro-batch of a rank.

use crate::balance::{Change, Grid, LOOKS};

/// What a rank is above the limit counts so many times as much as time. Cost that a rank hands on makes a step longer by
/// as much at most, so from 1 on every rank comes below the limit that can.
pub(crate) const WEIGHT: f64 = 1.5;
/// Segments looked at, each beside the cells it could go to, for each segment of the plan: some 0.5 ms for 512.
const TRIES: usize = 32;
const MAX_TRIES: usize = 1 << 16;
/// Cells that are told apart, by what could be gained there at most, in the time of one look at a row.
const CELLS_A_LOOK: usize = 8;
/// A change is worth it from this share of a rank's mean cost on.
const WORTH: f64 = 1e-6;
/// Steps are short enough when all together take this multiple of a perfect split.
pub(crate) const SHORT: f64 = 1.01;

impl Grid<'_> {
    /// Makes changes until none is worth it; whether there was one. `limit` is what a rank may cost.
    pub(crate) fn descend(&mut self, limit: f64) -> bool {
        let mean = self.load.iter().sum::<f64>() / self.ranks as f64;
        let (least, mut changed) = (WORTH * mean, false);
        let mut tries = MAX_TRIES
            .min(TRIES * self.lengths.len())
            .min(LOOKS / self.width);
        self.begin();
        loop {
            let mut again = false;
            while let Some(change) = self.lighter_rank(limit, least, &mut tries) {
                self.apply(change);
                again = true;
            }
            if self.slowest.iter().sum::<f64>() > SHORT * mean {
                for step in 0..self.steps {
                    while let Some(change) = self.shorter_step(step, limit, least, &mut tries) {
                        self.apply(change);
                        again = true;
                    }
                }
            }
            if !again {
                return changed;
            }
            changed = true;
        }
    }

    /// The best change of the rank that is furthest above the limit, or of the next if it has none.
    fn lighter_rank(&self, limit: f64, least: f64, tries: &mut usize) -> Option<Change> {
        let mut over: Vec<usize> = (0..self.ranks)
            .filter(|&rank| self.load[rank] > limit)
            .collect();
        over.sort_by(|&a, &b| self.load[b].total_cmp(&self.load[a]).then(a.cmp(&b)));
        over.into_iter().find_map(|rank| {
            let mut best = Best::new(least);
            for step in 0..self.steps {
                if !self.look(self.ranks.div_ceil(CELLS_A_LOOK)) {
                    break;
                }
                self.offer_swaps(step, rank, limit, &mut best);
                self.offer_cell(step * self.ranks + rank, limit, &mut best, tries);
            }
            best.change
        })
    }

    /// The best change of the slowest cell of a step.
    fn shorter_step(
        &self,
        step: usize,
        limit: f64,
        least: f64,
        tries: &mut usize,
    ) -> Option<Change> {
        let cells = step * self.ranks..(step + 1) * self.ranks;
        let heavier =
            |&a: &usize, &b: &usize| self.cells[a].total_cmp(&self.cells[b]).then(b.cmp(&a));
        let mut best = Best::new(least);
        self.offer_cell(cells.max_by(heavier)?, limit, &mut best, tries);
        best.change
    }

    /// Whole micro-batches of this rank for those of others in the same step, which leaves the time as it is.
    fn offer_swaps(&self, step: usize, rank: usize, limit: f64, best: &mut Best) {
        for other in (0..self.ranks).filter(|other| *other != rank) {
            let less = self.cells[step * self.ranks + rank] - self.cells[step * self.ranks + other];
            best.offer(self.relief(rank, other, less, limit), || {
                Change::Swap(step, rank, other)
            });
        }
    }

    /// Segments of this cell to other cells, or for segments there.
    fn offer_cell(&self, cell: usize, limit: f64, best: &mut Best, tries: &mut usize) {
        if !self.look(self.cells.len().div_ceil(CELLS_A_LOOK)) {
            return;
        }
        let (step, rank) = (cell / self.ranks, cell % self.ranks);
        let over = (self.load[rank] - limit).max(0.0);
        // What can be gained in time.
        let above = (self.cells[cell] - self.others[cell]).max(0.0);
        // Of each other cell: what can be gained there, and what it can take before its step becomes longer or its rank
        // too heavy.
        let mut others = Vec::new();
        for (at, slowest) in self.slowest.iter().enumerate() {
            for (to, load) in self.load.iter().enumerate() {
                let other = at * self.ranks + to;
                let head = if at == step {
                    (self.cells[cell] - self.cells[other]) / 2.0
                } else {
                    slowest - self.cells[other]
                };
                let most = above.min(head).max(0.0) + WEIGHT * over;
                if most <= best.gain || other == cell {
                    continue;
                }
                let spare = if to == rank {
                    f64::INFINITY
                } else {
                    limit - load
                };
                others.push((other, most, head.min(spare)));
            }
        }
        for from in self.rows(step, rank) {
            for at in 0..self.items[from].len() {
                // Costs fall along a row, and with them what can be gained.
                let cost = self.cost((from, at));
                if cost.min(above) + WEIGHT * cost.min(over) <= best.gain {
                    break;
                }
                for &(other, most, head) in &others {
                    if most <= best.gain {
                        continue;
                    }
                    if *tries == 0 {
                        return;
                    }
                    *tries -= 1;
                    let wanted = [head.min(above.max(over)), over];
                    for to in self.rows(other / self.ranks, other % self.ranks) {
                        self.offer_item((from, at), to, wanted, limit, best);
                    }
                }
            }
        }
    }

    /// A segment to another row, or for one there whose cost is next to what would make the difference `wanted`.
    fn offer_item(
        &self,
        one: (usize, usize),
        to: usize,
        wanted: [f64; 2],
        limit: f64,
        best: &mut Best,
    ) {
        let (from, (cell, other)) = (one.0, (one.0 / self.width, to / self.width));
        let (cost, length) = (self.cost(one), self.length(one));
        if self.room[to] >= length && self.count[cell / self.ranks] > 1 {
            best.offer(self.gain(cell, other, cost, limit), || {
                Change::Move(one, to)
            });
        }
        let row = &self.items[to];
        for less in wanted {
            if less <= 0.0 {
                continue;
            }
            let near = row.partition_point(|&item| self.costs[item as usize] > cost - less);
            for place in near.saturating_sub(1)..(near + 1).min(row.len()) {
                let two = (to, place);
                let longer = length - self.length(two);
                if self.room[to] >= longer && self.room[from] >= -longer {
                    let less = cost - self.cost(two);
                    best.offer(self.gain(cell, other, less, limit), || {
                        Change::Exchange(one, two)
                    });
                }
            }
        }
    }

    /// What is gained when one cell hands `less` to another.
    #[inline(never)] // in line it makes the loops around it slower
    fn gain(&self, from: usize, to: usize, less: f64, limit: f64) -> f64 {
        self.shorter(from, to, less) + self.relief(from % self.ranks, to % self.ranks, less, limit)
    }

    /// What is gained by the ranks' sums alone.
    fn relief(&self, from: usize, to: usize, less: f64, limit: f64) -> f64 {
        if from == to {
            return 0.0;
        }
        let over = |load: f64| (load - limit).max(0.0);
        let (a, b) = (self.load[from], self.load[to]);
        WEIGHT * (over(a) - over(a - less) + over(b) - over(b + less))
    }
}

struct Best {
    gain: f64,
    change: Option<Change>,
}

impl Best {
    /// Nothing yet; what comes has to gain more than this.
    fn new(gain: f64) -> Self {
        Self { gain, change: None }
    }

    fn offer(&mut self, gain: f64, change: impl FnOnce() -> Change) {
        if gain > self.gain {
            self.gain = gain;
            self.change = Some(change());
        }
    }
}
