"""An adapter that is not for exactly the layers of a model, scaled as it was trained, is refused by name."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sao.engines.vllm.lora import check_adapter
from sao.errors import WeightsError
from sao.storage import adapter_folder
from sao.storage.adapter_folder import CONFIG, WEIGHTS
from sao.transport.messages import WeightsRef
from sao.transport.weights import fingerprint

LAYERS = {f"model.layers.{n}.{name}": shape for n in (0, 1) for name, shape in {"q": (6, 8), "up": (12, 8)}.items()}
A, B = "base_model.model.model.layers.1.up.lora_A.weight", "base_model.model.model.layers.1.up.lora_B.weight"


@pytest.fixture
def folder(tmp_path):
    tensors = {}
    for layer, (outer, inner) in LAYERS.items():
        tensors[adapter_folder.file_name(layer, "A")] = torch.randn(2, inner)
        tensors[adapter_folder.file_name(layer, "B")] = torch.randn(outer, 2)
    adapter_folder.write(tmp_path, tensors, rank=2, alpha=4.0, layers=LAYERS, base="x")
    return tmp_path


def read(folder):
    return adapter_folder.read(folder, LAYERS, rank=2, alpha=4.0, who="adapter of version 3")


def test_a_whole_one_is_read_as_written_and_as_peft_writes_it(folder):
    tensors = load_file(folder / WEIGHTS)
    described = json.loads((folder / CONFIG).read_text())
    for change in ({}, {"target_modules": ["q", "up"]}, {"lora_alpha": 4}, {"layers_to_transform": None}):
        (folder / CONFIG).write_text(json.dumps(described | change))
        found = read(folder)
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


def config(**changes):
    def change(folder):
        described = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in described.items() if v != "gone"}))

    return change


def tensors(edit):
    def change(folder):
        held = load_file(folder / WEIGHTS)
        edit(held)
        save_file(held, folder / WEIGHTS)

    return change


def halved(held):
    for name in [name for name in held if ".layers.1." in name]:
        del held[name]


def renamed(old, new):
    def edit(held):
        for name in list(held):
            held[name.replace(old, new)] = held.pop(name)

    return tensors(edit)


KINDS = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "cannot read"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "cannot read"),
    "config cut short": (lambda folder: (folder / CONFIG).write_text('{"r": '), "cannot read"),
    "config is a list": (lambda folder: (folder / CONFIG).write_text("[]"), "expected an object"),
    "weights cut short": (lambda folder: (folder / WEIGHTS).write_bytes(b"\x08"), "cannot read"),
    "half of the layers": (tensors(halved), "4 tensors missing"),
    "one factor": (tensors(lambda held: held.pop(B)), "1 tensors missing: .*lora_B"),
    "layers that do not exist": (renamed(".layers.1.", ".layers.7."), "layers.1.*missing|missing: .*layers.1"),
    "one layer too many": (
        tensors(lambda held: held.update({B.replace(".1.", ".2."): held[B].clone()})),
        "1 tensors unknown: .*layers.2",
    ),
    "names of a live PEFT model": (renamed(".weight", ".default.weight"), "8 tensors missing"),
    "names without prefix": (renamed("base_model.model.", ""), "8 tensors missing"),
    "shape": (
        tensors(lambda held: held.update({A: torch.zeros(2, 9)})),
        r"up.lora_A.*\[2, 9\], expected .*\[2, 8\]",
    ),
    "transposed": (tensors(lambda held: held.update({B: held[B].T.contiguous()})), r"\[2, 12\], expected"),
    "integers": (tensors(lambda held: held.update({B: torch.ones(12, 2, dtype=torch.int32)})), "int32"),
    "nan": (tensors(lambda held: held[A].__setitem__((0, 0), float("nan"))), "lora_A.weight: not finite"),
    "inf": (tensors(lambda held: held[B].__setitem__((0, 0), float("inf"))), "lora_B.weight: not finite"),
    "rank of the config": (config(r=4), "r = 4, expected 2"),
    "rank absent": (config(r="gone"), "r = None, expected 2"),
    "rank is true": (config(r=True), "r = True, expected 2"),
    "alpha": (config(lora_alpha=8), "lora_alpha = 8, expected 4.0"),
    "use_rslora": (config(use_rslora=True), "use_rslora = True"),
    "use_dora": (config(use_dora=True), "use_dora = True"),
    "rank_pattern": (config(rank_pattern={"q": 1}), "rank_pattern"),
    "alpha_pattern": (config(alpha_pattern={"q": 1}), "alpha_pattern"),
    "other kind": (config(peft_type="LOHA"), "peft_type = 'LOHA'"),
    "modules_to_save": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "bias": (config(bias="all"), "bias = 'all'"),
    "targets are text": (config(target_modules="all-linear"), "expected a list"),
    "targets leave out": (config(target_modules=["q"]), "leave out model.layers.0.up, model.layers.1.up"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_one_is_refused_by_name(folder, kind):
    change, text = KINDS[kind]
    change(folder)
    with pytest.raises(WeightsError, match=text) as error:
        read(folder)
    assert str(error.value).startswith("adapter of version 3: ")


BASE = {f"{layer}.weight": shape for layer, shape in LAYERS.items()} | {
    "model.norm.weight": (8,),
    "head.weight": (9, 8),
}


def test_an_engine_takes_what_is_whole(folder):
    ref = WeightsRef(3, str(folder), fingerprint(load_file(folder / WEIGHTS)))
    check_adapter(ref, 2, BASE)
    config(target_modules=["q", "up"])(folder)
    check_adapter(ref, 8, BASE)
    with pytest.raises(WeightsError, match=r"rank 2, expected 1 to vllm_args\.lora_rank = 1"):
        check_adapter(ref, 1, BASE)
    with pytest.raises(WeightsError, match="fingerprint"):
        check_adapter(WeightsRef(3, str(folder), "0" * 32), 2, BASE)


FITS_ANY = ("alpha",)  # an engine scales as the adapter says
OTHERWISE = {  # what an engine says of the same faults, knowing the model and not the trainer
    "rank of the config": "expected floats",
    "rank absent": "rank None",
    "rank is true": "rank True",
    "rank_pattern": "rank_pattern",
    "targets leave out": "4 tensors unknown",
}
OF_TARGETS = {
    "target that is not there": (config(target_modules=["q", "up", "nowhere"]), "the model has no layer nowhere"),
    "no target": (config(target_modules=[]), "expected a list"),
    "alpha is not finite": (config(lora_alpha=float("inf")), "lora_alpha inf"),
    "alpha is text": (config(lora_alpha="4"), "lora_alpha '4'"),
}


@pytest.mark.parametrize("kind", [kind for kind in {**KINDS, **OF_TARGETS} if kind not in FITS_ANY])
def test_an_engine_refuses_the_same_before_it_pauses(folder, kind):
    config(target_modules=["q", "up"])(folder)
    change, text = {**KINDS, **OF_TARGETS}[kind]
    change(folder)
    try:
        mark = fingerprint(load_file(folder / WEIGHTS))  # as if its publisher had not noticed
    except (OSError, SafetensorError):
        mark = ""
    with pytest.raises(WeightsError, match=OTHERWISE.get(kind, text)):
        check_adapter(WeightsRef(3, str(folder), mark), 8, BASE)
