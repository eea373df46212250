"""mini-swe-agent with its other model classes: of text, and of `/v1/responses`."""

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_path
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model
from task import Task

task, how = Task(), sys.argv[1]
access = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
file = {"textbased": "mini_textbased.yaml", "response": "mini.yaml"}[how]
config = yaml.safe_load(get_config_path(file).read_text())
options = config["model"] | {"model_kwargs": access, "model_class": f"litellm_{how}"}
agent_config = {key: config["agent"][key] for key in ("system_template", "instance_template")}
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "prices").write_text(f"{task.item} {task.price_of(task.item)}\n")
    shell = LocalEnvironment(**config["environment"] | {"cwd": folder})
    model = get_model(f"openai/{os.environ['SAO_MODEL']}", options)
    DefaultAgent(model, shell, **agent_config, step_limit=20).run(task.question)
    answer = Path(folder) / "answer"
    print(task.reward(answer.read_text() if answer.is_file() else ""))
