"""An environment of verifiers 0.1, with a tool and a rubric, as it is; one process plays many episodes."""

import asyncio
import sys
from typing import Any

import httpx
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI
from sessions import serve
from shop import INSTRUCTIONS, Shop


class ShopEnv(vf.StatefulToolEnv):  # type: ignore[misc]
    """Rows have the seed and split of a task as `info`."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        rubric = vf.Rubric(funcs=[reward])
        super().__init__(tools=[], dataset=Dataset.from_list(rows), rubric=rubric, system_prompt=INSTRUCTIONS)
        self.add_tool(self.price_of, args_to_skip=["shop"])

    async def setup_state(self, state: vf.State, **more: Any) -> None:
        state["shop"] = Shop(**state["info"])
        await super().setup_state(state, **more)

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: vf.Messages, state: vf.State, **_: Any
    ) -> dict[str, Any]:
        return {**tool_args, "shop": state["shop"]}

    async def price_of(self, item: str, shop: Shop) -> str:
        """The price of an item."""
        return shop.price_of(item)


def reward(completion: Any, state: vf.State) -> float:
    """That of the shop, for the last turn."""
    return float(state["shop"].reward(completion[-1].content))


def row(seed: int, split: str) -> dict[str, Any]:
    """What verifiers calls an example."""
    info = {"seed": seed, "split": split}
    question = {"role": "user", "content": Shop(seed, split).question}
    return {"prompt": [question], "info": info, "example_id": 0}


ENV = ShopEnv([row(0, "train")])


async def main() -> None:
    """Sessions until the generator ends this process."""
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as http:

        async def play(session: dict[str, Any]) -> float:
            example = row(session["seed"], session["split"])
            example["prompt"] = [{"role": "system", "content": INSTRUCTIONS}, *example["prompt"]]
            api = AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"], http_client=http)
            client = vf.OpenAIChatCompletionsClient(api)
            output = await ENV.run_rollout(example, client, session["model"], {})
            if output["error"]:
                raise RuntimeError(str(output["error"]))
            return float(output["reward"])

        await serve(play, int(sys.argv[1]))


asyncio.run(main())
