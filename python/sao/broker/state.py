"""What the broker knows and decides, without sockets: tasks, buffer, ledger, leases, versions and the end of the run.

Times are seconds of one monotonic clock and are passed in. What must be sent goes through `Wire`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from sao import _core
from sao.broker import dispatch, intake, leases, recovery, report, wal
from sao.broker.evals import EvalRounds
from sao.broker.groups import INCOMPLETE, Groups
from sao.broker.memory import Memory
from sao.broker.metrics import GapAlarm, StepMeter
from sao.broker.outbox import Wire
from sao.broker.store import Store
from sao.broker.tasks import Generator, OpenLease, Pool, Take, Task, TaskBook, reason_code
from sao.broker.versions import Versions
from sao.config import Config
from sao.errors import LedgerError, TransportError, ValidationError, WireError
from sao.transport.messages import Buffer

log = logging.getLogger(__name__)
MAX_REASONS = 64  # different reasons of environments; further ones are counted as `failed_other`
ACCEPTED = {"accepted": True, "reason": ""}


class State:
    """The broker's state. Raises `sao` errors for wrong requests; a `LedgerError` means that the state itself is
    wrong. `resumed`: the step from which a run is resumed; nothing is handed out before the learner continues there.
    """

    def __init__(
        self,
        config: Config,
        ledger: Any,
        wire: Wire,
        now: float,
        resumed: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.config, self.wire = config, wire
        limits = config.buffer
        self.store = Store(limits.max_trajectories, limits.max_bytes, 9 * config.sampling.context_tokens + 4096)
        self.versions = Versions()
        self.pool = Pool()
        self.book = TaskBook(ledger, memory)
        self.groups = Groups(config.algorithm.group_size, self.book)
        self.evals = EvalRounds(config.run.seed, config.eval.episodes, config.transport.rollout_timeout_s)
        self.meter = StepMeter(now, ledger.tokens()["sampled"])
        self.gap_alarm = GapAlarm(config.logprob_gap_limit)
        self.takes: deque[Take] = deque()
        self.leases: dict[int, OpenLease] = {}
        self.failures_in_a_row = 0
        self.step = resumed or 0  # as the learner counts
        self.awaiting = resumed is not None
        self.ending = ""  # why no more training tasks and batches are given
        self.done: dict[str, Any] | None = None
        self._admission = _core.Admission(config.staleness.max_lag, config.learner.batch_trajectories)
        self._commits = 0  # since this broker was started, as are the trained trajectories that go with them
        self._trained_before: int = ledger.counts()["trained"]
        self.next_lease, self.last_lease = 1, 0
        self.last_evaluated = -1
        self.shown: dict[str, Any] = {}  # the last step, as the supervisor is told of it
        self.learner_session = ""
        self.learner_back_by: float | None = None
        """When what the learner holds is given back, unless it is heard again."""
        self.missing: set[str] = set()  # generators of an earlier broker, to join again until `missing_until`
        self.missing_until = now
        recovery.restore(self, now)
        for task in self.groups.broken():
            self.book.drop(task, None, INCOMPLETE, task.sampled_tokens)

    # -- generators

    def generator_joined(self, name: str, now: float) -> None:
        """A generator is here; it gets tasks when it states free slots."""
        self.pool.by_name[name] = Generator(name)

    def generator_left(self, name: str, reason: str, now: float) -> None:
        """A generator is gone: its tasks are started again elsewhere, late answers are fenced by the attempt."""
        generator = self.pool.by_name.pop(name, None)
        if generator is None:
            return
        if self.done is None:
            count = len(generator.train) + len(generator.evals)
            self.event("warning", f"generator {name}: {reason}; {count} tasks in flight are started again")
            for ordinal in sorted(generator.train):
                if ordinal in self.book.live:  # else its group has ended in this very loop
                    self.again(self.book.live[ordinal], generator, "generator_lost", goes_on=True)
            self.evals.lost(generator.evals)
        self.told_left(name, now)

    def told_left(self, name: str, now: float) -> None:
        """A generator of this name has ended; also one that has not joined again after a restart of the broker."""
        self.missing.discard(name)
        recovery.orphans(self, now)
        self.progress(now)

    def slots(self, name: str, free: int, received: int | None, now: float) -> None:
        """A generator states its free slots, as of `received` tasks received."""
        self.pool.by_name[name].state_slots(free, received)
        dispatch.dispatch(self, now)

    def stats(self, name: str, body: dict[str, Any]) -> None:
        """A generator's statistics; the last ones count."""
        wanted = ("busy_share", "tokens_per_s", "running", "waiting", "sampled_tokens", "kv_use", "episode_limit")
        self.pool.by_name[name].report = {key: body[key] for key in wanted if key in body}

    def loaded(self, name: str, version: int, fingerprint: str) -> None:
        """A generator says which weights it serves. Raises `TransportError` when they are not those of that version."""
        try:
            self.versions.verify(version, fingerprint)
        except TransportError as error:
            self.event("error", f"generator {name}: {error}")
            raise
        self.pool.by_name[name].loaded = version

    def trajectory(self, name: str, frames: Sequence[Buffer], now: float) -> dict[str, Any]:
        """Takes a finished trajectory (header, payload, sidecars); returns the body of `ack`: accepted, or refused with
        a reason.
        """
        header, payload, *sidecars = frames
        limit = self.config.transport.max_message_bytes
        try:
            facts = _core.summary(header, payload, max_bytes=limit, sidecars=sidecars)
        except (WireError, ValidationError) as error:
            self.event("error", f"generator {name}: corrupt trajectory refused: {error}")
            return _refused(f"corrupt: {error}")
        ordinal, attempt, tokens = facts["task_ordinal"], facts["attempt"], facts["n_actions"]
        task = self.book.current(ordinal, attempt, tokens)
        if isinstance(task, str):
            return _refused(task)
        generator = self.pool.by_name.get(name)
        n_bytes = sum(memoryview(frame).nbytes for frame in frames)
        most = min(self.store.max_bytes, wal.MAX_BODY_BYTES)
        fault, text = intake.fault(facts, n_bytes, most, self.versions)
        if text:
            self.event("error", f"generator {name}: {text}")
        if fault:
            fault = f"failed_{self._reason(facts['reason'])}" if fault == intake.FAILED else fault
            self._drop(task, generator, fault, tokens)
            self._failed(name, fault, f"task {ordinal}", now)
            self.progress(now)
            return _refused(fault)
        self.book.facts(task, facts)
        self.book.ready(task, generator, now)
        self.failures_in_a_row = 0
        oldest = self._oldest_kept()
        if oldest is not None and task.min_version < oldest:
            self._drop_stale(task)
        else:
            self.store.put(ordinal, frames, task.min_version)
            self.book.memory.trajectory(ordinal, attempt, frames)
        self.progress(now)
        return ACCEPTED

    def failure(self, name: str, body: dict[str, Any], now: float) -> dict[str, Any]:
        """A rollout failed: it is dropped under its reason, never trained, and a new task takes its place; a member of
        a group is played again.
        """
        ordinal, attempt, tokens = body["ordinal"], body["attempt"], body["sampled_tokens"]
        task = self.book.current(ordinal, attempt, tokens)
        if isinstance(task, str):
            return _refused(task)
        reason, generator = self._reason(body["reason"]), self.pool.by_name.get(name)
        if self.groups.size > 1:
            self.again(task, generator, f"failed_{reason}", tokens)
        else:
            self._drop(task, generator, f"failed_{reason}", tokens)
        self._failed(name, reason, str(body.get("detail", "")), now)
        self.progress(now)
        return ACCEPTED

    def eval_result(self, name: str, body: dict[str, Any], now: float) -> dict[str, Any]:
        """Takes the result of a held-out episode. `success`: its verdict, else by `env.success_reward`."""
        reward, reason = body["reward"], self._reason(body.get("reason") or "no_reward")
        if reward is not None and not -1e30 < reward < 1e30:
            reward, reason = None, "invalid_reward"
        success = bool(body.get("success", reward is not None and reward >= self.config.env.success_reward))
        generator = self.pool.by_name.get(name)
        if generator is not None:
            generator.evals.discard(body["ordinal"])
        if not self.evals.result(body["ordinal"], reward, success, reason, body["version"]):
            return _refused("late")
        if reward is None:
            self._failed(name, reason, str(body.get("detail", "held-out episode")), now)
        else:
            self.failures_in_a_row = 0
        self.progress(now)
        return ACCEPTED

    # -- learner

    def learner_joined(self, hello: dict[str, Any]) -> None:
        """The learner is here. `step` and `weights` in its greeting: where it continues, and its weights if they are
        newer.
        """
        session, self.learner_back_by = hello.get("session", ""), None
        if session and session == self.learner_session:
            return  # it was here before, and holds what it was given
        step, weights = hello.get("step", self.step), hello.get("weights")
        if step != self.step:  # what was trained in the steps between would be in the books and in no weights
            raise TransportError(f"the learner continues after step {step}, the run after step {self.step}")
        for lease in sorted(self.leases, reverse=True):
            leases.give_back(self, lease)
        self.learner_session = session
        if weights and not self.versions.repeated(weights):
            self.versions.check(weights)
            self._publish(weights)
        if self.awaiting:
            recovery.fit(self)
            self.awaiting, self.pool.floor = False, self.versions.current
            if step % max(1, self.config.eval.every_steps):
                self.last_evaluated = step  # no round was due here

    def learner_left(self, reason: str, now: float, back_by: float | None = None) -> None:
        """The learner is gone: what it held is given back, in the old order; at `back_by` if it may be back before."""
        self.takes.clear()
        self.learner_back_by = back_by
        if back_by is not None:
            if not self.ending:
                self.event("warning", f"learner: {reason}; what it holds is kept for it for {back_by - now:.0f} s")
            return
        count = sum(len(lease.held) for lease in self.leases.values())
        if not self.ending:
            self.event("warning", f"learner: {reason}; {count} leased trajectories given back")
        for lease in sorted(self.leases, reverse=True):
            leases.give_back(self, lease)
        self.progress(now)

    def take(self, key: Hashable, n: int, now: float) -> None:
        """Asks for `n` trajectories; answered through `Wire.batch` as soon as there are as many. Raises
        `ValidationError`.
        """
        limit = self.config.learner.batch_trajectories
        if not 1 <= n <= limit or n % self.groups.size:
            what = f"{n} is not in [1, learner.batch_trajectories = {limit}]"
            raise ValidationError(f"take.n: {what}, or no multiple of algorithm.group_size = {self.groups.size}")
        if ending := self.done["reason"] if self.done else self.ending:
            self.wire.no_batch(key, ending)
            return
        for number in [number for number, lease in self.leases.items() if lease.key in (None, key)]:
            leases.give_back(self, number)  # the answer was lost with a broker or a connection
        self.takes.append(Take(key, n, now, now))
        self.progress(now)

    def give_up(self, key: Hashable, now: float) -> None:
        """The learner no longer waits for this `take`: it is forgotten, or what it was given is given back."""
        self.takes = deque(take for take in self.takes if take.key != key)
        for lease in [number for number, lease in self.leases.items() if lease.key == key]:
            leases.give_back(self, lease)
        self.progress(now)

    def commit(self, body: dict[str, Any], now: float) -> dict[str, Any]:
        """A learner step is done: its lease is trained, the version advances when there are weights, the step is shown.
        `done` in it ends the run with that reason.

        Raises `TransportError` for a lease that is not open, `ValidationError` for a step or version that does not
        advance, `LedgerError` when the tokens do not add up.
        """
        number, weights, step = body["lease"], body["weights"], body["step"]
        lease = self.leases.get(number)
        if lease is None and (number, step) == (self.last_lease, self.step):
            return {"version": self.versions.current, "step": self.step}  # heard before, the answer was lost
        if lease is None:
            raise TransportError(f"commit.lease: {number} is not open")
        if step <= self.step:
            raise ValidationError(f"commit.step: {step} must be above the last step {self.step}")
        if weights is not None:
            self.versions.check(weights)
        ordinals = [ordinal for ordinal, _ in lease.held]
        tasks = self.book.trained(number, ordinals, step, body["trained_tokens"], body["masked_tokens"])
        del self.leases[number]
        self.last_lease = number
        for task, (_, held) in zip(tasks, lease.held, strict=True):
            if held is not None:
                held.commit()
            self.meter.ended(task.n_tokens, True)
        self.step, self._commits = step, self._commits + 1
        if weights is not None:
            self._publish(weights)
        self.book.settle()
        self.shown = {"step": step, "metrics": {**body["metrics"], **report.step_metrics(self, now)}}
        self.wire.to_supervisor("step", self.shown)
        if alarm := self.gap_alarm.look(body["metrics"]):
            self.event("warning", f"step {step}: {alarm}")
        last = "all steps done" if step >= self.config.run.steps else body.get("done")
        if last and not self.ending:
            self._end(last)
        every = self.config.eval.every_steps
        if last or (every and step % every == 0 and not self.ending):
            self.evaluate(now)
        self.progress(now)
        return {"version": self.versions.current, "step": self.step}

    # -- time and the end

    def tick(self, now: float) -> None:
        """Deadlines and stalls; to be called about once a second."""
        timeout = self.config.transport.rollout_timeout_s
        for task in list(self.book.running.values()):
            if now - task.started < timeout:
                break  # in the order of their start
            if task.ordinal in self.book.running:  # else its group has ended in this very loop
                self._overdue(task, now)
        if self.learner_back_by is not None and now > self.learner_back_by:
            self.learner_left("did not come back", now)
        recovery.orphans(self, now)
        for take in self.takes:
            if now - take.warned >= 60.0:
                take.warned = now
                waited = f"learner has waited {now - take.since:.0f} s for {take.n} trajectories"
                self.event("warning", f"{waited}: {report.standing(self, now)}")
        self.progress(now)

    def finish(self, reason: str, now: float, *, ok: bool) -> None:
        """Ends the run now: takes are answered with `stop`, peers are told.

        Unfinished tasks stay in the ledger, to be started again by a later run, unless the run is complete (`ok`).
        """
        if self.done is not None:
            return
        self.evals.abandon()
        self._end(reason)
        if ok:
            for number in list(self.leases):
                leases.give_back(self, number)
            self.book.drop_all(self.pool, "run_ended")
            self.store.clear()
        self.done = {"reason": reason, "failed": not ok, "step": self.step, "tokens": self.book.ledger.tokens()}
        try:
            self.book.settle()
        except LedgerError as error:
            self.done |= {"reason": f"{reason}; {error}", "failed": True}
        self.wire.to_supervisor("done", self.done)
        self.wire.to_learner("stop", {"reason": reason})
        for name in list(self.pool.by_name):
            self.wire.to_generator(name, "stop", {"reason": reason})

    def event(self, level: str, text: str) -> None:
        """Something that a user should see: to the log and the supervisor. `level`: info, warning or error."""
        log.log({"warning": logging.WARNING, "error": logging.ERROR}.get(level, logging.INFO), "%s", text)
        self.wire.to_supervisor("event", {"level": level, "text": text})

    def welcome(self) -> dict[str, Any]:
        """What a joining peer must know."""
        return {"version": self.versions.current, "weights": self.versions.weights, "step": self.step}

    def permits(self) -> int:
        """Rollouts that may be started now: by staleness, by the buffer's room, by the end of the run; the least
        counts.
        """
        if self.ending or self.awaiting:
            return 0
        counts, batch = self.book.ledger.counts(), self.config.learner.batch_trajectories
        leased, ready, running = counts["leased"], counts["ready"], counts["issued"] + counts["generating"]
        trained = counts["trained"] - self._trained_before
        by_lag = self._admission.permits(self._commits, trained, leased, ready, running)
        by_end = (self.config.run.steps - self.step) * batch - leased - ready - running
        return max(0, min(by_lag, by_end, self.store.room(leased, ready, running)))

    def progress(self, now: float) -> None:
        """Everything that may have become possible: room in the buffer, takes, eval results, the end, new tasks."""
        if self.done is not None:
            return
        if self.store.refill():
            self.drop_too_old()  # versions may have advanced while these waited
        while self.takes and leases.serve(self, self.takes[0], now):
            self.takes.popleft()
        while (result := self.evals.finish(now)) is not None:
            self._evaluated(result)
        if self.ending and not self.evals.busy and not self.leases:
            self.finish(self.ending, now, ok=True)
            return
        dispatch.dispatch(self, now)
        if self.done is None and (stuck := report.stuck(self)):
            self.finish(stuck, now, ok=False)

    # -- inside: answers of generators

    def _reason(self, text: str) -> str:
        reason = reason_code(text)
        known = self.book.dropped
        return reason if f"failed_{reason}" in known or len(known) < MAX_REASONS else "other"

    def _failed(self, name: str, reason: str, detail: str, now: float) -> None:
        self.failures_in_a_row += 1
        log.info("generator %s: rollout failed: %s: %s", name, reason, detail[:500])
        if self.failures_in_a_row >= self.config.run.max_failures_in_a_row:
            count, env = self.failures_in_a_row, self.config.env.name
            self.finish(
                f"{count} rollouts in a row failed in environment {env}: {reason}: {detail[:500]}", now, ok=False
            )

    def _overdue(self, task: Task, now: float) -> None:
        generator, last = self.pool.by_name.get(task.generator), task.timed_out
        age = f"{now - task.started:.1f} s old, the limit is {self.config.transport.rollout_timeout_s:g} s"
        what = f"task {task.ordinal} attempt {task.attempt} on {task.generator}"
        self.event("warning", f"stall: {what} is {age}; {'given up' if last else 'started again'}")
        self.wire.to_generator(task.generator, "cancel", {"ordinal": task.ordinal, "attempt": task.attempt})
        if last:
            self._drop(task, generator, "deadline", 0)
        else:
            task.timed_out = True
            self.again(task, generator, "deadline")

    def _drop(self, task: Task, generator: Generator | None, reason: str, tokens: int) -> None:
        """Ends a task without training, and with it its group."""
        self.book.drop(task, generator, reason, tokens)
        self._end_group(task)

    def again(
        self, task: Task, generator: Generator | None, reason: str, tokens: int = 0, *, goes_on: bool = False
    ) -> None:
        """Has a task started again; after its last attempt its group ends."""
        if not self.book.again(task, generator, reason, tokens, goes_on=goes_on):
            self._end_group(task)

    def _end_group(self, lost: Task) -> None:
        for task in self.groups.members(lost.ordinal):
            generator, tokens = self.pool.by_name.get(task.generator), 0
            if task.state == "running":
                self.wire.to_generator(task.generator, "cancel", {"ordinal": task.ordinal, "attempt": task.attempt})
            elif task.state == "ready":
                self.store.discard(task.ordinal)
                tokens = task.sampled_tokens
            self.book.drop(task, generator, INCOMPLETE, tokens)

    def _drop_stale(self, task: Task) -> None:
        self.meter.ended(task.n_tokens, False)
        self.book.drop(task, None, "stale", task.sampled_tokens)

    # -- inside: leases and versions

    def _publish(self, weights: dict[str, Any]) -> None:
        """A new version: the clock advances, all generators are told, rollouts that are too old now are dropped."""
        body = self.versions.publish(weights)
        for name in list(self.pool.by_name):
            self.wire.to_generator(name, "version", body)
        self.drop_too_old()

    def _oldest_kept(self) -> int | None:
        """The oldest version that is still trained, `None` when nothing is dropped for its age."""
        limits = self.config.staleness
        return max(0, self.versions.current - limits.max_lag) if limits.stale == "drop" else None

    def drop_too_old(self) -> None:
        """Rollouts that became too old for the versions there are now are dropped, where that is configured."""
        for ordinal in self.store.keep_from(self.versions.current, self._oldest_kept()):
            self._drop_stale(self.book.live[ordinal])

    # -- inside: evaluation and the end

    def evaluate(self, now: float) -> None:
        """Has a held-out round begin, unless there was one after this step."""
        if self.config.eval.every_steps > 0 and self.last_evaluated != self.step:
            self.last_evaluated = self.step
            self.evals.due(self.step, self.versions.current, now)

    def _evaluated(self, result: dict[str, Any]) -> None:
        for generator in self.pool.by_name.values():
            generator.evals.clear()
        self.wire.to_supervisor("eval", result)
        target, success = self.config.run.target_success, result["success"]
        if target is not None and success is not None and success >= target and self.step > 0 and not self.ending:
            self._end(f"held-out success {success:.4f} reached run.target_success = {target:g}")

    def _end(self, reason: str) -> None:
        """No more training tasks and batches; the run is over when the held-out rounds are."""
        self.ending = self.ending or reason
        while self.takes:
            self.wire.no_batch(self.takes.popleft().key, reason)


def _refused(reason: str) -> dict[str, Any]:
    return {"accepted": False, "reason": reason}
