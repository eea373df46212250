"""The cost of finished rollouts that outlive the broker: `python bench/durability.py`; writes results/durability.json.

A real broker process takes trajectories of 2000 tokens from one generator over ipc, 64 unanswered at a time, under each
`buffer.durability`; then it is killed with all of them waiting, and started again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(1, str(Path(__file__).parent))
from common import RESULTS, machine

from sao.config import parse, save
from sao.trajectory import SegmentBuilder, Termination, Trajectory, encode
from sao.transport.client import Client
from sao.transport.messages import FinishedRollout, GetSnapshot, Loaded, Slots, TaskEntry, Tasks
from sao.transport.sockets import private_folder

COUNT, TOKENS, WINDOW = 2000, 2000, 64
BATCH, LAG = 64, 31


def encoded(ordinal: int, attempt: int) -> tuple[bytes, bytes]:
    """A rollout of so many tokens, half of them sampled."""
    builder = SegmentBuilder("execution")
    half = TOKENS // 2
    builder.append_context(np.arange(half))
    builder.append_sampled(np.arange(half), np.full(half, -1.0, np.float32), [(0, half, 0)])
    name = ordinal.to_bytes(8, "little") + attempt.to_bytes(8, "little")
    ending = Termination("finished")
    return encode(Trajectory(name, ordinal, attempt, "e", (builder.build(),), 1.0, ending, 1.0, fingerprints={}))


class Broker:
    """`python -m sao.broker` in a folder."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.log = (folder / "broker.log").open("ab")
        command = [sys.executable, "-m", "sao.broker", "--run-folder", str(folder), "--endpoint", endpoint]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def measure(durability: str) -> dict[str, Any]:
    """Trajectories a second, time to the acknowledgement, bytes on disk, time to be back."""
    with tempfile.TemporaryDirectory(prefix="durability-") as name:
        folder, sockets = Path(name), private_folder("durability-")
        config = parse(
            {
                "run": {"steps": 1000},
                "model": {"path": "m"},
                "env": {"name": "e"},
                "sampling": {"context_tokens": 2 * TOKENS, "max_response_tokens": TOKENS},
                "learner": {"batch_trajectories": BATCH, "row_tokens": 2 * TOKENS},
                "staleness": {"max_lag": LAG},
                "eval": {"every_steps": 0},
                "buffer": {"durability": durability},
            }
        )
        save(config, folder / "config.json")
        endpoint = f"ipc://{sockets / 'broker'}"
        broker, tasks = Broker(folder, endpoint), deque[TaskEntry]()
        client = Client(
            endpoint,
            role="generator",
            name="g0",
            outage_s=60.0,
            on_push=lambda message: tasks.extend(message.tasks if isinstance(message, Tasks) else ()),
        )
        try:
            client.connect(deadline_s=60)
            client.call(Loaded(0, "0" * 32)).result(30)
            client.call(Slots(COUNT, 0)).result(30)
            while len(tasks) < COUNT:
                time.sleep(0.01)
            ready = [encoded(task.ordinal, task.attempt) for task in tasks]
            size = sum(map(len, ready[0]))
            waits, open_ = [], deque[tuple[float, Any]]()
            began = time.perf_counter()
            for frames in ready:
                if len(open_) == WINDOW:
                    _settle(open_, waits)
                open_.append((time.perf_counter(), client.send(FinishedRollout(frames=frames))))
            while open_:
                _settle(open_, waits)
            seconds = time.perf_counter() - began
            disk = sum(path.stat().st_size for path in folder.glob("wal/*"))
            snapshot = client.call(GetSnapshot()).result(30).state
            assert snapshot["ready"] == COUNT, snapshot
            broker.kill()
            back = {}
            if durability != "off":
                began = time.perf_counter()
                broker = Broker(folder, endpoint)
                snapshot = client.call(GetSnapshot()).result(60).state
                back = {"back_after_s": round(time.perf_counter() - began, 2), "ready_after": snapshot["ready"]}
                assert snapshot["ready"] == COUNT and snapshot["tokens"]["held"] == COUNT * TOKENS // 2, snapshot
        finally:
            client.close()
            broker.kill()
            for path in sockets.iterdir():
                path.unlink()
            sockets.rmdir()
    waits.sort()
    return {
        "durability": durability,
        "trajectory_bytes": size,
        "trajectories_per_s": round(COUNT / seconds),
        "mb_per_s": round(COUNT * size / seconds / 1e6, 1),
        "ack_ms": {"p50": round(waits[COUNT // 2] * 1e3, 2), "p99": round(waits[COUNT * 99 // 100] * 1e3, 2)},
        "log_mib": round(disk / 2**20, 1),
        **back,
    }


def _settle(waiting: deque[tuple[float, Any]], waits: list[float]) -> None:
    sent, future = waiting.popleft()
    assert future.result(60).accepted
    waits.append(time.perf_counter() - sent)


def main() -> None:
    rows = [measure(durability) for durability in ("off", "process", "machine")]
    result = {"machine": machine(), "rollouts": COUNT, "tokens_each": TOKENS, "unanswered": WINDOW, "rows": rows}
    print(json.dumps(result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "durability.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
