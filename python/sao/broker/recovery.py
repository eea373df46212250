"""A broker that was started again: how it goes on where the one before it was, and who still has to be heard of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sao.broker.store import whole
from sao.broker.tasks import OpenLease
from sao.errors import LedgerError
from sao.transport.messages import Buffer

if TYPE_CHECKING:
    from sao.broker.state import State

REWOUND = "rewound"


def note_of(state: State, line: int) -> dict[str, Any]:
    """What a later broker needs to know beside ledger and log. `line`: which resume of the run this is."""
    versions = state.versions
    rounds, due = state.evals.left()
    return {
        "line": line,
        "ledger_step": state.book.ledger.last_step or 0,
        "step": state.step,
        "awaiting": state.awaiting,
        "version": versions.current,
        "weights": versions.weights,
        "fingerprints": versions.fingerprints,
        "floor": state.pool.floor,
        "next_lease": state.next_lease,
        "last_lease": state.last_lease,
        "learner": state.learner_session,
        "generators": sorted(state.pool.by_name.keys() | state.missing),
        "last_evaluated": state.last_evaluated,
        "eval_rounds": rounds,
        "eval_due": due,
        "shown": state.shown,
        "ending": state.ending,
        "done": state.done,
    }


def restore(state: State, now: float) -> None:
    """Takes over what `Memory.past` holds; what is damaged is said, and its tasks are started again."""
    past = state.book.memory.past
    for text in past.damage:
        state.event("warning", f"{text}; what it was about is done again")
    if past.goes_on:
        _take_over(state, past.note, now)
    leased = {ordinal for _, ordinals in state.book.ledger.leases() for ordinal in ordinals}
    for wanted in (True, False):  # what is leased must be in the buffer, what is ready may wait for room
        for ordinal, (_, header, bodies) in past.trajectories.items():
            task = state.book.live.get(ordinal)
            if task is not None and (ordinal in leased) == wanted:
                state.store.put(ordinal, whole(bytes(header), bodies), task.min_version)
                task.finished = now
        if wanted:
            for number, ordinals in state.book.ledger.leases():
                there = dict(state.store.take_tasks([o for o in ordinals if o in past.trajectories]))
                state.leases[number] = OpenLease(None, [(ordinal, there.get(ordinal)) for ordinal in ordinals])
                state.next_lease = max(state.next_lease, number + 1)
    if past.goes_on:
        ready, running = state.book.n_ready, len(state.book.running)
        text = f"{ready} ready, {sum(len(x.held) for x in state.leases.values())} leased, {running} running"
        state.event("warning", f"broker: goes on after step {state.step}, version {state.versions.current}: {text}")
    past.trajectories = {}


def _take_over(state: State, note: dict[str, Any], now: float) -> None:
    if not note:
        if state.book.ledger.last_step:
            raise LedgerError(f"the log does not know step {state.book.ledger.last_step} of the ledger: resume the run")
        return
    state.step, state.awaiting = note["step"], note["awaiting"]
    state.versions.restore(note["version"], note["weights"], note["fingerprints"])
    state.pool.floor = note["floor"]
    state.next_lease, state.last_lease = note["next_lease"], note["last_lease"]
    state.learner_session = note["learner"]
    state.missing = set(note["generators"])
    state.missing_until = now + state.config.transport.peer_timeout_s
    state.learner_back_by = now + state.config.transport.outage_s
    state.last_evaluated, state.shown = note["last_evaluated"], note["shown"]
    state.ending, state.done = note["ending"], note["done"]
    if state.shown:  # the broker before this one may have been killed before it could
        state.wire.to_supervisor("step", state.shown)
    if state.done is None:
        state.evals.restore(note["eval_rounds"], note["eval_due"], now)
    for task in state.book.running.values():
        task.started = now


def claim(state: State, name: str, held: list[Any], now: float) -> None:
    """A generator has joined and says which training tasks it works on, as [ordinal, attempt]: those that are still
    its own it goes on with, the others it is told to leave.
    """
    generator = state.pool.by_name.get(name)
    if generator is None:
        return
    for ordinal, attempt in held:
        task = state.book.running.get(ordinal)
        if task is not None and task.attempt == attempt and task.generator in ("", name):
            task.generator = name
            generator.train.add(ordinal)
        else:
            state.wire.to_generator(name, "cancel", {"ordinal": ordinal, "attempt": attempt})
    state.told_left(name, now)


def orphans(state: State, now: float) -> None:
    """Starts running tasks again that no generator has claimed, when all have been heard of or the time is over."""
    if state.missing and now < state.missing_until:
        return
    state.missing.clear()
    if state.done is None:
        for task in [task for task in state.book.running.values() if not task.generator]:
            state.again(task, None, "generator_lost", goes_on=True)


def turn(state: State, body: dict[str, Any], header: Buffer, payload: Buffer) -> None:
    """Keeps a turn of a rollout that runs; of any other it is left out."""
    task = state.book.running.get(body["ordinal"])
    if task is not None and task.attempt == body["attempt"]:
        numbers = body["part"], body["tokens"], body["version"]
        state.book.memory.turn(task.ordinal, task.attempt, *numbers, header, payload)


def diverged(state: State, body: dict[str, Any]) -> None:
    """A rollout could not go on after its turns and was begun anew: their tokens are dropped."""
    task = state.book.running.get(body["ordinal"])
    if task is not None and task.attempt == body["attempt"]:
        state.book.waste("diverged", state.book.memory.begin_anew(task.ordinal, task.attempt))


def fit(state: State) -> None:
    """The learner goes on after a step that it has been at before: of what was sampled since, only that counts which
    weights of the steps that are left have sampled, and no more than may be ahead of them.
    """
    limits, book = state.config, state.book
    capacity = (limits.staleness.max_lag + 1) * limits.learner.batch_trajectories
    ahead = set(sorted(book.live)[:capacity])
    for task in list(book.live.values()):
        if task.state == "ready" and (task.max_version > state.versions.current or task.ordinal not in ahead):
            state.store.discard(task.ordinal)
            book.requeue(task, None, REWOUND, None)
    for ordinal, prefix in list(book.memory.prefixes.items()):
        if prefix.version > state.versions.current:
            book.waste(REWOUND, book.memory.begin_anew(ordinal, book.live[ordinal].attempt))
