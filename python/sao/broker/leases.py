"""Batches for the learner: which trajectories, and what happens when they come back unused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sao.broker.tasks import OpenLease, Take

if TYPE_CHECKING:
    from sao.broker.state import State


def serve(state: State, take: Take, now: float) -> bool:
    """Answers a take when its trajectories are ready: in order of completion, or in order of issue (`window`).

    `window`: the `n` oldest tasks must all be ready. When a task is started at most (max_lag + 1) * batch - 1
    others are before it, so it is used in the (max_lag + 1)-th update from then at the latest: no token exceeds
    `max_lag`.
    """
    book, store = state.book, state.store
    if state.config.staleness.discipline == "window":
        head = book.head(take.n)
        held = store.take_tasks(head) if head else []
    elif state.groups.size > 1:
        whole = state.groups.ready(take.n)
        held = store.take_tasks(whole) if whole else []
    else:
        held = store.take(take.n)
    if not held:
        return False
    number, ordinals = state.next_lease, [ordinal for ordinal, _ in held]
    state.next_lease += 1
    tasks = book.lease(number, ordinals)
    state.leases[number] = OpenLease(take.key, held)
    for task in tasks:
        state.meter.taken(state.versions.current - task.min_version, now - task.finished)
    state.meter.wait_s += now - take.since
    body = {
        "lease": number,
        "version": state.versions.current,
        "step": state.step,
        "ordinals": ordinals,
        "attempts": [task.attempt for task in tasks],
        "ages_s": [now - task.finished for task in tasks],
    }
    views = [memoryview(part) for _, lease in held for part in (lease.header, lease.payload, *lease.sidecars)]
    state.wire.batch(take.key, body, tuple(views))
    return True


def give_back(state: State, number: int) -> None:
    """What the learner has not used is ready again; what the log has lost meanwhile is started again."""
    lease = state.leases.pop(number)
    state.book.give_back(number, [ordinal for ordinal, _ in lease.held])
    for ordinal, held in lease.held:
        if held is not None:
            held.give_back()
        else:
            state.book.requeue(state.book.live[ordinal], None, "log_damaged", None)
    state.drop_too_old()
