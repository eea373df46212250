"""Held-out success of a model folder: the engine, environment and tasks of a run in this process, without a broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sao.broker.tasks import task_seed
from sao.config import Config
from sao.engines.base import Engine
from sao.engines.sampling import derive_seed
from sao.envs import registry
from sao.errors import EnvironmentFailure
from sao.generator.build import make_engine, make_summariser
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compactor
from sao.rollout.episode import Progress, Task, run_episode
from sao.runtime import preflight
from sao.telemetry.metrics import wilson


@dataclass(frozen=True)
class Result:
    """Rewards of the episodes that were scored, and how many failed, by reason: a failure is no reward."""

    rewards: tuple[float, ...]
    successes: int
    failures: dict[str, int]

    def __str__(self) -> str:
        n = len(self.rewards)
        if not n:
            return f"held-out success: none of the episodes was scored; failed: {self.failures}"
        low, high = wilson(self.successes, n)
        mean = sum(self.rewards) / n
        lines = [
            f"held-out success {self.successes / n:.3f} (95% between {low:.3f} and {high:.3f}, n = {n})",
            f"mean reward {mean:.4f}",
        ]
        if self.failures:
            lines.append("failed: " + ", ".join(f"{reason} {count}" for reason, count in self.failures.items()))
        return "\n".join(lines)


def evaluate(config: Config) -> Result:
    """Plays `eval.episodes` held-out episodes, the same tasks as in the run's own evaluations.

    An episode that is not over after `transport.rollout_timeout_s` is a failure.

    Raises `ConfigError` before anything is loaded, `EngineError` when the engine fails.
    """
    preflight.check(config, run_folder=False)
    renderer = Renderer(config.model.path)
    seed = derive_seed(config.run.seed, "eval", 0)
    engine, summariser = make_engine(config, renderer, seed), make_summariser(config, renderer, seed)
    compactor = Compactor(config, renderer, summariser) if config.compaction.enabled else None
    return asyncio.run(_play_all(config, engine, renderer, seed, compactor))


async def _play_all(
    config: Config, engine: Engine, renderer: Renderer, seed: int, compactor: Compactor | None
) -> Result:
    engines = [engine] if compactor is None or compactor.summariser is None else [engine, compactor.summariser]
    slots = asyncio.Semaphore(config.generator.concurrency)
    rewards: list[float] = []
    failures: Counter[str] = Counter()

    async def play(index: int) -> None:
        async with slots:
            task = Task(index, 0, task_seed(config.run.seed, "eval", index), "eval")
            env: Any = registry.make(config.env.name, **config.env.args)
            try:
                async with asyncio.timeout(config.transport.rollout_timeout_s) as limit:
                    if agents is not None:
                        trajectory = await agents.play(env, task, sampling_seed=seed, progress=Progress())
                    else:
                        trajectory = await run_episode(
                            engine, env, renderer, task, config, sampling_seed=seed, compactor=compactor
                        )
            except TimeoutError:
                if not limit.expired():
                    raise
                failures["deadline"] += 1
                return
            except EnvironmentFailure as failure:
                failures[failure.reason] += 1
                return
            assert trajectory.reward is not None
            rewards.append(trajectory.reward)

    first: Any = registry.make(config.env.name, **config.env.args)
    await first.close()
    agents = None
    try:
        for each in engines:
            await each.start(None)
        if hasattr(first, "play"):
            from sao.agents.host import AgentHost  # only for agents: it serves HTTP

            agents = AgentHost(config, engine, renderer, "eval")
            await agents.start(first)
        async with asyncio.TaskGroup() as group:
            for index in range(config.eval.episodes):
                group.create_task(play(index))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        if agents is not None:
            await agents.close()
        for each in engines:
            await each.close()
    successes = sum(reward >= config.env.success_reward for reward in rewards)
    return Result(tuple(rewards), successes, dict(failures))
