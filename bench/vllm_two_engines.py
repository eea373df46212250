"""Two real vLLM engines in one generator: updates go to both, and when one fails its load the other goes on alone.

Writes bench/results/vllm_two_engines.json: requests lost, and every token checked against the weights of its version.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from common import RESULTS, machine  # noqa: E402

SHAPE = {"head_dim": 32}  # vLLM's attention on a CPU has no smaller heads
UPDATES, WORKERS = 10, 8


async def measure(folder: Path) -> dict[str, Any]:
    """Updates of both, then one whose load fails in the second engine, then updates of the first alone."""
    from engines.live_updates import Live
    from tiny_model import make_folder, make_model

    from sao.engines.group import EngineGroup
    from sao.engines.vllm_engine import VllmEngine
    from sao.errors import Error

    (folder / "published").mkdir()
    model, arguments = make_folder(folder / "model", 0, **SHAPE), {"kv_cache_memory_bytes": 64 << 20}
    engines = [VllmEngine(model, context_tokens=256, concurrency=8, vllm_args=arguments, index=k) for k in range(2)]
    group = EngineGroup(engines)
    live = Live(group, partial(make_model, **SHAPE), folder / "published", WORKERS, new_tokens=80)
    lost: list[str] = []
    stop = asyncio.Event()

    async def worker() -> None:
        while not stop.is_set():
            request = live.request()
            try:
                live.done.append((request, await group.generate(request)))
            except Error as error:
                lost.append(type(error).__name__)
            await group.release(request.session)

    async def failing(_: str) -> None:
        raise RuntimeError("device lost")

    await group.start(None)
    try:
        workers = [asyncio.create_task(worker()) for _ in range(WORKERS)]
        for version in range(1, UPDATES + 1):
            await asyncio.sleep(0.2)
            await group.update_weights(live.publish(version))
            assert [engine.version for engine in engines] == [version, version]
        shares = [engine.stats().sampled_tokens for engine in engines]
        engines[1]._llm.finish_weight_update = failing
        for version in range(UPDATES + 1, 2 * UPDATES + 1):
            await asyncio.sleep(0.2)
            await group.update_weights(live.publish(version))
            assert (engines[0].version, group.version, group.broken) == (version, version, None)
        reason = engines[1].broken
        stop.set()
        await asyncio.gather(*workers)
    finally:
        await group.close()
    return {
        "updates_of_both": UPDATES,
        "updates_of_the_first_alone": UPDATES,
        "sampled_tokens_of_each_before": shares,
        "second_engine": reason,
        "workers": WORKERS,
        "requests_lost": len(lost),
        "lost_as": sorted(set(lost)),
        "checked": live.check(),
    }


def main() -> None:
    """Measures and writes."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="two-engines-") as name:
        result = {"machine": machine(), **asyncio.run(measure(Path(name)))}
    text = json.dumps(result, indent=1)
    print(text)
    (RESULTS / "vllm_two_engines.json").write_text(text + "\n")
    if result["requests_lost"] > WORKERS:
        raise SystemExit("more requests were lost than the failed engine had")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
