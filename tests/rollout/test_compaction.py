"""Compaction in the episode loop: what is recorded, what is carried, and every case in which something does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from rollout.compacting import (
    END,
    FIRST_TOKENS,
    GLUE,
    OPENING,
    REQUEST_TOKENS,
    RESUMED_TOKENS,
    SYSTEM,
    Speaker,
    Talk,
    compacted,
    configured,
    turn,
)
from scripted import Reply, ScriptedEngine

from sao.config import parse
from sao.envs.protocol import Message
from sao.errors import ConfigError
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compactor, Template, templates
from sao.trajectory import Trajectory


def kinds(trajectory: Trajectory) -> list[str]:
    return [segment.kind for segment in trajectory.segments]


def turns_of(trajectory: Trajectory) -> list[int]:
    """Sampled stretches per segment."""
    starts = [np.diff(np.concatenate(([0], s.action_mask.astype(int)))) == 1 for s in trajectory.segments]
    return [int(found.sum()) for found in starts]


def text(trajectory: Trajectory, index: int, path: Path) -> str:
    tokenizer = Renderer(path)._tokenizer
    return str(tokenizer.decode(trajectory.segments[index].token_ids.tolist())).replace("\n", "/")


def test_lengths_that_the_tests_count_with(tiny_model: Path, tmp_path: Path) -> None:
    renderer = Renderer(tiny_model)
    compactor = Compactor(configured(tiny_model, tmp_path), renderer)
    assert renderer.initial(OPENING).size == FIRST_TOKENS
    assert renderer.observation((Message("tool", ""),), END).size == GLUE
    assert compactor.request_tokens == REQUEST_TOKENS and compactor.threshold_tokens == 6 + 12 + 8 + 6
    assert renderer.initial((SYSTEM, Message("user", "r e s g o"))).size == RESUMED_TOKENS


@pytest.mark.parametrize(("used", "compacts"), [(55_296, False), (55_297, True)])
def test_the_trigger_is_a_remaining_context_below_the_threshold(
    tiny_model: Path, tmp_path: Path, used: int, compacts: bool
) -> None:
    """C = 65,536 and T = 10,240: with 55,296 tokens 10,240 remain, which is not less."""
    config = configured(tiny_model, tmp_path, context=65_536, threshold_tokens=10_240, observation_cap_tokens=10_000)
    speaker = Speaker([turn(20)])
    compacted(config, Talk([used - FIRST_TOKENS - 2 - GLUE]), speaker)
    asked = [request.id.rpartition("/")[2] for request, _ in speaker.said]
    assert asked == (["0", "summary-0", "1"] if compacts else ["0", "1"])
    if not compacts:
        assert speaker.said[1][0].prompt_ids.size == used


def test_three_turns_a_summary_four_turns_a_summary_two_turns(tiny_model: Path, tmp_path: Path) -> None:
    """m compactions make m + 1 execution and m summary segments; a boundary is an event, not a guess from lengths."""
    config = configured(tiny_model, tmp_path, context=120, keep_steps=1)
    env, speaker = Talk([11, 11, 12, 1, 1, 1, 1, 1], turn_rewards={2: 0.25, 4: 0.5}), Speaker([turn(20, 21)])
    trajectory = compacted(config, env, speaker)
    assert kinds(trajectory) == ["execution", "summary", "execution", "summary", "execution"]
    assert turns_of(trajectory) == [3, 1, 4, 1, 2]
    assert (trajectory.reward, trajectory.termination.kind) == (1.0, "finished")
    # Rewards of turns are on their own tokens, in the segments where these were sampled.
    (first, second) = trajectory.turn_rewards
    assert (first[0], second[0]) == (0, 2) and [r for _, _, r in (first, second)] == [0.25, 0.5]
    assert all(trajectory.segments[s].token_ids[at] == END for s, at, _ in (first, second))
    assert env.heard == ["b c"] * 9, "summaries are not said to the environment"


def test_the_request_begins_with_the_segment_and_the_window_is_rebuilt(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, tmp_path, context=84)
    speaker = Speaker([turn(20, 21), turn(22), turn(23, 24, 25)], [turn(30, 31)])
    trajectory = compacted(config, Talk([1, 2, 3]), speaker)
    execution, summary, resumed = trajectory.segments[:3]
    assert summary.token_ids[: execution.n_tokens].tolist() == execution.token_ids.tolist()
    assert text(trajectory, 1, tiny_model).endswith(
        "tool / 2 2 2 <|im_end|> / <|im_start|> user / s u m <|im_end|> / <|im_start|> assistant / l m <|im_end|>"
    )
    # System prompt, resume message with the summary, the last two steps id for id; the task's own message is gone.
    assert text(trajectory, 2, tiny_model).startswith(
        "<|im_start|> system / a b <|im_end|> / <|im_start|> user / r e s l m g o <|im_end|> / "
        "<|im_start|> assistant / d <|im_end|> / <|im_start|> tool / 1 1 <|im_end|> / <|im_start|> assistant / e f g"
    )
    start = RESUMED_TOKENS + 2
    steps = summary.token_ids[FIRST_TOKENS + 3 + GLUE + 1 : -3 - REQUEST_TOKENS]
    assert resumed.token_ids[start : start + steps.size - 3].tolist() == steps[:-3].tolist()
    # The copies, those of the assistant's own words included, are context.
    copied = resumed.token_ids.tolist().index(22, start)
    assert summary.action_mask.sum() == 3 and not resumed.action_mask[: copied + 8].any()
    assert trajectory.metadata["carried_steps"] == "2"


def test_the_summary_turn_is_asked_of_the_same_policy_under_the_same_conditions(tiny_model, tmp_path) -> None:
    config, speaker = configured(tiny_model, tmp_path), Speaker([turn(20)])
    compacted(config, Talk([3, 3, 3]), speaker)
    by_kind = {"summary" in request.id: request for request, _ in speaker.said}
    plain, summary = by_kind[False], by_kind[True]
    assert (plain.session, plain.temperature, plain.stop_token_ids) == (
        summary.session,
        summary.temperature,
        summary.stop_token_ids,
    )
    assert summary.max_new_tokens == 6 and summary.seed != plain.seed


@pytest.mark.parametrize(
    ("keep", "opening"),
    [
        (False, "system / a b <|im_end|> / <|im_start|> user / r e s l m g o <|im_end|>"),
        (True, "system / a b <|im_end|> / <|im_start|> user / t a s k / / r e s l m g o <|im_end|>"),
    ],
)
def test_the_task_prompt_is_repeated_only_when_asked(
    tiny_model: Path, tmp_path: Path, keep: bool, opening: str
) -> None:
    """In one message with the summary, since many templates refuse two of a role in a row."""
    config = configured(tiny_model, tmp_path, context=100, keep_task_prompt=keep, keep_steps=0)
    trajectory = compacted(config, Talk([9, 9, 9, 9]), Speaker([turn(20)], [turn(30, 31)]))
    assert opening in text(trajectory, 2, tiny_model) and trajectory.metadata["compaction_keeps_task_prompt"] is keep


def test_a_merged_summary_ends_the_row_of_its_steps(tiny_model: Path, tmp_path: Path) -> None:
    config, speaker = configured(tiny_model, tmp_path, merge_summary=True), Speaker([turn(20)])
    trajectory = compacted(config, Talk([3, 3, 3, 1]), speaker)
    assert kinds(trajectory) == ["execution", "execution"] and trajectory.metadata["compactions"] == 1
    assert turns_of(trajectory)[0] == 4  # three turns and the summary
    separate = compacted(configured(tiny_model, tmp_path), Talk([3, 3, 3, 1]), Speaker([turn(20)]))
    assert separate.n_actions == trajectory.n_actions
    assert separate.segments[1].token_ids.tolist() == trajectory.segments[0].token_ids.tolist()


def test_a_fixed_summariser_writes_context(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing that it writes was sampled by the policy: no summary segment, no token, no fingerprint."""
    config = configured(tiny_model, tmp_path, summariser=str(tiny_model))
    speaker, other = Speaker([turn(20)]), Speaker([turn(20)], [turn(30, 31)])
    engine, fixed = ScriptedEngine(speaker, version=4), ScriptedEngine(other, fingerprint="f" * 32)
    trajectory = compacted(config, Talk([3, 3, 3]), speaker, engine=engine, summariser=fixed)
    assert kinds(trajectory) == ["execution", "execution"]
    assert [request.id for request in fixed.requests] == ["train/3/0/summary-0"]
    assert not any("summary" in request.id for request in engine.requests)
    assert trajectory.fingerprints == {4: "0" * 32}
    assert "r e s l m g o" in text(trajectory, 1, tiny_model)
    assert trajectory.metadata["compaction_summariser"] == str(tiny_model)
    assert fixed.calls[-1] == ("release", "train/3/0")


def test_weights_may_change_between_turns_and_summaries(tiny_model: Path, tmp_path: Path) -> None:
    speaker = Speaker([turn(20)])
    engine = ScriptedEngine(lambda request, number: speaker(request, bump(number)))

    def bump(number: int) -> int:
        engine.version, engine._fingerprints[number] = number, "0" * 32
        return number

    trajectory = compacted(configured(tiny_model, tmp_path), Talk([3, 3, 3]), speaker, engine=engine)
    versions = [segment.version_spans[:, 2].tolist() for segment in trajectory.segments]
    assert versions == sorted(versions) and (trajectory.min_version, trajectory.max_version) == (0, 3)


# -- what does not fit


def test_compactions_are_limited(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, tmp_path, max_compactions=2)
    trajectory = compacted(config, Talk([3] * 50), Speaker([turn(20)]))
    assert (trajectory.termination.kind, trajectory.termination.reason) == ("truncated", "compactions")
    assert kinds(trajectory) == ["execution", "summary", "execution", "summary", "execution"]
    assert trajectory.reward == 0.0 and trajectory.metadata["compactions"] == 2


def test_a_huge_observation_is_rolled_back_and_forgotten_if_nothing_holds_it(tiny_model, tmp_path) -> None:
    """The turn before it stays in its segment, trained; the summary is asked for without it, and every request fits."""
    config, speaker = configured(tiny_model, tmp_path, context=100), Speaker([turn(20), turn(21)])
    trajectory = compacted(config, Talk([1, 90, 1]), speaker)
    assert trajectory.termination.kind == "finished"
    execution, summary = trajectory.segments[:2]
    assert turns_of(trajectory) == [2, 1, 2]
    shared = FIRST_TOKENS + 2 + GLUE + 1 - 2  # up to the first observation's end, where the next turn would start
    assert summary.token_ids[:shared].tolist() == execution.token_ids[:shared].tolist()
    facts = trajectory.metadata
    assert (facts["rolled_back_steps"], facts["forgotten_steps"], facts["carried_steps"]) == (1, 1, "0")


def test_a_rolled_back_step_is_carried_when_the_new_window_holds_it(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, tmp_path, context=120)
    trajectory = compacted(config, Talk([12, 12, 45]), Speaker([turn(20)]))
    facts = trajectory.metadata
    assert (facts["rolled_back_steps"], facts["forgotten_steps"], facts["carried_steps"]) == (1, 0, "1")
    assert "2 2 2 2" in text(trajectory, 2, tiny_model) and "2 2 2 2" not in text(trajectory, 1, tiny_model)


def test_a_merged_summary_of_a_rolled_back_window_gets_its_own_row(tiny_model: Path, tmp_path: Path) -> None:
    """Its context is not that of the row before it."""
    config = configured(tiny_model, tmp_path, context=100, merge_summary=True)
    trajectory = compacted(config, Talk([1, 90, 1]), Speaker([turn(20), turn(21)]))
    assert kinds(trajectory) == ["execution", "summary", "execution"]


def test_with_clipping_a_huge_observation_is_cut_to_its_cap(tiny_model: Path, tmp_path: Path) -> None:
    config, speaker = configured(tiny_model, tmp_path, context=100, clip=True), Speaker([turn(20)])
    trajectory = compacted(config, Talk([1, 90, 1]), speaker)
    facts = trajectory.metadata
    assert (facts["clipped_observations"], facts["rolled_back_steps"], facts["compactions"]) == (1, 0, 0)
    assert speaker.said[2][0].prompt_ids.size - speaker.said[1][0].prompt_ids.size == 2 + 12


def test_with_clipping_an_observation_leaves_room_for_the_summary_request(tiny_model, tmp_path) -> None:
    """A threshold below the sum of the caps is allowed then: what would not fit is cut further."""
    config = configured(tiny_model, tmp_path, context=64, clip=True, threshold_tokens=20, observation_cap_tokens=40)
    speaker = Speaker([turn(20), turn(20, 21, 22, 23)])
    trajectory = compacted(config, Talk([2, 40]), speaker)
    assert trajectory.metadata["clipped_observations"] == 1 and trajectory.metadata["compactions"] == 1
    (request,) = [request for request, _ in speaker.said if "summary" in request.id]
    assert request.prompt_ids.size + 6 == 64 and trajectory.metadata["rolled_back_steps"] == 0


def test_with_clipping_what_cannot_be_cut_enough_is_rolled_back(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, tmp_path, context=50, clip=True, threshold_tokens=4, response=12)
    trajectory = compacted(config, Talk([2, 1]), Speaker([turn(20), turn(*range(20, 31))], [turn(30)]))
    facts = trajectory.metadata
    assert (facts["rolled_back_steps"], facts["compactions"], facts["clipped_observations"]) == (1, 1, 0)


def test_a_permitted_small_threshold_cuts_no_observation(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, tmp_path, context=64, small_threshold=True, threshold_tokens=20)
    trajectory = compacted(config, Talk([30, 1]), Speaker([turn(20), turn(21)], [turn(30)]))
    facts = trajectory.metadata
    assert (facts["rolled_back_steps"], facts["compactions"], facts["clipped_observations"]) == (1, 1, 0)


@pytest.mark.parametrize("limit", range(12, 30))
def test_the_longest_text_is_cut_first_and_from_its_end(tiny_model: Path, limit: int) -> None:
    """Two tool results in one observation; their markup is never cut."""
    renderer = Renderer(tiny_model)
    messages = (Message("tool", "a b c"), Message("tool", "1 2 3 4 5 6 7 8 9 0"))
    size = renderer.observation(messages, None).size

    def render(messages: Sequence[Message]) -> np.ndarray:
        return renderer.observation(messages, None)

    found = renderer.cut(messages, limit, render)
    if found is None:
        assert limit < renderer.observation([Message("tool", "")] * 2, None).size
        return
    assert renderer.observation(found, None).size == min(size, limit)
    short, long = (message.content.split() for message in found)
    assert ["a", "b", "c"][: len(short)] == short and list("1234567890")[: len(long)] == long
    assert renderer.cut(messages, size, render) == messages


def test_no_room_to_ask_for_a_summary_ends_the_rollout(tiny_model: Path, tmp_path: Path) -> None:
    """Even the first messages alone are too long: the rollout is truncated with its own reason."""
    first = (SYSTEM, Message("user", " ".join("a" * 46)))
    config, speaker = configured(tiny_model, tmp_path, context=70), Speaker([turn(20)])
    trajectory = compacted(config, Talk([1], first=first), speaker)
    assert trajectory.termination.reason == "summary_request" and kinds(trajectory) == ["execution"]
    assert trajectory.metadata["compactions"] == 0 and trajectory.reward == 0.0


def test_a_summary_cut_by_its_limit_is_used_as_far_as_it_goes(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, tmp_path)
    trajectory = compacted(config, Talk([3, 3, 3]), Speaker([turn(20)], [Reply([30] * 9)]))
    assert trajectory.termination.kind == "finished"
    assert (trajectory.metadata["summary_tokens"], trajectory.metadata["summary_stop_reasons"]) == ("6", "length")
    assert trajectory.segments[1].n_actions == 6 and "r e s l l l l l l g o" in text(trajectory, 2, tiny_model)


@pytest.mark.parametrize("words", [[], [1], [1, 1]], ids=["nothing", "markup", "more markup"])
def test_an_empty_summary_ends_the_rollout_on_its_own_token(tiny_model: Path, tmp_path: Path, words: list[int]) -> None:
    """The new window is never made, so there is no segment without a sampled token."""
    trajectory = compacted(configured(tiny_model, tmp_path), Talk([3] * 9), Speaker([turn(20)], [turn(*words)]))
    assert (trajectory.termination.kind, trajectory.termination.reason) == ("truncated", "empty_summary")
    assert kinds(trajectory) == ["execution", "summary"] and trajectory.reward == 0.0
    assert trajectory.segments[-1].action_mask[-1] and trajectory.segments[-1].n_actions == len(words) + 1


def test_a_summary_that_frees_nothing_ends_the_rollout(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, tmp_path, context=80, max_summary_tokens=30, clip=True, threshold_tokens=35)
    trajectory = compacted(config, Talk([3] * 9), Speaker([turn(20)], [turn(*[30] * 29)]))
    assert trajectory.termination.reason == "no_room" and kinds(trajectory) == ["execution", "summary"]
    assert trajectory.metadata["carried_steps"] == "" and trajectory.metadata["summary_tokens"] == "30"


def test_a_second_trigger_right_after_the_first_is_a_compaction_like_any_other(tiny_model, tmp_path) -> None:
    config = configured(tiny_model, tmp_path, context=68, keep_steps=1)
    trajectory = compacted(config, Talk([3, 3, 3, 3, 3]), Speaker([turn(20)]))
    assert trajectory.termination.reason == "compactions"
    assert turns_of(trajectory)[2:] == [1, 1, 1, 1, 1], "one turn between two summaries"


@pytest.mark.parametrize(("context", "carried"), [(120, "2"), (72, "1"), (56, "0")])
def test_fewer_steps_are_carried_when_they_do_not_fit(
    tiny_model: Path, tmp_path: Path, context: int, carried: str
) -> None:
    """A step fits if the threshold is free behind it, so that the next turn cannot take the summary's room."""
    config = configured(tiny_model, tmp_path, context=context)
    n = (context - 32 - FIRST_TOKENS) // (2 + GLUE + 3) + 1
    trajectory = compacted(config, Talk([3] * n), Speaker([turn(20)]))
    assert trajectory.metadata["carried_steps"].split(",")[0] == carried


def test_an_end_beyond_the_threshold_keeps_its_reward(tiny_model: Path, tmp_path: Path) -> None:
    """The environment is done in a turn after which a compaction would have been due: nothing is asked any more."""
    config, speaker = configured(tiny_model, tmp_path, context=64), Speaker([turn(20), turn(*range(20, 25))])
    trajectory = compacted(config, Talk([1]), speaker)
    assert (trajectory.reward, trajectory.termination.kind) == (1.0, "finished") and len(speaker.said) == 2


# -- texts and settings


def test_versions_of_the_texts_travel_with_the_trajectory(tiny_model: Path, tmp_path: Path) -> None:
    trajectory = compacted(configured(tiny_model, tmp_path), Talk([1]), Speaker([turn(20)]))
    assert trajectory.metadata["compaction_request"] == "request.txt#" + digest("s u m")
    assert trajectory.metadata["compaction_resume"] == "resume.txt#" + digest("r e s {summary} g o")
    assert trajectory.metadata["interaction_tokens"] == FIRST_TOKENS + 2 + GLUE + 1


def digest(content: str) -> str:
    import hashlib

    return hashlib.blake2b(content.encode(), digest_size=4).hexdigest()


def test_the_shipped_texts_are_there_and_ask_for_what_a_summary_needs() -> None:
    config = parse({"model": {"path": "m"}, "env": {"name": "e"}})
    request, resume = templates(config)
    assert (request.name, resume.name) == ("summary_v1", "resume_v1")
    for part in ("original task", "done so far", "observations", "errors", "current state", "next"):
        assert part in request.text
    assert resume.text.count("{summary}") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("prompt_file", "  \n", "compaction.prompt_file: .* is empty"),
        ("resume_file", "no place", "compaction.resume_file: .* must hold {summary} once"),
        ("resume_file", "{summary} {summary}", "compaction.resume_file: .* must hold {summary} once"),
    ],
)
def test_unusable_texts_are_refused(tiny_model: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / "own.txt").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Compactor(configured(tiny_model, tmp_path, **{name: str(tmp_path / "own.txt")}), Renderer(tiny_model))


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compaction.prompt_file: .*nowhere.txt"):
        Template.load("summary_v1", str(tmp_path / "nowhere.txt"), "compaction.prompt_file")


def test_a_threshold_that_cannot_hold_a_turn_and_a_summary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """The length of the request is known only with the tokenizer; 32 is enough, 31 is not, unless it is permitted."""
    renderer = Renderer(tiny_model)
    assert Compactor(configured(tiny_model, tmp_path, threshold_tokens=32), renderer).threshold_tokens == 32
    with pytest.raises(ConfigError, match=r"31 must be at least 32: .*request.*= 8 .*compaction.small_threshold"):
        Compactor(configured(tiny_model, tmp_path, threshold_tokens=31), renderer)
    for permission in ("clip", "small_threshold"):
        assert Compactor(configured(tiny_model, tmp_path, threshold_tokens=31, **{permission: True}), renderer)
    with pytest.raises(ConfigError, match=r"32 .* must be below sampling.context_tokens = 31"):
        Compactor(configured(tiny_model, tmp_path, context=31), renderer)


def test_a_summariser_with_other_tokens_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from tiny_model import LETTERS, make_folder

    from sao.generator.player import make_summariser

    other = make_folder(tmp_path / "other")
    vocabulary = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(vocabulary.replace(f'"{LETTERS[0]}":', '"A":'))
    config = configured(tiny_model, tmp_path, summariser=str(other))
    with pytest.raises(ConfigError, match=r"compaction.summariser: .* its tokenizer is not that of model.path"):
        make_summariser(config, Renderer(tiny_model), 0)
    with pytest.raises(ConfigError, match="no engine was started"):
        Compactor(config, Renderer(tiny_model))


# -- any episode at all

words = st.integers(20, 40)
turns = st.lists(st.lists(words, min_size=0, max_size=8).map(lambda ids: turn(*ids)), min_size=1, max_size=6)
cut_turns = st.lists(st.lists(words, min_size=1, max_size=14).map(Reply), min_size=1, max_size=4)


@settings(max_examples=150)
@given(
    context=st.integers(40, 130),
    sizes=st.lists(st.one_of(st.integers(0, 12), st.integers(0, 120)), max_size=14),
    said=st.one_of(turns, cut_turns),
    summaries=st.one_of(turns, cut_turns),
    options=st.fixed_dictionaries(
        {
            "max_compactions": st.integers(1, 4),
            "keep_steps": st.integers(0, 3),
            "keep_task_prompt": st.booleans(),
            "merge_summary": st.booleans(),
            "max_summary_tokens": st.integers(1, 12),
            "observation_cap_tokens": st.integers(1, 20),
        }
    ),
    clip=st.one_of(st.none(), st.integers(1, 60)),
    role=st.sampled_from(["tool", "user"]),
)
def test_no_token_is_lost_or_recorded_twice(
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    context: int,
    sizes: list[int],
    said: list[Reply],
    summaries: list[Reply],
    options: dict[str, Any],
    clip: int | None,
    role: str,
) -> None:
    """Trained + dropped = sampled, token by token; no request exceeds the context; every end has its reason."""
    if clip is not None:
        options |= {"clip": True, "threshold_tokens": min(clip, context - 1)}
    folder = tmp_path_factory.getbasetemp()
    try:
        config = configured(tiny_model, folder, context=context, **options)
        Compactor(config, Renderer(tiny_model))
    except ConfigError as error:
        assert "compaction.threshold_tokens" in str(error)
        return
    trajectory = compacted(config, Talk(sizes, role=role), Speaker(said, summaries))
    reasons = {"": "finished"} | dict.fromkeys(
        ["compactions", "summary_request", "empty_summary", "no_room"], "truncated"
    )
    assert reasons[trajectory.termination.reason] == trajectory.termination.kind
    event(f"{trajectory.termination.reason or 'finished'}")
    event(f"rolled back: {trajectory.metadata['rolled_back_steps'] != 0}")
