"""langgraph and langchain in their other configurations: the older agent, typed by a tool, by a schema, streamed."""

import os
import sys
import warnings

from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from task import Task

warnings.simplefilter("ignore")
task, how = Task(), sys.argv[1]


class Price(BaseModel):
    """A price."""

    price: int


def price_of(item: str) -> str:
    """The price of an item."""
    return task.price_of(item)


model = ChatOpenAI(model=os.environ["SAO_MODEL"])
asked = {"messages": [("user", task.question)]}
if how == "react":
    from langgraph.prebuilt import create_react_agent

    print(task.reward(create_react_agent(model, [price_of]).invoke(asked)["messages"][-1].content))
elif how == "typed":
    agent = create_agent(model, [price_of], response_format=ToolStrategy(Price))
    print(task.reward(agent.invoke(asked)["structured_response"].price))
elif how == "structured":
    found = create_agent(model, [price_of]).invoke(asked)["messages"][-1].content
    print(task.reward(model.with_structured_output(Price).invoke(f"As JSON: {found}").price))
elif how == "streamed":
    for event in create_agent(ChatOpenAI(model=os.environ["SAO_MODEL"], streaming=True), [price_of]).stream(
        asked, stream_mode="values"
    ):
        last = event["messages"][-1]
    print(task.reward(last.content))
