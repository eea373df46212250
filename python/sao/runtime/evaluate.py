"""Held-out success of a model folder: the engine, environment and tasks of a run in this process, without a broker."""

import asyncio
from collections import Counter
from typing import NamedTuple

from sao.broker.tasks import task_seed
from sao.config import Config
from sao.engines.seeds import derive_seed
from sao.errors import EnvironmentFailure
from sao.generator.player import Player, make_player
from sao.rollout.recorder import Assignment
from sao.runtime import preflight
from sao.telemetry.metrics import wilson


class Result(NamedTuple):
    """Rewards of the episodes that were scored, and how many failed, by reason: a failure is no reward."""

    rewards: tuple[float, ...]
    successes: int
    failures: dict[str, int]

    def __str__(self) -> str:
        n = len(self.rewards)
        if not n:
            return f"held-out success: none of the episodes was scored; failed: {self.failures}"
        low, high = wilson(self.successes, n)
        text = f"held-out success {self.successes / n:.3f} (95% between {low:.3f} and {high:.3f}, n = {n})\n"
        text += f"mean reward {sum(self.rewards) / n:.4f}"
        failed = ", ".join(f"{reason} {count}" for reason, count in self.failures.items())
        return f"{text}\nfailed: {failed}" if failed else text


def evaluate(config: Config) -> Result:
    """Plays `eval.episodes` held-out episodes, the same tasks as in the run's own evaluations.

    An episode that is not over after `transport.rollout_timeout_s` is a failure.

    Raises `ConfigError` before anything is loaded, `EngineError` when the engine fails.
    """
    preflight.check(config, role="eval")
    player = make_player(config, derive_seed(config.run.seed, "eval", 0), "eval")
    return asyncio.run(_play_all(config, player))


async def _play_all(config: Config, player: Player) -> Result:
    slots = asyncio.Semaphore(config.generator.concurrency)
    rewards: list[float] = []
    failures: Counter[str] = Counter()

    async def play(index: int) -> None:
        assignment = Assignment(index, 0, task_seed(config.run.seed, "eval", index), "eval")
        async with slots:
            try:
                async with asyncio.timeout(config.transport.rollout_timeout_s) as limit:
                    trajectory = await player.play(player.recorder(assignment))
            except TimeoutError:
                if not limit.expired():
                    raise
                failures["deadline"] += 1
            except EnvironmentFailure as failure:
                failures[failure.reason] += 1
            else:
                assert trajectory.reward is not None
                rewards.append(trajectory.reward)

    try:
        await player.start()
        async with asyncio.TaskGroup() as group:
            for index in range(config.eval.episodes):
                group.create_task(play(index))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await player.close()
    successes = sum(reward >= config.env.success_reward for reward in rewards)
    return Result(tuple(rewards), successes, dict(failures))
