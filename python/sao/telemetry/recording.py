"""A recorded learner step: the batch's trajectories as they came, and the numbers that the step made of them.

One safetensors file a step (`step-000012.safetensors`): for each trajectory its encoded frames, byte for byte, then
named arrays, then a JSON map in the header. Nothing in it can run. The names that the learner writes, where N counts
the tokens of all segments of all trajectories, laid end to end:

| array | type | meaning |
| --- | --- | --- |
| `advantages`, `targets`, `values` | float32[N] | what the policy and the critic were trained on; 0 at non-actions |
| `logprobs` | float32[N] | current policy at action tokens with a gradient, before the update; NaN elsewhere |
| `rollout_logprobs` | float32[N] | as recorded by the engine; NaN at non-actions |
| `lags` | int32[N] | policy versions behind; -1 at non-actions |
| `segment_offsets`, `trajectory_offsets` | int64 | first token of each segment, first segment of each trajectory |
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao import _core
from sao.errors import StorageError, ValidationError, WireError
from sao.trajectory import Trajectory, decode, split_frames

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
