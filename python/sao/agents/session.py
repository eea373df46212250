"""The calls of one episode of an agent, joined to one trajectory: token ids in, token ids out, in no API's dialect.

An agent sends its whole conversation with every call. What this side sampled is found in it again (`History`) and is
never encoded again: the prompt is the ids of that earlier call, its sampled ids, and what follows them. A prompt that
extends the newest call of a segment continues it; any other (a first call, an edited history, a second try, a side
conversation) opens a segment. So each sampled token is trained once, under the context in which it was sampled.

Counted for the metadata: `agent_drift`, calls whose conversation, encoded as a whole, would have had other ids than
those that the policy sampled and saw; `agent_rewritten`, calls with an assistant turn that was not sampled here;
`agent_overruled`, `agent_unforced` and `agent_ignored`, calls with a field that was not followed; `agent_segments`, for
each segment whether it is of the main conversation (instructions and tools of the first call) or of a side one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from sao.agents import order
from sao.agents.history import Found, History, Point
from sao.agents.request import (
    ApiError,
    Conversation,
    FinishReason,
    ModelCall,
    Note,
    Turn,
    token_logprobs,
)
from sao.agents.watching import Stopper
from sao.engines.base import Watch
from sao.envs.protocol import Message
from sao.errors import EnvironmentFailure, Error
from sao.rollout.recorder import Recorder
from sao.trajectory import Metadata, SegmentBuilder, Termination, Trajectory

SHORT = 4096  # characters that are rendered at once; the hop to a thread and back costs as much
COUNTS_A_TURN = 8  # of a prompt's tokens, for each turn that an episode may have

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a turn is sampled behind. point: the turn it goes on from; None: it is all new. drifted, rewritten: whether
    it counts as such.
    """

    place: bytes
    ids: np.ndarray
    messages: Conversation
    point: Point | None = None
    drifted: bool = False
    rewritten: bool = False


@dataclass(slots=True)
class Asked:
    """A call that was asked for. gone: whether who asked has hung up; delivered: the answer was written to the end."""

    work: asyncio.Task[Turn]
    gone: Callable[[], bool]
    delivered: bool = False


@dataclass(slots=True)
class _Lanes:
    """Sessions of the engine that are free; a lane is kept with the segment that it has cached."""

    free: list[int] = field(default_factory=list)
    of: dict[SegmentBuilder, int] = field(default_factory=dict)
    made: int = 0

    def take(self, segment: SegmentBuilder | None) -> int:
        lane = self.of.get(segment, -1) if segment is not None else -1
        if lane in self.free:
            self.free.remove(lane)
            return lane
        if self.free:
            return self.free.pop(0)
        self.made += 1
        return self.made - 1

    def give_back(self, lane: int, segment: SegmentBuilder) -> None:
        self.of[segment] = lane
        self.free.append(lane)


class AgentSession:
    """One episode. Its calls may come at once.

    api_key, reward_key: what its caller, and who rewards it, have to show. strict: fields that cannot be followed are
    refused. opened: an agent has taken it by HTTP. ended: set when it was closed by HTTP, with `reward` or `failure`.
    cut: why further calls are refused. fault: of the engine, which fails the episode; calls are refused then, too.
    limited: set when they are. erred: the program failed, for which the policy got the lowest reward.
    """

    def __init__(self, recorder: Recorder, reward_range: tuple[float, float], *, strict: bool = False) -> None:
        self.recorder, self.reward_range, self.strict = recorder, reward_range, strict
        self.api_key, self.reward_key = f"sao-{secrets.token_urlsafe(24)}", f"sao-reward-{secrets.token_urlsafe(24)}"
        self.reward: float | None = None
        self.cut = ""
        self.limited = asyncio.Event()
        self.fault: Error | None = None
        self.failure: EnvironmentFailure | None = None
        self.ended = asyncio.Event()
        self.closed = self.erred = self.opened = False
        self._history, self._lanes = History(), _Lanes()
        self._busy: set[SegmentBuilder] = set()  # something is sampled behind them now
        self._asked: dict[bytes, Asked] = {}
        self._main: tuple[Conversation, str] | None = None
        self._names: dict[SegmentBuilder, str] = {}
        self._sampled: list[order.Sampled] = []
        self._numbers: dict[Point, int] = {}  # of turns, in that list
        self._n_calls = self._n_counts = 0
        self._began = time.perf_counter()
        self._counts = dict.fromkeys(("agent_drift", "agent_rewritten"), 0)
        self._counts |= {f"agent_{note}": 0 for note in get_args(Note)}

    def asked(
        self,
        call: ModelCall,
        digest: bytes,
        again: bool,
        gone: Callable[[], bool],
        watch: Watch | None = None,
    ) -> Asked:
        """Has a call completed; one that comes again gets the turn that the first one has sampled or still samples.

        digest: of the request. again: it says of itself that it is repeated; one whose asker has hung up before the
        answer is repeated, too. An asker that hangs up does not take its turn back: it is in the trajectory. What is
        kept of a call until the episode ends is its digest and its turn; of one that failed nothing. Raises `ApiError`
        for a call that is refused as `strict`.
        """
        before = self._asked.get(digest)
        lost = before is not None and not before.delivered and before.gone()
        if before is not None and (again or lost):
            before.gone = gone
            return before
        if call.notes and self.strict:
            name, note = next(iter(call.notes.items()))
            raise ApiError(400, f"{name}: {note}: env.args.strict is set", param=name, code="unsupported_value")
        work = asyncio.create_task(self.complete(call, watch))
        asked = self._asked[digest] = Asked(work, gone)
        work.add_done_callback(lambda done: self._over(digest, done))
        return asked

    def _over(self, digest: bytes, done: asyncio.Task[Turn]) -> None:
        asked = self._asked.get(digest)
        if (done.cancelled() or done.exception()) and asked is not None and asked.work is done:
            del self._asked[digest]

    async def complete(self, call: ModelCall, watch: Watch | None = None) -> Turn:
        """Samples the turn behind a conversation. watch: sees its tokens, see `Request`. Raises `ApiError`."""
        config, recorder = self.recorder.config, self.recorder
        self._check_open()
        if self._n_calls >= config.env.max_turns:
            text = f"the episode has had its env.max_turns = {config.env.max_turns} turns"
            raise self._limit("max_turns", ApiError(400, text, code="max_turns"))
        self._n_calls += 1
        self._note(call)
        try:
            prompt = await self._prompt(call)
            self._counts["agent_drift"] += prompt.drifted
            self._counts["agent_rewritten"] += prompt.rewritten
            self._check_open()  # or the episode has ended meanwhile, and nobody would count what is sampled now
            room = config.sampling.context_tokens - prompt.ids.size
            if room <= 0:
                # The wording is one that clients look for to tell this error from others.
                text = f"This model's maximum context length is {config.sampling.context_tokens} tokens."
                text += f" However, your messages resulted in {prompt.ids.size} tokens."
                error = ApiError(400, text, param="messages", code="context_length_exceeded")
                raise self._limit("context", error)
        except BaseException:  # nothing was sampled
            self._n_calls -= 1
            raise
        limit = min(room, config.sampling.max_response_tokens, call.max_tokens or room)
        segment = self._continued(prompt)
        stopper = Stopper(recorder.renderer.decode, call.stops, watch) if call.stops else None
        lane, asked = self._lanes.take(segment), len(self._sampled)
        if segment is not None:
            self._busy.add(segment)
        try:
            sampling = recorder.sample(prompt.ids, limit, segment, lane=lane, watch=stopper or watch)
            completion, wrote = await sampling
        except Error as error:
            self.fault = self.fault or error
            self.limited.set()
            raise ApiError(503, f"the engine failed: {error}", code="engine_failed") from None
        finally:
            if segment is not None:
                self._busy.discard(segment)
        assert wrote is not None
        number, place = len(self._sampled), recorder.builders.index(wrote)
        same = hashlib.blake2b(prompt.ids.tobytes(), digest_size=16).digest()
        behind = None if prompt.point is None else self._numbers[prompt.point]
        self._sampled.append(order.Sampled(place, completion.token_ids.size, asked, same, behind))
        self._lanes.give_back(lane, wrote)
        self._names.setdefault(wrote, self._name(call))
        turn = self._read(call, completion.token_ids, completion.logprobs, completion.stop_reason, prompt.ids, stopper)
        self._numbers[self._history.add(prompt.place, wrote, (*prompt.messages, turn.message), turn)] = number
        return turn

    async def prompt_tokens(self, call: ModelCall) -> int:
        """Tokens that a call would be sampled behind. Raises `ApiError`."""
        self._check_open()
        if self._n_counts >= (most := COUNTS_A_TURN * self.recorder.config.env.max_turns):
            raise ApiError(400, f"the episode has had {most} counts, {COUNTS_A_TURN} for each of its turns")
        self._n_counts += 1
        return int((await self._prompt(call)).ids.size)

    def trajectory(self, termination: Termination, reward: float) -> Trajectory:
        """The episode as it is; nothing may be sampled behind it."""
        times = self.recorder.timings_s
        times["step"] = max(0.0, time.perf_counter() - self._began - times["generate"])
        names = ",".join(self._names.get(segment, "main") for segment in self.recorder.builders)
        metadata: dict[str, Metadata] = {**self._counts, "agent_segments": names, "agent_erred": int(self.erred)}
        return self.recorder.trajectory(termination, reward, metadata=metadata, after=order.after(self._sampled))

    def _check_open(self) -> None:
        if self.closed or self.fault is not None:
            raise ApiError(401, "the session is over", code="session_over")

    def _limit(self, cut: str, error: ApiError) -> ApiError:
        self.cut = self.cut or cut
        self.limited.set()
        return error

    def _note(self, call: ModelCall) -> None:
        for note in set(call.notes.values()):
            self._counts[f"agent_{note}"] += 1

    def _name(self, call: ModelCall) -> str:
        instructions = tuple(message for message in call.messages if message.role == "system"), call.tools
        if self._main is None:
            self._main = instructions
        return "main" if instructions == self._main else "side"

    def _continued(self, prompt: _Prompt) -> SegmentBuilder | None:
        """The segment that a prompt extends, unless it has gone on otherwise or is extended just now."""
        point = prompt.point
        if point is None or point.segment in self._busy or point.segment.n_tokens != point.n_tokens:
            return None
        return point.segment

    async def _prompt(self, call: ModelCall) -> _Prompt:
        """A conversation up to the start of the policy's turn. Raises `ApiError`."""
        if call.tools and not self.recorder.renderer.renders_tools:
            raise ApiError(400, "tools: the chat template of the model knows no tools", param="tools")
        call = replace(call, messages=self._history.gathered(call.messages))
        found = self._history.find(call.messages, call.tools)
        length = len(call.tools) + sum(len(message.content) for message in call.messages[found.at + 1 :])
        if length <= SHORT and self.recorder.config.model.reasoning != "template":
            return self._rendered(call, found)
        # Beside the loop: a conversation of megabytes takes seconds to encode, only then is its length known.
        return await asyncio.to_thread(self._rendered, call, found)

    def _rendered(self, call: ModelCall, found: Found) -> _Prompt:
        renderer, messages = self.recorder.renderer, call.messages
        rewritten = found.at != found.last
        try:
            if (point := found.point) is None:
                return _Prompt(found.place, renderer.conversation(messages, call.tools), messages, rewritten=rewritten)
            prompt = self._behind(found.place, point, messages[found.at], messages[found.at + 1 :], call.tools)
            return replace(prompt, rewritten=rewritten)
        except EnvironmentFailure as error:  # the chat template refuses these roles
            raise ApiError(400, f"messages: {error.detail}", param="messages") from None

    def _behind(self, place: bytes, point: Point, sent: Message, messages: Conversation, tools: str) -> _Prompt:
        """The ids that follow a turn, which comes back as `sent`: behind its own, or all anew where the template drops
        reasoning that they hold.
        """
        renderer, conversation, turn = self.recorder.renderer, (*point.messages, *messages), point.turn
        if self.recorder.config.model.reasoning == "template" and (gone := renderer.forgets(conversation, tools)):
            conversation = tuple(replace(m, reasoning="") if at in gone else m for at, m in enumerate(conversation))
            return _Prompt(place, renderer.conversation(conversation, tools), conversation)
        content = sent.content
        if turn.stopped_at is not None and content.strip() == turn.message.content.strip():
            content = turn.message.content + turn.stopped_at  # as it was asked for, the stop text was cut off
        if turn.message.tool_calls and not sent.tool_calls:  # calls that come as text are compared as they were made
            content = turn.message.content
        ids, whole = point.ids, replace(turn.message, content=content)
        behind, drifted = renderer.following(ids[turn.prompt_tokens :], whole, messages, tools)
        return _Prompt(place, np.concatenate([ids, behind]), conversation, point, drifted)

    def _read(
        self,
        call: ModelCall,
        ids: np.ndarray,
        logprobs: np.ndarray,
        reason: str,
        prompt_ids: np.ndarray,
        stopper: Stopper | None,
    ) -> Turn:
        renderer = self.recorder.renderer
        text, message = renderer.decode(ids), renderer.read(ids, prompt_ids, call.tools if call.reads_calls else "")
        stopped = None if stopper is None else stopper.found
        if stopped is not None and stopped in message.reasoning:  # which comes first
            message = replace(message, content="", reasoning=message.reasoning.partition(stopped)[0])
        elif stopped is not None:
            message = replace(message, content=message.content.partition(stopped)[0])
        message = replace(message, tool_calls=self._history.named(message.tool_calls))
        pairs = token_logprobs(renderer.token_texts(ids), logprobs) if call.logprobs else ()
        ended: FinishReason = "length" if reason == "length" else "tool_calls" if message.tool_calls else "stop"
        return Turn(message, text, ended, prompt_ids.size, ids.size, stopped, pairs)
