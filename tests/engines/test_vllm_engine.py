"""The vLLM engine, with the real vLLM on a CPU: log-probs, versions, updates that are refused or fail, and its end.

One engine serves the whole module, in order: the last tests break it and close it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engines.full_forward import full_forward, largest_difference
from tiny_model import make_folder, make_model

from sao.engines.base import Completion, Request
from sao.engines.vllm.engine import VllmEngine
from sao.errors import ClosedError, EngineError, WeightsError
from sao.transport.weights import WeightsRef, fingerprint, publish

pytest.importorskip("vllm", reason="needs the extra `vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(170)]

TOLERANCE = 1e-4
CONTEXT = 256
SHAPE = {"head_dim": 32}  # vLLM's attention on a CPU has no smaller heads
ARGS = {"kv_cache_memory_bytes": 64 << 20}


class Served:
    """The engine, the models of the versions it was given, and the loop both live in."""

    def __init__(self, folder: Path, published: Path) -> None:
        self.published = published
        self.models = {0: make_model(0, **SHAPE)}
        self.runner = asyncio.Runner()
        self.engine = VllmEngine(folder, context_tokens=CONTEXT, concurrency=16, vllm_args=ARGS)
        self.run(self.engine.start())
        self.numbers = itertools.count()
        self.rng = np.random.default_rng(0)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def request(self, prompt: int | np.ndarray = 20, new: int = 16, **more: Any) -> Request:
        """A request with a session of its own; `prompt`: ids, or how many random ones."""
        ids = self.rng.integers(3, 48, prompt) if isinstance(prompt, int) else prompt
        number = next(self.numbers)
        values: dict[str, Any] = {
            "temperature": 1.0,
            "stop_token_ids": (),
            "seed": None,
            "session": f"s{number}",
        } | more
        return Request(id=f"r{number}", prompt_ids=ids.astype(np.int32), max_new_tokens=new, **values)

    async def together(self, asked: list[Request]) -> list[Completion]:
        return await asyncio.gather(*(self.engine.generate(request) for request in asked))

    def publish(self, version: int) -> WeightsRef:
        """Publishes random weights as this version and remembers their model."""
        self.models[version] = make_model(version, **SHAPE)
        return publish(dict(self.models[version].named_parameters()), self.published, version, keep=100)

    def difference(self, asked: Request, completion: Completion) -> float:
        return largest_difference(self.models, asked, completion)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    folder = make_folder(tmp_path_factory.mktemp("model"), 0, **SHAPE)
    served = Served(folder, tmp_path_factory.mktemp("published"))
    yield served
    served.run(served.engine.close())
    served.runner.close()


def test_logprobs_of_many_turns_match_a_full_forward(served: Served) -> None:
    assert served.engine.version == 0
    assert served.engine.fingerprint == fingerprint(dict(served.models[0].named_parameters()))
    histories = [served.rng.integers(3, 48, 30 + 7 * index) for index in range(6)]
    for _ in range(4):
        asked = [served.request(ids, 16, session=f"turns {index}") for index, ids in enumerate(histories)]
        done = served.run(served.together(asked))
        for request, completion in zip(asked, done, strict=True):
            assert completion.token_ids.size == 16 and completion.stop_reason == "length"
            assert completion.fingerprints == {0: served.engine.fingerprint}
            assert served.difference(request, completion) < TOLERANCE
        glue = served.rng.integers(3, 48, 5)
        histories = [
            np.concatenate([ids, completion.token_ids, glue]) for ids, completion in zip(histories, done, strict=True)
        ]


def test_temperatures_in_one_batch_each_scale_their_own_logprobs(served: Served) -> None:
    asked = [served.request(temperature=temperature) for temperature in (0.7, 0.0, 1.0, 2.0, 0.7)]
    done = served.run(served.together(asked))
    for request, completion in zip(asked, done, strict=True):
        assert served.difference(request, completion) < TOLERANCE
    unscaled = Request(**{name: getattr(asked[0], name) for name in Request.__slots__} | {"temperature": 1.0})
    assert served.difference(unscaled, done[0]) > 0.05
    with torch.inference_mode():
        ids = torch.from_numpy(np.concatenate([asked[1].prompt_ids, done[1].token_ids]).astype(np.int64))
        likeliest = served.models[0](input_ids=ids[None]).logits[0].argmax(-1)[asked[1].prompt_ids.size - 1 : -1]
    assert likeliest.tolist() == done[1].token_ids.tolist()


def test_the_stop_token_is_sampled_and_scored(served: Served) -> None:
    asked = [served.request(new=200, stop_token_ids=(2, 11, 30)) for _ in range(8)]
    done = served.run(served.together(asked))
    stopped = [completion for completion in done if completion.stop_reason == "stop"]
    assert len(stopped) >= 6  # 3 of 48 tokens stop, and there are 200 of them
    for request, completion in zip(asked, done, strict=True):
        assert served.difference(request, completion) < TOLERANCE
        assert (completion.stop_reason == "stop") == (int(completion.token_ids[-1]) in request.stop_token_ids)


def test_the_end_of_the_context_window(served: Served) -> None:
    asked = [served.request(CONTEXT - 3, 16), served.request(CONTEXT, 16), served.request(CONTEXT + 9, 16)]
    done = served.run(served.together(asked))
    assert [(completion.token_ids.size, completion.stop_reason) for completion in done] == [
        (3, "length"),
        (0, "context"),
        (0, "context"),
    ]
    assert served.difference(asked[0], done[0]) < TOLERANCE


def test_a_seed_repeats_a_request(served: Served) -> None:
    prompt = served.rng.integers(3, 48, 20)
    done = served.run(served.together([served.request(prompt, 24, seed=seed) for seed in (5, 6, 5)]))
    assert done[0].token_ids.tolist() == done[2].token_ids.tolist() != done[1].token_ids.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.001}, r"temperature: 0\.001, expected 0 or 0\.01 to 2"),
        ({"temperature": 2.5}, r"temperature: 2\.5, expected 0 or 0\.01 to 2"),
        ({"temperature": -1.0}, "temperature"),
        ({"prompt_ids": np.array([3, 48], np.int32)}, "token 48, vocabulary of 48"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_requests_without_sense_are_refused(served: Served, change: dict[str, Any], message: str) -> None:
    plain = served.request()
    values = {name: getattr(plain, name) for name in Request.__slots__} | change
    with pytest.raises(EngineError, match=message):
        served.run(served.engine.generate(Request(**values)))


def test_one_request_of_a_session_at_a_time(served: Served) -> None:
    async def twice() -> None:
        first = asyncio.ensure_future(served.engine.generate(served.request(new=100, session="same")))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="session same already has a request in flight"):
            await served.engine.generate(served.request(session="same"))
        await first

    served.run(twice())


@pytest.mark.parametrize("name", ["logprobs_mode", "model", "speculative_config", "override_generation_config"])
def test_arguments_that_the_engine_relies_on_are_refused(served: Served, tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path)
    with pytest.raises(EngineError, match=f"vllm_args: {name}"):
        VllmEngine(folder, context_tokens=64, vllm_args={name: "x"})
    with pytest.raises(EngineError, match="kv_after_update: 'half'"):
        VllmEngine(folder, context_tokens=64, vllm_args={"kv_after_update": "half"})
    with pytest.raises(EngineError, match=r"no config\.json"):
        VllmEngine(tmp_path / "nothing", context_tokens=64)


def test_a_model_that_vllm_cannot_compute_is_refused_at_the_start(tmp_path: Path) -> None:
    engine = VllmEngine(make_folder(tmp_path, head_dim=16), context_tokens=64, vllm_args=ARGS)
    with pytest.raises(EngineError, match="heads of size 16"):
        asyncio.run(engine.start())


def test_release_ends_a_request_and_keeps_what_was_sampled(served: Served) -> None:
    async def released() -> Completion:
        request = served.request(new=230)
        flight = asyncio.ensure_future(served.engine.generate(request))
        await asyncio.sleep(0.15)
        await served.engine.release(request.session)
        await served.engine.release("unknown")
        completion = await flight
        assert completion.stop_reason == "abort" and 0 < completion.token_ids.size < 230
        assert served.difference(request, completion) < TOLERANCE
        return completion

    before = served.engine.stats()
    completion = served.run(released())
    after = served.engine.stats()
    assert after.sampled_tokens == before.sampled_tokens + completion.token_ids.size
    assert after.running == after.waiting == 0 and after.busy_s > before.busy_s


def test_a_cancelled_request_is_gone(served: Served) -> None:
    async def cancelled() -> None:
        flight = asyncio.ensure_future(served.engine.generate(served.request(new=230, session="cancelled")))
        await asyncio.sleep(0.05)
        flight.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flight
        assert served.engine.stats().running == 0
        await served.engine.generate(served.request(session="cancelled"))

    served.run(cancelled())


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.down_proj.weight"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(2, 2)


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def untie(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, r"1 missing, first: model\.layers\.1\.mlp\.down_proj\.weight"),
        (add, r"1 unknown, first: model\.layers\.2"),
        (transpose, r"q_proj\.weight: torch\.float32\[64, 128\], expected floats \[128, 64\]"),
        (untie, r"lm_head\.weight: differs from model\.embed_tokens\.weight"),
        ("flip", r"fingerprint [0-9a-f]{32}, expected [0-9a-f]{32} for version 1"),
        ("cut", r"cannot read"),
        ("gone", r"cannot read"),
        ("renumber", r"holds version 1, expected 2"),
    ],
)
def test_a_wrong_update_is_refused_and_the_old_weights_serve_on(
    served: Served, tmp_path: Path, spoil: Any, message: str
) -> None:
    tensors = {name: tensor.detach() for name, tensor in make_model(9, **SHAPE).named_parameters()}
    if callable(spoil):
        spoil(tensors)
    ref = publish(tensors, tmp_path, 1)
    file = Path(ref.path)
    data = bytearray(file.read_bytes())
    if spoil == "flip":
        data[-5] ^= 1
        file.write_bytes(data)
    elif spoil == "cut":
        file.write_bytes(data[:-100])
    elif spoil == "gone":
        file.unlink()
    elif spoil == "renumber":
        ref = WeightsRef(2, ref.path, ref.fingerprint)

    async def refused() -> None:
        request = served.request(new=120)
        flight = asyncio.ensure_future(served.engine.generate(request))
        await asyncio.sleep(0.02)
        with pytest.raises(WeightsError, match=message):
            await served.engine.update_weights(ref)
        assert served.engine.version == 0
        completion = await flight
        assert completion.version_spans.tolist() == [[0, 120, 0]]
        assert served.difference(request, completion) < TOLERANCE
        again = served.request(request.prompt_ids)
        assert served.difference(again, await served.engine.generate(again)) < TOLERANCE

    served.run(refused())


def test_versions_of_tokens_are_exact_across_updates_in_flight(served: Served) -> None:
    async def updated() -> None:
        asked = [served.request(40 + index, 200) for index in range(24)]  # more than `concurrency`: some wait
        flights = [asyncio.ensure_future(served.engine.generate(request)) for request in asked]
        for version in (1, 2, 5):
            await asyncio.sleep(0.2)
            await served.engine.update_weights(served.publish(version))
            assert served.engine.version == version
        done = await asyncio.gather(*flights)
        crossed = [completion for completion in done if len(completion.version_spans) > 1]
        assert len(crossed) >= 8, [completion.version_spans.tolist() for completion in done]
        for request, completion in zip(asked, done, strict=True):
            assert served.difference(request, completion) < TOLERANCE
            prints = {v: fingerprint(dict(served.models[v].named_parameters())) for v in completion.fingerprints}
            assert completion.fingerprints == prints
        # The boundary is where it is said to be, to the token: one further to either side is visibly wrong.
        for request, completion in zip(asked, done, strict=True):
            for (_, at, old), (_, _, new) in itertools.pairwise(completion.version_spans.tolist()):
                wrong = {
                    at - 1: full_forward(served.models[new], request, completion),
                    at: full_forward(served.models[old], request, completion),
                }
                assert all(abs(scores[index] - completion.logprobs[index]) > 1e-3 for index, scores in wrong.items())
        later = served.request(asked[0].prompt_ids, 40)  # a prompt whose keys were cached under older weights
        completion = await served.engine.generate(later)
        assert completion.version_spans.tolist() == [[0, 40, 5]]
        assert served.difference(later, completion) < TOLERANCE

    served.run(updated())


def test_a_tiny_change_of_the_weights_arrives_everywhere(served: Served) -> None:
    model = make_model(5, **SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.tensor(torch.inf)))
    tensors = dict(model.named_parameters())
    ref = publish(tensors, served.published, 6, keep=100)
    served.models[6] = model
    served.run(served.engine.update_weights(ref))
    (report,) = served.run(served.engine._llm.collective_rpc("sao_report"))
    # 2 layers of qkv, output, gate and up, down; the embedding; the head; and 5 norms and other plain parameters.
    assert report["fingerprint"] == ref.fingerprint and report["probed"] >= 15


def test_an_older_version_is_refused_and_the_present_one_is_no_change(served: Served) -> None:
    fifth = served.publish(5)
    with pytest.raises(EngineError, match="already serves version 6"):
        served.run(served.engine.update_weights(fifth))
    present = WeightsRef(6, "/nowhere", served.engine.fingerprint)
    served.run(served.engine.update_weights(present))
    with pytest.raises(EngineError, match="already serves version 6"):
        served.run(served.engine.update_weights(WeightsRef(6, "/nowhere", "0" * 32)))


def test_a_load_that_fails_half_way_makes_the_engine_unusable(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(_: str) -> None:
        raise RuntimeError("device lost")

    async def broken() -> None:
        flight = asyncio.ensure_future(served.engine.generate(served.request(new=200)))
        await asyncio.sleep(0.05)
        monkeypatch.setattr(served.engine._llm, "finish_weight_update", failing)
        with pytest.raises(EngineError, match=r"version 7: the load failed, the engine is unusable.*device lost"):
            await served.engine.update_weights(served.publish(7))
        with pytest.raises(EngineError, match="unusable"):
            await flight
        with pytest.raises(EngineError, match="unusable"):
            await served.engine.generate(served.request())
        with pytest.raises(EngineError, match="unusable"):
            await served.engine.update_weights(served.publish(8))

    served.run(broken())


def vllm_processes(of: int) -> list[psutil.Process]:
    """Descendants, without Python's resource tracker, which ends with its parent and not before."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if not any("resource_tracker" in part for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in shared memory that these processes have mapped."""
    maps = [map.path for process in processes for map in process.memory_maps()]
    return {Path(path) for path in maps if path.startswith("/dev/shm/")}


def test_close_leaves_nothing(served: Served) -> None:
    folder, processes = served.engine._folder, vllm_processes(os.getpid())
    assert folder is not None and folder.exists() and processes
    shared = shared_memory(processes)
    served.run(served.engine.close())
    served.run(served.engine.close())
    assert vllm_processes(os.getpid()) == []
    assert not folder.exists()
    assert not [path for path in shared if path.exists()]
    with pytest.raises(ClosedError):
        served.run(served.engine.generate(served.request()))
    with pytest.raises(ClosedError):
        served.run(served.engine.update_weights(WeightsRef(9, "/nowhere", "0" * 32)))


PROGRAM = """
import asyncio, sys
from sao.engines.vllm.engine import VllmEngine

async def main():
    engine = VllmEngine(sys.argv[1], context_tokens=64, vllm_args={"kv_cache_memory_bytes": 1 << 26})
    await engine.start()
    print("ready", engine._folder, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_nothing_outlives_a_generator_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = make_folder(tmp_path / "model", 0, **SHAPE)
    with subprocess.Popen([sys.executable, program, folder], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("ready"))
            private = Path(line.split()[1])
            assert private.exists() and private.name.startswith("sao-vllm-")
            started = psutil.Process(process.pid).children(recursive=True)
            shared = shared_memory(started)
            assert started
        finally:
            process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    deadline = time.monotonic() + 10
    while (private.exists() or any(path.exists() for path in shared)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not private.exists()
    assert not [path for path in shared if path.exists()]
