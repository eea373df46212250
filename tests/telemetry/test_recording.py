"""A recorded step comes back bit for bit, is complete or not there, and damage is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from learner.rollouts import random_batch

from sao.errors import ValidationError, WireError
from sao.telemetry.recording import read_step, recorded_steps, step_path, write_step
from sao.trajectory import encode, encode_frames


def frames_of(n: int) -> list[bytes]:
    return [frame for trajectory in random_batch(1, n) for frame in encode(trajectory)]


ARRAYS = {
    "advantages": np.array([0.5, -1.0, np.nan], np.float32),
    "lags": np.array([[1, 2], [3, 4]], np.int32)[:, ::-1],
    "flags": np.array([True, False]),
    "none": np.zeros(0, np.int64),
}


def test_what_is_read_is_what_was_written(tmp_path):
    frames = frames_of(3)
    path = write_step(tmp_path, 7, [frames[0], memoryview(frames[1]), *frames[2:]], ARRAYS, {"a": [1, None, "x"]})
    assert path == step_path(tmp_path, 7) and [p.name for p in tmp_path.iterdir()] == [path.name]
    found = read_step(path)
    assert (found.step, found.meta, found.frames) == (7, {"a": [1, None, "x"]}, frames)
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found.arrays[name].dtype == array.dtype
        assert np.array_equal(found.arrays[name], array, equal_nan=array.dtype.kind == "f"), name
    assert [t.n_tokens for t in found.trajectories()] == [t.n_tokens for t in random_batch(1, 3)]


def test_sidecars_are_kept_with_their_trajectory(tmp_path):
    first, second, third = random_batch(1, 3)
    arrays = {"experts": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "none": np.zeros((0, 4), np.float32)}
    second = replace(second, sidecars=arrays)
    frames = [bytes(frame) for trajectory in (first, second, third) for frame in encode_frames(trajectory)]
    found = read_step(write_step(tmp_path, 1, frames, {}, {}))
    assert found.frames == frames
    kept = found.trajectories()
    assert [len(trajectory.sidecars) for trajectory in kept] == [0, 2, 0]
    for name, array in arrays.items():
        assert kept[1].sidecars[name].dtype == array.dtype and np.array_equal(kept[1].sidecars[name], array)


def test_only_the_newest_stay(tmp_path):
    for step in (9, 10, 1_000_000, 11):
        write_step(tmp_path, step, [], {}, {}, keep=2)
    assert recorded_steps(tmp_path) == [11, 1_000_000]
    assert recorded_steps(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("frames", "arrays", "message"),
    [
        ([b"x"], {}, "header: not a trajectory"),
        (frames_of(1)[:1], {}, "frames: 1 of the 2 of a trajectory, from frame 0 on"),
        ([], {"bad": np.array(["text"])}, r"arrays\['bad'\]: <U4, expected numbers"),
        ([], {"bad": np.array([object()])}, r"arrays\['bad'\]: object, expected numbers"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, frames, arrays, message):
    with pytest.raises((ValidationError, WireError), match=message):
        write_step(tmp_path / "new", 1, frames, arrays, {})
    assert not (tmp_path / "new").exists()


def test_damage_is_noticed(tmp_path):
    path = write_step(tmp_path, 1, frames_of(1), ARRAYS, {})
    whole = path.read_bytes()
    for damaged in (b"", whole[:7], whole[:-1], b"\xff" * 64, whole[:8] + b"x" + whole[9:]):
        path.write_bytes(damaged)
        with pytest.raises(WireError, match=str(path)):
            read_step(path)
    path.unlink()
    with pytest.raises(WireError, match="no such file"):
        read_step(path)


def test_another_kind_of_file_is_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(WireError, match="format None, expected 'sao-step-1'"):
        read_step(tmp_path / "other.safetensors")
