"""Settings of the whole suite, and fixtures that several parts share."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Property tests are not timed, since a test machine may be shared and slow.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: random Llama (48 tokens, 2 layers, width 64, grouped-query attention), tokenizer, ChatML."""
    from tiny_model import make_folder

    return make_folder(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that looks like a model's, for what does not load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * 16)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.fixture
def run_file(tmp_path: Path, model_folder: Path) -> Path:
    """A run file for that folder."""
    path = tmp_path / "run.toml"
    text = f"[run]\ndir = '{tmp_path / 'runs'}'\nname = 'r'\n[model]\npath = '{model_folder}'\n[env]\nname = 'lookup'\n"
    path.write_text(text)
    return path
