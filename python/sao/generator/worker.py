"""The generator: one player, many episodes at once, one connection to the broker.

Everything here runs in one asyncio loop; the connection's I/O thread and the engine's thread only leave things in it. A
slot is an episode in flight: it is free again when the broker has acknowledged what became of the episode. Weights are
taken over while episodes run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from sao.config import Config
from sao.engines.seeds import derive_seed
from sao.errors import ConfigError, EngineError, EnvironmentFailure, Error, ValidationError, WeightsError, WireError
from sao.generator.load import LoadControl
from sao.generator.player import Player, make_player
from sao.generator.weights import Arrivals, WeightsFollower
from sao.rollout.recorder import Assignment, Recorder
from sao.rollout.turns import DivergedError, unpack
from sao.storage.failpoints import failpoint
from sao.trajectory import Trajectory, encode_frames
from sao.transport import messages as m
from sao.transport.client import Callbacks, Client
from sao.transport.keys import client_keys
from sao.transport.sockets import Limits

_CODES = ("bad_logprob", "no_token_capture", "bad_completion", "aborted")  # what an EngineError may begin with
_BACKLOG = 1000  # unanswered messages beyond which no more statistics are sent

log = logging.getLogger(__name__)


class Generator:
    """Plays tasks for the broker until it is stopped.

    player: not yet started. connect: makes the connection to the broker, given its `calls`.
    """

    def __init__(self, player: Player, connect: Callable[..., Client], arrivals: Arrivals | None = None) -> None:
        config = player.config
        self.config, self.player, self.engine = config, player, player.engine
        self._connect = connect
        self._client: Client | None = None
        self._weights = WeightsFollower(player.engine, config.transport.peer_timeout_s, arrivals)
        self._load = LoadControl(config.generator.concurrency)
        self._episodes: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        self._received = 0
        self._slots_due = self._ready = False
        self._stopped = asyncio.Event()
        self._fault: Exception | None = None

    async def run(self) -> None:
        """Starts the engine, joins the broker and works until `stop`; then ends within `transport.shutdown_s`.

        Raises what made it impossible to go on: `TransportError` (broker lost), `EngineError`, `WeightsError`,
        `ConfigError`.
        """
        work = asyncio.create_task(self._work())
        work.add_done_callback(lambda _: self._stopped.set())
        try:
            await self._stopped.wait()
            if work.done():
                work.result()  # it only ends by what it raises
        finally:
            await self._end(work)
        if self._fault is not None:
            raise self._fault

    async def _work(self) -> None:
        player = self.player
        await player.start()
        await self._join()
        await self._weights.take_newest()
        await player.check_engines()
        self._ready = True
        self._send_loaded()
        self._send_slots()
        log.info("ready: weights of version %d (%s)", self.engine.version, self.engine.fingerprint)
        await asyncio.gather(self._weights.follow(self._send_loaded), self._report())

    def stop(self, reason: str, error: Exception | None = None) -> None:
        """Ends `run`, with an error if there is one; what comes later changes nothing."""
        if not self._stopped.is_set():
            log.info("stopping: %s", reason)
            self._fault = error
        self._stopped.set()

    def _fail(self, error: Exception) -> None:
        self.stop(f"{type(error).__name__}: {error}", error)

    async def _end(self, work: asyncio.Task[None]) -> None:
        """Cancels everything and waits for it, together at most `transport.shutdown_s`."""
        self._stopped.set()
        limit_s = self.config.transport.shutdown_s
        deadline = time.monotonic() + limit_s
        tasks = [work, *self._episodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=limit_s / 2)
        try:
            await asyncio.wait_for(self.player.close(), max(0.1, deadline - time.monotonic()))
        except TimeoutError:
            log.warning("engine: did not close within transport.shutdown_s = %g", limit_s)
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        self._weights.close()

    # -- episodes

    def _start(self, task: Assignment) -> None:
        key = (task.split, task.ordinal, task.attempt)
        if self._stopped.is_set() or key in self._episodes:
            return
        failpoint("generator.task")
        episode = asyncio.create_task(self._play(task))
        self._episodes[key] = episode
        episode.add_done_callback(lambda done: self._finished(key, done))

    def _finished(self, key: tuple[str, int, int], episode: asyncio.Task[None]) -> None:
        del self._episodes[key]
        if not episode.cancelled() and (error := episode.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else EngineError(repr(error)))
        if not self._slots_due:  # several episodes that end in one turn of the loop make one message
            self._slots_due = True
            asyncio.get_running_loop().call_soon(self._send_slots)

    async def _play(self, task: Assignment) -> None:
        """One task to its acknowledged end: a trajectory, an evaluation's result, or a failure with its reason."""
        if task.turns and not await self._serves(max(turn.max_version for turn in task.turns)):
            task = self._begin_anew(task, sum(turn.n_tokens for turn in task.turns))
        kept = task.split == "train" and self.config.buffer.prefix_bytes
        recorder = self.player.recorder(task, partial(self._keep, task) if kept else None)
        try:
            await self._deliver(task, await self.player.play(recorder))
            return
        except DivergedError as error:
            log.warning("task %d attempt %d: %s", task.ordinal, task.attempt, error)
            await self._play(self._begin_anew(task, error.sampled_tokens))
            return
        except EnvironmentFailure as failure:
            reason, detail = failure.reason, failure.detail
        except EngineError as error:
            code = str(error).partition(":")[0]
            reason, detail = (code if code in _CODES else "engine_error"), str(error)
            if reason == "engine_error":
                await self.player.check_engines()  # one that is broken for good ends this process, not the run
        except ConfigError as error:
            reason, detail = "reset_error", str(error)
        except (ValidationError, WireError) as error:  # not to be encoded, or larger than a message may be
            reason, detail = "bad_trajectory", str(error)
        await self._give_up(recorder, reason, detail)

    def _keep(self, task: Assignment, part: int, n_tokens: int, version: int, *frames: bytes) -> None:
        self._send(m.KeptTurn(task.ordinal, task.attempt, part, n_tokens, version, frames=frames))

    async def _serves(self, version: int) -> bool:
        """Whether the engine has this version or a newer one, perhaps in a moment."""
        deadline = time.monotonic() + self.config.transport.peer_timeout_s
        while self.engine.version < version and time.monotonic() < deadline:
            await asyncio.sleep(0.05)  # weights on their way; a task in thousands comes here
        return self.engine.version >= version

    def _with_turns(self, task: Assignment, kept: list[tuple[m.Buffer, m.Buffer]]) -> Assignment:
        """The task with the turns that are kept of it; without, when another generator has left something else."""
        try:
            return replace(task, turns=tuple(unpack(header, payload) for header, payload in kept))
        except WireError as error:
            log.warning("task %d attempt %d: %s", task.ordinal, task.attempt, error)
            return self._begin_anew(task, 0)

    def _begin_anew(self, task: Assignment, lost_tokens: int) -> Assignment:
        self._send(m.Diverged(task.ordinal, task.attempt, lost_tokens))
        return replace(task, turns=())

    async def _deliver(self, task: Assignment, trajectory: Trajectory) -> None:
        if task.split == "eval":
            await self._ask(m.EvalResult(task.ordinal, trajectory.max_version, trajectory.reward, task.attempt))
            return
        failpoint("generator.deliver")
        answer = await self._ask(m.FinishedRollout(frames=encode_frames(trajectory)))
        if isinstance(answer, m.Ack) and not answer.accepted:
            log.info("task %d attempt %d: refused: %s", task.ordinal, task.attempt, answer.reason)

    async def _give_up(self, recorder: Recorder, reason: str, detail: str) -> None:
        task = recorder.assignment
        log.warning("task %d attempt %d failed: %s: %s", task.ordinal, task.attempt, reason, detail)
        # An environment may put anything into words; what cannot be encoded must not end this process.
        reason, detail = (text.encode(errors="replace").decode() for text in (reason, detail[:2000]))
        if task.split == "eval":
            await self._ask(m.EvalResult(task.ordinal, self.engine.version, None, task.attempt, reason, detail))
        else:
            await self._ask(m.FailedRollout(task.ordinal, task.attempt, reason, recorder.sampled_tokens, detail))

    # -- the connection to the broker

    async def _join(self) -> None:
        loop = asyncio.get_running_loop()

        def in_loop(call: Callable[[Any], None], argument: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it everyone who cares
                loop.call_soon_threadsafe(call, argument)

        self._client = self._connect(
            calls=Callbacks(
                pushed=partial(in_loop, self._on_push),
                lost=partial(in_loop, self._fail),
                greet=self._greet,
                rejoined=partial(in_loop, self._joined),
                transient=(m.Slots, m.Stats, m.Loaded),
            )
        )
        self._joined(await asyncio.to_thread(self._client.connect))

    def _greet(self, hello: m.Hello) -> m.Hello:
        """Adds the rollouts in flight, which a broker that was started anew does not know."""
        tasks = tuple((ordinal, attempt) for split, ordinal, attempt in list(self._episodes) if split == "train")
        return structs.replace(hello, tasks=tasks)

    def _joined(self, welcome: m.Welcome) -> None:
        """Also when the broker was started again, or had given this generator up: episodes go on, it counts anew."""
        self._received = 0
        had, now = self.engine.version, welcome.version
        if now < had:
            self._fail(WeightsError(f"weights of version {had} were taken back: the run goes on after version {now}"))
            return
        if welcome.weights is not None:
            self._weights.announce(welcome.weights)
        if self._ready:
            self._send_loaded()
            self._send_slots()

    def _on_push(self, message: m.Message) -> None:
        if isinstance(message, m.Tasks):
            self._received += len(message.tasks)
            frames = iter(message.frames)
            for task in message.tasks:
                kept = [(next(frames), next(frames)) for _ in range(task.turns)]
                self._start(self._with_turns(Assignment(task.ordinal, task.attempt, task.seed, task.split), kept))
        elif isinstance(message, m.NewWeights):
            self._weights.announce(message.weights)
        elif isinstance(message, m.CancelTask):
            if episode := self._episodes.get(("train", message.ordinal, message.attempt)):
                episode.cancel()
        elif isinstance(message, m.Stop):
            self.stop(f"broker: {message.reason}")
        else:
            log.warning("message of kind %r is not for a generator", message.kind)

    def _send_loaded(self) -> None:
        self._send(m.Loaded(self.engine.version, self.engine.fingerprint))

    def _send_slots(self) -> None:
        self._slots_due = False
        if not self._stopped.is_set():
            self._send(m.Slots(max(0, self._load.limit - len(self._episodes)), self._received))

    def _send(self, message: m.Message) -> None:
        """Sends without waiting. While the broker is away no statistics pile up."""
        try:
            if self._client is not None and (not isinstance(message, m.Stats) or self._client.pending < _BACKLOG):
                self._client.call(message)
        except Error as error:
            self._fail(error)

    async def _ask(self, message: m.Message) -> m.Message | None:
        """Sends and waits for the acknowledgement; None when the connection is gone, which ends `run`.

        Raises `WireError` for a message that is too large, before anything is sent.
        """
        assert self._client is not None
        try:
            return await asyncio.wrap_future(self._client.call(message))
        except WireError:
            raise
        except Error as error:
            self._fail(error)
            return None

    async def _report(self) -> None:
        """Sends, every heartbeat, how busy the engine was since the last."""
        before, at = self.engine.stats(), time.monotonic()
        while True:
            await asyncio.sleep(self.config.transport.heartbeat_s)
            stats, now = self.engine.stats(), time.monotonic()
            message = m.Stats(
                busy_share=min(1.0, (stats.busy_s - before.busy_s) / (now - at)),
                tokens_per_s=(stats.sampled_tokens - before.sampled_tokens) / (now - at),
                kv_use=stats.kv_use,
                episode_limit=self._load.limit,
            )
            before, at = stats, now
            if self.config.generator.load_control and self._load.take(stats, len(self._episodes)):
                self._send_slots()
            self._send(message)


def make_generator(
    config: Config, endpoint: str, name: str, incarnation: int, weights_folder: Path | None = None, index: int = 0
) -> Generator:
    """A generator as `python -m sao.generator` runs it.

    weights_folder: its own, for weights from other hosts. index: number of this generator on its host. Raises
    `ConfigError` and `EngineError`.
    """
    seed = derive_seed(config.run.seed, name, incarnation)  # no generator, started again or not, repeats draws
    player = make_player(config, seed, name, index)
    limits, keys = Limits.of(config.transport), client_keys(config.transport.keys, endpoint, "generator", name)
    connect = partial(Client, endpoint, role="generator", name=name, incarnation=incarnation, limits=limits, keys=keys)
    arrivals = None if weights_folder is None else Arrivals(config, weights_folder, endpoint, name, incarnation)
    return Generator(player, connect, arrivals)
