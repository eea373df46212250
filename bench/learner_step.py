"""One learner step at several sizes, by cause, and the share that is not model arithmetic.

Arithmetic is what is spent inside the forward passes of policy and critic, the backward passes and AdamW; the rest is
the whole step, from encoded trajectories to published weights, less that. CPU seconds of one thread, so that a busy
machine does not count; one step after a warm-up step; FSDP2 with one rank. `python bench/learner_step.py [--quick]`
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report
from learner import answer, child, make_config, make_model, make_rollouts, world_of_one

CAUSES = ("move", "plan", "values", "advantages", "critic", "policy", "optimizer", "publish")
SIZES = {
    "quickstart": {"width": 64, "layers": 2, "vocabulary": 48, "rollouts": 128, "low": 16, "high": 24, "row": 128},
    "small": {"width": 128, "layers": 3, "vocabulary": 256, "rollouts": 128, "low": 100, "high": 300, "row": 512},
    "large": {"width": 256, "layers": 4, "vocabulary": 1024, "rollouts": 64, "low": 1000, "high": 2000, "row": 2048},
}


class Stopwatch:
    """CPU seconds inside wrapped calls, by name; a call inside another is not counted again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return inner(*arguments, **named)
            self._inside, start = True, time.process_time()
            try:
                return inner(*arguments, **named)
            finally:
                self.seconds[name] += time.process_time() - start
                self._inside = False

        setattr(owner, method, timed)


def run(size: dict[str, Any]) -> None:
    from sao.learner import work
    from sao.learner.step import Learner
    from sao.trajectory import decode, encode

    work.time = type("Cpu", (), {"perf_counter": staticmethod(time.process_time)})  # causes in CPU seconds too
    lengths = np.random.default_rng(1).integers(size["low"], size["high"] + 1, size["rollouts"])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as weights:
        shape = {key: size[key] for key in ("width", "layers", "vocabulary")}
        parameters = make_model(Path(folder), **shape, context=size["row"])
        config = make_config(
            Path(folder),
            sampling={"context_tokens": size["row"], "max_response_tokens": 8},
            learner={"row_tokens": size["row"], "rows_per_micro_batch": max(1, 4096 // size["row"])},
        )
        learner = Learner(config, world_of_one(), Path(weights))
        learner.step(make_rollouts(lengths[:4], size["vocabulary"], seed=9))
        watch = Stopwatch()
        watch.wrap(learner.policy, "forward", "policy forward")
        watch.wrap(learner.critic, "forward", "critic forward")
        watch.wrap(torch.Tensor, "backward", "backward")
        for optimizer in learner.optimizers.values():
            watch.wrap(optimizer.adam, "step", "adamw")
        frames = [encode(trajectory) for trajectory in make_rollouts(lengths, size["vocabulary"])]
        wall, start = time.perf_counter(), time.process_time()
        trajectories = [decode(*frame) for frame in frames]
        moved = time.process_time()
        result = learner.step(trajectories)
        total, wall = time.process_time() - start, time.perf_counter() - wall
    seconds = {name: result.metrics.get(f"time/{name}_s", 0.0) for name in CAUSES} | {"move": moved - start}
    seconds["other"] = total - sum(seconds.values())
    answer(
        parameters=parameters,
        tokens=int(lengths.sum()),
        actions=int(result.metrics["tokens/action"]),
        seconds=seconds,
        total=total,
        wall=wall,
        arithmetic=sum(watch.seconds.values()),
        inside=dict(watch.seconds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave the largest size out")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run(json.loads(arguments.case))
        return
    rows = []
    for name, size in SIZES.items():
        if arguments.quick and name == "large":
            continue
        got = child(__file__, **size)
        causes = [1e3 * got["seconds"][cause] for cause in (*CAUSES, "other")]
        share = 100 * (1 - got["arithmetic"] / got["total"])
        rows.append([name, got["parameters"] / 1e6, got["tokens"], *causes, got["total"], share])
    columns = ["size", "M parameters", "tokens", *(f"{cause} ms" for cause in (*CAUSES, "other"))]
    note = "CPU time of one thread; critic: two passes, attention frozen; not arithmetic: in % of the step"
    report("learner_step", [*columns, "step s", "not arithmetic %"], rows, note)


if __name__ == "__main__":
    main()
