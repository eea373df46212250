"""pydantic-ai as it is; its model is given as `openai:NAME`, which calls `/v1/responses`."""

import os

from pydantic_ai import Agent
from task import Task

task = Task()
clerk = Agent(f"openai:{os.environ['SAO_MODEL']}", instructions="Answer by a number.")


@clerk.tool_plain
def price_of(item: str) -> str:
    """The price of an item."""
    return task.price_of(item)


print(task.reward(clerk.run_sync(task.question).output))
