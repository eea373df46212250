"""A real broker process, and scripted peers: a generator (also as a process of its own), a learner, a watcher."""

from __future__ import annotations

import argparse
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.broker_world import M, config, trajectory

from sao import _core
from sao.config import Config, load, save
from sao.errors import Error
from sao.trajectory import encode_frames, split_frames
from sao.transport import Callbacks, Client, Limits, private_folder
from sao.transport import messages as m


class Process:
    """`python -m sao.broker` in a run folder of its own."""

    def __init__(self, cfg: Config, folder: Path, endpoint: str) -> None:
        self.folder, self.endpoint, self.config = folder, endpoint, cfg
        folder.mkdir(exist_ok=True)
        save(cfg, folder / "config.json")
        argv = [sys.executable, "-m", "sao.broker", "--run-folder", str(folder), "--endpoint", endpoint]
        self.log = folder / "broker.log"
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(argv, stderr=log, stdout=log)

    def wait(self, deadline_s: float = 60.0) -> int:
        """Its exit code."""
        return self.child.wait(deadline_s)

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text()


@contextmanager
def broker(tmp_path: Path, **sections: dict[str, Any]) -> Iterator[Process]:
    """A running broker; killed at the end if it is still there."""
    folder = private_folder()
    process = Process(config(**sections), tmp_path / "run", f"ipc://{folder}/broker")
    try:
        yield process
    finally:
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait(5)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


class Peer:
    """A client that keeps what is pushed to it."""

    def __init__(self, endpoint: str, cfg: Config, role: str, name: str, incarnation: int = 0) -> None:
        transport = cfg.transport
        self.pushes: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
        self.lost = threading.Event()
        self.client = Client(
            endpoint,
            role=role,
            name=name,
            incarnation=incarnation,
            limits=Limits(transport.max_message_bytes, transport.heartbeat_s, transport.peer_timeout_s),
            calls=Callbacks(pushed=self.pushes.put, lost=lambda error: self.lost.set()),
        )
        self.welcome = m.Welcome()

    def join(self, **hello: Any) -> Any:
        """Joins within 20 s."""
        self.welcome = self.client.connect(20, **hello)
        return self

    def call(self, message: m.Message, deadline_s: float = 20.0) -> Any:
        """A call and its answer."""
        return self.client.call(message, deadline_s=deadline_s).result()


class Generator(Peer):
    """Answers every task at once (or after `delay_s`) in one thread until it is told to stop."""

    def __init__(self, endpoint: str, cfg: Config, name: str = "g0", incarnation: int = 0, slots: int = 8) -> None:
        super().__init__(endpoint, cfg, "generator", name, incarnation)
        self.slots, self.received, self.answered, self.version = slots, 0, 0, 0
        self.delay_s = 0.0
        self.fails: Callable[[m.TaskEntry], str | None] = lambda task: None
        self.facts: dict[str, Any] = {}  # of every trajectory
        self.hold = False
        self.held: deque[m.TaskEntry] = deque()
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self, **hello: Any) -> Generator:
        """Joins and starts to work."""
        self.join(**hello)
        self.version = self.welcome.version
        self._thread.start()
        return self

    def close(self) -> None:
        """Leaves."""
        self.pushes.put(m.Stop("test"))
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.client.close()

    def _work(self) -> None:
        try:
            self.client.call(m.Slots(self.slots, 0))
            while not isinstance(message := self.pushes.get(), m.Stop):
                if isinstance(message, m.NewWeights):
                    self.version = message.weights.version
                    self.client.call(m.Loaded(self.version, message.weights.fingerprint))
                elif isinstance(message, m.Tasks):
                    self.received += len(message.tasks)
                    if self.hold:
                        self.held.extend(message.tasks)
                        continue
                    for task in message.tasks:
                        self._answer(task)
                    self.client.call(m.Slots(self.slots, self.received))
        except Error:
            pass
        self.stopped.set()

    def _answer(self, task: m.TaskEntry) -> None:
        time.sleep(self.delay_s)
        reason = self.fails(task)
        if task.split == "eval":
            self.client.call(m.EvalResult(task.ordinal, self.version, 1.0, task.attempt))
        elif reason is not None:
            self.client.call(m.FailedRollout(task.ordinal, task.attempt, reason, 2, "scripted"))
        else:
            done = trajectory(task.ordinal, task.attempt, version=self.version, **self.facts)
            self.client.call(m.FinishedRollout(frames=encode_frames(done)))
        self.answered += 1


class Learner(Peer):
    """Takes and commits."""

    def __init__(self, endpoint: str, cfg: Config, incarnation: int = 0, name: str = "learner") -> None:
        super().__init__(endpoint, cfg, "learner", name, incarnation)
        self.batch = cfg.learner.batch_trajectories
        self.ordinals: list[int] = []

    def take(self, deadline_s: float = 20.0) -> Any:
        """One batch, or `Stop`."""
        return self.call(m.Take(self.batch), deadline_s)

    def commit(self, batch: m.Batch, step: int) -> None:
        """Trains everything in a batch and publishes the next version."""
        tokens = sum(_core.summary(header)["n_actions"] for header, *_ in split_frames(batch.frames))
        weights = m.WeightsRef(batch.version + 1, f"/w/{batch.version + 1}", f"f{batch.version + 1}")
        self.call(m.Commit(batch.lease, step, weights.version, tokens, 0, {"loss": 0.5}, weights))
        self.ordinals += batch.ordinals

    def train(self, steps: int, delay_s: float = 0.0) -> None:
        """Whole steps."""
        for step in range(self.welcome.step + 1, self.welcome.step + 1 + steps):
            batch = self.take()
            assert isinstance(batch, m.Batch), batch
            for header, payload, *sidecars in split_frames(batch.frames):
                _core.summary(header, payload, sidecars=sidecars)
            time.sleep(delay_s)
            self.commit(batch, step)


class Watcher(Peer):
    """A supervisor that keeps everything by kind."""

    def __init__(self, endpoint: str, cfg: Config) -> None:
        super().__init__(endpoint, cfg, "supervisor", "supervisor")
        self.seen: list[m.Message] = []

    def of(self, kind: type[M]) -> list[M]:
        """The pushes of a kind so far."""
        while not self.pushes.empty():
            self.seen.append(self.pushes.get())
        return [message for message in self.seen if isinstance(message, kind)]

    def wait(self, kind: type[M], n: int = 1, deadline_s: float = 20.0) -> M:
        """The `n`-th push of a kind."""
        end = time.monotonic() + deadline_s
        while len(self.of(kind)) < n:
            assert time.monotonic() < end, f"no {kind.__name__} within {deadline_s} s; seen: {self.seen}"
            time.sleep(0.01)
        return self.of(kind)[n - 1]

    def snapshot(self) -> dict[str, Any]:
        """The broker's snapshot."""
        return dict(self.call(m.GetSnapshot()).tree)


def main() -> None:
    """A generator process that takes tasks and never answers them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("endpoint")
    parser.add_argument("name")
    arguments = parser.parse_args()
    generator = Generator(arguments.endpoint, load(arguments.run_folder / "config.json"), arguments.name)
    generator.hold = True
    generator.start()
    while not generator.held:
        time.sleep(0.01)
    print(len(generator.held), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
