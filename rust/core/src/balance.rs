//! Evens out the ranks of a plan: whole micro-batches, segments and pairs of segments change ranks.
//!
//! A plan is good when its time in lock step is short, micro-batch by micro-batch, and when no rank's sum is above what
//! the caller allows; `descend` looks for both. After that the heaviest rank hands on, again and again, what brings it
//! closest to a lighter one, as long as the time in lock step does not grow. No row overflows and no micro-batch loses
//! its last segment.

use std::cell::Cell;

use crate::descend::SHORT;
use crate::pack::{lock_step, Layout, Plan};

/// Ranks are even enough at this ratio to the bound.
const EVEN: f64 = 1.002;
const MAX_CHANGES: usize = 256;
/// Changes inside one step.
const MAX_SHORTER: usize = 16;
/// The lightest ranks, which are tried in this order.
const OTHERS: usize = 4;
/// Rows beyond which a plan is left as it is: with so many, ranks are even anyway.
const MAX_ROWS: usize = 1 << 17;
/// Looks at segments and rows in a pass over a plan, some 30 ms: odd inputs of tens of thousands of segments take no
/// longer than that, and few others come near it.
pub(crate) const LOOKS: usize = 1 << 20;

/// A cost leaves one list of rising costs for another, where these are known.
fn hand_over(sorted: &mut [Option<Vec<f64>>], from: usize, to: usize, cost: f64) {
    if let Some(costs) = &mut sorted[from] {
        costs.remove(costs.partition_point(|&other| other < cost));
    }
    if let Some(costs) = &mut sorted[to] {
        costs.insert(costs.partition_point(|&other| other < cost), cost);
    }
}

/// No rank's sum can be below the mean, and one of them has the heaviest segment.
pub(crate) fn least(costs: &[f64], ranks: usize) -> f64 {
    let mean = costs.iter().sum::<f64>() / ranks as f64;
    costs.iter().copied().fold(mean, f64::max)
}

/// Something to do to a plan.
#[derive(Clone, Copy)]
pub(crate) enum Change {
    /// In this step two ranks change micro-batches.
    Swap(usize, usize, usize),
    /// The item at this place of a row goes to another row.
    Move((usize, usize), usize),
    /// Two items change places.
    Exchange((usize, usize), (usize, usize)),
}

/// A plan that can be changed.
#[derive(Clone)]
pub(crate) struct Grid<'a> {
    pub(crate) lengths: &'a [i64],
    pub(crate) costs: &'a [f64],
    pub(crate) ranks: usize,
    pub(crate) steps: usize,
    /// Rows of a micro-batch.
    pub(crate) width: usize,
    /// Items of each row, longest first; row `(step * ranks + rank) * width + slot`.
    pub(crate) items: Vec<Vec<u32>>,
    /// Tokens that still fit into each row.
    pub(crate) room: Vec<i64>,
    /// Cost of each micro-batch, `[step * ranks + rank]`.
    pub(crate) cells: Vec<f64>,
    /// The slowest of the other ranks in the step of each.
    pub(crate) others: Vec<f64>,
    /// Cost of each rank.
    pub(crate) load: Vec<f64>,
    /// Slowest rank of each step.
    pub(crate) slowest: Vec<f64>,
    /// Segments of each step.
    pub(crate) count: Vec<usize>,
    /// Looks that are left to this pass.
    looks: Cell<usize>,
}

/// Evens out the ranks of `plan` and makes its micro-batches shorter; its hash is left to the caller.
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
    let least = least(costs, ranks);
    let heaviest = plan
        .costs
        .chunks_exact(steps)
        .map(|costs| costs.iter().sum())
        .fold(0.0, f64::max);
    let mean = plan.costs.iter().sum::<f64>() / ranks as f64;
    if heaviest <= least * EVEN && lock_step(plan, layout) <= mean * SHORT {
        return;
    }
    let mut grid = Grid::new(plan, lengths, costs, layout);
    let mut changed = grid.shorten();
    let mut without = grid.clone();
    changed |= grid.descend(least * layout.max_imbalance);
    changed |= grid.even(least * EVEN);
    // What the search did may stand in the way afterwards: with few segments a rank, or when its tries are used up.
    changed |= without.even(least * EVEN);
    if without.is_better(&grid, least * layout.max_imbalance) {
        grid = without;
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
            others: vec![0.0; ranks * steps],
            load: vec![0.0; ranks],
            slowest: vec![0.0; steps],
            count: vec![0; steps],
            looks: Cell::new(0),
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
            grid.refresh(step);
        }
        grid
    }

    /// After the cells of a step have changed.
    fn refresh(&mut self, step: usize) {
        let cells = step * self.ranks..(step + 1) * self.ranks;
        let (mut first, mut second, mut at) = (0.0, 0.0, cells.start);
        for cell in cells.clone() {
            let cost = self.cells[cell];
            if cost > first {
                (first, second, at) = (cost, first, cell);
            } else if cost > second {
                second = cost;
            }
        }
        self.slowest[step] = first;
        self.others[cells].fill(first);
        self.others[at] = second;
    }

    /// Starts a pass, with all its looks.
    pub(crate) fn begin(&self) {
        self.looks.set(LOOKS);
    }

    /// Counts so many looks; whether that many were left.
    pub(crate) fn look(&self, looks: usize) -> bool {
        let left = self.looks.get().checked_sub(looks);
        self.looks.set(left.unwrap_or(0));
        left.is_some()
    }

    /// The heaviest rank hands on to lighter ones until it costs `enough`, without more time in lock step.
    fn even(&mut self, enough: f64) -> bool {
        let none = -1e-13 * self.slowest.iter().sum::<f64>();
        let mut changed = false;
        self.begin();
        let mut sorted = vec![None; self.ranks];
        for _ in 0..MAX_CHANGES {
            let heavy = self.heaviest();
            if self.load[heavy] <= enough {
                break;
            }
            let mut others: Vec<usize> = (0..self.ranks).filter(|rank| *rank != heavy).collect();
            others.sort_by(|&a, &b| self.load[a].total_cmp(&self.load[b]).then(a.cmp(&b)));
            others.truncate(OTHERS);
            let found = others.iter().find_map(|&light| {
                let goal = (self.load[heavy] - self.load[light]) / 2.0;
                let there = sorted[light].get_or_insert_with(|| self.sorted(light));
                debug_assert_eq!(*there, self.sorted(light), "handed over wrongly");
                let change = self.best(heavy, light, 0..self.steps, goal, none, Some(there))?;
                Some((light, change))
            });
            let Some((light, change)) = found else { break };
            match change {
                Change::Swap(..) => (sorted[heavy], sorted[light]) = (None, None),
                Change::Move(one, _) => {
                    hand_over(&mut sorted, heavy, light, self.cost(one));
                }
                Change::Exchange(one, two) => {
                    hand_over(&mut sorted, heavy, light, self.cost(one));
                    hand_over(&mut sorted, light, heavy, self.cost(two));
                }
            }
            self.apply(change);
            changed = true;
        }
        changed
    }

    /// The costs of a rank's items, rising.
    fn sorted(&self, rank: usize) -> Vec<f64> {
        let rows = self.rows_of(rank, 0..self.steps);
        let mut costs: Vec<f64> = rows
            .flat_map(|row| &self.items[row])
            .map(|&item| self.costs[item as usize])
            .collect();
        costs.sort_unstable_by(f64::total_cmp);
        costs
    }

    /// Whether the heaviest rank is less above the limit, or else the time in lock step shorter.
    fn is_better(&self, other: &Self, limit: f64) -> bool {
        let above = |grid: &Self| grid.load[grid.heaviest()].max(limit);
        let (one, two) = (above(self), above(other));
        // Sums of the same costs in another order are not less.
        one < two * (1.0 - 1e-9)
            || one <= two * (1.0 + 1e-9)
                && self.slowest.iter().sum::<f64>() < other.slowest.iter().sum()
    }

    fn heaviest(&self) -> usize {
        let heavier =
            |&a: &usize, &b: &usize| self.load[a].total_cmp(&self.load[b]).then(b.cmp(&a));
        (0..self.ranks).max_by(heavier).unwrap_or(0)
    }

    pub(crate) fn rows(&self, step: usize, rank: usize) -> std::ops::Range<usize> {
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

    pub(crate) fn cost(&self, (row, at): (usize, usize)) -> f64 {
        self.costs[self.items[row][at] as usize]
    }

    pub(crate) fn length(&self, (row, at): (usize, usize)) -> i64 {
        self.lengths[self.items[row][at] as usize]
    }

    /// How much shorter the time in lock step becomes when one cell hands `less` to another.
    pub(crate) fn shorter(&self, from: usize, to: usize, less: f64) -> f64 {
        let (a, b) = (from / self.ranks, to / self.ranks);
        if a == b {
            // Of all but the one that becomes lighter: the one that becomes heavier is among them with less than it has
            // then, which changes nothing.
            let rest = self.others[if less < 0.0 { to } else { from }];
            let changed = (self.cells[from] - less).max(self.cells[to] + less);
            return self.slowest[a] - rest.max(changed);
        }
        let lighter = self.others[from].max(self.cells[from] - less);
        let heavier = self.others[to].max(self.cells[to] + less);
        self.slowest[a] - lighter + self.slowest[b] - heavier
    }

    /// Makes steps shorter: the slowest rank of each hands on to the quickest in the same step. Whether it could.
    fn shorten(&mut self) -> bool {
        let mut changed = false;
        self.begin();
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
                let any = f64::NEG_INFINITY;
                let Some(change) = self.best(heavy, light, step..step + 1, goal, any, None) else {
                    break;
                };
                if matches!(change, Change::Swap(..)) {
                    break;
                }
                self.apply(change);
                changed = true;
            }
        }
        changed
    }

    /// The change in these steps that comes closest to making one rank lighter and the other heavier by `goal`, of those
    /// that make the time in lock step shorter by at least `shorter`. With `there`, the costs of all items that the
    /// lighter one has in these steps, it is found sooner.
    fn best(
        &self,
        heavy: usize,
        light: usize,
        steps: std::ops::Range<usize>,
        goal: f64,
        shorter: f64,
        there: Option<&[f64]>,
    ) -> Option<Change> {
        let mut best: Option<Change> = None;
        // Worth it from a thousandth of the difference on; below that, rounding would go on for ever.
        let mut least = 0.999 * goal;
        let miss = |less: f64| (less - goal).abs();
        for step in steps.clone() {
            let (a, b) = (step * self.ranks + heavy, step * self.ranks + light);
            let swap = miss(self.cells[a] - self.cells[b]);
            if swap < least {
                (least, best) = (swap, Some(Change::Swap(step, heavy, light)));
            }
        }
        for from in self.rows_of(heavy, steps.clone()) {
            let mut before = None;
            for at in 0..self.items[from].len() {
                let one = (from, at);
                let (cost, length) = (self.cost(one), self.length(one));
                // What is as long as the one before is no better.
                if before.replace(length) == Some(length) {
                    continue;
                }
                // Costs fall along a row, and whatever comes back makes them less.
                if cost <= goal && miss(cost) >= least {
                    break;
                }
                if !self.look(1) {
                    return best;
                }
                let wanted = cost - goal;
                let move_helps = miss(cost) < least;
                if !move_helps {
                    let helps = |costs: &[f64]| {
                        let near = costs.partition_point(|&other| other < wanted);
                        let near = near.saturating_sub(2)..(near + 2).min(costs.len());
                        costs[near].iter().any(|other| miss(cost - other) < least)
                    };
                    if there.is_some_and(|costs| !helps(costs)) {
                        continue;
                    }
                }
                if !self.look(self.width * steps.len()) {
                    return best;
                }
                for to in self.rows_of(light, steps.clone()) {
                    let mut offer = |less: f64, more: i64, change: Change| {
                        if miss(less) < least
                            && self.room[to] >= more
                            && self.room[from] >= -more
                            && (matches!(change, Change::Exchange(..))
                                || self.count[self.step(from)] > 1)
                            && self.shorter(from / self.width, to / self.width, less) >= shorter
                        {
                            (least, best) = (miss(less), Some(change));
                        }
                    };
                    offer(cost, length, Change::Move(one, to));
                    // Of the row's items those whose cost is next to the one that would be exact.
                    let row = &self.items[to];
                    let near = if wanted < 0.0 {
                        row.len()
                    } else {
                        row.partition_point(|&item| self.costs[item as usize] > wanted)
                    };
                    for other in near.saturating_sub(2)..(near + 2).min(row.len()) {
                        let two = (to, other);
                        let less = cost - self.cost(two);
                        offer(less, length - self.length(two), Change::Exchange(one, two));
                    }
                }
            }
        }
        best
    }

    pub(crate) fn apply(&mut self, change: Change) {
        match change {
            Change::Swap(step, heavy, light) => {
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
                self.refresh(step);
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
        self.refresh(step);
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
    use super::{balance, least, Grid, EVEN};
    use crate::descend::{SHORT, WEIGHT};
    use crate::pack::{laid_out, lock_step, Layout, Plan};
    use proptest::prelude::*;

    proptest! {
        /// What is searched for becomes no worse, no row overflows, no micro-batch is empty, costs stay true.
        #[test]
        fn plans_become_better_and_stay_whole(
            lengths in prop::collection::vec(prop_oneof![4 => 1i64..=300, 1 => 300i64..=1000], 1..150),
            ranks in 1usize..6,
            rows in 1usize..3,
            max_imbalance in prop_oneof![Just(1.0), Just(1.02), Just(f64::INFINITY)],
        ) {
            let layout = Layout {
                ranks,
                row_tokens: 1000,
                rows_per_micro_batch: rows,
                linear_cost: 100.0,
                quadratic_cost: 1.0,
                max_imbalance,
            };
            let costs: Vec<f64> = lengths.iter().map(|length| layout.cost(*length)).collect();
            let mut plan = laid_out(&lengths, &costs, &layout).unwrap();
            let limit = least(&costs, ranks) * max_imbalance;
            let worth = |plan: &Plan| {
                let loads = plan.costs.chunks(plan.n_micro_batches).map(|costs| costs.iter().sum::<f64>());
                lock_step(plan, &layout) + WEIGHT * loads.map(|load| (load - limit).max(0.0)).sum::<f64>()
            };
            let before = worth(&plan);
            let mut unsearched = Grid::new(&plan, &lengths, &costs, &layout);
            unsearched.shorten();
            unsearched.even(least(&costs, ranks) * EVEN);
            balance(&mut plan, &lengths, &costs, &layout);
            prop_assert!(worth(&plan) <= before * (1.0 + 1e-9), "{} to {}", before, worth(&plan));
            let steps = plan.n_micro_batches;
            // Nor is it worse than without the search, or else so good that none was made.
            let least = least(&costs, ranks);
            let heaviest = plan.costs.chunks(steps).map(|costs| costs.iter().sum()).fold(limit, f64::max);
            let without = unsearched.load[unsearched.heaviest()].max(limit);
            prop_assert!(heaviest <= without.max(least * EVEN) * (1.0 + 1e-6), "{} for {}", heaviest, without);
            if heaviest > without * (1.0 - 1e-12) {
                let time = unsearched.slowest.iter().sum::<f64>().max(costs.iter().sum::<f64>() / ranks as f64 * SHORT);
                prop_assert!(lock_step(&plan, &layout) <= time * (1.0 + 1e-6), "more than {}", time);
            }
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

        /// What a look at every cell of every step would say, before and after changes.
        #[test]
        fn what_handing_on_gains_is_known_without_a_look_at_every_cell(
            lengths in prop::collection::vec(prop_oneof![4 => 1i64..=300, 1 => 300i64..=1000], 1..80),
            ranks in 2usize..6,
            changes in 0usize..3,
            share in -1.0..=1.0,
        ) {
            let layout = Layout {
                ranks,
                row_tokens: 1000,
                rows_per_micro_batch: 1,
                linear_cost: 100.0,
                quadratic_cost: 1.0,
                max_imbalance: 1.0,
            };
            let costs: Vec<f64> = lengths.iter().map(|length| layout.cost(*length)).collect();
            let plan = laid_out(&lengths, &costs, &layout).unwrap();
            let mut grid = Grid::new(&plan, &lengths, &costs, &layout);
            if changes > 0 {
                grid.shorten();
            }
            if changes > 1 {
                grid.even(least(&costs, ranks));
            }
            let time = |cells: &[f64]| -> f64 {
                cells.chunks(ranks).map(|step| step.iter().copied().fold(0.0, f64::max)).sum()
            };
            let now = time(&grid.cells);
            for from in 0..grid.cells.len() {
                for to in (0..grid.cells.len()).filter(|to| *to != from) {
                    let less = share * if share < 0.0 { grid.cells[to] } else { grid.cells[from] };
                    let mut cells = grid.cells.clone();
                    cells[from] -= less;
                    cells[to] += less;
                    let (shorter, want) = (grid.shorter(from, to, less), now - time(&cells));
                    prop_assert!((shorter - want).abs() <= 1e-9 * now, "{} for {}", shorter, want);
                }
            }
        }
    }

    /// Segments that fill a row alone among short ones: without a count the search looks at all of these again and again.
    #[test]
    fn a_pass_over_an_odd_plan_ends_when_its_looks_are_used_up() {
        let mut lengths: Vec<i64> = (0..20_000).map(|i| 50 + i * 37 % 1950).collect();
        lengths[..3].fill(200_000);
        let layout = Layout {
            ranks: 4,
            row_tokens: 200_000,
            rows_per_micro_batch: 16,
            linear_cost: 24576.0,
            quadratic_cost: 1.0,
            max_imbalance: 1.0,
        };
        let costs: Vec<f64> = lengths.iter().map(|&length| layout.cost(length)).collect();
        let plan = laid_out(&lengths, &costs, &layout).unwrap();
        let mut grid = Grid::new(&plan, &lengths, &costs, &layout);
        grid.shorten();
        grid.descend(least(&costs, layout.ranks));
        grid.even(least(&costs, layout.ranks));
        assert_eq!(grid.looks.get(), 0);
    }
}
