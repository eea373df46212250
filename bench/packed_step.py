"""A learner step over packed rows beside padded ones, on heavy-tailed lengths: time, peak memory, positions computed.

* packed: what the learner does, rows in classes of lengths; packed, one class: all rows as wide as the longest segment.
* padded: one segment a row, in order of arrival, rows of a micro-batch as long as its longest segment.
* padded, sorted: the same, segments sorted by length first.

Same model, same bound on the positions of a micro-batch, same results; CPU seconds of one thread, each case in
processes of its own, one for the time and one for the memory. Memory is the peak less that of a process that has made a
step on three short segments. `python bench/packed_step.py`
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import report
from learner import PEAK, answer, child, make_config, make_model, make_rollouts, world_of_one

LONGEST, BOUND, COUNT, VOCABULARY = 1024, 4096, 96, 256


def heavy_tailed(seed: int = 0) -> np.ndarray:
    """Many short ones and a few that fill the window: log-normal around 90 tokens, from 10 to 1024."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(np.log(90) + 1.1 * rng.standard_normal(COUNT)), 10, LONGEST).astype(np.int64)
    lengths[0] = LONGEST
    return lengths


def padded_plan(lengths: np.ndarray, by_length: bool) -> SimpleNamespace:
    """One segment a row; a micro-batch is filled up to the bound on positions, padding included."""
    order = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(lengths))
    micro_batch, row = np.zeros(len(lengths), dtype=int), np.zeros(len(lengths), dtype=int)
    index, rows, longest = 0, 0, 0
    for segment in order:
        widest = max(longest, int(lengths[segment]))
        if rows and (rows + 1) * widest > BOUND:
            index, rows, widest = index + 1, 0, int(lengths[segment])
        micro_batch[segment], row[segment] = index, rows
        rows, longest = rows + 1, widest
    zeros = np.zeros(len(lengths), dtype=int)
    return SimpleNamespace(
        rank=zeros, micro_batch=micro_batch, row=row, position=zeros, n_micro_batches=index + 1, hash=0
    )


def run(how: str, idle: bool = False) -> None:
    from sao.learner import step
    from sao.learner.attention import FLEX
    from sao.learner.layout import Layout
    from sao.learner.plan import plan_segments
    from sao.learner.step import Learner

    if how.startswith("padded"):
        step.plan_segments = lambda lengths, *_, **__: padded_plan(lengths, how.endswith("sorted"))
    elif how != "packed":
        step.plan_segments = lambda *bound, layout: plan_segments(*bound, layout=Layout(attention=FLEX))
    built: list[Any] = []
    make = step.micro_batches
    step.micro_batches = lambda *arguments: built.append(made := make(*arguments)) or made
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), width=128, layers=4, vocabulary=VOCABULARY, context=LONGEST)
        config = make_config(
            Path(folder),
            sampling={"context_tokens": LONGEST, "max_response_tokens": 8},
            learner={"row_tokens": LONGEST, "rows_per_micro_batch": BOUND // LONGEST},
        )
        learner = Learner(config, world_of_one())
        rollouts = make_rollouts(heavy_tailed(), VOCABULARY)
        learner.step(rollouts[1:4])
        if idle:
            answer()
            return
        built.clear()
        start = time.process_time()
        result = learner.step(rollouts)
        seconds = time.process_time() - start
    positions = sum(part.token_ids.numel() for part in built[0])
    attention = sum(part.token_ids.shape[0] * part.token_ids.shape[1] ** 2 for part in built[0])
    loss = [result.metrics["loss/policy"], result.metrics["loss/critic_2"]]
    answer(seconds=seconds, positions=positions, attention=attention, micro_batches=len(built[0]), loss=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run(**json.loads(arguments.case))
        return
    tokens, rows = int(heavy_tailed().sum()), []
    base = child(__file__, live=True, how="packed", idle=True)[PEAK]
    for how in ("packed", "packed, one class", "padded", "padded, sorted"):
        got, peak = child(__file__, how=how), child(__file__, live=True, how=how)[PEAK]
        waste = 100 * (1 - tokens / got["positions"])
        memory = (peak - base) / 2**20
        rows.append([how, got["seconds"], memory, got["positions"], waste, got["attention"] / 1e6, *got["loss"]])
    columns = ["rows", "CPU s", "peak MiB", "positions", "padding %", "M attention pairs", "policy loss", "critic loss"]
    report("packed_step", columns, rows, f"{COUNT} segments, {tokens} tokens, lengths 10 to {LONGEST}")


if __name__ == "__main__":
    main()
