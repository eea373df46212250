"""The calls of one episode of an agent, joined to one trajectory: token ids in, token ids out, in no API's dialect.

An agent sends its whole conversation with every call. What this side sampled is found in it again by its text and is
never encoded again: the prompt is the ids of that earlier call, its sampled ids, and what follows them. A prompt that
extends the newest call of a segment continues it; any other (a first call, an edited history, a second try, a side
conversation) opens a segment. So each sampled token is trained once, under the context in which it was sampled.

Counted for the metadata: `agent_drift`, calls whose conversation, encoded as a whole, would have had other ids than
those that the policy sampled and saw; `agent_rewritten`, calls with an assistant turn that was not sampled here.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, replace

import numpy as np

from sao.envs.protocol import Message
from sao.errors import EnvironmentFailure, Error
from sao.rollout.recorder import Recorder
from sao.trajectory import SegmentBuilder, Termination, Trajectory

Conversation = tuple[Message, ...]


class ApiError(Exception):
    """A call that is refused: an HTTP status, why, the field that is wrong and a code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


@dataclass(frozen=True, slots=True)
class Turn:
    """The sampled turn that answers a call. finish_reason: stop or length."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class _Point:
    """A conversation and its ids, which may end with a turn of the policy.

    segment: the one that they continue; None: none yet. messages: with what agents leave out, the reasoning of the
    policy's turns. drifted: encoding the text of one of its turns gives other ids than those that were sampled.
    prompt_tokens: ids before the turn.
    """

    segment: SegmentBuilder | None
    ids: np.ndarray
    messages: Conversation
    drifted: bool
    prompt_tokens: int


class AgentSession:
    """One episode. Its calls are answered one after the other.

    api_key, reward_key: what its caller, and who rewards it, have to show. ended: set when it was closed by HTTP, with
    `reward` or `failure`. cut: why further calls are refused. fault: of the engine, which fails the episode.
    """

    def __init__(self, recorder: Recorder, reward_range: tuple[float, float]) -> None:
        self.recorder, self.reward_range = recorder, reward_range
        self.api_key, self.reward_key = f"sao-{secrets.token_urlsafe(24)}", f"sao-reward-{secrets.token_urlsafe(24)}"
        self.reward: float | None = None
        self.cut = ""
        self.fault: Error | None = None
        self.failure: EnvironmentFailure | None = None
        self.ended = asyncio.Event()
        self.closed = False
        self._turn = asyncio.Lock()
        # Conversations that end with a turn of the policy: its segment, and the ids of its prompt and itself.
        self._points: dict[Conversation, _Point] = {}
        self._began = time.perf_counter()
        self._drift = self._rewritten = 0

    async def complete(self, messages: Conversation, max_tokens: int | None = None) -> Turn:
        """Samples the turn behind a conversation; max_tokens: None: the run's own limit. Raises `ApiError`."""
        config = self.recorder.config
        async with self._turn:
            self._check_open()
            if self.recorder.turns >= config.env.max_turns:
                self.cut = self.cut or "max_turns"
                text = f"the episode has had its env.max_turns = {config.env.max_turns} turns"
                raise ApiError(400, text, code="max_turns")
            # Beside the loop: a conversation of megabytes takes seconds to encode, only then is its length known.
            prompt = await asyncio.to_thread(self._prompt, messages)
            ids = prompt.ids
            self._check_open()  # or the episode has ended meanwhile, and nobody would count what is sampled now
            room = config.sampling.context_tokens - ids.size
            if room <= 0:
                self.cut = self.cut or "context"
                text = f"messages: {ids.size} tokens, the context window has {config.sampling.context_tokens}"
                raise ApiError(400, text, param="messages", code="context_length_exceeded")
            limit = min(room, config.sampling.max_response_tokens, max_tokens or room)
            try:
                completion, segment = await self.recorder.sample(ids, limit, prompt.segment)
            except Error as error:
                self.fault = self.fault or error
                raise ApiError(503, f"the engine failed: {error}", code="engine_failed") from None
            text = self.recorder.renderer.decode(completion.token_ids)
            said = Message("assistant", text)
            if config.model.reasoning == "template":
                said = self.recorder.renderer.read(completion.token_ids, ids)
            whole = np.concatenate([ids, completion.token_ids])
            point = _Point(segment, whole, (*prompt.messages, said), prompt.drifted, ids.size)
            self._points[_key((*messages, Message("assistant", text)))] = point
            return Turn(text, completion.stop_reason, ids.size, completion.token_ids.size)

    def trajectory(self, termination: Termination, reward: float) -> Trajectory:
        """The episode as it is; nothing may be sampled behind it."""
        times = self.recorder.timings_s
        times["step"] = max(0.0, time.perf_counter() - self._began - times["generate"])
        counts = {"agent_drift": self._drift, "agent_rewritten": self._rewritten}
        return self.recorder.trajectory(termination, reward, metadata=counts)

    def _check_open(self) -> None:
        if self.closed:
            raise ApiError(409, "the session is over", code="session_over")

    def _prompt(self, messages: Conversation) -> _Point:
        """A conversation up to the start of the policy's turn. Raises `ApiError`."""
        assistants = [index for index, message in enumerate(messages) if message.role == "assistant"]
        renderer = self.recorder.renderer
        try:
            for last in reversed(assistants):
                point = self._points.get(_key(messages[: last + 1]))
                if point is None:
                    continue
                drifted = point.drifted or self._drifts(point, messages[last].content)
                self._drift += drifted
                self._rewritten += last != assistants[-1]
                return self._behind(point, messages[last + 1 :], drifted)
            self._rewritten += bool(assistants)
            ids = renderer.conversation(messages)
        except EnvironmentFailure as error:  # the chat template refuses these roles
            raise ApiError(400, f"messages: {error.detail}", param="messages") from None
        return _Point(None, ids, messages, False, ids.size)

    def _behind(self, point: _Point, messages: Conversation, drifted: bool) -> _Point:
        """The ids that follow a turn: behind its own, or all anew where the template drops reasoning that they hold."""
        renderer, conversation = self.recorder.renderer, (*point.messages, *messages)
        if self.recorder.config.model.reasoning == "template" and (gone := renderer.forgets(conversation)):
            conversation = tuple(replace(m, reasoning="") if at in gone else m for at, m in enumerate(conversation))
            ids = renderer.conversation(conversation)
            return _Point(None, ids, conversation, drifted, ids.size)
        ids = np.concatenate([point.ids, renderer.observation(messages, int(point.ids[-1]))])
        newest = point.segment is not None and point.segment.n_tokens == point.ids.size
        return _Point(point.segment if newest else None, ids, conversation, drifted, ids.size)

    def _drifts(self, point: _Point, text: str) -> bool:
        """Whether a turn would have other ids, were its text encoded in a conversation."""
        renderer, sampled = self.recorder.renderer, point.ids[point.prompt_tokens :]
        first, then = Message("user", "a"), Message("user", "b")
        behind = renderer.observation([then], int(sampled[-1]))
        kept = np.concatenate([renderer.initial([first]), sampled, behind])
        return not np.array_equal(kept, renderer.conversation([first, Message("assistant", text), then]))


def _key(messages: Conversation) -> Conversation:
    """White space around the policy's turns does not count: agents strip it, and it was sampled all the same."""
    return tuple(Message(m.role, m.content.strip()) if m.role == "assistant" else m for m in messages)
