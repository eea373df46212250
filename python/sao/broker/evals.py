"""Held-out evaluation rounds: the same seeds each round, apart from training data, ledger and buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sao.broker.tasks import task_seed

_ATTEMPTS = 3


@dataclass(slots=True)
class Round:
    """One round in progress. Ordinals are unique over rounds, so that a late answer cannot enter the next round."""

    step: int
    version: int
    first: int
    started: float
    todo: deque[int]
    attempts: dict[int, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)
    successes: int = 0
    versions: set[int] = field(default_factory=set)
    failed: dict[str, int] = field(default_factory=dict)


class EvalRounds:
    """At most one round runs and one waits: a newer one that becomes due replaces it, and `skipped` counts that."""

    def __init__(self, run_seed: int, episodes: int, deadline_s: float) -> None:
        self._seed, self._episodes, self._deadline_s = run_seed, episodes, deadline_s
        self.current: Round | None = None
        self._waiting: tuple[int, int] | None = None
        self._rounds = 0
        self.skipped = 0

    @property
    def busy(self) -> bool:
        """Whether a round runs or waits."""
        return self.current is not None or self._waiting is not None

    @property
    def n_todo(self) -> int:
        """Tasks of the current round that no generator has yet."""
        return len(self.current.todo) if self.current else 0

    @property
    def n_open(self) -> int:
        """Tasks of the current round without a result."""
        return len(self.current.open) if self.current else 0

    def due(self, step: int, version: int, now: float) -> None:
        """Starts a round, or has it wait for the running one."""
        if self.current is not None:
            self.skipped += self._waiting is not None
            self._waiting = (step, version)
            return
        first = self._rounds * self._episodes
        self._rounds += 1
        ordinals = range(first, first + self._episodes)
        self.current = Round(step, version, first, now, deque(ordinals), open=set(ordinals))

    def next_task(self) -> dict[str, Any] | None:
        """The next task as it is sent to a generator, `None` when all are out."""
        if self.current is None or not self.current.todo:
            return None
        ordinal = self.current.todo.popleft()
        attempt = self.current.attempts[ordinal] = self.current.attempts.get(ordinal, 0) + 1
        seed = task_seed(self._seed, "eval", ordinal - self.current.first)
        return {"ordinal": ordinal, "attempt": attempt, "seed": seed, "split": "eval"}

    def result(self, ordinal: int, reward: float | None, success: bool, reason: str, version: int) -> bool:
        """Takes an answer; `reward` is `None` for a failure, which never enters a mean. False: late or seen before."""
        current = self.current
        if current is None or ordinal not in current.open:
            return False
        current.open.discard(ordinal)
        if reward is None:
            current.failed[reason] = current.failed.get(reason, 0) + 1
        else:
            current.rewards.append(reward)
            current.successes += success
            current.versions.add(version)
        return True

    def lost(self, ordinals: set[int]) -> None:
        """The generator that worked on these is gone: they are started again, up to three times in all."""
        if self.current is None:
            return
        for ordinal in sorted(ordinals & self.current.open):
            if self.current.attempts.get(ordinal, 0) >= _ATTEMPTS:
                self.result(ordinal, None, False, "generator_lost", -1)
            else:
                self.current.todo.append(ordinal)

    def finish(self, now: float) -> dict[str, Any] | None:
        """The body of `eval` when the round is complete or its deadline has passed; the waiting round then starts."""
        current = self.current
        if current is None:
            return None
        if current.open and now - current.started >= self._deadline_s:
            current.failed["deadline"] = current.failed.get("deadline", 0) + len(current.open)
            current.open.clear()
        if current.open:
            return None
        n, failed = len(current.rewards), sum(current.failed.values())
        body = {
            "step": current.step,
            "version": current.version,
            "versions_used": [min(current.versions), max(current.versions)] if current.versions else [],
            "success": current.successes / n if n else None,
            "mean_reward": sum(current.rewards) / n if n else None,
            "n": n,
            "failed": failed,
            "failed_by_reason": dict(current.failed),
            "seconds": now - current.started,
        }
        self.current = None
        if self._waiting is not None:
            (step, version), self._waiting = self._waiting, None
            self.due(step, version, now)
        return body

    def left(self) -> tuple[int, tuple[int, int] | None]:
        """What a later broker must know: rounds begun, and step and version of the newest without a result."""
        current = self.current
        return self._rounds, self._waiting or ((current.step, current.version) if current else None)

    def restore(self, rounds: int, due: Sequence[int] | None, now: float) -> None:
        """Goes on after so many rounds; a round without a result begins anew, under new ordinals."""
        self._rounds = rounds
        if due is not None:
            self.due(due[0], due[1], now)

    def abandon(self) -> None:
        """Ends all rounds without a result."""
        self.current = self._waiting = None
