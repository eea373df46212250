"""One rollout: the policy and an environment take turns until one of them, or a limit, ends it.

What becomes of it is one of three things, never a mixture. *finished*: the environment said so, with a reward.
*truncated*: out of turns ("max_turns"), of context ("context") or of time ("time_limit"); the environment gave no final
reward, so the rollout keeps the rewards of its turns and gets 0 (or the nearest number in the environment's range) for
its end. *failed*: an exception with a reason code; a failure has no reward at all.

With `[compaction]` enabled, a full context is not the end: the policy writes a summary and goes on in a new window (see
`sao.rollout.compaction`, also for the reasons with which such a rollout is truncated).

A turn that was cut by the response limit goes to the environment like any other (stop reason "length"); the end of
the turn is then added as context, since the policy did not sample it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from sao.config import Config
from sao.engines.base import Completion, Engine, Request, check_completion
from sao.engines.seeds import derive_seed
from sao.envs.protocol import Environment, Message, check_messages, check_step
from sao.errors import EngineError, EnvironmentFailure
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compaction, Compactor
from sao.rollout.turns import Send, Turn, Turns
from sao.rollout.window import Window
from sao.trajectory import Termination, Trajectory

T = TypeVar("T")
_GRACE_S = 0.5  # that a call past its deadline gets to end after it was cancelled

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """What the broker hands out: one task ordinal, its attempt, the environment's seed and the split."""

    ordinal: int
    attempt: int
    seed: int
    split: Literal["train", "eval"]
    turns: tuple[Turn, ...] = ()
    """What an earlier attempt has left."""


@dataclass(slots=True)
class Progress:
    """How far an episode is; kept by the caller, so that a failure can still say what it had cost."""

    turns: int = 0
    sampled_tokens: int = 0


async def run_episode(
    engine: Engine,
    env: Environment,
    renderer: Renderer,
    task: Task,
    config: Config,
    *,
    sampling_seed: int | None = None,
    progress: Progress | None = None,
    compactor: Compactor | None = None,
    calls: asyncio.Semaphore | None = None,
    send: Send | None = None,
) -> Trajectory:
    """Plays one episode and closes the environment, exactly once, on every path.

    sampling_seed: every turn's request gets a seed derived from it and the task; None: the engine's own stream.
    compactor: what episodes share for compaction, if that is enabled; None: one is made for this episode alone.
    calls: what episodes share to bound the calls of environments at once; waiting for it is in no call's deadline.
    send: takes each turn that is over (see `sao.rollout.turns`). With `task.turns` the episode goes on after these;
    `DivergedError` when the environment does not repeat itself.
    Returns a trajectory with at least one sampled token and a reward. Raises `EngineError` and `EnvironmentFailure`
    (reason `reset_error`, `step_error`, `timeout`, `bad_reward`, `prompt_too_long`, or the environment's own).
    """
    episode = _Episode(engine, env, renderer, task, config, sampling_seed, progress or Progress(), compactor, calls)
    episode.kept = Turns(task.turns, send)
    try:
        return await episode.play()
    finally:
        try:
            await engine.release(episode.session)
            if compactor is not None and compactor.summariser is not None:
                await compactor.summariser.release(episode.session)
        finally:
            await _close(env, config.env.step_timeout_s)


class _Episode:
    def __init__(
        self,
        engine: Engine,
        env: Environment,
        renderer: Renderer,
        task: Task,
        config: Config,
        sampling_seed: int | None,
        progress: Progress,
        compactor: Compactor | None,
        calls: asyncio.Semaphore | None,
    ) -> None:
        self.engine, self.env, self.renderer, self.task, self.config = engine, env, renderer, task, config
        self.session = f"{task.split}/{task.ordinal}/{task.attempt}"
        self.temperature = config.eval.temperature if task.split == "eval" else config.sampling.temperature
        self.sampling_seed, self.progress = sampling_seed, progress
        self.window = Window(renderer, config.sampling.context_tokens)
        self.compactor, self.calls = compactor, calls
        self.compaction: Compaction | None = None
        self.kept = Turns()
        self.turn_rewards: list[tuple[int, int, float]] = []
        self.stop_reasons: list[str] = []
        self.fingerprints: dict[int, str] = {}
        self.timings_s = {"reset": 0.0, "generate": 0.0, "step": 0.0}

    async def play(self) -> Trajectory:
        limit_s = self.config.env.episode_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._turns()
        except TimeoutError:  # of this limit: those of calls come as failures
            if not self.window.segments():
                raise EnvironmentFailure("timeout", f"no turn within env.episode_timeout_s = {limit_s:g}") from None
            return self._end(Termination("truncated", "time_limit"), self._no_reward())

    async def _turns(self) -> Trajectory:
        max_turns = self.config.env.max_turns
        messages = check_messages(
            await self._call("reset", partial(self.env.reset, self.task.seed, self.task.split)), "reset"
        )
        self.kept.opened(messages)
        if not self.window.open(messages):
            size = self.renderer.initial(messages).size
            raise EnvironmentFailure(
                "prompt_too_long", f"{size} tokens, sampling.context_tokens = {self.config.sampling.context_tokens}"
            )
        if self.config.compaction.enabled:
            shared = self.compactor or Compactor(self.config, self.renderer)
            self.compaction = shared.begin(self.window, self._ask)
        while True:
            completion = await self._generate()
            text = self.renderer.decode(completion.token_ids)
            result = check_step(await self._call("step", partial(self.env.step, text)), self.env.reward_range)
            self.kept.said(result.messages, result.reward, done=result.done)
            if result.done:
                assert result.reward is not None
                return self._end(Termination("finished"), result.reward)
            if result.reward is not None:
                self.turn_rewards.append((self.window.segment_index, self.window.ids.size - 1, result.reward))
            if self.progress.turns >= max_turns:
                return self._end(Termination("truncated", "max_turns"), self._no_reward())
            if (reason := await self._observe(result.messages)) is not None:
                return self._end(Termination("truncated", reason), self._no_reward())
            self.kept.over()

    async def _call(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """A call of the environment, in its turn (`env.concurrency`) and within its deadline."""
        async with self.calls or contextlib.nullcontext():
            return await self._timed(what, bounded(call, self.config.env.step_timeout_s, what))

    async def _observe(self, messages: tuple[Message, ...]) -> str | None:
        """Takes what the environment said; why the rollout has to end here, or None."""
        if self.compaction is not None:
            return await self.compaction.observe(messages)
        return None if self.window.observe(messages) else "context"

    async def _generate(self) -> Completion:
        """Samples one turn: at most the response limit, at most the room that is left."""
        limit = min(self.config.sampling.max_response_tokens, self.window.room_tokens)
        completion = await self._ask(str(self.progress.turns), self.window.ids, limit)
        self.window.sampled(completion)
        self.progress.turns += 1
        self.stop_reasons.append(completion.stop_reason)
        return completion

    async def _ask(
        self, name: str, prompt_ids: np.ndarray, max_new_tokens: int, summariser: Engine | None = None
    ) -> Completion:
        """A completion of the policy, checked and counted; or of the fixed summariser, whose tokens are context."""
        request = Request(
            id=f"{self.session}/{name}",
            session=self.session,
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=None if self.sampling_seed is None else derive_seed(self.sampling_seed, self.session, name),
        )
        what = "summarise" if name.startswith("summary") else "generate"
        recorded = self.kept.next()
        if recorded is None:
            completion = await self._timed(what, (summariser or self.engine).generate(request))
        else:
            completion = recorded
        if summariser is None and completion.token_ids is not None:
            self.progress.sampled_tokens += len(completion.token_ids)
        check_completion(request, completion)
        if completion.stop_reason in ("abort", "context"):
            raise EngineError(f"aborted: request {request.id}: the engine ended it with {completion.stop_reason}")
        if summariser is None:
            self._note_fingerprints(request, completion)
        if recorded is None:
            self.kept.sampled(completion, foreign=summariser is not None)
        return completion

    def _note_fingerprints(self, request: Request, completion: Completion) -> None:
        for version, mark in completion.fingerprints.items():
            if self.fingerprints.setdefault(version, mark) != mark:
                raise EngineError(
                    f"bad_completion: request {request.id}: version {version} has fingerprint {mark}, "
                    f"before it was {self.fingerprints[version]}"
                )

    async def _timed(self, what: str, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        try:
            return await call
        finally:
            self.timings_s[what] = self.timings_s.get(what, 0.0) + time.perf_counter() - began

    def _no_reward(self) -> float:
        low, high = self.env.reward_range
        return min(max(0.0, low), high)

    def _end(self, termination: Termination, reward: float) -> Trajectory:
        task = self.task
        name = f"{self.config.run.name}\0{self.config.run.seed}\0{self.session}"
        return Trajectory(
            id=hashlib.blake2b(name.encode(), digest_size=16).digest(),
            task_ordinal=task.ordinal,
            attempt=task.attempt,
            env=self.config.env.name,
            segments=self.window.segments(),
            reward=reward,
            termination=termination,
            temperature=self.temperature,
            turn_rewards=tuple(self.turn_rewards),
            fingerprints=self.fingerprints,
            timings_s=self.timings_s,
            metadata={
                "seed": task.seed,
                "split": task.split,
                "turns": self.progress.turns,
                "stop_reasons": ",".join(self.stop_reasons),
                **self.engine.facts,
                **(self.compaction.facts() if self.compaction is not None else {}),
            },
        )


async def bounded(call: Callable[[], Awaitable[T]], limit_s: float, what: str) -> T:
    """Makes an environment's call and awaits it for at most `limit_s` seconds.

    A call that does not end when it is cancelled (a tool that blocks in a thread) is left behind: it holds up neither
    this episode nor any other. Raises `EnvironmentFailure`: "timeout", the environment's own, or "reset_error" /
    "step_error" for any other exception.
    """
    try:
        task: asyncio.Future[T] = asyncio.ensure_future(call())
    except EnvironmentFailure:
        raise
    except Exception as error:  # a method that is not `async`: it has raised, or returned what cannot be awaited
        raise EnvironmentFailure(f"{what}_error", f"{type(error).__name__}: {error}") from error
    try:
        await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not task.done():
        _abandon(task)
        await asyncio.wait({task}, timeout=min(_GRACE_S, limit_s))
        raise EnvironmentFailure("timeout", f"{what} did not return within {limit_s:g} s")
    try:
        return task.result()
    except EnvironmentFailure:
        raise
    except (Exception, asyncio.CancelledError) as error:  # an environment may raise anything
        raise EnvironmentFailure(f"{what}_error", f"{type(error).__name__}: {error}") from error


def _abandon(task: asyncio.Future[Any]) -> None:
    task.cancel()
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # nobody is left to be told


async def _close(env: Environment, limit_s: float) -> None:
    """Closes the environment; what goes wrong here is logged, the episode's own result stands."""
    try:
        await bounded(env.close, limit_s, "close")
    except EnvironmentFailure as failure:
        log.warning("environment: close: %s", failure)
