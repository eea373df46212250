"""The commands of a run: which processes are started, with which arguments and thread counts."""

import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sao.config import Config
from sao.runtime.processes import Command

INCARNATIONS = 1 << 20  # more than any generator is started again in one start of a run
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Places:
    """The places at which the actors of a run find each other and their files, and where the run goes on."""

    run_folder: Path
    weights_folder: Path
    store: Path
    endpoint: str
    config: Path | None = None  # of an actor on another host; those of `sao train` read the run folder's
    lock: int | None = None  # handle by which the actors hold the run folder
    start: int = 0  # starts of this run before this one
    resume_step: int | None = None
    checkpoint: Path | None = None
    returns: int = 0  # times that the learner has lost steps in this start of the run
    alone: bool = False  # only the broker is started here; learner and generators join from elsewhere

    @classmethod
    def of(cls, config: Config, sockets_folder: Path, weights_folder: Path, **more: Any) -> Self:
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
    resume: tuple[Any, ...] = ()
    if places.resume_step is not None:
        resume = ("--resume-step", places.resume_step, "--line", places.number(places.returns))
    command = _command(places, "broker", "broker", 1, resume)
    # A broker that is asked to end tells the others that the run is over. Those that started elsewhere wait for the
    # next one instead, when its supervisor has been killed.
    return replace(command, orphaned=signal.SIGKILL) if places.alone else command


def generator(config: Config, places: Places, index: int, incarnation: int, name: str = "") -> Command:
    """Generator number `index` of this host; `incarnation` counts its starts in this start of the run, from 0.

    It gets a number that no process of its name had before, in any start of the run, so its draws are new.
    """
    name = name or f"g{index}"
    own_weights = ("--weights-folder", places.weights_folder) if places.config else ()
    more = ("--name", name, "--index", index, *own_weights, "--incarnation", places.number(incarnation))
    return _command(places, "generator", name, config.generator.threads, more)


def learner(config: Config, places: Places, rank: int, torchrun: bool = False) -> Command:
    """One rank of the learner. The variables are those of torchrun, but ranks meet at a file in the private folder:
    torchrun's own store listens on every network interface, a file does not (`docs/decisions/learner-launch.md`).

    With `torchrun`, which has set them already, ranks meet where and over which networks it says.
    """
    ranks = config.learner.ranks
    variables: dict[str, Any] = {}
    more: tuple[Any, ...] = ("--weights-folder", places.weights_folder)
    if not torchrun:
        more += ("--store", places.store)
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if places.checkpoint:
        more += ("--checkpoint", places.checkpoint)
    name = "learner" if ranks == 1 else f"learner-{rank}"
    return _command(places, "learner", name, config.learner.threads, more, **variables)


def everything(config: Config, places: Places) -> list[Command]:
    """All commands in the order in which they are started."""
    if places.alone:
        return [broker(config, places)]
    generators = [generator(config, places, index, 0) for index in range(config.generator.count)]
    ranks = [learner(config, places, rank) for rank in range(config.learner.ranks)]
    return [broker(config, places), *ranks, *generators]


def _command(places: Places, role: str, name: str, threads: int, more: tuple[Any, ...], **variables: Any) -> Command:
    argv = (*_module(f"sao.{role}", places), *map(str, more))
    environment = dict.fromkeys(THREAD_VARIABLES, threads) | variables
    environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "PYTHONUTF8": "1"}
    handles = () if places.lock is None else (places.lock,)
    return Command(role, name, argv, {name: str(value) for name, value in environment.items()}, handles)


def _module(module: str, places: Places) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *places.arguments())
