"""litellm alone: a plain conversation, whose tool is called by a line of text."""

import os

import litellm
from task import Task

task = Task()
messages = [
    {"role": "system", "content": "Say 'price ITEM' or 'answer N'."},
    {"role": "user", "content": task.question},
]
while True:
    found = litellm.completion(model=f"openai/{os.environ['SAO_MODEL']}", messages=messages)
    said = found.choices[0].message.content
    if not said.startswith("price "):
        break
    result = task.price_of(said.removeprefix("price ").strip())
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
print(task.reward(said))
