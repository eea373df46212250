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
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from sao.errors import WireError
from sao.transport.messages import MAX_FRAMES, NAMES, Buffer, Message, Number

PROTOCOL_VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20


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
        header = self.header
        if header.v != PROTOCOL_VERSION:
            raise WireError(f"protocol version {header.v} is not supported, expected {PROTOCOL_VERSION}")
        known = _KINDS.get(header.kind)
        if known is None:
            raise WireError(f"unknown message kind {header.kind[:64]!r}")
        kind, decoder = known
        least, most = kind.n_frames
        if not least <= len(self.frames) <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise WireError(f"{header.kind}.frames: expected {wanted}, got {len(self.frames)}")
        try:
            message: Message = decoder.decode(header.body)
        except Exception as error:
            raise _wire_error(header.kind, bytes(header.body), error) from None
        message.frames = self.frames
        return message


def encode(message: Message, max_message_bytes: int, seq: int = 0, re: int = 0, low: int = 0) -> list[Buffer]:
    """The frames of a message. Raises `WireError` that names kind, size and limit; nothing is sent then."""
    kind, frames = NAMES[type(message)], message.frames
    body = msgspec.structs.replace(message, frames=()) if frames else message
    try:
        packed = _ENCODER.encode({"v": PROTOCOL_VERSION, "kind": kind, "seq": seq, "re": re, "low": low, "body": body})
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{kind}: the body cannot be encoded: {error}") from None
    if len(packed) > MAX_HEADER_BYTES:
        raise WireError(f"{kind}: header of {len(packed)} bytes exceeds the limit of {MAX_HEADER_BYTES} bytes")
    for index, frame in enumerate(frames):
        size = memoryview(frame).nbytes
        if size > max_message_bytes:
            raise WireError(
                f"{kind}: frame {index} of {size} bytes exceeds transport.max_message_bytes = {max_message_bytes}"
            )
    return [packed, *frames]


def decode(frames: Sequence[Buffer], max_message_bytes: int, *, max_frames: int = MAX_FRAMES + 1) -> Received:
    """Reads frames from outside: sizes first, then the header. Raises `WireError`."""
    if not frames:
        raise WireError("message without a frame")
    if len(frames) > max_frames:
        raise WireError(f"message of {len(frames)} frames exceeds the limit of {max_frames}")
    head = memoryview(frames[0])
    if head.nbytes > MAX_HEADER_BYTES:
        raise WireError(f"header of {head.nbytes} bytes exceeds the limit of {MAX_HEADER_BYTES} bytes")
    for index, frame in enumerate(frames[1:]):
        size = memoryview(frame).nbytes
        if size > max_message_bytes:
            raise WireError(f"frame {index} of {size} bytes exceeds transport.max_message_bytes = {max_message_bytes}")
    try:
        return Received(_HEADERS.decode(head), tuple(frames[1:]))
    except Exception as error:
        raise _wire_error("header", bytes(head), error) from None


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
        try:
            value = msgspec.msgpack.decode(data)
            for name, index in regex.findall(r"\.(\w+)|\[(\d+)\]", path):
                value = value[name or int(index)]
            text += f", got {repr(value)[:64]}"
        except Exception:
            text += ", got something else"
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
