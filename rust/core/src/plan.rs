//! The plan of a learner step: segments over ranks, micro-batches and rows.

use std::cmp::Reverse;

use crate::error::{Error, Result};
use crate::pack::{check_lengths, longest_first, pack};

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
}

impl Layout {
    fn cost(&self, length: i64) -> f64 {
        let n = length as f64;
        self.linear_cost * n + self.quadratic_cost * n * n
    }

    fn check(&self) -> Result<()> {
        let wrong = |name: &str, value: f64, expected: &str| {
            invalid(format!("{name}: {value} must be {expected}"))
        };
        for (name, value) in [
            ("ranks", self.ranks),
            ("rows_per_micro_batch", self.rows_per_micro_batch),
        ] {
            if !(1..=1 << 20).contains(&value) {
                return wrong(name, value as f64, "in 1..=1048576");
            }
        }
        if self.row_tokens > i64::from(i32::MAX) {
            return wrong("row_tokens", self.row_tokens as f64, "at most 2147483647");
        }
        for (name, value) in [
            ("linear_cost", self.linear_cost),
            ("quadratic_cost", self.quadratic_cost),
        ] {
            if !value.is_finite() || value < 0.0 {
                return wrong(name, value, "finite and not negative");
            }
        }
        Ok(())
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
    /// Hash of the input and of everything above; equal on two ranks only if their plans are.
    pub hash: u64,
}

/// Lays `lengths` out over ranks and micro-batches; a function of its input alone.
///
/// Every rank gets the same number of micro-batches, so that no rank waits in a collective the others never enter. Two
/// layouts are tried: the rows of [`pack`] dealt by falling cost, and segments by falling length into the cheapest rank
/// that has room. Fewer micro-batches win, then the shorter time when every micro-batch takes as long as its slowest
/// rank. A rank may have fewer rows in a micro-batch, or none at all; none is empty on all ranks.
///
/// # Errors
/// [`Error::Validation`] for a length outside `1..=row_tokens`, for no lengths, and for parameters out of range.
pub fn plan(lengths: &[i64], layout: &Layout) -> Result<Plan> {
    layout.check()?;
    check_lengths(lengths, layout.row_tokens, "row_tokens")?;
    if lengths.is_empty() {
        return invalid("lengths: empty; a plan needs at least one segment".into());
    }
    let costs: Vec<f64> = lengths.iter().map(|&length| layout.cost(length)).collect();
    let dealt = Draft::dealt(lengths, &costs, layout)?;
    let filled = Draft::filled(lengths, &costs, layout);
    let worth = |draft: &Draft| (draft.cells.len(), draft.lock_step());
    let better = if worth(&filled) < worth(&dealt) {
        filled
    } else {
        dealt
    };
    Ok(better.plan(lengths, layout))
}

fn invalid<T>(text: String) -> Result<T> {
    Err(Error::Validation(text))
}

/// A micro-batch of one rank.
#[derive(Clone, Default)]
struct Cell {
    cost: f64,
    /// Of `Draft::row_of`.
    rows: Vec<u32>,
    /// The most room of its rows, one that may still be begun among them.
    room: i64,
}

/// Which segments share a row, and which rows a micro-batch; which rank has it is open.
struct Draft {
    /// Row of each segment, counted over the whole step of the learner.
    row_of: Vec<u32>,
    /// Cells of each micro-batch, as many as there are ranks that can have some.
    cells: Vec<Vec<Cell>>,
}

impl Draft {
    /// The rows of `pack` by falling cost, so that rows of like cost share a micro-batch; there each goes to the cheapest
    /// cell that may have one more.
    fn dealt(lengths: &[i64], costs: &[f64], layout: &Layout) -> Result<Self> {
        let bins = pack(lengths, layout.row_tokens)?;
        let mut row_of = vec![0; lengths.len()];
        let mut row_costs = vec![0.0; bins.count()];
        for (row, cost) in row_costs.iter_mut().enumerate() {
            for &item in bins.bin(row) {
                row_of[item as usize] = row as u32;
                *cost += costs[item as usize];
            }
        }
        let mut rows: Vec<usize> = (0..bins.count()).collect();
        rows.sort_by(|&a, &b| row_costs[b].total_cmp(&row_costs[a]).then(a.cmp(&b)));
        let micro_batch = |rows: &[usize]| {
            let mut cells = vec![Cell::default(); layout.ranks.min(rows.len())];
            for &row in rows {
                let open = |cell: &&mut Cell| cell.rows.len() < layout.rows_per_micro_batch;
                let cells = cells.iter_mut().filter(open);
                if let Some(cell) = cells.min_by(|a, b| a.cost.total_cmp(&b.cost)) {
                    cell.rows.push(row as u32);
                    cell.cost += row_costs[row];
                }
            }
            cells
        };
        let batches = rows.chunks(layout.ranks * layout.rows_per_micro_batch);
        Ok(Self {
            row_of,
            cells: batches.map(micro_batch).collect(),
        })
    }

    /// Longest first, each segment into the first micro-batch with room for it, there into the cheapest cell that has
    /// room, and there into the emptiest row: rows of a micro-batch are padded to the longest of them.
    fn filled(lengths: &[i64], costs: &[f64], layout: &Layout) -> Self {
        let width = layout.ranks.min(lengths.len());
        let empty = Cell {
            room: layout.row_tokens,
            ..Cell::default()
        };
        let mut row_of = vec![0; lengths.len()];
        let mut cells: Vec<Vec<Cell>> = Vec::new();
        let (mut row_room, mut rooms) = (Vec::<i64>::new(), Rooms::default());
        for item in longest_first(lengths) {
            let (item, length) = (item as usize, lengths[item as usize]);
            let cell = loop {
                let step = rooms.first(length).unwrap_or_else(|| {
                    cells.push(vec![empty.clone(); width]);
                    rooms.push(layout.row_tokens)
                });
                let fits = cells[step].iter().enumerate();
                let fits = fits.filter(|(_, cell)| cell.room >= length);
                match fits.min_by(|a, b| a.1.cost.total_cmp(&b.1.cost)) {
                    Some((at, _)) => break &mut cells[step][at],
                    None => rooms.lower(step, cells[step].iter().map(|cell| cell.room).max()),
                }
            };
            if cell.rows.len() < layout.rows_per_micro_batch {
                cell.rows.push(row_room.len() as u32);
                row_room.push(layout.row_tokens);
            }
            let emptiest = |&&row: &&u32| Reverse(row_room[row as usize]);
            let row = cell.rows.iter().min_by_key(emptiest).map_or(0, |&row| row);
            row_of[item] = row;
            row_room[row as usize] -= length;
            cell.cost += costs[item];
            if cell.rows.len() == layout.rows_per_micro_batch {
                let left = cell.rows.iter().map(|&row| row_room[row as usize]);
                cell.room = left.max().unwrap_or(0);
            }
        }
        Self { row_of, cells }
    }

    /// Time of the step when each micro-batch takes as long as its slowest rank.
    fn lock_step(&self) -> f64 {
        let slowest = |cells: &Vec<Cell>| cells.iter().map(|cell| cell.cost).fold(0.0, f64::max);
        self.cells.iter().map(slowest).sum()
    }

    /// Gives each micro-batch's heaviest cell to the rank with the least so far, and so on; that evens out the ranks' sums.
    fn plan(mut self, lengths: &[i64], layout: &Layout) -> Plan {
        let (n, n_micro_batches) = (lengths.len(), self.cells.len());
        let mut plan = Plan {
            rank: vec![0; n],
            micro_batch: vec![0; n],
            row: vec![0; n],
            position: vec![0; n],
            n_micro_batches,
            costs: vec![0.0; layout.ranks * n_micro_batches],
            hash: 0,
        };
        let rows = 1 + self.row_of.iter().copied().max().unwrap_or(0) as usize;
        let (mut place, mut filled) = (vec![(0, 0, 0); rows], vec![0i64; rows]);
        let mut ranks: Vec<(f64, usize)> = (0..layout.ranks).map(|rank| (0.0, rank)).collect();
        for (step, cells) in self.cells.iter_mut().enumerate() {
            cells.sort_by(|a, b| b.cost.total_cmp(&a.cost));
            ranks.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            for ((load, rank), cell) in ranks.iter_mut().zip(cells) {
                *load += cell.cost;
                plan.costs[*rank * n_micro_batches + step] = cell.cost;
                for (slot, &row) in cell.rows.iter().enumerate() {
                    place[row as usize] = (*rank as i32, step as i32, slot as i32);
                }
            }
        }
        for (item, &row) in self.row_of.iter().enumerate() {
            let (rank, step, slot) = place[row as usize];
            (plan.rank[item], plan.micro_batch[item], plan.row[item]) = (rank, step, slot);
            plan.position[item] = filled[row as usize] as i32;
            filled[row as usize] += lengths[item];
        }
        plan.hash = hash(lengths, layout, &plan);
        plan
    }
}

/// No less than the most room of a cell in each micro-batch: made smaller when a segment turns out not to fit, so that
/// filling a row costs nothing here. The first micro-batch that may have room is found in a tree of maxima with its root
/// at 1.
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

    fn lower(&mut self, step: usize, room: Option<i64>) {
        let mut at = self.leaves() + step;
        self.most[at] = room.unwrap_or(0);
        while at > 1 {
            at /= 2;
            self.most[at] = self.most[2 * at].max(self.most[2 * at + 1]);
        }
    }

    /// Adds a micro-batch.
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
        self.lower(step, Some(room));
        step
    }
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
    use super::Rooms;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_tree_finds_the_first_with_room(
            ops in prop::collection::vec((any::<prop::sample::Index>(), 0i64..50, any::<bool>()), 1..60), length in 0i64..50
        ) {
            let (mut tree, mut list) = (Rooms::default(), Vec::new());
            for (at, room, push) in ops {
                if push || list.is_empty() {
                    prop_assert_eq!(tree.push(room), list.len());
                    list.push(room);
                } else {
                    let at = at.index(list.len());
                    tree.lower(at, Some(room));
                    list[at] = room;
                }
                let first = list.iter().position(|&room| room >= length);
                prop_assert_eq!(tree.first(length.max(1)), if length > 0 { first } else { list.iter().position(|&room| room >= 1) });
            }
        }
    }
}
