"""Actors started by hand or by a scheduler, on any number of hosts: `sao broker`, `sao learner`, `sao generator`.

The broker's host has the run file and the run folder. The others know an endpoint and, where it is used, a folder of
keys: they ask the broker for the configuration, check it, put in what differs on their host (the path of the model, the
keys, threads), and start the actor as `sao train` would. Its exit code is theirs.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from sao import config as configuration
from sao.config import Config
from sao.errors import ConfigError, TransportError
from sao.runtime import folders, launch, preflight, processes, train
from sao.runtime import resume as resuming
from sao.runtime.processes import Child, Command
from sao.runtime.supervisor import EXIT_FAILED, EXIT_INTERRUPTED
from sao.transport.client import Client
from sao.transport.keys import VISITOR, client_keys
from sao.transport.sockets import check_endpoint

ASK_S: Final = 20.0  # for one answer of the broker
END_S: Final = 5.0  # beyond transport.shutdown_s, before an actor that was asked to end is killed
# What may differ from host to host; all else is the run's.
LOCAL: Final = ("model.path", "compaction.summariser", "learner.critic_path", "transport.keys")
LOCAL_SECTIONS: Final = ("generator.", "learner.threads", "transport.weights_bind", "telemetry.")


def broker(target: Path, overrides: Sequence[str] = (), *, overwrite: bool = False) -> int:
    """Serves a run to actors that join from elsewhere, to its end; returns the exit code, as `train` does.

    `target`: a run file begins a run, a run folder goes on with the one in it. Raises `ConfigError`.
    """
    resume = target.is_dir()
    if resume and overwrite:
        raise ConfigError(f"--overwrite: {target} is a run folder, and that run goes on")
    config = configuration.load(target, overrides) if not resume else _of_folder(target, overrides)
    if config.transport.bind == "ipc":
        raise ConfigError("transport.bind: 'ipc' reaches this host only; set it to tcp://HOST:PORT for `sao broker`")
    return train.train(config, overwrite=overwrite, resume=resume, alone=True)


def generator(
    endpoint: str,
    name: str,
    overrides: Sequence[str] = (),
    *,
    keys: Path | None = None,
    folder: Path | None = None,
    wait_s: float = 60.0,
) -> int:
    """Runs one generator that joins the broker at `endpoint`; returns its exit code. Raises `ConfigError`, `Error`."""
    config, places, file = _prepare(endpoint, "generator", name, overrides, keys, folder, wait_s)
    _check([*preflight.packages(config), *preflight.model_folder("model.path", Path(config.model.path))])
    # A number that no process of this name had before: its draws are new, and what is left of an earlier one is fenced.
    incarnation = int(time.time() * 1000)
    with _private(places) as places:
        command = launch.generator(config, places, 0, 0)
        flags = ("--config", str(file), "--name", name, "--incarnation", str(incarnation))
        argv = (*command.argv[: command.argv.index("--name")], *flags, "--weights-folder", str(places.weights_folder))
        return _run(replace(command, name=name, argv=argv), config)


def learner(
    endpoint: str,
    overrides: Sequence[str] = (),
    *,
    keys: Path | None = None,
    folder: Path | None = None,
    resume: bool = False,
    wait_s: float = 60.0,
) -> int:
    """Runs the learner, or under torchrun one rank of it; returns its exit code. Raises `ConfigError`, `Error`.

    `resume`: from the newest complete checkpoint in the run folder, where the broker goes on, too.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    name = "learner" if ranks == 1 else f"learner-{rank}"
    config, places, file = _prepare(endpoint, "learner", name, overrides, keys, folder, wait_s)
    critic = config.learner.critic_path
    _check(
        [
            *preflight.packages(config),
            *preflight.model_folder("model.path", Path(config.model.path)),
            *(preflight.model_folder("learner.critic_path", Path(critic)) if critic else []),
            *_ranks(config, ranks),
        ]
    )
    checkpoint = resuming.find(config, places.run_folder).checkpoint if resume else None
    if not resume and rank == 0 and any((places.run_folder / "checkpoints").glob("*")):
        raise ConfigError(f"{places.run_folder}/checkpoints is not empty: pass --resume, or another --folder")
    with _private(replace(places, checkpoint=checkpoint)) as places:
        command = launch.learner(config, places, rank)
        argv = (*command.argv, "--config", str(file))
        if "RANK" in os.environ:  # torchrun has said where the ranks meet, and over which networks
            at = argv.index("--store")
            argv = (*argv[:at], *argv[at + 2 :])
            threads = {name: command.environment[name] for name in launch.THREAD_VARIABLES}
            command = replace(command, environment=threads | {"PYTHONUNBUFFERED": "1"})
        return _run(replace(command, name=name, argv=argv), config)


def ask(endpoint: str, kind: str, name: str, *, keys: Path | None = None, wait_s: float = 60.0) -> dict[str, Any]:
    """What the broker at `endpoint` answers to a visitor: its `config` or a `snapshot`.

    Raises `ConfigError` for what is no endpoint, `Error` that says why there is no answer within `wait_s`.
    """
    try:
        check_endpoint(endpoint)
    except TransportError as error:
        raise ConfigError(f"--connect: {error}") from None
    visitor = f"{name}@{socket.gethostname()}-{os.getpid()}"
    with Client(
        endpoint, role=VISITOR, name=visitor, keys=client_keys(keys, endpoint, VISITOR, name), peer_timeout_s=ASK_S
    ) as client:
        client.connect(deadline_s=wait_s)
        return client.call(kind, deadline_s=ASK_S).result().body


def _of_folder(folder: Path, overrides: Sequence[str]) -> Config:
    """The configuration of the run in a folder, wherever the folder is now."""
    found = configuration.load_resolved(folder / "config.json").model_dump(mode="json")
    found["run"] |= {"dir": str(folder.resolve().parent), "name": folder.resolve().name}
    return configuration.parse(found, overrides, source=str(folder / "config.json"))


def _prepare(
    endpoint: str,
    role: str,
    name: str,
    overrides: Sequence[str],
    keys: Path | None,
    folder: Path | None,
    wait_s: float,
) -> tuple[Config, launch.Places, Path]:
    """The run's configuration for this host, its places, and the file that holds the configuration."""
    foreign = [item for item in overrides if not _local(item.partition("=")[0].strip())]
    if foreign:
        raise ConfigError(
            f"override {foreign[0]!r}: belongs to the run, set it where the broker is started; here {', '.join(LOCAL)} "
            f"and {', '.join(LOCAL_SECTIONS)} may differ"
        )
    data = ask(endpoint, "config", name, keys=keys, wait_s=wait_s).get("config")
    source = f"configuration of the broker at {endpoint}"
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: got {type(data).__name__}")
    configuration.parse(data, source=source)
    data["transport"]["keys"] = None if keys is None else str(keys.resolve())
    if keys is None:
        data["transport"]["allow_remote"] = True  # the broker has decided that
    config = configuration.parse(data, overrides, source=source)
    run_folder = (folder or config.folder).resolve()
    file = run_folder / "hosts" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    configuration.save(config, file)
    places = launch.Places(run_folder, Path(), Path(), endpoint)
    print(f"{role} {name} of run {config.run.name!r} at {endpoint}; configuration: {file}", flush=True)
    return config, places, file


def _local(key: str) -> bool:
    return key in LOCAL or key.startswith(LOCAL_SECTIONS)


def _ranks(config: Config, ranks: int) -> list[str]:
    if config.learner.ranks == ranks:
        return []
    wanted = config.learner.ranks
    command = f"torchrun --nproc-per-node {wanted} -m sao.cli learner ..."
    return [f"learner.ranks: {wanted}, here are {ranks}; start them: {command}"]


def _check(faults: list[str]) -> None:
    if faults:
        raise ConfigError("\n".join(faults))


@contextmanager
def _private(places: launch.Places) -> Iterator[launch.Places]:
    """The same places with a private folder for weights; it goes when the actor has ended."""
    for stale in folders.remove_stale():
        print(f"removed {stale}, left by a run that was killed", flush=True)
    private = folders.make_private(places.run_folder)
    try:
        yield replace(places, weights_folder=private.weights, store=private.sockets / "ranks")
    finally:
        private.remove()


def _run(command: Command, config: Config) -> int:
    """Runs the actor to its end with our output; signals ask it to end in order, then it is killed with its family."""
    processes.become_subreaper()
    others = {process.pid for process in processes.descendants()}
    asked: list[int] = []
    child = Child(command)

    def end(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        child.send(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)
        signal.setitimer(signal.ITIMER_REAL, config.transport.shutdown_s + END_S)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.signal(number, end) for number in handled}
    try:
        code = child.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        processes.kill(lambda: [left for left in processes.descendants() if left.pid not in others])
    if code >= 0:
        return code
    print(f"{command.name}: {child.how_it_ended}", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED if asked else EXIT_FAILED
