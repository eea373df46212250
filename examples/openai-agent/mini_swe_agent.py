"""mini-swe-agent as it is (`pip install mini-swe-agent`, 2.x), one episode a process.

    [env]
    name = "agent"
    args = { command = "python examples/openai-agent/mini_swe_agent.py {seed}", reward = "last_line" }

The task is a toy: a file with a number that the seed chooses has to be written. The agent, its prompts, its parser and
its shell are mini-swe-agent's own; here are a task, a grader and the address of the model.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
# Taken out before anything runs: the model's commands shall find no key in their environment.
BASE_URL, API_KEY = os.environ.pop("OPENAI_BASE_URL"), os.environ.pop("OPENAI_API_KEY")
for name in ("SAO_REWARD_KEY", "ANTHROPIC_API_KEY"):
    os.environ.pop(name, None)

import yaml  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.config import get_config_path  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel  # noqa: E402


def main() -> float:
    """Plays one episode; the reward."""
    wanted = random.Random(int(sys.argv[1])).randrange(1000)
    config = yaml.safe_load(get_config_path("mini_textbased.yaml").read_text())
    options = config.get("model", {}) | {
        "model_name": f"openai/{os.environ['SAO_MODEL']}",
        "model_kwargs": {"api_base": BASE_URL, "api_key": API_KEY},
    }
    templates = {key: config["agent"][key] for key in ("system_template", "instance_template")}
    with tempfile.TemporaryDirectory() as folder:
        environment = LocalEnvironment(**config.get("environment", {}) | {"cwd": folder})
        agent = DefaultAgent(LitellmTextbasedModel(**options), environment, **templates, step_limit=20)
        agent.run(f"Write the number {wanted}, and nothing else, into the file answer.txt.")
        answer = Path(folder) / "answer.txt"
        return float(answer.is_file() and answer.read_text().strip() == str(wanted))


if __name__ == "__main__":
    reward = main()
    print(json.dumps({"reward": reward}))
