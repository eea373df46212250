//! The hot paths, one by name, for counting instructions: `scripts/instructions.sh`. What lies in `measured` is counted.

use std::hint::black_box;
use std::time::Duration;

use sao_core::advantage::{advantages, Batch, CrossSegment, Lambda, Parameters};
use sao_core::buffer::{Buffer, Limits, Policy};
use sao_core::pack::pack;
use sao_core::plan::{plan, Layout};
use sao_core::trajectory::{Segment, SegmentKind, Span, TerminationKind, Trajectory};
use sao_core::wire::{decode, encode};

#[inline(never)]
fn measured<T>(run: impl FnOnce() -> T) -> T {
    black_box(run())
}

/// Heavy-tailed lengths without a generator of random numbers.
fn lengths(n: u64) -> Vec<i64> {
    (0..n)
        .map(|i| {
            let hash = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            100 + (hash % 1000 * (hash % 997) / 5) as i64
        })
        .collect()
}

/// Observations of 700 tokens and answers of 300.
fn mask(n: usize) -> Vec<u8> {
    (0..n).map(|i| u8::from(i % 1000 >= 700)).collect()
}

fn gae() {
    let (n, trajectories) = (64_000, 8);
    let (values, mask) = (vec![0.5f32; n], mask(n));
    let offsets: Vec<i64> = (0..=trajectories).map(|i| i * 8000).collect();
    let firsts: Vec<i64> = (0..=trajectories).collect();
    let batch = Batch {
        values: &values,
        action_mask: &mask,
        segment_offsets: &offsets,
        trajectory_offsets: &firsts,
        rewards: &[1.0; 8],
        bootstrap: None,
        after: None,
        turn_rewards: (&[], &[]),
    };
    let parameters = Parameters {
        gamma: 0.999,
        lambda_policy: Lambda::Fixed(0.95),
        lambda_critic: 1.0,
        cross_segment: CrossSegment::Chained,
        skip_observations: true,
    };
    let (mut out, mut targets) = (vec![0.0; n], vec![0.0; n]);
    measured(|| advantages(&batch, &parameters, false, &mut out, &mut targets)).expect("valid");
}

fn wire(decoding: bool) {
    let n = 32_768;
    let mask = mask(n);
    let ids: Vec<u8> = (0..n as i32).flat_map(i32::to_le_bytes).collect();
    let logprobs: Vec<u8> = mask
        .iter()
        .map(|&action| if action == 1 { -0.5 } else { f32::NAN })
        .flat_map(f32::to_le_bytes)
        .collect();
    let segment = Segment {
        kind: SegmentKind::Execution,
        token_ids: &ids,
        logprobs: &logprobs,
        action_mask: &mask,
        version_spans: vec![Span {
            start: 700,
            stop: n as i64,
            version: 3,
        }],
    };
    let trajectory = Trajectory {
        id: [1; 16],
        task_ordinal: 1,
        attempt: 0,
        env: "env".into(),
        segments: vec![segment],
        reward: Some(1.0),
        termination: TerminationKind::Finished,
        reason: String::new(),
        temperature: 1.0,
        turn_rewards: Vec::new(),
        after: Vec::new(),
        fingerprints: vec![(3, "0".repeat(32))],
        timings_s: Vec::new(),
        metadata: Vec::new(),
        sidecars: Vec::new(),
    };
    if decoding {
        let (header, payload) = encode(&trajectory).expect("valid");
        measured(|| decode(&header, &payload, sao_core::wire::Limits::default())).expect("valid");
    } else {
        measured(|| encode(&trajectory)).expect("valid");
    }
}

fn buffer() {
    let buffer = Buffer::new(Limits {
        max_trajectories: 2048,
        max_bytes: 1 << 24,
        policy: Policy::Block,
    })
    .expect("valid");
    let mut never = || Ok(Duration::from_secs(3600));
    measured(|| {
        for version in 0..1024 {
            buffer
                .put(b"header", b"payload", version / 128, &mut never)
                .expect("room");
        }
        buffer.advance(8, Some(2)).expect("open");
        for lease in buffer.take(512, &mut never).expect("ready") {
            lease.commit();
        }
    });
}

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    match name.as_str() {
        "pack" => drop(measured(|| pack(&lengths(8192), 200_000)).expect("valid")),
        "plan" => {
            let layout = Layout {
                ranks: 8,
                row_tokens: 200_000,
                rows_per_micro_batch: 1,
                linear_cost: 24576.0,
                quadratic_cost: 1.0,
            };
            drop(measured(|| plan(&lengths(512), &layout)).expect("valid"));
        }
        "advantages" => gae(),
        "encode" => wire(false),
        "decode" => wire(true),
        "buffer" => buffer(),
        other => {
            panic!("{other:?} is not pack, plan, advantages, encode, decode or buffer")
        }
    }
}
