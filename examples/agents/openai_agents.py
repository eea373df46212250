"""The OpenAI Agents SDK as it is: its default model class, which calls `/v1/responses`."""

import os

from agents import Agent, Runner, function_tool, set_tracing_disabled
from task import Task

set_tracing_disabled(True)  # its traces would go to OpenAI, with this session's key
task = Task()


@function_tool
def price_of(item: str) -> str:
    """The price of an item."""
    return task.price_of(item)


clerk = Agent(name="clerk", instructions="Answer by a number.", tools=[price_of], model=os.environ["SAO_MODEL"])
print(task.reward(Runner.run_sync(clerk, task.question).final_output))
