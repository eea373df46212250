"""The episode loop against a scripted engine and environments that do everything wrong that can be done wrong."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import Reply, ScriptedEngine

from sao.config import Config, parse
from sao.engines.base import Request
from sao.envs.protocol import Message, StepResult
from sao.errors import EngineError, EnvironmentFailure
from sao.rollout.chat import Renderer
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder
from sao.rollout.window import Window
from sao.trajectory import Trajectory, decode, encode

END = 2
FIRST = (Message("user", "a b"),)
TASK = Assignment(ordinal=5, attempt=1, seed=77, split="train")


class Play:
    """An environment that says `replies` one after the other; an exception among them is raised, a callable called."""

    reward_range = (0.0, 1.0)
    replayable = True

    def __init__(self, *replies: Any, first: Any = FIRST, close: Any = None) -> None:
        self.replies, self.first, self.closing = list(replies), first, close
        self.heard: list[str] = []
        self.reset_with: list[tuple[int, str]] = []
        self.closed = 0

    async def reset(self, seed: int, split: str) -> Any:
        self.reset_with.append((seed, split))
        return await say(self.first)

    async def step(self, text: str) -> Any:
        self.heard.append(text)
        return await say(self.replies.pop(0) if self.replies else turn("c"))

    async def close(self) -> None:
        self.closed += 1
        await say(self.closing)


async def say(reply: Any) -> Any:
    if isinstance(reply, BaseException):
        raise reply
    return await reply() if callable(reply) else reply


def turn(text: str, reward: float | None = None) -> StepResult:
    return StepResult((Message("tool", text),), reward, False)


def done(reward: Any) -> StepResult:
    return StepResult((), reward, True)


def configured(path: Path, **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": {"path": str(path)},
        "env": {"name": "play", "max_turns": 4, "step_timeout_s": 10.0},
        "sampling": {"max_response_tokens": 6, "context_tokens": 64, "temperature": 0.7},
        "eval": {"temperature": 0.0},
    }
    return parse({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def says(*ids: int, **more: Any) -> Callable[[Request, int], Reply]:
    return lambda request, number: Reply(list(ids), **more)


def play(
    path: Path,
    env: Play,
    engine: ScriptedEngine | None = None,
    task: Assignment = TASK,
    made: list[Recorder] | None = None,
    sections: dict[str, dict[str, Any]] | None = None,
) -> Trajectory:
    """Plays an episode; its recorder is the last of `made`."""
    engine = engine or ScriptedEngine(says(20, 21, END))
    recorder = Recorder(engine, Renderer(path), configured(path, **(sections or {})), task, 3)
    if made is not None:
        made.append(recorder)

    async def main() -> Trajectory:
        return await run_episode(recorder, env)

    try:
        return asyncio.run(main())
    finally:
        assert env.closed == 1
        assert engine.calls[-1][0] == "release"


def test_a_finished_episode_is_recorded_token_by_token(tiny_model: Path) -> None:
    env = Play(turn("c"), turn("d", 0.25), done(1.0))
    engine = ScriptedEngine(says(20, 21, 22, END), version=3)
    trajectory = play(tiny_model, env, engine)
    (segment,) = trajectory.segments
    renderer = Renderer(tiny_model)
    expected: list[int] = renderer.initial([Message("user", "a b")]).tolist()
    sampled: list[int] = []
    for text in ("c", "d", None):
        sampled += range(len(expected), len(expected) + 4)
        expected += [20, 21, 22, END]
        if text:
            expected += renderer.observation([Message("tool", text)], END).tolist()
    assert segment.token_ids.tolist() == expected
    assert np.flatnonzero(segment.action_mask).tolist() == sampled
    assert segment.logprobs[sampled].tolist() == [-1.0] * 12
    assert segment.version_spans[:, 2].tolist() == [3, 3, 3]
    assert (trajectory.reward, trajectory.termination.kind, trajectory.termination.reason) == (1.0, "finished", "")
    assert trajectory.turn_rewards == ((0, sampled[7], 0.25),)
    assert trajectory.temperature == 0.7 and trajectory.fingerprints == {3: engine.fingerprint}
    assert (trajectory.task_ordinal, trajectory.attempt, trajectory.env) == (5, 1, "play")
    facts = {"seed": 77, "split": "train", "turns": 3, "stop_reasons": "stop,stop,stop"}
    assert trajectory.metadata == facts | engine.metadata
    assert set(trajectory.timings_s) == {"reset", "generate", "step"}
    assert (
        env.reset_with == [(77, "train")] and env.heard == ["b c d".replace("b c d", renderer.decode([20, 21, 22]))] * 3
    )
    assert decode(*encode(trajectory)).id == trajectory.id
    # Each request's prompt is the whole of what was there, so it extends the one before.
    prompts = [request.prompt_ids.tolist() for request in engine.requests]
    assert all(prompts[i + 1][: len(prompts[i])] == prompts[i] for i in range(2))
    assert len({request.seed for request in engine.requests}) == 3
    assert {request.session for request in engine.requests} == {"train/5/1"}


def test_glue_that_also_occurs_in_sampled_text_is_told_apart(tiny_model: Path) -> None:
    """Only what was sampled is an action, even when the policy writes the template's own tokens."""
    start, newline, user = 1, 4, 6
    trajectory = play(tiny_model, Play(turn("c"), done(0.0)), ScriptedEngine(says(start, user, newline, END)))
    (segment,) = trajectory.segments
    assert segment.n_actions == 8
    assert segment.token_ids[segment.action_mask].tolist() == [start, user, newline, END] * 2


def test_a_turn_cut_by_its_length_goes_on_to_the_environment(tiny_model: Path) -> None:
    env = Play(turn("c"), done(1.0))
    trajectory = play(tiny_model, env, ScriptedEngine(says(20, 21, 22, 23, 24, 25, stop_reason="length")))
    (segment,) = trajectory.segments
    assert trajectory.metadata["stop_reasons"] == "length,length" and len(env.heard) == 2
    ids, mask = segment.token_ids.tolist(), segment.action_mask.tolist()
    last = 11 - 1 + 6  # the prompt has 10 tokens
    assert mask[10:16] == [True] * 6
    assert (ids[last], mask[last]) == (END, False)


def test_versions_change_inside_a_turn(tiny_model: Path) -> None:
    trajectory = play(tiny_model, Play(done(1.0)), ScriptedEngine(says(20, 21, 22, END, versions=[7, 7, 8, 8])))
    (segment,) = trajectory.segments
    at = int(np.argmax(segment.action_mask))
    assert segment.version_spans.tolist() == [[at, at + 2, 7], [at + 2, at + 4, 8]]
    assert set(trajectory.fingerprints) == {7, 8}
    assert (trajectory.min_version, trajectory.max_version) == (7, 8)


def test_max_turns_truncates(tiny_model: Path) -> None:
    trajectory = play(tiny_model, Play(turn("c", 0.5)))
    assert (trajectory.termination.kind, trajectory.termination.reason) == ("truncated", "max_turns")
    assert trajectory.metadata["turns"] == 4 and trajectory.reward == 0.0
    assert [reward for _, _, reward in trajectory.turn_rewards] == [0.5]
    # The observation of the last turn is not recorded: nothing was sampled after it.
    assert bool(trajectory.segments[0].action_mask[-1])


def test_the_last_turn_may_finish(tiny_model: Path) -> None:
    assert play(tiny_model, Play(turn("c"), turn("c"), turn("c"), done(0.5))).termination.kind == "finished"


def test_a_range_without_zero_gives_its_nearest_end_at_a_truncation(tiny_model: Path) -> None:
    env = Play()
    env.reward_range = (-3.0, -1.0)
    assert play(tiny_model, env).reward == -1.0


def test_budgets_shrink_with_the_context_and_never_reach_zero(tiny_model: Path) -> None:
    env = Play(*[turn("c d e")] * 20)
    engine = ScriptedEngine(lambda request, n: Reply([20] * request.max_new_tokens, stop_reason="length"))
    trajectory = play(
        tiny_model,
        env,
        engine,
        sections={"env": {"max_turns": 99}, "sampling": {"max_response_tokens": 20, "context_tokens": 60}},
    )
    asked = [(request.prompt_ids.size, request.max_new_tokens) for request in engine.requests]
    assert all(new == min(20, 60 - size) and new >= 1 for size, new in asked)
    assert any(new < 20 for _, new in asked)
    assert (trajectory.termination.kind, trajectory.termination.reason) == ("truncated", "context")
    assert trajectory.segments[0].n_tokens <= 60
    assert bool(trajectory.segments[0].action_mask[-1])


async def forever() -> None:
    await asyncio.sleep(3600)


HANGS = {"env": {"step_timeout_s": 0.5}}
FAILURES = {
    "reset raises": (Play(first=RuntimeError("no disk")), "reset_error"),
    "reset fails": (Play(first=EnvironmentFailure("no_sandbox", "x")), "no_sandbox"),
    "reset hangs": (Play(first=forever), "timeout"),
    "reset says nothing": (Play(first=()), "bad_messages"),
    "reset returns junk": (Play(first=["text"]), "bad_messages"),
    "too long": (Play(first=(Message("user", "a " * 100),)), "prompt_too_long"),
    "step raises": (Play(turn("c"), KeyError("x")), "step_error"),
    "step raises a timeout of its own": (Play(TimeoutError()), "step_error"),
    "step cancels itself": (Play(asyncio.CancelledError()), "step_error"),
    "step fails": (Play(EnvironmentFailure("tool_gone")), "tool_gone"),
    "step hangs": (Play(forever), "timeout"),
    "step returns junk": (Play(None), "bad_result"),
    "no reward": (Play(done(None)), "bad_reward"),
    "nan": (Play(done(math.nan)), "bad_reward"),
    "inf": (Play(done(math.inf)), "bad_reward"),
    "too much": (Play(done(1.5)), "bad_reward"),
    "text": (Play(done("1")), "bad_reward"),
    "turn reward": (Play(turn("c", math.nan)), "bad_reward"),
    "no messages": (Play(StepResult((), None, False)), "bad_messages"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_have_a_reason_and_no_reward(tiny_model: Path, case: str) -> None:
    env, reason = FAILURES[case]
    made: list[Recorder] = []
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure) as caught:
        play(tiny_model, env, made=made, sections=HANGS if "hangs" in case else None)
    assert caught.value.reason == reason
    assert time.monotonic() - began < 60
    assert made[0].sampled_tokens == 3 * len(env.heard)


class Blunt(Play):
    """An environment whose methods are plain functions: they raise, or return, where an awaitable is expected."""

    def __init__(self, where: str, what: Any) -> None:
        super().__init__(done(1.0))
        setattr(self, where, lambda *_: (_ for _ in ()).throw(what) if isinstance(what, Exception) else what)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (Blunt("reset", RuntimeError("no disk")), "reset_error"),
        (Blunt("reset", FIRST), "reset_error"),
        (Blunt("step", EnvironmentFailure("tool_gone")), "tool_gone"),
        (Blunt("step", done(1.0)), "step_error"),
    ],
)
def test_an_environment_with_plain_functions_fails_like_any_other(tiny_model: Path, env: Blunt, reason: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        play(tiny_model, env)
    assert caught.value.reason == reason


ENGINE_FAULTS = {
    "nan": (Reply([20, 21, END], [-1, math.nan, -2]), "bad_logprob"),
    "minus infinity": (Reply([20, 21, END], [-1, -math.inf, -2]), "bad_logprob"),
    "positive": (Reply([20, 21, END], [-1, 0.3, -2]), "bad_logprob"),
    "fewer log-probs": (Reply([20, 21, 22, 23, END], [-1] * 4), "no_token_capture: .* have lengths 5 and 4"),
    "more log-probs": (Reply([20, 21, 22, END], [-1] * 5), "no_token_capture: .* have lengths 4 and 5"),
    "nothing": (Reply([], [], stop_reason="stop"), "no_token_capture"),
    "aborted": (Reply([20], stop_reason="abort"), "aborted"),
    "no context": (Reply([], stop_reason="context"), "aborted"),
    "too many": (Reply([20] * 7, stop_reason="length"), "bad_completion: .* at most 6"),
    "missed stop": (Reply([20, END, 21], stop_reason="length"), "bad_completion: .* did not end"),
    "false stop": (Reply([20, 21], stop_reason="stop"), "bad_completion"),
    "version falls": (Reply([20, 21, END], versions=[8, 7, 7]), "bad_completion"),
    "missing versions": (Reply([20, 21, END], versions=[7, 7]), "no_token_capture"),
    "no fingerprint": (Reply([20, END], fingerprints={}), "bad_completion: .* no fingerprint"),
    "raises": (Reply([], error=EngineError("engine: gone")), "engine: gone"),
}


@pytest.mark.parametrize("case", ENGINE_FAULTS)
def test_bad_completions_are_never_recorded(tiny_model: Path, case: str) -> None:
    reply, text = ENGINE_FAULTS[case]
    with pytest.raises(EngineError, match=text):
        play(tiny_model, Play(done(1.0)), ScriptedEngine(lambda request, n: reply))


def test_two_weights_under_one_version_are_noticed(tiny_model: Path) -> None:
    def script(request: Request, n: int) -> Reply:
        return Reply([20, END], fingerprints={0: f"{n:032x}"})

    with pytest.raises(EngineError, match="version 0 has fingerprint"):
        play(tiny_model, Play(turn("c"), done(1.0)), ScriptedEngine(script))


def test_evaluation_has_its_own_temperature(tiny_model: Path) -> None:
    for split, temperature in (("eval", 0.0), ("train", 0.7)):
        engine = ScriptedEngine(says(20, END))
        trajectory = play(tiny_model, Play(done(1.0)), engine, task=Assignment(5, 1, 77, split))  # type: ignore[arg-type]
        assert engine.requests[0].temperature == trajectory.temperature == temperature


def test_attempts_draw_differently_and_the_same_attempt_alike(tiny_model: Path) -> None:
    def seeds(attempt: int) -> list[int | None]:
        engine = ScriptedEngine(says(20, END))
        play(tiny_model, Play(turn("c"), done(1.0)), engine, task=Assignment(5, attempt, 77, "train"))
        return [request.seed for request in engine.requests]

    assert seeds(1) == seeds(1) and not set(seeds(1)) & set(seeds(2))


def test_a_failing_or_hanging_close_does_not_spoil_the_result(tiny_model: Path) -> None:
    for close in (RuntimeError("x"), forever):
        assert play(tiny_model, Play(done(1.0), close=close), sections=HANGS).reward == 1.0


def test_a_tool_that_blocks_in_a_thread_or_ignores_its_cancellation_holds_up_nobody(tiny_model: Path) -> None:
    let_go = threading.Event()

    async def stuck() -> None:
        await asyncio.to_thread(let_go.wait, 30)

    async def stubborn() -> None:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def main() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))  # as a generator has, only larger
        config, renderer = configured(tiny_model, env={"step_timeout_s": 1.0}), Renderer(tiny_model)
        engine = ScriptedEngine(says(20, END))
        envs = [*[Play(stuck) for _ in range(40)], *[Play(stubborn) for _ in range(4)], Play(done(1.0))]
        began = time.monotonic()
        results = await asyncio.gather(
            *(
                run_episode(Recorder(engine, renderer, config, Assignment(n, 0, n, "train")), env)
                for n, env in enumerate(envs)
            ),
            return_exceptions=True,
        )
        assert time.monotonic() - began < 15  # half of what the tool blocks
        assert all(env.closed == 1 for env in envs)
        let_go.set()
        await asyncio.sleep(0.1)
        return results

    results = asyncio.run(main())
    assert results[-1].reward == 1.0
    assert [result.reason for result in results[:-1]] == ["timeout"] * 44


def test_cancelling_an_episode_closes_the_environment_once(tiny_model: Path) -> None:
    async def main() -> None:
        config, renderer = configured(tiny_model), Renderer(tiny_model)
        for env, engine in (
            (Play(forever), ScriptedEngine(says(20, END))),
            (Play(first=forever), ScriptedEngine(says(20, END))),
            (Play(), ScriptedEngine(says(20, END, delay_s=60))),
        ):
            episode = asyncio.ensure_future(run_episode(Recorder(engine, renderer, config, TASK), env))
            await asyncio.sleep(0.02)
            episode.cancel()
            with pytest.raises(asyncio.CancelledError):
                await episode
            assert env.closed == 1 and engine.calls[-1] == ("release", "train/5/1")

    asyncio.run(main())


def test_a_rebuilt_window_opens_a_new_segment_and_keeps_both(tiny_model: Path) -> None:
    """What a compaction does: the policy goes on from other messages, both stretches stay as they were sampled."""
    renderer = Renderer(tiny_model)
    recorder = Recorder(ScriptedEngine(says(20, END)), renderer, configured(tiny_model), TASK)
    window = Window(renderer, 64)

    def turn_of(ids: list[int]) -> None:
        recorder.engine.script = says(*ids)  # type: ignore[attr-defined]
        completion, window.segment = asyncio.run(recorder.sample(window.ids, 6, window.segment))
        window.sampled(completion.token_ids)

    window.rebuild([Message("user", "a")])
    turn_of([20, END])
    assert window.segment is not None
    window.rebuild([Message("user", "d")])
    assert window.segment is None
    assert window.ids.tolist() == renderer.initial([Message("user", "d")]).tolist()
    turn_of([21, 22, END])
    first, second = recorder.segments()
    assert (first.kind, first.n_actions, second.kind, second.n_actions) == ("execution", 2, "execution", 3)
    assert window.room_tokens == 64 - second.n_tokens


def test_the_wall_clock_truncates_an_episode_and_says_so(tiny_model: Path) -> None:
    limits = {"env": {"episode_timeout_s": 1.5, "step_timeout_s": 60.0, "max_turns": 100}}

    async def forever() -> None:
        await asyncio.sleep(60)

    began = time.monotonic()
    trajectory = play(tiny_model, Play(turn("c", 0.25), forever), sections=limits)
    assert time.monotonic() - began < 30
    assert (trajectory.termination.kind, trajectory.termination.reason) == ("truncated", "time_limit")
    assert trajectory.n_actions == 6 and trajectory.reward == 0.0  # both turns, the second one unanswered
    assert [reward for _, _, reward in trajectory.turn_rewards] == [0.25]
    slow = ScriptedEngine(says(20, END, delay_s=60))
    with pytest.raises(EnvironmentFailure, match=r"timeout: no turn within env\.episode_timeout_s = 1\.5"):
        play(tiny_model, Play(), slow, sections=limits)


def test_calls_of_environments_wait_for_their_turn_and_not_on_their_deadline(tiny_model: Path) -> None:
    class Counting(Play):
        now = most = 0

        async def step(self, text: str) -> StepResult:
            Counting.now += 1
            Counting.most = max(Counting.most, Counting.now)
            await asyncio.sleep(0.4)
            Counting.now -= 1
            return done(1.0)

    async def main() -> list[Trajectory]:
        config, renderer = configured(tiny_model, env={"step_timeout_s": 2.0}), Renderer(tiny_model)
        engine, calls = ScriptedEngine(says(20, 21, END)), asyncio.Semaphore(2)
        return await asyncio.gather(
            *(
                run_episode(Recorder(engine, renderer, config, Assignment(n, 0, n, "train")), Counting(), calls=calls)
                for n in range(12)  # six rounds of 0.4 s: the last ones wait longer than their own deadline
            )
        )

    assert [trajectory.reward for trajectory in asyncio.run(main())] == [1.0] * 12
    assert Counting.most == 2


class Graded(Play):
    """Can score what was reached when a limit ends the episode."""

    grades = 0

    def __init__(self, *replies: Any, grade: Any = 0.75) -> None:
        super().__init__(*replies)
        self.reached = grade

    async def grade(self) -> Any:
        self.grades += 1
        return await say(self.reached)


def test_what_was_reached_at_a_limit_is_graded(tiny_model: Path) -> None:
    """The right work in the last turn that is allowed is not worth 0; an episode that is done is not graded again."""
    env = Graded(turn("c"))
    trajectory = play(tiny_model, env, sections={"env": {"max_turns": 1}})
    assert (trajectory.termination.reason, trajectory.reward, env.grades) == ("max_turns", 0.75, 1)
    finished = Graded(done(0.5))
    assert play(tiny_model, finished).reward == 0.5 and finished.grades == 0
    for wrong, reason in ((2.0, "bad_reward"), (OSError("no disk"), "grade_error")):
        with pytest.raises(EnvironmentFailure) as caught:
            play(tiny_model, Graded(turn("c"), grade=wrong), sections={"env": {"max_turns": 1}})
        assert caught.value.reason == reason


@pytest.mark.parametrize("choice", ["train", "drop"])
def test_a_cut_by_the_clock_is_graded_and_trained_or_dropped(tiny_model: Path, choice: str) -> None:
    async def forever() -> None:
        await asyncio.sleep(60)

    env = Graded(turn("c"), forever)
    limits = {"env": {"episode_timeout_s": 1.5, "step_timeout_s": 60.0, "max_turns": 100, "at_time_limit": choice}}
    if choice == "train":
        trajectory = play(tiny_model, env, sections=limits)
        assert (trajectory.termination.reason, trajectory.reward) == ("time_limit", 0.75)
        return
    with pytest.raises(EnvironmentFailure) as caught:
        play(tiny_model, env, sections=limits)
    assert caught.value.reason == "time_limit" and env.grades == 0
