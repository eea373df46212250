"""smolagents as it is: an agent that calls tools; its last call is `final_answer`."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool
from task import Task

task = Task()


@tool
def price_of(item: str) -> str:
    """The price of an item.

    Args:
        item: its name
    """
    return task.price_of(item)


model = OpenAIModel(os.environ["SAO_MODEL"], os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
clerk = ToolCallingAgent(tools=[price_of], model=model)
print(task.reward(clerk.run(task.question)))
