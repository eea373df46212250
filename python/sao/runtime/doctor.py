"""`sao doctor`: what this installation has, what it lacks and what a run would use. Cleans up after killed runs."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao.envs import registry, sandbox
from sao.errors import Error
from sao.runtime import folders, hosts, launch
from sao.storage import ownership
from sao.transport.actor import Actor
from sao.transport.client import Client
from sao.transport.messages import Welcome
from sao.transport.sockets import private_folder

State = Literal["ok", "note", "fault"]
STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "fault": "bold red"}
GIB = 1 << 30
TORCH_PROBE_S = 60.0
RUN_PROBE_S = 10.0

# Package -> what is missing without it.
OPTIONAL = {
    "transformers": "models cannot be loaded: pip install 'sao[train]'",
    "safetensors": "weights cannot be read: pip install 'sao[train]'",
    "vllm": "generator.engine = 'vllm' is not available: pip install 'sao[vllm]'",
    "reasoning_gym": "environment 'reasoning_gym' is not available: pip install 'sao[envs]'",
    "tensorboard": "no TensorBoard files: pip install 'sao[tracking]'",
    "matplotlib": "no curves.png: pip install 'sao[tracking]'",
}

# Run in a process of its own: the supervisor never imports torch.
_TORCH_PROBE = """
import json, torch
from torch.backends.cpu import get_cpu_capability
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
try:
    from sao.learner.attention import available
    kinds = available(torch.device("cuda" if gpus else "cpu"))
except ImportError as error:
    kinds = [f"unknown ({error})"]
print(json.dumps({"gpus": gpus, "cpu": get_cpu_capability(), "threads": torch.get_num_threads(), "attention": kinds}))
"""


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, how it is, and what was found."""

    subject: str
    state: State
    text: str


def show(console: Console | None = None) -> bool:
    """Prints the table; returns whether training can start here."""
    found = findings()
    _table([(Text(one.state, STYLES[one.state]), Text(one.subject, "bold"), Text(one.text)) for one in found], console)
    return all(finding.state != "fault" for finding in found)


def show_run(endpoint: str, keys: Path | None = None, console: Console | None = None) -> bool:
    """Prints how the run of the broker at `endpoint` stands and who waits for what; whether it is going on.

    Raises `Error` that says why there is no answer.
    """
    found = hosts.snapshot(endpoint, "doctor", keys=keys, wait_s=RUN_PROBE_S)
    values = {name: Text("-" if value is None else json.dumps(value)) for name, value in found.items()}
    _table([(Text(name.replace("_", " "), "bold"), value) for name, value in values.items()], console)
    return not (found.get("done") or {}).get("failed")


def _table(rows: Sequence[tuple[Text, ...]], console: Console | None) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    (console or Console(highlight=False)).print(table)


def findings() -> list[Finding]:
    """All checks in order. Removes what killed runs left behind."""
    checks = (_python, _torch, _packages, _sandbox, _machine, _sockets, _leftovers)
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    text = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    yield Finding("python", "ok", text)
    try:
        import sao._core

        yield Finding("sao", "ok", f"{version('sao')}, core {sao._core.__file__}")
    except ImportError as error:
        yield Finding("sao", "fault", f"the native core does not load ({error}): maturin develop --release")


def _torch() -> Iterator[Finding]:
    if not _installed("torch"):
        yield Finding("torch", "fault", "not installed: pip install 'sao[train]'")
        return
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=TORCH_PROBE_S, check=True
        )
        has = json.loads(probe.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        yield Finding("torch", "fault", f"{version('torch')} does not import: {detail.strip().splitlines()[-1]}")
        return
    yield Finding("torch", "ok", f"{version('torch')}, {has['threads']} threads by default")
    yield Finding("devices", "ok", ", ".join(has["gpus"]) or f"CPU ({has['cpu']}), no GPU")
    engines = "torch, vllm" if _installed("vllm") else "torch"
    yield Finding("engines", "ok", f"{engines}; attention of the learner, best first: {', '.join(has['attention'])}")


def _packages() -> Iterator[Finding]:
    yield Finding("pyzmq", "ok", version("pyzmq"))
    for package, without in OPTIONAL.items():
        here = _installed(package)
        yield Finding(package, "ok" if here else "note", _version(package) if here else without)
    yield Finding("environments", "ok", ", ".join(registry.names()))


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str:
    for name in (package, package.replace("_", "-"), f"{package}-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "installed"


def _sandbox() -> Iterator[Finding]:
    path, found = sandbox.bubblewrap()
    if path is not None:
        yield Finding("sandbox", "ok", f"{found} ({path})")
    else:
        yield Finding("sandbox", "note", f"environment 'workspace' refuses to run scripts: {found}")


def _machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("cpus", "ok", f"{launch.available_cpus()} usable of {psutil.cpu_count()}")
    yield Finding("memory", "ok", f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB")
    if not folders.SHARED_MEMORY.is_dir():
        yield Finding("shared memory", "note", "no /dev/shm: weights go through the run folder")
        return
    free = shutil.disk_usage(folders.SHARED_MEMORY).free
    text = f"{free / GIB:.1f} GiB free; four copies of the weights must fit"
    yield Finding("shared memory", "ok" if free > GIB else "note", text)


def _sockets() -> Iterator[Finding]:
    folder = private_folder(ownership.PREFIX, str(folders.SOCKETS))
    try:
        yield _reachable("ipc", f"ipc://{folder / 'doctor'}")
        yield _reachable("loopback tcp", "tcp://127.0.0.1:0")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reachable(kind: str, endpoint: str) -> Finding:
    """Whether a client reaches a listening actor, over the transport that a run uses."""
    try:
        actor = Actor(endpoint, on_join=lambda peer: Welcome(), on_leave=lambda peer, reason: None)
    except Error as error:
        return Finding(kind, "fault", str(error))
    served = threading.Thread(target=actor.run, daemon=True)
    served.start()
    try:
        with Client(actor.endpoint, role="supervisor", name="doctor") as client:
            started_s = time.perf_counter()
            client.connect(deadline_s=5.0)
            return Finding(kind, "ok", f"answer in {1000 * (time.perf_counter() - started_s):.1f} ms")
    except Error as error:
        return Finding(kind, "fault", str(error))
    finally:
        actor.stop()
        served.join(timeout=5.0)
        actor.close()


def _leftovers() -> Iterator[Finding]:
    if gone := ", ".join(map(str, folders.remove_stale())):
        yield Finding("leftovers", "note", f"removed {gone}, left by runs that were killed")
