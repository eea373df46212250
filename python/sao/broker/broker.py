"""The broker: the life of a task, from its issue to its training or its drop, without sockets and without a clock.

    issued -> generating -> ready -> leased -> trained | dropped(reason)

Each owner keeps its own state: the task book (where every task is), the scheduler (who works), the ready store (what
waits to be trained), the lease table (what the learner has), the versions, the evaluation rounds, the run (how far it
is). What happens to a task passes through here, in the order of its life: each message of a peer is a method. Times are
seconds of one monotonic clock and are passed in; what must be sent goes through the outbox.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

import msgspec

from sao import _core
from sao.broker.evaluation import Evaluation
from sao.broker.leases import LeaseTable, ReadyStore
from sao.broker.metrics import GapAlarm, StepMeter
from sao.broker.outbox import Outbox
from sao.broker.persistence import Persistence
from sao.broker.report import Report
from sao.broker.run import Run
from sao.broker.scheduler import Scheduler
from sao.broker.tasks import TaskBook, TrainingTask
from sao.broker.versions import Versions
from sao.config import Config
from sao.errors import LedgerError, TransportError, ValidationError, WireError
from sao.storage.failpoints import failpoint
from sao.transport import messages as m

log = logging.getLogger(__name__)
INCOMPLETE: Final = "group_incomplete"
TAKEN: Final = 4096  # newest trajectories of which is known what was in them
STALLS_SHOWN: Final = 8  # of everything that the run waits for, in an event


def checksum(frames: Iterable[m.Buffer]) -> int:
    """Of the content of frames."""
    found = 0
    for frame in frames:
        found = zlib.crc32(frame, found)
    return found


class Broker:
    """The state machine of a run. A `LedgerError` means that the state is wrong, any other error that a request is."""

    def __init__(self, config: Config, persistence: Persistence, outbox: Outbox, now: float) -> None:
        """Goes on where an earlier broker was."""
        self.config, self.outbox = config, outbox
        note, resumed = persistence.note, persistence.resumed
        self.run = msgspec.convert(note["run"], Run) if note else Run(resumed or 0, resumed is not None)
        self.book = TaskBook(persistence, config.algorithm.group_size)
        limits, expected_bytes = config.buffer, 9 * config.sampling.context_tokens + 4096
        self.store = ReadyStore(limits.max_trajectories, limits.max_bytes, expected_bytes)
        self.versions = Versions(config.staleness)
        self.evaluation = Evaluation(config)
        self.meter = StepMeter(now, self.book.ledger.tokens()["sampled"])
        shared = config, self.run, self.book, self.store, self.versions
        self.scheduler = Scheduler(*shared, self.evaluation, outbox)
        self.leases = LeaseTable(*shared, self.meter, outbox)
        self.report = Report(self.scheduler, self.leases)
        self._gap_alarm = GapAlarm(config.logprob_gap_limit)
        self._taken: dict[tuple[int, int], int] = {}  # ordinal, attempt -> checksum of the trajectory that came first
        self._restore(persistence, now)

    # -- issued, generating

    def generator_joined(self, name: str, hello: m.Hello, now: float) -> None:
        """A generator has been welcomed; it gets tasks when it states free slots, and keeps those still its own."""
        if name in self.scheduler.generators:
            self.scheduler.claim(name, hello.tasks)
            self.progress(now)

    def slots(self, name: str, message: m.Slots, now: float) -> None:
        """A generator states its free slots."""
        self.scheduler.slots(name, message.free, message.received)
        self.scheduler.dispatch(now)

    def stats(self, name: str, message: m.Stats, now: float) -> None:
        """Takes a generator's report of its load; the last one counts."""
        self.scheduler.generators[name].report = message

    def loaded(self, name: str, message: m.Loaded, now: float) -> None:
        """Notes the version that a generator serves. Raises `TransportError` when the weights are others."""
        try:
            self.versions.verify(message.version, message.fingerprint)
        except TransportError as error:
            self.outbox.event("error", f"generator {name}: {error}")
            raise
        self.scheduler.generators[name].loaded = message.version

    def generator_left(self, name: str, reason: str, now: float) -> None:
        """A generator is gone: its tasks are started again elsewhere, late answers are fenced by the attempt."""
        joined = name in self.scheduler.generators
        self.scheduler.left(name)
        if joined and self.run.done is None:
            running = self.book.running_on(name)
            count = len(running) + list(self.evaluation.open.values()).count(name)
            self.outbox.event("warning", f"generator {name}: {reason}; {count} tasks in flight are started again")
            self._lost(running)
            self.evaluation.lost(name)
        self.progress(now)

    # -- ready

    def trajectory(self, name: str, message: m.FinishedRollout, now: float) -> m.Ack:
        """Takes a finished trajectory, or refuses it with a reason."""
        frames, limit = message.frames, self.config.transport.max_message_bytes
        try:
            metadata = _core.summary(frames[0], frames[1], max_bytes=limit, sidecars=frames[2:])
        except (WireError, ValidationError) as error:
            self.outbox.event("error", f"generator {name}: corrupt trajectory refused: {error}")
            return m.Ack(False, f"corrupt: {error}")
        tokens = metadata["n_actions"]
        ordinal, attempt = metadata["task_ordinal"], metadata["attempt"]
        task, content = self.book.current(ordinal, attempt, tokens), checksum(frames)
        if isinstance(task, str):
            if task == "duplicate" and self._taken.get((ordinal, attempt), content) != content:
                text = f"task {ordinal} attempt {attempt} came again with other content; the first counts"
                self.outbox.event("error", f"generator {name}: {text}")
                task = "duplicate with other content"
            return m.Ack(False, task)
        self._taken[ordinal, attempt] = content
        if len(self._taken) > TAKEN:
            del self._taken[next(iter(self._taken))]
        if reason := self._fault(name, metadata, frames):
            self._drop(task, reason, tokens)
            self._failed(name, reason, f"task {task.ordinal}")
            self.progress(now)
            return m.Ack(False, reason)
        self.book.ready(task, metadata, frames, now)
        self.run.failures_in_a_row = 0
        self.store.put(task.ordinal, frames, task.min_version)
        if task.min_version < self.versions.oldest_kept:
            self._drop_too_old()
        self.progress(now)
        return m.Ack()

    def failure(self, name: str, message: m.FailedRollout, now: float) -> m.Ack:
        """A rollout failed: it is dropped under its reason, never trained; a member of a group is played again."""
        task = self.book.current(message.ordinal, message.attempt, message.sampled_tokens)
        if isinstance(task, str):
            return m.Ack(False, task)
        reason = self.book.reason(message.reason)
        if self.book.group_size > 1:
            self._again(task, f"failed_{reason}", message.sampled_tokens)
        else:
            self._drop(task, f"failed_{reason}", message.sampled_tokens)
        self._failed(name, reason, message.detail)
        self.progress(now)
        return m.Ack()

    # -- leased

    def learner_joined(self, hello: m.Hello) -> None:
        """The learner is here. With the session of the one before it holds what it was given; any other has lost it,
        and says after which step it continues, with its weights if they are newer. Raises `TransportError`.
        """
        session, weights = hello.session, hello.weights
        self.leases.back_by = None
        if session and session == self.leases.session:
            return
        step = self.run.step if hello.step is None else hello.step
        if step != self.run.step:  # what was trained in the steps between would be in the books and in no weights
            raise TransportError(f"the learner continues after step {step}, the run after step {self.run.step}")
        self._give_back(self.leases.open)
        self.leases.session = session
        if weights is not None and not self.versions.repeated(weights):
            self.versions.check(weights)
            self._publish(weights)
        if self.run.awaiting:
            self._rewind()
            self.run.awaiting, self.scheduler.floor = False, self.versions.current
            self.evaluation.resume(self.run.step)

    def take(self, key: Hashable, n: int, now: float) -> None:
        """Asks for `n` trajectories; answered through the outbox as soon as there are. Raises `ValidationError`."""
        failpoint("broker.take")
        self.leases.ask(key, n, now)
        if not self.run.ending:
            self._give_back(self.leases.of(None, key))  # the answer was lost with a broker or a connection
            self.progress(now)

    def give_up(self, key: Hashable, now: float) -> None:
        """The learner no longer waits for this `take`: it is forgotten, or what it was given is given back."""
        self.leases.takes = deque(take for take in self.leases.takes if take.key != key)
        self._give_back(self.leases.of(key))
        self.progress(now)

    def learner_left(self, reason: str, now: float, back_by: float | None = None) -> None:
        """The learner is gone: what it held is given back, in the old order; at `back_by` if it may be back before."""
        self.leases.takes.clear()
        self.leases.back_by = back_by
        what = f"{self.book.ledger.counts()['leased']} leased trajectories given back"
        if back_by is not None:
            what = f"what it holds is kept for it for {back_by - now:.0f} s"
        if not self.run.ending:
            self.outbox.event("warning", f"learner: {reason}; {what}")
        if back_by is None:
            self._give_back(self.leases.open)
            self.progress(now)

    # -- trained

    def commit(self, message: m.Commit, now: float) -> m.Position:
        """A learner step is done: its lease is trained, the version advances when there are weights, the step is shown.
        A repeated commit changes nothing.

        Raises `TransportError` for a lease that is not open, `ValidationError` for a step or version that does not
        advance, `LedgerError` when the tokens do not add up.
        """
        failpoint("broker.commit")
        lease, step, weights = message.lease, message.step, message.weights
        if self.leases.committed(lease, step):
            return self.position()
        if step <= self.run.step:
            raise ValidationError(f"commit.step: {step} must be above the last step {self.run.step}")
        self.versions.check(weights)
        self.leases.trained(lease, step, message.trained_tokens, message.masked_tokens)
        self.run.step = step
        if weights is not None:
            self._publish(weights)
        self.book.settle()
        self.run.shown = m.StepReport(step, {**message.metrics, **self.report.step_metrics(now)})
        self.outbox.push("supervisor", "", self.run.shown)
        if alarm := self._gap_alarm.check(message.metrics):
            self.outbox.event("warning", f"step {step}: {alarm}")
        last = "all steps done" if step >= self.config.run.steps else message.done
        if last or not self.run.ending:
            self.evaluation.due(step, self.versions.current, now, always=bool(last))
        if last:
            self._end(last)
        self.progress(now)
        return self.position()

    # -- started again, dropped

    def tick(self, now: float) -> None:
        """Deadlines and stalls; to be called about once a second."""
        for task in self.scheduler.overdue(now):
            if task.ordinal not in self.book.running:
                continue  # its group has ended in this very loop
            age = f"{now - task.started:.1f} s old, the limit is {self.config.transport.rollout_timeout_s:g} s"
            what = f"task {task.ordinal} attempt {task.attempt} on {task.generator}"
            self.outbox.event("warning", f"stall: {what} is {age}; {'given up' if task.timed_out else 'started again'}")
            self.scheduler.cancel(task.generator, task.ordinal, task.attempt)
            if task.timed_out:
                self._drop(task, "deadline")
            else:
                task.timed_out = True
                self._again(task, "deadline")
        if self.leases.back_by is not None and now > self.leases.back_by:
            self.learner_left("did not come back", now)
        if self.leases.starving(now):
            self.outbox.event("warning", f"stall: {'; '.join(self.report.waits(now)[:STALLS_SHOWN])}")
        self.progress(now)

    def _lost(self, tasks: Iterable[TrainingTask]) -> None:
        """Tasks whose generator is gone go on elsewhere, after the turns that are kept of them."""
        for task in tasks:
            if task.ordinal in self.book.running:  # else its group has ended in this very loop
                self._again(task, "generator_lost", goes_on=True)

    def _again(self, task: TrainingTask, reason: str, tokens: int = 0, *, goes_on: bool = False) -> None:
        """Has a running task started again; after its last attempt it is dropped."""
        if not self.book.again(task, reason, tokens, goes_on=goes_on):
            self._drop(task, reason, tokens)

    def _drop(self, task: TrainingTask, reason: str, tokens: int = 0) -> None:
        """Ends a running task without training, and with it its group, whose other members may be anywhere."""
        self.book.drop(task, reason, tokens)
        for member in self.book.group(task.ordinal):
            if member.state == "running":
                self.scheduler.cancel(member.generator, member.ordinal, member.attempt)
            elif member.state == "ready":
                self.store.discard(member.ordinal)
            self.book.drop(member, INCOMPLETE)

    def _drop_too_old(self) -> None:
        """Ready rollouts that became too old for the versions there are now are dropped, where that is configured."""
        for ordinal in self.store.buffer.advance(self.versions.current, self.versions.oldest_kept):
            task = self.book.live[ordinal]
            self.meter.ended(task.n_tokens, False)
            self.book.drop(task, "stale")

    def _fault(self, name: str, metadata: dict[str, Any], frames: Sequence[m.Buffer]) -> str:
        """Why a well-formed trajectory cannot be trained on, as a reason code; empty when it can."""
        if metadata["termination"] == "failed" or metadata["reward"] is None:  # the rollout itself says so
            return f"failed_{self.book.reason(metadata['reason'])}"
        if sum(memoryview(frame).nbytes for frame in frames) > self.store.max_bytes:
            return "larger_than_buffer"
        reason, text = self.versions.fault(metadata)
        if reason:
            self.outbox.event("error", f"generator {name}: {text}")
        return reason

    def _failed(self, name: str, reason: str, detail: str) -> None:
        log.info("generator %s: rollout failed: %s: %s", name, reason, detail[:500])
        run, last = self.run, f"{reason}: {detail[:500]}"
        run.first_failure = run.first_failure if run.failures_in_a_row else last
        run.failures_in_a_row += 1
        if run.failures_in_a_row >= self.config.run.max_failures_in_a_row:
            text = f"{run.failures_in_a_row} rollouts in a row failed in environment {self.config.env.name}"
            both = last if last == run.first_failure else f"{run.first_failure}; the last one: {last}"
            self.finish(f"{text}: {both}", ok=False)

    def _give_back(self, leases: Iterable[int]) -> None:
        """Leases come back unused, the newest first, so that the order of completion stays."""
        numbers = sorted(leases, reverse=True)
        for number in numbers:
            self.leases.give_back(number)
        if numbers:
            self._drop_too_old()

    def _publish(self, weights: m.WeightsRef) -> None:
        """A new version: the clock advances, all generators get it, rollouts that are too old now are dropped."""
        self.versions.publish(weights)
        self.outbox.push("generator", "", m.NewWeights(weights))
        self._drop_too_old()

    # -- evaluation

    def eval_result(self, name: str, message: m.EvalResult, now: float) -> m.Ack:
        """Takes the result of a held-out episode, or refuses it with a reason."""
        reward, reason = message.reward, message.reason or "no_reward"
        if reward is not None and not -1e30 < reward < 1e30:
            reward, reason = None, "invalid_reward"
        reason = self.book.reason(reason)
        if not self.evaluation.result(message.ordinal, reward, message.success, reason, message.version):
            return m.Ack(False, "late")
        if reward is None:
            self._failed(name, reason, message.detail or "held-out episode")
        else:
            self.run.failures_in_a_row = 0
        self.progress(now)
        return m.Ack()

    # -- what has become possible, and the end

    def progress(self, now: float) -> None:
        """Does what has become possible: orphans, room in the buffer, takes, results of rounds, the end, new tasks."""
        if self.run.done is not None:
            return
        self._lost(self.scheduler.orphans(now))
        if self.store.refill():
            self._drop_too_old()  # versions may have advanced while these waited
        self.leases.serve(now)
        while (result := self.evaluation.finish(now)) is not None:
            self.outbox.push("supervisor", "", result)
            success, target = result.success, self.config.run.target_success
            if self.run.step > 0 and success is not None and target is not None and success >= target:
                self._end(f"held-out success {success:.4f} reached run.target_success = {target:g}")
        if self.run.ending and not self.evaluation.busy and not self.leases.open:
            self.finish(self.run.ending, ok=True)
            return
        self.scheduler.dispatch(now)
        if stuck := self.report.stuck():
            self.finish(stuck, ok=False)

    def finish(self, reason: str, *, ok: bool) -> None:
        """Ends the run now: what waits is answered, everyone gets to know.

        Unfinished tasks stay in the ledger, to be started again by a later run, unless the run is complete (`ok`).
        """
        run = self.run
        if run.done is not None:
            return
        self.evaluation.abandon()
        self._end(reason)
        if ok:
            self._give_back(self.leases.open)
            for task in list(self.book.live.values()):
                self.book.drop(task, "run_ended")
            self.store.clear()
        try:
            self.book.settle()
        except LedgerError as error:
            reason, ok = f"{reason}; {error}", False
        self.close(m.Done(reason, not ok, run.step, self.book.ledger.tokens()))

    def close(self, done: m.Done) -> None:
        """The run is over: everyone gets to know."""
        self.run.done = done
        self.outbox.push("supervisor", "", done)
        for role in ("learner", "generator"):
            self.outbox.push(role, "", m.Stop(done.reason))

    def _end(self, reason: str) -> None:
        """No more training tasks and batches; the run is over when the held-out rounds are."""
        self.run.ending = self.run.ending or reason  # the first counts
        self.leases.refuse(self.run.ending)

    # -- an earlier broker, an earlier step

    def position(self) -> m.Position:
        """Where the run is."""
        return m.Position(self.run.step, self.versions.current)

    def note(self) -> dict[str, Any]:
        """The state that a later broker needs beside ledger and frames."""
        owners = self.versions.note() | self.scheduler.note() | self.leases.note() | self.evaluation.note()
        return {"run": self.run, **owners}

    def _restore(self, persistence: Persistence, now: float) -> None:
        """Goes on where an earlier broker was; what is damaged is an event, and its tasks are started again."""
        note, found, self.book.restored = persistence.note, self.book.restored, {}
        for text in persistence.ledger.damage:
            self.outbox.event("warning", f"{text}; what it was about is done again")
        if note:
            self.versions.restore(note)
            self.scheduler.restore(note, now)
            if self.run.shown:  # the broker before this one may have been killed before it could
                self.outbox.push("supervisor", "", self.run.shown)
            if self.run.done is None:
                self.evaluation.restore(note, now)
        for state in ("leased", "ready"):  # what is leased must be in the buffer, what is ready may wait for room
            for ordinal, frames in found.items():
                task = self.book.live[ordinal]
                if task.state == state:
                    self.store.put(ordinal, frames, task.min_version)
                    task.finished = now
            if state == "leased" and note:
                self.leases.restore(note, now)
        if note:
            counts, where = self.book.ledger.counts(), f"step {self.run.step}, version {self.versions.current}"
            there = f"{counts['ready']} ready, {counts['leased']} leased, {len(self.book.running)} running"
            self.outbox.event("warning", f"broker: goes on after {where}: {there}")
        if back := persistence.taken_back:
            steps, count = f"{back[-1]['step']} to {back[0]['step']}", sum(len(step["tasks"]) for step in back)
            self.outbox.event("warning", f"steps {steps} are lost; their {count} tasks are played again")
        for task in self.book.broken_groups():
            self.book.drop(task, INCOMPLETE)

    def _rewind(self) -> None:
        """The learner goes on after an earlier step: what newer weights have sampled or is too far ahead is undone."""
        ahead = (self.config.staleness.max_lag + 1) * self.config.learner.batch_trajectories
        for ordinal in self.book.rewind(self.versions.current, ahead):
            self.store.discard(ordinal)
