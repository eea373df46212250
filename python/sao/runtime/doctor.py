"""`sao doctor`: what this installation has, what it lacks and what a run would use. Cleans up after killed runs."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

import sao._core
from sao.envs import registry, sandbox
from sao.errors import Error
from sao.runtime import folders, hosts, machine
from sao.runtime.preflight import FILES, installed
from sao.storage import filesystem, ownership, surroundings
from sao.transport.actor import Actor
from sao.transport.client import Client
from sao.transport.messages import GetSnapshot, Welcome
from sao.transport.sockets import private_folder

State = Literal["ok", "note", "fault"]
Finding = tuple[str, State, str]  # what was looked at, how it is, and what was found
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
    "dygraphs": "no report.html: pip install 'sao[tracking]'",
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


def show() -> bool:
    """Prints what every check finds, and removes what killed runs left behind; whether training can start here."""
    checks = (_python, _torch, _packages, _machine, _sockets, _leftovers)
    return show_findings(finding for check in checks for finding in check())


def show_findings(findings: Iterable[Finding]) -> bool:
    """Prints what was found; whether none of it is a fault."""
    found = list(findings)
    _print((Text(state, STYLES[state]), Text(subject, "bold"), Text(text)) for subject, state, text in found)
    return all(state != "fault" for _, state, _ in found)


def show_run(endpoint: str, keys: Path | None = None) -> bool:
    """Prints how the run of the broker at `endpoint` stands and who waits for what; whether it is going on.

    Raises `Error` that says why there is no answer.
    """
    found = hosts.ask(hosts.Host(endpoint, keys, RUN_PROBE_S), GetSnapshot(), "doctor")
    values = {name.replace("_", " "): "-" if value is None else json.dumps(value) for name, value in found.items()}
    _print((Text(name, "bold"), Text(value)) for name, value in values.items())
    return not (found.get("done") or {}).get("failed")


def _print(rows: Iterable[tuple[Text, ...]]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _python() -> Iterator[Finding]:
    yield "python", "ok", f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    yield "sao", "ok", f"{version('sao')}, core {sao._core.__file__}"


def _torch() -> Iterator[Finding]:
    if not installed("torch"):
        yield "torch", "fault", "not installed: pip install 'sao[train]'"
        return
    command = [sys.executable, "-c", _TORCH_PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=TORCH_PROBE_S, check=True)
        has = json.loads(probe.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        yield "torch", "fault", f"{version('torch')} does not import: {detail.strip().splitlines()[-1]}"
        return
    yield "torch", "ok", f"{version('torch')}, {has['threads']} threads by default"
    yield "devices", "ok", ", ".join(has["gpus"]) or f"CPU ({has['cpu']}), no GPU"
    engines = "torch, vllm" if installed("vllm") else "torch"
    yield "engines", "ok", f"{engines}; attention of the learner, best first: {', '.join(has['attention'])}"


def _packages() -> Iterator[Finding]:
    yield "pyzmq", "ok", version("pyzmq")
    for package, without in OPTIONAL.items():
        here = installed(package)
        yield package, "ok" if here else "note", _version(package) if here else without
    yield "environments", "ok", ", ".join(registry.names())
    path, found = sandbox.bubblewrap()
    text = f"{found} ({path})" if path else f"environment 'workspace' refuses to run scripts: {found}"
    yield "sandbox", "ok" if path else "note", text


def _version(package: str) -> str:
    for name in (package, package.replace("_", "-"), f"{package}-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "installed"


def _machine() -> Iterator[Finding]:
    yield "cpus", "ok", f"{machine.cpus()} usable of {psutil.cpu_count()}"
    free, total = machine.memory()
    limit = " (the limit of this container)" if total < psutil.virtual_memory().total else ""
    yield "memory", "ok", f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB{limit}"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield "open files", "ok" if files >= FILES else "fault", f"{files} at most, {FILES} are needed (ulimit -n)"
    home = os.environ.get("HOME", "")
    if os.access(home, os.W_OK):
        yield "home", "ok", home
    else:
        yield "home", "note", f"{home or 'none'} cannot be written: caches go to {os.environ.get('XDG_CACHE_HOME')}"
    for place, folder in (("current folder", Path.cwd()), ("temporary files", surroundings.temporary_folder())):
        missing = "; ".join(filesystem.faults(folder))
        yield place, "note" if missing else "ok", f"{folder} ({filesystem.kind(folder)}){missing and ': '}{missing}"
    if not folders.SHARED_MEMORY.is_dir():
        yield "shared memory", "note", "no /dev/shm: weights go through the run folder"
        return
    free = shutil.disk_usage(folders.SHARED_MEMORY).free
    yield (
        "shared memory",
        "ok" if free > GIB else "note",
        f"{free / GIB:.1f} GiB free; must hold the weights four times",
    )


def _sockets() -> Iterator[Finding]:
    folder = private_folder(ownership.PREFIX, str(folders.sockets_base()))
    try:
        ownership.own(folder)  # so that it goes with the next start when this process is killed
        yield _reachable("ipc", f"ipc://{folder / 'doctor'}")
        yield _reachable("loopback tcp", "tcp://127.0.0.1:0")
    finally:
        ownership.disown(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _reachable(kind: str, endpoint: str) -> Finding:
    """Whether a client reaches a listening actor, over the transport that a run uses."""
    try:
        actor = Actor(endpoint, on_join=lambda peer: Welcome(), on_leave=lambda peer, reason: None)
    except Error as error:
        return kind, "fault", str(error)
    served = threading.Thread(target=actor.run, daemon=True)
    served.start()
    try:
        with Client(actor.endpoint, role="supervisor", name="doctor") as client:
            started_s = time.perf_counter()
            client.connect(deadline_s=5.0)
            return kind, "ok", f"answer in {1000 * (time.perf_counter() - started_s):.1f} ms"
    except Error as error:
        return kind, "fault", str(error)
    finally:
        actor.stop()
        served.join(timeout=5.0)
        actor.close()


def _leftovers() -> Iterator[Finding]:
    if gone := ", ".join(map(str, folders.remove_stale())):
        yield "leftovers", "note", f"removed {gone}, left by runs that were killed"
