"""500 weight updates of the real vLLM under load: versions exact, fingerprints equal, memory flat.

`python bench/vllm_updates.py [UPDATES]`. A tiny model on the CPU: the seconds are those of the transaction itself and
not of reading large files.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from common import RESULTS, machine  # noqa: E402

WORKERS, PAUSE_S, STEADY_S = 12, 0.1, 15.0
WARM_UP = 0.2  # share of the updates before memory is fitted
SHAPE = {"head_dim": 32}  # vLLM's attention on a CPU has no smaller heads


def resident() -> dict[str, int]:
    """Resident bytes of this process and of vLLM's."""
    me = psutil.Process()
    children = [child for child in me.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
    return {"generator": me.memory_info().rss, "vllm": sum(child.memory_info().rss for child in children)}


def quantiles(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    array = np.asarray(values) * 1e3
    return {
        "p50_ms": round(float(np.median(array)), 2),
        "p99_ms": round(float(np.quantile(array, 0.99)), 2),
        "max_ms": round(float(array.max()), 2),
    }


def slope(values: list[int]) -> dict[str, Any]:
    """Straight line through resident memory after the warm-up: KiB an update, its standard error, MiB at the end."""
    kept = np.asarray(values[int(len(values) * WARM_UP) :], dtype=float) / 1024
    x = np.arange(kept.size, dtype=float)
    (a, b), cov = np.polyfit(x, kept, 1, cov=True)
    return {
        "every_tenth_of_the_run_mib": [round(v / 2**20, 1) for v in values[:: max(1, len(values) // 10)]],
        "kib_per_update": round(float(a), 3),
        "standard_error": round(float(cov[0, 0] ** 0.5), 3),
        "mib_after_warm_up": round(float(b) / 1024, 1),
        "mib_at_the_end": round(float(kept[-1]) / 1024, 1),
    }


async def measure(folder: Path, updates: int) -> dict[str, Any]:
    """Steady load, then updates under load, then the check of every token."""
    from engines.live_updates import TOLERANCE, Live
    from tiny_model import make_folder, make_model

    from sao.engines.vllm.engine import VllmEngine

    (folder / "published").mkdir()
    model = make_folder(folder / "model", 0, **SHAPE)
    arguments = {"kv_cache_memory_bytes": 64 << 20}
    engine = VllmEngine(model, context_tokens=256, concurrency=16, vllm_args=arguments)
    live = Live(engine, partial(make_model, **SHAPE), folder / "published", WORKERS, rss=resident)
    began = time.monotonic()
    await engine.start()
    start_s = time.monotonic() - began
    try:
        rate, firsts = await live.steady(STEADY_S)
        took, tokens = await live.play(range(1, updates + 1), PAUSE_S)
        metadata = engine.metadata
    finally:
        await engine.close()
    print(f"{updates} updates in {took:.0f} s; checking {len(live.done)} completions", flush=True)
    checked = live.check()
    causes = {name: quantiles([u.causes.get(name, 0.0) for u in live.updates]) for name in live.updates[0].causes}
    stopped = ("gate", "pause", "load", "report", "cache", "resume")
    paused = [sum(u.causes.get(name, 0.0) for name in stopped) for u in live.updates]
    return {
        "engine": metadata,
        "updates": updates,
        "workers": WORKERS,
        "start_s": round(start_s, 1),
        "tolerance_nats": TOLERANCE,
        "checked": checked,
        "update_by_cause": causes,
        "generation_stopped": quantiles(paused),
        "first_token_after_an_update": quantiles([u.first_token_s for u in live.updates]),
        "first_token_without_updates": quantiles(firsts),
        "tokens_per_s_without_updates": round(rate, 1),
        "tokens_per_s_with_updates": round(tokens / took, 1),
        "updates_per_s": round(updates / took, 2),
        "tokens_lost_per_update": round((rate * took - tokens) / updates, 1),
        "tokens_lost_to_the_pause_per_update": round(rate * float(np.mean(paused)), 1),
        "resident": {name: slope([u.rss_bytes[name] for u in live.updates]) for name in live.updates[0].rss_bytes},
    }


def main() -> None:
    import torch

    torch.set_num_threads(1)
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    with tempfile.TemporaryDirectory(prefix="updates-") as name:
        result = {"machine": machine(), **asyncio.run(measure(Path(name), updates))}
    text = json.dumps(result, indent=1)
    print(text)
    if updates >= 500:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "vllm_updates.json").write_text(text + "\n")
    checked = result["checked"]
    if checked["tokens_beside_a_boundary"] < updates:
        raise SystemExit("too few requests were in flight during updates to say anything")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
