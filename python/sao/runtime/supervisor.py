"""The life of a run: its processes are started, watched, started again when they were killed, and ended in order.

One thread decides. Whatever happens elsewhere (a child ends, the broker sends a message, a signal comes) puts a call
into its inbox, and it makes these calls one after the other. Whatever ends the run, no process of it is left: first a
message asks all to stop, then SIGTERM, then SIGKILL to the whole family.
"""

import math
import queue
import signal
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from msgspec import structs

from sao.config import Config
from sao.errors import Error
from sao.runtime import launch
from sao.runtime import resume as resuming
from sao.runtime.processes import Child, Command, Family, on_signals
from sao.storage import checkpoints
from sao.storage.failpoints import failpoint
from sao.transport import messages
from sao.transport.client import Callbacks, Client
from sao.transport.keys import SUPERVISOR, client_keys
from sao.transport.messages import Message
from sao.transport.sockets import Limits

RESTARTS: Final = 3  # of one process within the window; one more ends the run
RESTART_WINDOW_S: Final = 300.0
START_S: Final = 60.0  # for the broker to answer
GOODBYE_S: Final = 5.0  # between the broker's regular exit and its message that the run is done
WORD_S: Final = 1.0  # between an actor's end that the broker knows of and the broker's message why
SAVE_S: Final = 600.0  # for the learner's last checkpoint, after its last sign of work
BUSY: Final = 0.05  # share of a CPU from which a process counts as at work
PROGRESS_S: Final = 10.0  # between two lines on what is waited for at the end
STALL_S: Final = 120.0  # without a step; doubled at each report
SNAPSHOT_S: Final = 5.0  # for the broker to say what is waited for
TERMINATE_S: Final = 5.0  # between SIGTERM and SIGKILL, or transport.shutdown_s if that is less
TICK_S: Final = 1.0  # the live view's clock

EXIT_DONE, EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130

Report = Callable[[str, dict[str, Any]], None]


class Outcome(NamedTuple):
    """The end of a run: the exit code of `sao train` and the reason."""

    exit_code: int
    reason: str


class Restarts:
    """The limit on restarts: of each process at most `RESTARTS` within `RESTART_WINDOW_S`.

    Broker and learner, without which no step is made, also at most so often since the run was further than ever: who
    dies at the same step each time is not started for ever.
    """

    def __init__(self) -> None:
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self._furthest, self._furthest_at = 0, time.monotonic()

    def step(self, step: int) -> None:
        """The run has come to this step."""
        if step > self._furthest:
            self._furthest, self._furthest_at = step, time.monotonic()

    def permit(self, name: str) -> bool:
        """Whether the process may be started again now; that is counted."""
        now, times = time.monotonic(), self._times[name]
        further_at = self._furthest_at if name in ("broker", "learner") else now
        while times and now - times[0] > RESTART_WINDOW_S and times[0] < further_at:
            times.popleft()
        if len(times) >= RESTARTS:
            return False
        times.append(now)
        return True

    def described(self, name: str) -> str:
        """How often the process has ended and since when; empty if it was never started again."""
        if not (times := self._times[name]):
            return ""
        lately = time.monotonic() - times[0] <= RESTART_WINDOW_S
        return f" {len(times) + 1} times " + (
            f"in {RESTART_WINDOW_S:g} s" if lately else f"since step {self._furthest}"
        )


class Supervisor:
    """One run. `report(kind, fields)` takes step, eval and event records; `tick()` is called about once a second.

    `last_step`: the step that was reported last, 0 before the first.
    """

    def __init__(
        self, config: Config, places: launch.Places, logs: Path, report: Report, tick: Callable[[], None] = lambda: None
    ) -> None:
        self._config, self._places, self._logs = config, places, logs
        self._report, self._tick = report, tick
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._family = Family()
        self._running: dict[str, Child] = {}
        self._incarnations = Counter[int]()
        self._restarts = Restarts()
        self._client: Client | None = None
        self._outcome: Outcome | None = None
        self._signals = self.last_step = 0
        self._left = deque[tuple[float, Child]]()  # generators that have ended in order, and until when that is normal
        self._done_by, self._without_word = math.inf, "the broker ended before the run was done"
        self._waiting_since, self._stall_s = time.monotonic(), STALL_S

    def run(self) -> Outcome:
        """Runs to the end and returns how it ended. Call it from the main thread; signals are put back afterwards."""
        with on_signals(self._on_signal), ExitStack() as last, self._family:
            try:
                self._start(last)
                while self._outcome is None:
                    self._wait_once()
            except BaseException as error:
                self._finish(EXIT_FAILED, f"supervisor: {type(error).__name__}: {error}")
                raise
            finally:
                self._end()
        return self._outcome

    # -- start

    def _start(self, last: ExitStack) -> None:
        for command in launch.everything(self._config, self._places):
            self._launch(command)
        transport = self._config.transport
        self._client = Client(
            self._places.endpoint,
            role=SUPERVISOR,
            name=SUPERVISOR,
            limits=Limits.of(transport),
            keys=client_keys(transport.keys, self._places.endpoint, SUPERVISOR, SUPERVISOR),
            calls=Callbacks(
                pushed=lambda message: self._later(self._on_message, message),
                lost=lambda error: self._later(self._finish, EXIT_FAILED, str(error)),
                greet=lambda hello: structs.replace(hello, step=self.last_step),
            ),
        )
        last.callback(self._client.close)
        threading.Thread(target=self._join, args=(self._client,), daemon=True).start()
        failpoint("supervisor.started")

    def _join(self, client: Client) -> None:
        try:
            client.connect(deadline_s=START_S)
        except Error as error:
            self._later(self._finish, EXIT_FAILED, f"broker: {error}")

    def _launch(self, command: Command) -> None:
        log = self._logs / f"{command.name}.log"
        self._running[command.name] = self._family.start(command, log, lambda child: self._later(self._on_exit, child))

    def _launch_generator_again(self, index: int) -> None:
        self._incarnations[index] += 1
        self._launch(launch.generator(self._config, self._places, index, self._incarnations[index]))

    # -- watch

    def _later(self, call: Callable[..., None], *arguments: Any) -> None:
        """Has the one thread that decides make this call; for all other threads."""
        self._inbox.put(partial(call, *arguments))

    def _wait_once(self, timeout_s: float = TICK_S) -> None:
        """Makes one call from the inbox, or none in this time, and looks at the clock."""
        with suppress(queue.Empty):
            self._inbox.get(timeout=timeout_s)()
        self._family.reap()
        self._tick()
        now = time.monotonic()
        if self._outcome is not None:
            return
        if now > self._done_by:
            self._finish(EXIT_FAILED, self._without_word)
        used = (self._places.run_folder, self._places.weights_folder, self._places.store.parent)
        while self._left and now > self._left[0][0]:
            _, child = self._left.popleft()
            if child.command.name not in self._running:
                self._replace(child)
        if gone := [str(folder) for folder in used if not folder.is_dir()]:  # those who look for it would wait for ever
            self._finish(EXIT_FAILED, f"{' and '.join(gone)}: removed while the run was using it")
        if now - self._waiting_since > self._stall_s:
            self._stall_s *= 2
            text = f"no step for {now - self._waiting_since:.0f} s"
            self._ask(messages.GetSnapshot(), partial(self._on_snapshot, text), SNAPSHOT_S)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        self._later(self._finish, EXIT_INTERRUPTED, f"interrupted by {signal.Signals(number).name}")

    def _on_message(self, message: Message) -> None:
        if isinstance(message, messages.StepReport):
            if message.step <= self.last_step:
                return  # sent before, by a broker that was killed since
            failpoint("supervisor.step")
            self.last_step = message.step
            self._waiting_since, self._stall_s = time.monotonic(), STALL_S
            self._restarts.step(message.step)
            self._report("step", {"step": message.step, **message.metrics})
        elif isinstance(message, messages.LearnerBehind):
            self._on_learner_behind(message)
        elif isinstance(message, messages.Done):
            self._finish(EXIT_FAILED if message.failed else EXIT_DONE, message.reason)
        elif isinstance(message, messages.EvalReport | messages.Event):
            fields = {name: value for name, value in structs.asdict(message).items() if name != "frames"}
            self._report("eval" if isinstance(message, messages.EvalReport) else "event", fields)

    def _on_snapshot(self, text: str, answer: Future[Message]) -> None:
        if error := answer.exception():
            self._warn(f"{text}; broker: {error}")
        elif isinstance(snapshot := answer.result(), messages.Snapshot):
            self._warn("\n".join([f"{text}; waiting for:", *snapshot.tree["waits"]]))

    def _warn(self, text: str) -> None:
        self._report("event", {"level": "warning", "text": text})

    def _ask(self, message: Message, then: Callable[[Future[Message]], None], deadline_s: float | None = None) -> None:
        """Sends to the broker, unless it is lost; `then` takes the answer."""
        if self._client is not None and self._client.lost is None:
            with suppress(Error):
                asked = self._client.call(message, deadline_s=deadline_s)
                asked.add_done_callback(lambda answer: self._later(then, answer))

    # -- restart

    def _on_exit(self, child: Child) -> None:
        name, role = child.command.name, child.command.role
        if not (removed := self._running.get(name) is not child):
            del self._running[name]
        if self._outcome is not None:
            if role == "learner" and child.returncode != 0 and self._outcome.exit_code == EXIT_DONE:
                text = f"{self._outcome.reason}; but the {name} failed at the end ({child.how_it_ended}); last lines:"
                self._outcome = Outcome(EXIT_FAILED, f"{text}\n{child.last_lines()}")
            return
        child.kill_session()  # what it started must not outlive it
        if removed:
            return
        if child.returncode != 0:
            self._replace(child)
        elif role == "generator":  # it was asked to stop: that the run is done may be on its way here
            self._left.append((time.monotonic() + WORD_S, child))
        elif role == "broker":  # only its message that the run is done can be on its way
            self._done_by = time.monotonic() + GOODBYE_S
        # The learner may leave while a last evaluation goes on; the broker watches over that.

    def _replace(self, child: Child) -> None:
        """Starts a new process in place of one that has ended before its time, or ends the run."""
        name, role = child.command.name, child.command.role
        counted = name if role == "generator" else role
        if self._may_start_again(child) and self._restarts.permit(counted):
            self._start_again(child)
        else:
            ended = f"ended unexpectedly{self._restarts.described(counted)} ({child.how_it_ended})"
            text = f"{name} {ended}; last lines of {self._logs / name}.log:"
            text = f"{text}\n{child.last_lines() or '(nothing was written)'}"
            if role == "broker" and child.returncode > 0 and self.last_step:  # its own word on it may be on its way
                self._done_by, self._without_word = time.monotonic() + WORD_S, text
            else:
                self._finish(EXIT_FAILED, text)

    def _may_start_again(self, child: Child) -> bool:
        """Whether a new process can go on where this one was: broker and learner only if they were killed."""
        role, code, config = child.command.role, child.returncode, self._config
        if role == "generator":
            return code != EXIT_CONFIG
        able = config.buffer.durability != "off" if role == "broker" else config.run.task == "train"
        return able and config.run.restart_killed and code < 0

    def _start_again(self, child: Child) -> None:
        role, name, reason = child.command.role, child.command.name, f"its process ended ({child.how_it_ended})"
        index, again = 0, "started again"
        if role == "generator":
            index = int(name.removeprefix("g"))
            again += f" as incarnation {self._incarnations[index] + 1}"
        self._warn(f"{name} ended unexpectedly ({child.how_it_ended}); {again}\n{child.last_lines()}".rstrip())
        if role == "broker":
            self._launch(launch.broker(self._config, self._places))
        elif role == "learner":
            self._remove("learner")
            left = messages.Left(role=role, name="learner", incarnation=0, reason=reason)
            self._ask(left, self._bring_learner_back)
        else:  # the broker need not wait for signs of life
            incarnation = self._places.number(self._incarnations[index])
            self._ask(messages.Left(role=role, name=name, incarnation=incarnation, reason=reason), lambda _: None)
            self._launch_generator_again(index)

    def _bring_learner_back(self, answer: Future[Message]) -> None:
        """Starts the learner again, from its newest checkpoint, when the broker has no part of the old one left.

        Where steps are lost with it the broker takes them back, and generators, which have their weights, begin anew.
        """
        if self._outcome is not None or answer.exception() is not None:
            return
        broker, folder = answer.result(), self._places.run_folder
        assert isinstance(broker, messages.Position)
        try:
            found = resuming.find(self._config, folder, tidy=True)
        except Error as error:
            self._finish(EXIT_FAILED, f"the learner cannot go on: {error}")
            return
        lost = broker.step - found.step
        if lost:
            self._remove("broker", "generator")
            for path in self._places.weights_folder.glob(messages.WEIGHTS_FILES):
                path.unlink(missing_ok=True)
            self._places = replace(self._places, resume_step=found.step, returns=self._places.returns + 1)
            self.last_step = found.step
            self._report("resume", found.record | {"lost_steps": lost})
        self._waiting_since, self._stall_s = time.monotonic(), STALL_S
        for text in resuming.settle(found, folder):
            self._warn(f"learner: {text}")
        self._places.store.unlink(missing_ok=True)
        self._places = replace(self._places, checkpoint=found.checkpoint)
        if lost:
            self._launch(launch.broker(self._config, self._places))
        for rank in range(self._config.learner.ranks):
            self._launch(launch.learner(self._config, self._places, rank))
        for index in range(self._config.generator.count) if lost else ():
            self._launch_generator_again(index)

    def _on_learner_behind(self, message: messages.LearnerBehind) -> None:
        """Has the broker take back what a learner that was started by hand has lost."""
        behind = (
            f"the learner goes on after step {message.step}, the run after step {message.step + message.lost_steps}"
        )
        if message.step >= max(self.last_step, self._places.resume_step or 0):
            return  # said before, by a broker that is gone
        if not self._places.alone or not self._restarts.permit("learner"):
            self._finish(EXIT_FAILED, behind)
            return
        self._warn(f"{behind}: {message.lost_steps} steps are lost and trained again")
        self._remove("broker")
        self._places = replace(self._places, resume_step=message.step, returns=self._places.returns + 1)
        self.last_step = message.step
        self._waiting_since, self._stall_s = time.monotonic(), STALL_S
        self._report("resume", {name: getattr(message, name) for name in ("step", "version", "lost_steps")})
        self._launch(launch.broker(self._config, self._places))

    def _remove(self, *roles: str) -> None:
        """Kills the actors of these roles, which are to begin anew, with all that they started."""
        for child in self._of_roles(*roles):
            del self._running[child.command.name]
            child.kill_session()

    def _of_roles(self, *roles: str) -> list[Child]:
        return [child for child in self._running.values() if child.command.role in roles]

    # -- end

    def _finish(self, exit_code: int, reason: str) -> None:
        """The first reason counts."""
        if self._outcome is None:
            self._outcome = Outcome(exit_code, reason)

    def _end(self) -> None:
        """Asks all to stop and waits, then SIGTERM; who has not ended then is killed with the family."""
        assert self._outcome is not None
        exit_code, reason = self._outcome.exit_code, self._outcome.reason
        signals_before, shutdown_s = self._signals, self._config.transport.shutdown_s
        if exit_code == EXIT_INTERRUPTED:
            signals_before = 1
            self._report("event", {"level": "info", "text": f"{reason}; ending in order, once more kills at once"})
        if self._ask_to_stop(reason.splitlines()[0]):
            if exit_code == EXIT_DONE:
                last = "broker" if self._places.alone else "learner"  # a broker waits for a learner that is elsewhere
                self._wait_for_checkpoint(last, SAVE_S, signals_before)
            elif exit_code == EXIT_INTERRUPTED:
                self._wait_for_checkpoint("learner", shutdown_s, signals_before)
            self._wait(lambda: not self._running, shutdown_s, signals_before)
        self._family.terminate()
        self._wait(lambda: not self._running, min(shutdown_s, TERMINATE_S), signals_before)

    def _ask_to_stop(self, reason: str) -> bool:
        """Whether the broker could be asked; it asks the others."""
        if self._client is None or self._client.lost is not None or "broker" not in self._running:
            return False
        with suppress(Error):
            self._client.call(messages.Stop(reason=reason))
            return True
        return False

    def _wait_for_checkpoint(self, role: str, quiet_s: float, signals_before: int) -> None:
        """Waits for the end of an actor for as long as it works: it computes, or a checkpoint is being written.

        It is given up after `quiet_s` without a sign of work, `SAVE_S` where a write has begun: a disk may be slow.
        """
        folder, shown = self._places.run_folder / "checkpoints", time.monotonic()
        worked, cpu_s, written = time.monotonic(), 0.0, checkpoints.being_written(folder)
        while (waited_for := self._of_roles(role)) and self._signals <= signals_before:
            self._wait_once()
            now, before = time.monotonic(), (cpu_s, written)
            cpu_s, written = sum(child.cpu_s for child in waited_for), checkpoints.being_written(folder)
            if cpu_s - before[0] > BUSY * TICK_S or written != before[1]:
                worked = now
            if now - worked > (quiet_s if written is None else max(quiet_s, SAVE_S)):
                break
            if now - shown > PROGRESS_S:
                shown = now
                text = "ends its step" if written is None else f"writes its checkpoint: {written / 1e6:.1f} MB so far"
                self._report("event", {"level": "info", "text": f"the {role} {text}"})

    def _wait(self, condition: Callable[[], bool], timeout_s: float, signals_before: int) -> None:
        """Goes on with the inbox until the condition holds, the time is over or one more signal came."""
        deadline = time.monotonic() + timeout_s
        while not condition() and self._signals <= signals_before and (left_s := deadline - time.monotonic()) > 0:
            self._wait_once(min(left_s, TICK_S))
