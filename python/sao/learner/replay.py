"""Recorded steps once more, from the state before them: `python -m sao.learner.replay`, one process a rank.

A step is a function of the learner's state, the batch as it came, and the configuration; the recorded file holds the
last two. The same function must give the same bits: losses, all other metrics, the arrays of the step, the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sao.config import parse
from sao.errors import Error
from sao.learner.checkpoint import restore
from sao.learner.export import full_tensors
from sao.learner.step import Learner, StepResult
from sao.learner.world import World
from sao.storage import checkpoints
from sao.telemetry.recording import RecordedStep, read_step
from sao.transport.weights import fingerprint

_CLOCKS = ("time/", "broker/")  # not of the computation


@dataclass(frozen=True)
class Comparison:
    """One replayed step: how many numbers were compared, and those that differ: name -> (recorded, replayed)."""

    step: int
    metrics: int
    arrays: int
    weights: bool
    losses: dict[str, float]
    different: dict[str, tuple[Any, Any]]


def compare(record: RecordedStep, result: StepResult, policy: str | None) -> Comparison:
    """Compares bit by bit. `policy`: fingerprint of the replayed policy; None: not compared."""
    recorded: dict[str, float] = record.meta["metrics"]
    names = sorted(name for name in recorded.keys() | result.metrics.keys() if not name.startswith(_CLOCKS))
    pairs: dict[str, tuple[Any, Any]] = {name: (recorded.get(name), result.metrics.get(name)) for name in names}
    different = {name: (old, new) for name, (old, new) in pairs.items() if old != new}
    for name, held in sorted(record.arrays.items()):
        mine = np.ascontiguousarray((result.arrays or {}).get(name, np.empty(0, held.dtype)))
        if (held.dtype, held.shape, held.tobytes()) != (mine.dtype, mine.shape, mine.tobytes()):
            count = int((held != mine).sum()) if held.shape == mine.shape else max(held.size, mine.size)
            different[f"array {name}"] = (f"{held.dtype}{list(held.shape)}", f"{count} values differ")
    wanted = record.meta.get("fingerprint")
    weights = policy is not None and wanted is not None
    if weights and policy != wanted:
        different["weights"] = (wanted, policy)
    losses = {name: value for name, value in sorted(recorded.items()) if name.startswith("loss/")}
    return Comparison(record.step, len(names), len(record.arrays), weights, losses, different)


def replay(learner: Learner, record: RecordedStep) -> Comparison:
    """Makes the step and compares. A collective: every rank makes the same call."""
    result = learner.step(record.trajectories())
    tensors = full_tensors(learner.policy.lm, learner.config.model.dtype, learner.world)
    return compare(record, result, None if tensors is None else fingerprint(tensors))


def main(argv: list[str] | None = None) -> int:
    """Replays the given records in order; rank 0 writes a list of comparisons as JSON to `--report`."""
    parser = argparse.ArgumentParser(prog="python -m sao.learner.replay", description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="files of consecutive steps")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint of the step before the first; default: none")
    parser.add_argument("--store", type=Path, required=True, help="file at which the ranks meet")
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        records = [read_step(path) for path in arguments.records]
        config = parse(records[-1].meta["config"], source=str(arguments.records[-1]))
        world = World.join(arguments.store)
        learner = Learner(config, world)
        if arguments.checkpoint is not None:
            restore(learner, checkpoints.read(arguments.checkpoint))
        found = [replay(learner, record) for record in records]
        if world.rank == 0:
            arguments.report.write_text(json.dumps([vars(comparison) for comparison in found]))
        world.leave()
    except Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
