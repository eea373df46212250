"""The broker's process: the broker behind a mailbox, with its journal on disk."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final, TypeVar

from sao.broker.broker import Broker
from sao.broker.outbox import Outbox
from sao.broker.persistence import Persistence
from sao.config import Config
from sao.errors import ClosedError, LedgerError, TransportError, WireError
from sao.transport import messages as m
from sao.transport.actor import LATER, Actor
from sao.transport.keys import server_keys
from sao.transport.mailbox import GOODBYE, NotYet, Peer, Request
from sao.transport.sockets import Limits

log = logging.getLogger(__name__)
ROLES: Final = ("generator", "learner", "supervisor", "visitor")  # a visitor reads how the run is set up and stands
WORKERS: Final = frozenset(("generator", "learner"))
EARLY_MESSAGES: Final = 1000  # kept for a supervisor that has not joined yet
TICK_S: Final = 1.0
AWAY: Final = ("silent", "unreachable")  # how reasons begin with which a peer may be back
LEARNER_GRACE_S: Final = 60.0  # for a learner that has left to come back
M = TypeVar("M", bound=m.Message)


class Server:
    """Serves `endpoint` until the run is done and its workers have left; after `end`, `shutdown_s` later at the latest.

    Its journal is in `<run_folder>/journal`. Where that is durable (`buffer.durability`) a broker goes on where the one
    before it was killed; elsewhere tasks that were left unfinished are started again.
    With `resume_step` the learner has lost later steps: what was trained in them is played again. `line` numbers such
    returns, so that a broker that is killed after one does not return once more. Raises `TransportError` when it cannot
    listen and `LedgerError` when the ledger is damaged.
    """

    def __init__(
        self, config: Config, run_folder: Path, endpoint: str, resume_step: int | None = None, line: int | None = None
    ) -> None:
        self._config, self._line = config, line or 0
        self._early: deque[m.Message] = deque(maxlen=EARLY_MESSAGES)
        self._endings = 0
        self._closing_since: float | None = None
        self._supervised = True  # until the supervisor has left in order
        with ExitStack() as opened:
            self.actor = Actor(
                endpoint,
                on_join=self._join,
                on_leave=self._leave,
                limits=Limits.of(config.transport),
                keys=server_keys(config.transport.keys, endpoint),
                commit=lambda: self.persistence.commit({**self.broker.note(), "line": self._line}),
            )
            opened.callback(self.actor.close, 0)
            self._mailbox = self.actor.mailbox
            self.persistence = opened.enter_context(closing(Persistence.open(config, run_folder, resume_step, line)))
            outbox = Outbox(self._push, self._mailbox.reply)
            self.broker = Broker(config, self.persistence, outbox, time.monotonic())
            opened.pop_all()
        self._register()

    def run(self) -> None:
        """Serves to the end. Any error but those of peers ends the run with that reason and is raised."""
        log.info("listening on %s", self.actor.endpoint)
        try:
            self.actor.run()
        except Exception as error:
            self._crash(error)
            raise
        finally:
            self.actor.close()
            done = self.broker.run.done
            self.persistence.close(ended=done is not None and not done.failed)
            log.info("closed")

    def end(self, reason: str) -> None:
        """Ends the run in order; the second call ends the broker at once. For signal handlers and other threads."""
        self._endings += 1
        if self._endings > 1:
            self.actor.stop()
        else:
            self.actor.call(lambda: self.broker.finish(reason, ok=False))

    # -- messages in

    def _register(self) -> None:
        on, broker = self._on, self.broker
        on(m.Slots, "generator", broker.slots)
        on(m.Stats, "generator", broker.stats)
        on(m.Loaded, "generator", broker.loaded)
        on(m.KeptTurn, "generator", lambda _, turn, now: broker.book.turn(turn))
        on(m.Diverged, "generator", lambda _, message, now: broker.book.diverged(message.ordinal, message.attempt))
        on(m.FinishedRollout, "generator", broker.trajectory)
        on(m.FailedRollout, "generator", broker.failure)
        on(m.EvalResult, "generator", broker.eval_result)
        on(m.Commit, "learner", lambda _, message, now: broker.commit(message, now))
        on(m.Event, "learner", lambda _, message, now: broker.outbox.event(message.level, message.text))
        on(m.Left, "supervisor", lambda _, message, now: self._left(message, now))
        on(m.Stop, "supervisor", lambda _, message, now: broker.finish(message.reason, ok=False))
        self.actor.on(m.Take, self._take, "learner")
        self.actor.on(m.CancelCall, self._cancel)
        self.actor.on(m.WorkerError, self._worker_error, "generator", "learner")
        self.actor.on(m.GetSnapshot, lambda _: m.Snapshot(self.snapshot()))
        self.actor.on(m.GetConfig, lambda _: m.RunConfig(self._config.model_dump(mode="json")))
        self.actor.every(TICK_S, self._tick)

    def _on(self, kind: type[M], role: str, handler: Callable[[str, M, float], m.Message | None]) -> None:
        def handle(request: Request[M]) -> m.Message | None:
            now = time.monotonic()
            try:
                return handler(request.peer.name, request.message, now)
            except LedgerError as error:  # never train on books that do not close
                self.broker.finish(f"{request.message.kind} of {request.peer.name}: {error}", ok=False)
                raise

        self.actor.on(kind, handle, role)

    def _take(self, request: Request[m.Take]) -> m.Message:
        self.broker.take(request.key, request.message.n, time.monotonic())
        return LATER

    def _cancel(self, request: Request[m.CancelCall]) -> None:
        if request.peer.role == "learner":
            self.broker.give_up((request.peer.identity, request.message.call), time.monotonic())

    def _left(self, message: m.Left, now: float) -> m.Position:
        """The supervisor saw a process end: nobody waits for what it would have sent."""
        who = (message.role, message.name)
        for peer in [p for p in self._mailbox.peers.values() if (p.role, p.name) == who]:
            if peer.incarnation <= message.incarnation:
                self._mailbox.drop(peer, message.reason)
        if message.role == "generator" and message.name not in self.broker.scheduler.generators:
            self.broker.generator_left(message.name, message.reason, now)
        return self.broker.position()

    def _worker_error(self, request: Request[m.WorkerError]) -> None:
        peer, text = request.peer, request.message.text
        if peer.role == "learner":
            self.broker.finish(f"learner: {text}", ok=False)
        else:
            self.broker.outbox.event("error", f"{peer.role} {peer.name}: {text}")

    def snapshot(self) -> dict[str, Any]:
        """The broker's snapshot, what it waits for, and the sizes of the transport's own maps."""
        peers, now = list(self._mailbox.peers.values()), time.monotonic()
        return {
            "waits": self._waits(peers, now),
            **self.broker.report.snapshot(),
            "peers": len(peers),
            "silent_s": {f"{peer.role} {peer.name}": round(now - peer.last_received, 1) for peer in peers},
            "pushes_not_acknowledged": sum(len(peer.link.sent) for peer in peers),
            "answers_kept": sum(len(peer.link.answers) for peer in peers),
            "bad_messages": self._mailbox.bad_messages,
        }

    def _waits(self, peers: list[Peer], now: float) -> list[str]:
        if self.broker.run.done is not None:
            return []
        transport, missing = self._config.transport, WORKERS - {peer.role for peer in peers}
        found = [f"broker: a {role} to join" for role in sorted(missing, reverse=True)] + self.broker.report.waits(now)
        for peer in peers:
            who = f"{peer.role} {peer.name}"
            if peer.link.sent:
                found.append(f"broker: {len(peer.link.sent)} messages to be acknowledged by {who}")
            if (silent_s := now - peer.last_received) > 2 * transport.heartbeat_s:
                limit = f"transport.peer_timeout_s = {transport.peer_timeout_s:g}"
                found.append(f"broker: a sign of life of {who}, for {silent_s:.0f} s of {limit}")
        return found

    # -- decisions out

    def _push(self, role: str, name: str, message: m.Message) -> None:
        """Sends to a peer, or all of a role; what happens before the supervisor joins is kept for it."""
        peers = [peer for peer in self._of(role) if name in ("", peer.name)]
        if role == "supervisor" and not peers:
            self._early.append(message)
        for peer in peers:
            self._push_to(peer, message)

    def _push_to(self, peer: Peer, message: m.Message) -> None:
        try:
            self._mailbox.push(peer, message)
        except WireError as error:  # what a peer gave us to pass on is too large: that must not undo a commit
            log.error("%s to %s not sent: %s", message.kind, peer.name, error)

    # -- peers

    def _join(self, peer: Peer) -> m.Welcome:
        if peer.role not in ROLES:
            raise TransportError(f"role {peer.role!r} is unknown, expected one of {', '.join(ROLES)}")
        if peer.role == "learner":
            if others := [other for other in self._of("learner") if other is not peer]:
                raise TransportError(f"learner {others[0].name} is here already: a run has one learner")
            self._wait_for_return(peer.hello)
            self.broker.learner_joined(peer.hello)
        elif peer.role == "generator":
            self.broker.scheduler.joined(peer.name)
        log.info("%s %s incarnation %d joined", peer.role, peer.name, peer.incarnation)
        self.actor.call(lambda: self._joined(peer))  # after the welcome has been sent
        versions = self.broker.versions
        return m.Welcome(versions.current, versions.weights, self.broker.run.step)

    def _wait_for_return(self, hello: m.Hello) -> None:
        """Raises `NotYet` for a learner that lost steps: only a broker that is started anew can take them back, which
        is the supervisor's to do.
        """
        now, step = self.broker.run.step, hello.step
        other = not hello.session or hello.session != self.broker.leases.session
        if step is not None and step < now and other and self._of("supervisor"):
            version = 0 if hello.weights is None else hello.weights.version
            self._push("supervisor", "", m.LearnerBehind(step, version, now - step))
            raise NotYet

    def _joined(self, peer: Peer) -> None:
        done, now = self.broker.run.done, time.monotonic()
        if peer.role == "supervisor":
            early, self._early = self._early, deque(maxlen=EARLY_MESSAGES)
            for message in early:
                if not isinstance(message, m.StepReport) or message.step > (peer.hello.step or 0):
                    self._push_to(peer, message)
            if done is not None:
                self._push_to(peer, done)
        elif done is not None:
            self._push_to(peer, m.Stop(done.reason))
        elif peer.role == "generator":
            self.broker.generator_joined(peer.name, peer.hello, now)
        elif peer.role == "learner":
            self.broker.progress(now)

    def _leave(self, peer: Peer, reason: str) -> None:
        log.info("%s %s incarnation %d left: %s", peer.role, peer.name, peer.incarnation, reason)
        now = time.monotonic()
        if peer.role == "generator":
            self.broker.generator_left(peer.name, reason, now)
        elif peer.role == "learner":
            outage_s = self._config.transport.outage_s if reason.startswith(AWAY) else 0.0
            self.broker.learner_left(reason, now, now + outage_s if outage_s else None)
            if reason == GOODBYE:
                self.actor.after(LEARNER_GRACE_S, self._check_learner)
        elif peer.role == "supervisor":
            self._supervised = reason != GOODBYE

    def _check_learner(self) -> None:
        run = self.broker.run
        if not run.ending and not self._of("learner"):
            steps = f"step {run.step} of {self._config.run.steps}"
            self.broker.finish(f"the learner left after {steps} and did not come back", ok=False)

    def _of(self, role: str) -> list[Peer]:
        return [peer for peer in self._mailbox.peers.values() if peer.role == role]

    # -- time and the end

    def _tick(self) -> None:
        now = time.monotonic()
        self.broker.tick(now)
        if self.broker.run.done is None:
            return
        self._closing_since = self._closing_since or now
        peers = self._mailbox.peers.values()
        overdue = now - self._closing_since > self._config.transport.shutdown_s
        acknowledged = not self._awaited() and all(not peer.link.sent for peer in peers)
        alone = not any(peer.role in WORKERS for peer in peers)
        if ((acknowledged or overdue) and alone) or (overdue and self._endings):
            self.actor.stop()

    def _awaited(self) -> bool:
        """Whether one who must hear of the end is not here: the supervisor, or a worker of an earlier broker. Nobody is
        awaited after a signal, as when the supervisor is killed.
        """
        scheduler, leases = self.broker.scheduler, self.broker.leases
        if self._endings:
            return False
        no_supervisor = self._supervised and not self._of("supervisor")
        return no_supervisor or leases.back_by is not None or not scheduler.missing <= scheduler.generators.keys()

    def _crash(self, error: Exception) -> None:
        known = self.persistence.ledger.broken  # a failing disk needs no traceback
        log.error("broker failed: %s", error, exc_info=None if known else error)
        self._mailbox.discard()  # what is not on disk was never sent
        try:
            self.broker.close(m.Done(f"broker: {type(error).__name__}: {error}", True, self.broker.run.step))
            self._mailbox.flush()
        except ClosedError:
            log.error("peers could not be reached")
