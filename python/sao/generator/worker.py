"""The generator: one engine, many episodes at once, one line to the broker.

Everything here runs in one asyncio loop; the line's I/O thread and the engine's thread only leave things in it. A slot
is an episode in flight: it is free again when the broker has acknowledged what became of the episode. Weights are taken
over while episodes run; of several versions that came meanwhile only the newest is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sao.config import Config
from sao.engines.base import Engine, Request, check_completion
from sao.engines.seeds import derive_seed
from sao.envs import registry
from sao.envs.protocol import Environment
from sao.errors import (
    ClosedError,
    ConfigError,
    EngineError,
    EnvironmentFailure,
    Error,
    ValidationError,
    WeightsError,
    WireError,
)
from sao.generator.arrivals import Arrivals
from sao.generator.build import make_engine, make_renderer, make_summariser
from sao.generator.line import ClientFactory, in_loop
from sao.generator.load import LoadControl
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compactor
from sao.rollout.episode import Progress, Task, run_episode
from sao.rollout.turns import DivergedError, Send, unpack
from sao.storage.failpoints import failpoint
from sao.trajectory import Trajectory, encode_frames
from sao.transport.client import Client
from sao.transport.keys import client_keys
from sao.transport.messages import Buffer, Message
from sao.transport.reference import WeightsRef

if TYPE_CHECKING:
    from sao.agents.host import AgentHost

_CODES = ("bad_logprob", "no_token_capture", "bad_completion", "aborted")  # what an EngineError may begin with
_HEAPED = 1000  # unanswered messages beyond which no more statistics are sent
_FIRST_TOKEN_S = 120.0  # deadline of the one-token request that shows whether the engine works

log = logging.getLogger(__name__)


class Generator:
    """Plays tasks for the broker until it is told to stop.

    `engine` is not yet started, nor is the fixed `summariser` of compactions. `sampling_seed` comes from
    `derive_seed(run seed, name, incarnation)`: restarted and parallel generators never repeat one another's draws.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        renderer: Renderer,
        connect: ClientFactory,
        sampling_seed: int,
        summariser: Engine | None = None,
        arrivals: Arrivals | None = None,
        name: str = "g0",
    ) -> None:
        self._name = name
        self._agents: AgentHost | None = None
        self._summariser, self._arrivals = summariser, arrivals
        self._compactor = Compactor(config, renderer, summariser) if config.compaction.enabled else None
        self.config, self.engine, self.renderer = config, engine, renderer
        self._connect, self._sampling_seed = connect, sampling_seed
        self._episodes: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        self._received = 0
        self._slots_due = self._ready = False
        self._calls = asyncio.Semaphore(config.env.concurrency) if config.env.concurrency else None
        generator = config.generator
        self._load = LoadControl(generator.concurrency) if generator.load_control else None
        self._wanted: WeightsRef | None = None
        self._newer = asyncio.Event()
        self._stopped = asyncio.Event()
        self._fault: Exception | None = None
        self._client: Client | None = None
        self._make_environment: Callable[..., Any] = registry.factory(config.env.name)
        self.failures: dict[str, int] = {}

    async def run(self) -> None:
        """Starts the engine, joins the broker and works until `stop`; then ends within `transport.shutdown_s`.

        Raises what made it impossible to go on: `TransportError` (broker lost), `EngineError`, `WeightsError`,
        `ConfigError`.
        """
        work = asyncio.create_task(self._work())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # it only ends by what it raises
        finally:
            await self._end([work, stopped])
        if self._fault is not None:
            raise self._fault

    async def _work(self) -> None:
        env = await self._check_environment()
        await self.engine.start(None)
        if self._summariser is not None:
            await self._summariser.start(None)
        welcome = await self._join()
        if welcome.get("weights") and self._wanted is None:
            self._wanted = WeightsRef.from_message(welcome["weights"])
        await self._take_newest()
        await self.check_engine()
        if hasattr(env, "play"):
            from sao.agents.host import AgentHost  # only for agents: it serves HTTP

            self._agents = AgentHost(self.config, self.engine, self.renderer, self._name)
            await self._agents.start(env)
        self._ready = True
        self._tell_loaded()
        self._state_slots()
        log.info("ready: weights of version %d (%s)", self.engine.version, self.engine.fingerprint)
        await asyncio.gather(self._follow_weights(), self._report())

    def stop(self, reason: str) -> None:
        """Ends `run`; safe to call again."""
        if not self._stopped.is_set():
            log.info("stopping: %s", reason)
        self._stopped.set()

    async def check_engine(self) -> None:
        """Asks the engine, and the fixed summariser's, for one token; it must come with its id, log-prob and version.

        Raises `EngineError`.
        """
        for engine in filter(None, (self.engine, self._summariser)):
            await self._check(engine)

    async def _check(self, engine: Engine) -> None:
        ids = self.renderer.stop_token_ids[:1]
        name = f"check-{time.monotonic_ns()}"
        request = Request(name, name, np.asarray(ids, np.int32), 1, 1.0, (), 0)
        try:
            completion = await asyncio.wait_for(engine.generate(request), _FIRST_TOKEN_S)
        except TimeoutError:
            raise EngineError(f"engine: no token within {_FIRST_TOKEN_S:g} s") from None
        check_completion(request, completion)
        if completion.token_ids.size != 1:
            raise EngineError(f"no_token_capture: {completion.token_ids.size} tokens, one was asked for")
        await engine.release(name)

    async def _check_environment(self) -> Any:
        """A wrong `[env]` is found before anything is played. Raises `ConfigError`."""
        env = registry.make(self.config.env.name, **self.config.env.args)
        await env.close()
        return env

    async def _join(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()

        def pushed(message: Message) -> None:
            in_loop(loop, self._on_push, message)

        def lost(error: Error) -> None:
            in_loop(loop, self._fail, error)

        def rejoined(welcome: dict[str, Any]) -> None:
            in_loop(loop, self._rejoined, welcome)

        self._client = self._connect(on_push=pushed, on_lost=lost, on_greet=self._greet, on_rejoin=rejoined)
        return await asyncio.to_thread(self._client.connect)

    def _greet(self) -> dict[str, Any]:
        """What a broker should know that may not have been there when the episodes began."""
        return {"tasks": [[ordinal, attempt] for split, ordinal, attempt in list(self._episodes) if split == "train"]}

    def _rejoined(self, welcome: dict[str, Any]) -> None:
        """The broker was started again, or had given this generator up: episodes go on, it counts anew."""
        self._received = 0
        if welcome["version"] < self.engine.version:
            had, now = self.engine.version, welcome["version"]
            self._fail(WeightsError(f"weights of version {had} were taken back: the run goes on after version {now}"))
            return
        if welcome.get("weights"):
            self._wanted = WeightsRef.from_message(welcome["weights"])
            self._newer.set()
        if self._ready:
            self._tell_loaded()
            self._state_slots()

    # -- what the broker says

    def _on_push(self, message: Message) -> None:
        body = message.body
        if message.kind == "tasks":
            self._received += len(body["tasks"])
            frames = iter(message.frames)
            for task in body["tasks"]:
                kept = [(next(frames), next(frames)) for _ in range(task.get("turns", 0))]
                self._start(self._with_turns(Task(task["ordinal"], task["attempt"], task["seed"], task["split"]), kept))
        elif message.kind == "version":
            self._wanted = WeightsRef.from_message(body)
            self._newer.set()
        elif message.kind == "cancel":
            for (_, ordinal, attempt), episode in self._episodes.items():
                if (ordinal, attempt) == (body.get("ordinal"), body.get("attempt")):
                    episode.cancel()
        elif message.kind == "stop":
            self.stop(f"broker: {body['reason']}")
        else:
            log.warning("message of kind %r is not for a generator", message.kind)

    def _fail(self, error: Exception) -> None:
        """Ends `run` with this error."""
        if not self._stopped.is_set():
            self._fault = error
        self.stop(f"{type(error).__name__}: {error}")

    # -- episodes

    def _start(self, task: Task) -> None:
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
            asyncio.get_running_loop().call_soon(self._state_slots)

    def _state_slots(self) -> None:
        self._slots_due = False
        if not self._stopped.is_set():
            limit = self.config.generator.concurrency if self._load is None else self._load.limit
            free = limit - len(self._episodes)
            self._send("slots", {"free": max(0, free), "received": self._received})

    async def _play(self, task: Task) -> None:
        """One task to its acknowledged end: a trajectory, an evaluation's result, or a failure with its reason."""
        progress = Progress()
        try:
            # Not `registry.make`: its checks were made at the start, and its search for entry points is slow.
            env = self._make_environment(**self.config.env.args)
            if self._agents is not None:
                played = self._agents.play(env, task, sampling_seed=self._sampling_seed, progress=progress)
                await self._deliver(task, await played)
                return
            if task.turns and not await self._serves(max(turn.max_version for turn in task.turns)):
                task = self._begin_anew(task, sum(turn.n_tokens for turn in task.turns))
            trajectory = await run_episode(
                self.engine,
                env,
                self.renderer,
                task,
                self.config,
                sampling_seed=self._sampling_seed,
                progress=progress,
                compactor=self._compactor,
                calls=self._calls,
                send=self._sender(task, env),
            )
            await self._deliver(task, trajectory)
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
                await self.check_engine()  # an engine that is broken for good ends this process, not the run
        except ConfigError as error:
            reason, detail = "reset_error", str(error)
        except (ValidationError, WireError) as error:  # not to be encoded, or larger than a message may be
            reason, detail = "bad_trajectory", str(error)
        await self._give_up(task, reason, detail, progress)

    def _sender(self, task: Task, env: Environment) -> Send | None:
        """Where the turns of this episode go; None where they are not kept."""
        if task.split == "eval" or not (env.replayable and self.config.buffer.prefix_bytes):
            return None

        def send(part: int, n_tokens: int, version: int, header: bytes, payload: bytes) -> None:
            body = {"ordinal": task.ordinal, "attempt": task.attempt, "part": part}
            self._send("turn", {**body, "tokens": n_tokens, "version": version}, (header, payload))

        return send

    async def _serves(self, version: int) -> bool:
        """Whether the engine has this version or a newer one, perhaps in a moment."""
        deadline = time.monotonic() + self.config.transport.peer_timeout_s
        while self.engine.version < version and time.monotonic() < deadline:
            await asyncio.sleep(0.05)  # weights on their way; a task in thousands comes here
        return self.engine.version >= version

    def _with_turns(self, task: Task, kept: list[tuple[Buffer, Buffer]]) -> Task:
        """The task with the turns that are kept of it; without, when another generator has left something else."""
        try:
            return replace(task, turns=tuple(unpack(header, payload) for header, payload in kept))
        except WireError as error:
            log.warning("task %d attempt %d: %s", task.ordinal, task.attempt, error)
            return self._begin_anew(task, 0)

    def _begin_anew(self, task: Task, lost_tokens: int) -> Task:
        self._send("diverged", {"ordinal": task.ordinal, "attempt": task.attempt, "sampled_tokens": lost_tokens})
        return replace(task, turns=())

    async def _deliver(self, task: Task, trajectory: Trajectory) -> None:
        if task.split == "eval":
            body = {
                "ordinal": task.ordinal,
                "attempt": task.attempt,
                "reward": trajectory.reward,
                "version": trajectory.max_version,
            }
            await self._ask("eval_result", body)
            return
        failpoint("generator.deliver")
        reply = await self._ask("trajectory", {}, encode_frames(trajectory))
        if reply is not None and not reply.body.get("accepted", True):
            reason = reply.body.get("reason")
            log.info("task %d attempt %d: refused: %s", task.ordinal, task.attempt, reason)

    async def _give_up(self, task: Task, reason: str, detail: str, progress: Progress) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1
        log.warning("task %d attempt %d failed: %s: %s", task.ordinal, task.attempt, reason, detail)
        # An environment may put anything into words; what cannot be encoded must not end this process.
        reason, detail = (text.encode(errors="replace").decode() for text in (reason, detail[:2000]))
        body: dict[str, Any] = {"ordinal": task.ordinal, "attempt": task.attempt, "reason": reason, "detail": detail}
        if task.split == "eval":
            await self._ask("eval_result", {**body, "reward": None, "version": self.engine.version})
        else:
            await self._ask("failure", {**body, "sampled_tokens": progress.sampled_tokens})

    # -- weights

    async def _follow_weights(self) -> None:
        """Takes over what is announced, again and again. Episodes go on meanwhile."""
        while True:
            await self._newer.wait()
            self._newer.clear()
            if await self._take_newest():
                self._tell_loaded()

    async def _take_newest(self) -> bool:
        """Loads the newest version that was announced, unless the engine serves it; whether it loaded one."""
        loaded = False
        while (ref := self._wanted) is not None and ref.version >= self.engine.version:
            if (ref.version, ref.fingerprint) == (self.engine.version, self.engine.fingerprint):
                break
            self._newer.clear()
            try:
                await self.engine.update_weights(ref if self._arrivals is None else await self._arrivals.local(ref))
                loaded = True
            except WeightsError as error:
                # The file may be gone because there are newer ones: their announcement is then on the way.
                log.warning("weights of version %d not taken: %s", ref.version, error)
                try:
                    await asyncio.wait_for(self._newer.wait(), self.config.transport.peer_timeout_s)
                except TimeoutError:
                    if self._arrivals is None:
                        raise error from None
                    log.warning(
                        "still waiting for weights of version %d; %d is served", ref.version, self.engine.version
                    )
        return loaded

    def _tell_loaded(self) -> None:
        self._send("loaded", {"version": self.engine.version, "fingerprint": self.engine.fingerprint})

    # -- the line

    def _send(self, kind: str, body: dict[str, Any], frames: tuple[bytes, ...] = ()) -> None:
        """Sends without waiting; a lost broker is told by `on_lost`. To one that is away nothing is heaped up."""
        try:
            if self._client is not None and (kind != "stats" or self._client.pending < _HEAPED):
                self._client.send(kind, body, frames)
        except Error as error:
            self._fail(error)

    async def _ask(self, kind: str, body: dict[str, Any], frames: tuple[Buffer, ...] = ()) -> Message | None:
        """Sends and waits for the acknowledgement; None when the line is gone, which ends `run` elsewhere.

        Raises `WireError` for a message that is too large, before anything is sent.
        """
        assert self._client is not None
        try:
            return await asyncio.wrap_future(self._client.send(kind, body, frames))
        except ClosedError:
            return None
        except WireError:
            raise
        except Error as error:
            self._fail(error)
            return None

    async def _report(self) -> None:
        """Tells every heartbeat how busy the engine was since the last."""
        before, at = self.engine.stats(), time.monotonic()
        while True:
            await asyncio.sleep(self.config.transport.heartbeat_s)
            stats, now = self.engine.stats(), time.monotonic()
            body = {
                "busy_share": min(1.0, (stats.busy_s - before.busy_s) / (now - at)),
                "tokens_per_s": (stats.sampled_tokens - before.sampled_tokens) / (now - at),
                "running": stats.running,
                "waiting": stats.waiting,
                "sampled_tokens": stats.sampled_tokens,
                "kv_use": stats.kv_use,
                "preempted": stats.preempted,
                "episode_limit": self.config.generator.concurrency if self._load is None else self._load.limit,
            }
            before, at = stats, now
            if self._load is not None and self._load.take(stats, len(self._episodes)):
                self._state_slots()
            self._send("stats", body)

    async def _end(self, background: list[asyncio.Task[Any]]) -> None:
        """Cancels everything and waits for it, together at most `transport.shutdown_s`."""
        self._stopped.set()
        tasks = [*background, *self._episodes.values()]
        for task in tasks:
            task.cancel()
        deadline = time.monotonic() + self.config.transport.shutdown_s
        if tasks:
            await asyncio.wait(tasks, timeout=self.config.transport.shutdown_s / 2)
        if self._agents is not None:
            await self._agents.close()
        for engine in filter(None, (self.engine, self._summariser)):
            try:
                await asyncio.wait_for(engine.close(), max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                log.warning("engine: did not close within transport.shutdown_s = %g", self.config.transport.shutdown_s)
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        if self._arrivals is not None:
            self._arrivals.close()


def make_generator(
    config: Config, endpoint: str, name: str, incarnation: int, weights_folder: Path | None = None
) -> Generator:
    """A generator as `python -m sao.generator` runs it. `weights_folder`: its own, for weights from other hosts.

    Raises `ConfigError` and `EngineError`.
    """
    registry.factory(config.env.name)  # a wrong name is found before anything slow is imported
    seed = derive_seed(config.run.seed, name, incarnation)
    keys = client_keys(config.transport.keys, endpoint, "generator", name)
    renderer = make_renderer(config)

    def connect(**callbacks: Callable[..., Any]) -> Client:
        return Client(
            endpoint,
            role="generator",
            name=name,
            incarnation=incarnation,
            max_message_bytes=config.transport.max_message_bytes,
            heartbeat_s=config.transport.heartbeat_s,
            peer_timeout_s=config.transport.peer_timeout_s,
            keys=keys,
            outage_s=config.transport.outage_s,
            transient=frozenset({"slots", "stats", "loaded"}),
            **callbacks,
        )

    engine, summariser = make_engine(config, renderer, seed), make_summariser(config, renderer, seed)
    arrivals = None if weights_folder is None else Arrivals(config, weights_folder, endpoint, name, incarnation)
    return Generator(config, engine, renderer, connect, seed, summariser, arrivals, name)
