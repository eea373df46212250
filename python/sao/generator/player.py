"""The player of a generator: engines, renderer and what episodes share; it turns an assignment into a trajectory."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sao.config import Config
from sao.engines.base import Engine, Request
from sao.engines.seeds import derive_seed
from sao.envs import registry
from sao.errors import ConfigError, EngineError
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compactor
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder, check_completion
from sao.rollout.scripted_chat import ScriptedRenderer
from sao.rollout.turns import Send
from sao.trajectory import Trajectory

if TYPE_CHECKING:
    from sao.agents.host import AgentHost

_FIRST_TOKEN_S = 120.0  # deadline of the one-token request that shows whether the engine works


class Player:
    """Plays assignments, any number at once.

    engine: of the policy; `summariser`: the fixed one of compactions, if there is one. Neither is started yet.
    sampling_seed: every draw depends on it. name: of the generator. Raises `ConfigError`.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        renderer: Renderer,
        sampling_seed: int,
        summariser: Engine | None = None,
        name: str = "g0",
    ) -> None:
        self.config, self.engine, self.renderer = config, engine, renderer
        self.agents: AgentHost | None = None  # who serves the calls of agents, where the environment is one
        self._engines = (engine,) if summariser is None else (engine, summariser)
        self._seed, self._name = sampling_seed, name
        self._compactor = Compactor(config, renderer, summariser) if config.compaction.enabled else None
        self._calls = asyncio.Semaphore(config.env.concurrency) if config.env.concurrency else None
        # Not `registry.make` for each episode: its search for entry points is slow.
        self._make_environment: Any = registry.factory(config.env.name)

    async def start(self) -> None:
        """Checks the environment and starts the engines and the endpoint for agents, if there are any.

        Raises `ConfigError` and `EngineError`.
        """
        env: Any = registry.make(self.config.env.name, **self.config.env.args)
        await env.close()
        for engine in self._engines:
            await engine.start()
        if hasattr(env, "play"):
            from sao.agents.host import AgentHost  # only for agents: it serves HTTP

            self.agents = AgentHost(self.config, self._name)
            await self.agents.start(env)

    def recorder(self, assignment: Assignment, send: Send | None = None) -> Recorder:
        """A fresh recorder of an assignment; `send`: takes each turn of an environment that can be played again."""
        send = send if self.agents is None else None
        return Recorder(self.engine, self.renderer, self.config, assignment, self._seed, send)

    async def play(self, recorder: Recorder) -> Trajectory:
        """Plays one episode. Raises `EngineError`, `EnvironmentFailure`, `ConfigError` and `DivergedError`."""
        env = self._make_environment(**self.config.env.args)
        if self.agents is not None:
            return await self.agents.play(recorder, env)
        return await run_episode(recorder, env, compactor=self._compactor, calls=self._calls)

    async def check_engines(self) -> None:
        """Asks each engine for one token; it must come with its id, log-prob and version. Raises `EngineError`."""
        ids = np.asarray(self.renderer.stop_token_ids[:1], np.int32)
        for engine in self._engines:
            name = f"check-{time.monotonic_ns()}"
            request = Request(name, name, ids, 1, 1.0, (), 0)
            try:
                completion = await asyncio.wait_for(engine.generate(request), _FIRST_TOKEN_S)
            except TimeoutError:
                raise EngineError(f"engine: no token within {_FIRST_TOKEN_S:g} s") from None
            check_completion(request, completion)
            if completion.token_ids.size != 1:
                raise EngineError(f"no_token_capture: {completion.token_ids.size} tokens, one was asked for")
            await engine.release(name)

    async def close(self) -> None:
        """Ends the endpoint for agents and closes the engines."""
        if self.agents is not None:
            await self.agents.close()
        await asyncio.gather(*(engine.close() for engine in self._engines))


def make_player(config: Config, sampling_seed: int, name: str, index: int = 0) -> Player:
    """The player that the configuration names. Raises `ConfigError` and `EngineError`."""
    registry.factory(config.env.name)  # a wrong name is found before anything slow is imported
    scripted = config.generator.engine == "scripted"
    renderer = ScriptedRenderer(config.model.path) if scripted else Renderer.of(config.model)
    engine = make_engine(config, config.model.path, renderer, sampling_seed, index)
    summariser = make_summariser(config, renderer, sampling_seed, index)
    return Player(config, engine, renderer, sampling_seed, summariser, name)


def make_engine(config: Config, path: str, renderer: Renderer, seed: int, index: int = 0) -> Engine:
    """The engine that `generator.engine` names for the model in `path`; `index`: of this generator on its host."""
    generator = config.generator
    shared: dict[str, Any] = {
        "context_tokens": config.sampling.context_tokens,
        "threads": generator.threads,
        "seed": seed,
    }
    if generator.engine == "torch":
        from sao.engines.torch_engine import TorchEngine

        return TorchEngine(path, slots=generator.concurrency, **shared)
    if generator.engine == "vllm":
        from sao.engines.vllm.engine import VllmEngine

        shared["concurrency"] = generator.concurrency
        return VllmEngine(path, vllm_args=generator.vllm_args, index=index, **shared)
    from sao.engines.scripted import ScriptedEngine

    return ScriptedEngine(vocab_size=renderer.vocab_size, seed=seed)


def make_summariser(config: Config, renderer: Renderer, seed: int, index: int = 0) -> Engine | None:
    """The engine of `compaction.summariser`, not yet started; None when the policy writes its summaries itself.

    Raises `ConfigError` when its tokenizer is not the policy's: it is given the policy's token ids.
    """
    path = config.compaction.summariser
    if path is None or not config.compaction.enabled:
        return None
    if not renderer.same_tokens(Renderer(path)):
        raise ConfigError(
            f"compaction.summariser: {path}: its tokenizer is not that of model.path = {config.model.path}"
        )
    return make_engine(config, path, renderer, derive_seed(seed, "summariser"), index)
