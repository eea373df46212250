"""Watching a turn while it is sampled: its content in pieces, and the texts that end it.

Both see token by token, perhaps in a thread of the engine, and the cost of a token does not grow with the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from sao.agents.request import ModelCall
from sao.engines.base import Watch
from sao.envs.protocol import Message
from sao.rollout.chat import Renderer

KEEP_ALIVE_S = 10.0  # between two signs of life in a stream
_UNDECIDED = 32  # ids that may be half of a character; no character has so many, so these are none
_PROBE = (Message("user", "a"),)


class Growing:
    """The text of ids that come one after another. decode: of ids that stand together."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._known = 0  # of these ids; their text was given, and how the next ones are written depends on them

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids add; what ends in half of a character is left for those that come."""
        self._ids += ids
        before, text = self._decode(self._ids[: self._known]), self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._known < _UNDECIDED:
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text[len(before) :]


class Stopper:
    """Ends a turn at the first of some texts, and passes its tokens on. found: the text that ended it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: tuple[str, ...], watch: Watch | None) -> None:
        self._text, self._stops, self._watch = Growing(decode), stops, watch
        self._kept, self._tail = max(map(len, stops)) - 1, ""  # characters in which a stop text may have begun
        self.found: str | None = None

    def __call__(self, token: int) -> bool:
        ended = self._watch is not None and self._watch(token)
        if self.found is None:
            text = self._tail + self._text.add([token])
            ends = {stop: at + len(stop) for stop in self._stops if (at := text.find(stop)) >= 0}
            self.found = min(ends, key=lambda stop: ends[stop], default=None)
            self._tail = text[max(0, len(text) - self._kept) :]
        return ended or self.found is not None


class Pieces:
    """The content of a turn while it is sampled, as far as it is settled; see `Watch`.

    Nothing is settled behind what may begin a call or reasoning, or white space that may be stripped at the end. event:
    there is more, or the turn is complete. sent: what was taken.
    """

    def __init__(self, renderer: Renderer, call: ModelCall) -> None:
        self._stop_token_ids, self._loop = renderer.stop_token_ids, asyncio.get_running_loop()
        self._marks = "<[{" if call.tools else "<["
        probe = renderer.read(renderer.encode("a"), renderer.initial(_PROBE))
        self._whole = bool(call.stops) or not probe.content  # a turn that begins as reasoning, or may lose its end
        self._text, self._unsent = Growing(renderer.visible), ""
        self._ids: list[int] = []
        self._seen = 0
        self.event = asyncio.Event()
        self.sent = ""

    def __call__(self, token: int) -> bool:
        self._ids.append(token)
        self._loop.call_soon_threadsafe(self.event.set)
        return False

    async def wait(self) -> bool:
        """Waits for more; false when nothing came for `KEEP_ALIVE_S`."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self.event.wait()
        except TimeoutError:
            return False
        return True

    def more(self) -> str:
        """What is settled and was not taken yet."""
        self.event.clear()
        ids = self._ids[self._seen :]
        self._seen += len(ids)
        if not ids or self._whole:
            return ""
        self._unsent += self._text.add(one for one in ids if one not in self._stop_token_ids)
        at = min((self._unsent.index(mark) for mark in self._marks if mark in self._unsent), default=-1)
        piece = (self._unsent if at < 0 else self._unsent[:at]).rstrip()
        stripped = not self.sent and self._unsent[:1].isspace()
        self._whole = at >= 0 or stripped
        if stripped:
            return ""
        self._unsent = self._unsent[len(piece) :]
        self.sent += piece
        return piece
