"""The OpenAI Agents SDK as it is, its default model class (`/v1/responses`); one process plays many episodes."""

import asyncio
import sys
from typing import Any

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool, set_tracing_disabled
from agents.exceptions import ModelBehaviorError
from sessions import serve
from shop import INSTRUCTIONS, Shop

set_tracing_disabled(True)  # its traces would go to OpenAI


async def play(session: dict[str, Any]) -> float:
    """One episode."""
    shop = Shop(session["seed"], session["split"])

    @function_tool
    def price_of(item: str) -> str:
        """The price of an item."""
        return shop.price_of(item)

    clerk = Agent(name="clerk", instructions=INSTRUCTIONS, tools=[price_of], model=session["model"])
    provider = OpenAIProvider(base_url=session["base_url"], api_key=session["api_key"])
    try:
        result = await Runner.run(clerk, shop.question, run_config=RunConfig(model_provider=provider))
    except ModelBehaviorError:  # a tool that does not exist, say: the policy's doing
        return 0.0
    return shop.reward(result.final_output)


asyncio.run(serve(play, int(sys.argv[1])))
