"""Turns that outlive their generator: the episode goes on with the same tokens, or says that it cannot."""

import asyncio

import msgpack
import numpy as np
import pytest
from scripted import Reply, ScriptedEngine

from sao.config import parse
from sao.engines.base import Completion
from sao.envs.protocol import Message, StepResult
from sao.errors import WireError
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder
from sao.rollout.scripted_chat import ScriptedRenderer
from sao.rollout.turns import DivergedError, Turn, pack, unpack


class Counting:
    reward_range = (0.0, 1.0)
    replayable = True

    def __init__(self, odd_turn: int = -1) -> None:
        self.turn, self.odd = 0, odd_turn
        self.heard: list[str] = []

    async def reset(self, seed, split):
        return (Message("user", f"task {seed}"),)

    async def step(self, text):
        self.turn += 1
        self.heard.append(text)
        if self.turn == 5:
            return StepResult((), 1.0, True)
        word = "odd" if self.turn == self.odd else "even"
        return StepResult((Message("user", f"{word} {self.turn}"),), 0.25 if self.turn == 2 else None, False)

    async def close(self):
        pass


@pytest.fixture
def renderer(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 48}')
    return ScriptedRenderer(tmp_path)


@pytest.fixture
def config():
    limits = {"max_response_tokens": 4, "context_tokens": 256}
    return parse({"model": {"path": "m"}, "env": {"name": "x", "max_turns": 9}, "sampling": limits})


def play(config, renderer, turns=(), version=3, env=None, send=None):
    def script(request, number):
        ids = [2 + (version * 7 + number * 5 + i) % 40 for i in range(3)]
        return Reply([*ids, 0], [-0.1 * version] * 4)

    engine = ScriptedEngine(script, version=version, fingerprint=f"{version:032x}")
    env = env or Counting()
    recorder = Recorder(engine, renderer, config, Assignment(7, 1, 5, "train", tuple(turns)), send=send)
    return asyncio.run(run_episode(recorder, env)), recorder, env


def test_an_episode_goes_on_after_the_turns_of_another_with_their_tokens_logprobs_and_versions(config, renderer):
    sent = []
    whole, recorder, env = play(config, renderer, send=lambda *turn: sent.append(turn))
    assert [turn[0] for turn in sent] == [0, 1, 2, 3] and len(recorder.engine.requests) == 5  # not the last turn
    assert [turn[1:3] for turn in sent] == [(4, 3)] * 4
    for count in range(1, 5):
        turns, more = [unpack(*turn[3:]) for turn in sent[:count]], []
        again, recorder, replayed = play(config, renderer, turns, 5, send=lambda *t, m=more: m.append(t))
        assert len(recorder.engine.requests) == 5 - count and replayed.heard[:count] == env.heard[:count]
        assert [turn[0] for turn in more] == list(range(count, 4))
        (old,), (new,) = whole.segments, again.segments
        cut = int(np.flatnonzero(new.action_mask)[4 * count - 1]) + 1
        assert np.array_equal(old.token_ids[:cut], new.token_ids[:cut])
        assert np.array_equal(old.logprobs[:cut], new.logprobs[:cut], equal_nan=True)
        versions = {int(row[2]) for row in new.version_spans}
        assert versions == {3, 5} and set(again.fingerprints) == {3, 5}
        assert new.n_actions == recorder.sampled_tokens == 20 and recorder.turns == 5
        assert [reward for _, _, reward in again.turn_rewards] == [0.25]


@pytest.mark.parametrize("odd_turn", [1, 3])
def test_an_environment_that_does_not_repeat_itself_is_found_and_its_tokens_are_counted(config, renderer, odd_turn):
    sent = []
    play(config, renderer, send=lambda *turn: sent.append(turn))
    turns = [unpack(*turn[3:]) for turn in sent]
    with pytest.raises(DivergedError) as caught:
        play(config, renderer, turns, env=Counting(odd_turn))
    assert caught.value.sampled_tokens == 16 and f"turn {odd_turn - 1}" in str(caught.value)


def test_a_turn_survives_packing_and_rubbish_is_refused():
    spans = np.array([[0, 1, 2], [1, 3, 4]], np.int64)
    completion = Completion(np.arange(3, dtype=np.int32), np.full(3, -0.5, np.float32), spans, "stop", {2: "a", 4: "b"})
    turn = unpack(*pack(Turn((completion,), b"x" * 16, b"y" * 16)))
    (found,) = turn.completions
    assert np.array_equal(found.token_ids, completion.token_ids) and np.array_equal(found.version_spans, spans)
    assert found.fingerprints == {2: "a", 4: "b"} and (turn.n_tokens, turn.max_version) == (3, 4)
    header, payload = pack(turn)
    first, observed, shapes, _ = msgpack.unpackb(header)
    odd = [(msgpack.packb([first, observed, shapes, *more]), payload) for more in ((), (0, 0), ("0",), (None,))]
    for bad in ((header[:-1], payload), (header, payload[:-8]), (b"", b""), (b"\xc1", payload), *odd):
        with pytest.raises(WireError, match="turn: not a valid record"):
            unpack(*bad)
