"""The context window: the token ids that the policy sees now, and the steps that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sao.envs.protocol import Message
from sao.rollout.chat import Renderer
from sao.trajectory import SegmentBuilder


@dataclass(frozen=True, slots=True)
class Step:
    """A complete step in a window: a turn, `ids[start:acted]`, and what followed it, `ids[acted:stop]`.

    messages: what `ids[acted:stop]` was rendered from.
    """

    start: int
    acted: int
    stop: int
    messages: tuple[Message, ...]


class Window:
    """One context window over a rollout.

    Ids only ever grow at the end, until `rebuild` begins anew from messages: it is what a compaction does.

    segment: the one that records what is sampled in this window; None: nothing was sampled yet. A segment gets context
    only when something is sampled behind it, so it ends with a sampled token.
    """

    def __init__(self, renderer: Renderer, context_tokens: int) -> None:
        self._renderer = renderer
        self._context_tokens = context_tokens
        self.segment: SegmentBuilder | None = None
        self._ids = np.empty(0, np.int32)
        self._acted = 0  # end of the turn that waits for its observation
        self.opening: tuple[Message, ...] = ()
        self.opening_tokens = 0
        self.steps: list[Step] = []

    @property
    def ids(self) -> np.ndarray:
        """int32[n]: what the policy sees."""
        return self._ids

    @property
    def room_tokens(self) -> int:
        """Tokens that still fit; negative when an observation was taken that does not."""
        return self._context_tokens - self._ids.size

    def open(self, messages: Sequence[Message]) -> bool:
        """Begins with a conversation. False, and nothing is changed, when it leaves no room for a token."""
        ids = self._renderer.initial(messages)
        if ids.size >= self._context_tokens:
            return False
        self.opening, self.opening_tokens, self._ids = tuple(messages), ids.size, ids
        return True

    def sampled(self, token_ids: np.ndarray) -> None:
        """Takes the ids of an assistant turn."""
        self._ids = np.concatenate([self._ids, token_ids])
        self._acted = self._ids.size

    def observe(self, messages: Sequence[Message], *, beyond: bool = False) -> bool:
        """Takes what follows the assistant turn, which completes a step.

        False, and nothing is changed, if that leaves no room for a token; with `beyond` it is taken all the same.
        """
        ids = self._renderer.observation(messages, self.last_sampled)
        if ids.size >= self.room_tokens and not beyond:
            return False
        start = self.steps[-1].stop if self.steps else self.opening_tokens
        self._ids = np.concatenate([self._ids, ids])
        self.steps.append(Step(start, self._acted, self._ids.size, tuple(messages)))
        return True

    @property
    def last_sampled(self) -> int | None:
        """The id that ended the turn waiting for its observation; None when nothing was sampled."""
        return int(self._ids[self._acted - 1]) if self._acted else None

    def prompt(self, message: Message, n_steps: int) -> np.ndarray:
        """int32[n]: the first `n_steps` complete steps of this window, then a message in place of the next turn.

        With all steps these ids begin with all ids of the open segment.
        """
        if n_steps == 0:
            return self._renderer.initial(joined(self.opening, message))
        step = self.steps[n_steps - 1]
        behind = self._renderer.observation(joined(step.messages, message), int(self._ids[step.acted - 1]))
        return np.concatenate([self._ids[: step.acted], behind])

    def rebuild(self, messages: Sequence[Message], carry: int = 0) -> bool:
        """Begins anew, and with it a segment, with a conversation and the last `carry` steps, id for id.

        False as in `open`.
        """
        size = self.rebuilt_tokens(messages, carry)
        if size >= self._context_tokens:
            return False
        self.segment = None
        kept = self.steps[len(self.steps) - carry :]
        head, first = self._renderer.initial(messages), kept[0].start if kept else self._ids.size
        shift = head.size - first
        self._ids = np.concatenate([head, self._ids[first:]]) if kept else head
        self.steps = [Step(s.start + shift, s.acted + shift, s.stop + shift, s.messages) for s in kept]
        self.opening, self.opening_tokens = tuple(messages), head.size
        self._acted = self.steps[-1].acted if self.steps else 0
        return True

    def rebuilt_tokens(self, messages: Sequence[Message], carry: int) -> int:
        """Tokens of the window that `rebuild` would make."""
        kept = self.steps[len(self.steps) - carry :]
        return self._renderer.initial(messages).size + (kept[-1].stop - kept[0].start if kept else 0)


def joined(messages: Sequence[Message], message: Message) -> tuple[Message, ...]:
    """`messages` and one more; two of the same role in a row, which many templates refuse, become one."""
    if messages and messages[-1].role == message.role:
        return (*messages[:-1], Message(message.role, f"{messages[-1].content}\n\n{message.content}"))
    return (*messages, message)
