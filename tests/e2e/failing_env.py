"""An environment whose grader is always down."""

from sao.envs.protocol import Message, StepResult
from sao.errors import EnvironmentFailure


class Failing:
    """Resets well and never scores."""

    reward_range = (0.0, 1.0)
    replayable = True

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        return (Message("user", "a b c"),)

    async def step(self, text: str) -> StepResult:
        raise EnvironmentFailure("grader_down", "no answer from the grader")

    async def close(self) -> None:
        pass
