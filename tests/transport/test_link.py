"""Delivery over connections that break: each message is worked on once."""

from __future__ import annotations

import random
from collections import deque

import pytest

from sao.transport.encoding import decode, encode
from sao.transport.link import WINDOW, Link
from sao.transport.messages import Ack, Buffer, Slots


@pytest.mark.parametrize("seed", range(10))
def test_exactly_once_over_connections_that_break(seed: int) -> None:
    """Both directions in order; each break loses what is on the way, then what is unanswered is sent again."""
    rng = random.Random(seed)
    sender, receiver = Link(), Link()
    worked: list[int] = []
    answered: set[int] = set()
    there: deque[list[Buffer]] = deque()
    back: deque[list[Buffer]] = deque()
    to_send = deque(range(200))
    while to_send or sender.sent:
        event = rng.random()
        if event < 0.05:
            there.clear()
            back.clear()
            there.extend(sender.unanswered())
        elif event < 0.4 and to_send:
            _, sent = sender.send(Slots(to_send.popleft()), 1 << 20)
            there.append(sent.wire)
        elif event < 0.7 and there:
            received = decode(there.popleft(), 1 << 20)
            seq, message = received.header.seq, received.message()
            if receiver.fresh(seq, received.header.low):
                assert isinstance(message, Slots)
                worked.append(message.free)
                receiver.answered(seq, encode(Ack(), 1 << 20, re=seq))
            kept = receiver.answer(seq)
            assert kept is not None
            back.append(kept)
        elif back:
            re = decode(back.popleft(), 1 << 20).header.re
            answered.add(re)
            sender.settle(re)
    assert worked == list(range(200))
    assert answered == set(range(1, 201))


def test_answers_are_forgotten_when_the_sender_has_them() -> None:
    receiver = Link()
    for seq in range(1, 1001):
        assert receiver.fresh(seq, max(1, seq - 3))
        receiver.answered(seq, [b"x"])
    assert len(receiver.answers) <= 4
    assert not receiver.fresh(5, 5)  # long ago: neither worked on nor answered again
    assert receiver.answer(5) is None


def test_a_message_that_is_worked_on_is_not_started_again() -> None:
    receiver = Link()
    assert receiver.fresh(1, 0)
    assert not receiver.fresh(1, 0)
    assert receiver.answer(1) is None
    receiver.answered(1, [b"batch"])
    assert not receiver.fresh(1, 0)
    assert receiver.answer(1) == [b"batch"]


def test_memory_is_bounded_on_both_ends() -> None:
    sender, receiver = Link(), Link()
    for _ in range(WINDOW):
        assert sender.open
        sender.send(Ack(), 1 << 20)
    assert not sender.open
    assert sender.settle(1)
    assert not sender.settle(1)
    assert sender.open
    for seq in range(1, 3 * WINDOW):  # a sender that never says what it has
        receiver.fresh(seq, 0)
    assert len(receiver.answers) == 2 * WINDOW


def test_after_a_restart_of_the_other_end_its_numbers_begin_anew() -> None:
    link = Link()
    first, _, third = [link.send(Slots(number), 1 << 20)[1].wire for number in range(3)]
    link.settle(2)
    assert link.unanswered() == [first, third] and link.low == 1
    assert link.fresh(1, 1) and link.fresh(2, 2) and not link.fresh(1, 2)
    link.restart()
    assert link.fresh(1, 1) and link.unanswered() == [first, third]
