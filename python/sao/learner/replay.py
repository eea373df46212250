"""Recorded steps once more, from the state before them: `python -m sao.learner.replay`, one process a rank.

A step is a function of the learner's state, the batch as it came, and the configuration; the recorded file holds the
last two. The same function must give the same bits: losses, all other metrics, the arrays of the step, the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sao.config import parse
from sao.errors import Error
from sao.learner.checkpoint import restore
from sao.learner.export import full_tensors
from sao.learner.step import Learner
from sao.learner.world import World
from sao.storage import checkpoints
from sao.telemetry.recording import RecordedStep, read_step
from sao.transport.weights import fingerprint

_CLOCKS = ("time/", "broker/")  # not of the computation


def replay(learner: Learner, record: RecordedStep) -> dict[str, Any]:
    """Makes a step and compares it bit by bit: how many numbers were compared, and those that differ, as
    name -> (recorded, replayed). A collective: every rank makes the same call.
    """
    result = learner.step(record.trajectories())
    policy = full_tensors(learner.policy.lm, learner.config.model.dtype, learner.world)
    recorded: dict[str, float] = record.meta["metrics"]
    names = sorted(name for name in recorded.keys() | result.metrics.keys() if not name.startswith(_CLOCKS))
    pairs: dict[str, tuple[Any, Any]] = {name: (recorded.get(name), result.metrics.get(name)) for name in names}
    for name, held in sorted(record.arrays.items()):
        mine = np.ascontiguousarray((result.arrays or {}).get(name, np.empty(0, held.dtype)))
        if (held.dtype, held.shape, held.tobytes()) != (mine.dtype, mine.shape, mine.tobytes()):
            count = int((held != mine).sum()) if held.shape == mine.shape else max(held.size, mine.size)
            pairs[f"array {name}"] = (f"{held.dtype}{list(held.shape)}", f"{count} values differ")
    wanted = record.meta.get("fingerprint")
    if policy is not None and wanted is not None:
        pairs["weights"] = (wanted, fingerprint(policy))
    return {
        "step": record.step,
        "metrics": len(names),
        "arrays": len(record.arrays),
        "weights": "weights" in pairs,
        "losses": {name: value for name, value in sorted(recorded.items()) if name.startswith("loss/")},
        "different": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
    }


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
            arguments.report.write_text(json.dumps(found))
        world.leave()
    except Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
