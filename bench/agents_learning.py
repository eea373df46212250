"""A small policy learns to use a tool through agents of others: docs/results/agents.md.

    python bench/agents_learning.py [NAME ...] [--seeds 0 1 2] [--folder runs/agents-learning]

Names: openai-agents, verifiers. Each run is examples/agents/learning from nothing: start policy, generators, learner,
and the real package in processes of its own. Runs that bench/results/agents_learning.json has are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine

from sao.telemetry import sinks
from sao.telemetry.metrics import wilson

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT / "scripts")]

import agent_venvs  # noqa: E402

EXAMPLE = ROOT / "examples" / "agents" / "learning"
FOUND, PAGE = RESULTS / "agents_learning.json", ROOT / "docs" / "results" / "agents.md"
PICTURE = ROOT / "docs" / "img" / "agents-learning.png"
PROGRAMS = {"openai-agents": ("openai-agents", "sdk.py"), "verifiers": ("verifiers-0.1", "verifiers_env.py")}
TITLES = {"openai-agents": "OpenAI Agents SDK, responses", "verifiers": "verifiers 0.1, chat"}
CURVE = ("step", "reward/success", "rollout/turns", "rollout/segments", "rollout/drift", "broker/step_s")
AT_ONCE = 32  # episodes of a program, of which each generator has one


def trained(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run to its end: held-out rounds, and its steps."""
    venv, program = PROGRAMS[name]
    subprocess.run([sys.executable, str(ROOT / "scripts" / "agent_venvs.py"), venv], check=True)
    model, run = folder / f"model-{seed}", folder / f"{name}-{seed}"
    if not (model / "tokenizer.json").exists():
        make = [sys.executable, str(EXAMPLE / "make_model.py"), str(model), "--seed", str(seed)]
        subprocess.run(make, check=True)
    began = time.perf_counter()
    command = f"{agent_venvs.python_of(venv)} {EXAMPLE / program} {AT_ONCE}"
    overrides = [f"model.path={model}", f"run.dir={folder}", f"run.name={run.name}", f"run.seed={seed}"]
    overrides += [f'env.args.command="{command}"', *(["--overwrite"] if run.exists() else [])]
    train = [sys.executable, "-m", "sao.cli", "train", str(EXAMPLE / "run.toml"), *overrides]
    subprocess.run(train, check=True, cwd=ROOT)
    records = sinks.read(run / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    return {
        "name": name,
        "seed": seed,
        "seconds": round(time.perf_counter() - began),
        "held_out": [[r["step"], r["success"], r["n"]] for r in records if r["kind"] == "eval"],
        "steps": [[step.get(key) for key in CURVE] for step in steps],
    }


def page(runs: list[dict[str, Any]]) -> str:
    """The table of the page."""
    lines = [
        "| through | seed | start policy | end | 95 % interval | first above 0.9 | calls of the model, start and end |"
        " drift | segments | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    turns, segments, drift = (CURVE.index(f"rollout/{key}") for key in ("turns", "segments", "drift"))
    for run in runs:
        (_, before, _), (_, after, n) = run["held_out"][0], run["held_out"][-1]
        low, high = wilson(round(after * n), n)
        first = next((f"step {step}" for step, success, _ in run["held_out"] if success > 0.9), "never")
        ends = [statistics.fmean(step[turns] for step in part) for part in (run["steps"][:5], run["steps"][-5:])]
        cells = [TITLES[run["name"]], run["seed"], f"{before:.3f}", f"{after:.3f}", f"{low:.3f} to {high:.3f}", first]
        cells += [f"{ends[0]:.2f} and {ends[1]:.2f}", f"{max(step[drift] or 0 for step in run['steps']):.3f}"]
        cells += [f"{statistics.fmean(step[segments] for step in run['steps']):.3f}", run["seconds"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def picture(runs: list[dict[str, Any]]) -> None:
    """Held-out success by step, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TITLES), figsize=(9, 3.4), sharey=True)
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        for run in (run for run in runs if run["name"] == name):
            steps, success, _ = zip(*run["held_out"], strict=True)
            axis.plot(steps, success, marker="o", markersize=3, label=f"seed {run['seed']}")
        axis.axhline(0.9, color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=title, xlabel="step (64 episodes each)", ylim=(0, 1.02))
        axis.legend(loc="lower right", frameon=False)
    axes[0].set_ylabel("held-out success")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


def written(runs: list[dict[str, Any]]) -> None:
    """Writes picture and page."""
    picture(runs)
    head, mark, rest = PAGE.read_text().partition("<!-- learning -->\n")
    tail = rest.partition("<!-- end of learning -->")[2]
    PAGE.write_text(f"{head}{mark}{page(runs)}\n<!-- end of learning -->{tail}")


def main() -> None:
    """Runs what is missing, and writes results, picture and page after each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=[*PROGRAMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/agents-learning"))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    runs = json.loads(FOUND.read_text())["runs"] if FOUND.exists() else []
    for seed in args.seeds:
        for name in args.names:
            if any((run["name"], run["seed"]) == (name, seed) for run in runs):
                continue
            print(f"{name}, seed {seed}", flush=True)
            runs.append(trained(name, seed, args.folder.resolve()))
            runs.sort(key=lambda run: (run["name"], run["seed"]))
            packages = {venv: agent_venvs.PACKAGES[venv] for venv, _ in PROGRAMS.values()}
            found = {"machine": machine(), "packages": packages, "curve": CURVE, "runs": runs}
            FOUND.write_text(json.dumps(found) + "\n")
            written(runs)
    written(runs)
    print(page(runs))


if __name__ == "__main__":
    main()
