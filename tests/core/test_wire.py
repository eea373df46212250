"""Trajectories as bytes: what goes in comes out bit for bit, without copies; bytes from outside do no harm."""

import dataclasses
import gc
import random
import sys
import threading
import time
import uuid
import weakref

import msgpack
import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sao import _core
from sao.errors import ValidationError, WireError
from sao.trajectory import Segment, SegmentBuilder, Termination, Trajectory, decode, encode

ARRAYS = ("token_ids", "action_mask", "logprobs", "version_spans")


def sample(turns=2, tokens=5, segments=2, **changes):
    built = []
    for index in range(segments):
        builder = SegmentBuilder("summary" if index % 2 else "execution")
        builder.append_context([1, 2, 3])
        for turn in range(turns):
            logprobs = -np.linspace(0, 3, tokens, dtype=np.float32)
            builder.append_sampled(np.arange(tokens), logprobs, [(0, tokens, turn)])
            builder.append_context([9])
        built.append(builder.build())
    values = {
        "id": uuid.uuid4().bytes,
        "task_ordinal": 3,
        "attempt": 1,
        "env": "lookup",
        "segments": tuple(built),
        "reward": 0.1,
        "termination": Termination("truncated", "max_turns"),
        "temperature": 0.7,
        "turn_rewards": ((0, 3, 0.5), (1, 4, -0.5)) if segments > 1 else (),
        "fingerprints": {0: "ab" * 16, 1: "cd" * 16},
        "timings_s": {"generate": 1.25},
        "metadata": {"a": None, "b": True, "c": -(2**63), "d": 0.5, "e": "é", "f": 2**63 - 1},
    }
    return Trajectory(**{**values, **changes})


def same(a: Trajectory, b: Trajectory) -> None:
    for name in Trajectory.__dataclass_fields__:
        if name != "segments":
            assert getattr(a, name) == getattr(b, name), name
    assert len(a.segments) == len(b.segments)
    for one, two in zip(a.segments, b.segments, strict=True):
        assert one.kind == two.kind
        for name in ARRAYS:
            left, right = getattr(one, name), getattr(two, name)
            assert left.dtype == right.dtype and left.shape == right.shape
            assert left.tobytes() == right.tobytes(), name


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = [_entry(value) for value in range(256)]


def reseal(header: bytes) -> bytes:
    """The header with the right checksum, so that what lies behind it is reached."""
    at = header.index(b"crc32c") + 7
    return header[:at] + crc32c(header[:at] + header[at + 4 :]).to_bytes(4, "big") + header[at + 4 :]


def test_everything_survives():
    sent = sample()
    same(decode(*encode(sent)), sent)
    of_agent = sample(after=tuple((3 - i, -1) for i in range(len(sent.segments))))
    same(decode(*encode(of_agent)), of_agent)
    assert decode(*encode(of_agent)).after == of_agent.after and decode(*encode(sent)).after == ()
    failed = sample(segments=0, reward=None, termination=Termination("failed", "env:reset"))
    same(decode(*encode(failed)), failed)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 50),
            st.lists(
                st.tuples(
                    st.lists(st.floats(max_value=0, allow_infinity=False, width=32), min_size=1, max_size=60),
                    st.integers(0, 9),
                ),
                min_size=1,
                max_size=5,
            ),
            st.integers(0, 2**40),
        ),
        min_size=1,
        max_size=4,
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text()),
        max_size=5,
    ),
    st.integers(0, 2**63 - 1),
)
def test_any_trajectory_survives_bit_for_bit(shapes, reward, metadata, ordinal):
    segments = []
    for head, turns, version in shapes:
        builder = SegmentBuilder()
        builder.append_context(range(head))
        for index, (logprobs, observed) in enumerate(turns):
            n = len(logprobs)
            builder.append_sampled(range(n), np.float32(logprobs), [(0, n, version + index)])
            builder.append_context(range(observed))
        segments.append(builder.build())
    base = sample(segments=1, reward=reward, metadata=metadata, task_ordinal=ordinal)
    sent = dataclasses.replace(base, segments=tuple(segments))
    header, payload = encode(sent)
    same(decode(header, payload), sent)
    told = _core.summary(header)
    assert (told["n_tokens"], told["n_actions"], told["n_segments"]) == (sent.n_tokens, sent.n_actions, len(segments))
    assert (told["min_version"], told["max_version"]) == (sent.min_version, sent.max_version)


def test_a_version_change_stays_where_it_was():
    builder = SegmentBuilder()
    builder.append_context([1])
    builder.append_sampled(range(128), np.full(128, -0.5, np.float32), [(0, 57, 7), (57, 128, 8)])
    got = decode(*encode(_with(builder.build())))
    start, stop, version = got.segments[0].version_spans.T
    versions = np.repeat(version, stop - start)
    assert versions.tolist() == [7] * 57 + [8] * 71


def _with(segment: Segment) -> Trajectory:
    return Trajectory(uuid.uuid4().bytes, 0, 0, "lookup", (segment,), 1.0, Termination("finished"), 1.0)


def test_long_segments_cost_at_most_9_1_bytes_a_token():
    header, payload = encode(sample(turns=1, tokens=32_000, segments=1))
    assert (len(header) + len(payload)) / 32_004 <= 9.1


def test_the_header_is_plain_msgpack_and_arrays_lie_where_it_says():
    sent = sample()
    header, payload = encode(sent)
    fields = msgpack.unpackb(header, strict_map_key=False)
    assert list(fields)[:3] == ["magic", "format", "crc32c"]
    assert (fields["magic"], fields["format"]) == ("sao-trajectory", 1)
    assert fields["payload_bytes"] == len(payload) and fields["id"] == sent.id
    for told, segment in zip(fields["segments"], sent.segments, strict=True):
        for name in ("token_ids", "logprobs", "action_mask"):
            offset, size, crc = told[name]
            assert offset % 64 == 0
            assert payload[offset : offset + size] == getattr(segment, name).tobytes()
            assert crc == crc32c(payload[offset : offset + size])


def test_views_share_memory_are_read_only_and_keep_the_payload_alive():
    header, payload = encode(sample())
    array = np.frombuffer(payload, np.uint8).copy()
    got = decode(header, array)
    for segment in got.segments:
        for name in ARRAYS[:3]:
            view = getattr(segment, name)
            assert np.shares_memory(view, array)
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 0
    alive = weakref.ref(array)
    del array, segment, view
    gc.collect()
    assert alive() is not None and got.segments[1].token_ids[:3].tolist() == [1, 2, 3]
    del got
    gc.collect()
    assert alive() is None


def test_a_payload_at_an_odd_address_gives_aligned_arrays():
    header, payload = encode(sample())
    got = decode(header, memoryview(b"x" + payload)[1:])
    same(got, decode(header, payload))
    assert all(getattr(s, name).flags.aligned for s in got.segments for name in ARRAYS)


def test_frames_of_a_socket_are_decoded_in_place():
    sent = sample(turns=1, tokens=4000)
    with zmq.Context() as context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as into:
        out.bind("inproc://wire")
        into.connect("inproc://wire")
        out.send_multipart(encode(sent))
        assert into.poll(5000)
        header, payload = into.recv_multipart(copy=False)
        got = decode(header, payload)
        assert np.shares_memory(got.segments[0].token_ids, np.frombuffer(payload, np.uint8))
        same(got, sent)
        same(decode(header.buffer, payload.buffer), sent)
        assert _core.summary(header)["id"] == sent.id


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_any_contiguous_buffer_will_do(make):
    sent = sample()
    header, payload = encode(sent)
    same(decode(make(header), make(payload)), sent)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (5, "int has no buffer"),
        ("text", "str has no buffer"),
        (None, "NoneType has no buffer"),
        (np.arange(20, dtype=np.uint8)[::2], "strides"),
    ],
)
def test_what_is_no_contiguous_buffer_is_refused(bad, words):
    header, payload = encode(sample())
    for pair in ((bad, payload), (header, bad)):
        with pytest.raises(WireError, match=words):
            decode(*pair)


def test_sizes_and_formats_are_named():
    header, payload = encode(sample())
    with pytest.raises(WireError, match=rf"payload_bytes: {len(payload)}, at most 100 are accepted"):
        decode(header, payload, max_bytes=100)
    with pytest.raises(WireError, match="segments: 2, at most 1 are accepted"):
        decode(header, payload, max_segments=1)
    with pytest.raises(WireError, match=rf"payload: {len(payload) + 1} bytes, the header announces {len(payload)}"):
        decode(header, payload + b"\0")
    with pytest.raises(WireError, match=r"header: 2000000 bytes, at most 1048576"):
        decode(b"\0" * 2_000_000, payload)
    fields = msgpack.unpackb(header, strict_map_key=False)
    with pytest.raises(WireError, match="format: 3, this build reads 1 and 2"):
        decode(msgpack.packb({**fields, "format": 3}), payload)
    for foreign in (b"", b"\x80", b"{}", b"hello", msgpack.packb({"magic": "other"}), msgpack.packb([1, 2])):
        with pytest.raises(WireError, match="not a trajectory of sao"):
            decode(foreign, payload)
    with pytest.raises(ValidationError, match="header: 1200"):
        encode(sample(metadata={"text": "x" * 1_200_000}))


def test_a_writer_in_another_language_is_understood_and_its_faults_are_named():
    sent = sample()
    header, payload = encode(sent)
    fields = msgpack.unpackb(header, strict_map_key=False)

    def pack(**changes):
        packed = msgpack.packb({**fields, "crc32c": 0xFFFFFFFF, **changes})
        return reseal(packed)

    same(decode(pack(), payload), sent)
    segment = fields["segments"][0]
    faults = {
        "reward: 0.1 with termination.kind": {"termination": ["failed", "x"]},
        r"termination\[0\]: unknown kind": {"termination": ["lost", "x"]},
        "id: missing, cut short or not 16 bytes": {"id": b"short"},
        "task_ordinal: -4 is negative": {"task_ordinal": -4},
        "task_ordinal: missing, cut short or not a 64-bit": {"task_ordinal": 2**64 - 1},
        "metadata: missing, cut short or not a 64-bit integer": {"metadata": {"a": [1]}},
        "fingerprints: key 1 stands twice|fingerprints: missing": {"fingerprints": {"1": "a"}},
        "counts": {"counts": [1, 1, 0, 0]},
        r"segments\[0\].kind: unknown kind": {"segments": [{**segment, "kind": "other"}]},
        r"segments\[0\].token_ids: 4 bytes at 0, expected 60": {"segments": [{**segment, "token_ids": [0, 4, 0]}]},
        "segments: not a map|segments": {"segments": [1]},
        r"segments\[0\]\.version_spans\[0\]: \(3, 99, 0\)": {
            "segments": [{**segment, "version_spans": [[3, 99, 0]]}, fields["segments"][1]]
        },
    }
    for words, changes in faults.items():
        with pytest.raises(WireError, match=words):
            decode(pack(**changes), payload)
    shuffled = {name: fields[name] for name in reversed(fields)}
    with pytest.raises(WireError, match="not a trajectory of sao"):
        decode(msgpack.packb(shuffled), payload)


def test_broken_rules_in_the_payload_are_named_as_in_python():
    header, payload = encode(_with(Segment("execution", [1, 2], [False, True], [np.nan, -1.0], [(0, 2, 0)])))
    fields = msgpack.unpackb(header, strict_map_key=False)
    offset, size, _ = fields["segments"][0]["logprobs"]
    changed = payload[: offset + 4] + np.float32(0.3).tobytes() + payload[offset + 8 :]
    with pytest.raises(WireError, match=r"segments\[0\]\.logprobs: crc32c 0x"):
        decode(header, changed)
    fields["segments"][0]["logprobs"][2] = crc32c(changed[offset : offset + size])
    with pytest.raises(WireError, match=r"segments\[0\]\.logprobs\[1\]: 0\.3 is positive"):
        decode(reseal(msgpack.packb(fields)), changed)
    with pytest.raises(WireError, match=r"payload\[8:64\]: padding is not zero"):
        decode(header, payload[:9] + b"\1" + payload[10:])


def test_summary_checks_the_payload_when_it_is_given():
    header, payload = encode(sample())
    assert _core.summary(header, payload) == _core.summary(header)
    with pytest.raises(WireError, match="crc32c"):
        _core.summary(header, payload[:-1] + b"\2")


def test_encode_notices_an_array_changed_behind_its_back():
    hidden = np.array([np.nan, -1.0], np.float32)
    view = hidden.view()
    view.flags.writeable = False
    trajectory = _with(Segment("execution", [1, 2], [False, True], view, [(0, 2, 0)]))
    hidden[1] = 0.5
    with pytest.raises(ValidationError, match=r"segments\[0\]\.logprobs\[1\]: 0\.5 is positive"):
        encode(trajectory)


def frames(count, rng):
    """(header, sealed) of five kinds of damage; few are sealed with a right checksum because that is slow here."""
    header, _ = encode(sample())
    lengths = [b"\xdb", b"\xc6", b"\xdd", b"\xdf"]
    for case in range(count):
        kind = case % 5
        if kind == 0:
            yield header[: rng.randrange(len(header))], False
        elif kind == 1:
            bit = rng.randrange(8 * len(header))
            flipped = bytearray(header)
            flipped[bit // 8] ^= 1 << (bit % 8)
            yield bytes(flipped), False
        elif kind == 2:
            at = rng.randrange(len(header))
            yield header[:at] + rng.choice(lengths) + b"\xff\xff\xff\xff" + header[at:], False
        elif kind == 3:
            yield rng.randbytes(rng.randrange(600)), False
        else:
            at = rng.randrange(48, len(header))
            junk = rng.choice(lengths) + b"\xff\xff\xff\xf0" if case % 2 else rng.randbytes(rng.randrange(4, 40))
            changed = header[:at] + junk + header[at + len(junk) :]
            sealed = case % 50 == 4
            yield reseal(changed) if sealed else changed, sealed


def test_a_hundred_thousand_damaged_frames_are_refused_quickly_and_without_memory():
    _, payload = encode(sample())
    process, worst = psutil.Process(), 0.0
    before = process.memory_info().rss
    for header, sealed in frames(100_000, random.Random(0)):
        start = time.thread_time()
        try:
            got = decode(header, payload)
        except WireError:
            pass
        else:  # junk in a number, sealed, may make another valid trajectory
            assert sealed and decode(*encode(got)).id == got.id
        worst = max(worst, time.thread_time() - start)
    assert worst < 0.010
    assert process.memory_info().rss - before < 32 << 20


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa5magic", b"\x81\x91", b"\xdd\x00\x00\x00\x01"])
def test_deep_nesting_is_refused(opener):
    header, payload = encode(sample())
    deep = opener * 10_000
    with pytest.raises(WireError):
        decode(deep, payload)
    for field in (b"metadata", b"segments", b"turn_rewards", b"env"):
        at = header.index(field) + len(field)
        with pytest.raises(WireError):
            decode(reseal(header[:at] + deep + header[at:]), payload)


def test_huge_announced_sizes_allocate_nothing():
    header, payload = encode(sample())
    fields = msgpack.unpackb(header, strict_map_key=False)
    segment = {**fields["segments"][0], "n_tokens": 2**62}
    before = psutil.Process().memory_info().rss
    for changes in ({"payload_bytes": 2**60}, {"segments": [segment]}, {"counts": [2**63, 2**63, 0, 0]}):
        with pytest.raises(WireError):
            decode(reseal(msgpack.packb({**fields, "crc32c": 2**32 - 1, **changes})), payload, max_bytes=2**62)
    assert psutil.Process().memory_info().rss - before < 8 << 20


def test_large_payloads_are_decoded_without_the_gil():
    header, payload = encode(sample(turns=1, tokens=2_000_000, segments=1))
    go, ran = threading.Event(), []

    def other():
        go.wait(60)
        ran.append(True)

    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    try:
        thread.start()
        sys.setswitchinterval(1000)  # from here on another thread runs only when the GIL is given up
        go.set()
        for _ in range(200):
            decode(header, payload)
            if ran:
                break
        got_in = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join(60)
    assert got_in
