"""A model folder in the form of Hugging Face: what its files must be, and the one way in which a model is loaded.

Loading libraries fill absent tensors with random numbers and go on; here every tensor comes from a file or the folder
is refused. `file_faults` looks at the files alone and imports no torch; `tensor_faults` compares all names and shapes
with the architecture without reading a byte of weights; `load` does so again while it reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sao.errors import ConfigError
from sao.storage import checkpoints

INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = "model.safetensors"
CRITIC: Final = "critic.safetensors"  # a critic of ours: backbone and head
_OBJECTS: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_LFS: Final = b"version https://git-lfs.github.com/"
_LEARNED_POSITIONS: Final = ("wpe", "embed_positions", "position_embedding", "position_embeddings")
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")
_IDENTITY: Final = ("config.json", "tokenizer*", "*token*map*", "chat_template*", "vocab*", "merges*", "*.safetensors")
_SAMPLE_BYTES: Final = 1 << 24
_SHOWN: Final = 3  # names in a message

Shapes = dict[str, tuple[int, ...]]


def file_faults(folder: Path, *, weights: str | None = None, tokenizer: bool = True) -> Iterator[str]:
    """Faults of a folder's files, each naming the file.

    weights: the one weights file that is read, where it is not a model's. tokenizer: whether one is needed.
    """
    if not folder.is_dir():
        yield f"{folder} is not a folder"
        return
    pointers = {path.name for path in folder.iterdir() if path.is_file() and _is_pointer(path)}
    for name in sorted(pointers):
        yield f"{folder / name} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    if "config.json" not in pointers:
        try:
            read_config(folder)
        except ConfigError as error:
            yield str(error)
    for file in (folder / name for name in _OBJECTS if name not in pointers and (folder / name).is_file()):
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                yield f"{file} cannot be read: it holds no JSON object"
        except (OSError, ValueError) as error:
            yield f"{file} cannot be read: {error}"
    torn: list[str] = []
    if not pointers & {path.name for path in folder.glob("*.safetensors*")}:
        try:
            shapes(folder, weights)
        except ConfigError as error:
            torn = str(error).splitlines()
    yield from torn
    if not torn and not pointers:  # of a checkpoint that was copied badly, or lies on a bad disk
        yield from checkpoints.damaged(
            folder, weights or "model*.safetensors", *(["tokenizer.json"] if tokenizer else [])
        )
    if not tokenizer:
        return
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        yield f"{folder} has no tokenizer.json"


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. Raises `ConfigError` naming the file."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, expected an object")
    return config


def shapes(folder: Path, weights: str | None = None) -> Shapes:
    """The shape of every tensor by name, from the files' headers; `{}` where safetensors is not installed.

    Raises `ConfigError` with a line for each file that is absent, cut short or does not hold what the index says.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return {}
    index = _index(folder) if weights is None else {}
    names = [weights] if weights else sorted(set(index.values())) or [WEIGHTS]
    if not index and not (folder / names[0]).is_file():
        raise ConfigError(f"{folder} has no {_absent(folder, names[0])}")
    found: Shapes = {}
    faults = []
    for name in names:
        if not (folder / name).is_file():
            faults.append(f"{folder / name} is absent, {INDEX} names it")
            continue
        try:
            with safe_open(folder / name, framework="numpy") as file:
                here = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError) as error:
            faults.append(f"{folder / name} is no whole safetensors file: {error}")
            continue
        lacking = {key for key, place in index.items() if place == name} - here.keys()
        if lacking:
            faults.append(f"{folder / name} lacks {_some(lacking)}, which {INDEX} places there")
        found |= here
    if faults:
        raise ConfigError("\n".join(faults))
    return found


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where the folder has no index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): str(file) for name, file in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    for name in found.values():  # nothing outside of the folder is read as a part of it
        if name != Path(name).name or not name.endswith(".safetensors") or not name.isprintable():
            raise ConfigError(f"{path} names {name!r}, expected the name of a *.safetensors file in the folder")
    return found


def _absent(folder: Path, name: str) -> str:
    """The text about weights that are not there under this name."""
    if (folder / name).is_symlink():
        return f"{name}: it is a link to {(folder / name).readlink()}, which is not there"
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        return f"{name}; {others[0]} is not read, since no {INDEX} names it"
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    return "*.safetensors" + (f"; {pickled[0]} is not read, convert it to safetensors" if pickled else "")


def weight_bytes(folder: Path, item_bytes: int) -> int:
    """Bytes of all tensors at `item_bytes` an element."""
    return item_bytes * sum(math.prod(shape) for shape in shapes(folder).values())


def identity(folder: Path) -> str:
    """32 hex digits over what makes a model: configuration, tokenizer, chat template, and of each file of weights its
    size, beginning (names and shapes) and end. Equal for a copy elsewhere.
    """
    mark = hashlib.blake2b(digest_size=16)
    for path in sorted(path for pattern in _IDENTITY for path in folder.glob(pattern)):
        size = path.stat().st_size
        mark.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            mark.update(file.read(_SAMPLE_BYTES))
            file.seek(max(file.tell(), size - _SAMPLE_BYTES))
            mark.update(file.read())
    return mark.hexdigest()


def positions(folder: Path) -> tuple[int | None, bool]:
    """The longest context that the model has positions for (None: it does not say), and whether they are learned.

    Learned positions end there: beyond them nothing can be computed. Rotary ones only were never trained beyond.
    """
    config = read_config(folder)
    config = {**config, **(config.get("text_config") or {})}
    limit = next((config[key] for key in _LENGTHS if isinstance(config.get(key), int)), None)
    tables = {name.split(".")[-2] for name in shapes(folder) if "." in name}
    return limit, bool(tables & set(_LEARNED_POSITIONS))


def load(path: str | Path, field: str = "model.path", **options: Any) -> Any:
    """The causal language model of a folder, every tensor of it from the folder's safetensors files.

    `options` go to `from_pretrained` (`dtype`, `attn_implementation`). `field` is named in errors; for
    `learner.critic_path` the language model's head may be absent, since only the backbone is used. Raises `ConfigError`
    for a folder that cannot be loaded, and for tensors that are absent, of another shape or left over.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig
    from transformers.utils import logging

    try:
        read_config(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of absent tensors is said here in one line
    try:
        lm, report = _auto(AutoConfig.from_pretrained(str(path), local_files_only=True)).from_pretrained(
            str(path),
            **options,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{field}: {path}: cannot be loaded: {error}") from error
    finally:
        logging.set_verbosity(level)
    if faults := list(_tensor_faults(lm, report, head=field != "learner.critic_path")):
        raise ConfigError("\n".join(f"{field}: {path}: {fault}" for fault in faults))
    return lm


def empty(path: str | Path, field: str = "model.path", **options: Any) -> Any:
    """A causal language model as the folder's `config.json` says, with random weights. Raises `ConfigError`."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        return _auto(config).from_config(config, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{field}: {path}: cannot be loaded: {error}") from error


def _auto(config: Any) -> Any:
    """The class of a configuration's model; for images and text its text part, where there is a class for that."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal: Any = AutoModelForCausalLM
    return causal if type(config) in causal._model_mapping else AutoModelForImageTextToText


def tensor_faults(folder: Path) -> list[str]:
    """Faults of names and shapes of the tensors, as `load` would find them; no weights are read and none are made."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # tensors without content are not made in several threads
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        architecture: Any = _auto(config)._model_mapping[type(config)]
        if architecture.config_class is type(config.get_text_config()):
            config = config.get_text_config()
        with FakeTensorMode(allow_non_fake_inputs=True):
            stored = {name: torch.empty(shape) for name, shape in shapes(folder).items()}
            lm, report = architecture.from_pretrained(
                None, config=config, state_dict=stored, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (OSError, ValueError, ImportError, KeyError) as error:
        return [f"cannot be loaded: {type(error).__name__}: {error}"]
    return list(_tensor_faults(lm, report, head=True))


def _tensor_faults(lm: Any, report: Mapping[str, Any], *, head: bool) -> Iterator[str]:
    """The lines of a loading report of transformers about absent, misshapen and left-over tensors."""
    base = lm.base_model_prefix + "."
    missing = {name for name in report["missing_keys"] if head or name.startswith(base)}
    if missing:
        yield f"{len(missing)} tensors are in no file and would be random: {_some(missing)}"
    for name, stored, expected in sorted(report["mismatched_keys"], key=str):
        yield f"{name} has shape {list(stored)}, the architecture {list(expected)}"
    extra = {name for name in report["unexpected_keys"] if _belongs(lm, name)}
    if extra:
        yield f"{len(extra)} tensors belong to no parameter of {type(lm).__name__}: {_some(extra)}"


def _belongs(lm: Any, name: str) -> bool:
    """Whether a left-over tensor is of a part that the model has: a scale of quantised weights, a bias, one layer more.

    Whole parts that it does not have (the vision tower of a text model, layers that predict further tokens) may lie in
    the file and are left there.
    """
    from torch.nn import ModuleList

    module = lm
    for part in name.split(".")[:-1]:
        inner = getattr(module, part, None)
        if inner is None:
            config = lm.config.get_text_config()
            further = any(getattr(config, key, 0) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
            return isinstance(module, ModuleList) and not further
        module = inner
    return True


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


if __name__ == "__main__":
    print(json.dumps(tensor_faults(Path(sys.argv[1]))))
