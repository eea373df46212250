"""A recorded learner step: the batch's trajectories as they came, and the numbers that the step made of them.

One safetensors file a step (`step-000012.safetensors`): for each trajectory its encoded frames, byte for byte, then
named arrays, then a JSON map in the header. Nothing in it can run. The names that the learner writes, where N counts
the tokens of all segments of all trajectories, laid end to end:

| array | type | meaning |
| --- | --- | --- |
| `advantages`, `targets`, `values` | float32[N] | what the policy and the critic were trained on; 0 at non-actions |
| `logprobs`, `entropies` | float32[N] | of the policy before the update, at action tokens with a gradient; else NaN |
| `rollout_logprobs` | float32[N] | as recorded by the engine; NaN at non-actions |
| `lags` | int32[N] | policy versions behind; -1 at non-actions |
| `segment_offsets`, `trajectory_offsets` | int64 | first token of each segment, first segment of each trajectory |
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sao import _core
from sao.errors import StorageError, ValidationError, WireError
from sao.trajectory import Segment, Trajectory, decode, split_frames

FORMAT = "sao-step-1"
_NAME = re.compile(r"step-(\d{6,})\.safetensors")


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A step as `write_step` wrote it. frames: header, payload and sidecars of each trajectory, in batch order."""

    step: int
    frames: list[bytes]
    arrays: dict[str, NDArray[Any]]
    meta: dict[str, Any]

    def trajectories(self) -> list[Trajectory]:
        """The batch, decoded and checked. Raises `WireError`."""
        return [decode(head, body, sidecars=more) for head, body, *more in split_frames(self.frames)]

    def rollouts(self) -> Iterator["Recorded"]:
        """Each trajectory with its numbers. Raises `WireError`, and `ValidationError` when the arrays do not fit."""
        offsets, firsts = self.arrays["segment_offsets"], self.arrays["trajectory_offsets"]
        summaries = bool(self.meta.get("compaction", {}).get("train_summaries", True))
        for index, trajectory in enumerate(self.trajectories()):
            starts = offsets[firsts[index] : firsts[index + 1]].tolist()
            trained = [summaries or segment.kind != "summary" for segment in trajectory.segments]
            if sum(trained) != len(starts):
                raise ValidationError(f"trajectory {index}: {sum(trained)} segments, the arrays have another number")
            sizes = zip(trajectory.segments, trained, strict=True)
            numbers = [self._numbers(starts.pop(0), segment.n_tokens) if kept else None for segment, kept in sizes]
            yield Recorded(index, trajectory, numbers)

    def _numbers(self, start: int, size: int) -> "Numbers":
        def part(name: str) -> NDArray[np.float64]:
            found = self.arrays.get(name)
            return np.full(size, np.nan) if found is None else found[start : start + size].astype(np.float64)

        gap = part("logprobs") - part("rollout_logprobs")
        lags = part("lags")
        return Numbers(
            advantage=part("advantages"),
            ratio=np.exp(np.clip(gap, -20, 20)),
            gap=gap,
            logprob=part("rollout_logprobs"),
            entropy=part("entropies"),
            value=part("values"),
            target=part("targets"),
            lag=np.where(lags < 0, np.nan, lags),
        )


class Numbers(NamedTuple):
    """What a step made of a segment's tokens, float64[n_tokens] each; NaN (or 0) where there is none.

    ratio: current over rollout probability; gap: its logarithm, not cut; logprob: as the engine sampled.
    """

    advantage: NDArray[np.float64]
    ratio: NDArray[np.float64]
    gap: NDArray[np.float64]
    logprob: NDArray[np.float64]
    entropy: NDArray[np.float64]
    value: NDArray[np.float64]
    target: NDArray[np.float64]
    lag: NDArray[np.float64]


class Recorded(NamedTuple):
    """One trajectory of a step, with the numbers of each segment (None: left out of training)."""

    number: int
    trajectory: Trajectory
    numbers: list[Numbers | None]

    def finite(self, name: str) -> NDArray[np.float64]:
        """The finite numbers of this name at sampled tokens of trained segments."""
        parts = zip(self.trajectory.segments, self.numbers, strict=True)
        found = [finite(getattr(numbers, name), segment) for segment, numbers in parts if numbers is not None]
        return np.concatenate([np.zeros(0), *found])


def versions(segment: Segment) -> NDArray[np.int64]:
    """The policy version that sampled each of a segment's tokens; 0 where none did."""
    found = np.zeros(segment.n_tokens, np.int64)
    for first, stop, version in segment.version_spans.tolist():
        found[first:stop] = version
    return found


def finite(values: NDArray[np.float64], segment: Segment) -> NDArray[np.float64]:
    """The finite ones of a segment's numbers, at sampled tokens."""
    return values[segment.action_mask & np.isfinite(values)]


def write_step(
    folder: Path, step: int, frames: Sequence[Any], arrays: Mapping[str, Any], meta: Mapping[str, Any], *, keep: int = 0
) -> Path:
    """Writes one step and returns its path; the file is complete or not there.

    frames: header, payload and sidecars of each trajectory, one after another (anything with the buffer protocol).
    arrays: any shape, dtypes of NumPy other than object and text. meta: what JSON can hold. keep: newest steps that
    stay in `folder` (0: all). Raises `WireError` and `ValidationError` before anything is written, `StorageError`.
    """
    from safetensors import SafetensorError  # only those that record or read need it
    from safetensors.numpy import save_file

    groups = split_frames(frames)
    tensors = {
        _frame(index, part): np.frombuffer(frame, np.uint8)
        for index, group in enumerate(groups)
        for part, frame in enumerate(group)
    }
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise ValidationError(f"arrays[{name!r}]: {array.dtype}, expected numbers or truth values")
        tensors[f"array/{name}"] = np.ascontiguousarray(array)
    header = {"format": FORMAT, "step": str(step), "trajectories": str(len(groups)), "meta": json.dumps(dict(meta))}
    target = step_path(folder, step)
    unfinished = target.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, header)
        unfinished.replace(target)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{target}: cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    for old in recorded_steps(folder)[:-keep] if keep else ():
        step_path(folder, old).unlink(missing_ok=True)
    return target


def read_step(path: Path) -> RecordedStep:
    """Reads a file that `write_step` wrote. Raises `WireError` when it is damaged or something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise WireError(f"{path}: format {header.get('format')!r}, expected {FORMAT!r}")
            names = file.keys()
            arrays = {name.removeprefix("array/"): file.get_tensor(name) for name in names if name[:6] == "array/"}
            frames = []
            for index in range(int(header["trajectories"])):
                head = file.get_tensor(_frame(index, 0)).tobytes()
                parts = range(1, 2 + len(_core.summary(head)["sidecars"]))
                frames += [head, *(file.get_tensor(_frame(index, part)).tobytes() for part in parts)]
            return RecordedStep(int(header["step"]), frames, arrays, json.loads(header["meta"]))
    except WireError:
        raise
    except FileNotFoundError:
        raise WireError(f"{path}: no such file") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise WireError(f"{path}: not a recorded step: {error}") from error


def step_path(folder: Path, step: int) -> Path:
    """The path of a step's file, whether it is there or not."""
    return folder / f"step-{step:06d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """Steps in this folder, oldest first; none if there is no such folder."""
    names: Iterable[Path] = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(match[1]) for path in names if (match := _NAME.fullmatch(path.name)))


def _frame(index: int, part: int) -> str:
    """The name of a trajectory's frame: 0 is its header, 1 its payload, what follows are sidecars."""
    return f"frame/{index:06d}/{('header', 'payload')[part] if part < 2 else f'sidecar{part - 2}'}"
