"""Whole episodes of `workspace` through the generator: a scripted agent that succeeds, and a model that does not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from scripted import Reply, ScriptedEngine
from tests.tiny_model import CHATML, SPECIAL, make_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sao.config import Config, parse
from sao.engines.base import Engine, Request
from sao.engines.torch_engine import TorchEngine
from sao.envs import sandbox
from sao.envs.workspace import Workspace
from sao.envs.workspace_tasks import RepositoryTask, draw
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compactor
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder
from sao.trajectory import Trajectory

pytestmark = pytest.mark.skipif(
    sandbox.bubblewrap()[0] is None and sandbox.namespaces()[0] is None,
    reason=f"no sandbox: {sandbox.bubblewrap()[1]}; {sandbox.namespaces()[1]}",
)
SEED, MODULES = 5, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes: every text has tokens, and every token is text."""
    path = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)
    make_model(vocab_size=len(vocabulary), max_position_embeddings=4096).save_pretrained(path)
    return path


def configured(folder: Path, max_turns: int, max_response_tokens: int, context_tokens: int) -> Config:
    return parse(
        {
            "model": {"path": str(folder)},
            "env": {"name": "workspace", "max_turns": max_turns},
            "sampling": {"max_response_tokens": max_response_tokens, "context_tokens": context_tokens},
            "learner": {"row_tokens": 4096},
            "compaction": {
                "enabled": True,
                "max_compactions": 20,
                "max_summary_tokens": 64,
                "observation_cap_tokens": 900,
                "keep_steps": 1,
            },
        }
    )


def play(engine: Engine, config: Config) -> Trajectory:
    async def whole() -> Trajectory:
        renderer = Renderer(config.model.path)
        environment = Workspace(modules=MODULES, output_chars=700, wall_s=15.0, allow_unprotected=True)
        task = Assignment(ordinal=0, attempt=0, seed=SEED, split="train")
        await engine.start()
        try:
            shared = Compactor(config, renderer)
            return await run_episode(Recorder(engine, renderer, config, task, 1), environment, compactor=shared)
        finally:
            await engine.close()

    return asyncio.run(whole())


def scripts(task: RepositoryTask) -> list[str]:
    """What somebody does who reads, edits, looks at the result and commits."""
    steps = ["ls; git log --oneline", "cat docs/order.md"]
    for path, text in task.solution().items():
        name = Path(path).stem
        steps += [f"cat docs/{'order' if name == 'total' else name}.md {path}", f"cat > {path} <<'END'\n{text}END"]
    return [
        *steps,
        f"python3 -c 'from {task.package}.total import total; print(total(1000, 3))'",
        "git commit -qam fixed",
        "done",
    ]


def test_a_scripted_agent_solves_it_over_many_windows(folder: Path) -> None:
    config = configured(folder, max_turns=40, max_response_tokens=800, context_tokens=3000)
    renderer = Renderer(folder)
    turns = iter(scripts(draw(random.Random(f"train {SEED}"), MODULES)))

    def script(request: Request, number: int) -> Reply:
        summary = request.id.rpartition("/")[2].startswith("summary")
        ids = list(renderer._encode("I am at it." if summary else next(turns)))
        assert len(ids) < request.max_new_tokens
        return Reply([*ids, renderer.stop_token_ids[0]])

    trajectory = play(ScriptedEngine(script, vocab_size=renderer.vocab_size), config)
    facts = trajectory.metadata
    assert trajectory.termination.kind == "finished"
    assert trajectory.reward == 1.0
    assert isinstance(facts["interaction_tokens"], int)
    assert facts["interaction_tokens"] > 4 * config.sampling.context_tokens
    assert isinstance(facts["compactions"], int)
    assert facts["compactions"] > 4


def test_a_model_drives_it_until_its_turns_are_over(folder: Path) -> None:
    config = configured(folder, max_turns=6, max_response_tokens=60, context_tokens=2500)
    engine = TorchEngine(folder, slots=1, context_tokens=2500, seed=0, threads=1)
    trajectory = play(engine, config)
    assert trajectory.termination.kind == "truncated"
    assert trajectory.termination.reason == "max_turns"
    assert trajectory.reward == 0.0
    assert trajectory.metadata["turns"] == 6
    compactions = trajectory.metadata["compactions"]
    assert isinstance(compactions, int)
    assert compactions >= 1
    assert sum(segment.kind == "summary" for segment in trajectory.segments) == compactions
