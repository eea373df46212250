"""Everything that can be known to be wrong is found before anything is made, all at once."""

import importlib.util
import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import make_folder

from sao import config
from sao.errors import ConfigError
from sao.runtime import preflight


def faults(run_file: Path, *overrides: str, overwrite: bool = False) -> list[str]:
    before = sorted(run_file.parent.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        preflight.check(config.load(run_file, overrides), overwrite=overwrite)
    assert sorted(run_file.parent.rglob("*")) == before
    return str(caught.value).splitlines()


def test_a_sound_run_passes(run_file):
    assert preflight.check(config.load(run_file)) == []


def test_all_faults_come_at_once(run_file):
    found = faults(run_file, "model.path=absent", "env.name=lokup", "learner.critic_path=nowhere")
    assert [line.split(":")[0] for line in found] == ["model.path", "learner.critic_path", "env.name"]
    assert "did you mean 'lookup'?" in found[2]


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no *.safetensors"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("tokenizer_config.json", "has no chat template"),
    ],
)
def test_what_a_model_folder_lacks_is_named(run_file, model_folder, lacking, expected):
    (model_folder / lacking).unlink()
    (found,) = faults(run_file)
    assert found.startswith(f"model.path: {model_folder}") and expected in found


def test_pickled_weights_are_not_read_and_that_is_said(run_file, model_folder):
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
    (found,) = faults(run_file)
    assert "pytorch_model.bin is not read, convert it to safetensors" in found


@pytest.mark.parametrize("template", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_may_be_in_either_file(run_file, model_folder, template):
    (model_folder / "tokenizer_config.json").write_text("{}")
    text = json.dumps({"chat_template": "x"}) if template.endswith("json") else "x"
    (model_folder / template).write_text(text)
    assert preflight.check(config.load(run_file)) == []


@pytest.mark.parametrize(
    ("override", "text", "expected"),
    [
        ("model.chat_template='{}'", "{% for m in messages %}", "line 1: Unexpected end of template"),
        ("model.chat_template='{}.not'", "", "no readable chat template"),
        ("model.chat_template_kwargs={{enable_thinking=true}}", "{{ messages }}{{ effort }}", "it reads: effort"),
    ],
)
def test_a_chat_template_and_its_variables_are_looked_at(run_file, model_folder, tmp_path, override, text, expected):
    (tmp_path / "own.jinja").write_text(text)
    (model_folder / "chat_template.jinja").write_text(text or "x")
    (found,) = faults(run_file, override.format(tmp_path / "own.jinja"))
    assert found.startswith("model.chat_template") and expected in found


def test_a_template_that_is_given_stands_for_the_folders_own(run_file, model_folder, tmp_path):
    (model_folder / "tokenizer_config.json").unlink()
    (tmp_path / "own.jinja").write_text("{% generation %}{{ effort }}{% endgeneration %}")
    overrides = [f"model.chat_template='{tmp_path / 'own.jinja'}'", "model.chat_template_kwargs={effort='low'}"]
    assert preflight.check(config.load(run_file, overrides)) == []


def test_a_critic_needs_no_tokenizer(run_file, model_folder):
    critic = model_folder.parent / "critic"
    critic.mkdir()
    (critic / "config.json").write_text("{}")
    shutil.copy(model_folder / "model.safetensors", critic)
    assert preflight.check(config.load(run_file, [f"learner.critic_path='{critic}'"])) == []


def test_arguments_that_an_environment_does_not_take_are_named(run_file):
    (found,) = faults(run_file, "env.args={sise=3}")
    assert found.startswith("env.args:") and "sise" in found


def refusing(name, **arguments):
    raise RuntimeError("no licence")


def test_an_environment_that_breaks_on_its_arguments_is_a_fault_not_a_crash(run_file, monkeypatch):
    from sao.envs import registry

    monkeypatch.setattr(registry, "make", refusing)
    (found,) = faults(run_file)
    assert found == "env.args: 'lookup' refused {}: RuntimeError: no licence"


def test_a_package_that_is_missing_is_named_with_its_extra(run_file, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("vllm", "wandb", "trackio") else real(name)
    )
    engine, tracker, other = faults(run_file, "generator.engine=vllm", "telemetry.wandb=true", "telemetry.trackio=true")
    assert engine == "generator.engine: 'vllm' needs vllm, not installed; install the extra: pip install 'sao[vllm]'"
    assert tracker.startswith("telemetry.wandb: needs wandb, not installed")
    assert other.startswith("telemetry.trackio: needs trackio, not installed")


def test_a_port_for_prometheus_that_is_taken_is_a_fault(run_file):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (found,) = faults(run_file, f"telemetry.prometheus_port={port}")
        served = config.load(run_file, [f"telemetry.prometheus_port={port}"])
        preflight.check(served, role="eval")  # `sao eval` beside the run that serves it
    assert found.startswith(f"telemetry.prometheus_port: {port} on 127.0.0.1 cannot be had: ")
    preflight.check(served)  # given back, and not kept by looking


def test_what_is_left_out_and_what_is_risky_is_said(run_file, monkeypatch):
    real = importlib.util.find_spec
    absent = ("tensorboard", "matplotlib", "dygraphs")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else real(name))
    overrides = ["transport.bind='tcp://0.0.0.0:5555'", "transport.allow_remote=true", "generator.threads=4096"]
    warnings = preflight.check(config.load(run_file, overrides))
    assert len(warnings) == 5
    for part in ("threads on", "open to the network", *(f"{name} is not installed" for name in absent)):
        assert any(part in warning for warning in warnings), (part, warnings)


def test_a_run_folder_that_exists_is_a_fault_with_a_way_out(run_file):
    folder = config.load(run_file).folder
    folder.mkdir(parents=True)
    assert preflight.check(config.load(run_file)) == []  # empty: may be used
    (folder / "config.json").write_text("{}")
    (found,) = faults(run_file)
    assert found == f"run.name: {folder} exists; choose another run.name or pass --overwrite"
    assert preflight.check(config.load(run_file), overwrite=True) == []
    (folder / "config.json").rename(folder / "thesis.tex")
    (found,) = faults(run_file, overwrite=True)
    assert "holds no run" in found


def test_an_agent_needs_its_package_and_keeps_its_own_context(run_file, monkeypatch):
    agent = ("env.name=agent", 'env.args={command="true"}')
    assert preflight.check(config.load(run_file, agent)) == []
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp" else found(name))
    limits = ("sampling.context_tokens=8192", "learner.row_tokens=8192", "compaction.enabled=true")
    text = "\n".join(faults(run_file, *agent, *limits))
    assert "agents need pip install 'sao[agents]'" in text
    assert "compaction.enabled: 'agent' is an agent, which keeps its own context" in text


def test_a_context_beyond_rotary_positions_is_a_warning_and_beyond_learned_ones_a_fault(run_file, model_folder):
    (model_folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 512}}))
    (warning,) = preflight.check(config.load(run_file, ["sampling.context_tokens=1024", "learner.row_tokens=1024"]))
    assert "sampling.context_tokens: 1024 is beyond the 512 positions of" in warning
    save_file({"transformer.wpe.weight": torch.zeros(512, 8)}, model_folder / "model.safetensors")
    (found,) = faults(run_file, "sampling.context_tokens=1024", "learner.row_tokens=1024")
    assert found.endswith("at most 512 can be computed")


def test_a_dry_run_compares_all_tensors_with_the_architecture(run_file, tmp_path):
    whole = make_folder(tmp_path / "whole")
    loaded = config.load(run_file, [f"model.path='{whole}'", "sampling.context_tokens=512"])
    assert preflight.check(loaded, thorough=True) == []
    tensors = load_file(whole / "model.safetensors")
    lost = tensors.popitem()[0]
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    preflight.check(loaded)
    with pytest.raises(ConfigError, match=rf"model\.path: .* {lost}"):
        preflight.check(loaded, thorough=True)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a\nb.safetensors", ".", "other.bin"])
def test_an_index_names_nothing_outside_of_the_folder(run_file, model_folder, name):
    shutil.copy(model_folder / "model.safetensors", model_folder.parent / "outside.safetensors")
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    (found,) = faults(run_file)
    assert "model.safetensors.index.json names " in found and repr(name) in found


@pytest.mark.parametrize("content", ["", "[]", '{"a": ', "null"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_files_that_hold_no_object_are_named(run_file, model_folder, name, content):
    (model_folder / name).write_text(content)
    assert any(line.startswith(f"model.path: {model_folder / name} cannot be read") for line in faults(run_file))


def test_a_link_to_nothing_is_named(run_file, model_folder):
    (model_folder / "model.safetensors").unlink()
    (model_folder / "model.safetensors").symlink_to("/nowhere/blob")
    (found,) = faults(run_file)
    assert "a link to /nowhere/blob, which is not there" in found


def test_a_port_for_weights_that_is_taken_is_named(run_file):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = faults(
            run_file, "transport.bind=tcp://127.0.0.1:5903", f"transport.weights_bind=tcp://127.0.0.1:{port}"
        )
    assert found.startswith("transport.weights_bind: ") and "in use" in found


def test_a_folder_that_cannot_be_written_is_named_with_its_kind(run_file, tmp_path):
    (found,) = faults(run_file, 'run.dir="/proc/runs"')
    assert found.startswith("run.dir: /proc (") and "cannot be written by user" in found
