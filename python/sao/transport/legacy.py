"""Messages by their former names and maps, until every caller knows the classes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from sao.transport import encoding
from sao.transport import messages as m

_OLD: dict[str, type[m.Message]] = {
    "trajectory": m.FinishedRollout,
    "failure": m.FailedRollout,
    "turn": m.KeptTurn,
    "version": m.NewWeights,
    "step": m.StepReport,
    "eval": m.EvalReport,
    "error": m.WorkerError,
    "cancel": m.CancelTask,
}
NAMES = {kind: name for name, kind in _OLD.items()} | {
    m.Refusal: "error",
    m.GetSnapshot: "snapshot",
    m.GetConfig: "config",
    m.RunConfig: "config",
    m.CancelCall: "cancel",
    m.Position: "ack",
}


def type_of(kind: str) -> type[m.Message]:
    """The class of what was called so, where it is sent unasked."""
    asked: dict[str, type[m.Message]] = {"snapshot": m.GetSnapshot, "config": m.GetConfig}
    return asked.get(kind) or _OLD.get(kind) or encoding._KINDS[kind][0]


def message_of(kind: str, body: dict[str, Any] | None = None, frames: Any = (), answer: bool = False) -> m.Message:
    """The message of a former kind and body."""
    body = dict(body or {})
    cls = type_of(kind)
    if kind == "version":
        body = {"weights": body}
    elif kind == "ack" and "step" in body:
        cls = m.Position
    elif answer and kind == "snapshot":
        cls, body = m.Snapshot, {"state": body}
    elif answer and kind == "config":
        cls = m.RunConfig
    elif answer and kind == "error":
        cls = m.Refusal
    body = {key: value for key, value in body.items() if value is not None}
    if kind == "batch" and "attempts" not in body:
        body["attempts"] = [0] * len(body["ordinals"])
    data = encoding._ENCODER.encode(body)
    try:
        message: m.Message = msgspec.msgpack.decode(data, type=cls)
    except msgspec.ValidationError as error:
        raise encoding._wire_error(kind, data, error) from None
    return msgspec.structs.replace(message, frames=tuple(frames))


def body_of(message: Any) -> dict[str, Any]:
    """What a message's body was."""
    if isinstance(message, m.Snapshot):
        return message.state
    if isinstance(message, m.NewWeights):
        return asdict(message.weights)
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "frames"}
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, tuple):
            value = [
                list(each) if isinstance(each, tuple) else body_of(each) if isinstance(each, m.TaskEntry) else each
                for each in value
            ]
        found[name] = asdict(value) if isinstance(value, m.WeightsRef) else value
    if isinstance(message, m.TaskEntry) and not message.turns:
        del found["turns"]
    return found
