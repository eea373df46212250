"""Sidecars: frames of their own, by reference, checked like everything else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sao import Trajectory, TrajectoryBuffer, decode, encode, encode_frames, summary
from sao.errors import ValidationError, WireError
from sao.measure.workloads import trajectory

DTYPES = st.sampled_from(["bool", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"]).map(np.dtype)
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


def with_sidecars() -> Trajectory:
    experts = np.arange(60, dtype=np.uint8).reshape(20, 3)
    image = np.linspace(0, 1, 48, dtype=np.float32).reshape(4, 4, 3)
    return replace(trajectory(20), sidecars={"experts": experts, "image": image})


@given(st.dictionaries(st.text(min_size=1, max_size=8), ARRAYS, max_size=4))
def test_every_array_comes_back(arrays: dict[str, Any]) -> None:
    rollout = replace(trajectory(9), sidecars=arrays)
    header, payload, *frames = encode_frames(rollout)
    got = decode(header, payload, sidecars=frames).sidecars
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape and not got[name].flags.writeable
        assert got[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_nothing_is_copied_on_the_way_out_or_in() -> None:
    rollout = with_sidecars()
    _, _, experts, image = encode_frames(rollout)
    assert np.frombuffer(experts, np.uint8).ctypes.data == rollout.sidecars["experts"].ctypes.data
    got = decode(*encode(rollout), sidecars=[bytes(experts), frame := bytes(image)])
    assert got.sidecars["image"].ctypes.data == np.frombuffer(frame, np.uint8).ctypes.data


def test_a_header_names_them_and_their_sizes() -> None:
    assert summary(encode(with_sidecars())[0])["sidecars"] == {"experts": 60, "image": 192}
    assert summary(encode(trajectory(20))[0])["sidecars"] == {}


def test_a_writable_array_is_copied_and_byte_order_is_that_of_the_wire() -> None:
    array = np.arange(4, dtype=">i4")
    rollout = replace(trajectory(9), sidecars={"a": array})
    array[:] = 0
    header, payload, frame = encode_frames(rollout)
    assert bytes(frame) == np.arange(4, dtype="<i4").tobytes()
    assert decode(header, payload, sidecars=[frame]).sidecars["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sidecars", "message"),
    [
        ({"": np.zeros(1)}, 'name "" is empty'),
        ({"a": np.zeros(1, np.complex128)}, 'dtype "complex128" is none of bool, uint8, .*, float64$'),
        ({"a": np.array([object()])}, "dtype|buffer"),
        ({"a": np.zeros((1,) * 9)}, "9 dimensions, at most 8"),
        ({f"{n}": np.zeros(1) for n in range(257)}, "sidecars: 257, at most 256"),
        ({3: np.zeros(1)}, "3 is not a name"),
    ],
)
def test_what_cannot_travel_is_refused_when_it_is_built(sidecars: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        replace(trajectory(9), sidecars=sidecars)


def test_frames_that_are_not_those_of_the_header_are_refused() -> None:
    header, payload, experts, image = (bytes(frame) for frame in encode_frames(with_sidecars()))
    for frames, message in (
        ([], "sidecars: 0 frames, the header announces 2"),
        ([experts], "sidecars: 1 frames, the header announces 2"),
        ([image, experts], r'sidecars\["experts"\]: 192 bytes, the header announces 60'),
        ([experts, bytes(192)], r'sidecars\["image"\]: crc32c'),
        ([experts, image[:-1]], r'sidecars\["image"\]: 191 bytes'),
    ):
        with pytest.raises(WireError, match=message):
            decode(header, payload, sidecars=frames)
    with pytest.raises(WireError, match="more are accepted"):
        decode(header, payload, sidecars=[experts, image], max_bytes=len(payload) + 100)
    with pytest.raises(WireError, match="sidecars: 1 frames, the header announces 0"):
        decode(*encode(trajectory(9)), sidecars=[b""])
    with pytest.raises(WireError):
        summary(header, payload)


@given(st.data())
def test_no_flipped_bit_passes(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode_frames(with_sidecars())]
    which = data.draw(st.integers(0, 3))
    at = data.draw(st.integers(0, len(frames[which]) - 1))
    frames[which][at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError):
        decode(*map(bytes, frames[:2]), sidecars=[bytes(frame) for frame in frames[2:]])


def test_a_buffer_keeps_them_and_counts_their_bytes() -> None:
    rollout = with_sidecars()
    buffer = TrajectoryBuffer(4, 1 << 20)

    async def put() -> None:
        await buffer.put_async(rollout, timeout_s=5)

    buffer.put(rollout)
    asyncio.run(put())
    assert buffer.stats()["bytes"] >= 2 * (60 + 192 + 9 * 20)
    [held] = buffer.take(1)
    [drained] = buffer.drain(1)
    for got in (held.trajectory, drained):
        np.testing.assert_array_equal(got.sidecars["experts"], rollout.sidecars["experts"])
        np.testing.assert_array_equal(got.sidecars["image"], rollout.sidecars["image"])
    image = held.trajectory.sidecars["image"]
    held.commit()
    del held, drained, got
    buffer.close()
    np.testing.assert_array_equal(image, rollout.sidecars["image"])
