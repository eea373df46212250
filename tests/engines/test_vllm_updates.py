"""Updates of the real vLLM under load, the short form of `bench/vllm_updates.py`, and its death.

One engine serves the module, in order: the last test kills its process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engines.live_updates import Live
from tiny_model import make_folder, make_model

from sao.engines.vllm.engine import VllmEngine
from sao.errors import EngineError

pytest.importorskip("vllm", reason="needs the extra `vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(170)]

SHAPE = {"head_dim": 32}  # vLLM's attention on a CPU has no smaller heads


class Served:
    def __init__(self, folder: Path) -> None:
        (folder / "published").mkdir()
        model = make_folder(folder / "model", 0, **SHAPE)
        self.published, self.runner = folder / "published", asyncio.Runner()
        arguments = {"kv_cache_memory_bytes": 64 << 20}
        self.engine = VllmEngine(model, context_tokens=256, concurrency=8, vllm_args=arguments)
        self.runner.run(self.engine.start())

    def live(self, workers: int = 5, **more: Any) -> Live:
        return Live(self.engine, partial(make_model, **SHAPE), self.published, workers, new_tokens=80, **more)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    served.runner.run(served.engine.close())
    served.runner.close()


def test_every_token_is_of_the_version_that_it_names(served: Served) -> None:
    first = served.engine.version + 1
    live = served.live(seed=first)
    served.runner.run(live.play(range(first, first + 8), 0.05))
    checked = live.check()
    assert checked["versions"] >= 8 and checked["requests_over_several_versions"] >= 6, checked
    assert checked["of_these_told_apart"] >= 0.98 * checked["tokens_beside_a_boundary"] > 0, checked
    assert served.engine.metadata["version_source"] == "engine"
    causes = served.engine.update_s
    assert {"start", "read", "gate", "pause", "load", "report", "cache", "resume", "whole"} <= causes.keys()
    assert sum(causes[name] for name in causes if name != "whole") <= causes["whole"] * 1.01


def test_with_kept_keys_requests_go_on_and_new_ones_see_no_old_key(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Behind an update in flight no single version gives the log-probs; before it, and in later requests, one does."""
    monkeypatch.setattr(served.engine, "_after", "keep")
    first = served.engine.version + 1
    live = served.live(seed=99)
    served.runner.run(live.play(range(first, first + 4), 0.1))
    assert {completion.stop_reason for _, completion in live.done} == {"length"}  # none was aborted
    checked = live.check(first_spans=True)
    assert checked["requests_over_several_versions"] >= 3, checked
    # The same prompts again: their keys of older versions are still in the cache, under another name space.
    later = served.live(seed=100)
    served.runner.run(later.again([request for request, _ in live.done[:8]]))
    assert later.check()["versions"] == 1


def test_load_is_reported_while_there_is_any(served: Served) -> None:
    async def watch() -> list[Any]:
        live, seen = served.live(workers=8), []
        stop = asyncio.Event()
        workers = [asyncio.create_task(live.worker(stop)) for _ in range(12)]  # more than the engine runs at once
        for _ in range(10):
            await asyncio.sleep(0.05)
            seen.append(served.engine.stats())
        stop.set()
        await asyncio.gather(*workers)
        return [*seen, served.engine.stats()]

    *seen, after = served.runner.run(watch())
    assert max(stats.kv_use for stats in seen) > 0.002 and max(stats.waiting for stats in seen) >= 4
    assert (after.running, after.waiting, after.kv_use) == (0, 0, 0.0)


def test_a_process_that_is_killed_fails_the_requests_in_flight_and_all_further_ones(served: Served) -> None:
    async def killed() -> None:
        live = served.live()
        flight = asyncio.ensure_future(served.engine.generate(live.request(200)))
        await asyncio.sleep(0.1)
        for process in psutil.Process(os.getpid()).children(recursive=True):
            if "resource_tracker" not in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="vLLM"):
            await flight
        with pytest.raises(EngineError, match="its process has died"):
            await served.engine.generate(live.request(4))
        with pytest.raises(EngineError, match="its process has died"):
            await served.engine.update_weights(live.publish(served.engine.version + 1))

    served.runner.run(killed())
