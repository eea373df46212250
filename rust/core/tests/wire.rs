//! Trajectories survive their bytes, and no bytes from outside do harm.

use proptest::collection::vec;
use proptest::prelude::*;
use sao_core::layout::ALIGNMENT;
use sao_core::trajectory::{
    After, Meta, Segment, SegmentKind, Span, TerminationKind, Trajectory, TurnReward,
};
use sao_core::wire::{decode, encode, summary, Limits, MAX_HEADER_BYTES};
use sao_core::Error;

#[derive(Debug, Clone)]
struct Owned {
    kind: SegmentKind,
    ids: Vec<u8>,
    logprobs: Vec<u8>,
    mask: Vec<u8>,
    spans: Vec<Span>,
}

impl Owned {
    /// Context of `head` tokens, then turns of (sampled, observed) tokens; one span a turn.
    fn new(head: usize, turns: &[(usize, usize)], logprob: f32, version: i64) -> Self {
        let mut mask = vec![0; head];
        let mut spans = Vec::new();
        for (index, (sampled, observed)) in turns.iter().enumerate() {
            let start = mask.len();
            mask.resize(start + sampled, 1);
            spans.push(Span {
                start: start as i64,
                stop: mask.len() as i64,
                version: version + index as i64,
            });
            mask.resize(mask.len() + observed, 0);
        }
        let value = |flag: &u8| if *flag == 1 { logprob } else { f32::NAN };
        Self {
            kind: SegmentKind::Execution,
            ids: (0..mask.len() as i32).flat_map(i32::to_le_bytes).collect(),
            logprobs: mask.iter().map(value).flat_map(f32::to_le_bytes).collect(),
            mask,
            spans,
        }
    }

    fn view(&self) -> Segment<'_> {
        Segment {
            kind: self.kind,
            token_ids: &self.ids,
            logprobs: &self.logprobs,
            action_mask: &self.mask,
            version_spans: self.spans.clone(),
        }
    }
}

fn trajectory(segments: &[Owned]) -> Trajectory<'_> {
    Trajectory {
        id: *b"0123456789abcdef",
        task_ordinal: 7,
        attempt: 1,
        env: "lookup".into(),
        segments: segments.iter().map(Owned::view).collect(),
        reward: Some(0.5),
        termination: TerminationKind::Truncated,
        reason: "max_turns".into(),
        temperature: 1.0,
        turn_rewards: Vec::new(),
        after: Vec::new(),
        fingerprints: vec![(3, "ab".into())],
        timings_s: vec![("total".into(), 1.5)],
        metadata: vec![
            ("none".into(), Meta::Null),
            ("flag".into(), Meta::Bool(true)),
            ("low".into(), Meta::Int(i64::MIN)),
            ("float".into(), Meta::Float(-0.0)),
            ("text".into(), Meta::Text("ü".into())),
        ],
        sidecars: Vec::new(),
    }
}

fn two() -> Vec<Owned> {
    vec![
        Owned::new(3, &[(2, 1), (4, 0)], -0.25, 3),
        Owned::new(1, &[(70, 5)], -1e-7, 4),
    ]
}

fn wire_text(result: Result<impl std::fmt::Debug, Error>) -> String {
    match result {
        Err(Error::Wire(text)) => text,
        other => panic!("expected a wire error, got {other:?}"),
    }
}

fn rule(segment: &Segment) -> String {
    match segment.check(&"segments[1].") {
        Err(Error::Validation(text)) => text,
        other => panic!("expected a validation error, got {other:?}"),
    }
}

/// Puts the right checksum into a changed header, so that what lies behind the checksum is reached.
fn reseal(header: &mut [u8]) {
    let at = header.windows(6).position(|w| w == b"crc32c").unwrap() + 7;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&header[..at]), &header[at + 4..]);
    header[at..at + 4].copy_from_slice(&crc.to_be_bytes());
}

#[test]
fn every_field_survives() {
    let segments = two();
    let mut sent = trajectory(&segments);
    sent.turn_rewards = vec![TurnReward {
        segment: 1,
        position: 70,
        reward: -2.0,
    }];
    let (header, payload) = encode(&sent).unwrap();
    let (got, places) = decode(&header, &payload, Limits::default()).unwrap();
    assert_eq!(got, sent);
    for offset in places.iter().flat_map(|place| place.offsets) {
        assert_eq!(offset % ALIGNMENT, 0);
    }
    let summed = summary(&header, Limits::default()).unwrap();
    assert_eq!(
        (summed.id, summed.task_ordinal, summed.attempt),
        (sent.id, 7, 1)
    );
    let counts = summed.counts;
    assert_eq!((counts.tokens, counts.actions), (86, 76));
    assert_eq!((counts.min_version, counts.max_version), (Some(3), Some(4)));
    assert_eq!(summed.n_segments, 2);
    assert_eq!(
        (summed.termination, summed.payload_bytes),
        (sent.termination, payload.len())
    );
}

#[test]
fn a_failure_may_have_no_segments_and_has_no_reward() {
    let mut failed = trajectory(&[]);
    failed.termination = TerminationKind::Failed;
    let error = failed.check().unwrap_err().to_string();
    assert!(error.starts_with("reward: 0.5"), "{error}");
    failed.reward = None;
    let (header, payload) = encode(&failed).unwrap();
    assert!(payload.is_empty());
    let (got, _) = decode(&header, &payload, Limits::default()).unwrap();
    assert_eq!(got, failed);
}

#[test]
fn long_segments_cost_at_most_9_1_bytes_a_token() {
    for tokens in [8_000, 32_768, 200_000] {
        let segments = [Owned::new(1, &[(tokens - 1, 0)], -0.5, 0)];
        let (header, payload) = encode(&trajectory(&segments)).unwrap();
        let bytes = (header.len() + payload.len()) as f64;
        assert!(
            bytes / (tokens as f64) < 9.1,
            "{bytes} bytes for {tokens} tokens"
        );
    }
}

#[test]
fn truncation_anywhere_is_refused() {
    let segments = two();
    let (header, payload) = encode(&trajectory(&segments)).unwrap();
    for length in 0..header.len() {
        wire_text(decode(&header[..length], &payload, Limits::default()));
        wire_text(summary(&header[..length], Limits::default()));
    }
    for length in 0..payload.len() {
        wire_text(decode(&header, &payload[..length], Limits::default()));
    }
    for length in 48..header.len() {
        let mut cut = header[..length].to_vec();
        reseal(&mut cut);
        wire_text(decode(&cut, &payload, Limits::default()));
    }
}

#[test]
fn every_flipped_bit_is_found() {
    let segments = two();
    let (mut header, mut payload) = encode(&trajectory(&segments)).unwrap();
    for bit in 0..8 * header.len() {
        header[bit / 8] ^= 1 << (bit % 8);
        wire_text(decode(&header, &payload, Limits::default()));
        wire_text(summary(&header, Limits::default()));
        header[bit / 8] ^= 1 << (bit % 8);
    }
    for bit in 0..8 * payload.len() {
        payload[bit / 8] ^= 1 << (bit % 8);
        wire_text(decode(&header, &payload, Limits::default()));
        payload[bit / 8] ^= 1 << (bit % 8);
    }
    decode(&header, &payload, Limits::default()).unwrap();
}

#[test]
fn what_comes_after_a_segment_is_a_format_of_its_own_and_is_checked() {
    let segments = two();
    let mut sent = trajectory(&segments);
    let (plain, _) = encode(&sent).unwrap();
    let at = plain.windows(6).position(|w| w == b"format").unwrap() + 6;
    assert_eq!(plain[at], 1); // as before there was another one
    sent.after = vec![
        After {
            actions: 5,
            next: 1,
        },
        After {
            actions: 0,
            next: -1,
        },
    ];
    let (header, payload) = encode(&sent).unwrap();
    assert_eq!(header[at], 2);
    let (got, _) = decode(&header, &payload, Limits::default()).unwrap();
    assert_eq!(got, sent);
    for (index, actions, next, words) in [
        (0, 77, 1, "expected 0 to 76 action tokens"),
        (0, -1, 1, "expected 0 to 76 action tokens"),
        (1, 0, 1, "expected a later segment, or -1"),
        (0, 0, 2, "expected a later segment, or -1"),
    ] {
        let mut wrong = sent.clone();
        wrong.after[index] = After { actions, next };
        let text = encode(&wrong).unwrap_err().to_string();
        assert!(
            text.contains(&format!("after[{index}]: ({actions}, {next}): {words}")),
            "{text}"
        );
    }
    sent.after.pop();
    let text = encode(&sent).unwrap_err().to_string();
    assert!(text.contains("after: 1 entries for 2 segments"), "{text}");
}

#[test]
fn foreign_bytes_other_formats_and_sizes_are_named() {
    let segments = two();
    let (header, payload) = encode(&trajectory(&segments)).unwrap();
    let limits = Limits::default();
    let text = wire_text(decode(b"\x81\xa3abc\x01", &payload, limits));
    assert!(text.contains("not a trajectory"), "{text}");
    let mut newer = header.clone();
    let at = newer.windows(6).position(|w| w == b"format").unwrap() + 6;
    newer[at] = 9;
    assert_eq!(
        wire_text(decode(&newer, &payload, limits)),
        "format: 9, this build reads 1 and 2"
    );
    let mut longer = header.clone();
    longer.push(0xc0);
    reseal(&mut longer);
    assert_eq!(
        wire_text(decode(&longer, &payload, limits)),
        "header: 1 bytes after its end"
    );
    let trailing = [payload.clone(), vec![0]].concat();
    let (long, right) = (trailing.len(), payload.len());
    assert_eq!(
        wire_text(decode(&header, &trailing, limits)),
        format!("payload: {long} bytes, the header announces {right}")
    );
    let small = Limits {
        max_bytes: 100,
        ..limits
    };
    assert!(wire_text(decode(&header, &payload, small)).contains("at most 100"));
    let few = Limits {
        max_segments: 1,
        ..limits
    };
    assert!(wire_text(decode(&header, &payload, few)).contains("segments: 2, at most 1"));
    let huge = vec![0; MAX_HEADER_BYTES + 1];
    assert!(wire_text(summary(&huge, limits)).contains("header: 1048577 bytes"));
}

#[test]
fn rules_name_field_index_and_value() {
    let good = Owned::new(2, &[(3, 1)], -0.5, 4);
    good.view().check(&"").unwrap();
    let with = |change: &dyn Fn(&mut Owned)| {
        let mut bad = good.clone();
        change(&mut bad);
        rule(&bad.view())
    };
    let logprob = |at: usize, value: f32| {
        with(&|s| s.logprobs[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes()))
    };
    let span = |start, stop, version| Span {
        start,
        stop,
        version,
    };
    assert_eq!(
        logprob(3, 0.3),
        "segments[1].logprobs[3]: 0.3 is positive; log-probs of sampled tokens must be finite and <= 0"
    );
    let cases = [
        (logprob(2, f32::NAN), "logprobs[2]: NaN is not finite"),
        (
            logprob(2, f32::NEG_INFINITY),
            "logprobs[2]: -inf is not finite",
        ),
        (logprob(2, f32::INFINITY), "logprobs[2]: inf is not finite"),
        (logprob(1, 0.0), "logprobs[1]: 0 on a context token"),
        (
            with(&|s| s.ids[23] = 0x80),
            "token_ids[5]: -2147483643 is negative",
        ),
        (with(&|s| s.mask[4] = 2), "action_mask[4]: byte 2"),
        (with(&|s| s.mask.truncate(5)), "have lengths 6, 5 and 6"),
        (
            with(&|s| s.spans.clear()),
            "sampled token 2 lies in no span",
        ),
        (
            with(&|s| s.spans[0].stop = 4),
            "sampled token 4 lies in no span",
        ),
        (
            with(&|s| s.spans[0].version = -1),
            "version_spans[0]: (2, 5, -1) has a negative version",
        ),
        (with(&|s| s.spans[0].stop = 7), "outside 0..6"),
        (with(&|s| s.spans[0].start = -1), "negative position"),
        (with(&|s| s.spans.push(span(5, 6, 5))), "no sampled token"),
        (with(&|s| s.spans.push(span(4, 6, 5))), "overlaps"),
        (
            with(&|s| s.spans = vec![span(2, 3, 4), span(3, 5, 3)]),
            "goes back in version; the span before it has version 4",
        ),
        (
            with(&|s| *s = Owned::new(0, &[(3, 0)], -0.5, 0)),
            "action_mask[0]: true",
        ),
        (with(&|s| *s = Owned::new(0, &[], -0.5, 0)), "empty"),
    ];
    for (text, expected) in cases {
        assert!(
            text.starts_with("segments[1].") && text.contains(expected),
            "{text}"
        );
    }
}

#[test]
fn faults_are_found_at_every_position_of_a_long_segment() {
    // Blocks of the fast pass hold 16 ids; odd lengths reach their remainders.
    for tokens in [15, 16, 17, 63, 64, 65, 300] {
        for at in 1..tokens {
            let mut bad = Owned::new(1, &[(tokens - 1, 0)], -0.5, 0);
            bad.ids[4 * at + 3] = 0xff;
            let text = rule(&bad.view());
            assert!(
                text.starts_with(&format!("segments[1].token_ids[{at}]")),
                "{text}"
            );
            let mut bad = Owned::new(1, &[(tokens - 1, 0)], -0.5, 0);
            bad.logprobs[4 * at..4 * at + 4].copy_from_slice(&1e-30f32.to_le_bytes());
            let text = rule(&bad.view());
            assert!(
                text.starts_with(&format!("segments[1].logprobs[{at}]")),
                "{text}"
            );
        }
    }
}

#[test]
fn a_header_that_lies_about_counts_is_refused() {
    let segments = two();
    let (mut header, payload) = encode(&trajectory(&segments)).unwrap();
    let at = header.windows(6).position(|w| w == b"counts").unwrap() + 7;
    assert_eq!(&header[at..at + 4], &[86, 76, 3, 4]);
    header[at + 1] = 75;
    reseal(&mut header);
    let text = wire_text(decode(&header, &payload, Limits::default()));
    assert!(text.starts_with("counts: the header announces"), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_valid_trajectory_survives_bit_for_bit(
        shapes in vec((1usize..40, vec((1usize..90, 0usize..20), 1..6), 0u32..0x7f80_0000), 1..5),
        reward in prop::num::f64::NORMAL,
    ) {
        let segments: Vec<Owned> = shapes
            .iter()
            .map(|(head, turns, bits)| Owned::new(*head, turns, -f32::from_bits(*bits), 2))
            .collect();
        let mut sent = trajectory(&segments);
        sent.reward = Some(reward);
        let (header, payload) = encode(&sent).unwrap();
        let (got, _) = decode(&header, &payload, Limits::default()).unwrap();
        prop_assert_eq!(got, sent);
    }

    #[test]
    fn random_bytes_behind_a_right_checksum_never_panic(
        junk in vec(any::<u8>(), 0..300), at in 48usize..500, resize in any::<bool>(),
    ) {
        let segments = two();
        let (mut header, payload) = encode(&trajectory(&segments)).unwrap();
        let at = at.min(header.len());
        if resize {
            header.truncate(at);
            header.extend(&junk);
        } else {
            for (target, byte) in header[at..].iter_mut().zip(&junk) {
                *target = *byte;
            }
        }
        reseal(&mut header);
        if let Ok((got, _)) = decode(&header, &payload, Limits::default()) {
            prop_assert!(got.check().is_ok());
        }
    }
}
