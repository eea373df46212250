"""The calls of one episode of an agent, joined to one trajectory: token ids in, token ids out.

An agent sends its whole conversation with every call. What this side sampled is found in it again by its text and is
never encoded again: the prompt is the ids of that earlier call, its sampled ids, and what follows them. A prompt that
extends the newest call of a segment continues it. Any other (a first call, a history that was cut, summarised or
edited, a second try at the same prompt, a side conversation) opens a segment of its own, with its prompt as context. So
each sampled token is trained once, under the context in which it was sampled.

Counted for the metadata: `agent_drift`, calls whose conversation, encoded as a whole, would have had other ids than
those that the policy sampled and saw; `agent_rewritten`, calls with an assistant turn that was not sampled here.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from dataclasses import dataclass

import numpy as np

from sao.agents.calls import ApiError, Call, Turn
from sao.config import Config
from sao.engines.base import Engine, Request, check_completion
from sao.engines.seeds import derive_seed
from sao.envs.protocol import Message
from sao.errors import EngineError, EnvironmentFailure, Error
from sao.rollout.chat import Renderer
from sao.rollout.episode import Progress, Task
from sao.trajectory import Segment, SegmentBuilder, Termination, Trajectory

Conversation = tuple[Message, ...]


@dataclass(slots=True)
class _Chain:
    """A segment that grows. ids: all of it."""

    builder: SegmentBuilder
    ids: np.ndarray


@dataclass(frozen=True, slots=True)
class _Point:
    """A conversation that ends with a turn of the policy: `ids` are its prompt and the turn."""

    chain: _Chain
    ids: np.ndarray


class AgentSession:
    """One episode. Its calls are answered one after the other.

    api_key, reward_key: what its caller, and who rewards it, have to show. ended: set when it was closed by HTTP, with
    `reward` or `failure`. cut: why further calls are refused. fault: of the engine, which fails the episode.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        task: Task,
        config: Config,
        sampling_seed: int | None,
        progress: Progress,
        reward_range: tuple[float, float],
    ) -> None:
        self.task, self.reward_range = task, reward_range
        self.name = f"{task.split}/{task.ordinal}/{task.attempt}"
        self.api_key, self.reward_key = f"sao-{secrets.token_urlsafe(24)}", f"sao-reward-{secrets.token_urlsafe(24)}"
        self.temperature = config.eval.temperature if task.split == "eval" else config.sampling.temperature
        self.reward: float | None = None
        self.cut = ""
        self.fault: Error | None = None
        self.failure: EnvironmentFailure | None = None
        self.ended = asyncio.Event()
        self.closed = False
        self._engine, self._renderer, self._config = engine, renderer, config
        self._seed, self._progress = sampling_seed, progress
        self._turn = asyncio.Lock()
        self._chains: list[_Chain] = []
        self._points: dict[Conversation, _Point] = {}
        self._fingerprints: dict[int, str] = {}
        self._stop_reasons: list[str] = []
        self._began = time.perf_counter()
        self._generate_s = 0.0
        self._drift = self._rewritten = 0

    async def complete(self, call: Call) -> Turn:
        """Samples the turn that a call asks for. Raises `ApiError`."""
        async with self._turn:
            self._check_open()
            if self._progress.turns >= self._config.env.max_turns:
                self.cut = self.cut or "max_turns"
                limit = self._config.env.max_turns
                raise ApiError(400, f"the episode has had its env.max_turns = {limit} turns", code="max_turns")
            # Beside the loop: a conversation of megabytes takes seconds to encode, only then is its length known.
            chain, ids = await asyncio.to_thread(self._prompt, call.messages)
            self._check_open()  # or the episode has ended meanwhile, and nobody would count what is sampled now
            sampling = self._config.sampling
            room = sampling.context_tokens - ids.size
            if room <= 0:
                self.cut = self.cut or "context"
                raise ApiError(
                    400,
                    f"messages: {ids.size} tokens, the context window has {sampling.context_tokens}",
                    param="messages",
                    code="context_length_exceeded",
                )
            limit = min(room, sampling.max_response_tokens, call.max_tokens or room)
            return await self._sample(call.messages, chain, ids, limit)

    def _check_open(self) -> None:
        if self.closed:
            raise ApiError(409, "the session is over", code="session_over")

    def trajectory(self, termination: Termination, reward: float) -> Trajectory:
        """The episode as it is; nothing may be sampled behind it."""
        name = f"{self._config.run.name}\0{self._config.run.seed}\0{self.name}"
        whole = time.perf_counter() - self._began
        return Trajectory(
            id=hashlib.blake2b(name.encode(), digest_size=16).digest(),
            task_ordinal=self.task.ordinal,
            attempt=self.task.attempt,
            env=self._config.env.name,
            segments=self.segments(),
            reward=reward,
            termination=termination,
            temperature=self.temperature,
            turn_rewards=(),
            fingerprints=self._fingerprints,
            timings_s={"generate": self._generate_s, "step": max(0.0, whole - self._generate_s)},
            metadata={
                "seed": self.task.seed,
                "split": self.task.split,
                "turns": self._progress.turns,
                "stop_reasons": ",".join(self._stop_reasons),
                **self._engine.facts,
                "agent_drift": self._drift,
                "agent_rewritten": self._rewritten,
            },
        )

    def segments(self) -> tuple[Segment, ...]:
        """In the order in which they were opened."""
        return tuple(chain.builder.build() for chain in self._chains)

    def _prompt(self, messages: Conversation) -> tuple[_Chain | None, np.ndarray]:
        """The ids of a conversation, and the segment that they continue (None: a new one). Raises `ApiError`."""
        assistants = [index for index, message in enumerate(messages) if message.role == "assistant"]
        try:
            whole = self._renderer.conversation(messages)
            for last in reversed(assistants):
                point = self._points.get(_key(messages[: last + 1]))
                if point is None:
                    continue
                behind = self._renderer.observation(messages[last + 1 :], int(point.ids[-1]))
                ids = np.concatenate([point.ids, behind])
                self._drift += not np.array_equal(ids, whole)
                self._rewritten += last != assistants[-1]
                tip = point.chain.ids.size == point.ids.size
                return (point.chain if tip else None), ids
        except EnvironmentFailure as error:  # the chat template refuses these roles
            raise ApiError(400, f"messages: {error.detail}", param="messages") from None
        self._rewritten += bool(assistants)
        return None, whole

    async def _sample(self, messages: Conversation, chain: _Chain | None, ids: np.ndarray, limit: int) -> Turn:
        number = self._progress.turns
        request = Request(
            id=f"{self.name}/{number}",
            session=self.name,
            prompt_ids=ids,
            max_new_tokens=limit,
            temperature=self.temperature,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=None if self._seed is None else derive_seed(self._seed, self.name, str(number)),
        )
        began = time.perf_counter()
        try:
            completion = await self._engine.generate(request)
            if completion.token_ids is not None:
                self._progress.sampled_tokens += len(completion.token_ids)
            check_completion(request, completion)
            if completion.stop_reason not in ("stop", "length"):
                raise EngineError(f"aborted: request {request.id}: the engine ended it with {completion.stop_reason}")
            for version, mark in completion.fingerprints.items():
                if self._fingerprints.setdefault(version, mark) != mark:
                    raise EngineError(f"bad_completion: request {request.id}: version {version} has two fingerprints")
        except Error as error:
            self.fault = self.fault or error
            raise ApiError(503, f"the engine failed: {error}", code="engine_failed") from None
        finally:
            self._generate_s += time.perf_counter() - began
        if chain is None:
            chain = _Chain(SegmentBuilder("execution"), np.empty(0, np.int32))
            self._chains.append(chain)
        chain.builder.append_context(ids[chain.ids.size :])
        chain.builder.append_sampled(completion.token_ids, completion.logprobs, completion.version_spans)
        chain.ids = np.concatenate([ids, completion.token_ids])
        text = self._renderer.decode(completion.token_ids)
        self._points[_key((*messages, Message("assistant", text)))] = _Point(chain, chain.ids)
        self._progress.turns += 1
        self._stop_reasons.append(completion.stop_reason)
        return Turn(
            f"chatcmpl-{secrets.token_hex(12)}", text, completion.stop_reason, ids.size, completion.token_ids.size
        )


def _key(messages: Conversation) -> Conversation:
    """White space around the policy's turns does not count: agents strip it, and it was sampled all the same."""
    return tuple(Message(m.role, m.content.strip()) if m.role == "assistant" else m for m in messages)
