//! Packing of ragged segments into rows, and the plan of a learner step over ranks and micro-batches.

use crate::balance::{balance, least};
use crate::binpack::{best_fit_decreasing, longest_first};
use crate::{Error, Result};

/// Bins of a packing: bin `b` holds the items `order[offsets[b]..offsets[b + 1]]`, in ascending index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bins {
    /// Item indices, bin after bin.
    pub order: Vec<i64>,
    /// Where each bin starts; one more than there are bins.
    pub offsets: Vec<i64>,
}

impl Bins {
    /// Number of bins.
    pub fn count(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The items of one bin.
    pub fn bin(&self, index: usize) -> &[i64] {
        &self.order[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    fn from_assignment(bin_of: &[u32], bins: usize) -> Self {
        // Counting sort: stable, so items stay in ascending index inside a bin.
        let mut offsets = vec![0i64; bins + 1];
        for &bin in bin_of {
            offsets[bin as usize + 1] += 1;
        }
        for bin in 0..bins {
            offsets[bin + 1] += offsets[bin];
        }
        let mut next = offsets.clone();
        let mut order = vec![0i64; bin_of.len()];
        for (item, &bin) in bin_of.iter().enumerate() {
            order[next[bin as usize] as usize] = item as i64;
            next[bin as usize] += 1;
        }
        Self { order, offsets }
    }
}

fn invalid(text: String) -> Error {
    Error::Validation(text)
}

fn check(lengths: &[i64], capacity: i64, name: &'static str) -> Result<()> {
    if capacity < 1 {
        return Err(invalid(format!("{name}: {capacity} must be at least 1")));
    }
    if u32::try_from(lengths.len()).is_err() {
        return Err(invalid(format!(
            "lengths: {} segments are too many",
            lengths.len()
        )));
    }
    for (index, &length) in lengths.iter().enumerate() {
        if length < 1 {
            return Err(invalid(format!(
                "lengths[{index}]: {length} is not a positive number of tokens"
            )));
        }
        if length > capacity {
            return Err(invalid(format!(
                "lengths[{index}]: {length} tokens do not fit into {name} = {capacity}"
            )));
        }
    }
    Ok(())
}

/// Packs `lengths` into few bins of `capacity`: best fit, longest first; ties go to the smaller index, so equal input
/// gives equal output.
///
/// # Errors
/// [`Error::Validation`] names the first length that is not in `1..=capacity`.
pub fn pack(lengths: &[i64], capacity: i64) -> Result<Bins> {
    check(lengths, capacity, "capacity")?;
    let (bin_of, bins) = best_fit_decreasing(lengths, capacity);
    Ok(Bins::from_assignment(&bin_of, bins))
}

/// How a learner step is laid out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    /// Learner ranks.
    pub ranks: usize,
    /// Tokens of a row.
    pub row_tokens: i64,
    /// Rows of a micro-batch.
    pub rows_per_micro_batch: usize,
    /// Cost of a token outside attention.
    pub linear_cost: f64,
    /// Cost of a pair of tokens in attention; a segment costs `linear * n + quadratic * n * n`.
    pub quadratic_cost: f64,
    /// The heaviest rank should cost at most this multiple of [`Plan::least_cost`], even if the step in lock step takes
    /// longer for that; infinity if that time alone counts.
    pub max_imbalance: f64,
}

impl Layout {
    pub(crate) fn cost(&self, length: i64) -> f64 {
        let n = length as f64;
        self.linear_cost * n + self.quadratic_cost * n * n
    }

    fn rows_per_step(&self) -> usize {
        self.ranks * self.rows_per_micro_batch
    }
}

/// Where every segment goes: rank, micro-batch, row of the micro-batch and first token inside the row.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Rank of each segment.
    pub rank: Vec<i32>,
    /// Micro-batch of each segment.
    pub micro_batch: Vec<i32>,
    /// Row of each segment inside its micro-batch.
    pub row: Vec<i32>,
    /// First token of each segment inside its row.
    pub position: Vec<i32>,
    /// Micro-batches of every rank.
    pub n_micro_batches: usize,
    /// Cost of each micro-batch, `[rank * n_micro_batches + micro_batch]`.
    pub costs: Vec<f64>,
    /// No plan's heaviest rank costs less: the mean over the ranks, or the heaviest segment alone.
    pub least_cost: f64,
    /// Hash of the input and of everything above; equal on two ranks only if their plans are.
    pub hash: u64,
}

/// Lays `lengths` out over ranks and micro-batches.
///
/// Every rank gets the same number of micro-batches, so that no rank waits in a collective the others never enter. Two
/// layouts are tried: the rows of [`pack`] dealt by falling cost, and rows filled for the whole micro-batch at once, each
/// segment to the cheapest row that has room. Fewer micro-batches win, then the shorter time when every micro-batch
/// takes as long as its slowest rank. Of that one segments then change places until no rank costs more than
/// `max_imbalance` allows, if that can be had with so many micro-batches, and the time is as short as was found under
/// that condition. A rank may have fewer rows in a micro-batch, or none at all; none is empty on all ranks.
///
/// # Errors
/// [`Error::Validation`] for a length outside `1..=row_tokens`, for no lengths, and for parameters out of range.
pub fn plan(lengths: &[i64], layout: &Layout) -> Result<Plan> {
    check_layout(layout)?;
    check(lengths, layout.row_tokens, "row_tokens")?;
    if lengths.is_empty() {
        return Err(invalid(
            "lengths: empty; a plan needs at least one segment".into(),
        ));
    }
    let costs: Vec<f64> = lengths.iter().map(|&length| layout.cost(length)).collect();
    let mut plan = laid_out(lengths, &costs, layout)?;
    balance(&mut plan, lengths, &costs, layout);
    plan.least_cost = least(&costs, layout.ranks);
    plan.hash = hash(lengths, layout, &plan);
    Ok(plan)
}

/// The better of the two layouts, before its ranks are evened out.
pub(crate) fn laid_out(lengths: &[i64], costs: &[f64], layout: &Layout) -> Result<Plan> {
    let dealt = deal(
        &by_falling_cost(pack(lengths, layout.row_tokens)?, costs, layout),
        lengths,
        costs,
        layout,
    );
    let filled = deal(&fill_steps(lengths, costs, layout), lengths, costs, layout);
    let rank = |plan: &Plan| (plan.n_micro_batches, lock_step(plan, layout));
    Ok(if rank(&filled) < rank(&dealt) {
        filled
    } else {
        dealt
    })
}

/// Rows of a step, one after another; a step is a micro-batch of all ranks.
struct Steps {
    bins: Bins,
    /// Bin indices of each step.
    steps: Vec<Vec<usize>>,
}

fn row_cost(items: &[i64], costs: &[f64]) -> f64 {
    items.iter().map(|&item| costs[item as usize]).sum()
}

/// Rows of like cost in the same step, so that ranks wait little for one another.
fn by_falling_cost(bins: Bins, costs: &[f64], layout: &Layout) -> Steps {
    let row_costs: Vec<f64> = (0..bins.count())
        .map(|bin| row_cost(bins.bin(bin), costs))
        .collect();
    let mut rows: Vec<usize> = (0..bins.count()).collect();
    rows.sort_by(|&a, &b| row_costs[b].total_cmp(&row_costs[a]).then(a.cmp(&b)));
    let steps = rows
        .chunks(layout.rows_per_step())
        .map(<[usize]>::to_vec)
        .collect();
    Steps { bins, steps }
}

/// No less than the most room of a row in each step: made smaller when a segment turns out not to fit, so that filling
/// a row costs nothing here. The first step that may have room is found in a tree of maxima with its root at 1.
#[derive(Default)]
struct Rooms {
    most: Vec<i64>,
    steps: usize,
}

impl Rooms {
    fn leaves(&self) -> usize {
        self.most.len() / 2
    }

    fn first(&self, length: i64) -> Option<usize> {
        let mut at = 1;
        if self.most.get(at).is_none_or(|most| *most < length) {
            return None;
        }
        while at < self.leaves() {
            at *= 2;
            at += usize::from(self.most[at] < length);
        }
        Some(at - self.leaves())
    }

    fn set(&mut self, step: usize, room: i64) {
        let mut at = self.leaves() + step;
        self.most[at] = room;
        while at > 1 {
            at /= 2;
            self.most[at] = self.most[2 * at].max(self.most[2 * at + 1]);
        }
    }

    /// Adds a step.
    fn push(&mut self, room: i64) -> usize {
        let step = self.steps;
        if step == self.leaves() {
            let leaves = self.most.split_off(step);
            let twice = 2 * step.max(1);
            self.most = vec![0; 2 * twice];
            self.most[twice..twice + leaves.len()].copy_from_slice(&leaves);
            for at in (1..twice).rev() {
                self.most[at] = self.most[2 * at].max(self.most[2 * at + 1]);
            }
        }
        self.steps += 1;
        self.set(step, room);
        step
    }
}

/// Longest first, each segment into the first step with room for it, and there into the cheapest row that has room.
fn fill_steps(lengths: &[i64], costs: &[f64], layout: &Layout) -> Steps {
    let width = layout.rows_per_step().min(lengths.len());
    let mut bin_of = vec![0u32; lengths.len()];
    let (mut room, mut cost, mut most_room) = (Vec::new(), Vec::<f64>::new(), Rooms::default());
    for item in longest_first(lengths) {
        let length = lengths[item as usize];
        let row = loop {
            let step = most_room.first(length).unwrap_or_else(|| {
                room.resize(room.len() + width, layout.row_tokens);
                cost.resize(cost.len() + width, 0.0);
                most_room.push(layout.row_tokens)
            });
            let first = step * width;
            let (rooms, costs) = (&room[first..][..width], &cost[first..][..width]);
            let (mut row, mut least) = (usize::MAX, f64::INFINITY);
            for (at, (&room, &cost)) in rooms.iter().zip(costs).enumerate() {
                if room >= length && (cost < least || row == usize::MAX) {
                    (row, least) = (at, cost);
                }
            }
            if row < width {
                break first + row;
            }
            most_room.set(step, rooms.iter().copied().max().unwrap_or(0));
        };
        room[row] -= length;
        cost[row] += costs[item as usize];
        bin_of[item as usize] = row as u32;
    }
    let bins = Bins::from_assignment(&bin_of, room.len());
    let of_step = |step: usize| {
        let mut rows: Vec<usize> = (step * width..(step + 1) * width)
            .filter(|&row| !bins.bin(row).is_empty())
            .collect();
        rows.sort_by(|&a, &b| cost[b].total_cmp(&cost[a]).then(a.cmp(&b)));
        rows
    };
    let steps = (0..room.len() / width).map(of_step).collect();
    Steps { bins, steps }
}

/// Deals the rows of every step over the ranks, heaviest first to the rank with the lightest micro-batch, then load.
fn deal(rows: &Steps, lengths: &[i64], costs: &[f64], layout: &Layout) -> Plan {
    let (n, n_micro_batches) = (lengths.len(), rows.steps.len());
    let mut plan = Plan {
        rank: vec![0; n],
        micro_batch: vec![0; n],
        row: vec![0; n],
        position: vec![0; n],
        n_micro_batches,
        costs: vec![0.0; layout.ranks * n_micro_batches],
        least_cost: 0.0,
        hash: 0,
    };
    let mut load = vec![0.0f64; layout.ranks];
    for (step, bins) in rows.steps.iter().enumerate() {
        let mut used = vec![0usize; layout.ranks];
        let mut micro_batch = vec![0.0f64; layout.ranks];
        for &bin in bins {
            let lighter = |&a: &usize, &b: &usize| {
                micro_batch[a]
                    .total_cmp(&micro_batch[b])
                    .then(load[a].total_cmp(&load[b]))
                    .then(a.cmp(&b))
            };
            let free = (0..layout.ranks).filter(|&rank| used[rank] < layout.rows_per_micro_batch);
            let Some(rank) = free.min_by(lighter) else {
                continue;
            };
            let items = rows.bins.bin(bin);
            for (item, position) in starts(items, lengths) {
                plan.rank[item] = rank as i32;
                plan.micro_batch[item] = step as i32;
                plan.row[item] = used[rank] as i32;
                plan.position[item] = position;
            }
            let cost = row_cost(items, costs);
            used[rank] += 1;
            micro_batch[rank] += cost;
            load[rank] += cost;
        }
        for (rank, cost) in micro_batch.into_iter().enumerate() {
            plan.costs[rank * n_micro_batches + step] = cost;
        }
    }
    plan
}

/// Time of the step when each micro-batch takes as long as its slowest rank.
pub(crate) fn lock_step(plan: &Plan, layout: &Layout) -> f64 {
    let slowest = |step: usize| {
        (0..layout.ranks)
            .map(|rank| plan.costs[rank * plan.n_micro_batches + step])
            .fold(0.0, f64::max)
    };
    (0..plan.n_micro_batches).map(slowest).sum()
}

fn starts<'a>(items: &'a [i64], lengths: &'a [i64]) -> impl Iterator<Item = (usize, i32)> + 'a {
    items.iter().scan(0i64, |position, &item| {
        let start = *position;
        *position += lengths[item as usize];
        Some((item as usize, start as i32))
    })
}

fn check_layout(layout: &Layout) -> Result<()> {
    let parameter = |name: &str, value: f64, expected: &str| {
        Err(invalid(format!("{name}: {value} must be {expected}")))
    };
    if layout.ranks < 1 || layout.ranks > 1 << 20 {
        return parameter("ranks", layout.ranks as f64, "in 1..=1048576");
    }
    if layout.rows_per_micro_batch < 1 || layout.rows_per_micro_batch > 1 << 20 {
        return parameter(
            "rows_per_micro_batch",
            layout.rows_per_micro_batch as f64,
            "in 1..=1048576",
        );
    }
    if layout.row_tokens > i64::from(i32::MAX) {
        return parameter("row_tokens", layout.row_tokens as f64, "at most 2147483647");
    }
    for (name, value) in [
        ("linear_cost", layout.linear_cost),
        ("quadratic_cost", layout.quadratic_cost),
    ] {
        if !value.is_finite() || value < 0.0 {
            return parameter(name, value, "finite and not negative");
        }
    }
    if layout.max_imbalance.is_nan() || layout.max_imbalance < 1.0 {
        return parameter("max_imbalance", layout.max_imbalance, "at least 1");
    }
    Ok(())
}

/// FNV-1a, 64 bit, over little-endian words: stable over platforms and versions.
fn hash(lengths: &[i64], layout: &Layout, plan: &Plan) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325_u64;
    let mut feed = |word: u64| {
        for byte in word.to_le_bytes() {
            state = (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    feed(layout.ranks as u64);
    feed(layout.row_tokens as u64);
    feed(layout.rows_per_micro_batch as u64);
    feed(plan.n_micro_batches as u64);
    for &length in lengths {
        feed(length as u64);
    }
    for column in [&plan.rank, &plan.micro_batch, &plan.row, &plan.position] {
        for &value in column {
            feed(value as u64);
        }
    }
    state
}

#[cfg(test)]
mod tests {
    use super::{fill_steps, longest_first, Layout};
    use proptest::prelude::*;

    proptest! {
        /// The tree of rooms finds what a look at every row of every step would.
        #[test]
        fn segments_go_to_the_first_step_and_its_cheapest_row_with_room(
            lengths in prop::collection::vec(prop_oneof![1i64..=10, 1i64..=100], 1..200),
            ranks in 1usize..5,
            rows_per_micro_batch in 1usize..4,
        ) {
            let layout = Layout {
                ranks,
                row_tokens: 100,
                rows_per_micro_batch,
                linear_cost: 10.0,
                quadratic_cost: 1.0,
                max_imbalance: 1.0,
            };
            let costs: Vec<f64> = lengths.iter().map(|length| layout.cost(*length)).collect();
            let width = layout.rows_per_step().min(lengths.len());
            let mut steps: Vec<Vec<(i64, f64, Vec<i64>)>> = Vec::new();
            for item in longest_first(&lengths) {
                let (length, cost) = (lengths[item as usize], costs[item as usize]);
                let fits = |rows: &Vec<(i64, f64, Vec<i64>)>| rows.iter().any(|row| row.0 >= length);
                if !steps.iter().any(fits) {
                    steps.push(vec![(100, 0.0, Vec::new()); width]);
                }
                let rows = steps.iter_mut().find(|rows| fits(rows)).unwrap();
                let row = rows.iter_mut().filter(|row| row.0 >= length).min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
                row.0 -= length;
                row.1 += cost;
                row.2.push(i64::from(item));
            }
            let filled = fill_steps(&lengths, &costs, &layout);
            prop_assert_eq!(filled.steps.len(), steps.len());
            let rows = steps.into_iter().flatten().map(|(_, _, mut items)| { items.sort_unstable(); items });
            prop_assert_eq!(rows.collect::<Vec<_>>(), (0..filled.bins.count()).map(|bin| filled.bins.bin(bin).to_vec()).collect::<Vec<_>>());
        }
    }
}
