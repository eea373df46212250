"""The encoding of messages: one header frame and any number of raw payload frames.

The header is a MessagePack map `{v, kind, seq, re, low, body}`. `kind` is the class name in snake case and `body` its
fields, except for those at their defaults. `seq` numbers the messages of one sender that want an answer (0: none
wanted), `re` is the `seq` that a message answers (0: none), `low` is the smallest `seq` that the sender still waits
for, so that the other side may forget older answers.

Sizes are checked before anything is decoded, types and ranges while it is; nothing received is ever executed.
"""

from __future__ import annotations

import re as regex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from sao.errors import WireError
from sao.transport.messages import MAX_FRAMES, NAMES, Buffer, Message, Number, RunConfig, Snapshot

PROTOCOL_VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 16  # of maps and lists in fields that hold anything
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})


class Header(Struct, frozen=True):
    """The header frame, with the body still encoded."""

    v: Number
    kind: str
    body: Raw
    seq: Number = 0
    re: Number = 0
    low: Number = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A message from outside of which only the header was judged."""

    header: Header
    frames: tuple[Buffer, ...]

    def message(self) -> Message:
        """The message itself. Raises `WireError` that names version, kind or field, the value, and what is expected."""
        kind, (cls, decoder) = self.header.kind, _KINDS.get(self.header.kind, (None, None))
        if self.header.v != PROTOCOL_VERSION:
            raise WireError(f"protocol version {self.header.v} is not supported, expected {PROTOCOL_VERSION}")
        if cls is None or decoder is None:
            raise WireError(f"unknown message kind {kind[:64]!r}")
        least, most = cls.n_frames
        if not least <= len(self.frames) <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise WireError(f"{kind}.frames: expected {wanted}, got {len(self.frames)}")
        try:
            message: Message = decoder.decode(self.header.body)
            if isinstance(message, Snapshot | RunConfig):
                _check_tree(message.tree)
        except Exception as error:
            raise _wire_error(kind, bytes(self.header.body), error) from None
        message.frames = self.frames
        return message


def encode(message: Message, max_message_bytes: int, seq: int = 0, re: int = 0, low: int = 0) -> list[Buffer]:
    """The frames of a message. Raises `WireError` that names kind, size and limit; nothing is sent then."""
    kind, frames = message.kind, message.frames
    body = msgspec.structs.replace(message, frames=()) if frames else message
    try:
        packed = _ENCODER.encode({"v": PROTOCOL_VERSION, "kind": kind, "seq": seq, "re": re, "low": low, "body": body})
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{kind}: the body cannot be encoded: {error}") from None
    _check_sizes((packed, *frames), max_message_bytes, f"{kind}: ")
    return [packed, *frames]


def decode(frames: Sequence[Buffer], max_message_bytes: int, *, max_frames: int = MAX_FRAMES + 1) -> Received:
    """Reads frames from outside: sizes first, then the header. Raises `WireError`."""
    if not 0 < len(frames) <= max_frames:
        raise WireError(f"message of {len(frames)} frames, expected 1 to {max_frames}")
    _check_sizes(frames, max_message_bytes)
    try:
        return Received(_HEADERS.decode(frames[0]), tuple(frames[1:]))
    except Exception as error:
        raise _wire_error("header", bytes(frames[0]), error) from None


def _check_sizes(frames: Sequence[Buffer], max_message_bytes: int, what: str = "") -> None:
    sizes = [memoryview(frame).nbytes for frame in frames]
    if sizes[0] > MAX_HEADER_BYTES:
        raise WireError(f"{what}header of {sizes[0]} bytes exceeds the limit of {MAX_HEADER_BYTES} bytes")
    for index, size in enumerate(sizes[1:]):
        if size > max_message_bytes:
            limit = f"transport.max_message_bytes = {max_message_bytes}"
            raise WireError(f"{what}frame {index} of {size} bytes exceeds {limit}")


def _check_tree(value: Any, depth: int = 1) -> None:
    """Raises `ValueError` for what is nested too deeply or is no plain value."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, dict | list):
            _check_tree(child, depth + 1)
        elif type(child) not in _PLAIN:
            raise ValueError(f"{type(child).__name__} is not permitted")


def _wire_error(where: str, data: bytes, error: Exception) -> WireError:
    """The decoder's error with the name and, where it can be found, the value of the field."""
    if isinstance(error, RecursionError):
        return WireError(f"{where}: nested too deeply")
    text, _, path = str(error).replace("`", "").partition(" - at $")
    if not isinstance(error, msgspec.ValidationError):
        return WireError(f"{where}: not a valid message: {type(error).__name__}: {text}")
    if text.startswith("Object missing required field "):
        return WireError(f"{where}{path}.{text.rpartition(' ')[2]}: required, not given")
    if text.startswith("Expected ") and ", got " not in text:
        with suppress(Exception):  # what else is in there may be of any kind
            value = msgspec.msgpack.decode(data)
            for name, index in regex.findall(r"\.(\w+)|\[(\d+)\]", path):
                value = value[name or int(index)]
            text += f", got {repr(value)[:64]}"
    return WireError(f"{where}{path}: {text[:1].lower()}{text[1:]}")


def _plain(value: Any) -> Any:
    """NumPy and torch scalars are sent as the Python number that they hold."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _no_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code} is not permitted")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
_HEADERS: Final = msgspec.msgpack.Decoder(Header)
_KINDS: Final[dict[str, tuple[type[Message], msgspec.msgpack.Decoder[Any]]]] = {
    name: (kind, msgspec.msgpack.Decoder(kind, ext_hook=_no_extension)) for kind, name in NAMES.items()
}
