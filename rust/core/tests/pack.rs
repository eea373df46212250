//! Packing and plans on random and adversarial lengths.

use proptest::prelude::*;
use sao_core::pack::pack;
use sao_core::plan::{plan, Layout, Plan};

fn layout(ranks: usize, row_tokens: i64, rows_per_micro_batch: usize) -> Layout {
    Layout {
        ranks,
        row_tokens,
        rows_per_micro_batch,
        linear_cost: 100.0,
        quadratic_cost: 1.0,
    }
}

/// Fill of every row, `[micro_batch][rank][row]`, after checking that segments touch without gap or overlap.
fn rows(plan: &Plan, lengths: &[i64], layout: &Layout) -> Vec<Vec<Vec<i64>>> {
    let empty = vec![vec![Vec::new(); layout.rows_per_micro_batch]; layout.ranks];
    let mut segments = vec![empty; plan.n_micro_batches];
    for (i, &length) in lengths.iter().enumerate() {
        let cell = &mut segments[plan.micro_batch[i] as usize][plan.rank[i] as usize];
        cell[plan.row[i] as usize].push((i64::from(plan.position[i]), length));
    }
    let fill = |mut row: Vec<(i64, i64)>| {
        row.sort_unstable();
        row.into_iter().fold(0, |end, (start, length)| {
            assert_eq!(start, end, "gap or overlap");
            end + length
        })
    };
    let rank = |rows: Vec<Vec<(i64, i64)>>| rows.into_iter().map(fill).collect();
    segments
        .into_iter()
        .map(|ranks| ranks.into_iter().map(rank).collect())
        .collect()
}

fn check(lengths: &[i64], layout: &Layout) -> Plan {
    let plan = plan(lengths, layout).expect("valid");
    let filled = rows(&plan, lengths, layout);
    for ranks in &filled {
        assert!(
            ranks.iter().flatten().any(|&fill| fill > 0),
            "a micro-batch without work"
        );
        assert!(ranks
            .iter()
            .flatten()
            .all(|&fill| fill <= layout.row_tokens));
    }
    let bins = pack(lengths, layout.row_tokens).expect("valid").count();
    assert!(plan.n_micro_batches <= bins.div_ceil(layout.ranks * layout.rows_per_micro_batch));
    plan
}

/// Time of these cells, `[step][rank]`, when each micro-batch takes as long as its slowest rank.
fn lock_step(cells: &[Vec<f64>]) -> f64 {
    let slowest = cells
        .iter()
        .map(|step| step.iter().copied().fold(0.0, f64::max));
    slowest.sum()
}

/// The least time in lock step of all ways to lay these segments out in so many steps.
fn least_time(lengths: &[i64], layout: &Layout, steps: usize) -> f64 {
    let places = layout.ranks * steps;
    let mut least = f64::INFINITY;
    for mut way in 0..places.pow(lengths.len() as u32) {
        let mut cells = vec![vec![0.0; layout.ranks]; steps];
        let mut fill = vec![0; places];
        for &length in lengths {
            let (place, wide) = (way % places, length as f64);
            fill[place] += length;
            cells[place / layout.ranks][place % layout.ranks] +=
                layout.linear_cost * wide + layout.quadratic_cost * wide * wide;
            way /= places;
        }
        if fill.iter().all(|tokens| *tokens <= layout.row_tokens) {
            least = least.min(lock_step(&cells));
        }
    }
    least
}

#[test]
fn small_plans_are_near_the_best_there_are() {
    let (mut state, mut ratios) = (7u64, Vec::new());
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..80 {
        let ranks = 2 + random(2) as usize;
        let lengths: Vec<i64> = (0..7 - ranks as u64 / 3)
            .map(|_| 1 + (random(64) * random(64) / 40) as i64)
            .collect();
        let layout = layout(ranks, 100, 1);
        let plan = check(&lengths, &layout);
        let steps = plan.n_micro_batches;
        if ranks * steps > 6 {
            continue;
        }
        let of = |step: usize| move |rank: usize| rank * steps + step;
        let cells: Vec<Vec<f64>> = (0..steps)
            .map(|step| (0..ranks).map(of(step)).map(|at| plan.costs[at]).collect())
            .collect();
        ratios.push(lock_step(&cells) / least_time(&lengths, &layout, steps));
    }
    ratios.sort_by(f64::total_cmp);
    let (count, worst) = (ratios.len(), ratios[ratios.len() - 1]);
    let mean = ratios.iter().sum::<f64>() / count as f64;
    assert!(count > 40 && ratios[0] > 1.0 - 1e-9);
    assert!(mean < 1.02 && worst < 1.2, "{mean}, {worst}");
}

proptest! {
    #[test]
    fn every_item_is_in_one_bin(lengths in prop::collection::vec(1i64..=100, 0..300)) {
        let bins = pack(&lengths, 100).expect("valid");
        let mut seen = vec![false; lengths.len()];
        for bin in 0..bins.count() {
            prop_assert!(!bins.bin(bin).is_empty());
            prop_assert!(bins.bin(bin).iter().map(|&item| lengths[item as usize]).sum::<i64>() <= 100);
            for &item in bins.bin(bin) {
                prop_assert!(!std::mem::replace(&mut seen[item as usize], true));
            }
        }
        prop_assert!(seen.into_iter().all(|seen| seen));
    }

    #[test]
    fn plans_are_whole(
        lengths in prop::collection::vec(prop_oneof![1i64..=8, 1i64..=64, Just(64)], 1..200),
        ranks in 1usize..9,
        rows in 1usize..5,
    ) {
        let layout = layout(ranks, 64, rows);
        let plan = check(&lengths, &layout);
        prop_assert_eq!(plan, check(&lengths, &layout), "equal input gives an equal plan");
    }
}

#[test]
fn adversarial_lengths() {
    let tiny = vec![1; 700];
    let one_full = [vec![64], tiny.clone()].concat();
    let just_over_half = vec![33; 41];
    let thirds = [vec![22; 20], vec![21; 20], vec![20; 20]].concat();
    for lengths in [
        vec![1],
        vec![64],
        vec![64; 9],
        tiny,
        one_full,
        just_over_half,
        thirds,
    ] {
        for ranks in [1, 2, 3, 8, 64] {
            for rows in [1, 2, 7] {
                check(&lengths, &layout(ranks, 64, rows));
            }
        }
    }
}

#[test]
fn a_heavy_segment_does_not_idle_the_others_more_than_it_must() {
    // Full rows share one micro-batch and short ones the other, so no rank waits for another in either.
    let lengths = [vec![64; 8], vec![8; 64]].concat();
    let plan = check(&lengths, &layout(8, 64, 1));
    assert_eq!(plan.n_micro_batches, 2);
    for step in 0..2 {
        let costs: Vec<f64> = (0..8).map(|rank| plan.costs[rank * 2 + step]).collect();
        assert!(
            costs.iter().all(|&cost| (cost - costs[0]).abs() < 1e-9),
            "{costs:?}"
        );
    }
}

#[test]
fn the_hash_is_of_the_lengths_too() {
    let of = |lengths: &[i64]| check(lengths, &layout(2, 16, 1));
    let (plan, other) = (of(&[5, 9, 2, 16, 7, 7]), of(&[5, 9, 2, 16, 7, 6]));
    assert_eq!(plan.hash, of(&[5, 9, 2, 16, 7, 7]).hash);
    assert_ne!(plan.hash, other.hash);
}
