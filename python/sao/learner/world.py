"""The learner's ranks: who we are, and the few collectives that a step needs beside FSDP's own.

Under torchrun there is a process group, also with one rank; without it (`World.alone()`) every collective is the
identity, so that a learner can be used in a plain process.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sao.errors import LearnerError

COLLECTIVE_TIMEOUT_S = 1800.0  # longest that one rank may let the others wait
_ALIGN = 64  # arrays inside a frame stay aligned when frames are sent as one blob


@dataclass(frozen=True)
class World:
    """One rank's view: its number, how many there are, its device and the mesh over which parameters are sharded."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @classmethod
    def alone(cls, device: str = "cpu") -> "World":
        """A world of one process without a process group."""
        return cls(0, 1, torch.device(device))

    @classmethod
    def join(cls, store: Path | None = None, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> "World":
        """Joins the process group that the environment describes (the variables of torchrun).

        NCCL if there are GPUs, gloo otherwise. Ranks meet at the file `store`, or at MASTER_ADDR:MASTER_PORT without
        one. `timeout_s` bounds every collective. Raises `LearnerError` naming the variables that are not set.
        """
        needed = ("RANK", "WORLD_SIZE", *(() if store else ("MASTER_ADDR", "MASTER_PORT")))
        missing = [name for name in needed if name not in os.environ]
        if missing:
            raise LearnerError(f"environment: {', '.join(missing)} not set: start the learner with torchrun")
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{store.resolve()}" if store else "env://",
            timeout=timedelta(seconds=timeout_s),
            rank=rank,
            world_size=size,
        )
        return cls(rank, size, device, init_device_mesh(device.type, (size,)))

    def leave(self) -> None:
        """Ends the process group, if there is one."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place, the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def agree(self, what: str, number: int) -> None:
        """Checks that 63 bits of a number are the same on every rank. Raises `LearnerError` on all if not."""
        number &= 2**63 - 1
        most, least = self.largest(torch.tensor([number, -number])).tolist()
        if most != -least:
            raise LearnerError(f"{what}: ranks differ: this one has {number:016x}")

    def share(self, numbers: list[int]) -> list[int]:
        """Rank 0's integers on every rank, which all give as many."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        if self.size > 1:
            dist.broadcast(tensor, 0)
        return tensor.tolist()

    def share_frames(self, frames: list[Any]) -> list[Any]:
        """Sends byte frames from rank 0 to all ranks: sizes first, then one blob with every frame aligned to 64 bytes.

        `frames`: objects with the buffer protocol on rank 0, where they are returned as given; none elsewhere, where
        views of the blob are returned.
        """
        [count] = self.share([len(frames)])
        if self.size == 1 or not count:
            return frames
        sizes = self.share([memoryview(frame).nbytes for frame in frames] or [0] * count)
        padded = [-(-size // _ALIGN) * _ALIGN for size in sizes]
        blob = torch.zeros(sum(padded), dtype=torch.uint8)
        views = [part.numpy()[:size] for part, size in zip(blob.split(padded), sizes, strict=True)]
        for view, frame in zip(views, frames, strict=False):
            view[:] = np.frombuffer(frame, dtype=np.uint8)
        dist.broadcast(blob, 0)
        return frames or views
