"""Training through the OpenAI-compatible endpoint, and what the endpoint costs.

    python bench/openai_agent.py [--seeds 0 1]

Writes bench/results/openai_agent.json: runs of examples/openai-agent from nothing, one a seed, beside the same task
played inside the generators (examples/quickstart); and calls through the endpoint to an engine that answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT / "tests")]
RUNS = {"agent": "examples/openai-agent/run.toml", "inside": "examples/quickstart/run.toml"}
CLIENTS, CALLS = 32, 60


def trained(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run to its end."""
    model = folder / f"model-{seed}"
    if not model.exists():
        make = [sys.executable, "examples/quickstart/make_model.py", str(model), "--seed", str(seed)]
        subprocess.run(make, check=True, cwd=ROOT)
    overrides = [f"model.path={model}", f"run.dir={folder}", f"run.name={kind}-{seed}", f"run.seed={seed}"]
    if kind == "agent":
        overrides.append(f'env.args.command="{sys.executable} examples/openai-agent/agent.py 64"')
    began = time.perf_counter()
    command = [sys.executable, "-m", "sao.cli", "train", RUNS[kind], *overrides]
    subprocess.run(command, check=True, cwd=ROOT)
    seconds = time.perf_counter() - began
    lines = (folder / f"{kind}-{seed}" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rounds = [record for record in records if record["kind"] == "eval"]
    steps = [record for record in records if record["kind"] == "step"]
    return {
        "kind": kind,
        "seed": seed,
        "seconds": round(seconds),
        "steps": len(steps),
        "held_out_before": rounds[0]["success"],
        "held_out_after": rounds[-1]["success"],
        "episodes": rounds[-1]["n"],
        "median_step_s": round(statistics.median(step["broker/step_s"] for step in steps), 2),
        "largest_mean_logprob_gap_nats": max(step.get("logprob_gap/mean", 0.0) for step in steps),
        "segments_per_rollout": round(statistics.fmean(step["rollout/segments"] for step in steps), 3),
    }


async def calls(folder: Path) -> dict[str, Any]:
    """Calls of many agents at once, each three turns long, to an engine that answers at once."""
    import aiohttp
    from scripted import Reply, ScriptedEngine
    from tiny_model import make_folder

    from sao.agents.host import AgentHost
    from sao.config import parse
    from sao.envs.agent import Access
    from sao.rollout.chat import Renderer
    from sao.rollout.recorder import Assignment, Recorder

    model = make_folder(folder / "tiny")
    env = {"name": "agent", "args": {"command": ["true"]}, "max_turns": 3}
    config = parse({"model": {"path": str(model)}, "env": env, "sampling": {"context_tokens": 512}})
    waits: list[float] = []

    class Three:
        reward_range, replayable = (0.0, 1.0), True

        async def play(self, seed: int, split: str, access: Access) -> float:
            messages = [{"role": "user", "content": "a b c d"}]
            headers = {"Authorization": f"Bearer {access.api_key}"}
            for _ in range(3):
                began = time.perf_counter()
                url = f"{access.base_url}/chat/completions"
                async with http.post(url, json={"messages": messages}, headers=headers) as answer:
                    body = await answer.json()
                waits.append(time.perf_counter() - began)
                said = body["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "e f"}]
            return 1.0

        async def close(self) -> None: ...

    host, renderer = AgentHost(config, "g0"), Renderer(model)
    engine = ScriptedEngine(lambda *_: Reply([20, 21, 2]), record=False)
    await host.start(Three())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CLIENTS)) as http:

        async def client(number: int) -> int:
            segments = 0
            for index in range(CALLS // 3):
                task = Assignment(number * CALLS + index, 0, 1, "train")
                done = await host.play(Recorder(engine, renderer, config, task), Three())
                segments += len(done.segments)
                assert done.metadata["agent_drift"] == 0
            return segments

        began = time.perf_counter()
        segments = await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        seconds = time.perf_counter() - began
    await host.close()
    waits.sort()
    return {
        "calls": len(waits),
        "clients": CLIENTS,
        "segments": sum(segments),
        "calls_per_s": round(len(waits) / seconds),
        "p50_ms": round(waits[len(waits) // 2] * 1e3, 1),
        "p99_ms": round(waits[int(len(waits) * 0.99)] * 1e3, 1),
        "note": "server and clients share one process and one core, so a call costs 1 / calls_per_s of both together",
    }


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        endpoint = asyncio.run(calls(Path(folder)))
        print(json.dumps(endpoint, indent=1), flush=True)
        runs = [trained(kind, seed, Path(folder)) for seed in seeds for kind in RUNS]
    result = {"machine": machine(), "endpoint": endpoint, "runs": runs}
    print(json.dumps(result, indent=1))
    if runs:
        (RESULTS / "openai_agent.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
