"""The OpenAI Agents SDK in its other configurations: chat, streamed, typed."""

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from task import Task

set_tracing_disabled(True)
task, how = Task(), sys.argv[1]


class Price(BaseModel):
    price: int


@function_tool
def price_of(item: str) -> str:
    """The price of an item."""
    return task.price_of(item)


async def main() -> None:
    model = OpenAIChatCompletionsModel(model=os.environ["SAO_MODEL"], openai_client=AsyncOpenAI())
    more = {"output_type": Price} if how == "typed" else {}
    clerk = Agent(name="clerk", instructions="Answer.", tools=[price_of], model=model, **more)
    if how == "streamed":
        result = Runner.run_streamed(clerk, task.question)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(clerk, task.question)
    print(task.reward(result.final_output))


asyncio.run(main())
