"""What compaction's extra rows cost the learner: the same episodes of `recall`, in one window and in seven.

Every arm runs in a process of its own: 64 episodes with a scripted policy, then steps of the learner (critic twice,
policy once) on one thread. Row tokens pass through the networks; action tokens are what is trained on. Peak memory is
what the process has needed beyond what it had before its first step. A rebuilt window repeats the summary that it goes
on from; a summary in a row of its own repeats the window that it is of, which `merge_summary` avoids.
`python bench/compaction_cost.py [--steps N]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib import util
from pathlib import Path
from typing import Any

from common import median, report

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT / "tests")]
EPISODES = 64
ARMS: dict[str, tuple[str, ...]] = {
    "one window": ("compaction.enabled=false", "sampling.context_tokens=192", "learner.row_tokens=192"),
    "seven windows, summaries in rows of their own": (),
    "seven windows, summaries merged": ("compaction.merge_summary=true",),
}


def make_model(folder: Path) -> None:
    """An untrained model of the example, for windows of up to 256 tokens."""
    spec = util.spec_from_file_location("make_model", ROOT / "examples" / "compaction" / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    program = util.module_from_spec(spec)
    spec.loader.exec_module(program)
    tokenizer = program.build_tokenizer()
    model = program.build_model(tokenizer)
    model.config.max_position_embeddings = 256
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(overrides: tuple[str, ...], folder: Path, steps: int) -> dict[str, Any]:
    """Runs one arm in this process."""
    from scripted import Reply, ScriptedEngine

    from sao.config import load
    from sao.engines.base import Request
    from sao.envs.recall import Recall, draw
    from sao.learner.step import Learner
    from sao.rollout.chat import Renderer
    from sao.rollout.compaction import Compactor
    from sao.rollout.episode import run_episode
    from sao.rollout.recorder import Assignment, Recorder
    from sao.trajectory import Trajectory

    # The same rollouts in every step, with the script's log-probs: no token may be too old or out of the band, or the
    # policy's pass would be left out.
    whole = ("staleness.max_lag=1000", "algorithm.eps_low=0.999999", "algorithm.eps_high=1e30", "learner.policy_lr=0.0")
    settings = (f"model.path={folder}", "learner.critic_warmup_steps=0", *whole, *overrides)
    config = load(ROOT / "examples" / "compaction" / "run.toml", settings)
    renderer = Renderer(folder)
    compactor = Compactor(config, renderer) if config.compaction.enabled else None

    def say(text: str) -> Reply:
        return Reply([*renderer._encode(text), renderer.stop_token_ids[0]])

    def script(request: Request, number: int) -> Reply:
        if "summary" in request.id:
            return say("pear=1 plum=1")
        seed = int(request.session.split("/")[1])
        return say(draw(seed, "train").answer if "ask" in renderer.decode(request.prompt_ids[-6:]) else "next")

    async def play() -> list[Trajectory]:
        engine = ScriptedEngine(script)
        tasks = [Assignment(seed, 0, seed, "train") for seed in range(EPISODES)]
        recorders = [Recorder(engine, renderer, config, task) for task in tasks]
        return [await run_episode(recorder, Recall(), compactor=compactor) for recorder in recorders]

    trajectories = asyncio.run(play())
    learner = Learner(config)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learner.step(trajectories)
    durations = []
    for _ in range(steps):
        begin = time.process_time()
        done = learner.step(trajectories)
        durations.append(time.process_time() - begin)
        assert done.metrics["tokens/masked"] == 0, done.metrics
    actions = sum(trajectory.n_actions for trajectory in trajectories)
    return {
        "rows": sum(len(trajectory.segments) for trajectory in trajectories),
        "tokens": sum(trajectory.n_tokens for trajectory in trajectories),
        "actions": actions,
        "seconds": median(sorted(durations)),
        "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024,
    }


def main() -> None:
    """Measures every arm in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm is not None:
        print(json.dumps(measure(ARMS[args.arm], args.model, args.steps)))
        return
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for arm in ARMS:
            command = [sys.executable, __file__, "--arm", arm, "--model", folder, "--steps", str(args.steps)]
            done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            per_action_us = 1e6 * found["seconds"] / found["actions"]
            per_row = found["tokens"] / found["actions"]
            rows.append(
                [arm, found["rows"], found["tokens"], found["actions"], per_row, per_action_us, found["peak_mib"]]
            )
    columns = ["arm", "rows", "row tokens", "action tokens", "row tokens per action", "us per action", "peak MiB"]
    report("compaction_cost", columns, rows, f"{EPISODES} episodes; CPU time of one learner step, median; one thread.")


if __name__ == "__main__":
    main()
