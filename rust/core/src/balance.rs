//! Evens out the ranks of a plan: whole micro-batches, segments and pairs of segments change ranks.
//!
//! What a plan is chosen for is its time in lock step, micro-batch by micro-batch. Ranks that wait for one another only
//! at the end of a step wait for the heaviest sum. So the heaviest rank hands on, again and again, what brings it closest
//! to a lighter one, as long as the time in lock step grows by no more than the caller allows, no row overflows and
//! no micro-batch loses its last segment.

use crate::pack::{Layout, Plan};

/// Ranks are even enough at this ratio to the bound.
const EVEN: f64 = 1.002;
const MAX_CHANGES: usize = 256;
/// Changes inside one step.
const MAX_SHORTER: usize = 16;
/// The lightest ranks, which are tried in this order.
const OTHERS: usize = 4;
/// Rows beyond which a plan is left as it is: with so many, ranks are even anyway.
const MAX_ROWS: usize = 1 << 17;

/// No rank's sum can be below the mean, and one of them has the heaviest segment.
pub(crate) fn least(costs: &[f64], ranks: usize) -> f64 {
    let mean = costs.iter().sum::<f64>() / ranks as f64;
    costs.iter().copied().fold(mean, f64::max)
}

/// A change that makes the heaviest rank lighter.
#[derive(Clone, Copy)]
enum Change {
    /// The ranks change micro-batches in this step.
    Swap(usize),
    /// The item at this place of a row goes to another row.
    Move((usize, usize), usize),
    /// Two items change places.
    Exchange((usize, usize), (usize, usize)),
}

struct Grid<'a> {
    lengths: &'a [i64],
    costs: &'a [f64],
    ranks: usize,
    steps: usize,
    width: usize,
    /// Items of each row, longest first; row `(step * ranks + rank) * width + slot`.
    items: Vec<Vec<u32>>,
    room: Vec<i64>,
    /// Cost of each micro-batch, `[step * ranks + rank]`.
    cells: Vec<f64>,
    load: Vec<f64>,
    /// Slowest rank of each step.
    slowest: Vec<f64>,
    /// Segments of each step.
    count: Vec<usize>,
}

/// Evens out the ranks of `plan`; its hash is left to the caller.
pub(crate) fn balance(plan: &mut Plan, lengths: &[i64], costs: &[f64], layout: &Layout) {
    let (ranks, steps, width) = (
        layout.ranks,
        plan.n_micro_batches,
        layout.rows_per_micro_batch,
    );
    let rows = ranks
        .checked_mul(steps)
        .and_then(|cells| cells.checked_mul(width));
    if ranks < 2 || rows.is_none_or(|rows| rows > MAX_ROWS) {
        return;
    }
    let mut loads = vec![0.0; ranks];
    for (rank, costs) in loads.iter_mut().zip(plan.costs.chunks_exact(steps)) {
        *rank = costs.iter().sum();
    }
    let enough = least(costs, ranks) * EVEN;
    if loads.iter().all(|load| *load <= enough) {
        return;
    }
    let mut grid = Grid::new(plan, lengths, costs, layout);
    let most = grid.slowest.iter().sum::<f64>() * (1.0 + layout.lock_step_slack) * (1.0 + 1e-12);
    let mut changed = grid.shorten();
    for _ in 0..MAX_CHANGES {
        let heavy = grid.heaviest();
        if grid.load[heavy] <= enough {
            break;
        }
        let mut others: Vec<usize> = (0..ranks).filter(|rank| *rank != heavy).collect();
        others.sort_by(|&a, &b| grid.load[a].total_cmp(&grid.load[b]).then(a.cmp(&b)));
        others.truncate(OTHERS);
        let found = others.iter().find_map(|&light| {
            let goal = (grid.load[heavy] - grid.load[light]) / 2.0;
            let change = grid.best(heavy, light, 0..steps, goal, most)?;
            Some((light, change))
        });
        let Some((light, change)) = found else { break };
        grid.apply(heavy, light, change);
        changed = true;
    }
    if changed {
        grid.write(plan);
    }
}

impl<'a> Grid<'a> {
    fn new(plan: &Plan, lengths: &'a [i64], costs: &'a [f64], layout: &Layout) -> Self {
        let (ranks, steps, width) = (
            layout.ranks,
            plan.n_micro_batches,
            layout.rows_per_micro_batch,
        );
        let mut grid = Self {
            lengths,
            costs,
            ranks,
            steps,
            width,
            items: vec![Vec::new(); ranks * steps * width],
            room: vec![layout.row_tokens; ranks * steps * width],
            cells: vec![0.0; ranks * steps],
            load: vec![0.0; ranks],
            slowest: vec![0.0; steps],
            count: vec![0; steps],
        };
        for (item, &length) in lengths.iter().enumerate() {
            let (step, rank) = (plan.micro_batch[item] as usize, plan.rank[item] as usize);
            let row = (step * ranks + rank) * width + plan.row[item] as usize;
            grid.items[row].push(item as u32);
            grid.room[row] -= length;
            grid.cells[step * ranks + rank] += costs[item];
            grid.load[rank] += costs[item];
            grid.count[step] += 1;
        }
        for row in &mut grid.items {
            row.sort_by_key(|&item| (std::cmp::Reverse(lengths[item as usize]), item));
        }
        for step in 0..steps {
            grid.slowest[step] = grid.slowest_of(step, &[]);
        }
        grid
    }

    fn heaviest(&self) -> usize {
        let heavier =
            |&a: &usize, &b: &usize| self.load[a].total_cmp(&self.load[b]).then(b.cmp(&a));
        (0..self.ranks).max_by(heavier).unwrap_or(0)
    }

    fn rows(&self, step: usize, rank: usize) -> std::ops::Range<usize> {
        let first = (step * self.ranks + rank) * self.width;
        first..first + self.width
    }

    fn rows_of(
        &self,
        rank: usize,
        mut steps: std::ops::Range<usize>,
    ) -> impl Iterator<Item = usize> + '_ {
        std::iter::from_fn(move || steps.next()).flat_map(move |step| self.rows(step, rank))
    }

    fn step(&self, row: usize) -> usize {
        row / self.width / self.ranks
    }

    fn cost(&self, (row, at): (usize, usize)) -> f64 {
        self.costs[self.items[row][at] as usize]
    }

    fn length(&self, (row, at): (usize, usize)) -> i64 {
        self.lengths[self.items[row][at] as usize]
    }

    /// The slowest rank of a step when these cells cost more or less.
    fn slowest_of(&self, step: usize, changes: &[(usize, f64)]) -> f64 {
        let cells = step * self.ranks..(step + 1) * self.ranks;
        cells
            .map(|cell| {
                let more = changes
                    .iter()
                    .filter(|(at, _)| *at == cell)
                    .map(|(_, more)| more);
                self.cells[cell] + more.sum::<f64>()
            })
            .fold(0.0, f64::max)
    }

    /// Time in lock step when `from` (a row) becomes lighter by `less` and `to` heavier by as much.
    fn lock_step(&self, from: usize, to: usize, less: f64) -> f64 {
        let changes = [(from / self.width, -less), (to / self.width, less)];
        let (a, b) = (self.step(from), self.step(to));
        let mut time = self.slowest.iter().sum::<f64>();
        time += self.slowest_of(a, &changes) - self.slowest[a];
        if b != a {
            time += self.slowest_of(b, &changes) - self.slowest[b];
        }
        time
    }

    /// Makes steps shorter: the slowest rank of each hands on to the quickest in the same step. Whether it could.
    fn shorten(&mut self) -> bool {
        let mut changed = false;
        for step in 0..self.steps {
            for _ in 0..MAX_SHORTER {
                let cost = |&rank: &usize| self.cells[step * self.ranks + rank];
                let by_cost = |a: &usize, b: &usize| cost(a).total_cmp(&cost(b)).then(a.cmp(b));
                let ranks = 0..self.ranks;
                let Some((heavy, light)) = ranks.clone().max_by(by_cost).zip(ranks.min_by(by_cost))
                else {
                    break;
                };
                let goal = (cost(&heavy) - cost(&light)) / 2.0;
                let most = f64::INFINITY;
                let Some(change) = self.best(heavy, light, step..step + 1, goal, most) else {
                    break;
                };
                if matches!(change, Change::Swap(_)) {
                    break;
                }
                self.apply(heavy, light, change);
                changed = true;
            }
        }
        changed
    }

    /// The change in these steps that comes closest to making one rank lighter and the other heavier by `goal`.
    fn best(
        &self,
        heavy: usize,
        light: usize,
        steps: std::ops::Range<usize>,
        goal: f64,
        most: f64,
    ) -> Option<Change> {
        let mut best: Option<(f64, Change)> = None;
        // Worth it from a thousandth of the difference on; below that, rounding would go on for ever.
        let mut offer = |less: f64, change: Change, allowed: &dyn Fn() -> bool| {
            let miss = (less - goal).abs();
            let better = best.is_none_or(|(least, _)| miss < least);
            if better && miss < 0.999 * goal && allowed() {
                best = Some((miss, change));
            }
        };
        for step in steps.clone() {
            let (a, b) = (step * self.ranks + heavy, step * self.ranks + light);
            offer(self.cells[a] - self.cells[b], Change::Swap(step), &|| true);
        }
        for from in self.rows_of(heavy, steps.clone()) {
            for at in 0..self.items[from].len() {
                let one = (from, at);
                let (cost, length) = (self.cost(one), self.length(one));
                for to in self.rows_of(light, steps.clone()) {
                    offer(cost, Change::Move(one, to), &|| {
                        self.room[to] >= length
                            && self.count[self.step(from)] > 1
                            && self.lock_step(from, to, cost) <= most
                    });
                    // Of the row's items those whose cost is next to the one that would be exact.
                    let wanted = cost - goal;
                    let row = &self.items[to];
                    let near = row.partition_point(|&item| self.costs[item as usize] > wanted);
                    for other in near.saturating_sub(2)..(near + 2).min(row.len()) {
                        let two = (to, other);
                        let less = cost - self.cost(two);
                        let longer = length - self.length(two);
                        offer(less, Change::Exchange(one, two), &|| {
                            self.room[to] >= longer
                                && self.room[from] >= -longer
                                && self.lock_step(from, to, less) <= most
                        });
                    }
                }
            }
        }
        best.map(|(_, change)| change)
    }

    fn apply(&mut self, heavy: usize, light: usize, change: Change) {
        match change {
            Change::Swap(step) => {
                let (a, b) = (self.rows(step, heavy), self.rows(step, light));
                for (a, b) in a.zip(b) {
                    self.items.swap(a, b);
                    self.room.swap(a, b);
                }
                let (a, b) = (step * self.ranks + heavy, step * self.ranks + light);
                let less = self.cells[a] - self.cells[b];
                self.cells.swap(a, b);
                self.load[heavy] -= less;
                self.load[light] += less;
            }
            Change::Move((from, at), to) => {
                let item = self.items[from].remove(at);
                self.put(from, item, -1.0);
                self.put(to, item, 1.0);
            }
            Change::Exchange((from, at), (to, other)) => {
                let (one, two) = (self.items[from].remove(at), self.items[to].remove(other));
                self.put(from, one, -1.0);
                self.put(to, two, -1.0);
                self.put(from, two, 1.0);
                self.put(to, one, 1.0);
            }
        }
    }

    /// Counts an item in or out of a row; what comes in takes its place by length.
    fn put(&mut self, row: usize, item: u32, sign: f64) {
        let (cost, length) = (
            sign * self.costs[item as usize],
            self.lengths[item as usize],
        );
        let (step, cell) = (self.step(row), row / self.width);
        self.cells[cell] += cost;
        self.load[cell % self.ranks] += cost;
        if sign > 0.0 {
            let key = |&item: &u32| (std::cmp::Reverse(self.lengths[item as usize]), item);
            let at = self.items[row].partition_point(|other| key(other) < key(&item));
            self.items[row].insert(at, item);
            self.room[row] -= length;
            self.count[step] += 1;
        } else {
            self.room[row] += length;
            self.count[step] -= 1;
        }
        self.slowest[step] = self.slowest_of(step, &[]);
    }

    fn write(mut self, plan: &mut Plan) {
        plan.costs.fill(0.0);
        for step in 0..self.steps {
            for rank in 0..self.ranks {
                let (mut slot, mut cost) = (0, 0.0);
                for row in self.rows(step, rank) {
                    let items = &mut self.items[row];
                    if items.is_empty() {
                        continue;
                    }
                    items.sort_unstable();
                    let mut position = 0;
                    for &item in &*items {
                        let item = item as usize;
                        plan.rank[item] = rank as i32;
                        plan.micro_batch[item] = step as i32;
                        plan.row[item] = slot;
                        plan.position[item] = position as i32;
                        position += self.lengths[item];
                        cost += self.costs[item];
                    }
                    slot += 1;
                }
                plan.costs[rank * self.steps + step] = cost;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::balance;
    use crate::pack::{laid_out, lock_step, Layout};
    use proptest::prelude::*;

    proptest! {
        /// The step becomes no longer than is allowed, no row overflows, no micro-batch is empty, costs stay true.
        #[test]
        fn ranks_are_evened_out_within_the_slack(
            lengths in prop::collection::vec(prop_oneof![4 => 1i64..=300, 1 => 300i64..=1000], 1..150),
            ranks in 1usize..6,
            rows in 1usize..3,
            slack in prop_oneof![Just(0.0), Just(0.1), Just(10.0)],
        ) {
            let layout = Layout {
                ranks,
                row_tokens: 1000,
                rows_per_micro_batch: rows,
                linear_cost: 100.0,
                quadratic_cost: 1.0,
                lock_step_slack: slack,
            };
            let costs: Vec<f64> = lengths.iter().map(|length| layout.cost(*length)).collect();
            let mut plan = laid_out(&lengths, &costs, &layout).unwrap();
            let before = lock_step(&plan, &layout);
            balance(&mut plan, &lengths, &costs, &layout);
            let after = lock_step(&plan, &layout);
            prop_assert!(after <= before * (1.0 + slack) * (1.0 + 1e-9), "{} to {}", before, after);
            let steps = plan.n_micro_batches;
            let (mut cells, mut fill) = (vec![0.0; ranks * steps], vec![0; ranks * steps * rows]);
            for (item, length) in lengths.iter().enumerate() {
                let cell = plan.rank[item] as usize * steps + plan.micro_batch[item] as usize;
                cells[cell] += costs[item];
                fill[cell * rows + plan.row[item] as usize] += length;
            }
            prop_assert!(fill.iter().all(|tokens| *tokens <= 1000));
            for (cell, cost) in cells.iter().zip(&plan.costs) {
                prop_assert!((cell - cost).abs() <= 1e-9 * cost);
            }
            for step in 0..steps {
                prop_assert!((0..ranks).any(|rank| cells[rank * steps + step] > 0.0));
            }
        }
    }
}
