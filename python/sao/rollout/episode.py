"""One rollout: the policy and an environment take turns until one of them, or a limit, ends it.

It ends in one of three ways. *finished*: the environment is done and gave a reward. *truncated*: out of turns
("max_turns"), of context ("context") or of time ("time_limit"); the rollout keeps the rewards of its turns and gets
for its end what the environment's `grade` says, or without one 0 (or the nearest number in the environment's range).
*failed*: an exception with a reason code, no reward.

With `[compaction]` enabled, a full context is not the end: the policy writes a summary and goes on in a new window (see
`sao.rollout.compaction`, also for the reasons with which such a rollout is truncated).

A turn that was cut by the response limit goes to the environment like any other (stop reason "length"); the end of
the turn is then added as context, since the policy did not sample it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from sao.envs.protocol import (
    Environment,
    Grader,
    StepResult,
    ToolEnvironment,
    check_messages,
    check_reward,
    check_step,
    check_tools,
)
from sao.errors import EnvironmentFailure
from sao.rollout.compaction import Compaction, Compactor
from sao.rollout.recorder import Recorder
from sao.rollout.window import Window
from sao.trajectory import Termination, Trajectory

T = TypeVar("T")
_GRACE_S = 0.5  # that a call past its deadline gets to end after it was cancelled

log = logging.getLogger(__name__)


async def run_episode(
    recorder: Recorder,
    env: Environment | ToolEnvironment,
    *,
    compactor: Compactor | None = None,
    calls: asyncio.Semaphore | None = None,
) -> Trajectory:
    """Plays one episode and closes the environment, exactly once, on every path.

    recorder: fresh; what it holds afterwards is also true of a failure. With `turns` in its assignment the episode goes
    on after these; `DivergedError` when the environment does not repeat itself.
    compactor: what episodes share for compaction; None: one is made here if it is enabled. calls: bounds the calls of
    environments at once; waiting for it is in no call's deadline.
    Returns a trajectory with at least one sampled token and a reward. Raises `EngineError` and `EnvironmentFailure`
    (reason `reset_error`, `step_error`, `timeout`, `bad_reward`, `prompt_too_long`, or the environment's own).
    """
    episode = _Episode(recorder, env, compactor, calls)
    try:
        async with asyncio.timeout(recorder.config.env.episode_timeout_s):
            return await episode.play()
    except TimeoutError:  # of this limit: those of calls come as failures
        recorder.check_begun()
        return await episode.truncated("time_limit")
    finally:
        try:
            await recorder.release()
            if compactor is not None and compactor.summariser is not None:
                await compactor.summariser.release(recorder.session)
        finally:
            await close_environment(env, recorder.config.env.step_timeout_s)


class _Episode:
    def __init__(
        self,
        recorder: Recorder,
        env: Environment | ToolEnvironment,
        compactor: Compactor | None,
        calls: asyncio.Semaphore | None,
    ) -> None:
        self.recorder, self.env, self.config = recorder, env, recorder.config
        context, reasoning = self.config.sampling.context_tokens, self.config.model.reasoning
        self.new_window = partial(Window, recorder.renderer, context, reasoning=reasoning)
        self.window = self.new_window()
        self.compactor, self.calls = compactor, calls
        self.compaction: Compaction | None = None
        self.turn_rewards: list[tuple[int, int, float]] = []
        recorder.timings_s |= {"reset": 0.0, "step": 0.0}
        if not env.replayable:
            recorder.replay.send = None

    async def play(self) -> Trajectory:
        recorder, task = self.recorder, self.recorder.assignment
        first = check_messages(await self.call("reset", partial(self.env.reset, task.seed, task.split)), "reset")
        if isinstance(self.env, ToolEnvironment):
            self.window = self.new_window(tools := check_tools(self.env.tools))
            if tools and not recorder.renderer.renders_tools:
                raise EnvironmentFailure("no_tools", f"the chat template of {self.config.model.path} knows no tools")
        window = self.window
        recorder.replay.opened(first)
        window.rebuild(first)
        if window.room_tokens <= 0:
            limit = self.config.sampling.context_tokens
            raise EnvironmentFailure("prompt_too_long", f"{window.ids.size} tokens, sampling.context_tokens = {limit}")
        if self.config.compaction.enabled:
            shared = self.compactor or Compactor(self.config, recorder.renderer)
            self.compaction = Compaction(shared, window, recorder)
        while True:
            limit = min(self.config.sampling.max_response_tokens, window.room_tokens)
            completion, window.segment = await recorder.sample(window.ids, limit, window.segment)
            window.sampled(completion.token_ids)
            result = await self.step(completion.token_ids)
            recorder.replay.observed(result.messages, result.reward, done=result.done)
            if result.done:
                assert result.reward is not None
                return self.end(Termination("finished"), result.reward)
            if result.reward is not None:
                self.turn_rewards.append((recorder.n_segments - 1, window.ids.size - 1, result.reward))
            if recorder.turns >= self.config.env.max_turns:
                return await self.truncated("max_turns")
            if self.compaction is not None:
                reason = await self.compaction.observe(result.messages)
            else:
                window.observe(result.messages)
                reason = "context" if window.room_tokens <= 0 else None
            if reason is not None:
                return await self.truncated(reason)
            recorder.replay.over()

    async def step(self, token_ids: np.ndarray) -> StepResult:
        """Gives the environment the turn that was sampled last, and checks its answer."""
        env, calls = self.env, None
        if isinstance(env, ToolEnvironment):
            turn = self.window.turn
            step, calls = partial(env.act, turn), turn.tool_calls
        else:
            step = partial(env.step, self.recorder.renderer.decode(token_ids))
        return check_step(await self.call("step", step), env.reward_range, calls)

    async def call(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """A call of the environment, in its turn (`env.concurrency`) and within its deadline."""
        async with self.calls or contextlib.nullcontext():
            return await self.recorder.timed(what, bounded(call, self.config.env.step_timeout_s, what))

    async def truncated(self, reason: str) -> Trajectory:
        """The rollout as a limit has ended it. Raises `EnvironmentFailure` also where such an end is to be dropped."""
        self.recorder.check_limit(reason)
        reward = self.recorder.no_reward(self.env.reward_range)
        if isinstance(self.env, Grader):
            reward = check_reward(await self.call("grade", self.env.grade), self.env.reward_range)
        return self.end(Termination("truncated", reason), reward)

    def end(self, termination: Termination, reward: float) -> Trajectory:
        metadata = self.compaction.metadata() if self.compaction else {}
        if self.config.model.reasoning == "template":
            metadata["reasoning_left_out"] = self.window.renewed
        return self.recorder.trajectory(termination, reward, self.turn_rewards, metadata)


async def bounded(call: Callable[[], Awaitable[T]], limit_s: float, what: str) -> T:
    """Makes an environment's call and awaits it for at most `limit_s` seconds.

    A call that does not end when it is cancelled (a tool that blocks in a thread) is left behind. Raises
    `EnvironmentFailure`: "timeout", the environment's own, or "reset_error" / "step_error" for any other exception.
    """

    async def guarded() -> T:
        try:
            return await call()
        except EnvironmentFailure:
            raise
        except (Exception, asyncio.CancelledError) as error:  # an environment may raise anything
            raise EnvironmentFailure(f"{what}_error", f"{type(error).__name__}: {error}") from error

    task = asyncio.create_task(guarded())
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=min(_GRACE_S, limit_s))
        raise EnvironmentFailure("timeout", f"{what} did not return within {limit_s:g} s")
    finally:
        task.cancel()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody waits for it any more


async def close_environment(env: Any, limit_s: float) -> None:
    """Closes an environment; what goes wrong here is logged, the episode's own result stands."""
    try:
        await bounded(env.close, limit_s, "close")
    except EnvironmentFailure as failure:
        log.warning("environment: close: %s", failure)
