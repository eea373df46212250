"""Tasks for free slots: held-out ones first, then as many training ones as there are permits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sao.broker.tasks import Generator, task_seed
from sao.transport.messages import Buffer

if TYPE_CHECKING:
    from sao.broker.state import State

FRAMES: Final = 1 << 14  # of a message, from which on further tasks are another; peers read four times as many


def dispatch(state: State, now: float) -> None:
    """Hands out what may be handed out now. A task of which turns are kept goes out with them, as frames."""
    if state.done is not None or state.awaiting:
        return
    if state.last_evaluated < 0 and state.pool.by_name:
        state.evaluate(now)
    out: dict[str, tuple[list[dict[str, Any]], list[Buffer]]] = {}
    permits = state.permits()
    for generator in state.pool.slots():
        task = state.evals.next_task()
        if task is not None:
            generator.evals.add(task["ordinal"])
        elif permits > 0:
            permits -= 1
            task = _start(state, generator, now)
        else:
            break
        tasks, frames = out.setdefault(generator.name, ([], []))
        tasks.append(task)
        if "turns" in task:
            frames += [part for turn in state.book.memory.prefixes[task["ordinal"]].turns for part in turn]
            if len(frames) >= FRAMES:
                _send(state, generator.name, *out.pop(generator.name))
    for name, (tasks, frames) in out.items():
        _send(state, name, tasks, frames)


def _send(state: State, name: str, tasks: list[dict[str, Any]], frames: list[Buffer]) -> None:
    state.wire.to_generator(name, "tasks", {"tasks": tasks}, *([tuple(frames)] if frames else []))


def _start(state: State, generator: Generator, now: float) -> dict[str, Any]:
    task = state.book.start(generator, now)
    seed = task_seed(state.config.run.seed, "train", state.config.prompt_of(task.ordinal))
    body = {"ordinal": task.ordinal, "attempt": task.attempt, "seed": seed, "split": "train"}
    kept = state.book.memory.prefixes.get(task.ordinal)
    return {**body, "turns": len(kept.turns)} if kept else body
