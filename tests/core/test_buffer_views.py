"""Views own their memory: NumPy arrays and torch tensors of what was taken, under churn."""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import pytest
import torch

from sao import TrajectoryBuffer, _core
from sao.errors import DeadlineError
from sao.measure.workloads import trajectory

SIZE = 70_000  # large enough that its memory is kept for the next one


def views(lease: _core.Lease, chance: random.Random) -> object:
    payload = lease.payload
    kinds = [
        lambda: np.frombuffer(payload, np.uint8),
        lambda: np.frombuffer(payload, np.int32)[3:-3],
        lambda: memoryview(payload)[7:],
        lambda: torch.from_numpy(np.frombuffer(payload, np.uint8)),
        lambda: np.asarray(memoryview(payload))[::3],
    ]
    return chance.choice(kinds)()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_no_view_is_ever_overwritten_while_memory_is_reused_all_the_time() -> None:
    """Each payload is one byte repeated; whatever is made of it must show that byte until it is dropped."""
    buffer, stop = _core.Buffer(16, 16 * (SIZE + 8)), threading.Event()
    wrong: list[str] = []

    def produce(number: int) -> None:
        chance = random.Random(number)
        while not stop.is_set():
            byte = chance.randrange(1, 255)
            size = SIZE - 4 * chance.randrange(50)
            try:
                buffer.put(bytes([byte]), bytes([byte]) * size, min_version=0, timeout_s=0.2)
            except DeadlineError:
                continue

    def consume(number: int) -> None:
        chance, kept = random.Random(number), []
        while not stop.is_set():
            for lease in buffer.try_take(1):
                byte = bytes(lease.header)[0]
                kept.append((byte, views(lease, chance)))
                (lease.commit if chance.random() < 0.8 else lease.give_back)()
                del lease
            if len(kept) > 4:
                byte, view = kept.pop(chance.randrange(len(kept)))
                array = np.asarray(view)
                expected = byte * 0x01010101 if array.dtype == np.int32 else byte
                if not (array.view(np.uint32 if array.dtype == np.int32 else array.dtype) == expected).all():
                    wrong.append(f"{type(view).__name__} of {byte}")

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(2)]
    threads += [threading.Thread(target=consume, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60.0
    stop.wait(1.5)
    while buffer.stats()["committed"] <= 50 and time.monotonic() < end:  # on a busy machine it takes longer
        stop.wait(0.1)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert buffer.stats()["committed"] > 50
    gc.collect()
    left = buffer.stats()
    assert left["bytes"] <= (left["trajectories"] + left["leased"]) * (SIZE + 8), "what is dropped is given back"


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_arrays_of_a_trajectory_outlive_everything_else() -> None:
    rollout = trajectory(20_000, 3)
    buffer = TrajectoryBuffer(2, 1 << 20)
    buffer.put(rollout)
    [held] = buffer.take(1)
    segment = held.trajectory.segments[0]
    ids, logprobs = torch.from_numpy(segment.token_ids), np.from_dlpack(segment.logprobs)
    held.commit()
    del held, segment
    for number in range(20):  # reuses every byte that is free
        buffer.put(trajectory(20_000, 100 + number))
        buffer.drain(1)
    buffer.close()
    del buffer
    gc.collect()
    np.testing.assert_array_equal(ids.numpy(), rollout.segments[0].token_ids)
    np.testing.assert_array_equal(logprobs, rollout.segments[0].logprobs)
