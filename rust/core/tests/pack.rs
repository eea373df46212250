//! Packing and plans on random and adversarial lengths.

use proptest::prelude::*;
use sao_core::pack::{pack, plan, Layout, Plan};

fn layout(ranks: usize, row_tokens: i64, rows_per_micro_batch: usize) -> Layout {
    Layout {
        ranks,
        row_tokens,
        rows_per_micro_batch,
        linear_cost: 100.0,
        quadratic_cost: 1.0,
        lock_step_slack: 0.0,
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

/// (heaviest rank, time in lock step), as multiples of a perfect split.
fn quality(plan: &Plan, layout: &Layout) -> (f64, f64) {
    let (ranks, steps) = (layout.ranks, plan.n_micro_batches);
    let total: f64 = plan.costs.iter().sum();
    let heaviest = plan
        .costs
        .chunks(steps)
        .map(|costs| costs.iter().sum::<f64>())
        .fold(0.0, f64::max);
    let slowest = |step: usize| {
        (0..ranks)
            .map(|rank| plan.costs[rank * steps + step])
            .fold(0.0, f64::max)
    };
    let time: f64 = (0..steps).map(slowest).sum();
    assert!(
        heaviest >= plan.least_cost * (1.0 - 1e-9),
        "the bound holds"
    );
    let share = ranks as f64 / total;
    (heaviest * share, time * share)
}

#[test]
fn with_slack_the_sums_of_heavy_tailed_segments_become_even() {
    // One segment in eight is long; two ranks get an odd one out.
    let lengths: Vec<i64> = (0..200)
        .map(|i| if i % 8 == 0 { 900 } else { 20 + i % 50 })
        .collect();
    let strict = layout(8, 1000, 1);
    let even = Layout {
        lock_step_slack: 0.5,
        ..strict
    };
    let before = quality(&check(&lengths, &strict), &strict).0;
    let after = quality(&check(&lengths, &even), &even).0;
    let bound = check(&lengths, &even).least_cost * 8.0;
    let total: f64 = check(&lengths, &even).costs.iter().sum();
    assert!(
        after <= before && after / (bound / total) < 1.25,
        "{before} to {after}"
    );
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
        check(&lengths, &layout(ranks, 64, rows));
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
