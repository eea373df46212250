"""The commands of a run: which processes are started, with which arguments and thread counts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao.config import Config
from sao.runtime.processes import Command

INCARNATIONS = 1 << 20  # more than any generator is started again in one start of a run
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Places:
    """The places at which the actors of a run find each other and their files."""

    run_folder: Path
    weights_folder: Path
    store: Path
    endpoint: str
    config: Path | None = None
    """The configuration of an actor on another host; those of `sao train` read the run folder's."""
    lock: int | None = None
    """Handle by which the actors hold the run folder."""
    start: int = 0
    """Starts of this run before this one."""
    resume_step: int | None = None
    checkpoint: Path | None = None
    """The start of a resumed run."""
    returns: int = 0
    """Times that the learner has lost steps in this start of the run."""
    alone: bool = False
    """Only the broker is started here; learner and generators join from elsewhere."""

    @classmethod
    def of(cls, config: Config, sockets_folder: Path, weights_folder: Path, **more: Any) -> Places:
        """The places of a run whose private folders are given; `more`: the fields that have defaults."""
        endpoint = f"ipc://{sockets_folder / 'broker'}" if config.transport.bind == "ipc" else config.transport.bind
        return cls(config.folder.resolve(), weights_folder, sockets_folder / "ranks", endpoint, **more)

    def number(self, incarnation: int) -> int:
        """The incarnation, unique in the run, of the `incarnation`-th process of a generator in this start of it."""
        return self.start * INCARNATIONS + incarnation

    def arguments(self) -> tuple[str, ...]:
        """The flags that every actor takes."""
        found = ("--run-folder", str(self.run_folder), "--endpoint", self.endpoint)
        return (*found, "--config", str(self.config)) if self.config else found


def broker(config: Config, places: Places) -> Command:
    """The broker."""
    resume: tuple[str, ...] = ()
    if places.resume_step is not None:
        resume = ("--resume-step", str(places.resume_step), "--line", str(places.number(places.returns)))
    return _command("broker", "broker", (*_module("sao.broker", places), *resume), _environment(1), places)


def generator(config: Config, places: Places, index: int, incarnation: int, name: str = "") -> Command:
    """Generator number `index` of this host; `incarnation` counts its starts in this start of the run, from 0.

    It gets a number that no process of its name had before, in any start of the run, so its draws are new.
    """
    name = name or f"g{index}"
    own_weights = ("--weights-folder", str(places.weights_folder)) if places.config else ()
    argv = (*_module("sao.generator", places), "--name", name, "--index", str(index), *own_weights)
    argv += ("--incarnation", str(places.number(incarnation)))
    return _command("generator", name, argv, _environment(config.generator.threads), places)


def learner(config: Config, places: Places, rank: int, torchrun: bool = False) -> Command:
    """One rank of the learner. The variables are those of torchrun, but ranks meet at a file in the private folder:
    torchrun's own store listens on every network interface, a file does not (`docs/decisions/learner-launch.md`).

    With `torchrun`, which has set them already, ranks meet where and over which networks it says.
    """
    ranks = config.learner.ranks
    name = "learner" if ranks == 1 else f"learner-{rank}"
    argv = (*_module("sao.learner", places), "--weights-folder", str(places.weights_folder))
    environment = _environment(config.learner.threads)
    if not torchrun:
        argv += ("--store", str(places.store))
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment |= {key: str(value) for key, value in variables.items()}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if places.checkpoint:
        argv += ("--checkpoint", str(places.checkpoint))
    return _command("learner", name, argv, environment, places)


def everything(config: Config, places: Places) -> list[Command]:
    """All commands in the order in which they are started."""
    if places.alone:
        return [broker(config, places)]
    generators = [generator(config, places, index, 0) for index in range(config.generator.count)]
    ranks = [learner(config, places, rank) for rank in range(config.learner.ranks)]
    return [broker(config, places), *ranks, *generators]


def available_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _command(role: str, name: str, argv: tuple[str, ...], environment: dict[str, str], places: Places) -> Command:
    return Command(role, name, argv, environment, () if places.lock is None else (places.lock,))


def _module(module: str, places: Places) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *places.arguments())


def _environment(threads: int) -> dict[str, str]:
    counts = {name: str(threads) for name in THREAD_VARIABLES}
    return counts | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
