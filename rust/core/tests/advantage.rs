//! The span-wise kernel against the plain recurrence, one token at a time.

use proptest::prelude::*;
use sao_core::advantage::{advantages, Batch, CrossSegment, Lambda, Parameters};

type Segment = Vec<(bool, f32)>;

fn parameters(cross_segment: CrossSegment, skip_observations: bool) -> Parameters {
    Parameters {
        gamma: 0.95,
        lambda_policy: Lambda::Adaptive { alpha: 1.5 },
        lambda_critic: 0.9,
        cross_segment,
        skip_observations,
    }
}

/// One trajectory the slow way; per token (advantage, target).
fn plain(
    segments: &[Segment],
    reward: f64,
    bootstrap: f64,
    chosen: &Parameters,
) -> Vec<(f64, f64)> {
    let actions = |segment: &Segment| segment.iter().filter(|(action, _)| *action).count();
    let total: usize = segments.iter().map(actions).sum();
    let mut out = vec![Vec::new(); segments.len()];
    let lambda = chosen.lambda_policy.of(total);
    let (mut next, mut a, mut c, mut later, mut started) = (bootstrap, 0.0, 0.0, 0, false);
    for (index, segment) in segments.iter().enumerate().rev() {
        let last = segment.iter().rposition(|(action, _)| *action);
        let first = segment.iter().position(|(action, _)| *action);
        let fresh = chosen.cross_segment != CrossSegment::Chained;
        if fresh {
            (next, a, c) = (bootstrap, 0.0, 0.0);
        }
        let factor = match chosen.cross_segment {
            CrossSegment::Paper => (chosen.gamma * lambda).powi(later),
            CrossSegment::Chained | CrossSegment::Independent => 1.0,
        };
        let mut rows = vec![(0.0, 0.0); segment.len()];
        for (t, &(action, value)) in segment.iter().enumerate().rev() {
            let inside =
                last.is_some_and(|last| t <= last) && first.is_some_and(|first| t >= first);
            if !inside || (!action && chosen.skip_observations) {
                continue;
            }
            let earned = if last == Some(t) && (fresh || !started) {
                reward
            } else {
                0.0
            };
            started = true;
            let value = f64::from(value);
            let delta = earned + chosen.gamma * next - value;
            a = delta + chosen.gamma * lambda * a;
            c = delta + chosen.gamma * chosen.lambda_critic * c;
            next = value;
            if action {
                rows[t] = (factor * a, c + value);
            }
        }
        later += actions(segment) as i32;
        out[index] = rows;
    }
    out.concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn agrees_with_the_plain_recurrence(
        trajectories in prop::collection::vec(
            (prop::collection::vec(prop::collection::vec((any::<bool>(), -3f32..3.0), 0..20), 0..5), -2f32..2.0, -2f32..2.0),
            1..6,
        ),
        mode in 0usize..3,
        skip in any::<bool>(),
        clear in any::<bool>(),
    ) {
        let chosen = parameters([CrossSegment::Paper, CrossSegment::Chained, CrossSegment::Independent][mode], skip);
        let (mut values, mut mask, mut cuts, mut first) = (Vec::new(), Vec::new(), vec![0i64], vec![0i64]);
        let mut wanted = Vec::new();
        for (segments, reward, bootstrap) in &trajectories {
            for segment in segments {
                mask.extend(segment.iter().map(|(action, _)| u8::from(*action)));
                // Never read where the mask is 0, unless every position is a step.
                values.extend(segment.iter().map(|(action, value)| if *action || !skip { *value } else { f32::NAN }));
                cuts.push(values.len() as i64);
            }
            first.push(cuts.len() as i64 - 1);
            wanted.extend(plain(segments, f64::from(*reward), f64::from(*bootstrap), &chosen));
        }
        let rewards: Vec<f32> = trajectories.iter().map(|(_, reward, _)| *reward).collect();
        let bootstrap: Vec<f32> = trajectories.iter().map(|(_, _, bootstrap)| *bootstrap).collect();
        let batch = Batch {
            values: &values,
            action_mask: &mask,
            segment_offsets: &cuts,
            trajectory_offsets: &first,
            rewards: &rewards,
            bootstrap: Some(&bootstrap),
            after: None,
            turn_rewards: (&[], &[]),
        };
        let before = if clear { f32::NAN } else { 0.0 };
        let (mut out, mut targets) = (vec![before; values.len()], vec![before; values.len()]);
        let lambdas = advantages(&batch, &chosen, clear, &mut out, &mut targets).expect("valid");
        prop_assert_eq!(lambdas.len(), trajectories.len());
        for (t, (advantage, target)) in wanted.into_iter().enumerate() {
            prop_assert!((f64::from(out[t]) - advantage).abs() < 1e-5, "advantage of token {}", t);
            prop_assert!((f64::from(targets[t]) - target).abs() < 1e-5, "target of token {}", t);
        }
    }
}

#[test]
fn the_first_wrong_value_is_named() {
    let batch = Batch {
        values: &[0.0, 0.5, f32::NAN, 0.5, f32::INFINITY],
        action_mask: &[0, 1, 1, 0, 1],
        segment_offsets: &[0, 1, 3, 5],
        trajectory_offsets: &[0, 1, 2, 3],
        rewards: &[0.0; 3],
        bootstrap: None,
        after: None,
        turn_rewards: (&[], &[]),
    };
    let (mut out, mut targets) = ([0.0; 5], [0.0; 5]);
    let chosen = parameters(CrossSegment::Paper, true);
    let error = advantages(&batch, &chosen, true, &mut out, &mut targets).expect_err("not finite");
    assert_eq!(
        error.to_string(),
        "values[2]: NaN at a token of trajectory 1 is not finite"
    );
}
