"""A loop around the `openai` client in which everything is set by hand."""

import json
import os

from openai import OpenAI
from task import Task

task, client = Task(), OpenAI()
schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
function = {"name": "price_of", "description": "The price of an item.", "parameters": schema}
messages = [{"role": "user", "content": task.question}]
choice = {"type": "function", "function": {"name": "price_of"}}
while True:
    found = client.chat.completions.create(
        model=os.environ["SAO_MODEL"],
        messages=messages,
        tools=[{"type": "function", "function": function}],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0.2,
        top_p=0.9,
        max_tokens=300,
        seed=1,
        n=1,
        stop=["Question:"],
        logprobs=True,
        top_logprobs=2,
    )
    said, choice = found.choices[0].message, "auto"
    assert found.choices[0].logprobs is not None and found.choices[0].logprobs.content
    if not said.tool_calls:
        break
    messages.append(said)
    for call in said.tool_calls:
        result = task.price_of(json.loads(call.function.arguments).get("item", ""))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(task.reward(said.content))
