"""Encoding, limits and rubbish."""

from __future__ import annotations

import contextlib
import pickle
import random
import time
import tracemalloc

import msgpack
import numpy as np
import pytest

from sao.errors import WireError
from sao.transport.messages import MAX_DEPTH, MAX_HEADER_BYTES, Message, check, decode, encode

LIMIT = 1 << 20


def packed(**changes: object) -> bytes:
    header = {"v": 1, "kind": "slots", "seq": 1, "re": 0, "low": 0, "body": {"free": 1}}
    return msgpack.packb({**header, **changes})


def test_round_trip_keeps_everything_and_copies_no_frame() -> None:
    payload = bytearray(b"x" * 1000)
    message = Message("trajectory", {"a": [1, 2.5, None, "ü"]}, (b"h", memoryview(payload)), seq=7, re=3, low=2)
    wire = encode(message, LIMIT)
    back = decode(wire, LIMIT)
    assert (back.kind, back.body, back.seq, back.re, back.low) == ("trajectory", message.body, 7, 3, 2)
    payload[0] = ord("y")
    assert bytes(back.frames[1][:1]) == b"y"
    assert back.n_bytes == 1001


def test_scalars_of_numpy_and_torch_are_plain_numbers() -> None:
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    body = {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(0.25), "d": np.bool_(True)}
    assert decode(encode(Message("step", body), LIMIT), LIMIT).body == {"a": 0.5, "b": 3, "c": 0.25, "d": True}
    for bad in (np.zeros(2), torch.zeros(2), object(), {1, 2}):
        with pytest.raises(WireError, match=r"step: the body cannot be encoded"):
            encode(Message("step", {"x": bad}), LIMIT)


def test_long_rollouts_pass_and_oversized_frames_name_sizes() -> None:
    two_megabytes = bytes(2_000_000)
    assert decode(encode(Message("trajectory", {}, (b"h", two_megabytes)), 1 << 21), 1 << 21).n_bytes == 2_000_001
    with pytest.raises(WireError, match=r"frame 1 of 2000000 bytes exceeds transport.max_message_bytes = 1048576"):
        encode(Message("trajectory", {}, (b"h", two_megabytes)), LIMIT)
    with pytest.raises(WireError, match=r"frame 0 of 2000000 bytes exceeds"):
        decode([packed(), two_megabytes], LIMIT)
    with pytest.raises(WireError, match=r"header of \d+ bytes exceeds"):
        encode(Message("step", {"x": "x" * MAX_HEADER_BYTES}), LIMIT)
    with pytest.raises(WireError, match=r"header of \d+ bytes exceeds"):
        decode([bytes(MAX_HEADER_BYTES + 1)], LIMIT)
    with pytest.raises(WireError, match="9 frames exceeds the limit of 8"):
        decode([packed()] + [b""] * 8, LIMIT, max_frames=8)


def test_depth_is_limited() -> None:
    def nested(depth: int) -> object:
        value: object = 0
        for _ in range(depth):
            value = [value]
        return value

    assert decode([packed(body={"x": nested(MAX_DEPTH - 3)})], LIMIT)
    with pytest.raises(WireError, match="nested"):
        decode([packed(body={"x": nested(MAX_DEPTH)})], LIMIT)
    with pytest.raises(WireError):
        decode([b"\x81\xa1x" + b"\x91" * 10_000 + b"\x00"], LIMIT)


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
        msgpack.packb({"kind": 3, "body": {}}),
        packed(body=[1]),
        packed(seq=-1),
        packed(seq=1.5),
        packed(seq=True),
        packed(re=2**63),
        packed(body={"x": msgpack.ExtType(5, b"abc")}),
        packed(body={"x": msgpack.Timestamp(1, 2)}),
        packed() + b"\x00",
        packed()[:-1],
    ],
)
def test_rubbish_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode([frame], LIMIT)


def test_unknown_versions_kinds_and_fields_are_named() -> None:
    with pytest.raises(WireError, match="protocol version 9 is not supported, expected 1"):
        check(decode([packed(v=9)], LIMIT))
    with pytest.raises(WireError, match="unknown message kind 'dance'"):
        check(decode([packed(kind="dance")], LIMIT))
    with pytest.raises(WireError, match=r"slots\.free: required"):
        check(decode([packed(body={})], LIMIT))
    with pytest.raises(WireError, match=r"slots\.free: expected int, got str"):
        check(decode([packed(body={"free": "3"})], LIMIT))
    with pytest.raises(WireError, match=r"slots\.free: expected int, got bool"):
        check(decode([packed(body={"free": True})], LIMIT))
    with pytest.raises(WireError, match=r"slots\.received: expected int, got float"):
        check(decode([packed(body={"free": 1, "received": 1.0})], LIMIT))
    check(decode([packed(body={"free": 1, "more": "is passed through"})], LIMIT))


def test_fuzzed_headers_are_errors_at_once_and_leave_no_memory() -> None:
    rng = random.Random(0)
    good = packed(body={"free": 3, "list": list(range(50)), "text": "abc" * 20})
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
            check(decode([bytes(data)], LIMIT))
        slowest = max(slowest, time.perf_counter() - start)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000
    assert slowest < 0.5  # a shared machine may pause the process; a hang would be seconds
