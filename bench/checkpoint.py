"""What a checkpoint costs: how long training waits for it, how long writing takes beside it, and reading it again.

Policy, critic and both AdamW states in float32, a process group of one rank, files on the disk of this machine; medians
of three. `python bench/checkpoint.py [--quick]`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from common import report
from learner import make_config, make_model, make_rollouts, world_of_one

SIZES = {
    "quickstart": {"width": 64, "layers": 2, "vocabulary": 48},
    "small": {"width": 256, "layers": 6, "vocabulary": 8192},
    "large": {"width": 512, "layers": 12, "vocabulary": 16384},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave the largest size out")
    arguments = parser.parse_args()
    from sao.learner.checkpoint import Checkpointer, restore
    from sao.learner.step import Learner
    from sao.storage.checkpoints import verify

    world, rows = world_of_one(), []
    for name, shape in SIZES.items():
        if arguments.quick and name == "large":
            continue
        with tempfile.TemporaryDirectory() as folder:
            parameters = make_model(Path(folder), **shape, context=128)
            sampling, learner_section = {"context_tokens": 128, "max_response_tokens": 8}, {"row_tokens": 128}
            config = make_config(Path(folder), sampling=sampling, learner=learner_section)
            learner = Learner(config, world)
            learner.step(make_rollouts(np.array([64, 64]), shape["vocabulary"]))
            saver = Checkpointer(learner, Path(folder) / "checkpoints")
            waited, whole, checked, read = [], [], [], []
            for number in range(3):
                learner.steps = number + 1
                start = time.perf_counter()
                saver.save(1, [(number, 0)])
                waited.append(time.perf_counter() - start)
                if fault := saver.finish():
                    raise SystemExit(fault)
                whole.append(time.perf_counter() - start)
                start = time.perf_counter()
                found = verify(Path(folder) / "checkpoints" / f"step-{learner.steps}")
                checked.append(time.perf_counter() - start)
                start = time.perf_counter()
                restore(learner, found)
                read.append(time.perf_counter() - start)
            size = sum(facts["bytes"] for facts in found.manifest["files"].values())
            medians = [1e3 * float(np.median(seconds)) for seconds in (waited, whole, checked, read)]
            rows.append([name, parameters / 1e6, size / 1e6, *medians])
    columns = ["size", "M parameters", "MB", "training waits ms", "until visible ms", "check ms", "read ms"]
    report("checkpoint", columns, rows, "wall time; the model is written twice: in the state and as a folder")


if __name__ == "__main__":
    main()
