"""The context window: the token ids that the policy sees now, and the steps that they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sao.envs.protocol import Message
from sao.rollout.chat import Renderer
from sao.trajectory import SegmentBuilder


@dataclass(frozen=True, slots=True)
class Step:
    """A turn, `ids[start:acted]`, and what followed it, `ids[acted:stop]`, rendered from `messages`.

    turn: as it was read; None: nobody needs it.
    """

    start: int
    acted: int
    stop: int
    turn: Message | None
    messages: tuple[Message, ...]


class Window:
    """One context window over a rollout. Its ids only grow at the end, until they begin anew from messages: by
    `rebuild`, and with `reasoning` "template" when the chat template leaves out reasoning that they hold.

    tools: of the rollout, as `Renderer` takes them. ids: int32[n], what the policy sees. opening: the messages it began
    with. steps: the complete ones behind these. renewed: how often it began anew for the template.
    segment: the one that records what is sampled in this window; None: nothing was sampled yet. A segment gets context
    only when something is sampled behind it, so it ends with a sampled token.
    """

    def __init__(
        self,
        renderer: Renderer,
        context_tokens: int,
        tools: str = "",
        reasoning: Literal["keep", "template"] = "keep",
    ) -> None:
        self._renderer, self._context_tokens = renderer, context_tokens
        self._tools, self._keeps = tools, reasoning == "keep"
        self.segment: SegmentBuilder | None = None
        self.ids = np.empty(0, np.int32)
        self.opening: tuple[Message, ...] = ()
        self.steps: list[Step] = []
        self.renewed = 0
        self._turn: Message | None = None
        self._n_calls = 0
        self._acted = self._stepped = 0  # end of the last turn, and of the last step
        self._written = 0  # first steps that `ids` hold as the template writes them, not as they were sampled

    @property
    def room_tokens(self) -> int:
        """Tokens that still fit; negative when more was taken than fits."""
        return self._context_tokens - self.ids.size

    @property
    def last_sampled(self) -> int | None:
        """The id that ended the last turn; None when nothing was sampled."""
        return int(self.ids[self._acted - 1]) if self._acted else None

    @property
    def turn(self) -> Message:
        """The last turn, read: content, reasoning and calls, each with an id that is unique in the rollout."""
        if self._turn is None:
            sampled, prompt = self.ids[self._stepped : self._acted], self.ids[: self._stepped]
            turn = self._renderer.read(sampled, prompt, self._tools)
            first, self._n_calls = self._n_calls, self._n_calls + len(turn.tool_calls)
            calls = [replace(call, id=f"call{number:05}") for number, call in enumerate(turn.tool_calls, first)]
            self._turn = replace(turn, tool_calls=tuple(calls))
        return self._turn

    def rebuild(self, messages: Sequence[Message], carry: int = 0) -> None:
        """Begins, and with it a segment, with a conversation and the last `carry` steps, id for id where `ids` hold
        what was sampled."""
        kept, self.ids = self.steps[len(self.steps) - carry :], self._rebuilt(messages, carry)
        shift = self.ids.size - self._stepped
        self._written = max(0, self._written - (len(self.steps) - carry))
        self.steps = [replace(s, start=s.start + shift, acted=s.acted + shift, stop=s.stop + shift) for s in kept]
        self.opening, self.segment = tuple(messages), None
        self._acted, self._stepped = self.steps[-1].acted if kept else 0, self.ids.size

    def rebuilt_tokens(self, messages: Sequence[Message], carry: int) -> int:
        """Tokens of the window that `rebuild` would make."""
        return self._rebuilt(messages, carry).size

    def _rebuilt(self, messages: Sequence[Message], carry: int) -> np.ndarray:
        first = len(self.steps) - carry
        if carry and first < self._written:
            return self._renderer.conversation(_conversation(messages, self.steps[first:]), self._tools)
        start = self.steps[first].start if carry else self.ids.size
        return np.concatenate([self._renderer.initial(messages, self._tools), self.ids[start:]])

    def sampled(self, token_ids: np.ndarray) -> None:
        """Takes the ids of an assistant turn."""
        self.ids, self._turn = np.concatenate([self.ids, token_ids]), None
        self._acted = self.ids.size

    def behind(self, messages: Sequence[Message]) -> np.ndarray:
        """int32[n]: what follows the last turn, with these messages."""
        calls = self.turn.tool_calls if self._tools else ()
        return self._renderer.observation(messages, self.last_sampled, calls, self._tools)

    def observe(self, messages: Sequence[Message]) -> int:
        """Takes what follows the assistant turn, which completes a step; also more than there is room for.

        Returns the tokens of the step.
        """
        ids = np.concatenate([self.ids, self.behind(messages)])
        size, turn = ids.size - self._stepped, self.turn if self._tools or not self._keeps else None
        self.steps.append(Step(self._stepped, self._acted, ids.size, turn, tuple(messages)))
        if not self._keeps:
            conversation = _conversation(self.opening, self.steps)
            held = len(_conversation(self.opening, self.steps[: self._written]))
            if any(at >= held for at in self._renderer.forgets(conversation, self._tools)):
                ids = self._renderer.conversation(conversation, self._tools)
                self.steps[-1] = replace(self.steps[-1], stop=ids.size)
                self.segment, self._written = None, len(self.steps)
                self.renewed += 1
        self.ids, self._stepped = ids, ids.size
        return size

    def prompt(self, message: Message, n_steps: int) -> np.ndarray:
        """int32[n]: the first `n_steps` complete steps of this window, then a message in place of the next turn.

        With all steps these ids begin with all ids of the open segment, if there is one.
        """
        if n_steps == 0:
            return self._renderer.initial(joined(self.opening, message), self._tools)
        if n_steps <= self._written:
            conversation = joined(_conversation(self.opening, self.steps[:n_steps]), message)
            return self._renderer.conversation(conversation, self._tools)
        step = self.steps[n_steps - 1]
        messages, last = joined(step.messages, message), int(self.ids[step.acted - 1])
        calls = step.turn.tool_calls if step.turn else ()
        behind = self._renderer.observation(messages, last, calls, self._tools)
        return np.concatenate([self.ids[: step.acted], behind])


def _conversation(opening: Sequence[Message], steps: Sequence[Step]) -> tuple[Message, ...]:
    following = [message for step in steps for message in (step.turn, *step.messages) if message is not None]
    return (*opening, *following)


def joined(messages: Sequence[Message], message: Message) -> tuple[Message, ...]:
    """`messages` and one more; two of the same role in a row, which many templates refuse, become one."""
    if messages and messages[-1].role == message.role:
        return (*messages[:-1], replace(messages[-1], content=f"{messages[-1].content}\n\n{message.content}"))
    return (*messages, message)
