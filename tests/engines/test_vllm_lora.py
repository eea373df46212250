"""LoRA adapters as updates of the real vLLM: each token is that of the base with its version's adapter merged in."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from engines.live_updates import Live
from safetensors.torch import save_file
from tiny_model import make_folder, make_model

from sao.engines.vllm.engine import VllmEngine
from sao.errors import EngineError, WeightsError
from sao.transport.weights import WeightsRef, fingerprint

pytest.importorskip("vllm", reason="needs the extra `vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(170)]

SHAPE = {"head_dim": 32}  # vLLM's attention on a CPU has no smaller heads
RANK, ALPHA = 4, 8


def factors(version: int) -> dict[str, torch.Tensor]:
    """Random A [RANK, in] and B [out, RANK] for three kinds of layers, by PEFT's names."""
    random, found = torch.Generator().manual_seed(version), {}
    for name, weight in make_model(0, **SHAPE).named_parameters():
        if name.split(".")[-2] in ("q_proj", "v_proj", "down_proj"):
            key = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{key}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=random) * 0.3
            found[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=random) * 0.3
    return found


def merged(version: int) -> torch.nn.Module:
    model, tensors = make_model(0, **SHAPE), factors(version)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{key}.lora_A.weight" in tensors:
                weight += ALPHA / RANK * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
    return model


class LiveAdapters(Live):
    def publish(self, version: int, rank: int = RANK) -> WeightsRef:
        folder, tensors = self.published / f"adapter-{version}", factors(version)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA, "bias": "none"}
        config |= {"target_modules": ["q_proj", "v_proj", "down_proj"], "base_model_name_or_path": "base"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return WeightsRef(version, str(folder), fingerprint(tensors))

    def check_against(self) -> dict[str, object]:
        """The fingerprints are the adapters', not those of the merged weights."""
        for _, completion in self.done:
            assert completion.fingerprints == {v: fingerprint(factors(v)) for v in completion.fingerprints}
            completion.fingerprints.update(
                {v: fingerprint(dict(merged(v).named_parameters())) for v in completion.fingerprints}
            )
        return self.check()


def test_adapters_are_replaced_in_flight(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = make_folder(tmp_path / "model", 0, **SHAPE)
    arguments = {"kv_cache_memory_bytes": 64 << 20, "lora_rank": RANK}

    async def play() -> dict[str, object]:
        engine = VllmEngine(folder, context_tokens=256, concurrency=8, vllm_args=arguments)
        live = LiveAdapters(engine, merged, tmp_path, workers=4, new_tokens=80)
        await engine.start()
        try:
            base = asyncio.ensure_future(engine.generate(live.request(200)))
            await asyncio.sleep(0.1)
            first = live.publish(1)
            with pytest.raises(WeightsError, match="requests of the base model are in flight"):
                await engine.update_weights(first)
            assert (await base).version_spans[:, 2].tolist() == [0]
            await engine.update_weights(first)
            await live.play(range(2, 6), 0.1)
            with pytest.raises(WeightsError, match=r"rank 9, expected 1 to vllm_args.lora_rank = 4"):
                await engine.update_weights(live.publish(6, rank=9))
            with pytest.raises(WeightsError, match="fingerprint"):
                await engine.update_weights(WeightsRef(7, first.path, "0" * 32))
            half = live.publish(8)
            tensors = {name: tensor for name, tensor in factors(8).items() if ".layers.1." not in name}
            save_file(tensors, Path(half.path) / "adapter_model.safetensors")
            with pytest.raises(WeightsError, match="6 tensors missing"):
                await engine.update_weights(WeightsRef(8, half.path, fingerprint(tensors)))
            assert engine.version == 5
            after = await engine.generate(live.request(201))  # it goes on
            assert after.version_spans[:, 2].tolist() == [5]
        finally:
            await engine.close()
        return live.check_against()

    checked = asyncio.run(play())
    assert checked["versions"] == 5 and checked["requests_over_several_versions"], checked
    assert checked["of_these_told_apart"] == checked["tokens_beside_a_boundary"], checked


def test_a_wrong_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"lora_rank: 0, expected an integer >= 1"):
        VllmEngine(make_folder(tmp_path), context_tokens=64, vllm_args={"lora_rank": 0})
