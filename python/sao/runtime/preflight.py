"""What can be known to be wrong before anything is started: files, names, packages. Nothing is created."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any, Final, Literal

from sao.config import Config
from sao.envs import registry
from sao.errors import ConfigError, EnvironmentFailure
from sao.rollout.compaction import templates
from sao.runtime import folders, launch
from sao.runtime import resume as resuming
from sao.telemetry import prometheus
from sao.transport.keys import client_keys, server_keys

Role = Literal["run", "broker", "learner", "generator", "eval"]
"""What is about to be started here: a whole run, a part of a run that goes on elsewhere, or an evaluation."""
PACKAGES: Final = ("torch", "transformers", "safetensors")


def check(config: Config, *, role: Role = "run", overwrite: bool = False, resume: bool = False) -> list[str]:
    """Raises `ConfigError` that lists all faults; returns warnings, things that work but are probably not meant.

    With `resume` the run's folder must hold the run; otherwise it must be free, or hold a run and `overwrite` be given.
    """
    critic, faults = config.learner.critic_path, []
    if role in ("run", "broker"):
        faults += _keys(config) + _metrics_port(config)
    if role != "broker":
        faults += _packages(config) + model_folder("model.path", config.model.path)
    if role in ("run", "learner") and critic:
        faults += model_folder("learner.critic_path", critic)
    if role in ("run", "generator", "eval"):
        faults += _environment(config) + compaction(config)
    if resume:
        faults += resuming.faults(config)
    elif role in ("run", "broker") and (fault := folders.run_folder_fault(config.folder, overwrite=overwrite)):
        faults.append(fault)
    if faults:
        raise ConfigError("\n".join(faults))
    return _warnings(config)


def _keys(config: Config) -> list[str]:
    """What is wrong with the keys that processes on this host need."""
    transport = config.transport
    try:
        server_keys(transport.keys, transport.bind)
        client_keys(transport.keys, transport.bind, "supervisor", "supervisor")
    except ConfigError as error:
        return [f"transport.{error}"]
    return []


def _packages(config: Config) -> list[str]:
    """Packages that the configuration needs and that are not installed, with the extra that brings them."""
    engine, faults = config.generator.engine, []
    extra, needed = ("vllm", (*PACKAGES, "vllm")) if engine == "vllm" else ("train", PACKAGES)
    if absent := [name for name in needed if not _installed(name)]:
        faults.append(
            f"generator.engine: {engine!r} needs {', '.join(absent)}, not installed; "
            f"install the extra: pip install 'sao[{extra}]'"
        )
    if config.telemetry.wandb and not _installed("wandb"):
        faults.append("telemetry.wandb: needs wandb, not installed; pip install wandb")
    return faults


def _metrics_port(config: Config) -> list[str]:
    """Whether the numbers can be served for Prometheus: its package, and the port, which is tried."""
    port = config.telemetry.prometheus_port
    if port is None:
        return []
    if not _installed("prometheus_client"):
        extra = "install the extra: pip install 'sao[tracking]'"
        return [f"telemetry.prometheus_port: needs prometheus_client, not installed; {extra}"]
    try:
        socket.create_server((prometheus.ADDRESS, port)).close()
    except OSError as error:
        return [prometheus.taken(port, error)]
    return []


def model_folder(field: str, path: str) -> list[str]:
    """What a model folder lacks. A critic needs neither tokenizer nor chat template."""
    folder = Path(path)
    if not folder.is_dir():
        return [f"{field}: {folder} is not a folder"]
    faults = []
    if not (folder / "config.json").is_file():
        faults.append(f"{field}: {folder} has no config.json")
    if not any(folder.glob("*.safetensors")):
        other = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {other[0]} is not read, convert it to safetensors" if other else ""
        faults.append(f"{field}: {folder} has no *.safetensors{hint}")
    if field != "learner.critic_path":
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            faults.append(f"{field}: {folder} has no tokenizer.json")
        if not _has_chat_template(folder):
            faults.append(f"{field}: {folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    return faults


def _environment(config: Config) -> list[str]:
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
    if not _installed("aiohttp"):
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
    faults = model_folder("compaction.summariser", part.summariser) if part.summariser else []
    try:
        request, _ = templates(config)
    except ConfigError as error:
        return [*faults, str(error)]
    if (size := _tokens(Path(config.model.path), request.text)) is None:
        return faults
    return faults + config.compaction_threshold(size)[1]


def _tokens(folder: Path, text: str) -> int | None:
    """Length of a text under the folder's tokenizer; None when that cannot be known here."""
    if not _installed("tokenizers") or not (folder / "tokenizer.json").is_file():
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
    generator, learner, transport, telemetry = config.generator, config.learner, config.transport, config.telemetry
    warnings = []
    threads, cpus = generator.count * generator.threads + learner.ranks * learner.threads, launch.available_cpus()
    if threads > 2 * cpus:
        warnings.append(
            f"generator.count * generator.threads + learner.ranks * learner.threads = {threads} threads on {cpus} CPUs"
        )
    if transport.allow_remote and transport.keys is None:
        warnings.append(f"transport.bind: {transport.bind} is open to the network; peers are not authenticated")
    for package, key, wanted in (
        ("tensorboard", "tensorboard", telemetry.tensorboard),
        ("matplotlib", "plot", telemetry.plot),
    ):
        if wanted and not _installed(package):
            text = f"{package} is not installed, so it is left out; pip install 'sao[tracking]'"
            warnings.append(f"telemetry.{key}: {text}")
    return warnings


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
