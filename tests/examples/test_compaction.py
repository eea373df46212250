"""The compaction example: its tokens, its lengths and that an episode compacts as its README says."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scripted import Reply, ScriptedEngine

from sao.config import Config, load
from sao.engines.base import Request
from sao.envs.protocol import Message
from sao.envs.recall import VALUES, WORDS, Recall, draw
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compactor
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder
from sao.trajectory import Trajectory

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """`make_model.py` as a module."""
    path = ROOT / "examples" / "compaction" / "make_model.py"
    spec = importlib.util.spec_from_file_location("compaction_make_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(program: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of the example."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = program.build_tokenizer()
    program.build_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The run file, whose template files are named from the root of the repository."""
    monkeypatch.chdir(ROOT)
    return load(ROOT / "examples" / "compaction" / "run.toml", [f"model.path={folder}"])


def play(config: Config, summaries: list[list[str]] | None = None, seed: int = 3) -> tuple[Trajectory, Renderer]:
    """An episode of a script that says `next`, writes the two facts that may be asked into summaries, and answers."""
    renderer = Renderer(config.model.path)
    words = renderer._tokenizer.get_vocab()
    task = draw(seed, "train", **config.env.args)
    kept = [str(fact) for fact in task.facts if fact.key in ("pear", "plum")]

    def script(request: Request, number: int) -> Reply:
        last = renderer.decode(request.prompt_ids[-6:]).split()
        name = request.id.rpartition("/")[2]
        if name.startswith("summary"):
            index = int(name.partition("-")[2])
            text = kept if summaries is None else summaries[index]
        elif "ask" in last:
            seen = dict(word.split("=") for word in renderer.decode(request.prompt_ids).split() if "=" in word)
            text = ["say", seen.get(last[-1], VALUES[0])]
        else:
            text = ["next"]
        ids = [words[word] for word in text][: request.max_new_tokens]
        if len(ids) < request.max_new_tokens:
            return Reply([*ids, renderer.stop_token_ids[0]])
        return Reply(ids, stop_reason="length")

    engine = ScriptedEngine(script, vocab_size=len(words))
    episode = Assignment(ordinal=0, attempt=0, seed=seed, split="train")
    environment = Recall(**config.env.args)
    compactor = Compactor(config, renderer)
    recorder = Recorder(engine, renderer, config, episode)
    return asyncio.run(run_episode(recorder, environment, compactor=compactor)), renderer


def test_words_are_tokens(program: ModuleType) -> None:
    tokenizer = program.build_tokenizer()
    for seed in range(50):
        for text in (*draw(seed, "train").observations, draw(seed, "train").answer, " ".join(WORDS)):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert len(ids) == len(text.split())
            assert tokenizer.unk_token_id not in ids


def test_an_episode_is_four_windows_long_and_its_summaries_carry_it(config: Config) -> None:
    trajectory, _ = play(config)
    facts = trajectory.metadata
    assert trajectory.reward == 1.0
    assert trajectory.termination.kind == "finished"
    assert facts["compactions"] == config.compaction.max_compactions
    assert isinstance(facts["interaction_tokens"], int)
    assert facts["interaction_tokens"] >= 4 * config.sampling.context_tokens
    assert [segment.kind for segment in trajectory.segments] == ["execution", "summary"] * 6 + ["execution"]
    assert max(segment.n_tokens for segment in trajectory.segments) <= config.sampling.context_tokens
    assert facts["turns"] < config.env.max_turns


def test_without_the_asked_fact_in_the_summary_only_a_guess_is_left(config: Config) -> None:
    summaries = [["saw=1", "axe=1"]] * 6
    rewards = [play(config, summaries, seed)[0].reward for seed in range(30)]
    assert sum(reward or 0.0 for reward in rewards) < 15


def test_longer_shorter_and_changing_summaries_do_not_change_the_number_of_windows(config: Config) -> None:
    for words in (["saw=1"], ["saw=1", "axe=1", "axe=2"]):
        trajectory, _ = play(config, [words] * 6)
        assert trajectory.termination.kind == "finished"
        assert trajectory.metadata["compactions"] == 6


def test_demonstrations_have_the_tokens_of_real_windows(program: ModuleType, config: Config) -> None:
    """Windows that the script above plays are windows that pretraining shows, token for token."""
    trajectory, renderer = play(config)
    first = trajectory.segments[1].token_ids
    task = draw(3, "train", **config.env.args)
    kept = " ".join(str(fact) for fact in task.facts if fact.key in ("pear", "plum"))
    observations = [*task.observations[:2], f"{task.filler[0]}{program.REQUEST}"]
    text = program.window("begin", observations, kept)
    assert np.array_equal(first, renderer._tokenizer(text, add_special_tokens=False)["input_ids"])
    later = program.window(kept, [*task.filler[1:3], f"{task.filler[3]}{program.REQUEST}"], kept)
    assert np.array_equal(
        trajectory.segments[3].token_ids, renderer._tokenizer(later, add_special_tokens=False)["input_ids"]
    )
    last = program.window(kept, [task.filler[-1], f"ask {task.asked.key}"], task.answer)
    assert np.array_equal(
        trajectory.segments[-1].token_ids, renderer._tokenizer(last, add_special_tokens=False)["input_ids"]
    )


def test_the_start_policy_is_not_taught_which_facts_are_asked(program: ModuleType) -> None:
    """Over many demonstrations every key is as often in a first summary as any other."""
    rng = random.Random(1)
    counts: dict[str, int] = {}
    for _ in range(2000):
        for fact in program.windows(rng, False)[0].rpartition("<assistant>")[2].removesuffix("<end>").split():
            counts[fact.split("=")[0]] = counts.get(fact.split("=")[0], 0) + 1
    assert len(counts) == 8
    assert max(counts.values()) - min(counts.values()) < 150  # 500 each on average, standard deviation 20


def test_an_opening_of_the_task_holds_nothing_of_it() -> None:
    assert asyncio.run(Recall().reset(0, "train")) == (Message("user", "begin"),)
