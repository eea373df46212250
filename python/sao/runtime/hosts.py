"""Actors started by hand or by a scheduler, on any number of hosts: `sao broker`, `sao learner`, `sao generator`.

The broker's host has the run file and the run folder. The others know an endpoint and, where it is used, a folder of
keys: they ask the broker for the configuration, check it, put in what differs on their host (the path of the model, the
keys, threads), and start the actor as `sao train` would. Its exit code is theirs.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from sao import config as configuration
from sao.config import Config, toml_override
from sao.errors import ConfigError, TransportError
from sao.runtime import folders, launch, preflight, train
from sao.runtime import resume as resuming
from sao.runtime.processes import Command, Family, on_signals
from sao.runtime.supervisor import EXIT_FAILED, EXIT_INTERRUPTED
from sao.storage import durable
from sao.transport.client import Client
from sao.transport.keys import FILE_NAME, VISITOR, client_keys
from sao.transport.messages import GetConfig, GetSnapshot, RunConfig, Snapshot
from sao.transport.sockets import Limits, check_endpoint

ASK_S: Final = 20.0  # for one answer of the broker
END_S: Final = 5.0  # beyond transport.shutdown_s, before an actor that was asked to end is killed
# What may differ from host to host; all else is the run's.
LOCAL: Final = (
    *("model.path", "compaction.summariser", "learner.critic_path", "transport.keys"),
    *("generator.", "learner.threads", "transport.weights_bind", "telemetry."),
)


class Host(NamedTuple):
    """What this host knows of the run: the broker's endpoint, its keys, how long to wait for an answer, the folder for
    the run's files here (None: as in the configuration) and what else differs here.
    """

    endpoint: str
    keys: Path | None = None
    wait_s: float = 60.0
    folder: Path | None = None
    overrides: Sequence[str] = ()


def broker(target: Path, overrides: Sequence[str] = (), *, overwrite: bool = False, resume: bool = False) -> int:
    """Serves a run to actors that join from elsewhere, to its end; returns the exit code, as `train` does.

    `target`: a run file begins a run, a run folder goes on with the one in it. `resume`: a run file goes on with its
    run, if it has begun. Raises `ConfigError`.
    """
    if overwrite and (resume or target.is_dir()):
        raise ConfigError(f"--overwrite: the run of {target} goes on")
    if target.is_dir():  # wherever the folder is now
        resume = True
        there = target.resolve()
        here = [toml_override("run.dir", str(there.parent)), toml_override("run.name", there.name)]
        config = configuration.load(target / "config.json", [*here, *overrides])
    else:
        config = configuration.load(target, overrides)
        resume = resume and (config.folder / "config.json").is_file()
    if config.transport.bind == "ipc":
        raise ConfigError("transport.bind: 'ipc' reaches this host only; set it to tcp://HOST:PORT for `sao broker`")
    return train.train(config, overwrite=overwrite, resume=resume, alone=True)


def generator(host: Host, name: str) -> int:
    """Runs one generator that joins the broker; returns its exit code. Raises `ConfigError`, `Error`."""
    if not FILE_NAME.fullmatch(name):
        raise ConfigError(f"--name: {name!r}, expected letters, digits, . _ - (64 at most)")
    config, places = _prepare(host, name)
    preflight.check(config, role="generator")
    # A number that no process of this name had before: its draws are new, and what is left of an earlier one is fenced.
    incarnation = _after(places.run_folder / "hosts" / f"{name}.incarnation", int(time.time() * 1000))
    return _run(config, places, lambda places: launch.generator(config, places, 0, incarnation, name))


def learner(host: Host, *, resume: bool = False) -> int:
    """Runs the learner, or under torchrun one rank of it; returns its exit code. Raises `ConfigError`, `Error`.

    `resume`: from the newest complete checkpoint in the run folder, where the broker goes on, too.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config, places = _prepare(host, "learner" if ranks == 1 else f"learner-{rank}")
    if (wanted := config.learner.ranks) != ranks:
        command = f"torchrun --nproc-per-node {wanted} -m sao.cli learner ..."
        raise ConfigError(f"learner.ranks: {wanted}, here are {ranks}; start them: {command}")
    preflight.check(config, role="learner")
    checkpoint = resuming.find(config, places.run_folder).checkpoint if resume else None
    if not resume and rank == 0 and any((places.run_folder / "checkpoints").glob("*")):
        raise ConfigError(f"{places.run_folder}/checkpoints is not empty: pass --resume, or another --folder")
    places, torchrun = replace(places, checkpoint=checkpoint), "RANK" in os.environ
    return _run(config, places, lambda places: launch.learner(config, places, rank, torchrun))


def _after(file: Path, now: int) -> int:
    """`now`, or one more than the last number that the file holds where the clock was put back; it is kept there."""
    with suppress(OSError, ValueError):
        now = max(now, int(file.read_text(encoding="ascii")) + 1)
    durable.write_text(file, str(now))
    return now


def ask(host: Host, question: GetConfig | GetSnapshot, name: str) -> dict[str, Any]:
    """The broker's answer to a visitor: the run's configuration or state.

    Raises `ConfigError` for what is no endpoint, `Error` that says why there is no answer within `host.wait_s`.
    """
    if host.endpoint.startswith("tcp://*:"):
        raise ConfigError(f"--connect: {host.endpoint} is where a broker listens; name the host that it runs on")
    try:
        check_endpoint(host.endpoint)
    except TransportError as error:
        raise ConfigError(f"--connect: {error}") from None
    keys = client_keys(host.keys, host.endpoint, VISITOR, name)
    visitor, limits = f"{name}@{socket.gethostname()}-{os.getpid()}", Limits(peer_timeout_s=ASK_S)
    with Client(host.endpoint, role=VISITOR, name=visitor, keys=keys, limits=limits) as client:
        client.connect(deadline_s=host.wait_s)
        answer = client.call(question, deadline_s=ASK_S).result()
        assert isinstance(answer, RunConfig | Snapshot)
        return answer.tree


def _prepare(host: Host, name: str) -> tuple[Config, launch.Places]:
    """The run's configuration for this host, also written to a file for the actor, and its places."""
    if foreign := [item for item in host.overrides if not item.strip().startswith(LOCAL)]:
        text = "belongs to the run, set it where the broker is started; here may differ"
        raise ConfigError(f"override {foreign[0]!r}: {text} {', '.join(LOCAL)}")
    source = f"configuration of the broker at {host.endpoint}"
    data = configuration.parse(ask(host, GetConfig(), name), source=source).model_dump()
    data["transport"]["keys"] = None if host.keys is None else str(host.keys.resolve())
    if host.keys is None:
        data["transport"]["allow_remote"] = True  # the broker has decided that
    config = configuration.parse(data, host.overrides, source=source)
    run_folder = (host.folder or config.folder).resolve()
    file = run_folder / "hosts" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    configuration.save(config, file)
    print(f"{name} of run {config.run.name!r} at {host.endpoint}; configuration: {file}", flush=True)
    return config, launch.Places(run_folder, Path(), Path(), host.endpoint, config=file)


def _run(config: Config, places: launch.Places, make: Callable[[launch.Places], Command]) -> int:
    """Runs an actor to its end with our output. A signal asks it to end in order; a second one kills it with its
    family, and so does the time, but for a learner: its last checkpoint may take as long as it has to.
    """
    asked: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        child.send_signal(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)
        if command.role != "learner":
            signal.setitimer(signal.ITIMER_REAL, config.transport.shutdown_s + END_S)

    for stale in folders.remove_stale():
        print(f"removed {stale}, left by a run that was killed", flush=True)
    with folders.private(places.run_folder, preflight.weights_bytes(config)) as private, Family() as family:
        command = make(replace(places, weights_folder=private.weights, store=private.sockets / "ranks"))
        child = family.start(command)
        with on_signals(end, signal.SIGALRM):
            try:
                code = child.wait()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    if code >= 0:
        return EXIT_INTERRUPTED if asked and code == 0 and command.role == "learner" else code
    print(f"{command.name}: {child.how_it_ended}", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED if asked else EXIT_FAILED
