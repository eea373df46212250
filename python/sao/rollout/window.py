"""The context window: the token ids that the policy sees now, and which segment records what it samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sao.engines.base import Completion
from sao.envs.protocol import Message
from sao.rollout.recorder import Recorder
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

    Ids only ever grow at the end. What the policy sampled is written into a segment once, when it is sampled; context
    is written only when something is sampled behind it, so a segment ends with a sampled token and none is without.
    `rebuild` closes the segment and opens the next from messages: it is what a compaction does.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._renderer = recorder, recorder.renderer
        self._context_tokens = recorder.config.sampling.context_tokens
        self._segment: SegmentBuilder | None = None  # the open one, once something was sampled in it
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

    @property
    def segment_index(self) -> int:
        """Index of the open segment."""
        return self._recorder.n_segments - (self._segment is not None)

    def open(self, messages: Sequence[Message]) -> bool:
        """Begins with a conversation. False, and nothing is changed, when it leaves no room for a token."""
        ids = self._renderer.initial(messages)
        if ids.size >= self._context_tokens:
            return False
        self.opening, self.opening_tokens, self._ids = tuple(messages), ids.size, ids
        return True

    def sampled(self, completion: Completion) -> None:
        """Takes an assistant turn as the engine gave it."""
        self._segment = self._recorder.write(self._segment, self._ids, completion)
        self._ids = np.concatenate([self._ids, completion.token_ids])
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

    def summarised(self, prompt: np.ndarray, completion: Completion, *, merge: bool) -> None:
        """Records a summary that the policy wrote behind `prompt`: as a segment of its own, or in the open one.

        With `merge`, `prompt` has to begin with the ids of the open segment.
        """
        self._recorder.write(self._segment if merge else None, prompt, completion, "summary")
        self._segment = None

    def rebuild(self, messages: Sequence[Message], carry: int = 0) -> bool:
        """Closes the open segment and begins the next with a conversation and the last `carry` steps, id for id.

        False as in `open`.
        """
        size = self.rebuilt_tokens(messages, carry)
        if size >= self._context_tokens:
            return False
        self._segment = None
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
