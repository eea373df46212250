"""What `memcheck.sh` runs: the native core used from end to end, with views that outlive what they were made from."""

from __future__ import annotations

import gc
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from sao import TrajectoryBuffer, _core, advantages, decode, encode_frames, pack, plan
from sao.errors import Error
from sao.measure.workloads import agentic_lengths, trajectory


def main() -> None:
    """Every part once or a few times; asserts what comes out."""
    rollouts = [trajectory(n, n) for n in (3, 700, 9_000)]
    rollouts.append(replace(rollouts[1], sidecars={"image": np.ones((5, 3), np.float32)}))
    for rollout in rollouts:
        header, payload, *frames = encode_frames(rollout)
        got = decode(header, payload, sidecars=frames)
        assert got.n_actions == rollout.n_actions
        for cut in (0, 1, len(header) // 2, len(header) - 1):
            try:
                decode(header[:cut], payload, sidecars=frames)
            except Error:
                continue
            raise AssertionError("half a header was taken")
    kept = []
    buffer = TrajectoryBuffer(3, 1 << 20, "drop_oldest")
    for _ in range(6):
        for rollout in rollouts:
            buffer.put(rollout)
        [held] = buffer.take(1)
        kept.append(held.trajectory.segments[0].logprobs)
        held.commit()
        kept += [got.segments[0].token_ids for got in buffer.drain(1)]
        buffer.snapshot()
        buffer.advance(buffer.stats()["version"] + 1)
    buffer.close()
    del buffer, held
    gc.collect()
    assert all(np.isfinite(np.nan_to_num(array)).all() for array in kept)

    raw = _core.Buffer(4, 1 << 20)

    def consume() -> None:
        for _ in range(40):
            raw.take(1, 30)[0].commit()

    consumer = threading.Thread(target=consume)
    consumer.start()
    for number in range(40):
        raw.put(b"h", bytes(70_000 + number), min_version=0, timeout_s=30)
    consumer.join()

    waiting = threading.Thread(target=lambda: [lease.commit() for lease in raw.take([7, 5], 30)])
    waiting.start()
    for task in (5, 6, 7):
        raw.put(b"h", bytes(500), min_version=0, timeout_s=30, task=task)
    waiting.join()
    assert [bytes(lease.header) for lease in raw.try_take([6])] == [b"h"]

    lengths = agentic_lengths(150, 0, 10, 5000)
    where = plan(lengths, 4, 8192, 1)
    assert where.n_micro_batches * 4 >= len(pack(lengths, 8192)[1]) - 1

    n = 3000
    mask = np.random.default_rng(0).random(n) < 0.4
    values = np.where(mask, 0.5, np.nan).astype(np.float32)
    found, _, _ = advantages(values, mask, [0, 900, n], [0, 1, 2], [1.0, 0.0])
    assert np.isfinite(found).all()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        with _core.Ledger(path) as ledger:
            for step in range(1, 30):
                ledger.generating(step, ledger.issue(step))
                ledger.ready(step, 0, 5)
                ledger.lease([step], 0)
                ledger.trained(0, step, 5, 0)
            ledger.flush()
            ledger.turn(ledger.issue(99) + 99, 0, [b"header", bytes(1000)])
            ledger.roll(20)
            ledger.rewind(25)
        with _core.Ledger(path) as ledger:
            ledger.check()
    print("all of it ran")


if __name__ == "__main__":
    main()
