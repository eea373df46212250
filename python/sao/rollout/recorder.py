"""The recorder of a rollout: from a request to the engine to the trajectory, for episodes and for agents alike.

A completion is checked and written into a segment once, behind the very prompt it was sampled from.
"""

import hashlib
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from sao.config import Config
from sao.engines.base import Completion, Engine, Request, Watch
from sao.engines.seeds import derive_seed
from sao.errors import EngineError, EnvironmentFailure, ValidationError
from sao.rollout.chat import Renderer
from sao.rollout.turns import Send, Turn, Turns
from sao.trajectory import Metadata, Segment, SegmentBuilder, Termination, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at a task, as the broker hands it out. turns: what a generator before this one has left of it."""

    ordinal: int
    attempt: int
    seed: int
    split: Literal["train", "eval"]
    turns: tuple[Turn, ...] = ()

    @property
    def session(self) -> str:
        """The engine's session that samples it; unique in a run."""
        return f"{self.split}/{self.ordinal}/{self.attempt}"


class Recorder:
    """The record of one assignment while it is played; also when it fails: the tokens that a failure cost are counted.

    sampling_seed: every request gets a seed derived from it and the assignment; None: the engine's own stream. send:
    takes each turn that is over (see `sao.rollout.turns`); None: they are not kept. turns: of the policy so far.
    sampled_tokens: by the policy, those of refused completions included. timings_s: seconds by cause; whoever plays
    adds its own.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        config: Config,
        assignment: Assignment,
        sampling_seed: int | None = None,
        send: Send | None = None,
    ) -> None:
        self.engine, self.renderer, self.config, self.assignment = engine, renderer, config, assignment
        self.session = assignment.session
        self.temperature = config.eval.temperature if assignment.split == "eval" else config.sampling.temperature
        self.replay = Turns(assignment.turns, send)
        self.turns = self.sampled_tokens = 0
        self.timings_s = {"generate": 0.0}
        self._sampling_seed = sampling_seed
        self._stop_reasons: list[str] = []
        self._fingerprints: dict[int, str] = {}
        self._n_asked = 0
        self._lanes = {self.session}  # sessions of the engine
        self._segments: list[SegmentBuilder] = []

    @property
    def n_segments(self) -> int:
        """Segments so far, each with a sampled token."""
        return len(self._segments)

    async def sample(
        self,
        prompt_ids: np.ndarray,
        max_new_tokens: int,
        segment: SegmentBuilder | None,
        summary: str = "",
        summariser: Engine | None = None,
        lane: int = 0,
        watch: Watch | None = None,
    ) -> tuple[Completion, SegmentBuilder | None]:
        """A turn of the policy, checked, counted and recorded, and the segment that it is in.

        segment: one that the prompt extends; None: a new one. summary: the name of a summary that is sampled instead of
        a turn. summariser: a fixed engine samples it; its tokens are context of what follows, and not recorded. lane:
        requests at once need lanes of their own. watch: see `Request`. What a generator before this one has left is
        replayed. Raises `EngineError`.
        """
        name = summary or str(self._n_asked)
        self._n_asked += not summary
        self._lanes.add(session := f"{self.session}+{lane}" if lane else self.session)
        request = Request(
            id=f"{self.session}/{name}",
            session=session,
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=None if self._sampling_seed is None else derive_seed(self._sampling_seed, self.session, name),
            watch=watch,
        )
        completion = replayed = self.replay.next()
        if completion is None:
            calling = (summariser or self.engine).generate(request)
            completion = await self.timed("summarise" if summary else "generate", calling)
        if summariser is None:
            self.sampled_tokens += completion.token_ids.size
        check_completion(request, completion)
        if completion.stop_reason in ("abort", "context"):
            raise EngineError(f"aborted: request {request.id}: the engine ended it with {completion.stop_reason}")
        if replayed is None:
            self.replay.sampled(completion, foreign=summariser is not None)
        if summariser is not None:
            return completion, None
        for version, mark in completion.fingerprints.items():
            if (before := self._fingerprints.setdefault(version, mark)) != mark:
                text = f"version {version} has fingerprint {mark}, before it was {before}"
                raise EngineError(f"bad_completion: request {request.id}: {text}")
        if segment is None:
            segment = SegmentBuilder("summary" if summary else "execution")
            self._segments.append(segment)
        segment.append_context(prompt_ids[segment.n_tokens :])
        segment.append_sampled(completion.token_ids, completion.logprobs, completion.version_spans)
        if not summary:
            self.turns += 1
            self._stop_reasons.append(completion.stop_reason)
        return completion, segment

    async def release(self) -> None:
        """Frees what the engine has cached."""
        for session in sorted(self._lanes):
            await self.engine.release(session)

    @property
    def builders(self) -> Sequence[SegmentBuilder]:
        """The segments that are written, in the order in which they were opened."""
        return self._segments

    def segments(self) -> tuple[Segment, ...]:
        """All segments, in the order in which they were opened."""
        return tuple(segment.build() for segment in self._segments)

    async def timed(self, what: str, call: Awaitable[T]) -> T:
        """Awaits a call; its seconds go to `timings_s[what]`."""
        began = time.perf_counter()
        try:
            return await call
        finally:
            self.timings_s[what] = self.timings_s.get(what, 0.0) + time.perf_counter() - began

    def trajectory(
        self,
        termination: Termination,
        reward: float,
        turn_rewards: Sequence[tuple[int, int, float]] = (),
        metadata: Mapping[str, Metadata] | None = None,
        after: tuple[tuple[int, int], ...] = (),
    ) -> Trajectory:
        """The rollout as it is; nothing may be sampled behind it. `metadata`: what whoever played it adds."""
        config, task = self.config, self.assignment
        name = f"{config.run.name}\0{config.run.seed}\0{self.session}"
        return Trajectory(
            id=hashlib.blake2b(name.encode(), digest_size=16).digest(),
            task_ordinal=task.ordinal,
            attempt=task.attempt,
            env=config.env.name,
            segments=self.segments(),
            reward=reward,
            termination=termination,
            temperature=self.temperature,
            turn_rewards=tuple(turn_rewards),
            after=after,
            fingerprints=self._fingerprints,
            timings_s=self.timings_s,
            metadata={
                "seed": task.seed,
                "split": task.split,
                "turns": self.turns,
                "stop_reasons": ",".join(self._stop_reasons),
                **self.engine.metadata,
                **(metadata or {}),
            },
        )

    @staticmethod
    def no_reward(reward_range: tuple[float, float]) -> float:
        """The reward of an end that the environment did not score: 0, or the nearest number in its range."""
        low, high = reward_range
        return min(max(0.0, low), high)

    def check_limit(self, reason: str) -> None:
        """Raises `EnvironmentFailure` for a rollout that the wall clock has cut, where `env.at_time_limit` drops it."""
        if reason == "time_limit" and self.config.env.at_time_limit == "drop":
            limit_s = self.config.env.episode_timeout_s
            raise EnvironmentFailure("time_limit", f"not done within env.episode_timeout_s = {limit_s:g}")

    def check_begun(self) -> None:
        """Raises `EnvironmentFailure` when the time of the episode is over and nothing was sampled in it."""
        if not self._segments:
            limit_s = self.config.env.episode_timeout_s
            raise EnvironmentFailure("timeout", f"no turn within env.episode_timeout_s = {limit_s:g}")


def check_completion(request: Request, completion: Completion) -> None:
    """Raises `EngineError` when a completion breaks its contract; nothing that fails here may be trained on.

    The message starts with a reason code: `no_token_capture` (arrays that do not belong together; ids without log-probs
    are the usual fault of an engine), `bad_logprob` (not finite, or above 0) or `bad_completion`.
    """
    who = f"request {request.id}"
    if completion.token_ids.size == 0 and completion.stop_reason not in ("context", "abort"):
        raise EngineError(f"no_token_capture: {who}: no token ids, stop reason {completion.stop_reason}")
    segment = SegmentBuilder()
    segment.append_context([0])
    try:
        segment.append_sampled(completion.token_ids, completion.logprobs, completion.version_spans)
    except ValidationError as error:
        raise EngineError(f"no_token_capture: {who}: {error}") from None
    wrong = ~(np.isfinite(completion.logprobs) & (completion.logprobs <= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        log_prob = completion.logprobs[at]
        raise EngineError(f"bad_logprob: {who}: log-prob {log_prob} of token {at}, expected finite and <= 0")
    for fault in _faults(request, completion):
        raise EngineError(f"bad_completion: {who}: {fault}")


def _faults(request: Request, completion: Completion) -> Iterator[str]:
    ids, versions = completion.token_ids.tolist(), completion.version_spans[:, 2].tolist()
    if min(ids, default=0) < 0:
        yield f"negative token id {min(ids)}"
    if len(ids) > request.max_new_tokens:
        yield f"{len(ids)} tokens, at most {request.max_new_tokens} were asked for"
    if versions != sorted(versions):
        yield f"versions {versions}, expected that they never fall"
    if missing := set(versions) - completion.fingerprints.keys():
        yield f"no fingerprint of version {min(missing)}"
    stopped = completion.stop_reason == "stop"
    if stopped and ids[-1] not in request.stop_token_ids:
        yield f"stop reason stop, but the last token {ids[-1]} is no stop token"
    for at, token in enumerate(ids[:-1] if stopped else ids):
        if token in request.stop_token_ids:
            yield f"stop token {token} at {at} did not end the completion"
