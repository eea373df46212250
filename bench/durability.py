"""The cost of finished rollouts that outlive the broker: `python bench/durability.py`; writes results/durability.json.

A real broker process takes trajectories of 2000 tokens from one generator over ipc, 64 unanswered at a time, under each
`buffer.durability`; then it is killed with all of them waiting, and started again. With the path of another checkout,
whose core is built, both are measured in turns instead, and what is shown is the median of the ratios after / before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(1, str(Path(__file__).parent))
from common import RESULTS, machine, median

from sao import transport
from sao.config import parse, save
from sao.trajectory import SegmentBuilder, Termination, Trajectory, encode
from sao.transport import messages, sockets
from sao.transport.client import Client
from sao.transport.sockets import private_folder

COUNT, TOKENS, WINDOW = 2000, 2000, 64
LEVELS, ROUNDS = ("off", "process", "machine"), 5
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


def send(client: Client, kind: str, body: dict[str, Any], frames: tuple[bytes, ...] = ()) -> Any:
    """Sends a message; a checkout of before messages were classes takes its parts."""
    names = {"loaded": "Loaded", "slots": "Slots", "trajectory": "FinishedRollout", "snapshot": "GetSnapshot"}
    if hasattr(messages, "GetSnapshot"):
        return client.call(getattr(messages, names[kind])(**body, frames=frames))
    return client.call(kind, body, frames)


def connected(endpoint: str, take: Callable[[Any], None]) -> Client:
    options: dict[str, Any] = {"outage_s": 60.0, "on_push": take}
    if hasattr(sockets, "Limits"):
        options = {"limits": sockets.Limits(outage_s=60.0), "calls": transport.Callbacks(pushed=take)}
    return Client(endpoint, role="generator", name="g0", **options)


def snapshot_of(client: Client) -> dict[str, Any]:
    answer = send(client, "snapshot", {}).result(60)
    found: dict[str, Any] = getattr(answer, "tree", None) or answer.body
    return found


def pushed(message: Any) -> list[tuple[int, int]]:
    """Ordinal and attempt of the tasks in a push."""
    tasks = getattr(message, "tasks", None)
    if tasks is None and hasattr(message, "body"):
        return [(task["ordinal"], task["attempt"]) for task in message.body.get("tasks", [])]
    return [(task.ordinal, task.attempt) for task in tasks or ()]


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
        broker, tasks = Broker(folder, endpoint), deque[tuple[int, int]]()
        client = connected(endpoint, lambda message: tasks.extend(pushed(message)))
        try:
            client.connect(deadline_s=60)
            send(client, "loaded", {"version": 0, "fingerprint": "0" * 32}).result(30)
            send(client, "slots", {"free": COUNT, "received": 0}).result(30)
            while len(tasks) < COUNT:
                time.sleep(0.01)
            ready = [encoded(ordinal, attempt) for ordinal, attempt in tasks]
            size = sum(map(len, ready[0]))
            waits, open_ = [], deque[tuple[float, Any]]()
            started_s = sum(psutil.Process(broker.process.pid).cpu_times()[:2])
            began = time.perf_counter()
            for frames in ready:
                if len(open_) == WINDOW:
                    _settle(open_, waits)
                open_.append((time.perf_counter(), send(client, "trajectory", {}, frames)))
            while open_:
                _settle(open_, waits)
            seconds = time.perf_counter() - began
            busy_s = sum(psutil.Process(broker.process.pid).cpu_times()[:2])
            disk = sum(path.stat().st_size for path in folder.glob("journal/*"))
            snapshot = snapshot_of(client)
            assert snapshot["ready"] == COUNT, snapshot
            broker.kill()
            back = {}
            if durability != "off":
                began = time.perf_counter()
                broker = Broker(folder, endpoint)
                snapshot = snapshot_of(client)
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
        "broker_cpu_us_each": round((busy_s - started_s) / COUNT * 1e6, 1),
        "mb_per_s": round(COUNT * size / seconds / 1e6, 1),
        "ack_ms": {"p50": round(waits[COUNT // 2] * 1e3, 2), "p99": round(waits[COUNT * 99 // 100] * 1e3, 2)},
        "log_mib": round(disk / 2**20, 1),
        **back,
    }


def _settle(waiting: deque[tuple[float, Any]], waits: list[float]) -> None:
    sent, future = waiting.popleft()
    answer = future.result(60)
    assert answer.accepted if hasattr(answer, "accepted") else answer.body["accepted"]
    waits.append(time.perf_counter() - sent)


def compare(other: Path) -> list[dict[str, Any]]:
    """This checkout (after) beside another one (before), in turns."""
    trees, rows = {"before": other.resolve(), "after": Path(__file__).resolve().parents[1]}, []
    for level in LEVELS:
        rounds: list[dict[str, Any]] = []
        for number in range(ROUNDS):
            order = list(trees) if number % 2 == 0 else list(trees)[::-1]
            rounds.append({which: _child(trees[which], level) for which in order})
        row: dict[str, Any] = {"durability": level}
        for key, name in (("trajectories_per_s", "throughput"), ("broker_cpu_us_each", "broker_cpu")):
            row |= {f"{key}_{which}": median(sorted(one[which][key] for one in rounds)) for which in trees}
            row[f"{name}_ratio"] = round(median(sorted(one["after"][key] / one["before"][key] for one in rounds)), 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _child(checkout: Path, level: str) -> dict[str, Any]:
    paths = f"{checkout / 'python'}:{Path(__file__).resolve().parent}"
    command = [sys.executable, str(Path(__file__).resolve()), "--child", level]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    result = {"machine": machine(), "rollouts": COUNT, "tokens_each": TOKENS, "unanswered": WINDOW}
    if sys.argv[1:]:
        result |= {"rounds": ROUNDS, "rows": compare(Path(sys.argv[1]))}
    else:
        result["rows"] = [measure(level) for level in LEVELS]
        print(json.dumps(result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    name = "durability_before_after.json" if sys.argv[1:] else "durability.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
