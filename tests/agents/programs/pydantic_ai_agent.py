"""pydantic-ai with its chat model: plain, typed by a tool, typed by a schema, streamed."""

import asyncio
import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from task import Task

task, how = Task(), sys.argv[1]


class Price(BaseModel):
    price: int


outputs = {"typed": Price, "native": NativeOutput(Price)}
clerk = Agent(OpenAIChatModel(os.environ["SAO_MODEL"]), instructions="Answer.", output_type=outputs.get(how, str))


@clerk.tool_plain
def price_of(item: str) -> str:
    """The price of an item."""
    return task.price_of(item)


async def main() -> None:
    if how == "streamed":
        async with clerk.run_stream(task.question) as result:
            print(task.reward(await result.get_output()))
    else:
        print(task.reward((await clerk.run(task.question)).output))


asyncio.run(main())
