"""Measurements of the parts on this machine: `sao bench`. Each topic is a function that yields `Row`s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

from sao.errors import ValidationError
from sao.measure.measure import Row

_TOPICS = {name: "sao.measure.parts" for name in ("buffer", "pack", "advantage", "wire", "ledger", "weights")}
_TOPICS["transport"] = "sao.measure.processes"
TOPICS = tuple(_TOPICS)


def run(topic: str, *, quick: bool = False) -> Iterator[Row]:
    """The rows of a topic, as they are measured. `quick`: fewer repetitions, smaller largest size.

    Raises `ValidationError` for an unknown topic.
    """
    if topic not in _TOPICS:
        raise ValidationError(f"topic: {topic!r} is not one of {', '.join(TOPICS)}")
    measure: Callable[[bool], Iterator[Row]] = getattr(import_module(_TOPICS[topic]), topic)
    yield from measure(quick)
