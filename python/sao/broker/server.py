"""The broker's process: the broker behind a mailbox, with its ledger and log on disk."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Final

from sao import _core
from sao.broker.broker import Broker
from sao.broker.ledger_file import LedgerFile
from sao.broker.memory import Memory, last_line, open_log
from sao.broker.outbox import SUPERVISOR, Address, Outbox
from sao.config import Config
from sao.errors import ClosedError, LedgerError, TransportError, WireError
from sao.storage.failpoints import failpoint
from sao.transport.actor import LATER, Actor
from sao.transport.keys import server_keys
from sao.transport.mailbox import GOODBYE, Peer, Reply, Request
from sao.transport.messages import Buffer, CancelCall

log = logging.getLogger(__name__)
ROLES: Final = ("generator", "learner", "supervisor", "visitor")  # a visitor reads how the run is set up and stands
WORKERS: Final = ("generator", "learner")
EARLY_MESSAGES: Final = 1000  # kept for a supervisor that has not joined yet
TICK_S: Final = 1.0
MAX_TOKENS: Final = 1 << 40  # that one rollout may claim to have sampled; no number of a turn is larger
AWAY: Final = ("silent", "unreachable")  # how reasons begin with which a peer may be back
LEARNER_GRACE_S: Final = 60.0  # for a learner that has left to come back


class Server:
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
        self._early: deque[tuple[str, dict[str, Any]]] = deque(maxlen=EARLY_MESSAGES)
        self._takes: dict[Hashable, Request] = {}
        self._endings = 0
        self._closing_since: float | None = None
        transport = config.transport
        keys = server_keys(transport.keys, endpoint)
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
            outbox, now = Outbox(self._push, self._answer_take), time.monotonic()
            self.broker = Broker(config, self.ledger, outbox, now, resume_step, self.memory)
        except BaseException:
            self.actor.close(0)
            if self.memory is not None:
                self.memory.close()
            raise
        if back:
            steps, count = f"{back[-1]['step']} to {back[0]['step']}", sum(len(step["tasks"]) for step in back)
            outbox.event("warning", f"steps {steps} are lost; their {count} tasks are played again")
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
            try:
                if self.memory is not None:
                    done = self.broker.run.done
                    self.memory.close(remove=done is not None and not done["failed"])
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

    # -- messages in

    def _register(self) -> None:
        on, actor = self._on, self.actor
        on("slots", "generator", self._slots)
        on("stats", "generator", self._stats)
        on("loaded", "generator", self._loaded)
        on("turn", "generator", self._turn)
        on("diverged", "generator", self._diverged)
        on("trajectory", "generator", self._trajectory)
        on("failure", "generator", self._failure)
        on("eval_result", "generator", self._eval_result)
        on("take", "learner", self._take)
        on("commit", "learner", self._commit)
        on("event", "learner", lambda r, _: self.broker.outbox.event(r.body["level"], r.body["text"]))
        on("left", "supervisor", self._left)
        on("stop", "supervisor", lambda r, now: self.broker.finish(r.body["reason"], now, ok=False))
        actor.on("snapshot", lambda r: Reply("snapshot", self.snapshot()))
        actor.on("config", lambda r: Reply("config", {"config": self._config.model_dump(mode="json")}))
        actor.on("error", self._worker_error, *WORKERS)
        actor.on(CancelCall, self._cancel)
        actor.every(TICK_S, self._tick)

    def _on(self, kind: str, role: str, handler: Callable[[Request, float], Reply | None]) -> None:
        def handle(request: Request) -> Reply | None:
            now = time.monotonic()
            try:
                return handler(request, now)
            except LedgerError as error:  # never train on books that do not close
                self.broker.finish(f"{kind} of {request.peer.name}: {error}", now, ok=False)
                raise

        self.actor.on(kind, handle, role)

    def _slots(self, request: Request, now: float) -> None:
        self.broker.slots(request.peer.name, request.body["free"], request.body.get("received"), now)

    def _stats(self, request: Request, now: float) -> None:
        self.broker.scheduler.generators[request.peer.name].report = request.body

    def _loaded(self, request: Request, now: float) -> None:
        self.broker.loaded(request.peer.name, request.body["version"], request.body["fingerprint"])

    def _turn(self, request: Request, now: float) -> None:
        body, frames = request.body, request.message.frames
        numbers = body["part"], body["tokens"], body["version"]
        if len(frames) != 2 or not all(0 <= number < MAX_TOKENS for number in numbers):
            raise WireError(f"turn: expected 2 frames and numbers in [0, {MAX_TOKENS}), got {len(frames)} and {body}")
        self.broker.book.turn(body["ordinal"], body["attempt"], *numbers, *frames)

    def _diverged(self, request: Request, now: float) -> None:
        self.broker.book.diverged(request.body["ordinal"], request.body["attempt"])

    def _trajectory(self, request: Request, now: float) -> Reply:
        frames = request.message.frames
        if len(frames) < 2:
            raise WireError(f"trajectory: expected header, payload and its sidecars, got {len(frames)} frames")
        return _verdict(self.broker.trajectory(request.peer.name, frames, now))

    def _failure(self, request: Request, now: float) -> Reply:
        body, tokens = request.body, request.body["sampled_tokens"]
        if not 0 <= tokens < MAX_TOKENS:
            raise WireError(f"failure.sampled_tokens: {tokens} is not in [0, {MAX_TOKENS})")
        task, reason, detail = (body["ordinal"], body["attempt"]), body["reason"], body.get("detail", "")
        return _verdict(self.broker.failure(request.peer.name, *task, reason, detail, tokens, now))

    def _eval_result(self, request: Request, now: float) -> Reply:
        body = request.body
        reward, success, version = body["reward"], body.get("success"), body["version"]
        reason, detail = body.get("reason") or "", body.get("detail", "")
        name, ordinal = request.peer.name, body["ordinal"]
        return _verdict(self.broker.eval_result(name, ordinal, reward, success, reason, detail, version, now))

    def _take(self, request: Request, now: float) -> Any:
        failpoint("broker.take")
        self._takes[request.key] = request
        try:
            self.broker.take(request.key, request.body["n"], now)
        except Exception:
            self._takes.pop(request.key, None)
            raise
        return LATER

    def _cancel(self, request: Request[CancelCall]) -> None:
        key = (request.peer.identity, request.message.call)
        self._takes.pop(key, None)
        if request.peer.role == "learner":
            self.broker.give_up(key, time.monotonic())

    def _commit(self, request: Request, now: float) -> Reply:
        failpoint("broker.commit")
        body = request.body
        tokens = body["trained_tokens"], body["masked_tokens"]
        last = body.get("done", "")
        self.broker.commit(body["lease"], body["step"], body["weights"], *tokens, body["metrics"], now, last)
        return Reply(body=self._standing())

    def _left(self, request: Request, now: float) -> Reply:
        """The supervisor saw a process end: nobody waits for what it would have sent."""
        body = request.body
        who = (body["role"], body["name"])
        for peer in [p for p in self._mailbox.peers.values() if (p.role, p.name) == who]:
            if peer.incarnation <= body["incarnation"]:
                self._mailbox.drop(peer, body["reason"])
        if body["role"] == "generator" and body["name"] not in self.broker.scheduler.generators:
            self.broker.generator_left(body["name"], body["reason"], now)
        return Reply(body=self._standing())

    def _worker_error(self, request: Request) -> None:
        peer, text = request.peer, request.body["text"]
        if peer.role == "learner":
            self.broker.finish(f"learner: {text}", time.monotonic(), ok=False)
        else:
            self.broker.outbox.event("error", f"{peer.role} {peer.name}: {text}")

    def _standing(self) -> dict[str, Any]:
        return {"step": self.broker.run.step, "version": self.broker.versions.current}

    def snapshot(self) -> dict[str, Any]:
        """The broker's snapshot, what it waits for, and the sizes of the transport's own maps."""
        peers, now = list(self._mailbox.peers.values()), time.monotonic()
        return {
            "waits": self._waits(peers, now),
            **self.broker.report.snapshot(),
            "peers": len(peers),
            "silent_s": {f"{peer.role} {peer.name}": round(now - peer.heard, 1) for peer in peers},
            "pushes_not_acknowledged": sum(peer.link.waiting for peer in peers),
            "answers_kept": sum(peer.link.remembered for peer in peers),
            "requests_waiting": len(self._takes),
            "bad_messages": self._mailbox.bad_messages,
        }

    def _waits(self, peers: list[Peer], now: float) -> list[str]:
        if self.broker.run.done is not None:
            return []
        transport, missing = self._config.transport, {"learner", "generator"} - {peer.role for peer in peers}
        found = [f"broker: a {role} to join" for role in sorted(missing, reverse=True)] + self.broker.report.waits(now)
        for peer in peers:
            who = f"{peer.role} {peer.name}"
            if peer.link.waiting:
                found.append(f"broker: {peer.link.waiting} messages to be acknowledged by {who}")
            if (silent_s := now - peer.heard) > 2 * transport.heartbeat_s:
                limit = f"transport.peer_timeout_s = {transport.peer_timeout_s:g}"
                found.append(f"broker: a sign of life of {who}, for {silent_s:.0f} s of {limit}")
        return found

    # -- decisions out

    def _persist(self) -> None:
        if self.memory is not None:
            self.memory.commit({**self.broker.note(), "line": self._line})

    def _push(self, to: Address, kind: str, body: dict[str, Any], frames: tuple[Buffer, ...] = ()) -> None:
        """Sends to the peers of an address; what happens before the supervisor joins is kept for it."""
        peers = [peer for peer in self._of(to.role) if to.name in (None, peer.name)]
        if to == SUPERVISOR and not peers:
            self._early.append((kind, body))
        for peer in peers:
            self._push_to(peer, kind, body, frames)

    def _push_to(self, peer: Peer, kind: str, body: dict[str, Any], frames: tuple[Buffer, ...] = ()) -> None:
        try:
            self._mailbox.push(peer, kind, body, frames)
        except WireError as error:  # what a peer gave us to pass on is too large: that must not undo a commit
            log.error("%s to %s not sent: %s", kind, peer.name, error)

    def _answer_take(self, take: Hashable, kind: str, body: dict[str, Any], frames: tuple[Buffer, ...]) -> None:
        if kind == "batch":
            failpoint("broker.leased")
        request = self._takes.pop(take, None)
        if request is not None:
            self._mailbox.reply(request, Reply(kind, body, frames))

    # -- peers

    def _join(self, peer: Peer) -> dict[str, Any]:
        if peer.role not in ROLES:
            raise TransportError(f"role {peer.role!r} is unknown, expected one of {', '.join(ROLES)}")
        hello = peer.hello
        if peer.role == "learner":
            others = [other for other in self._of("learner") if other is not peer]
            if others:
                raise TransportError(f"learner {others[0].name} is here already: a run has one learner")
            weights = None if hello.weights is None else hello.weights.to_message()
            self.broker.learner_joined(hello.step, weights, hello.session)
        elif peer.role == "generator":
            self.broker.scheduler.joined(peer.name)
        log.info("%s %s incarnation %d joined", peer.role, peer.name, peer.incarnation)
        self.actor.call(lambda: self._joined(peer))  # after the welcome has been sent
        return {**self._standing(), "weights": self.broker.versions.weights}

    def _joined(self, peer: Peer) -> None:
        done, now = self.broker.run.done, time.monotonic()
        if peer.role == "supervisor":
            early, self._early = self._early, deque(maxlen=EARLY_MESSAGES)
            seen = peer.hello.step or 0
            for kind, body in early:
                if kind != "step" or body["step"] > seen:
                    self._push_to(peer, kind, body)
            if done is not None:
                self._push_to(peer, "done", done)
        elif done is not None:
            self._push_to(peer, "stop", {"reason": done["reason"]})
        elif peer.role == "generator":
            self.broker.generator_holds(peer.name, peer.hello.tasks, now)
        elif peer.role == "learner":
            self.broker.progress(now)

    def _leave(self, peer: Peer, reason: str) -> None:
        log.info("%s %s incarnation %d left: %s", peer.role, peer.name, peer.incarnation, reason)
        now = time.monotonic()
        if peer.role == "generator":
            self.broker.generator_left(peer.name, reason, now)
        elif peer.role == "learner":
            for key in [key for key, request in self._takes.items() if request.peer is peer]:
                del self._takes[key]
            outage_s = self._config.transport.outage_s if reason.startswith(AWAY) else 0.0
            self.broker.learner_left(reason, now, now + outage_s if outage_s else None)
            if reason == GOODBYE:
                self.actor.after(LEARNER_GRACE_S, self._check_learner)

    def _check_learner(self) -> None:
        run = self.broker.run
        if not run.ending and not self._of("learner"):
            steps = f"step {run.step} of {self._config.run.steps}"
            self.broker.finish(f"the learner left after {steps} and did not come back", time.monotonic(), ok=False)

    def _of(self, role: str) -> list[Peer]:
        return [peer for peer in self._mailbox.peers.values() if peer.role == role]

    # -- time and the end

    def _tick(self) -> None:
        now = time.monotonic()
        self.broker.tick(now)
        if upto := self._ledger_file.due():
            self._persist()  # the log is written before the ledger
            self._ledger_file.fold(upto)
        if self.broker.run.done is None:
            return
        self._closing_since = self._closing_since or now
        peers = self._mailbox.peers.values()
        overdue = now - self._closing_since > self._config.transport.shutdown_s
        sent = overdue or all(not peer.link.waiting for peer in peers)
        alone = not any(peer.role in WORKERS for peer in peers)
        if (sent and alone) or (overdue and self._endings):
            self.actor.stop()

    def _end(self, reason: str) -> None:
        self.broker.finish(reason, time.monotonic(), ok=False)
        self._tick()

    def _crash(self, error: Exception) -> None:
        log.exception("broker failed")
        self._mailbox.release(discard=True)  # what is not on disk was never sent
        reason = f"broker: {type(error).__name__}: {error}"
        try:
            self.broker.outbox.done({"reason": reason, "failed": True, "step": self.broker.run.step})
        except ClosedError:
            log.error("peers could not be reached")


def _verdict(reason: str) -> Reply:
    return Reply(body={"accepted": not reason, "reason": reason})
