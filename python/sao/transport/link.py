"""Reliable delivery between two ends over a connection that may drop messages.

Pure bookkeeping, no socket and no clock: the client and the broker each keep one `Link` per peer. What wants an
answer is numbered and sent again until it is answered; what arrives twice is answered from memory and not worked on
twice.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from sao.transport.messages import Buffer

WINDOW: Final = 4096  # messages of one sender that may wait for an answer


class Link:
    """State of one connection. `resend_s` is the first resend delay; it doubles up to `8 * resend_s`.

    A message is not sent again while answers to earlier ones keep coming: its turn has not come yet. On a slow line, or
    behind a busy broker, repeats would only lengthen the queue that they wait in.
    """

    def __init__(self, resend_s: float) -> None:
        self._resend_s = resend_s
        self._next = 1
        self._out: OrderedDict[int, tuple[list[Buffer], float]] = OrderedDict()  # its first is found at once
        self._due: list[tuple[float, int, int]] = []  # when, which, and the latest answered when that was set
        self._answers: OrderedDict[int, list[Buffer] | None] = OrderedDict()
        self._floor = self._answered = 0

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
        self._out[seq] = ([], self._resend_s)
        return seq

    def sent(self, seq: int, wire: list[Buffer], now: float) -> None:
        """Keeps the encoded message until it is answered."""
        if seq in self._out:
            self._out[seq] = (wire, self._resend_s)
            heapq.heappush(self._due, (now + self._resend_s, seq, self._answered))

    def settle(self, seq: int) -> bool:
        """Forgets an outgoing message: it was answered or given up. False when it was not waited for."""
        if self._out.pop(seq, None) is None:
            return False
        self._answered = max(self._answered, seq)
        return True

    def due(self, now: float) -> Iterator[list[Buffer]]:
        """Encoded messages to be sent again now."""
        while self._due and self._due[0][0] <= now:
            _, seq, answered = heapq.heappop(self._due)
            if seq not in self._out:
                continue
            if answered < self._answered < seq:
                heapq.heappush(self._due, (now + self._resend_s, seq, self._answered))
                continue
            wire, delay = self._out[seq]
            delay = min(2 * delay, 8 * self._resend_s)
            self._out[seq] = (wire, delay)
            heapq.heappush(self._due, (now + delay, seq, self._answered))
            yield wire

    def next_due(self) -> float | None:
        """Time of the next resend, `None` when nothing waits."""
        while self._due and self._due[0][1] not in self._out:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def drop(self, seqs: Iterable[int]) -> None:
        """Forgets outgoing messages that nobody needs to have answered."""
        for seq in seqs:
            self._out.pop(seq, None)

    def again(self, now: float) -> list[list[Buffer]]:
        """All encoded messages that wait for an answer, in order: the other end has forgotten this one. What came from
        it before is of another conversation: numbers of incoming messages begin anew.
        """
        self._answers.clear()
        self._floor = 0
        self._due.clear()
        wires = []
        for seq, (wire, _) in self._out.items():
            if wire:
                self.sent(seq, wire, now)
                wires.append(wire)
        return wires

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
