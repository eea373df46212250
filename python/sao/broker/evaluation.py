"""Held-out evaluation rounds: the same seeds each round, apart from training data, ledger and buffer."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

from sao.broker.tasks import task_seed
from sao.config import Config
from sao.transport.messages import EvalReport, TaskEntry

MAX_ATTEMPTS: Final = 3


@dataclass(slots=True)
class Round:
    """One round in progress. Ordinals are unique over rounds, so that a late answer cannot enter the next round."""

    step: int
    version: int
    first: int
    started: float
    todo: deque[int]
    open: dict[int, str]
    """Ordinals without a result, and the generator that works on each."""
    attempts: Counter[int] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    successes: int = 0
    versions: set[int] = field(default_factory=set)
    failed: Counter[str] = field(default_factory=Counter)


class Evaluation:
    """The rounds. At most one runs and one waits; one that is replaced by a newer one counts in `skipped`."""

    def __init__(self, config: Config) -> None:
        self._config, self._every = config, config.eval.every_steps
        self.current: Round | None = None
        self._waiting: tuple[int, int] | None = None
        self._rounds = 0
        self._last_step = -1
        self.skipped = 0

    @property
    def busy(self) -> bool:
        """Whether a round runs or waits."""
        return self.current is not None or self._waiting is not None

    @property
    def open(self) -> dict[int, str]:
        """Tasks of the current round without a result, and the generator that works on each; "": none yet."""
        return self.current.open if self.current else {}

    def start(self, step: int, version: int, now: float) -> None:
        """Plays the first round, before anything is trained, unless there was one."""
        if self._last_step < 0:
            self.due(step, version, now, always=True)

    def due(self, step: int, version: int, now: float, *, always: bool = False) -> None:
        """Starts a round after every `eval.every_steps`-th step, or any (`always`); it waits for a running one."""
        if self._every and step != self._last_step and (always or step % self._every == 0):
            self._last_step = step
            self._begin(step, version, now)

    def next_task(self, generator: str) -> TaskEntry | None:
        """The next task of the round, for this generator; None when all are out."""
        if self.current is None or not self.current.todo:
            return None
        ordinal = self.current.todo.popleft()
        self.current.attempts[ordinal] += 1
        self.current.open[ordinal] = generator
        seed = task_seed(self._config.run.seed, "eval", ordinal - self.current.first)
        return TaskEntry(ordinal, self.current.attempts[ordinal], seed, "eval")

    def result(self, ordinal: int, reward: float | None, success: bool | None, reason: str, version: int) -> bool:
        """Takes an answer; `reward` None: it failed; `success` None: the reward decides. False: late or twice."""
        current = self.current
        if current is None or ordinal not in current.open:
            return False
        del current.open[ordinal]
        if reward is None:
            current.failed[reason] += 1
        else:
            current.rewards.append(reward)
            current.successes += reward >= self._config.env.success_reward if success is None else success
            current.versions.add(version)
        return True

    def lost(self, generator: str) -> None:
        """A generator is gone: what it worked on is started again, up to `MAX_ATTEMPTS` times in all."""
        for ordinal in sorted(o for o, name in self.open.items() if name == generator):
            assert self.current is not None
            if self.current.attempts[ordinal] >= MAX_ATTEMPTS:
                self.result(ordinal, None, False, "generator_lost", -1)
            else:
                self.current.open[ordinal] = ""
                self.current.todo.append(ordinal)

    def finish(self, now: float) -> EvalReport | None:
        """The result of the round when it is complete or its deadline has passed; the waiting round then starts."""
        if (current := self.current) is None:
            return None
        if current.open and now - current.started >= self._config.transport.rollout_timeout_s:
            current.failed["deadline"] += len(current.open)
            current.open.clear()
        if current.open:
            return None
        n, versions = len(current.rewards), sorted(current.versions)
        report = EvalReport(
            version=current.version,
            n=n,
            failed=current.failed.total(),
            success=current.successes / n if n else None,
            mean_reward=sum(current.rewards) / n if n else None,
            step=current.step,
            versions_used=(versions[0], versions[-1]) if versions else (),
            failed_by_reason=dict(current.failed),
            seconds=now - current.started,
        )
        self.current = None
        if self._waiting is not None:
            (step, version), self._waiting = self._waiting, None
            self._begin(step, version, now)
        return report

    def abandon(self) -> None:
        """Ends all rounds without a result."""
        self.current = self._waiting = None

    def note(self) -> dict[str, Any]:
        """The state that `restore` needs: also step and version of the newest round without a result."""
        running = (self.current.step, self.current.version) if self.current else None
        return {"last_evaluated": self._last_step, "eval_rounds": self._rounds, "eval_due": self._waiting or running}

    def restore(self, note: dict[str, Any], now: float) -> None:
        """Goes on where an earlier broker was; a round without a result begins anew, under new ordinals."""
        self._last_step, self._rounds = note["last_evaluated"], note["eval_rounds"]
        if note["eval_due"] is not None:
            step, version = note["eval_due"]
            self._begin(step, version, now)

    def resume(self, step: int) -> None:
        """The run goes on after `step`: a round that was due then is played (again), no other."""
        if step % max(1, self._every):
            self._last_step = step

    def _begin(self, step: int, version: int, now: float) -> None:
        if self.current is not None:
            self.skipped += self._waiting is not None
            self._waiting = (step, version)
            return
        episodes = self._config.eval.episodes
        first = self._rounds * episodes
        self._rounds += 1
        ordinals = range(first, first + episodes)
        self.current = Round(step, version, first, now, deque(ordinals), dict.fromkeys(ordinals, ""))
