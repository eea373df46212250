"""The reasoning-gym adapter: what is scored, what a failed scorer becomes, and wrong arguments."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

from sao.envs.protocol import Message
from sao.envs.reasoning_gym import ReasoningGym, extract
from sao.envs.threads import in_thread
from sao.errors import ConfigError, EnvironmentFailure

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
ROUNDS = 12


def right(question: str) -> int:
    """The answer to `... problem: 5 - 9 =`."""
    left, operator, operand = question.rpartition(":")[2].strip(" =").split()
    return int(left) + int(operand) * (1 if operator == "+" else -1)


def score(reply: Callable[[int], str], **args: Any) -> set[float]:
    """The rewards of replies that know the right answer, over some tasks."""

    async def one(seed: int) -> float:
        environment = ReasoningGym("chain_sum", SUM, **args)
        messages = await environment.reset(seed, "train")
        result = await environment.step(reply(right(messages[-1].content)))
        assert result.done
        assert result.reward is not None
        return result.reward

    return {asyncio.run(one(seed)) for seed in range(ROUNDS)}


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (lambda a: f"<answer>{a}</answer>", 1.0),
        (lambda a: f"I think\n<answer>\n {a} \n</answer> yes", 1.0),
        (lambda a: f"<answer>{a + 1}</answer> no: <answer>{a}</answer>", 1.0),
        (lambda a: f"<answer>{a}</answer> no: <answer>{a + 1}</answer>", 0.0),
        (lambda a: f"<answer>{a}</answer> so <answer>", 1.0),
        (lambda a: f"<answer>{a}", 0.0),
        (lambda a: str(a), 0.0),
        (lambda a: "", 0.0),
        (lambda a: "<answer></answer>", 0.0),
        (lambda a: "<answer>reward = 1.0</answer>", 0.0),
        (lambda a: '<answer>{"score": 1.0, "answer": null}</answer>', 0.0),
    ],
)
def test_the_last_complete_answer_is_scored_by_the_dataset(reply: Callable[[int], str], reward: float) -> None:
    assert score(reply, exact=True) == {reward}


def test_partial_scores_of_the_dataset_are_kept_unless_exact() -> None:
    partial = score(lambda a: f"<answer>it is {a}</answer>")
    assert all(0.0 < reward < 1.0 for reward in partial)
    assert score(lambda a: f"<answer>it is {a}</answer>", exact=True) == {0.0}


def test_without_a_tag_the_whole_reply_is_scored() -> None:
    assert score(lambda a: f" {a}\n", tag="") == {1.0}
    assert score(lambda a: f"<answer>{a}</answer>", tag="", exact=True) == {0.0}


@pytest.mark.parametrize(
    ("text", "tag", "found"),
    [
        ("<a>1</a><a>2</a>", "a", "2"),
        ("<a>1<a>2</a>", "a", "2"),
        ("</a><a>1", "a", None),
        ("<b>1</b>", "a", None),
        ("<a> </a>", "a", None),
        ("<a>1</a></a>", "a", "1</a>"),
        (" x ", "", "x"),
        ("  ", "", None),
    ],
)
def test_extract(text: str, tag: str, found: str | None) -> None:
    assert extract(text, tag) == found


def test_extraction_takes_linear_time() -> None:
    began = time.perf_counter()
    assert extract("<answer>" * 200_000, "answer") is None
    assert extract("<answer>" * 200_000 + "</answer>", "answer") is None
    assert time.perf_counter() - began < 2.0


def test_wrong_replies_get_feedback_and_the_last_reply_counts() -> None:
    async def play(*replies: Callable[[int], str]) -> tuple[list[str], float | None]:
        environment = ReasoningGym("chain_sum", SUM, turns=3)
        answer = right((await environment.reset(3, "train"))[-1].content)
        heard = []
        for reply in replies:
            result = await environment.step(reply(answer))
            if result.done:
                assert result.messages == ()
                return heard, result.reward
            assert result.reward is None
            heard.append(result.messages[0].content)
        raise AssertionError("the episode does not end")

    def good(answer: int) -> str:
        return f"<answer>{answer}</answer>"

    def bad(answer: int) -> str:
        return f"<answer>{answer + 1}</answer>"

    assert asyncio.run(play(good)) == ([], 1.0)
    heard, reward = asyncio.run(play(bad, str, good))
    assert reward == 1.0
    assert "not right" in heard[0]
    assert "no <answer>" in heard[1]
    assert asyncio.run(play(bad, bad, bad))[1] == 0.0


def test_prompts() -> None:
    def opening(**args: Any) -> list[Message]:
        return list(asyncio.run(ReasoningGym("chain_sum", SUM, **args).reset(0, "train")))

    system, user = opening(tag="final")
    assert (system.role, user.role) == ("system", "user")
    assert "<final>ANSWER</final>" in system.content
    assert [m.role for m in opening(tag="")] == ["user"]
    assert [m.role for m in opening(system="")] == ["user"]
    assert opening(system="Use {tag}.")[0].content == "Use answer."
    shown = opening(example={"question": "1 + 1 =", "answer": "<answer>2</answer>"})
    assert [m.role for m in shown] == ["system", "user", "assistant", "user"]


# A scorer that fails: in none of these cases is the reward 0.


def step_with(monkeypatch: pytest.MonkeyPatch, scorer: Callable[..., Any], **args: Any) -> str:
    """The reason of the failure when the dataset scores with `scorer`."""
    monkeypatch.setattr(ChainSumDataset, "score_answer", scorer)

    async def step() -> None:
        environment = ReasoningGym("chain_sum", SUM, **args)
        await environment.reset(0, "train")
        await environment.step("<answer>1</answer>")

    with pytest.raises(EnvironmentFailure) as failure:
        asyncio.run(step())
    return failure.value.reason


@pytest.mark.parametrize("value", [None, "", "abc", "1", math.nan, math.inf, -0.5, 1.5])
def test_a_scorer_without_a_usable_verdict(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    assert step_with(monkeypatch, lambda self, answer, entry: value) == "bad_reward"


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("answer"), AssertionError(), SystemExit(0), StopIteration()]
)
def test_a_scorer_that_crashes(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def crash(*_: Any) -> float:
        raise error

    assert step_with(monkeypatch, crash) == "scorer_error"


def test_a_scorer_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: Any) -> float:
        release.wait(60)
        return 1.0

    began = time.monotonic()
    try:
        assert step_with(monkeypatch, hang, score_timeout_s=0.2) == "timeout"
        assert time.monotonic() - began < 5.0
    finally:
        release.set()


def test_a_late_verdict_of_a_thread_is_ignored() -> None:
    async def late() -> str:
        with pytest.raises(EnvironmentFailure, match="timeout"):
            await in_thread(lambda: time.sleep(0.3), 0.05, "scorer")
        return await in_thread(lambda: (time.sleep(0.5), "next")[1], 10.0, "scorer")

    assert asyncio.run(late()) == "next"


def test_a_draw_that_finds_no_question_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChainSumDataset, "__getitem__", lambda self, index: {"question": "always this", "answer": "1"})

    def splits() -> list[str]:
        empty = []
        for split in ("train", "eval"):
            try:
                asyncio.run(ReasoningGym("chain_sum", SUM).reset(0, split))
            except EnvironmentFailure as failure:
                assert failure.reason == "empty_split"
                empty.append(split)
        return empty

    assert len(splits()) == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"dataset": "chain_sums"}, "'chain_sums' is unknown to reasoning-gym; near: .*chain_sum"),
        ({"dataset": "zzzzzz"}, "it has .* datasets"),
        ({"dataset": []}, "expected at least one name"),
        ({"dataset": "chain_sum", "params": {"min_term": 2}}, "params.min_term: 'chain_sum' takes .*min_terms"),
        ({"dataset": "chain_sum", "params": {"seed": 2}}, "params.seed"),
        ({"dataset": "chain_sum", "params": {"min_terms": 5, "max_terms": 2}}, "'chain_sum' refuses"),
        ({"dataset": ["chain_sum", "gcd"], "params": {"lcm": {}}}, "params.lcm: expected one table for each of"),
        ({"dataset": "chain_sum", "tag": "<a>"}, "env.args.tag"),
        ({"dataset": "chain_sum", "turns": 0}, "env.args.turns"),
        ({"dataset": "chain_sum", "score_timeout_s": 0}, "env.args.score_timeout_s"),
        ({"dataset": "chain_sum", "example": {"q": "x"}}, "env.args.example"),
    ],
)
def test_a_wrong_argument_is_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReasoningGym(**args)
