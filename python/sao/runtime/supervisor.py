"""Starts the actors of a run, watches them, starts killed ones again, and ends everything in order.

One thread decides: exits of children, messages of the broker and signals arrive in one inbox. Whatever ends the run, no
process of it is left: first a message asks all to stop, then SIGTERM, then SIGKILL to the whole family.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil
from msgspec import structs

from sao.config import Config
from sao.errors import Error
from sao.runtime import launch, processes
from sao.runtime import resume as resuming
from sao.runtime.processes import Child, Command
from sao.storage.failpoints import failpoint
from sao.transport.client import Client
from sao.transport.keys import client_keys
from sao.transport.messages import Message

RESTARTS: Final = 3  # of one process within the window; one more ends the run (see `_may_restart`)
RESTART_WINDOW_S: Final = 300.0
START_S: Final = 60.0  # for the broker to answer
GOODBYE_S: Final = 5.0  # between the broker's regular exit and its word that the run is done
SAVE_S: Final = 600.0  # for the learner to write its last checkpoint after a regular end
STALL_S: Final = 120.0  # without a step; doubled at each report
TERMINATE_S: Final = 5.0  # between SIGTERM and SIGKILL, or transport.shutdown_s if that is less
TICK_S: Final = 1.0  # the live view's clock

EXIT_DONE, EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code of `sao train` and why."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class _Exit:
    child: Child


@dataclass(frozen=True)
class _Signal:
    number: int


@dataclass(frozen=True)
class _Lost:
    text: str


@dataclass(frozen=True)
class _Snapshot:
    text: str


@dataclass(frozen=True)
class _Fenced:
    """The broker has heard that the learner is dead, and says after which step and version."""

    step: int
    version: int


Report = Callable[[str, dict[str, Any]], None]


class Supervisor:
    """One run. `report(kind, fields)` takes step, eval and event records; `tick()` is called about once a second."""

    def __init__(
        self, config: Config, places: launch.Places, logs: Path, report: Report, tick: Callable[[], None] = lambda: None
    ) -> None:
        self._config, self._places, self._logs = config, places, logs
        self._report, self._tick = report, tick
        self._inbox: queue.SimpleQueue[_Exit | _Signal | _Lost | _Snapshot | _Fenced | Message] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._running: dict[str, Child] = {}
        self._incarnations: dict[str, int] = {}
        self._restarted_at: defaultdict[str, deque[float]] = defaultdict(deque)
        self._client: Client | None = None
        self._outcome: Outcome | None = None
        self._signals = 0
        self._done_by: float | None = None
        self._stall_s = STALL_S
        self._last_step_at = time.monotonic()
        self._last_step = self._furthest = 0
        self._furthest_at = time.monotonic()

    def run(self) -> Outcome:
        """Runs to the end and returns how it ended. Call it from the main thread; signals are put back afterwards."""
        processes.become_subreaper()
        others = set(processes.descendants())
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            self._start()
            while self._outcome is None:
                self._step()
        except Exception as error:
            self._finish(EXIT_FAILED, f"supervisor: {type(error).__name__}: {error}")
            raise
        finally:
            try:
                self._end(others)
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        return self._outcome

    @property
    def children(self) -> dict[str, int]:
        """Name -> process id of the actors that run now."""
        return {name: child.pid for name, child in self._running.items()}

    # -- start

    def _start(self) -> None:
        for command in launch.everything(self._config, self._places):
            self._launch(command)
        transport = self._config.transport
        self._client = Client(
            self._places.endpoint,
            role="supervisor",
            name="supervisor",
            max_message_bytes=transport.max_message_bytes,
            heartbeat_s=transport.heartbeat_s,
            peer_timeout_s=transport.peer_timeout_s,
            keys=client_keys(transport.keys, self._places.endpoint, "supervisor", "supervisor"),
            on_push=self._inbox.put,
            on_lost=lambda error: self._inbox.put(_Lost(str(error))),
            outage_s=transport.outage_s,
            on_greet=lambda hello: structs.replace(hello, step=self._last_step),
        )
        threading.Thread(target=self._join, args=(self._client,), daemon=True).start()
        failpoint("supervisor.started")

    def _launch(self, command: Command) -> None:
        child = Child(command, self._logs / f"{command.name}.log", lambda ended: self._inbox.put(_Exit(ended)))
        self._children.append(child)
        self._running[command.name] = child

    def _join(self, client: Client) -> None:
        try:
            client.connect(deadline_s=START_S)
        except Error as error:
            self._inbox.put(_Lost(f"broker: {error}"))

    # -- what may happen

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        self._inbox.put(_Signal(number))

    def _step(self, timeout_s: float = TICK_S) -> None:
        """Handles one thing from the inbox, or the clock."""
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            item = None
        if isinstance(item, Message):
            self._on_push(item)
        elif isinstance(item, _Exit):
            self._on_exit(item.child)
        elif isinstance(item, _Signal):
            self._finish(EXIT_INTERRUPTED, f"interrupted by {signal.Signals(item.number).name}")
        elif isinstance(item, _Fenced):
            self._bring_back(item)
        elif isinstance(item, _Lost):
            self._finish(EXIT_FAILED, item.text)
        elif isinstance(item, _Snapshot):
            self._report("event", {"level": "warning", "text": item.text})
        self._on_clock(time.monotonic())

    def _on_push(self, message: Message) -> None:
        body = dict(message.body)
        if message.kind == "step":
            if body["step"] <= self._last_step:
                return  # told before, by a broker that was killed since
            failpoint("supervisor.step")
            self._last_step_at, self._stall_s = time.monotonic(), STALL_S
            self._last_step = body["step"]
            if self._last_step > self._furthest:
                self._furthest, self._furthest_at = self._last_step, self._last_step_at
            self._report("step", {"step": body["step"], **body["metrics"]})
        elif message.kind == "done":
            failed = bool(body.get("failed"))
            self._finish(EXIT_FAILED if failed else EXIT_DONE, str(body["reason"]))
        elif message.kind in ("eval", "event"):
            self._report(message.kind, body)

    def _on_exit(self, child: Child) -> None:
        name, role = child.command.name, child.command.role
        expected = self._running.get(name) is not child
        if not expected:
            del self._running[name]
        if self._outcome is not None:
            if role == "learner" and child.exit_code != 0 and self._outcome.exit_code == EXIT_DONE:
                text = f"{self._outcome.reason}; but the {name} failed at the end ({child.how_it_ended}); last lines:"
                self._outcome = Outcome(EXIT_FAILED, f"{text}\n{child.last_lines()}")
            return
        processes.kill(lambda: processes.session(child))  # what it started must not outlive it
        if expected:
            return
        if child.exit_code == 0 and role != "generator":
            # Regular. The learner may leave while a last evaluation goes on, the broker watches over that; after the
            # broker itself only its word that the run is done can be on its way.
            if role == "broker":
                self._done_by = time.monotonic() + GOODBYE_S
            return
        if role == "generator" and child.exit_code != EXIT_CONFIG and self._may_restart(name):
            incarnation = self._incarnations.get(name, 0) + 1
            self._incarnations[name] = incarnation
            self._tell_left(role, name, self._places.number(incarnation - 1), child.how_it_ended)
            text = f"{name} ended unexpectedly ({child.how_it_ended}); started again as incarnation {incarnation}"
            self._report("event", {"level": "warning", "text": f"{text}\n{child.last_lines()}".rstrip()})
            self._launch(launch.generator(self._config, self._places, int(name.removeprefix("g")), incarnation))
            return
        if child.exit_code is not None and child.exit_code < 0 and self._start_again(child):
            return
        again = f" {RESTARTS + 1} times{self._lately(name)}" if self._restarted_at[name] else ""
        reason = f"{name} ended unexpectedly{again} ({child.how_it_ended}); last lines of {self._logs / name}.log:"
        self._finish(EXIT_FAILED, f"{reason}\n{child.last_lines() or '(nothing was written)'}")

    def _start_again(self, child: Child) -> bool:
        """Starts a broker or learner that was killed again, if that is wanted and can go on where it was."""
        role, name, config = child.command.role, child.command.name, self._config
        able = config.buffer.durability != "off" if role == "broker" else config.run.task == "train"
        if not (able and config.run.restart_killed and self._may_restart(role)):
            return False
        text = f"{name} ended unexpectedly ({child.how_it_ended}); started again"
        self._report("event", {"level": "warning", "text": f"{text}\n{child.last_lines()}".rstrip()})
        if role == "broker":
            self._launch(launch.broker(config, self._places))
            return True
        self._remove(self._of_role("learner"))
        self._tell_left(role, "learner", 0, child.how_it_ended)
        return True

    def _tell_left(self, role: str, name: str, incarnation: int, how: str) -> None:
        """Tells the broker at once, so that it need not wait; for the learner its answer is waited for."""
        body = {"role": role, "name": name, "incarnation": incarnation, "reason": f"its process ended ({how})"}

        def answer(future: Any) -> None:
            if future.exception() is None and role == "learner":
                reply = future.result().body
                self._inbox.put(_Fenced(reply["step"], reply["version"]))

        if self._client is not None and self._client.lost is None:
            with suppress(Error):
                self._client.send("left", body).add_done_callback(answer)

    def _bring_back(self, broker: _Fenced) -> None:
        """Starts the learner again, from its newest checkpoint. Where steps are lost with it the broker takes them
        back, and generators, which have their weights, begin anew.
        """
        folder = self._places.run_folder
        try:
            found = resuming.find(self._config, folder, tidy=True)
        except Error as error:
            self._finish(EXIT_FAILED, f"the learner cannot go on: {error}")
            return
        lost = broker.step - found.step
        if lost:
            self._remove([*self._of_role("broker"), *self._of_role("generator")])
            for path in self._places.weights_folder.glob("weights-*"):
                path.unlink(missing_ok=True)
            self._places = replace(self._places, resume_step=found.step, returns=self._places.returns + 1)
            self._last_step = found.step
            self._report("resume", {"step": found.step, "version": found.version, "lost_steps": lost})
        for text in resuming.settle(found, folder):
            self._report("event", {"level": "warning", "text": f"learner: {text}"})
        self._places.store.unlink(missing_ok=True)
        self._places = replace(self._places, checkpoint=found.checkpoint)
        self._last_step_at, self._stall_s = time.monotonic(), STALL_S
        if lost:
            self._launch(launch.broker(self._config, self._places))
        for rank in range(self._config.learner.ranks):
            self._launch(launch.learner(self._config, self._places, rank))
        for index in range(self._config.generator.count) if lost else ():
            name = f"g{index}"
            self._incarnations[name] = self._incarnations.get(name, 0) + 1
            self._launch(launch.generator(self._config, self._places, index, self._incarnations[name]))

    def _remove(self, children: list[Child]) -> None:
        """Kills actors that are to begin anew, with all that they started."""
        for child in children:
            del self._running[child.command.name]
            processes.kill(partial(processes.session, child))

    def _lately(self, name: str) -> str:
        """Since when a process was started as often as permitted."""
        passed_s = time.monotonic() - self._restarted_at[name][0]
        return f" in {RESTART_WINDOW_S:g} s" if passed_s <= RESTART_WINDOW_S else f" since step {self._furthest}"

    def _may_restart(self, name: str) -> bool:
        """Whether it was started less often than permitted, lately; of broker and learner, without which no step is
        made, also since the run was further than ever: who dies at the same step each time is not started for ever.
        """
        now, times = time.monotonic(), self._restarted_at[name]
        further_at = self._furthest_at if name in ("broker", "learner") else now
        while times and now - times[0] > RESTART_WINDOW_S and times[0] < further_at:
            times.popleft()
        if len(times) >= RESTARTS:
            return False
        times.append(now)
        return True

    def _on_clock(self, now: float) -> None:
        self._tick()
        if self._outcome is not None:
            return
        if self._done_by is not None and now > self._done_by:
            self._finish(EXIT_FAILED, "the broker ended before the run was done")
        if now - self._last_step_at > self._stall_s:
            self._stall_s *= 2
            self._ask_what_is_waited_for(now - self._last_step_at)

    def _ask_what_is_waited_for(self, waited_s: float) -> None:
        text = f"no step for {waited_s:.0f} s"
        if self._client is None or self._client.lost is not None:
            return

        def answer(future: Any) -> None:
            error = future.exception()
            detail = f"broker: {error}" if error else "waiting for:\n" + "\n".join(future.result().body["waits"])
            self._inbox.put(_Snapshot(f"{text}; {detail}"))

        self._client.call("snapshot", deadline_s=5.0).add_done_callback(answer)

    def _finish(self, exit_code: int, reason: str) -> None:
        """The first reason counts."""
        if self._outcome is None:
            self._outcome = Outcome(exit_code, reason)

    # -- end

    def _end(self, others: set[psutil.Process]) -> None:
        """Ends every process that came to be during the run; `others` were there before it."""
        try:
            self._end_in_order()
        finally:
            processes.kill(lambda: [process for process in processes.descendants() if process not in others])
            processes.reap(self._children)
            if self._client is not None:
                self._client.close()

    def _end_in_order(self) -> None:
        outcome = self._outcome or Outcome(EXIT_FAILED, "supervisor failed")
        signals_before, shutdown_s = self._signals, self._config.transport.shutdown_s
        if outcome.exit_code == EXIT_INTERRUPTED:
            signals_before = 1
            text = f"{outcome.reason}; ending in order, once more kills at once"
            self._report("event", {"level": "info", "text": text})
        if self._ask_to_stop(outcome.reason.splitlines()[0]):
            if outcome.exit_code == EXIT_DONE:
                last = "broker" if self._places.alone else "learner"  # a broker waits for a learner that is elsewhere
                self._wait(lambda: not self._of_role(last), SAVE_S, signals_before)
            self._wait(lambda: not self._running, shutdown_s, signals_before)
        processes.terminate(self._children)
        self._wait(lambda: not self._running, min(shutdown_s, TERMINATE_S), signals_before)

    def _ask_to_stop(self, reason: str) -> bool:
        """Whether the broker could be told; it tells the others."""
        if self._client is None or self._client.lost is not None or "broker" not in self._running:
            return False
        try:
            self._client.send("stop", {"reason": reason})
        except Error:
            return False
        return True

    def _of_role(self, role: str) -> list[Child]:
        return [child for child in self._running.values() if child.command.role == role]

    def _wait(self, condition: Callable[[], bool], timeout_s: float, signals_before: int) -> None:
        """Goes on handling the inbox until the condition holds, the time is over or one more signal came."""
        deadline = time.monotonic() + timeout_s
        while not condition() and self._signals <= signals_before:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self._step(min(left_s, TICK_S))
