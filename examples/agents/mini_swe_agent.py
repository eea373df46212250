"""mini-swe-agent as it is: its default model class, its prompts and its shell; it ends by a command of its own."""

import os
import tempfile
from pathlib import Path

# Taken out before anything runs: what the model's commands see must not hold a key.
access = {"api_base": os.environ.pop("OPENAI_BASE_URL"), "api_key": os.environ.pop("OPENAI_API_KEY")}
for name in ("SAO_REWARD_KEY", "ANTHROPIC_API_KEY"):
    os.environ.pop(name, None)
os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}

import yaml  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.config import get_config_path  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models import get_model  # noqa: E402
from task import Task  # noqa: E402

task = Task()
config = yaml.safe_load(get_config_path("mini.yaml").read_text())
agent_config = {key: config["agent"][key] for key in ("system_template", "instance_template")}
model = get_model(f"openai/{os.environ['SAO_MODEL']}", config["model"] | {"model_kwargs": access})
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "prices").write_text(f"{task.item} {task.price_of(task.item)}\n")
    shell = LocalEnvironment(**config["environment"] | {"cwd": folder})
    DefaultAgent(model, shell, **agent_config, step_limit=20).run(
        f"{task.question} The file prices says it. Write the number into the file answer."
    )
    answer = Path(folder) / "answer"
    print(task.reward(answer.read_text() if answer.is_file() else ""))
