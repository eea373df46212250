"""Processes on the nodes of a Ray cluster: an actor for each, which starts it and hands out what it writes.

Ray carries arguments, lines and exit codes. Secret files go as arguments of a method, from process to process; whoever
may join the cluster can read them.
"""

import functools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from sao import __version__
from sao.config import Config
from sao.errors import ConfigError
from sao.runtime import folders
from sao.runtime import pool as pools
from sao.runtime.pool import Needs, News, Spot

POLL_S: Final = 1.0
SHUNNED_S: Final = 30.0  # longer than Ray takes to declare a node dead, and places others on it meanwhile


class Keeper:
    """The actor: one process on its node."""

    def __init__(self, folder: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None

    def spot(self) -> tuple[str, str, tuple[int, int], str]:
        """Where we are: the fields of a `Spot`."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as one, socket.socket() as other:
            one.bind((host, 0))
            other.bind((host, 0))
            ports = (one.getsockname()[1], other.getsockname()[1])
        return ray.get_runtime_context().get_node_id(), host, ports, __version__

    def start(self, arguments: list[str], files: dict[str, str]) -> None:
        """Starts `sao ARGUMENTS`. A shell is between us, as Ray kills the children of a worker that ends."""
        command = [sys.executable, "-m", "sao.runtime.keeper", sys.executable, "-m", "sao.cli", *arguments]
        pipe, process = subprocess.PIPE, ["sh", "-c", '"$@"; exit $?', "sh", *command]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
        self._process = subprocess.Popen(
            process,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(files) + "\n")
        self._process.stdin.flush()
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def poll(self) -> tuple[list[str], int | None]:
        """The lines that it has written since, after a moment, and its exit code when it has ended."""
        lines: list[str] = []
        deadline = time.monotonic() + POLL_S
        with suppress(queue.Empty):
            while (left_s := deadline - time.monotonic()) > 0:
                line = self._lines.get(timeout=min(left_s, 0.1 if lines else left_s))
                if line is None:
                    assert self._process is not None
                    code = self._process.wait()
                    folders.remove_stale()  # where its keeper was killed
                    return lines, code if code >= 0 else 1
                lines.append(line)
        return lines, None

    def end(self) -> None:
        """Asks the process to end in order."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write("\n")
                self._process.stdin.flush()


class RayPool:
    """A `Pool` on the cluster at an address. Raises `ConfigError` when there is none."""

    def __init__(self, address: str) -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RayError) as error:
            raise ConfigError(f"--on ray: no cluster at {address}: {str(error).splitlines()[0]}") from None
        self._actors: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        self._asked: dict[Any, str] = {}
        self._shunned: dict[str, float] = {}
        self._make = ray.remote(Keeper)

    @property
    def has_gpus(self) -> bool:
        """Whether any node has a GPU."""
        return ray.cluster_resources().get("GPU", 0) > 0

    def place(self, name: str, needs: Needs) -> None:
        """Makes an actor, not on a node that was lost just now."""
        self._kill(name)
        options: dict[str, Any] = {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "max_restarts": 0}
        now = time.monotonic()
        if shunned := [node for node, until in self._shunned.items() if until > now]:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(shunned)})"}
        self._actors[name] = self._make.options(**options).remote(str(Path.cwd()))
        self._asked[self._actors[name].spot.remote()] = name

    def start(self, name: str, arguments: Sequence[str], files: dict[str, str]) -> None:
        """Starts the process in its actor."""
        self._actors[name].start.remote(list(arguments), files)
        self._asked[self._actors[name].poll.remote()] = name

    def news(self, timeout_s: float) -> list[News]:
        """The answers that have come."""
        if not self._asked:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self._asked), timeout=timeout_s)
        return [self._answer(self._asked.pop(answer), answer) for answer in ready]

    def _answer(self, name: str, answer: Any) -> News:
        try:
            found = ray.get(answer)
        except RayActorError as error:
            if isinstance(error, ActorUnavailableError) and name in self._nodes:
                self._shunned[self._nodes[name]] = time.monotonic() + SHUNNED_S
            return News(name, lost=type(error).__name__)
        if len(found) == len(Spot._fields):
            spot = Spot(*found)
            self._nodes[name] = spot.node
            return News(name, spot)
        lines, code = found
        if code is None:
            self._asked[self._actors[name].poll.remote()] = name
        return News(name, lines=lines, code=code)

    def ask_to_end(self, name: str) -> None:
        """Has the actor end its process."""
        self._actors[name].end.remote()

    def _kill(self, name: str) -> None:
        if (actor := self._actors.pop(name, None)) is not None:
            self._nodes.pop(name, None)
            self._asked = {answer: of for answer, of in self._asked.items() if of != name}
            with suppress(RayError):
                ray.kill(actor)

    def close(self) -> None:
        """Kills the actors; what they have started ends with them."""
        for name in list(self._actors):
            self._kill(name)
        ray.shutdown()


def train(where: str, config: Config, flags: Sequence[str] = ()) -> int:
    """`sao train --on WHERE`, where `where` is `ray` or `ray:ADDRESS`; returns the exit code. Raises `ConfigError`."""
    pool = RayPool(where.partition(":")[2] or "auto")
    return pools.run(config, pool, functools.partial(print, flush=True), flags, pool.has_gpus)
