"""The context window: the token ids that the policy sees now, and the steps that they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sao.envs.protocol import Message
from sao.rollout.chat import Renderer
from sao.trajectory import SegmentBuilder


@dataclass(frozen=True, slots=True)
class Step:
    """A turn, `ids[start:acted]`, and what followed it, `ids[acted:stop]`, rendered from `messages`."""

    start: int
    acted: int
    stop: int
    messages: tuple[Message, ...]


class Window:
    """One context window over a rollout. Its ids only grow at the end, until `rebuild` begins anew from messages.

    ids: int32[n], what the policy sees. opening: the messages it began with. steps: the complete ones behind these.
    segment: the one that records what is sampled in this window; None: nothing was sampled yet. A segment gets context
    only when something is sampled behind it, so it ends with a sampled token.
    """

    def __init__(self, renderer: Renderer, context_tokens: int) -> None:
        self._renderer = renderer
        self._context_tokens = context_tokens
        self.segment: SegmentBuilder | None = None
        self.ids = np.empty(0, np.int32)
        self.opening: tuple[Message, ...] = ()
        self.steps: list[Step] = []
        self._acted = self._stepped = 0  # end of the last turn, and of the last step

    @property
    def room_tokens(self) -> int:
        """Tokens that still fit; negative when more was taken than fits."""
        return self._context_tokens - self.ids.size

    @property
    def last_sampled(self) -> int | None:
        """The id that ended the last turn; None when nothing was sampled."""
        return int(self.ids[self._acted - 1]) if self._acted else None

    def rebuild(self, messages: Sequence[Message], carry: int = 0) -> None:
        """Begins, and with it a segment, with a conversation and the last `carry` steps, id for id."""
        kept, head = self.steps[len(self.steps) - carry :], self._renderer.initial(messages)
        first = kept[0].start if kept else self.ids.size
        shift = head.size - first
        self.ids = np.concatenate([head, self.ids[first:]])
        self.steps = [Step(s.start + shift, s.acted + shift, s.stop + shift, s.messages) for s in kept]
        self.opening, self.segment = tuple(messages), None
        self._acted, self._stepped = kept[-1].acted + shift if kept else 0, self.ids.size

    def rebuilt_tokens(self, messages: Sequence[Message], carry: int) -> int:
        """Tokens of the window that `rebuild` would make."""
        kept = self.steps[len(self.steps) - carry :]
        return self._renderer.initial(messages).size + (kept[-1].stop - kept[0].start if kept else 0)

    def sampled(self, token_ids: np.ndarray) -> None:
        """Takes the ids of an assistant turn."""
        self.ids = np.concatenate([self.ids, token_ids])
        self._acted = self.ids.size

    def observe(self, messages: Sequence[Message]) -> None:
        """Takes what follows the assistant turn, which completes a step; also more than there is room for."""
        self.ids = np.concatenate([self.ids, self._renderer.observation(messages, self.last_sampled)])
        self.steps.append(Step(self._stepped, self._acted, self.ids.size, tuple(messages)))
        self._stepped = self.ids.size

    def prompt(self, message: Message, n_steps: int) -> np.ndarray:
        """int32[n]: the first `n_steps` complete steps of this window, then a message in place of the next turn.

        With all steps these ids begin with all ids of the open segment.
        """
        if n_steps == 0:
            return self._renderer.initial(joined(self.opening, message))
        step = self.steps[n_steps - 1]
        behind = self._renderer.observation(joined(step.messages, message), int(self.ids[step.acted - 1]))
        return np.concatenate([self.ids[: step.acted], behind])


def joined(messages: Sequence[Message], message: Message) -> tuple[Message, ...]:
    """`messages` and one more; two of the same role in a row, which many templates refuse, become one."""
    if messages and messages[-1].role == message.role:
        return (*messages[:-1], Message(message.role, f"{messages[-1].content}\n\n{message.content}"))
    return (*messages, message)
