"""A loop around Anthropic's client as it is, which calls `/v1/messages`."""

import os

from anthropic import Anthropic
from task import Task

task, client = Task(), Anthropic()
schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
tools = [{"name": "price_of", "description": "The price of an item.", "input_schema": schema}]
messages = [{"role": "user", "content": task.question}]
while True:
    said = client.messages.create(model=os.environ["SAO_MODEL"], max_tokens=500, tools=tools, messages=messages)
    if said.stop_reason != "tool_use":
        break
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": task.price_of(block.input.get("item", ""))}
        for block in said.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
print(task.reward("".join(block.text for block in said.content if block.type == "text")))
