"""langchain's agent on langgraph as it is, with `langchain-openai`."""

import os

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from task import Task

task = Task()


def price_of(item: str) -> str:
    """The price of an item."""
    return task.price_of(item)


clerk = create_agent(ChatOpenAI(model=os.environ["SAO_MODEL"]), [price_of], system_prompt="Answer by a number.")
messages = clerk.invoke({"messages": [("user", task.question)]})["messages"]
print(task.reward(messages[-1].content))
