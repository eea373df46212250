"""Episodes that agents play: from a task to a trajectory, with the generator's endpoint between agent and engine."""

import asyncio
import json
import logging
import os
import secrets
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from sao.agents.server import AgentServer
from sao.agents.session import AgentSession
from sao.config import Config
from sao.envs.agent import Access, Agent, AgentEnvironment
from sao.envs.protocol import Grader, check_reward
from sao.errors import EngineError, EnvironmentFailure
from sao.rollout.episode import bounded, close_environment
from sao.rollout.recorder import Recorder
from sao.trajectory import Termination, Trajectory

GRACE_S = 20.0  # for an agent to end once its calls are refused for a limit
RESTART_S = 1.0  # between two starts of a program that serves many episodes

log = logging.getLogger(__name__)


class AgentHost:
    """Plays assignments through agents. name: of the generator, and of the file by which outside agents find it."""

    def __init__(self, config: Config, name: str) -> None:
        self._config, self._name = config, name
        self._server = AgentServer(Path(config.model.path).name, secrets.token_urlsafe(24))
        self._calls = asyncio.Semaphore(config.env.concurrency) if config.env.concurrency else None
        self._program: asyncio.Task[None] | None = None
        self._note: Path | None = None

    async def start(self, env: AgentEnvironment) -> None:
        """Listens, and starts the program that serves all episodes, if `env` names one. Raises `ConfigError`."""
        host, _, port = self._config.generator.agents_bind.rpartition(":")
        await self._server.start(host.strip("[]"), int(port))
        if isinstance(env, Agent) and env.start == "once":
            self._program = asyncio.create_task(self._keep(env))
        elif isinstance(env, Agent) and env.start == "never":
            self._note = self._config.folder.resolve() / "agents" / f"{self._name}.json"
            self._note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            note = {"url": self._server.base_url, "token": self._server.token}
            with os.fdopen(os.open(self._note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(note, file)
        log.info("agents: %s", self._server.base_url)

    async def close(self) -> None:
        if self._program is not None:
            self._program.cancel()
            with suppress(asyncio.CancelledError):
                await self._program
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        await self._server.close()

    async def play(self, recorder: Recorder, env: AgentEnvironment) -> Trajectory:
        """One episode, recorded by `recorder`, which is fresh; closes the environment on every path.

        Raises `EngineError`, and `EnvironmentFailure` (`no_turn`, `no_reward`, `bad_reward`, `timeout`, `agent_exit`,
        `agent_failed`, or the environment's own).
        """
        session = AgentSession(recorder, env.reward_range, strict=getattr(env, "strict", False))
        try:
            async with self._calls or nullcontext():
                try:
                    async with asyncio.timeout(self._config.env.episode_timeout_s):
                        reward, cut = await self._reward(env, session), session.cut
                except (TimeoutError, EnvironmentFailure) as ended:
                    if session.fault is not None:  # whatever came of it, the episode is lost by this
                        raise session.fault from ended
                    if isinstance(ended, EnvironmentFailure):
                        raise
                    recorder.check_begun()
                    reward, cut = session.reward, "time_limit"
                    if reward is None:
                        recorder.check_limit(cut)
            if session.fault is not None:
                raise session.fault
            if not recorder.n_segments:
                raise EnvironmentFailure("no_turn", "the agent ended without a turn of the policy")
            if reward is None and not cut:
                raise EnvironmentFailure("no_reward", "the agent ended without a reward")
            if reward is None and isinstance(env, Grader):
                limit_s = self._config.env.step_timeout_s
                reward = await bounded(env.grade, limit_s, "grade")
            reward = recorder.no_reward(env.reward_range) if reward is None else check_reward(reward, env.reward_range)
            return session.trajectory(Termination("truncated", cut) if cut else Termination("finished"), reward)
        finally:
            self._server.remove(session)
            try:
                await recorder.release()
            finally:
                await close_environment(env, self._config.env.step_timeout_s)

    async def _reward(self, env: AgentEnvironment, session: AgentSession) -> float | None:
        """Has the episode played by whoever plays it; its reward, None if it got none."""
        access = self._server.add(session)
        playing = asyncio.create_task(self._played(env, session, access))
        limited = asyncio.create_task(self._out_of_patience(session))
        reward = None
        try:
            # No refusal ends every agent: one whose calls are refused for a limit is not waited for without end.
            await asyncio.wait({playing, limited}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                reward = playing.result()
            else:
                why = session.cut or "the engine failed"
                log.warning("agents: an agent goes on %g s behind a limit (%s); it is ended", GRACE_S, why)
        except EnvironmentFailure as failure:
            if not session.limited.is_set():  # an agent may fail when its calls are refused
                if not self._lowest(env, session, failure):
                    raise
                reward = env.reward_range[0]
        except EngineError:
            raise
        except Exception as error:  # an environment may raise anything
            raise EnvironmentFailure("agent_error", f"{type(error).__name__}: {error}") from error
        finally:
            self._server.remove(session)
            await _dropped(playing, limited)
        return session.reward if reward is None else reward

    async def _played(self, env: AgentEnvironment, session: AgentSession, access: Access) -> float | None:
        if isinstance(env, Agent) and env.start != "episode":
            self._server.offer(session)
            await session.ended.wait()
            if session.failure is not None:
                raise session.failure
            return None
        task = session.recorder.assignment
        return await env.play(task.seed, task.split, access)

    @staticmethod
    async def _out_of_patience(session: AgentSession) -> None:
        await session.limited.wait()
        await asyncio.sleep(GRACE_S)

    @staticmethod
    def _lowest(env: AgentEnvironment, session: AgentSession, failure: EnvironmentFailure) -> bool:
        """Whether a program's failure is the policy's own and gets the lowest reward (`on_error`)."""
        own = failure.reason in ("agent_exit", "agent_failed") and session.reward is None
        if own and session.recorder.n_segments and getattr(env, "on_error", "failure") == "lowest_reward":
            session.erred = True
            return True
        return False

    async def _keep(self, env: Agent) -> None:
        """Runs the program that serves all episodes; when it ends, the episodes that it had fail, and it runs again.

        Those that wait to be opened are for the next start. But one of them fails when the program has ended without
        opening any, so that one that never gets going comes to an end (`run.max_failures_in_a_row`).
        """
        variables = {"SAO_AGENT_URL": self._server.base_url, "SAO_AGENT_TOKEN": self._server.token}
        while True:
            before = self._server.opened
            try:
                code, _, err = await env.run(env.command, variables)
                failure = EnvironmentFailure("agent_exit", f"the agents' program ended with exit code {code}: {err}")
            except EnvironmentFailure as error:  # it could not be started now
                failure = error
            log.warning("%s", failure)
            lost = [session for session in self._server.sessions if session.opened]
            if self._server.opened == before and (first := self._server.waiting()) is not None:
                lost.append(first)
            for session in lost:
                session.failure = failure
                session.ended.set()
            await asyncio.sleep(RESTART_S)


async def _dropped(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
