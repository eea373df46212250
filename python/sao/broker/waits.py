"""Everything that a run waits for at this moment, by name, with how long it has been and how long it may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sao.broker.tasks import Task
from sao.config.sections import TransportSection

if TYPE_CHECKING:
    from sao.broker.state import State
    from sao.transport.mailbox import Peer


def waits(state: State, peers: Iterable[Peer], transport: TransportSection, now: float) -> list[str]:
    """One line a wait, who waits first; empty when the run is over."""
    if state.done is not None:
        return []
    peers = list(peers)
    found = [f"broker: a {role} to join" for role in ("learner", "generator") if not any(p.role == role for p in peers)]
    if state.missing:
        names = ", ".join(sorted(state.missing))
        found.append(f"broker: {names} to join again, {max(0.0, state.missing_until - now):.0f} s more")
    for take in state.takes:
        ready, running = state.book.n_ready, len(state.book.running)
        found.append(
            f"learner: a batch of {take.n} trajectories, for {now - take.since:.0f} s ({ready} ready, {running} run)"
        )
    for number, lease in state.leases.items():
        found.append(f"broker: the learner's commit of lease {number} with {len(lease.held)} trajectories")
    oldest: dict[str | None, Task] = {}
    for running_task in state.book.running.values():
        oldest.setdefault(running_task.generator, running_task)
    for name, generator in state.pool.by_name.items():
        if (task := oldest.get(name)) is not None:
            found.append(
                f"{name}: the end of {len(generator.train)} rollouts, task {task.ordinal} attempt {task.attempt} for"
                f" {now - task.started:.0f} s of transport.rollout_timeout_s = {transport.rollout_timeout_s:g}"
            )
        elif generator.free and not state.permits():
            found.append(f"{name}: a permit for {generator.free} free slots")
        if generator.loaded < state.versions.current:
            found.append(f"{name}: weights of version {state.versions.current}, serves {generator.loaded}")
    for peer in peers:
        who = f"{peer.role} {peer.name}"
        if peer.link.waiting:
            found.append(f"broker: {peer.link.waiting} messages to be acknowledged by {who}")
        if (silent_s := now - peer.heard) > 2 * transport.heartbeat_s:
            limit = f"transport.peer_timeout_s = {transport.peer_timeout_s:g}"
            found.append(f"broker: a sign of life of {who}, for {silent_s:.0f} s of {limit}")
    return found
