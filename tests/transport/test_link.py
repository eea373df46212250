"""Reliable delivery over a line that drops, repeats and reorders: each message is worked on once."""

from __future__ import annotations

import random

import pytest

from sao.transport.encoding import Received, decode, encode
from sao.transport.link import WINDOW, Link
from sao.transport.messages import Ack, Slots


@pytest.mark.parametrize("seed", range(10))
def test_exactly_once_over_a_bad_line(seed: int) -> None:
    rng = random.Random(seed)
    sender, receiver = Link(1.0), Link(1.0)
    now, worked, answered = 0.0, [], set()
    to_receiver: list[Received] = []
    to_sender: list[Received] = []

    def line(queue: list[Received], message: Received) -> None:
        for _ in range(rng.choice([0, 1, 1, 2])):
            queue.insert(rng.randrange(len(queue) + 1), message)

    for i in range(200):
        seq = sender.number()
        wire = encode(Slots(i), 1 << 20, seq=seq, low=sender.low)
        sender.sent(seq, wire, now)
        line(to_receiver, decode(wire, 1 << 20))
    for _ in range(10_000):
        if not sender.waiting:
            break
        now += 0.5
        for wire in sender.due(now):
            line(to_receiver, decode(wire, 1 << 20))
        while to_receiver:
            received = to_receiver.pop()
            seq = received.header.seq
            if receiver.fresh(seq, received.header.low):
                worked.append(received.message().free)
                receiver.answered(seq, encode(Ack(), 1 << 20, re=seq))
            kept = receiver.answer(seq)
            if kept is not None:
                line(to_sender, decode(kept, 1 << 20))
        while to_sender:
            answer = to_sender.pop().header
            answered.add(answer.re)
            sender.settle(answer.re)
    assert sorted(worked) == list(range(200))
    assert len(answered) == 200
    assert sender.next_due() is None


def test_answers_are_forgotten_when_the_sender_has_them() -> None:
    receiver = Link(1.0)
    for seq in range(1, 1001):
        assert receiver.fresh(seq, max(1, seq - 3))
        receiver.answered(seq, [b"x"])
    assert receiver.remembered <= 4
    assert not receiver.fresh(5, 5)  # long ago: neither worked on nor answered again
    assert receiver.answer(5) is None


def test_a_message_that_is_worked_on_is_not_started_again() -> None:
    receiver = Link(1.0)
    assert receiver.fresh(1, 0)
    assert not receiver.fresh(1, 0)
    assert receiver.answer(1) is None
    receiver.answered(1, [b"batch"])
    assert not receiver.fresh(1, 0)
    assert receiver.answer(1) == [b"batch"]


def test_memory_is_bounded_on_both_ends() -> None:
    sender, receiver = Link(1.0), Link(1.0)
    for _ in range(WINDOW):
        assert sender.open
        sender.sent(sender.number(), [b""], 0.0)
    assert not sender.open
    assert sender.settle(1)
    assert not sender.settle(1)
    assert sender.open
    for seq in range(1, 3 * WINDOW):  # a sender that never says what it has
        receiver.fresh(seq, 0)
    assert receiver.remembered == 2 * WINDOW


def test_resends_slow_down() -> None:
    sender = Link(1.0)
    sender.sent(sender.number(), [b"m"], 0.0)
    times = [t / 4 for t in range(400) if list(sender.due(t / 4))]
    assert times[:5] == [1.0, 3.0, 7.0, 15.0, 23.0]


def test_what_only_waits_for_its_turn_is_not_sent_again() -> None:
    link = Link(resend_s=1.0)
    for _ in range(3):
        link.sent(link.number(), [b"wire"], 0.0)
    link.settle(1)  # the other end works through them, slowly
    assert list(link.due(1.5)) == []
    link.settle(2)
    assert list(link.due(2.6)) == []
    assert len(list(link.due(3.7))) == 1  # since then nothing was answered


def test_a_hole_is_sent_again_although_later_ones_are_answered() -> None:
    link = Link(resend_s=1.0)
    for number in range(3):
        link.sent(link.number(), [b"%d" % number], 0.0)
    link.settle(3)
    assert list(link.due(1.5)) == [[b"0"], [b"1"]]
