"""What is known of vLLM before it is started: which versions will do, and which GPUs belong to a generator."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType

import pytest

from sao.engines.vllm.process import devices_of, import_vllm
from sao.errors import EngineError


@pytest.mark.parametrize(("version", "labels"), [("0.31.2", []), ("0.32.0", ["weight_versions"])])
def test_a_vllm_that_does_not_label_tokens_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, labels: list[str]
) -> None:
    package, outputs = ModuleType("vllm"), ModuleType("vllm.outputs")
    package.__dict__["__version__"] = version
    outputs.__dict__["CompletionOutput"] = make_dataclass("CompletionOutput", ["token_ids", *labels])
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.outputs", outputs)
    if labels:
        assert import_vllm(tmp_path, 1) == version
    else:
        with pytest.raises(EngineError, match=r"vLLM 0\.31\.2 does not label tokens with versions; it needs >= 0\.32"):
            import_vllm(tmp_path, 1)


def test_each_generator_takes_the_gpus_behind_those_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices_of(k, {}, 4) for k in range(4)] == ["0", "1", "2", "3"]
    assert [devices_of(k, {"tensor_parallel_size": 2}, 4) for k in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert devices_of(1, {}, 3) == "6"
    with pytest.raises(EngineError, match=r"generator\.count: generator 1 needs GPUs 2 to 3, 3 are visible"):
        devices_of(1, {"tensor_parallel_size": 2}, 3)
