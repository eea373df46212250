"""A model folder that is not whole is refused by the name of what is wrong, before a random number takes its place."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import make_folder, make_model
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from sao.errors import ConfigError
from sao.storage import model_folder

UP = "model.layers.1.mlp.up_proj.weight"
ONE = "model-00001-of-00002.safetensors"
TWO = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("whole") / "model", tie_word_embeddings=False)


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def write(folder: Path, **changed: torch.Tensor | None) -> None:
    """Changes tensors in the folder's one file; None removes one."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changed}
    save_file({name: value for name, value in tensors.items() if value is not None}, file, metadata={"format": "pt"})


def split(folder: Path) -> None:
    """Two files and an index instead of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    where = {name: ONE if number % 2 else TWO for number, name in enumerate(sorted(tensors))}
    for part in (ONE, TWO):
        held = {name: value for name, value in tensors.items() if where[name] == part}
        save_file(held, folder / part, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_a_whole_folder_has_no_fault(folder):
    assert [*model_folder.file_faults(folder), *model_folder.tensor_faults(folder)] == []
    split(folder)
    assert [*model_folder.file_faults(folder), *model_folder.tensor_faults(folder)] == []


def test_a_damaged_tokenizer_is_named(folder):
    text = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(text[: len(text) // 2])
    (found,) = model_folder.file_faults(folder)
    assert found.startswith(f"{folder / 'tokenizer.json'} cannot be read: ")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_is_not_taken_for_the_file(folder, name):
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    (found,) = model_folder.file_faults(folder)
    assert found.startswith(f"{folder / name} is a Git LFS pointer")


def test_a_file_of_the_index_that_is_absent_is_named(folder):
    split(folder)
    (folder / TWO).unlink()
    (found,) = model_folder.file_faults(folder)
    assert found == f"{folder / TWO} is absent, model.safetensors.index.json names it"


def test_a_file_that_lacks_what_the_index_places_there_is_named(folder):
    split(folder)
    shutil.copy(folder / ONE, folder / TWO)
    (found,) = model_folder.file_faults(folder)
    assert found.startswith(f"{folder / TWO} lacks ") and "more, which model.safetensors.index.json" in found


def test_a_file_that_was_cut_short_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (found,) = model_folder.file_faults(folder)
    assert found.startswith(f"{file} is no whole safetensors file")


def test_weights_under_a_name_that_nothing_reads_are_named(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.safetensors")
    (found,) = model_folder.file_faults(folder)
    assert "pytorch_model.safetensors is not read" in found


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_config_that_is_none_is_named(folder, content):
    (folder / "config.json").write_text(content)
    assert str(folder / "config.json") in "".join(model_folder.file_faults(folder))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({UP: None}, f"1 tensors are in no file and would be random: {UP}"),
        ({"lm_head.weight": None}, "lm_head.weight"),
        ({UP: torch.zeros(3, 5)}, f"{UP} has shape [3, 5], the architecture [128, 64]"),
        ({UP + "_scale": torch.ones(1)}, f"belong to no parameter of LlamaForCausalLM: {UP}_scale"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(128, 64)}, "model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_a_tensor_that_is_absent_misshapen_or_too_many_is_named_by_both_ways_of_looking(folder, changed, expected):
    write(folder, **changed)
    (found,) = model_folder.tensor_faults(folder)
    assert expected in found
    with pytest.raises(ConfigError, match=r"^model\.path: ") as caught:
        model_folder.load(folder)
    assert str(caught.value) == f"model.path: {folder}: {found}"


def test_a_part_that_the_text_model_does_not_have_may_lie_in_the_file(folder):
    write(folder, **{"visual.blocks.0.weight": torch.ones(2)})
    assert model_folder.tensor_faults(folder) == []
    assert model_folder.load(folder).config.vocab_size == 48


def test_a_critic_of_another_folder_needs_no_head_but_a_whole_backbone(folder):
    write(folder, **{"lm_head.weight": None})
    model_folder.load(folder, "learner.critic_path")
    write(folder, **{UP: None})
    with pytest.raises(ConfigError, match=rf"learner\.critic_path: .*{UP}"):
        model_folder.load(folder, "learner.critic_path")


def test_tied_and_fused_tensors_are_not_absent(tmp_path):
    tied = make_folder(tmp_path / "tied", tie_word_embeddings=True)
    experts = tmp_path / "experts"
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(experts)
    for folder in (tied, experts):
        assert model_folder.tensor_faults(folder) == []
    lost = sorted(model_folder.shapes(experts))[-4]
    file = experts / "model.safetensors"
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    assert model_folder.tensor_faults(experts), lost


def test_positions_are_rotary_or_learned(tmp_path, whole):
    assert model_folder.positions(whole) == (512, False)
    learned = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(learned)
    assert model_folder.positions(learned) == (64, True)


def test_the_loaded_weights_are_those_of_the_file(whole):
    torch.testing.assert_close(
        dict(model_folder.load(whole, dtype=torch.float32).state_dict()),
        dict(make_model(tie_word_embeddings=False).state_dict()),
        rtol=0,
        atol=0,
    )
