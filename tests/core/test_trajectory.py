"""Segments and trajectories: what is accepted, what is refused and how the refusal reads."""

import subprocess
import sys
import uuid

import numpy as np
import pytest

import sao
from sao.errors import ValidationError
from sao.trajectory import Segment, SegmentBuilder, Termination, Trajectory

NAN = float("nan")


def segment(ids=(5, 6, 7, 8), mask=(False, True, True, False), logprobs=(NAN, -0.5, -1.0, NAN), spans=((1, 3, 2),)):
    return Segment(
        "execution", np.asarray(ids), np.asarray(mask, bool), np.asarray(logprobs, np.float32), np.asarray(spans)
    )


def trajectory(**changes):
    values = {
        "id": uuid.uuid4().bytes,
        "task_ordinal": 3,
        "attempt": 0,
        "env": "lookup",
        "segments": (segment(), segment(spans=[(1, 2, 1), (2, 3, 4)])),
        "reward": 1.0,
        "termination": Termination("finished"),
        "temperature": 1.0,
    }
    return Trajectory(**{**values, **changes})


def test_arrays_are_typed_counted_and_read_only():
    s = segment()
    assert [a.dtype for a in (s.token_ids, s.action_mask, s.logprobs, s.version_spans)] == [
        np.int32,
        np.bool_,
        np.float32,
        np.int64,
    ]
    assert (s.n_tokens, s.n_actions) == (4, 2)
    for array in (s.token_ids, s.action_mask, s.logprobs, s.version_spans):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    t = trajectory()
    assert (t.n_tokens, t.n_actions, t.min_version, t.max_version) == (8, 4, 1, 4)


def test_a_writable_argument_is_copied_and_stays_writable():
    ids = np.array([5, 6, 7, 8], np.int32)
    s = segment(ids=ids)
    ids[0] = 99
    assert s.token_ids[0] == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda a: np.repeat(a, 2)[::2],
        lambda a: a[::-1].copy()[::-1],
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        lambda a: np.stack([a, a], axis=1)[:, 1],
        lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype),
    ],
    ids=["strided", "reversed", "big-endian", "column", "unaligned"],
)
def test_any_layout_gives_the_right_numbers(make):
    s = Segment(
        "summary",
        make(np.array([5, 6, 7, 8], np.int32)),
        make(np.array([False, True, True, False])),
        make(np.array([NAN, -0.5, -1.0, NAN], np.float32)),
        np.array([(1, 3, 2)]),
    )
    assert s.token_ids.tolist() == [5, 6, 7, 8]
    assert s.action_mask.tolist() == [False, True, True, False]
    assert s.logprobs[1:3].tolist() == [-0.5, -1.0]
    assert s.token_ids.flags.aligned and s.token_ids.dtype == np.dtype("=i4")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
def test_any_integer_dtype_serves_as_ids(dtype):
    assert segment(ids=np.array([5, 6, 7, 8], dtype)).token_ids.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ids", np.array([1.0, 2, 3, 4]), ["token_ids: dtype float64", "expected int32"]),
        ("ids", np.array(5), ["token_ids: dtype int64, shape ()"]),
        ("ids", np.ones((2, 2), int), ["token_ids: dtype int64, shape (2, 2), strides (16, 8)"]),
        ("ids", np.array([1, 2**31, 3, 4]), ["token_ids[1]: 2147483648 does not fit int32"]),
        ("ids", np.array([1, 2, 2**63, 4], np.uint64), ["token_ids[2]: 9223372036854775808 does not fit"]),
        ("ids", np.array([1, 2, -3, 4]), ["token_ids[2]: -3 is negative"]),
        ("ids", np.array([True] * 4), ["token_ids: dtype bool"]),
        ("ids", [], ["have lengths 0, 4 and 4"]),
        ("mask", np.array([0, 1, 1, 0], np.int64), ["action_mask: dtype int64", "expected bool"]),
        ("mask", np.array([True, True, True, False]), ["logprobs[0]: NaN is not finite"]),
        ("first", None, ["action_mask[0]: true; the first token is always context"]),
        ("mask", np.array([False, True, True]), ["have lengths 4, 3 and 4"]),
        ("logprobs", np.array([NAN, -0.5, -1.0, NAN]), ["logprobs: dtype float64", "expected float32"]),
        ("logprobs", np.float32([NAN, 0.3, -1.0, NAN]), ["logprobs[1]: 0.3 is positive"]),
        ("logprobs", np.float32([NAN, -1.0, 1e-7, NAN]), ["logprobs[2]: 0.0000001 is positive"]),
        ("logprobs", np.float32([NAN, -np.inf, -1.0, NAN]), ["logprobs[1]: -inf is not finite"]),
        ("logprobs", np.float32([NAN, NAN, -1.0, NAN]), ["logprobs[1]: NaN is not finite"]),
        ("logprobs", np.float32([0, -1, -1, NAN]), ["logprobs[0]: 0 on a context token"]),
        ("logprobs", [NAN, -1e60, -1.0, NAN], ["logprobs[1]: -inf is not finite"]),
        ("logprobs", [NAN, None, -1.0, NAN], ["logprobs: dtype object"]),
        ("spans", np.zeros((0, 3), int), ["sampled token 1 lies in no span"]),
        ("spans", [(1, 2, 5), (1, 3, 6)], ["version_spans[1]: (1, 3, 6) overlaps"]),
        ("spans", [(1, 2, 5), (2, 3, 4)], ["version_spans[1]: (2, 3, 4) goes back in version"]),
        ("spans", [(1, 3)], ["version_spans: dtype int64, shape (1, 2)", "shape (k, 3)"]),
        ("spans", [(1.0, 3.0, 2.0)], ["version_spans: dtype float64"]),
    ],
)
def test_a_broken_segment_names_field_index_and_value(field, value, words):
    arguments = {
        "ids": np.array([5, 6, 7, 8]),
        "mask": np.array([False, True, True, False]),
        "logprobs": np.float32([NAN, -0.5, -1.0, NAN]),
        "spans": np.array([(1, 3, 2)]),
    }
    if field == "first":
        arguments |= {"mask": np.array([True] * 4), "logprobs": np.float32([-1.0] * 4), "spans": np.array([(0, 4, 2)])}
    else:
        arguments[field] = value
    with pytest.raises(ValidationError) as caught:
        Segment("execution", *arguments.values())
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_kind_and_a_tensor_elsewhere_are_refused():
    with pytest.raises(ValidationError, match='kind: "other"'):
        Segment("other", *[getattr(segment(), n) for n in ("token_ids", "action_mask", "logprobs", "version_spans")])

    class Elsewhere:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    with pytest.raises(ValidationError, match=r"ids: Elsewhere is not an array: can't convert cuda:0"):
        SegmentBuilder().append_context(Elsewhere())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": None}, "reward: None with termination.kind"),
        ({"reward": NAN}, "reward: NaN is not finite"),
        ({"reward": "1"}, "reward: '1' is not a number or None"),
        ({"termination": Termination("failed", "env:timeout")}, "a failure has no reward"),
        ({"termination": Termination("failed"), "reward": None}, "a reason is given exactly for"),
        ({"termination": Termination("truncated")}, "a reason is given exactly for"),
        ({"termination": Termination("finished", "why")}, "a reason is given exactly for"),
        ({"termination": Termination("lost", "why")}, 'termination.kind: "lost"'),
        ({"termination": "finished"}, "termination: 'finished', expected Termination"),
        ({"id": b"short"}, "id: 5 bytes, expected 16"),
        ({"task_ordinal": -1}, "task_ordinal: -1 is negative"),
        ({"attempt": 2**63}, "attempt: 9223372036854775808 is not a 64-bit integer"),
        ({"env": ""}, "env: empty"),
        ({"segments": ()}, "without any sampled token"),
        ({"segments": 5}, "segments: int, expected a tuple"),
        ({"segments": (segment(), 5)}, r"segments\[1\]: int, expected Segment"),
        ({"temperature": -0.5}, "temperature: -0.5"),
        ({"temperature": NAN}, "temperature: NaN"),
        ({"turn_rewards": ((0, 0, 1.0),)}, r"turn_rewards\[0\]: \(0, 0, 1\) is not on a sampled token"),
        ({"turn_rewards": ((2, 1, 1.0),)}, r"turn_rewards\[0\]: \(2, 1, 1\) is not on a sampled token"),
        ({"turn_rewards": ((0, -1, 1.0),)}, "is not on a sampled token"),
        ({"turn_rewards": ((0, 2, 1.0), (0, 1, 1.0))}, r"turn_rewards\[1\]: \(0, 1, 1\) is not after"),
        ({"turn_rewards": ((0, 1, np.inf),)}, "is not finite"),
        ({"fingerprints": {-1: "ab"}}, r"fingerprints\[-1\]"),
        ({"fingerprints": {3: ""}}, r"fingerprints\[3\]"),
        ({"fingerprints": {"3": "ab"}}, r"fingerprints\['3'\]"),
        ({"timings_s": {"wait": -1.0}}, r'timings_s\["wait"\]: -1'),
        ({"metadata": {"a": [1]}}, r"metadata\['a'\]: \[1\], expected"),
        ({"metadata": {"a": 2**64}}, r"metadata\['a'\]: 18446744073709551616"),
        ({"metadata": {str(n): n for n in range(1025)}}, "metadata: 1025 entries, at most 1024"),
    ],
)
def test_a_broken_trajectory_names_field_and_value(changes, words):
    with pytest.raises(ValidationError, match=words):
        trajectory(**changes)


def test_a_failure_without_segments_is_a_trajectory_without_versions():
    failed = trajectory(segments=(), reward=None, termination=Termination("failed", "env:reset"))
    assert (failed.n_tokens, failed.n_actions) == (0, 0)
    with pytest.raises(ValidationError, match="no sampled token"):
        _ = failed.min_version


def test_the_builder_records_masks_where_tokens_are_sampled():
    # Template glue after each turn is context even though the same ids were sampled before.
    builder = SegmentBuilder()
    builder.append_context([1, 2])
    for turn in range(3):
        builder.append_sampled([7, 8, 9, 7], np.float32([-0.1, -0.2, -0.3, -0.4]), [(0, 4, turn)])
        builder.append_context([7, 8, 9])
    s = builder.build()
    expected = [False] * 2 + ([True] * 4 + [False] * 3) * 3
    assert s.action_mask.tolist() == expected
    assert s.n_actions == 12 and builder.n_tokens == 23
    assert np.isnan(s.logprobs[~s.action_mask]).all()
    assert s.version_spans.tolist() == [[2, 6, 0], [9, 13, 1], [16, 20, 2]]


def test_a_version_change_inside_a_completion_is_kept_and_equal_neighbours_are_joined():
    builder = SegmentBuilder()
    builder.append_context([1])
    builder.append_sampled(range(128), [-0.5] * 128, [(0, 57, 7), (57, 128, 8)])
    builder.append_sampled([1, 2], [-0.5, -0.5], [(0, 2, 8)])
    assert builder.build().version_spans.tolist() == [[1, 58, 7], [58, 131, 8]]


@pytest.mark.parametrize(
    ("ids", "logprobs", "spans", "words"),
    [
        ([1] * 5, [-1.0] * 4, [(0, 5, 0)], "ids and logprobs have lengths 5 and 4"),
        ([1] * 4, [-1.0] * 5, [(0, 4, 0)], "ids and logprobs have lengths 4 and 5"),
        ([1] * 4, [-1.0] * 4, [(0, 3, 0)], "cover 0..3 of 4 sampled tokens"),
        ([1] * 4, [-1.0] * 4, [(0, 2, 0), (3, 4, 0)], r"version_spans\[1\]: \(3, 4, 0\) does not start at 2"),
        ([1] * 4, [-1.0] * 4, [], "cover 0..0 of 4 sampled tokens"),
        ([1] * 4, [-1.0] * 4, [(0, 5, 0)], "cover 0..5 of 4 sampled tokens"),
    ],
)
def test_a_refused_append_leaves_the_builder_as_it_was(ids, logprobs, spans, words):
    builder = SegmentBuilder()
    builder.append_context([9])
    with pytest.raises(ValidationError, match=words):
        builder.append_sampled(ids, logprobs, spans)
    assert builder.n_tokens == 1 and builder.token_ids.tolist() == [9]


def test_sampling_without_context_and_an_empty_segment_are_refused():
    with pytest.raises(ValidationError, match="no context yet"):
        SegmentBuilder().append_sampled([1], [-1.0], [(0, 1, 0)])
    with pytest.raises(ValidationError, match="token_ids: empty"):
        SegmentBuilder().build()


def test_import_sao_is_quick_and_brings_no_torch():
    code = (
        "import time, sys; start = time.process_time(); import sao; took = time.process_time() - start;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(took)"
    )  # of CPU, the least of several: other processes take time, but none from here
    took = min(float(subprocess.check_output([sys.executable, "-c", code], timeout=60)) for _ in range(5))
    assert took < 0.06


def test_exports_resolve_and_unknown_names_do_not():
    assert sao.Trajectory is Trajectory
    assert set(sao.__all__) <= set(dir(sao))
    for name in sao.__all__:
        assert getattr(sao, name) is not None
    assert sao.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = sao.Nothing
