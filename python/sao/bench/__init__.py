"""Measurements of the parts on this machine: `sao bench`. Each topic is a function that yields `Row`s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

from sao.bench.measure import Row
from sao.errors import ValidationError

_TOPICS = {
    "buffer": "sao.bench.buffers",
    "pack": "sao.bench.kernels",
    "advantage": "sao.bench.kernels",
    "wire": "sao.bench.files",
    "ledger": "sao.bench.files",
    "transport": "sao.bench.processes",
    "weights": "sao.bench.weights",
}
TOPICS = tuple(_TOPICS)


def run(topic: str, *, quick: bool = False) -> Iterator[Row]:
    """The rows of a topic, as they are measured. `quick`: fewer repetitions, smaller largest size.

    Raises `ValidationError` for an unknown topic.
    """
    if topic not in _TOPICS:
        raise ValidationError(f"topic: {topic!r} is not one of {', '.join(TOPICS)}")
    measure: Callable[[bool], Iterator[Row]] = getattr(import_module(_TOPICS[topic]), topic)
    yield from measure(quick)
