"""smolagents' agent that writes code: plain, streamed, structured."""

import os
import sys

from smolagents import CodeAgent, OpenAIModel, tool
from task import Task

task, how = Task(), sys.argv[1]


@tool
def price_of(item: str) -> str:
    """The price of an item.

    Args:
        item: its name
    """
    return task.price_of(item)


model = OpenAIModel(os.environ["SAO_MODEL"], os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
more = {"streamed": {"stream_outputs": True}, "structured": {"use_structured_outputs_internally": True}}
print(task.reward(CodeAgent(tools=[price_of], model=model, **more.get(how, {})).run(task.question)))
