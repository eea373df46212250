"""The books of one conversation: what was sent and is unanswered, and what was received and how it was answered.

Pure bookkeeping, no socket and no clock; the client and the broker each keep one for the other. While a connection
lives ZeroMQ loses and reorders nothing. With a connection anything may be lost: when it was made anew both ends send
what is unanswered once more. So a message arrives at least once, and is worked on once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from sao.transport.messages import Buffer

WINDOW: Final = 4096  # messages of one sender that may wait for an answer


class Link:
    """Numbers outgoing messages from 1 on, keeps them until they are answered, and knows incoming ones again."""

    def __init__(self) -> None:
        self._next = 1
        self._out: OrderedDict[int, list[Buffer]] = OrderedDict()  # its first is found at once
        self._answers: OrderedDict[int, list[Buffer] | None] = OrderedDict()
        self._floor = 0

    @property
    def low(self) -> int:
        """The smallest number that still waits for an answer."""
        return next(iter(self._out), self._next)

    @property
    def waiting(self) -> int:
        """Messages sent and not yet answered."""
        return len(self._out)

    @property
    def remembered(self) -> int:
        """Messages received whose answer is kept, or still to be given."""
        return len(self._answers)

    @property
    def open(self) -> bool:
        """Whether one more message may be sent now."""
        return self._next - self.low < WINDOW

    # -- outgoing

    def number(self) -> int:
        """Reserves the next number."""
        seq = self._next
        self._next += 1
        self._out[seq] = []
        return seq

    def sent(self, seq: int, wire: list[Buffer]) -> None:
        """Keeps the encoded message until it is answered."""
        if seq in self._out:
            self._out[seq] = wire

    def settle(self, seq: int) -> bool:
        """Forgets an outgoing message: it was answered or given up. False when it was not waited for."""
        return self._out.pop(seq, None) is not None

    def unanswered(self) -> list[list[Buffer]]:
        """All encoded messages that wait for an answer, in order."""
        return [wire for wire in self._out.values() if wire]

    def restart(self) -> None:
        """The other end has forgotten this one: its numbers begin anew."""
        self._answers.clear()
        self._floor = 0

    # -- incoming

    def fresh(self, seq: int, low: int) -> bool:
        """Whether a numbered message is seen for the first time. Forgets answers that the sender has received."""
        if low > self._floor:
            self._floor = low
            while self._answers and next(iter(self._answers)) < self._floor:  # they came in order, but for repeats
                self._answers.popitem(last=False)
        if seq == 0:
            return True
        if seq < self._floor or seq in self._answers or len(self._answers) >= 2 * WINDOW:
            return False
        self._answers[seq] = None
        return True

    def answered(self, seq: int, wire: list[Buffer]) -> None:
        """Keeps an answer for the case that it is lost."""
        if seq in self._answers:
            self._answers[seq] = wire

    def answer(self, seq: int) -> list[Buffer] | None:
        """The kept answer, `None` while the message is still worked on or was forgotten."""
        return self._answers.get(seq)
