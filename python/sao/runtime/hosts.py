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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from sao import config as configuration
from sao.config import Config
from sao.errors import ConfigError, TransportError
from sao.runtime import folders, launch, preflight, train
from sao.runtime import resume as resuming
from sao.runtime.processes import Command, Family, on_signals
from sao.runtime.supervisor import EXIT_FAILED, EXIT_INTERRUPTED
from sao.transport.client import Client
from sao.transport.keys import VISITOR, client_keys
from sao.transport.messages import GetConfig, GetSnapshot, Message, RunConfig, Snapshot
from sao.transport.sockets import Limits, check_endpoint

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
    if resume:  # wherever the folder is now
        here = [f"run.dir={str(target.resolve().parent)!r}", f"run.name={target.resolve().name!r}"]
        config = configuration.load(target / "config.json", [*here, *overrides])
    else:
        config = configuration.load(target, overrides)
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
    config, places = _prepare(endpoint, name, overrides, keys, folder, wait_s)
    preflight.check(config, role="generator")
    # A number that no process of this name had before: its draws are new, and what is left of an earlier one is fenced.
    incarnation = int(time.time() * 1000)
    return _run(config, places, lambda places: launch.generator(config, places, 0, incarnation, name))


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
    config, places = _prepare(endpoint, name, overrides, keys, folder, wait_s)
    if (wanted := config.learner.ranks) != ranks:
        command = f"torchrun --nproc-per-node {wanted} -m sao.cli learner ..."
        raise ConfigError(f"learner.ranks: {wanted}, here are {ranks}; start them: {command}")
    preflight.check(config, role="learner")
    checkpoint = resuming.find(config, places.run_folder).checkpoint if resume else None
    if not resume and rank == 0 and any((places.run_folder / "checkpoints").glob("*")):
        raise ConfigError(f"{places.run_folder}/checkpoints is not empty: pass --resume, or another --folder")
    places, torchrun = replace(places, checkpoint=checkpoint), "RANK" in os.environ
    return _run(config, places, lambda places: launch.learner(config, places, rank, torchrun))


def snapshot(endpoint: str, name: str, *, keys: Path | None = None, wait_s: float = 60.0) -> dict[str, Any]:
    """The state of the run of the broker at `endpoint`. Raises as `_ask` does."""
    answer = _ask(endpoint, GetSnapshot(), name, keys, wait_s)
    assert isinstance(answer, Snapshot)
    return answer.tree


def _ask(endpoint: str, question: GetConfig | GetSnapshot, name: str, keys: Path | None, wait_s: float) -> Message:
    """The answer of the broker at `endpoint` to a visitor.

    Raises `ConfigError` for what is no endpoint, `Error` that says why there is no answer within `wait_s`.
    """
    try:
        check_endpoint(endpoint)
    except TransportError as error:
        raise ConfigError(f"--connect: {error}") from None
    visitor = f"{name}@{socket.gethostname()}-{os.getpid()}"
    with Client(
        endpoint,
        role=VISITOR,
        name=visitor,
        keys=client_keys(keys, endpoint, VISITOR, name),
        limits=Limits(peer_timeout_s=ASK_S),
    ) as client:
        client.connect(deadline_s=wait_s)
        return client.call(question, deadline_s=ASK_S).result()


def _prepare(
    endpoint: str, name: str, overrides: Sequence[str], keys: Path | None, folder: Path | None, wait_s: float
) -> tuple[Config, launch.Places]:
    """The run's configuration for this host, also written to a file for the actor, and its places."""
    foreign = [item for item in overrides if not _local(item.partition("=")[0].strip())]
    if foreign:
        raise ConfigError(
            f"override {foreign[0]!r}: belongs to the run, set it where the broker is started; here {', '.join(LOCAL)} "
            f"and {', '.join(LOCAL_SECTIONS)} may differ"
        )
    answer = _ask(endpoint, GetConfig(), name, keys, wait_s)
    assert isinstance(answer, RunConfig)
    source = f"configuration of the broker at {endpoint}"
    data = configuration.parse(answer.tree, source=source).model_dump()
    data["transport"]["keys"] = None if keys is None else str(keys.resolve())
    if keys is None:
        data["transport"]["allow_remote"] = True  # the broker has decided that
    config = configuration.parse(data, overrides, source=source)
    run_folder = (folder or config.folder).resolve()
    file = run_folder / "hosts" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    configuration.save(config, file)
    print(f"{name} of run {config.run.name!r} at {endpoint}; configuration: {file}", flush=True)
    return config, launch.Places(run_folder, Path(), Path(), endpoint, config=file)


def _local(key: str) -> bool:
    return key in LOCAL or key.startswith(LOCAL_SECTIONS)


def _run(config: Config, places: launch.Places, make: Callable[[launch.Places], Command]) -> int:
    """Runs an actor to its end with our output; signals ask it to end in order, then it is killed with its family."""
    asked: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        child.send(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)
        signal.setitimer(signal.ITIMER_REAL, config.transport.shutdown_s + END_S)

    for stale in folders.remove_stale():
        print(f"removed {stale}, left by a run that was killed", flush=True)
    with folders.private(places.run_folder) as private, Family() as family:
        command = make(replace(places, weights_folder=private.weights, store=private.sockets / "ranks"))
        child = family.start(command)
        with on_signals(end, signal.SIGALRM):
            try:
                code = child.wait()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    if code >= 0:
        return code
    print(f"{command.name}: {child.how_it_ended}", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED if asked else EXIT_FAILED
