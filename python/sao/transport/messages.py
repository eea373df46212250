"""What passes between actors: one header frame (msgpack map) and any number of raw payload frames.

Header: `{v, kind, seq, re, low, body}`. `seq` numbers the messages of one sender that want an answer (0: none wanted),
`re` is the `seq` that a message answers (0: none), `low` is the smallest `seq` that the sender still waits for, so that
the other side may forget older answers. Bodies hold only msgpack's plain types; nothing received is ever executed.
`SCHEMA` lists every kind with the fields that it must carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from sao.errors import WireError

PROTOCOL_VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 16
Buffer = bytes | bytearray | memoryview

_INT, _STR, _NUM, _MAP, _LIST, _BOOL = (int,), (str,), (int, float), (dict,), (list,), (bool,)
_OPT_NUM, _OPT_MAP, _OPT_STR = (int, float, type(None)), (dict, type(None)), (str, type(None))

# kind -> {field: allowed types}; a name that ends in "?" may be absent. Fields that are not listed are passed through.
SCHEMA: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    # both ways
    "ack": {"accepted?": _BOOL, "reason?": _STR, "more?": _LIST},  # more: other numbers that it answers, too
    "error": {"text": _STR, "error?": _STR, "gone?": _BOOL, "unknown?": _BOOL},
    "stop": {"reason": _STR},
    "ping": {},
    "pong": {},
    "bye": {},
    "cancel": {"seq?": _INT, "ordinal?": _INT, "attempt?": _INT},
    # joining
    "hello": {
        "role": _STR,
        "name": _STR,
        "incarnation": _INT,
        "nonce": _STR,
        "session?": _STR,
        "step?": _INT,
        "weights?": _OPT_MAP,
        "tasks?": _LIST,
    },
    "welcome": {"version": _INT, "weights": _OPT_MAP},
    # generator -> broker. `received` is the number of tasks received so far: free slots are counted after those.
    "slots": {"free": _INT, "received?": _INT},
    "trajectory": {},
    "failure": {
        "ordinal": _INT,
        "attempt": _INT,
        "reason": _STR,
        "detail?": _STR,
        "sampled_tokens": _INT,
        "split?": _STR,
    },
    "eval_result": {"ordinal": _INT, "reward": _OPT_NUM, "reason?": _OPT_STR, "version": _INT, "success?": _BOOL},
    "stats": {
        **{"busy_share?": _NUM, "tokens_per_s?": _NUM, "running?": _INT, "waiting?": _INT, "sampled_tokens?": _INT},
        **{"kv_use?": _NUM, "preempted?": _INT, "episode_limit?": _INT},
    },
    "loaded": {"version": _INT, "fingerprint": _STR},
    "turn": {"ordinal": _INT, "attempt": _INT, "part": _INT, "tokens": _INT, "version": _INT},
    "diverged": {"ordinal": _INT, "attempt": _INT, "sampled_tokens": _INT},
    # broker -> generator
    "tasks": {"tasks": _LIST},
    "version": {"version": _INT, "fingerprint": _STR, "path": _STR, "source?": _STR},
    # generator <-> learner, on a line of their own
    "pull": {"version": _INT, "offset": _INT, "size": _INT},
    "chunk": {"version": _INT, "offset": _INT, "total": _INT, "crc32": _INT},
    # learner <-> broker
    "take": {"n": _INT},
    "batch": {"lease": _INT, "version": _INT, "ordinals": _LIST},
    "commit": {
        "lease": _INT,
        "step": _INT,
        "version": _INT,
        "weights": _OPT_MAP,
        "trained_tokens": _INT,
        "masked_tokens": _INT,
        "metrics": _MAP,
        "done?": _STR,
    },
    # supervisor <-> broker
    "left": {"role": _STR, "name": _STR, "incarnation": _INT, "reason": _STR},
    "snapshot": {},
    "config": {"config?": _MAP},
    "step": {"step": _INT, "metrics": _MAP},
    "eval": {"version": _INT, "success": _OPT_NUM, "mean_reward": _OPT_NUM, "n": _INT, "failed": _INT},
    "event": {"level": _STR, "text": _STR},
    "done": {"reason": _STR},
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `frames` are read-only views of the payload frames; they stay valid as long as they are held."""

    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    frames: tuple[Buffer, ...] = ()
    seq: int = 0
    re: int = 0
    low: int = 0
    v: int = PROTOCOL_VERSION

    @property
    def n_bytes(self) -> int:
        """Bytes of the payload frames."""
        return sum(memoryview(f).nbytes for f in self.frames)


def encode(message: Message, max_message_bytes: int) -> list[Buffer]:
    """The frames of a message. Raises `WireError` that names kind, size and limit; nothing is sent then."""
    header = {
        "v": message.v,
        "kind": message.kind,
        "seq": message.seq,
        "re": message.re,
        "low": message.low,
        "body": message.body,
    }
    try:
        packed: bytes = msgpack.packb(header, default=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{message.kind}: the body cannot be encoded: {error}") from None
    if len(packed) > MAX_HEADER_BYTES:
        raise WireError(f"{message.kind}: header of {len(packed)} bytes exceeds the limit of {MAX_HEADER_BYTES} bytes")
    for index, frame in enumerate(message.frames):
        size = memoryview(frame).nbytes
        if size > max_message_bytes:
            raise WireError(
                f"{message.kind}: frame {index} of {size} bytes exceeds "
                f"transport.max_message_bytes = {max_message_bytes}"
            )
    return [packed, *message.frames]


def decode(frames: Sequence[Buffer], max_message_bytes: int, *, max_frames: int | None = None) -> Message:
    """Reads frames from outside. Sizes are checked before anything is decoded, depth right after.

    The kind and the body's fields are not judged here, see `check`. Raises `WireError`.
    """
    if not frames:
        raise WireError("message without a frame")
    if max_frames is not None and len(frames) > max_frames:
        raise WireError(f"message of {len(frames)} frames exceeds the limit of {max_frames}")
    head = memoryview(frames[0])
    if head.nbytes > MAX_HEADER_BYTES:
        raise WireError(f"header of {head.nbytes} bytes exceeds the limit of {MAX_HEADER_BYTES} bytes")
    for index, frame in enumerate(frames[1:]):
        size = memoryview(frame).nbytes
        if size > max_message_bytes:
            raise WireError(f"frame {index} of {size} bytes exceeds transport.max_message_bytes = {max_message_bytes}")
    try:
        header = msgpack.unpackb(head, ext_hook=_no_extension)
    except RecursionError:
        raise WireError("header: nested too deeply") from None
    except Exception as error:  # msgpack raises a dozen unrelated classes on malformed input
        raise WireError(f"header: not a valid message: {type(error).__name__}: {error}") from None
    if not isinstance(header, dict):
        raise WireError(f"header: expected a map, got {type(header).__name__}")
    _check_plain(header)
    v, seq, re, low = header.get("v", 0), header.get("seq", 0), header.get("re", 0), header.get("low", 0)
    for number in (v, seq, re, low):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise WireError(f"header: v, seq, re and low must be integers >= 0, got {[v, seq, re, low]}")
    kind, body = header.get("kind"), header.get("body")
    if not isinstance(kind, str) or not isinstance(body, dict):
        raise WireError(
            f"header: kind must be a string and body a map, got {type(kind).__name__} and {type(body).__name__}"
        )
    return Message(kind, body, tuple(frames[1:]), seq, re, low, v)


def check(message: Message) -> None:
    """Judges version, kind and the body's fields. Raises `WireError` that names the fault."""
    if message.v != PROTOCOL_VERSION:
        raise WireError(f"protocol version {message.v} is not supported, expected {PROTOCOL_VERSION}")
    schema = SCHEMA.get(message.kind)
    if schema is None:
        raise WireError(f"unknown message kind {message.kind[:64]!r}")
    for name, types in schema.items():
        key = name.rstrip("?")
        if key not in message.body:
            if key == name:
                raise WireError(f"{message.kind}.{key}: required, not given")
            continue
        value = message.body[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(t.__name__ for t in types)
            raise WireError(f"{message.kind}.{key}: expected {wanted}, got {type(value).__name__}")


def _plain(value: Any) -> Any:
    """NumPy and torch scalars are sent as the Python number that they hold."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not permitted")


def _check_plain(value: Any) -> None:
    """Raises `WireError` for what is nested too deeply or is no plain value."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            for child in item.values() if type(item) is dict else item:
                kind = type(child)
                if kind is dict or kind is list:
                    below.append(child)
                elif kind is msgpack.Timestamp:
                    raise WireError("header: extension type -1 is not permitted")
        if not below:
            return
        level = below
    raise WireError(f"header: nested deeper than {MAX_DEPTH} levels")
