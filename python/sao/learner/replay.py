"""Recorded steps once more, from the state before them.

A step is a function of the learner's state, the batch as it came, and the configuration; the recorded file holds the
last two. The same function must give the same bits: losses, all other metrics, the arrays of the step, the weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from sao.learner.export import full_tensors
from sao.learner.step import Learner
from sao.telemetry.recording import RecordedStep, read_step
from sao.transport.weights import fingerprint

_CLOCKS = ("time/", "broker/")  # not of the computation


def replay(learner: Learner, records: list[Path], report: Path) -> None:
    """Replays the files of consecutive steps; rank 0 writes a list of comparisons as JSON. A collective."""
    found = [_replay(learner, read_step(path)) for path in records]
    if learner.world.rank == 0:
        report.write_text(json.dumps(found), encoding="utf-8")


def _replay(learner: Learner, record: RecordedStep) -> dict[str, Any]:
    """Makes a step and compares it: how many numbers there are, and those that differ, as name -> (recorded, now)."""
    result = learner.step(record.trajectories())
    policy = full_tensors(learner.policy.lm, learner.config.published_dtype, learner.world)
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
