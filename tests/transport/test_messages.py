"""Encoding, limits and rubbish."""

from __future__ import annotations

import contextlib
import pickle
import random
import time
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest

from sao.errors import WireError
from sao.transport.encoding import MAX_DEPTH, MAX_HEADER_BYTES, decode, encode
from sao.transport.messages import (
    Ack,
    Commit,
    FinishedRollout,
    KeptTurn,
    Message,
    Slots,
    Snapshot,
    StepReport,
    Stop,
    TaskEntry,
    Tasks,
    WeightsRef,
)

LIMIT = 1 << 20


def packed(**changes: object) -> bytes:
    header = {"v": 1, "kind": "slots", "seq": 1, "re": 0, "low": 0, "body": {"free": 1}}
    return msgpack.packb({**header, **changes})


def read(*frames: Any) -> Message:
    return decode(frames, LIMIT).message()


def test_round_trip_keeps_everything_and_copies_no_frame() -> None:
    payload = bytearray(b"x" * 1000)
    task = TaskEntry(1, 2, -3, "train", turns=4)
    wire = encode(Tasks((task,), frames=(b"h", memoryview(payload))), LIMIT, seq=7, re=3, low=2)
    received = decode(wire, LIMIT)
    header, message = received.header, received.message()
    assert (header.kind, header.seq, header.re, header.low) == ("tasks", 7, 3, 2)
    assert isinstance(message, Tasks) and message.tasks == (task,)
    payload[0] = ord("y")
    assert bytes(message.frames[1][:1]) == b"y"


def test_what_is_nested_comes_back_as_its_own_class() -> None:
    ref = WeightsRef(3, "/w/ü", "f3", "tcp://h:1")
    commit = Commit(1, 2, 3, 4, 5, {"loss": 0.5, "n": 3, "none": None}, ref)
    assert read(*encode(commit, LIMIT)) == commit
    assert read(*encode(Ack(), LIMIT)) == Ack()


def test_scalars_of_numpy_and_torch_are_plain_numbers() -> None:
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    metrics = {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(0.25), "d": np.float64(1.5)}
    assert read(*encode(StepReport(1, metrics), LIMIT)) == StepReport(1, {"a": 0.5, "b": 3, "c": 0.25, "d": 1.5})
    for bad in (np.zeros(2), torch.zeros(2), object()):
        with pytest.raises(WireError, match=r"step_report: the body cannot be encoded"):
            encode(StepReport(1, {"x": bad}), LIMIT)  # type: ignore[dict-item]
    with pytest.raises(WireError, match=r"stop: the body cannot be encoded"):
        encode(Stop("\ud800"), LIMIT)


def test_long_rollouts_pass_and_oversized_frames_name_sizes() -> None:
    two_megabytes = bytes(2_000_000)
    message = FinishedRollout(frames=(b"h", two_megabytes))
    assert len(decode(encode(message, 1 << 21), 1 << 21).message().frames[1]) == 2_000_000
    with pytest.raises(WireError, match=r"frame 1 of 2000000 bytes exceeds transport.max_message_bytes = 1048576"):
        encode(message, LIMIT)
    with pytest.raises(WireError, match=r"frame 0 of 2000000 bytes exceeds"):
        decode([packed(), two_megabytes], LIMIT)
    with pytest.raises(WireError, match=r"header of \d+ bytes exceeds"):
        encode(Stop("x" * MAX_HEADER_BYTES), LIMIT)
    with pytest.raises(WireError, match=r"header of \d+ bytes exceeds"):
        decode([bytes(MAX_HEADER_BYTES + 1)], LIMIT)
    with pytest.raises(WireError, match="message of 9 frames, expected 1 to 8"):
        decode([packed()] + [b""] * 8, LIMIT, max_frames=8)


def test_depth_is_limited() -> None:
    def nested(depth: int) -> object:
        value: object = 0
        for _ in range(depth):
            value = [value]
        return value

    assert isinstance(read(packed(kind="snapshot", body={"tree": {"x": nested(MAX_DEPTH - 1)}})), Snapshot)
    with pytest.raises(WireError, match=r"snapshot: .*nested deeper than 16"):
        read(packed(kind="snapshot", body={"tree": {"x": nested(MAX_DEPTH)}}))
    for deep in (b"\x91" * 10_000, b"\x81\xa1x" * 10_000):
        with pytest.raises(WireError, match="nested"):
            read(b"\x81\xa1x" + deep + b"\x00")
    in_no_field = b"\x82\xa4free\x01\xa5other" + b"\x91" * 900_000 + b"\x00"
    with pytest.raises(WireError, match="nested"):
        read(b"\x83\xa1v\x01\xa4kind\xa5slots\xa4body" + in_no_field)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        pickle.dumps({"kind": "slots"}),
        b"\xdd\xff\xff\xff\xff" + b"\x00" * 4,  # nine bytes that claim 2^32 - 1 elements
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb([1, 2, 3]),
        msgpack.packb({"kind": "slots"}),
        msgpack.packb({"v": 1, "kind": 3, "body": {}}),
        packed(body=[1]),
        packed(seq=-1),
        packed(seq=1.5),
        packed(seq=True),
        packed(re=2**63),
        packed(kind="snapshot", body={"tree": {"x": msgpack.ExtType(5, b"abc")}}),
        packed(kind="snapshot", body={"tree": {"x": msgpack.Timestamp(1, 2)}}),
        packed(body={"free": msgpack.Timestamp(1, 2)}),
        packed(kind="finished_rollout", body={"frames": [b"h", b"p"]}),
        packed() + b"\x00",
        packed()[:-1],
    ],
)
def test_rubbish_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        read(frame)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"v": 9}, "protocol version 9 is not supported, expected 1"),
        ({"kind": "dance"}, "unknown message kind 'dance'"),
        ({"body": {}}, r"slots\.free: required, not given"),
        ({"body": {"free": "3"}}, r"slots\.free: expected int, got str"),
        ({"body": {"free": True}}, r"slots\.free: expected int, got bool"),
        ({"body": {"free": -1}}, r"slots\.free: expected int >= 0, got -1"),
        ({"body": {"free": 1 << 40}}, r"slots\.free: expected int <= 1099511627775, got 1099511627776"),
        ({"body": {"free": 1, "received": 1.0}}, r"slots\.received: expected int \| null, got float"),
        ({"kind": "take", "body": {"n": 0}}, r"take\.n: expected int >= 1, got 0"),
        ({"kind": "new_weights", "body": {"weights": {"version": 1}}}, r"new_weights\.weights\.path: required"),
        ({"kind": "event", "body": {"level": "loud", "text": ""}}, r"event\.level: invalid enum value 'loud'"),
        ({"kind": "tasks", "body": {"tasks": [{"ordinal": -7}]}}, r"tasks\.tasks\[0\]\.ordinal: .* >= 0, got -7"),
        ({"seq": -1}, r"header\.seq: expected int >= 0, got -1"),
    ],
)
def test_faults_are_named(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(WireError, match=fault):
        read(packed(**changes))


def test_unknown_fields_are_ignored_and_frames_are_counted() -> None:
    assert read(packed(body={"free": 1, "more": "is ignored"})) == Slots(1)
    with pytest.raises(WireError, match=r"slots\.frames: expected 0, got 1"):
        read(packed(), b"x")
    with pytest.raises(WireError, match=r"kept_turn\.frames: expected 2, got 0"):
        read(*encode(KeptTurn(1, 1, 0, 5, 2), LIMIT))
    with pytest.raises(WireError, match=r"finished_rollout\.frames: expected 2 to \d+, got 1"):
        read(*encode(FinishedRollout(frames=(b"h",)), LIMIT))


def test_fuzzed_headers_are_errors_at_once_and_leave_no_memory() -> None:
    rng = random.Random(0)
    good = packed(kind="snapshot", body={"tree": {"free": 3, "list": list(range(50)), "text": "abc" * 20}})
    slowest = 0.0
    tracemalloc.start()
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        start = time.perf_counter()
        with contextlib.suppress(WireError):
            read(bytes(data))
        slowest = max(slowest, time.perf_counter() - start)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000
    assert slowest < 0.5  # a shared machine may pause the process; a hang would be seconds
