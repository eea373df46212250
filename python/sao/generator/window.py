"""The token ids that the policy sees now, and the segments that record them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sao.envs.protocol import Message
from sao.generator.engine import Completion
from sao.generator.render import Renderer
from sao.trajectory import Segment, SegmentBuilder, SegmentKind


class Window:
    """One context window over a rollout.

    Ids only ever grow at the end, and each is written down once, as context or as sampled. `rebuild` closes the segment
    and opens the next from messages: it is what a compaction does after the policy has written a summary.
    """

    def __init__(self, renderer: Renderer, context_tokens: int) -> None:
        self._renderer = renderer
        self._context_tokens = context_tokens
        self._closed: list[Segment] = []
        self._builder = SegmentBuilder("execution")
        self._ids = np.empty(0, np.int32)

    @property
    def ids(self) -> np.ndarray:
        """int32[n]: what the policy sees."""
        return self._ids

    @property
    def room_tokens(self) -> int:
        """Tokens that still fit."""
        return self._context_tokens - self._ids.size

    @property
    def segment_index(self) -> int:
        """Index of the open segment."""
        return len(self._closed)

    def open(self, messages: Sequence[Message]) -> bool:
        """Begins with a conversation. False, and nothing is changed, when it leaves no room for a token."""
        return self._append(self._renderer.initial(messages))

    def sampled(self, completion: Completion) -> None:
        """Takes an assistant turn as the engine gave it."""
        self._builder.append_sampled(completion.token_ids, completion.logprobs, completion.version_spans)
        self._ids = np.concatenate([self._ids, completion.token_ids])

    def observe(self, messages: Sequence[Message]) -> bool:
        """Takes what follows the assistant turn. False, and nothing is changed, if that leaves no room for a token."""
        last = int(self._ids[-1]) if self._ids.size else None
        return self._append(self._renderer.observation(messages, last))

    def rebuild(self, messages: Sequence[Message], kind: SegmentKind = "execution") -> bool:
        """Closes the open segment and begins the next with a conversation; False as in `open`."""
        ids = self._renderer.initial(messages)
        if ids.size >= self._context_tokens:
            return False
        self._closed.append(self._builder.build())
        self._builder, self._ids = SegmentBuilder(kind), np.empty(0, np.int32)
        return self._append(ids)

    def segments(self) -> tuple[Segment, ...]:
        """All segments, the open one included."""
        return (*self._closed, self._builder.build())

    def _append(self, ids: np.ndarray) -> bool:
        if ids.size >= self.room_tokens:
            return False
        self._builder.append_context(ids)
        self._ids = np.concatenate([self._ids, ids])
        return True
