"""In which formats trajectories may be written: what the writer, the broker and the learner all read.

Format 1 is what every build knows; format 2 has sidecars. The learner decides, since nobody else reads what was
written; until one has joined, this build stands for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sao import _core
from sao.errors import WireError
from sao.trajectory import common_formats

if TYPE_CHECKING:
    from sao.broker.state import State

OURS: Final[tuple[int, ...]] = tuple(_core.WIRE_FORMATS)
WITH_SIDECARS: Final = 2


def of(hello: dict[str, Any]) -> tuple[int, ...]:
    """The formats that a peer and this build know; one that names none knows format 1. Raises `WireError`."""
    theirs = hello.get("formats", [1])
    if not all(type(number) is int for number in theirs):
        raise WireError(f"hello.formats: expected a list of integers, got {theirs!r}")
    return common_formats(theirs)


def learner_joined(state: State, formats: tuple[int, ...]) -> None:
    """Takes what the learner reads, and tells the generators that can write more than format 1 if it is something else
    than they were told.

    Raises `WireError` when something is held for it that it cannot read; nothing has changed then.
    """
    held = [task.ordinal for task in state.book.live.values() if task.n_sidecars and task.state in ("ready", "leased")]
    if held and WITH_SIDECARS not in formats:
        raise WireError(
            f"hello.formats: the learner reads {list(formats)}, trajectories of format {WITH_SIDECARS} wait for it"
            f" (tasks {held[:8]})"
        )
    if formats != state.formats:
        state.formats = formats
        for name, generator in list(state.pool.by_name.items()):
            if WITH_SIDECARS in generator.formats:  # an older build does not know this message
                both = [number for number in formats if number in generator.formats]
                state.wire.to_generator(name, "formats", {"formats": both})
