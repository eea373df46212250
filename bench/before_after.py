"""This checkout beside another one, in one run: `python bench/before_after.py PATH_OF_THE_OTHER [SECTION ...]`.

The other checkout must have a built core in its `python/sao`. Each section runs in a process of its own, first of one
checkout, then of the other, in turns and in changing order; a process measures each row many times and gives the
median. What is shown is the median over the rounds of both, and of the ratios before / after of the rounds: above 1 is
quicker than before. Times are CPU time of the thread, so other work on the machine disturbs them little; the
quickstart, whose step is wall clock, runs in both checkouts at once, so what disturbs one disturbs the other.

A section is a function that gives, for each of its rows, a call that does the work once and returns the nanoseconds
of each row that it measured: see `SECTIONS`. It runs on both checkouts, so it uses only what both have.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, agentic_lengths, machine, median

HERE = Path(__file__).resolve()
BUDGET_S = 0.6  # of one call's repetitions in a round
Measured = dict[str, float]


def timed(name: str, call: Callable[[], Any], times: int = 1) -> Callable[[], Measured]:
    """A measurement of one row: `times` calls of `call`, nanoseconds a call."""

    def run() -> Measured:
        begin = time.thread_time_ns()
        for _ in range(times):
            call()
        return {name: (time.thread_time_ns() - begin) / times}

    return run


def rollout(n: int, task: int = 0) -> Any:
    """A trajectory of `n` tokens: turns of 300 sampled and 700 given tokens, two policy versions."""
    from sao import Segment, Termination, Trajectory

    mask = np.arange(n) % 1000 >= 700
    mask[-1], mask[0] = True, False
    logprobs = np.where(mask, np.float32(-0.5), np.float32(np.nan))
    spans = np.array([[1, n // 2 + 1, 3], [n // 2 + 1, n, 4]]) if n > 2000 else np.array([[1, n, 3]])
    segment = Segment("execution", np.arange(n, dtype=np.int32), mask, logprobs, spans)
    prints = {3: "0" * 32, 4: "1" * 32}
    done = Termination("finished")
    return Trajectory(bytes(16), task, 0, "demo", (segment,), 1.0, done, 1.0, fingerprints=prints)


def buffer() -> Iterator[Callable[[], Measured]]:
    """put and take of trajectories, of encoded ones as the broker does it, and by task."""
    from sao import _core, encode

    try:
        from sao.embed.buffer import TrajectoryBuffer
    except ImportError:
        from sao.buffer import TrajectoryBuffer  # type: ignore[import-not-found,no-redef]

    clock = time.thread_time_ns
    for n, times in ((1_000, 32), (32_768, 16)):
        whole = TrajectoryBuffer(64, 1 << 28)
        trajectory = rollout(n)
        header, payload = encode(trajectory)
        raw = _core.Buffer(64, 1 << 28, "reject")

        def decoded(whole: Any = whole, trajectory: Any = trajectory, n: int = n, times: int = times) -> Measured:
            begin = clock()
            for _ in range(times):
                whole.put(trajectory)
            middle = clock()
            taken = [whole.take(1)[0] for _ in range(times)]
            end = clock()
            for held in taken:
                held.commit()
            return {f"put, {n} tokens": (middle - begin) / times, f"take, {n} tokens": (end - middle) / times}

        def encoded(raw: Any = raw, frames: Any = (header, payload), n: int = n, times: int = times) -> Measured:
            begin = clock()
            for task in range(times):
                raw.put(*frames, min_version=3, timeout_s=0.0, sidecars=(), task=task)
            middle = clock()
            taken = [lease for _ in range(times) for lease in raw.try_take(1)]
            end = clock()
            for lease in taken:
                lease.commit()
            return {
                f"put of frames, {n} tokens": (middle - begin) / times,
                f"take of frames, {n} tokens": (end - middle) / times,
            }

        yield decoded
        yield encoded

    many = _core.Buffer(1024, 1 << 28, "reject")
    for task in range(512):
        many.put(b"h" * 300, b"p" * 700, min_version=task * 4 // 512, timeout_s=0.0, task=task)
    order = np.random.default_rng(0).permutation(512)
    take_tasks = getattr(many, "try_take_tasks", many.try_take)

    def by_task() -> Measured:
        asked = [int(task) for task in order[:16]]
        begin = clock()
        leases = take_tasks(asked)
        took = clock() - begin
        assert len(leases) == 16
        for lease in leases:
            lease.give_back()
        order[:] = np.roll(order, 16)
        return {"take 16 tasks of 512": took}

    yield by_task


def wire() -> Iterator[Callable[[], Measured]]:
    """encode, decode and summary."""
    from sao import decode, encode, summary

    for n, times in ((1_000, 64), (32_768, 32)):
        trajectory = rollout(n)
        header, payload = encode(trajectory)
        yield timed(f"encode, {n} tokens", lambda t=trajectory: encode(t), times)  # type: ignore[misc]
        yield timed(f"decode, {n} tokens", lambda h=header, p=payload: decode(h, p), times)  # type: ignore[misc]
    yield timed("summary", lambda: summary(header), 256)


def packing() -> Iterator[Callable[[], Measured]]:
    """pack, and the plan as the learner calls it."""
    from sao import pack
    from sao.learner.plan import plan_segments

    for n, times in ((512, 64), (8_192, 8)):
        lengths = agentic_lengths(n, 0)
        yield timed(f"pack {n} segments", lambda x=lengths: pack(x, 200_000), times)  # type: ignore[misc]
    for n, ranks, longest in ((128, 1, 1_024), (512, 1, 32_768), (512, 8, 32_768)):
        lengths = np.minimum(agentic_lengths(n, 0), longest)
        call = lambda x=lengths, r=ranks, c=longest: plan_segments(x, r, c, 4)  # noqa: E731
        yield timed(f"plan {n} segments, {ranks} ranks", call, 2)


def kernel() -> Iterator[Callable[[], Measured]]:
    """advantages as the learner calls them."""
    from sao import advantages

    rng = np.random.default_rng(0)
    for count, longest, times in ((128, 41, 64), (64, 4_096, 8), (64, 32_768, 2)):
        lengths = np.full(count, longest) if longest < 4_096 else np.clip(agentic_lengths(count, 0), 256, longest)
        cuts = np.concatenate([[0], np.cumsum(lengths)])
        mask = np.arange(cuts[-1]) % 1000 >= 300
        values = rng.standard_normal(len(mask)).astype(np.float32)
        rewards = rng.random(count).astype(np.float32)
        arguments = (values, mask, cuts, np.arange(count + 1), rewards)
        call = lambda x=arguments: advantages(*x, gamma=1.0, lambda_policy=None, lambda_critic=1.0)  # noqa: E731
        yield timed(f"advantages, {len(mask)} tokens", call, times)


def learner_step() -> Iterator[Callable[[], Measured]]:
    """A step of the learner on 128 rollouts of the quickstart's size, all causes together."""
    from learner import make_config, make_model, make_rollouts

    from sao.learner.step import Learner

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), width=64, layers=2, vocabulary=48, context=128)
        sampling = {"context_tokens": 64, "max_response_tokens": 6}
        learner = Learner(make_config(Path(folder), sampling=sampling, learner={"row_tokens": 128}))
        rollouts = make_rollouts(np.random.default_rng(1).integers(16, 25, 128), 48)

        def step() -> None:
            learner.version = 0  # that of the rollouts: none is ever too old
            learner.step(rollouts)

        yield timed("learner step, 128 rollouts", step)


def quickstart() -> Iterator[Callable[[], Measured]]:
    """The steps of a short run of the quickstart, wall clock: median of 20, the first 10 (critic warm-up) left out."""
    import sao

    example = Path(sao.__file__).parents[2] / "examples" / "quickstart"  # of the checkout that is measured
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, example / "make_model.py", model], check=True, capture_output=True)
        settings = [f"run.dir='{folder}'", f"model.path='{model}'", "run.steps=30", "eval.every_steps=1000"]
        command = [sys.executable, "-m", "sao", "train", str(example / "run.toml"), *settings]
        subprocess.run(command, check=True, capture_output=True, timeout=500, cwd=folder)
        [metrics] = Path(folder).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = sorted(line["time/step_s"] for line in lines if "time/step_s" in line and line.get("step", 0) > 10)
    yield lambda: {"quickstart step": median(found) * 1e9}


SECTIONS: dict[str, Callable[[], Iterator[Callable[[], Measured]]]] = {
    "buffer": buffer,
    "wire": wire,
    "packing": packing,
    "kernel": kernel,
    "learner": learner_step,
    "quickstart": quickstart,
}


def child(section: str) -> None:
    """Runs a section on the checkout in `PYTHONPATH` and prints {row: nanoseconds} as JSON."""
    found: dict[str, list[float]] = defaultdict(list)
    for call in SECTIONS[section]():
        call()
        gc.collect()
        gc.disable()
        end = time.perf_counter() + BUDGET_S
        while time.perf_counter() < end:
            for name, ns in call().items():
                found[name].append(ns)
        gc.enable()
    print(json.dumps({name: median(sorted(values)) for name, values in found.items()}))


def measured(checkout: Path, section: str) -> Measured:
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'python'}:{HERE.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE), "--child", section]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{section} of {checkout}: {done.stderr[-2000:]}")
    rows: Measured = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    trees = {"before": arguments.other.resolve(), "after": HERE.parents[1]}
    rows = []
    for section in arguments.sections or SECTIONS:
        rounds = []
        for number in range(arguments.rounds):
            order = ["before", "after"] if number % 2 == 0 else ["after", "before"]
            with ThreadPoolExecutor(2 if section == "quickstart" else 1) as pool:
                found = pool.map(measured, [trees[which] for which in order], [section] * 2)
                rounds.append(dict(zip(order, found, strict=True)))
        for name in rounds[0]["after"]:
            before, after = (median(sorted(one[which][name] for one in rounds)) for which in ("before", "after"))
            ratio = median(sorted(one["before"][name] / one["after"][name] for one in rounds))
            rows.append({"row": name, "before_us": before / 1e3, "after_us": after / 1e3, "ratio": ratio})
            print(f"{name:34} {before / 1e3:10.2f} us {after / 1e3:10.2f} us  {ratio:5.2f}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "before_after.json"
    kept = json.loads(file.read_text())["rows"] if file.exists() and arguments.sections else []
    new = {row["row"] for row in rows}
    rows = [row for row in kept if row["row"] not in new] + rows  # of sections that were not measured again
    result = {"machine": machine(), "rounds": arguments.rounds, "rows": rows}
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
