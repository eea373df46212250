"""The example with the `openai` client in a whole run, and mini-swe-agent, unchanged, where it is installed."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import Reply, ScriptedEngine
from tiny_model import CHATML
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sao.agents.host import AgentHost
from sao.config import load, parse
from sao.engines.base import Request
from sao.envs import registry
from sao.rollout.chat import Renderer
from sao.rollout.recorder import Assignment, Recorder
from sao.trajectory import Trajectory

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "openai-agent"
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's words and template, with random weights."""
    folder = tmp_path_factory.mktemp("quickstart-model")
    program = "import sys; sys.path.insert(0, sys.argv[1]); import make_model, torch; torch.manual_seed(0); "
    program += "t = make_model.build_tokenizer(); make_model.build_model(t).save_pretrained(sys.argv[2]); "
    program += "t.save_pretrained(sys.argv[2])"
    quickstart = ROOT / "examples" / "quickstart"
    subprocess.run([sys.executable, "-c", program, str(quickstart), str(folder)], check=True)
    return folder


@pytest.mark.timeout(300)
def test_the_example_trains(quickstart_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="needs the package openai")
    small = {
        "model.path": quickstart_model, "run.dir": tmp_path, "run.steps": 2, "learner.critic_warmup_steps": 1,
        "learner.batch_trajectories": 16, "generator.count": 1, "generator.concurrency": 16, "eval.every_steps": 2,
        "eval.episodes": 8, "env.args.command": f'"{sys.executable} {EXAMPLE}/agent.py 8"',
    }  # fmt: skip
    command = [sys.executable, "-m", "sao.cli", "train", str(EXAMPLE / "run.toml")]
    command += [f"{key}={value}" for key, value in small.items()]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (tmp_path / "openai-agent" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[-1]["logprob_gap/max"] < 1e-4 and steps[-1]["tokens/trained"] > 16
    assert steps[-1]["broker/tokens_sampled"] >= steps[-1]["tokens/trained"]
    rounds = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    assert rounds[-1]["n"] == 8 and rounds[-1]["failed"] == 0
    command = [sys.executable, "-m", "sao.cli", "eval", str(quickstart_model), str(EXAMPLE / "run.toml"), *command[6:]]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert result.returncode == 0 and "n = 8" in result.stdout, result.stdout + result.stderr
    alive = subprocess.run(["pgrep", "-f", f"{EXAMPLE}/agent.py 8"], capture_output=True, text=True).stdout
    assert not alive.split(), "the agent outlived the run"


def test_the_example_is_the_quickstart_but_for_who_plays() -> None:
    example, quickstart = load(EXAMPLE / "run.toml"), load(ROOT / "examples" / "quickstart" / "run.toml")
    for section in ("model", "sampling", "generator", "algorithm", "learner", "staleness", "eval"):
        assert getattr(example, section) == getattr(quickstart, section), section


def byte_model(folder: Path) -> Path:
    """A model folder whose tokenizer has a token a byte, so that any text can be said."""
    words = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    names: dict[str, Any] = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": CHATML}
    PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **names).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(words)}))
    return folder


def test_mini_swe_agent_is_trained_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("minisweagent", reason="needs pip install mini-swe-agent")
    renderer = Renderer(byte_model(tmp_path))
    encode = PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def script(request: Request, number: int) -> Reply:
        wanted = re.search(r"number (\d+), and nothing", renderer.decode(request.prompt_ids))
        assert wanted is not None
        commands = [f"echo {wanted[1]} > answer.txt", "env", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
        text = f"THOUGHT: step {number}\n\n```mswea_bash_command\n{commands[number]}\n```"
        return Reply([*encode(text)["input_ids"], 2])

    program = [sys.executable, str(EXAMPLE / "mini_swe_agent.py"), "{seed}"]
    env = registry.make("agent", command=program, reward="last_line")
    config = parse(
        {
            "model": {"path": str(tmp_path)},
            "env": {"name": "agent", "max_turns": 20},
            "sampling": {"max_response_tokens": 1024, "context_tokens": 30_000},
            "learner": {"row_tokens": 30_000},
        }
    )
    engine = ScriptedEngine(script)

    async def play() -> Trajectory:
        host = AgentHost(config, "g0")
        await host.start(env)
        try:
            return await host.play(Recorder(engine, renderer, config, Assignment(0, 0, 11, "train"), 1), env)
        finally:
            await host.close()

    trajectory = asyncio.run(play())
    assert trajectory.reward == 1.0 and trajectory.metadata["turns"] == 3
    (segment,) = trajectory.segments
    assert trajectory.metadata["agent_drift"] == 0 and segment.n_actions == sum(
        len(c.token_ids) for c in replies(engine)
    )
    seen = renderer.decode(segment.token_ids)
    assert "SAO_SEED=11" in seen and "sao-" not in seen  # the environment of its commands holds no key


def replies(engine: ScriptedEngine) -> list[Reply]:
    assert engine.script is not None
    return [engine.script(request, number) for number, request in enumerate(engine.requests)]


def test_the_byte_tokenizer_says_any_text(tmp_path: Path) -> None:
    renderer, text = Renderer(byte_model(tmp_path)), "any text: ä \n```x```\t"
    ids = PreTrainedTokenizerFast.from_pretrained(tmp_path)(text)["input_ids"]
    assert renderer.decode(np.asarray(ids)) == text and len(ids) == len(text.encode())
