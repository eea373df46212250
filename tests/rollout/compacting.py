"""Episodes that compact: an environment of given observations, an engine of given turns, and what must always hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scripted import Reply, ScriptedEngine

from sao.config import Config, parse
from sao.engines.base import Request
from sao.envs.protocol import Message, StepResult
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compactor
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder
from sao.rollout.turns import unpack
from sao.trajectory import Trajectory, decode, encode

END = 2
SYSTEM = Message("system", "a b")
TASK_PROMPT = Message("user", "t a s k")
REQUEST, RESUME = "s u m", "r e s {summary} g o"
FIRST_TOKENS, GLUE = 19, 9  # of the first messages; of an observation without a word, the turn's end not included
REQUEST_TOKENS = 8  # that the request adds to a window
RESUMED_TOKENS = 20  # of a rebuilt window without the summary's words and without steps
OPENING = (SYSTEM, TASK_PROMPT)
TASK = Assignment(ordinal=3, attempt=0, seed=7, split="train")


@dataclass
class Talk:
    """An environment with one observation per entry of `sizes` (words); after the last the episode is done."""

    sizes: Sequence[int]
    first: tuple[Message, ...] = OPENING
    reward: float = 1.0
    role: str = "tool"
    turn_rewards: dict[int, float] = field(default_factory=dict)
    reward_range = (0.0, 1.0)
    replayable = True
    heard: list[str] = field(default_factory=list)

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        return self.first

    async def step(self, text: str) -> StepResult:
        turn = len(self.heard)
        self.heard.append(text)
        if turn == len(self.sizes):
            return StepResult((), self.reward, True)
        words = " ".join("0123456789"[turn % 10] for _ in range(self.sizes[turn]))
        return StepResult((Message(self.role, words),), self.turn_rewards.get(turn), False)

    async def close(self) -> None:
        pass


@dataclass
class Speaker:
    """An engine's script: turns and summaries one after the other, the last of each for ever."""

    turns: Sequence[Reply]
    summaries: Sequence[Reply] = (Reply([30, 31, END]),)
    said: list[tuple[Request, Reply]] = field(default_factory=list)
    n_turns: int = 0
    n_summaries: int = 0

    def __call__(self, request: Request, number: int) -> Reply:
        if "summary" in request.id:
            reply = self.summaries[min(self.n_summaries, len(self.summaries) - 1)]
            self.n_summaries += 1
        else:
            reply = self.turns[min(self.n_turns, len(self.turns) - 1)]
            self.n_turns += 1
        ids = list(reply.token_ids)[: request.max_new_tokens]
        stop = "stop" if ids[-1] == END else "length"
        self.said.append((request, Reply(ids, [-0.5 - 0.01 * i for i in range(len(ids))], None, stop)))
        return self.said[-1][1]


def configured(path: Path, folder: Path, context: int = 80, response: int = 6, **compaction: Any) -> Config:
    """Responses and summaries of 6 tokens at most, observations of 12: the smallest threshold is 32 tokens."""
    (folder / "request.txt").write_text(REQUEST)
    (folder / "resume.txt").write_text(RESUME)
    base = {
        "enabled": True,
        "max_summary_tokens": 6,
        "observation_cap_tokens": 12,
        "prompt_file": str(folder / "request.txt"),
        "resume_file": str(folder / "resume.txt"),
    }
    return parse(
        {
            "model": {"path": str(path)},
            "env": {"name": "lookup", "max_turns": 100},
            "sampling": {"max_response_tokens": response, "context_tokens": context},
            "compaction": base | compaction,
            "learner": {"row_tokens": max(4096, context)},
        }
    )


def compacted(
    config: Config,
    env: Talk,
    speaker: Speaker,
    *,
    engine: ScriptedEngine | None = None,
    summariser: ScriptedEngine | None = None,
) -> Trajectory:
    """Plays an episode and checks all that must hold of any episode."""
    engine, renderer = engine or ScriptedEngine(speaker), Renderer(config.model.path)
    kept = list[tuple[int, int]]()

    def send(part: int, n_tokens: int, version: int, header: bytes, payload: bytes) -> None:
        kept.append((n_tokens, unpack(header, payload).n_tokens))

    recorder = Recorder(engine, renderer, config, TASK, 1, send)
    trajectory = asyncio.run(run_episode(recorder, env, compactor=Compactor(config, renderer, summariser)))
    check(trajectory, speaker, config, merged=config.compaction.merge_summary)
    assert recorder.sampled_tokens == trajectory.n_actions
    assert all(told == read for told, read in kept) and sum(told for told, _ in kept) < trajectory.n_actions
    assert len({request.id for request in engine.requests}) == len(engine.requests)
    return trajectory


def check(trajectory: Trajectory, speaker: Speaker, config: Config, *, merged: bool) -> None:
    """Nothing sampled is lost, recorded twice or under another context; nothing given is taken for sampled."""
    context = config.sampling.context_tokens
    places: list[tuple[int, int]] = []
    index, done = 0, 0
    for request, reply in speaker.said:
        n, m = request.prompt_ids.size, len(reply.token_ids)
        assert n + request.max_new_tokens <= context, "the engine was asked for more than the context holds"
        while n < done or not holds(trajectory, index, request.prompt_ids, reply):
            index, done = index + 1, 0  # tokens and segments come in the order in which they were sampled
            assert index < len(trajectory.segments), f"{request.id}: its context and tokens are in no later segment"
        places += [(index, n + offset) for offset in range(m)]
        done = n + m
    sampled = [(s, int(at)) for s, seg in enumerate(trajectory.segments) for at in np.flatnonzero(seg.action_mask)]
    assert places == sampled, "every sampled token in exactly one segment, and no other is an action"
    assert all(segment.n_actions for segment in trajectory.segments)
    assert all(segment.action_mask[-1] for segment in trajectory.segments)
    kinds = [segment.kind for segment in trajectory.segments]
    policy_writes = config.compaction.summariser is None
    if policy_writes and not merged:
        assert kinds == (["execution", "summary"] * len(kinds))[: len(kinds)]
        assert kinds.count("summary") == trajectory.metadata["compactions"]
    else:
        assert merged or set(kinds) == {"execution"}
    assert trajectory.metadata["compactions"] <= config.compaction.max_compactions
    again = decode(*encode(trajectory))
    assert [s.token_ids.tolist() for s in again.segments] == [s.token_ids.tolist() for s in trajectory.segments]


def holds(trajectory: Trajectory, index: int, prompt: np.ndarray, reply: Reply) -> bool:
    """Whether the segment has these tokens, sampled, behind this very context."""
    segment = trajectory.segments[index]
    n, ids = prompt.size, np.asarray(reply.token_ids)
    part = slice(n, n + ids.size)
    return bool(
        segment.n_tokens >= part.stop
        and (segment.token_ids[:n] == prompt).all()
        and (segment.token_ids[part] == ids).all()
        and segment.action_mask[part].all()
        and np.array_equal(segment.logprobs[part], np.asarray(reply.logprobs, np.float32))
    )


def turn(*ids: int) -> Reply:
    """A turn of these tokens and its end."""
    return Reply([*ids, END])
