"""The checks before anything is started: files, names, packages, keys, ports. Nothing is created.

What can be known from the configuration alone is checked in `sao.config`; who uses a value later does not check again.
"""

import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from sao.config import Config, addresses
from sao.config.sections import ModelSection
from sao.envs import registry
from sao.errors import ConfigError, EnvironmentFailure
from sao.rollout import chat_template
from sao.rollout.compaction import templates
from sao.runtime import folders, machine
from sao.runtime import resume as resuming
from sao.storage import adapter_folder, filesystem, model_folder, ownership, surroundings
from sao.telemetry import sinks
from sao.transport.keys import SUPERVISOR, client_keys, server_keys
from sao.transport.messages import KEPT_VERSIONS
from sao.transport.sockets import IPC_PATH_LIMIT

Role = Literal["run", "broker", "learner", "generator", "eval"]
"""The thing that is about to be started here: a whole run, a part of a run that goes on elsewhere, or an evaluation."""
TENSORS_S: Final = 300.0  # for the names and shapes of all tensors
FILES: Final = 64  # open files of a process
VLLM_TEMPORARY: Final = IPC_PATH_LIMIT - len("/sao-vllm-XXXXXXXX/") - 36  # its sockets are called by a UUID
GPUS: Final = ("/dev/nvidiactl", "/dev/kfd")
PROCESS_BYTES: Final = 150 << 20  # of a process with torch, whatever its model
CHECKPOINT: Final = 3  # the weights and what an optimizer keeps of each
PACKAGES: Final = ("torch", "transformers", "safetensors")


def check(
    config: Config, *, role: Role = "run", overwrite: bool = False, resume: bool = False, thorough: bool = False
) -> list[str]:
    """Raises `ConfigError` that lists all faults; returns warnings, things that work but are probably not meant.

    With `resume` the run's folder must hold the run; otherwise it must be free, or hold a run and `overwrite` be given.
    `thorough`: also what learner and generators look at when they load: the names and shapes of all tensors.
    """
    critic, faults, warnings = config.learner.critic_path, list(_machine(config)), list(_warnings(config))
    if role in ("run", "broker"):
        faults += [*_keys(config), *_metrics_port(config)]
        faults += [] if resume else _listens("transport.bind", config.transport.bind)
    if role != "broker":
        faults += [*_packages(config), *_model_folder("model.path", config.model.path, config.model.chat_template)]
    if role in ("run", "learner") and config.transport.weights_bind and not resume:
        faults += _listens("transport.weights_bind", config.transport.weights_bind)
    if role in ("run", "learner") and critic:
        adapter = config.lora.rank > 0 and config.lora.critic == "adapter"
        faults += _critic_adapter(Path(critic)) if adapter else _model_folder("learner.critic_path", critic)
    if role in ("run", "generator", "eval"):
        faults += [*_chat_template(config.model), *_environment(config), *compaction(config)]
        faults += [] if resume else _listens("generator.agents_bind", config.generator.agents_bind)
    if resume:
        faults += resuming.faults(config)
    elif role in ("run", "broker") and (fault := folders.run_folder_fault(config.folder, overwrite=overwrite)):
        faults.append(fault)
    elif role in ("run", "broker"):
        faults += _run_folder(config)
    if not faults and role != "broker":
        for fatal, warned in (_positions(config), *([_room(config)] if role in ("run", "learner") else [])):
            faults, warnings = [*faults, *fatal], [*warnings, *warned]
        faults += _memory(config, role)
        if thorough:
            faults += [f"model.path: {config.model.path}: {fault}" for fault in _tensors(config.model.path)]
    if faults:
        raise ConfigError("\n".join(faults))
    return warnings


def _machine(config: Config) -> Iterator[str]:
    """What every part of a run needs of the machine, whatever it is to do."""
    if not (machine.PROCESS / "stat").exists():
        yield "/proc is not mounted: a run watches its processes by it; start the container with it"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < FILES:
        yield f"open files: at most {files}, {FILES} are needed; raise it with ulimit -n, or --ulimit of a container"
    temporary = surroundings.temporary_folder()
    path = os.fsencode(folders.sockets_base() / f"{ownership.PREFIX}XXXXXXXX" / "broker")
    if len(path) > IPC_PATH_LIMIT:
        text = f"paths of sockets would have {len(path)} bytes, {IPC_PATH_LIMIT} at most"
        yield f"TMPDIR: {folders.SOCKETS} cannot be written, and in {temporary} {text}; choose a shorter one"
    if config.generator.engine == "vllm" and len(os.fsencode(temporary)) > VLLM_TEMPORARY:
        yield f"TMPDIR: {temporary} is too long for vLLM's sockets: at most {VLLM_TEMPORARY} bytes"


def _run_folder(config: Config) -> Iterator[str]:
    """Faults of the place of the run's folder, tried in what is there of it."""
    folder = config.folder.resolve()
    here = next(path for path in (folder, *folder.parents) if path.exists())
    for fault in filesystem.faults(here):
        if "flock" not in fault:  # that is warned of where the folder is taken
            yield f"run.dir: {here} ({filesystem.kind(here)}): {fault}"


def _memory(config: Config, role: Role) -> Iterator[str]:
    """Memory that is certainly too little: of a container's limit, where what is computed lies in it."""
    limit = machine.memory_limit()
    if limit is None or any(Path(device).exists() for device in GPUS):
        return
    item_bytes = {"float32": 4, "bfloat16": 2, "float64": 8}[config.model.dtype]
    weights = model_folder.weight_bytes(Path(config.model.path), item_bytes)
    parts = {"run": config.generator.count + config.learner.ranks, "learner": 1}.get(role, 1)
    models = (config.generator.count if role == "run" else 1) + (4 if role in ("run", "learner") else 0)
    needed = parts * PROCESS_BYTES + models * weights
    if needed > limit:
        text = f"needs {needed / 1e6:.0f} MB at least, the limit of this container is {limit / 1e6:.0f} MB"
        yield f"memory: {role} {text}; give it more (--memory), or lower generator.count"


def _keys(config: Config) -> Iterator[str]:
    try:
        server_keys(config.transport.keys, config.transport.bind)
        client_keys(config.transport.keys, config.transport.bind, SUPERVISOR, SUPERVISOR)
    except ConfigError as error:
        yield f"transport.{error}"


def _metrics_port(config: Config) -> Iterator[str]:
    port = config.telemetry.prometheus_port
    if port is not None and not installed("prometheus_client"):
        extra = "install the extra: pip install 'sao[tracking]'"
        yield f"telemetry.prometheus_port: needs prometheus_client, not installed; {extra}"
    elif port is not None:
        try:
            socket.create_server((sinks.PROMETHEUS_HOST, port)).close()
        except OSError as error:
            yield sinks.taken(port, error)


def _listens(field: str, address: str) -> Iterator[str]:
    """The reason why nobody can listen at an address of this machine, if there is one. It is free again afterwards."""
    if address == "ipc":
        return
    host, port = addresses.split(address)
    family = socket.AF_INET6 if addresses.is_ipv6(host) else socket.AF_INET
    try:
        socket.create_server(("" if host == "*" else host.strip("[]"), port), family=family).close()
    except OSError as error:
        yield f"{field}: {address}: cannot listen: {error.strerror or error}"


def _packages(config: Config) -> Iterator[str]:
    engine = config.generator.engine
    extra, needed = ("vllm", (*PACKAGES, "vllm")) if engine == "vllm" else ("train", PACKAGES)
    if absent := ", ".join(name for name in needed if not installed(name)):
        text = f"needs {absent}, not installed; install the extra: pip install 'sao[{extra}]'"
        yield f"generator.engine: {engine!r} {text}"
    for name in ("wandb", "trackio"):
        if getattr(config.telemetry, name) and not installed(name):
            yield f"telemetry.{name}: needs {name}, not installed; pip install {name}"


def _model_folder(field: str, path: str, template: str | None = None) -> Iterator[str]:
    """The files that a model folder lacks. A critic needs neither tokenizer nor chat template."""
    folder, critic = Path(path), field == "learner.critic_path"
    trained = model_folder.CRITIC if critic and (folder / model_folder.CRITIC).is_file() else None
    for fault in model_folder.file_faults(folder, weights=trained, tokenizer=not critic):
        yield f"{field}: {fault}"
    try:
        if folder.is_dir() and not critic and not chat_template.source(folder, template):
            yield f"{field}: {folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)"
    except ConfigError as error:
        yield str(error)


def _critic_adapter(folder: Path) -> Iterator[str]:
    """What is no checkpoint or pretrained critic of a run whose critic is an adapter."""
    for name in (adapter_folder.CONFIG, adapter_folder.WEIGHTS, "head.safetensors"):
        if not (folder / "critic_adapter" / name).is_file():
            yield f"learner.critic_path: {folder} has no critic_adapter/{name}; lora.critic = full takes any model"


def weights_bytes(config: Config) -> int:
    """Bytes of the versions of the weights that exist at once: those that are kept, and one that is being written."""
    item_bytes = {"float32": 4, "bfloat16": 2, "float64": 8}[config.published_dtype]
    return (KEPT_VERSIONS + 1) * model_folder.weight_bytes(Path(config.model.path), item_bytes)


def _room(config: Config) -> tuple[list[str], list[str]]:
    """Faults and warnings of the room for weights: in shared memory, else in the run's folder."""
    needed = weights_bytes(config)
    folder = config.folder.resolve()
    here = folders.free_bytes(next(path for path in (folder, *folder.parents) if path.exists()))
    if here <= (saved := CHECKPOINT * needed // (KEPT_VERSIONS + 1)):
        text = f"a checkpoint needs {saved / 1e6:.1f} MB at least, there are {here / 1e6:.1f} MB"
        return [f"run.dir: {config.folder}: {text}"], []
    if (shared := folders.free_bytes(folders.SHARED_MEMORY)) > needed:
        return [], []
    text = (
        f"{KEPT_VERSIONS + 1} versions of the weights need {needed / 1e6:.1f} MB, {folders.SHARED_MEMORY} has"
        f" {shared / 1e6:.1f} MB"
    )
    if here <= needed:
        return [f"run.dir: {text} and {config.folder} {here / 1e6:.1f} MB"], []
    return [], [f"{text}: they go through {config.folder}, which is slower; a container gets more by --shm-size"]


def _positions(config: Config) -> tuple[list[str], list[str]]:
    """Faults and warnings of a context window that is longer than the model's positions."""
    limit, learned = model_folder.positions(Path(config.model.path))
    context = config.sampling.context_tokens
    if limit is None or context <= limit:
        return [], []
    text = f"sampling.context_tokens: {context} is beyond the {limit} positions of {config.model.path}"
    if learned or config.generator.engine == "vllm":
        return [f"{text}; at most {limit} can be computed"], []
    return [], [f"{text}; it was never trained on what lies further back"]


def _tensors(path: str) -> list[str]:
    """`model_folder.tensor_faults` in a process of its own: this one never imports torch."""
    command = [sys.executable, "-m", "sao.storage.model_folder", path]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=TENSORS_S, check=False)
    try:
        return list(json.loads(done.stdout))
    except ValueError:
        return [f"cannot be checked: {(done.stderr.strip() or 'no answer').splitlines()[-1]}"]


def _chat_template(model: ModelSection) -> Iterator[str]:
    """Faults of the syntax of the chat template, and of variables that it does not read.

    How it renders turns is looked at by a generator, before it loads the model.
    """
    if not installed("jinja2"):
        return
    try:
        text = chat_template.source(Path(model.path), model.chat_template) or ""
    except ConfigError:  # said already
        return
    where = f"model.chat_template: {model.chat_template}" if model.chat_template else f"model.path: {model.path}"
    known: set[str] = set()
    try:
        for one in text.values() if isinstance(text, dict) else (text,):
            known |= chat_template.variables(one)
    except ConfigError as error:
        yield f"{where}: chat template: {error}"
        return
    for name in model.chat_template_kwargs.keys() - (known - chat_template.GIVEN) if text else ():
        reads = ", ".join(sorted(known - chat_template.GIVEN)) or "none"
        yield f"model.chat_template_kwargs.{name}: the chat template reads no such variable; it reads: {reads}"


def _environment(config: Config) -> Iterator[str]:
    """Faults of the environment's name or arguments: one is made (not reset) and thrown away."""
    name, args = config.env.name, config.env.args
    try:
        made: Any = registry.make(name, **args)
    except (ConfigError, EnvironmentFailure) as error:
        yield from str(error).splitlines()
        return
    except Exception as error:  # the environment's own code, given arguments that it did not expect
        yield f"env.args: {name!r} refused {args}: {type(error).__name__}: {error}"
        return
    if hasattr(made, "play"):
        if not installed("aiohttp"):
            yield f"env.name: {name!r}: agents need pip install 'sao[agents]'"
        if config.compaction.enabled:
            yield f"compaction.enabled: {name!r} is an agent, which keeps its own context"


def compaction(config: Config) -> Iterator[str]:
    """Faults of the texts, the summariser and the lengths of `[compaction]`.

    The chat markup around the summary request is counted by a generator only, which looks at the lengths once more.
    """
    part = config.compaction
    if not part.enabled:
        return
    if part.summariser:
        yield from _model_folder("compaction.summariser", part.summariser)
    try:
        request, _ = templates(config)
    except ConfigError as error:
        yield str(error)
        return
    if (size := _tokens(Path(config.model.path), request.text)) is not None:
        yield from config.compaction_threshold(size)[1]


def _tokens(folder: Path, text: str) -> int | None:
    """Length of a text under the folder's tokenizer; None when that cannot be known here."""
    if not installed("tokenizers") or not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer  # of the extra `train`; loads neither torch nor transformers

    try:
        return len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)
    except Exception:  # not a tokenizer; the generator says so with the library's own words
        return None


def _warnings(config: Config) -> Iterator[str]:
    generator, learner, transport, telemetry = config.generator, config.learner, config.transport, config.telemetry
    threads, cpus = generator.count * generator.threads + learner.ranks * learner.threads, machine.cpus()
    if threads > 2 * cpus:
        sums = "generator.count * generator.threads + learner.ranks * learner.threads"
        yield f"{sums} = {threads} threads on {cpus} CPUs"
    remote = transport.bind != "ipc" and not addresses.is_loopback(addresses.split(transport.bind)[0])
    if remote and transport.keys is None:
        yield f"transport.bind: {transport.bind} is open to the network; peers are not authenticated"
    left_out = "is not installed, so it is left out; pip install 'sao[tracking]'"
    if telemetry.tensorboard and not installed("tensorboard"):
        yield f"telemetry.tensorboard: tensorboard {left_out}"
    for package in ("matplotlib", "dygraphs"):
        if telemetry.plot and not installed(package):
            yield f"telemetry.plot: {package} {left_out}"


def installed(package: str) -> bool:
    """Whether a package is here; it is not imported."""
    return importlib.util.find_spec(package) is not None
