"""What can be known to be wrong before anything is started: files, names, packages. Nothing is created."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

from sao.config import Config
from sao.envs import registry
from sao.errors import ConfigError, EnvironmentFailure
from sao.rollout.compaction import templates
from sao.runtime import folders, launch
from sao.runtime import resume as resuming
from sao.telemetry import prometheus
from sao.transport.keys import client_keys, server_keys

ENGINE_PACKAGES = {
    "torch": ("train", ("torch", "transformers", "safetensors")),
    "vllm": ("vllm", ("torch", "transformers", "safetensors", "vllm")),
    "scripted": ("train", ("torch", "transformers", "safetensors")),
}


def check(
    config: Config, *, overwrite: bool = False, run_folder: bool = True, resume: bool = False, alone: bool = False
) -> list[str]:
    """Raises `ConfigError` that lists all faults; returns warnings, things that work but are probably not meant.

    Without `run_folder` nothing is recorded (`sao eval`): neither the run's folder nor the port of its numbers matters.
    With `resume` the folder must hold the run. A broker `alone` needs neither the model nor the environment's packages.
    """
    faults = keys(config) + (metrics_port(config) if run_folder else [])
    faults += (
        []
        if alone
        else [
            *packages(config),
            *model_folder("model.path", Path(config.model.path)),
            *(
                model_folder("learner.critic_path", Path(config.learner.critic_path))
                if config.learner.critic_path
                else []
            ),
            *environment(config),
            *compaction(config),
        ]
    )
    if resume:
        faults += resuming.faults(config)
    elif run_folder and (fault := folders.run_folder_fault(config.folder, overwrite=overwrite)):
        faults.append(fault)
    if faults:
        raise ConfigError("\n".join(faults))
    return _warnings(config)


def keys(config: Config) -> list[str]:
    """What is wrong with the keys that processes on this host need."""
    transport = config.transport
    try:
        server_keys(transport.keys, transport.bind)
        client_keys(transport.keys, transport.bind, "supervisor", "supervisor")
    except ConfigError as error:
        return [f"transport.{error}"]
    return []


def packages(config: Config) -> list[str]:
    """Packages that the configuration needs and that are not installed, with the extra that brings them."""
    extra, needed = ENGINE_PACKAGES[config.generator.engine]
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    faults = []
    if absent:
        faults.append(
            f"generator.engine: {config.generator.engine!r} needs {', '.join(absent)}, not installed; "
            f"install the extra: pip install 'sao[{extra}]'"
        )
    if config.telemetry.wandb and importlib.util.find_spec("wandb") is None:
        faults.append("telemetry.wandb: needs wandb, not installed; pip install wandb")
    return faults


def metrics_port(config: Config) -> list[str]:
    """Whether the numbers can be served for Prometheus: its package, and the port, which is tried."""
    port = config.telemetry.prometheus_port
    if port is None:
        return []
    if importlib.util.find_spec("prometheus_client") is None:
        extra = "install the extra: pip install 'sao[tracking]'"
        return [f"telemetry.prometheus_port: needs prometheus_client, not installed; {extra}"]
    try:
        socket.create_server((prometheus.ADDRESS, port)).close()
    except OSError as error:
        return [prometheus.taken(port, error)]
    return []


def model_folder(field: str, folder: Path, *, tokenizer: bool | None = None) -> list[str]:
    """What a model folder lacks. The tokenizer and chat template are looked for unless the folder is a critic's."""
    if not folder.is_dir():
        return [f"{field}: {folder} is not a folder"]
    faults = []
    if not (folder / "config.json").is_file():
        faults.append(f"{field}: {folder} has no config.json")
    if not any(folder.glob("*.safetensors")):
        other = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {other[0]} is not read, convert it to safetensors" if other else ""
        faults.append(f"{field}: {folder} has no *.safetensors{hint}")
    if tokenizer if tokenizer is not None else field == "model.path":
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            faults.append(f"{field}: {folder} has no tokenizer.json")
        if not _has_chat_template(folder):
            faults.append(f"{field}: {folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    return faults


def environment(config: Config) -> list[str]:
    """What is wrong with the environment's name or arguments: one is made (not reset) and thrown away."""
    try:
        made: Any = registry.make(config.env.name, **config.env.args)
    except (ConfigError, EnvironmentFailure) as error:
        return str(error).splitlines()
    except Exception as error:  # the environment's own code, given arguments that it did not expect
        return [f"env.args: {config.env.name!r} refused {config.env.args}: {type(error).__name__}: {error}"]
    if not hasattr(made, "play"):
        return []
    faults = []
    if importlib.util.find_spec("aiohttp") is None:
        faults.append(f"env.name: {config.env.name!r}: agents need pip install 'sao[agents]'")
    if config.compaction.enabled:
        faults.append(f"compaction.enabled: {config.env.name!r} is an agent, which keeps its own context")
    return faults


def compaction(config: Config) -> list[str]:
    """What is wrong with the texts, the summariser and the lengths of `[compaction]`.

    The markup around the summary request is known only to a generator, which checks again with it.
    """
    part = config.compaction
    if not part.enabled:
        return []
    faults = model_folder("compaction.summariser", Path(part.summariser), tokenizer=True) if part.summariser else []
    try:
        request, _ = templates(config)
    except ConfigError as error:
        return [*faults, str(error)]
    if (size := _tokens(Path(config.model.path), request.text)) is None:
        return faults
    return faults + config.compaction_threshold(size)[1]


def _tokens(folder: Path, text: str) -> int | None:
    """Length of a text under the folder's tokenizer; None when that cannot be known here."""
    if importlib.util.find_spec("tokenizers") is None or not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer  # of the extra `train`; loads neither torch nor transformers

    try:
        return len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)
    except Exception:  # not a tokenizer; the generator says so with the library's own words
        return None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _warnings(config: Config) -> list[str]:
    warnings = []
    wanted, cpus = launch.threads(config), launch.available_cpus()
    if wanted > 2 * cpus:
        warnings.append(
            f"generator.count * generator.threads + learner.ranks * learner.threads = {wanted} threads on {cpus} CPUs"
        )
    if config.transport.allow_remote and config.transport.keys is None:
        warnings.append(f"transport.bind: {config.transport.bind} is open to the network; peers are not authenticated")
    for package, what in (("tensorboard", "telemetry.tensorboard"), ("matplotlib", "telemetry.plot")):
        wanted_here = config.telemetry.tensorboard if package == "tensorboard" else config.telemetry.plot
        if wanted_here and importlib.util.find_spec(package) is None:
            warnings.append(f"{what}: {package} is not installed, so it is left out; pip install 'sao[tracking]'")
    return warnings
