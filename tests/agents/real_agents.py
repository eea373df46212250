"""Agents of others, unchanged, each with one tool: which there are, and an episode of one at the real endpoint.

The policy is scripted: it writes what a model that solves the task would write. Everything else is real: the packages
(environments of `scripts/agent_venvs.py`), their processes, HTTP, the host, the recorder and the chat template.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]

from agents.test_agents import TASK, configured, hosting  # noqa: E402
from agents.tool_agents import Recording, call_text, check_books, sampled  # noqa: E402
from rollout.families import folder  # noqa: E402
from scripted import Reply  # noqa: E402

from sao.envs import registry  # noqa: E402
from sao.rollout.chat import Renderer  # noqa: E402
from sao.trajectory import Trajectory, decode, encode  # noqa: E402

EXAMPLES, PROGRAMS = ROOT / "examples" / "agents", Path(__file__).parent / "programs"
FAMILY = "qwen2_5"
Turn = str | tuple[str, dict[str, Any]]


def load(path: Path) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


venvs = load(ROOT / "scripts" / "agent_venvs.py")


@dataclass(frozen=True, slots=True)
class Agent:
    """A configuration. venv: whose packages it uses. program: its script; argument: which of its configurations.

    turns: what the policy writes, in order, from (item, price). segments, drift: what has to come of the episode.
    """

    name: str
    venv: str
    program: Path
    turns: Callable[[str, int], Sequence[Turn]]
    argument: str = ""
    dialect: str = "chat"
    segments: int = 1
    drift: int = 0


def tool(item: str, price: int) -> list[Turn]:
    """A call, then the answer in words."""
    return [("price_of", {"item": item}), f"It costs {price}."]


def schema(item: str, price: int) -> list[Turn]:
    """A call, then the answer as JSON."""
    return [("price_of", {"item": item}), json.dumps({"price": price})]


def by(name: str, field: str) -> Callable[[str, int], list[Turn]]:
    """A call, then another one that gives the answer."""
    return lambda item, price: [("price_of", {"item": item}), (name, {field: price})]


def _code(item: str, price: int) -> list[Turn]:
    first = f'Thought: I ask the tool.\n<code>\nprint(price_of(item="{item}"))\n</code>'
    return [first, f"Thought: I know it.\n<code>\nfinal_answer({price})\n</code>"]


def _json_code(item: str, price: int) -> list[Turn]:
    first = {"thought": "I ask the tool.", "code": f'print(price_of(item="{item}"))'}
    return [json.dumps(first), json.dumps({"thought": "I know it.", "code": f"final_answer({price})"})]


_DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def _commands(price: int) -> list[str]:
    return ["cat prices", f"echo {price} > answer", _DONE]


def _bash(item: str, price: int) -> list[Turn]:
    return [("bash", {"command": command}) for command in _commands(price)]


def _bash_text(item: str, price: int) -> list[Turn]:
    return [f"THOUGHT: next.\n\n```mswea_bash_command\n{command}\n```" for command in _commands(price)]


def _terminal(item: str, price: int) -> list[Turn]:
    steps = [("cat prices\n", False), (f"echo {price} > answer\n", False), ("", True), ("", True)]
    return [
        json.dumps(
            {
                "analysis": "a",
                "plan": "p",
                "commands": [{"keystrokes": keys, "duration": 0.3}] if keys else [],
                "task_complete": done,
            }
        )
        for keys, done in steps
    ]


def _lines(item: str, price: int) -> list[Turn]:
    return [f"price {item}", f"answer {price}"]


def _then_json(item: str, price: int) -> list[Turn]:
    return [*tool(item, price), json.dumps({"price": price})]


def _agents(
    library: str, venv: str, file: str, **by_name: tuple[str, Any] | tuple[str, Any, dict[str, Any]]
) -> list[Agent]:
    """The configurations of one library: name -> (argument, turns, what differs); no argument: the example itself."""
    found = []
    for name, (argument, turns, *more) in by_name.items():
        program = (PROGRAMS if argument else EXAMPLES) / file
        options: dict[str, Any] = more[0] if more else {}
        found.append(Agent(f"{library}, {name.replace('_', ' ')}", venv, program, turns, argument, **options))
    return found


RESPONSES = {"dialect": "responses"}
REWRITES = {"segments": 2}  # writes a call of its interpreter behind each turn, so that no turn comes back as it was
AGENTS = [
    *_agents(
        "OpenAI Agents SDK",
        "openai-agents",
        "openai_agents.py",
        default=("", tool, RESPONSES),
        chat_model=("chat", tool),
        chat_model_streamed=("streamed", tool),
        chat_model_output_type=("typed", schema),
    ),
    *_agents(
        "smolagents",
        "smolagents",
        "smolagents_agent.py",
        ToolCallingAgent=("", by("final_answer", "answer")),
        CodeAgent=("plain", _code, REWRITES),
        CodeAgent_streamed=("streamed", _code, REWRITES),
        CodeAgent_structured=("structured", _json_code, REWRITES),
    ),
    *_agents(
        "pydantic-ai",
        "pydantic-ai",
        "pydantic_ai_agent.py",
        openai_NAME=("", tool, RESPONSES),
        chat_model=("plain", tool),
        chat_model_typed=("typed", by("final_result", "price")),
        chat_model_native=("native", schema),
        chat_model_streamed=("streamed", tool),
    ),
    *_agents(
        "langgraph",
        "langgraph",
        "langgraph_agent.py",
        create_agent=("", tool),
        create_react_agent=("react", tool),
        typed=("typed", by("Price", "price")),
        with_structured_output=("structured", _then_json, {"segments": 2}),
        streamed=("streamed", tool),
    ),
    *_agents(
        "mini-swe-agent",
        "mini-swe-agent",
        "mini_swe_agent.py",
        default=("", _bash),
        text=("textbased", _bash_text),
        response=("response", _bash, RESPONSES),
    ),
    Agent("terminus-2", "harbor", EXAMPLES / "terminus_2.py", _terminal),
    Agent("Anthropic SDK", "anthropic", EXAMPLES / "anthropic_agent.py", tool, dialect="messages"),
    Agent("openai client, all set by hand", "openai", PROGRAMS / "openai_client.py", tool),
    Agent("litellm", "mini-swe-agent", PROGRAMS / "litellm_loop.py", _lines),
    Agent("verifiers 0.4", "verifiers", EXAMPLES / "verifiers_agent.py", tool),
]


def play(agent: Agent, model: Path) -> tuple[Trajectory, Recording]:
    """One episode, in a folder for the model's tokenizer; raises what the episode raises."""
    os.environ.update(SAO_SEED=str(TASK.seed), SAO_SPLIT=TASK.split)
    task = load(EXAMPLES / "task.py").Task()
    renderer = Renderer(folder(model, FAMILY))
    turns = [
        sampled(renderer, turn if isinstance(turn, str) else call_text(renderer, turn))
        for turn in agent.turns(task.item, task.price)
    ]
    engine = Recording(lambda _, number: Reply(turns[min(number, len(turns) - 1)]))
    python = venvs.python_of(agent.venv)
    env = registry.make(
        "agent",
        command=[str(python), str(agent.program), *([agent.argument] if agent.argument else [])],
        reward="last_line",
        environment={
            **{"PYTHONPATH": str(EXAMPLES), "HOME": str(model), "PYTHONWARNINGS": "ignore"},
            "PATH": f"{Path(str(python)).parent}:{os.environ['PATH']}",
            "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv"),
        },
    )
    config = configured(
        model,
        env={"max_turns": 12, "episode_timeout_s": 240.0},
        sampling={"max_response_tokens": 2000, "context_tokens": 60_000},
        learner={"row_tokens": 60_000},
    )

    async def main() -> Trajectory:
        async with hosting(config, engine, env) as playing:
            return await playing(TASK)

    return decode(*encode(asyncio.run(main()))), engine


def tool_answered(trajectory: Trajectory, engine: Recording) -> bool:
    """Whether a turn behind the first one has seen more than the first prompt and turn: the tool's result."""
    first = engine.given[0]
    start = [*first[0], *first[1].token_ids.tolist()]
    return any(len(prompt) > len(start) for prompt, _ in engine.given[1:])


def check(agent: Agent, trajectory: Trajectory, engine: Recording) -> None:
    """That the episode is what it has to be; what is trained is what was sampled."""
    check_books(trajectory, engine)
    assert trajectory.termination.kind == "finished" and trajectory.reward == 1.0
    assert tool_answered(trajectory, engine)
    assert len(trajectory.segments) == agent.segments, trajectory.metadata
    assert trajectory.metadata["agent_drift"] == agent.drift, trajectory.metadata
