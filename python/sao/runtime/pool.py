"""A run on a cluster: `sao train` in one place, generators in others, and whoever is lost placed again.

A `Pool` places processes and carries no data: trajectories and weights go over the run's own connections. The head is
the `sao train` of one machine without generators of its own, so that supervisor, rollback and exit codes are the same.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple, Protocol

from sao import __version__
from sao.config import Config, toml_override
from sao.runtime.processes import on_signals
from sao.runtime.supervisor import EXIT_CONFIG, EXIT_FAILED, Restarts
from sao.transport import keys

HEAD: Final = "head"
LEAVE_S: Final = 10.0  # for generators, after the head has ended
PENDING_S: Final = 20.0  # without a place, before that is said

Tell = Callable[[str], None]


class Needs(NamedTuple):
    """The resources of one process."""

    cpus: int
    gpus: int


class Spot(NamedTuple):
    """Where a process is placed: the node, its address, two free ports there, and the version of sao."""

    node: str
    host: str
    ports: tuple[int, int]
    version: str


class News(NamedTuple):
    """What has become of a process: at its new spot, lines that it wrote, its exit code; or it is lost."""

    name: str
    spot: Spot | None = None
    lines: Sequence[str] = ()
    code: int | None = None
    lost: str = ""


class Pool(Protocol):
    """Places processes by name; one that is placed is started there, as often as need be."""

    def place(self, name: str, needs: Needs) -> None:
        """Asks for a spot, in place of the one that the name had."""

    def start(self, name: str, arguments: Sequence[str], files: dict[str, str]) -> None:
        """Starts `sao ARGUMENTS` at the spot, with secret files in a `{folder}` that goes when it ends."""

    def news(self, timeout_s: float) -> list[News]:
        """Waits for the next news."""

    def ask_to_end(self, name: str) -> None:
        """Has the process end in order."""

    def close(self) -> None:
        """Ends at once all that is left."""


def run(config: Config, pool: Pool, tell: Tell = print, flags: Sequence[str] = (), gpus: bool = False) -> int:
    """Runs `config` to its end in the pool; returns the exit code, as `sao train` does on one machine."""
    names = [f"g{index}" for index in range(config.generator.count)]
    secrets = _secrets(names)
    each = config.generator.vllm_args.get("tensor_parallel_size", 1)
    needs = dict.fromkeys(names, Needs(config.generator.threads, each * gpus))
    learner = config.learner
    needs[HEAD] = Needs(learner.ranks * learner.threads, learner.ranks * gpus)
    model = str(Path(config.model.path).resolve())
    endpoint, code, begun, failed, signals, heard = "", None, False, False, 0, 0
    restarts, left, waiting, ending = Restarts(), set(names), {HEAD: time.monotonic()}, EXIT_FAILED

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1

    def place(name: str) -> None:
        waiting[name] = time.monotonic()
        pool.place(name, needs[name])

    def start(name: str) -> None:
        wanted = {"keys/broker.key", "keys/learner.key", f"keys/{name}.key_secret"}
        files = {path: text for path, text in secrets.items() if path in wanted}
        there = ("--connect", endpoint, "--keys", "{folder}/keys", "--folder", "{folder}/run", "--model", model)
        pool.start(name, ["generator", *there, "--name", name], files)

    def give_up(why: str, with_code: int) -> None:
        nonlocal ending, failed
        if not failed:
            tell(f"error: {why}")
            failed, ending = True, with_code
            if begun:
                pool.ask_to_end(HEAD)

    with on_signals(on_signal):
        try:
            place(HEAD)
            until = float("inf")
            while code is None or (left and time.monotonic() < until):
                if signals > heard:
                    heard = signals
                    if signals > 1 or not begun:
                        return 130
                    pool.ask_to_end(HEAD)
                if failed and not begun:
                    return ending
                for name, since in waiting.items():
                    if time.monotonic() - since > PENDING_S:
                        waiting[name] = float("inf")
                        tell(f"{name} waits for a node with {needs[name].cpus} CPUs and {needs[name].gpus} GPUs free")
                for news in pool.news(0.5):
                    name = news.name
                    for line in news.lines:
                        tell(line if name == HEAD else f"{name} | {line}")
                    if (spot := news.spot) is not None:
                        waiting.pop(name, None)
                        tell(f"{name} is placed on {spot.host} (node {spot.node[:8]})")
                        if spot.version != __version__:
                            give_up(f"node {spot.node[:8]} has sao {spot.version}, here is {__version__}", EXIT_CONFIG)
                        elif name != HEAD:
                            start(name)
                        elif not begun:
                            begun, endpoint = True, f"tcp://{spot.host}:{spot.ports[0]}"
                            pool.start(HEAD, _head(config, spot, model, flags), _head_files(config, secrets))
                            for one in names:
                                place(one)
                    elif news.lost and name == HEAD and begun:
                        tell(f"error: the head is lost ({news.lost}); to go on: the same command with --resume")
                        return EXIT_FAILED
                    elif news.lost and code is None:
                        tell(f"{name} is lost ({news.lost}); it is placed again")
                        place(name)
                    elif news.lost:
                        left.discard(name)
                    elif news.code is not None and name == HEAD:
                        code, until = news.code, time.monotonic() + LEAVE_S
                    elif news.code == 0 or (news.code is not None and (code is not None or failed or signals)):
                        left.discard(name)
                    elif news.code == EXIT_CONFIG:
                        left.discard(name)
                        give_up(f"{name} cannot run where it is placed: see its lines above", EXIT_CONFIG)
                    elif news.code is not None and restarts.permit(name):
                        tell(f"{name} ended with code {news.code}; started again")
                        start(name)
                    elif news.code is not None:
                        left.discard(name)
                        give_up(f"{name} ended unexpectedly{restarts.described(name)}", EXIT_FAILED)
            return ending if failed else code
        finally:
            pool.close()


def _secrets(names: Sequence[str]) -> dict[str, str]:
    """Keys of this run only, by path; nothing of them stays on our disk."""
    with tempfile.TemporaryDirectory(prefix="sao-keys-") as folder:
        keys.write(Path(folder) / "keys", names)
        return {f"keys/{path.name}": path.read_text() for path in (Path(folder) / "keys").iterdir()}


def _head(config: Config, spot: Spot, model: str, flags: Sequence[str]) -> list[str]:
    values = {
        "transport.bind": f"tcp://{spot.host}:{spot.ports[0]}",
        "transport.weights_bind": f"tcp://{spot.host}:{spot.ports[1]}",
        "run.dir": str(Path(config.run.dir).resolve()),
        "model.path": model,
    }
    changed = [toml_override(name, value) for name, value in values.items()]
    return ["train", "{folder}/run.json", *flags, *changed, 'transport.keys="{folder}/keys"', "generator.count=0"]


def _head_files(config: Config, secrets: dict[str, str]) -> dict[str, str]:
    served = {f"keys/{name}.key_secret" for name in keys.ALWAYS}
    own = {path: text for path, text in secrets.items() if path.endswith(".key") or path in served}
    return {"run.json": config.model_dump_json(), **own}
