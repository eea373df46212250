"""A model that is looked at before there is a run: one table, by the code that a run would meet."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import CHATML, make_tokenizer
from transformers import Gemma2Config, Gemma2ForCausalLM, Lfm2Config, Lfm2ForCausalLM
from typer.testing import CliRunner

from sao import config
from sao.cli import app
from sao.runtime import model_check

SIZES = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ENDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}


def table(folder: Path, *overrides: str) -> dict[str, tuple[str, str]]:
    """Subject -> state and text."""
    short = ["sampling.context_tokens=128", "sampling.max_response_tokens=16", *overrides]
    settings = config.parse({"model": {"path": str(folder)}, "env": {"name": "lookup"}}, short)
    return {subject: (state, text) for subject, state, text in model_check.findings(settings)}


def test_a_sound_model_has_a_row_for_everything(tiny_model):
    found = table(tiny_model)
    assert list(found) == ["files", "positions", "template", "tokenizer", "learner", "engine", "memory"]
    assert {state for state, _ in found.values()} <= {"ok", "note"}
    assert "LlamaForCausalLM" in found["files"][1] and found["learner"][1].startswith("masked")
    assert found["engine"][0] == "ok" and "10 tokens sampled" in found["engine"][1]


def test_each_fault_is_in_its_row_with_the_way_out(tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "m"))
    assert table(folder, "sampling.context_tokens=4096", "learner.row_tokens=4096")["positions"][0] == "note"
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": 40}))
    assert [*table(folder)] == ["files"] and table(folder)["files"][0] == "fault"
    (folder / "config.json").write_text(json.dumps(described))
    template = folder / "broken.jinja"
    template.write_text(CHATML.replace("endfor", "endfro"))
    state, text = table(folder, f"model.chat_template='{template}'")["template"]
    assert state == "fault" and "model.chat_template = FILE" in text


@pytest.mark.parametrize(
    ("model", "rows", "engine"),
    [
        (
            Gemma2ForCausalLM(Gemma2Config(**SIZES, **ENDS, num_hidden_layers=2, head_dim=32, sliding_window=16)),
            "positions",
            "fault",
        ),
        (Lfm2ForCausalLM(Lfm2Config(**SIZES, **ENDS, num_hidden_layers=2, full_attn_idxs=[1])), "single", "fault"),
    ],
    ids=["gemma2", "lfm2"],
)
def test_how_rows_lie_and_what_the_engine_cannot_hold_is_said(tmp_path, model, rows, engine):
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    found = table(tmp_path)
    assert found["learner"][1].startswith(rows)
    assert found["engine"][0] == engine and "vllm" in found["engine"][1]


def test_the_command_exits_with_2_for_a_fault(tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "m"))
    arguments = ["check-model", str(folder), "sampling.context_tokens=128", "sampling.max_response_tokens=16"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "model.norm.weight" in done.output
