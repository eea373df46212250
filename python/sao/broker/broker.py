"""The broker's process: its state behind a mailbox."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Final

from sao import _core
from sao.broker import recovery, report
from sao.broker.ledger_file import LedgerFile
from sao.broker.memory import Memory, last_line, open_log
from sao.broker.state import State
from sao.broker.waits import waits
from sao.config import Config
from sao.errors import ClosedError, ConfigError, LedgerError, TransportError, WireError
from sao.storage.failpoints import failpoint
from sao.transport.actor import LATER, Actor
from sao.transport.keys import server_keys
from sao.transport.mailbox import GOODBYE, Peer, Reply, Request
from sao.transport.messages import Buffer
from sao.transport.sockets import is_local

log = logging.getLogger(__name__)
ROLES: Final = ("generator", "learner", "supervisor", "visitor")  # a visitor reads how the run is set up and stands
WORKERS: Final = ("generator", "learner")
KEPT_MESSAGES: Final = 1000  # for a supervisor that has not joined yet
TICK_S: Final = 1.0
MAX_TOKENS: Final = 1 << 40  # that one rollout may claim to have sampled; no number of a turn is larger
AWAY: Final = ("silent", "unreachable")  # how reasons begin with which a peer may be back
LEARNER_GRACE_S: Final = 60.0  # for a learner that has left to come back


class Broker:
    """Serves `endpoint` until the run is done and its workers have left; after `end`, `shutdown_s` later at the latest.

    The ledger is `<run_folder>/ledger.log`, the log (`buffer.durability`) is in `<run_folder>/wal`. A broker of a run
    with a log goes on where the one before it was killed; without, tasks that were left unfinished are started again.
    With `resume_step` the learner has lost later steps: what was trained in them is played again. `line` numbers such
    returns, so that a broker that is killed after one does not return once more. Raises `TransportError` when it cannot
    listen and `LedgerError` when the ledger is damaged.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        endpoint: str,
        resume_step: int | None = None,
        line: int | None = None,
    ) -> None:
        self._config, self._line = config, line or 0
        self._early: deque[tuple[str, dict[str, Any]]] = deque(maxlen=KEPT_MESSAGES)
        transport = config.transport
        keys = server_keys(transport.keys, endpoint)
        if keys is None and not (is_local(endpoint) or transport.allow_remote):
            raise ConfigError(f"{endpoint} is not local: set transport.keys, or transport.allow_remote = true")
        self.actor = Actor(
            endpoint,
            on_join=self._join,
            on_leave=self._leave,
            max_message_bytes=transport.max_message_bytes,
            heartbeat_s=transport.heartbeat_s,
            peer_timeout_s=transport.peer_timeout_s,
            keys=keys,
            commit=self._persist if config.buffer.durability != "off" else None,
        )
        self._mailbox = self.actor.mailbox
        self.memory: Memory | None = None
        try:
            self.ledger = _core.Ledger(str(run_folder / "ledger.log"))
            self._ledger_file = LedgerFile(self.ledger, run_folder, config.buffer.ledger_growth_bytes)
            log_ = open_log(config, run_folder)
            if resume_step is not None and log_ is not None and line is not None and last_line(log_) == line:
                resume_step = None  # an earlier broker has gone back already
            back = [] if resume_step is None else self.ledger.rewind(resume_step)
            failpoint("ledger.rewound")
            limit = config.buffer.prefix_bytes
            self.memory = Memory(log_, self.ledger, goes_on=resume_step is None, prefix_bytes=limit)
            self.state = State(config, self.ledger, self, time.monotonic(), resume_step, self.memory)
        except BaseException:
            self.actor.close(0)
            if self.memory is not None:
                self.memory.close()
            raise
        self._takes: dict[Hashable, Request] = {}
        self._endings = 0
        self._closing_since: float | None = None
        if back:
            steps, count = f"{back[-1]['step']} to {back[0]['step']}", sum(len(step["tasks"]) for step in back)
            self.state.event("warning", f"steps {steps} are lost; their {count} tasks are played again")
        self._register()

    def run(self) -> None:
        """Serves to the end. Any error but those of peers ends the run with that reason and is raised."""
        log.info("listening on %s", self.actor.endpoint)
        if not is_local(self.actor.endpoint) and self._config.transport.keys is None:
            log.warning("%s is open to the network, without encryption or passwords", self.actor.endpoint)
        try:
            self.actor.run()
        except Exception as error:
            self._crash(error)
            raise
        finally:
            self.actor.close()
            try:
                if self.memory is not None:
                    self.memory.close(remove=self.state.done is not None and not self.state.done["failed"])
            finally:
                self.ledger.close()
                log.info("closed")

    def end(self, reason: str) -> None:
        """Ends the run in order; the second call ends the broker at once. For signal handlers and other threads."""
        self._endings += 1
        if self._endings > 1:
            self.actor.stop()
        else:
            self.actor.call(lambda: self._end(reason))

    # -- how the state's decisions leave (`Wire`)

    def _persist(self) -> None:
        if self.memory is not None:
            self.memory.commit(recovery.note_of(self.state, self._line))

    def to_generator(self, name: str, kind: str, body: dict[str, Any], frames: tuple[Buffer, ...] = ()) -> None:
        """Pushes to one generator."""
        for peer in self._of("generator"):
            if peer.name == name:
                self._push(peer, kind, body, frames)

    def to_learner(self, kind: str, body: dict[str, Any]) -> None:
        """Pushes to the learner."""
        for peer in self._of("learner"):
            self._push(peer, kind, body)

    def to_supervisor(self, kind: str, body: dict[str, Any]) -> None:
        """Pushes to the supervisor; what happens before it joins is kept for it."""
        peers = self._of("supervisor")
        if not peers:
            self._early.append((kind, body))
        for peer in peers:
            self._push(peer, kind, body)

    def batch(self, take: Hashable, body: dict[str, Any], frames: tuple[Buffer, ...]) -> None:
        """Answers a waiting `take`; the frames are views of the buffer's memory and are not copied."""
        failpoint("broker.leased")
        self._answer_take(take, Reply("batch", body, frames))

    def no_batch(self, take: Hashable, reason: str) -> None:
        """Answers a waiting `take`: the run has ended."""
        self._answer_take(take, Reply("stop", {"reason": reason}))

    def _answer_take(self, take: Hashable, reply: Reply) -> None:
        request = self._takes.pop(take, None)
        if request is not None:
            self._mailbox.reply(request, reply)

    def _push(self, peer: Peer, kind: str, body: dict[str, Any], frames: tuple[Buffer, ...] = ()) -> None:
        try:
            self._mailbox.push(peer, kind, body, frames)
        except WireError as error:  # what a peer gave us to pass on is too large: that must not undo a commit
            log.error("%s to %s not sent: %s", kind, peer.name, error)

    # -- messages

    def _register(self) -> None:
        on, actor = self._on, self.actor
        on("slots", "generator", self._slots)
        on("stats", "generator", lambda r, _: self.state.stats(r.peer.name, r.body))
        on("loaded", "generator", lambda r, _: self.state.loaded(r.peer.name, r.body["version"], r.body["fingerprint"]))
        on("trajectory", "generator", self._trajectory)
        on("turn", "generator", self._turn)
        on("diverged", "generator", self._diverged)
        on("failure", "generator", self._failure)
        on("eval_result", "generator", lambda r, now: Reply(body=self.state.eval_result(r.peer.name, r.body, now)))
        on("take", "learner", self._take)
        on("commit", "learner", self._commit)
        on("event", "learner", lambda r, _: self.state.event(r.body["level"], r.body["text"]))
        on("left", "supervisor", self._left)
        on("stop", "supervisor", lambda r, now: self.state.finish(r.body["reason"], now, ok=False))
        actor.on("snapshot", lambda r: Reply("snapshot", self.snapshot()))
        actor.on("config", lambda r: Reply("config", {"config": self._config.model_dump(mode="json")}))
        actor.on("error", self._worker_error, *WORKERS)
        actor.on("cancel", self._cancel)
        actor.every(TICK_S, self._tick)

    def _on(self, kind: str, role: str, handler: Callable[[Request, float], Reply | None]) -> None:
        def handle(request: Request) -> Reply | None:
            now = time.monotonic()
            try:
                return handler(request, now)
            except LedgerError as error:  # never train on books that do not close
                self.state.finish(f"{kind} of {request.peer.name}: {error}", now, ok=False)
                raise

        self.actor.on(kind, handle, role)

    def _slots(self, request: Request, now: float) -> None:
        self.state.slots(request.peer.name, request.body["free"], request.body.get("received"), now)

    def _trajectory(self, request: Request, now: float) -> Reply:
        frames = request.message.frames
        if len(frames) < 2:
            raise WireError(f"trajectory: expected header, payload and its sidecars, got {len(frames)} frames")
        return Reply(body=self.state.trajectory(request.peer.name, frames, now))

    def _turn(self, request: Request, now: float) -> None:
        body, frames = request.body, request.message.frames
        numbers = body["tokens"], body["version"], body["part"]
        if len(frames) != 2 or not all(0 <= number < MAX_TOKENS for number in numbers):
            raise WireError(f"turn: expected 2 frames and numbers in [0, {MAX_TOKENS}), got {len(frames)} and {body}")
        recovery.turn(self.state, body, frames[0], frames[1])

    def _diverged(self, request: Request, now: float) -> None:
        recovery.diverged(self.state, request.body)

    def _failure(self, request: Request, now: float) -> Reply:
        tokens = request.body["sampled_tokens"]
        if not 0 <= tokens < MAX_TOKENS:
            raise WireError(f"failure.sampled_tokens: {tokens} is not in [0, {MAX_TOKENS})")
        return Reply(body=self.state.failure(request.peer.name, request.body, now))

    def _left(self, request: Request, now: float) -> Reply:
        """The supervisor saw a process end: nobody waits for what it would have said."""
        body = request.body
        who = (body["role"], body["name"])
        for peer in [p for p in self._mailbox.peers.values() if (p.role, p.name) == who]:
            if peer.incarnation <= body["incarnation"]:
                self._mailbox.drop(peer, body["reason"])
        if body["role"] == "generator" and body["name"] not in self.state.pool.by_name:
            self.state.told_left(body["name"], now)
        return Reply(body={"step": self.state.step, "version": self.state.versions.current})

    def _commit(self, request: Request, now: float) -> Reply:
        failpoint("broker.commit")
        return Reply(body=self.state.commit(request.body, now))

    def _take(self, request: Request, now: float) -> Reply:
        failpoint("broker.take")
        self._takes[request.key] = request
        try:
            self.state.take(request.key, request.body["n"], now)
        except Exception:
            self._takes.pop(request.key, None)
            raise
        return LATER

    def _cancel(self, request: Request) -> None:
        key = (request.peer.identity, request.body.get("seq", 0))
        self._takes.pop(key, None)
        if request.peer.role == "learner":
            self.state.give_up(key, time.monotonic())

    def _worker_error(self, request: Request) -> None:
        peer, text = request.peer, request.body["text"]
        if peer.role == "learner" and self.state.done is None:
            self.state.finish(f"learner: {text}", time.monotonic(), ok=False)
        else:
            self.state.event("error", f"{peer.role} {peer.name}: {text}")

    def snapshot(self) -> dict[str, Any]:
        """The state's snapshot and the sizes of the transport's own maps."""
        peers, now = list(self._mailbox.peers.values()), time.monotonic()
        return {
            "waits": waits(self.state, peers, self._config.transport, now),
            **report.snapshot(self.state),
            "peers": len(peers),
            "silent_s": {f"{peer.role} {peer.name}": round(now - peer.heard, 1) for peer in peers},
            "pushes_not_acknowledged": sum(peer.link.waiting for peer in peers),
            "answers_kept": sum(peer.link.remembered for peer in peers),
            "requests_waiting": len(self._takes),
            "bad_messages": self._mailbox.bad_messages,
        }

    # -- peers

    def _join(self, peer: Peer) -> dict[str, Any]:
        if peer.role not in ROLES:
            raise TransportError(f"role {peer.role!r} is unknown, expected one of {', '.join(ROLES)}")
        now = time.monotonic()
        if peer.role == "learner":
            others = [other for other in self._of("learner") if other is not peer]
            if others:
                raise TransportError(f"learner {others[0].name} is here already: a run has one learner")
            self.state.learner_joined(peer.hello)
        elif peer.role == "generator":
            if not all(_is_task(task) for task in peer.hello.get("tasks", [])):
                raise WireError("hello.tasks: expected a list of [ordinal, attempt]")
            self.state.generator_joined(peer.name, now)
        log.info("%s %s incarnation %d joined", peer.role, peer.name, peer.incarnation)
        self.actor.call(lambda: self._joined(peer))  # after the welcome has been sent
        return self.state.welcome()

    def _joined(self, peer: Peer) -> None:
        if peer.role == "supervisor":
            early, self._early = self._early, deque(maxlen=KEPT_MESSAGES)
            seen = peer.hello.get("step", 0)
            for kind, body in early:
                if kind != "step" or body["step"] > seen:
                    self._push(peer, kind, body)
            if self.state.done is not None:
                self._push(peer, "done", self.state.done)
        elif self.state.done is not None:
            self._push(peer, "stop", {"reason": self.state.done["reason"]})
        elif peer.role == "generator":
            recovery.claim(self.state, peer.name, peer.hello.get("tasks", []), time.monotonic())
        elif peer.role == "learner":
            self.state.progress(time.monotonic())

    def _leave(self, peer: Peer, reason: str) -> None:
        log.info("%s %s incarnation %d left: %s", peer.role, peer.name, peer.incarnation, reason)
        now = time.monotonic()
        if peer.role == "generator":
            self.state.generator_left(peer.name, reason, now)
        elif peer.role == "learner":
            for key in [key for key, request in self._takes.items() if request.peer is peer]:
                del self._takes[key]
            outage_s = self._config.transport.outage_s if reason.startswith(AWAY) else 0.0
            self.state.learner_left(reason, now, now + outage_s if outage_s else None)
            if reason == GOODBYE:
                self.actor.after(LEARNER_GRACE_S, self._check_learner)

    def _check_learner(self) -> None:
        if not self.state.ending and not self._of("learner"):
            steps = f"step {self.state.step} of {self._config.run.steps}"
            self.state.finish(f"the learner left after {steps} and did not come back", time.monotonic(), ok=False)

    def _of(self, role: str) -> list[Peer]:
        return [peer for peer in self._mailbox.peers.values() if peer.role == role]

    # -- time and the end

    def _tick(self) -> None:
        now = time.monotonic()
        self.state.tick(now)
        if upto := self._ledger_file.due():
            self._persist()  # the log is written before the ledger
            self._ledger_file.fold(upto)
        if self.state.done is None:
            return
        self._closing_since = self._closing_since or now
        peers = self._mailbox.peers.values()
        overdue = now - self._closing_since > self._config.transport.shutdown_s
        told = overdue or all(not peer.link.waiting for peer in peers)
        alone = not any(peer.role in WORKERS for peer in peers)
        if (told and alone) or (overdue and self._endings):
            self.actor.stop()

    def _end(self, reason: str) -> None:
        self.state.finish(reason, time.monotonic(), ok=False)
        self._tick()

    def _crash(self, error: Exception) -> None:
        log.exception("broker failed")
        self._mailbox.release(discard=True)  # what is not on disk was never said
        reason = f"broker: {type(error).__name__}: {error}"
        try:
            self.to_supervisor("done", {"reason": reason, "failed": True, "step": self.state.step})
            for peer in [*self._of("learner"), *self._of("generator")]:
                self._push(peer, "stop", {"reason": reason})
        except ClosedError:
            log.error("peers could not be told")


def _is_task(task: Any) -> bool:
    return isinstance(task, list) and len(task) == 2 and all(type(number) is int and number >= 0 for number in task)
