"""The books of one conversation: what was sent and is unanswered, and what was received and how it was answered.

Pure bookkeeping, no socket and no clock; the client and the broker each keep one for the other. While a connection
lives ZeroMQ loses and reorders nothing. With a connection anything may be lost: when it was made anew both ends send
what is unanswered once more. So a message arrives at least once, and is worked on once.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from sao.transport.encoding import encode
from sao.transport.messages import Buffer, Message

WINDOW: Final = 4096  # messages of one sender that may wait for an answer


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that waits for its answer."""

    message: Message
    wire: list[Buffer]
    deadline_s: float | None
    answer: Future[Message] = field(default_factory=Future)


class Link:
    """Numbers outgoing messages from 1 on, keeps them until they are answered, and knows incoming ones again."""

    def __init__(self) -> None:
        self._next = 1
        self.sent: OrderedDict[int, Sent] = OrderedDict()  # unanswered, in order; its first is found at once
        self.answers: OrderedDict[int, list[Buffer] | None] = OrderedDict()  # None: still to be given
        self._floor = 0

    @property
    def low(self) -> int:
        """The smallest number that still waits for an answer."""
        return next(iter(self.sent), self._next)

    @property
    def open(self) -> bool:
        """Whether one more message may be sent now."""
        return self._next - self.low < WINDOW

    # -- outgoing

    def send(self, message: Message, max_message_bytes: int, deadline_s: float | None = None) -> tuple[int, Sent]:
        """Numbers and encodes a message, and keeps it until it is settled. Raises `WireError`: then it is not sent."""
        seq = self._next
        sent = Sent(message, encode(message, max_message_bytes, seq=seq, low=self.low), deadline_s)
        self.sent[seq], self._next = sent, seq + 1
        return seq, sent

    def settle(self, seq: int) -> Sent | None:
        """Forgets an outgoing message: it was answered or given up. `None` when it was not waited for."""
        return self.sent.pop(seq, None)

    def unanswered(self) -> list[list[Buffer]]:
        """All encoded messages that wait for an answer, in order."""
        return [sent.wire for sent in self.sent.values()]

    def restart(self) -> None:
        """The other end has forgotten this one: its numbers begin anew."""
        self.answers.clear()
        self._floor = 0

    # -- incoming

    def fresh(self, seq: int, low: int) -> bool:
        """Whether a numbered message is seen for the first time. Forgets answers that the sender has received."""
        if low > self._floor:
            self._floor = low
            while self.answers and next(iter(self.answers)) < self._floor:  # they came in order, but for repeats
                self.answers.popitem(last=False)
        if seq == 0:
            return True
        if seq < self._floor or seq in self.answers or len(self.answers) >= 2 * WINDOW:
            return False
        self.answers[seq] = None
        return True

    def answered(self, seq: int, wire: list[Buffer]) -> None:
        """Keeps an answer for the case that it is lost."""
        if seq in self.answers:
            self.answers[seq] = wire

    def answer(self, seq: int) -> list[Buffer] | None:
        """The kept answer, `None` while the message is still worked on or was forgotten."""
        return self.answers.get(seq)
