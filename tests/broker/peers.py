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

from broker.broker_world import config, trajectory

from sao import _core
from sao.config import Config, load_resolved, save
from sao.errors import Error
from sao.trajectory import encode_frames, split_frames
from sao.transport import Client, Message, private_folder
from sao.transport.messages import Stop


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
        self.pushes: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.lost = threading.Event()
        self.client = Client(
            endpoint,
            role=role,
            name=name,
            incarnation=incarnation,
            max_message_bytes=transport.max_message_bytes,
            heartbeat_s=transport.heartbeat_s,
            peer_timeout_s=transport.peer_timeout_s,
            on_push=self.pushes.put,
            on_lost=lambda error: self.lost.set(),
        )
        self.welcome: dict[str, Any] = {}

    def join(self, **hello: Any) -> Any:
        """Joins within 20 s."""
        self.welcome = self.client.connect(20, **hello).body
        return self

    def call(self, kind: str, body: dict[str, Any] | None = None, deadline_s: float = 20.0) -> Message:
        """A call and its answer."""
        return self.client.call(kind, body, deadline_s=deadline_s).result()


class Generator(Peer):
    """Answers every task at once (or after `delay_s`) in one thread until it is told to stop."""

    def __init__(self, endpoint: str, cfg: Config, name: str = "g0", incarnation: int = 0, slots: int = 8) -> None:
        super().__init__(endpoint, cfg, "generator", name, incarnation)
        self.slots, self.received, self.answered, self.version = slots, 0, 0, 0
        self.delay_s = 0.0
        self.fails: Callable[[dict[str, Any]], str | None] = lambda task: None
        self.facts: dict[str, Any] = {}  # of every trajectory
        self.hold = False
        self.held: deque[dict[str, Any]] = deque()
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self, **hello: Any) -> Generator:
        """Joins and starts to work."""
        self.join(**hello)
        self.version = self.welcome["version"]
        self._thread.start()
        return self

    def close(self) -> None:
        """Leaves."""
        self.pushes.put(Stop("test"))
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.client.close()

    def _work(self) -> None:
        try:
            self.client.send("slots", {"free": self.slots, "received": 0})
            while True:
                message = self.pushes.get()
                if message.kind == "stop":
                    break
                if message.kind == "version":
                    self.version = message.body["version"]
                    self.client.send("loaded", {"version": self.version, "fingerprint": message.body["fingerprint"]})
                elif message.kind == "tasks":
                    self.received += len(message.body["tasks"])
                    if self.hold:
                        self.held.extend(message.body["tasks"])
                        continue
                    for task in message.body["tasks"]:
                        self._answer(task)
                    self.client.send("slots", {"free": self.slots, "received": self.received})
        except Error:
            pass
        self.stopped.set()

    def _answer(self, task: dict[str, Any]) -> None:
        time.sleep(self.delay_s)
        reason = self.fails(task)
        key = {"ordinal": task["ordinal"], "attempt": task["attempt"]}
        if task["split"] == "eval":
            body = {"ordinal": task["ordinal"], "reward": 1.0, "reason": None, "version": self.version}
            self.client.send("eval_result", body)
        elif reason is not None:
            self.client.send("failure", {**key, "reason": reason, "detail": "scripted", "sampled_tokens": 2})
        else:
            self.client.send("trajectory", {}, encode_frames(trajectory(**key, version=self.version, **self.facts)))
        self.answered += 1


class Learner(Peer):
    """Takes and commits."""

    def __init__(self, endpoint: str, cfg: Config, incarnation: int = 0, name: str = "learner") -> None:
        super().__init__(endpoint, cfg, "learner", name, incarnation)
        self.batch = cfg.learner.batch_trajectories
        self.ordinals: list[int] = []

    def take(self, deadline_s: float = 20.0) -> Message:
        """One batch, or `stop`."""
        return self.call("take", {"n": self.batch}, deadline_s)

    def commit(self, batch: Message, step: int) -> dict[str, Any]:
        """Trains everything in a batch and publishes the next version."""
        tokens = sum(_core.summary(header)["n_actions"] for header, *_ in split_frames(batch.frames))
        version = batch.body["version"] + 1
        body = {
            "lease": batch.body["lease"],
            "step": step,
            "version": version,
            "weights": {"version": version, "path": f"/w/{version}", "fingerprint": f"f{version}"},
            "trained_tokens": tokens,
            "masked_tokens": 0,
            "metrics": {"loss": 0.5},
        }
        answer = self.call("commit", body).body
        self.ordinals += batch.body["ordinals"]
        return answer

    def train(self, steps: int, delay_s: float = 0.0) -> None:
        """Whole steps."""
        for step in range(self.welcome["step"] + 1, self.welcome["step"] + 1 + steps):
            batch = self.take()
            assert batch.kind == "batch", batch.body
            for header, payload, *sidecars in split_frames(batch.frames):
                _core.summary(header, payload, sidecars=sidecars)
            time.sleep(delay_s)
            self.commit(batch, step)


class Watcher(Peer):
    """A supervisor that keeps everything by kind."""

    def __init__(self, endpoint: str, cfg: Config) -> None:
        super().__init__(endpoint, cfg, "supervisor", "supervisor")
        self.seen: list[Message] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Bodies of the pushes of a kind so far."""
        while not self.pushes.empty():
            self.seen.append(self.pushes.get())
        return [message.body for message in self.seen if message.kind == kind]

    def wait(self, kind: str, n: int = 1, deadline_s: float = 20.0) -> dict[str, Any]:
        """The `n`-th push of a kind."""
        end = time.monotonic() + deadline_s
        while len(self.of(kind)) < n:
            assert time.monotonic() < end, f"no {kind} within {deadline_s} s; seen: {self.seen}"
            time.sleep(0.01)
        return self.of(kind)[n - 1]

    def snapshot(self) -> dict[str, Any]:
        """The broker's snapshot."""
        return self.call("snapshot").body


def main() -> None:
    """A generator process that takes tasks and never answers them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("endpoint")
    parser.add_argument("name")
    arguments = parser.parse_args()
    generator = Generator(arguments.endpoint, load_resolved(arguments.run_folder / "config.json"), arguments.name)
    generator.hold = True
    generator.start()
    while not generator.held:
        time.sleep(0.01)
    print(len(generator.held), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
