"""What names the weights of a policy version in a message; without torch, for those who only pass it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sao.errors import WeightsError


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Where the weights of one policy version lie and what they must hash to (32 hex digits)."""

    version: int
    path: str
    fingerprint: str
    source: str = ""
    """Endpoint that serves the file to hosts that do not see `path`; empty: none does."""

    def to_message(self) -> dict[str, Any]:
        """The reference as a plain map for a message body."""
        return asdict(self)

    @classmethod
    def from_message(cls, body: Mapping[str, Any]) -> WeightsRef:
        """Reads what `to_message` made. Raises `WeightsError` that names the missing or ill-typed field."""
        for name, kind in (("version", int), ("path", str), ("fingerprint", str)):
            if not isinstance(body.get(name), kind):
                raise WeightsError(f"weights reference: {name}: {body.get(name)!r} is not {kind.__name__}")
        source = body.get("source", "")
        if not isinstance(source, str):
            raise WeightsError(f"weights reference: source: {source!r} is not str")
        return cls(body["version"], body["path"], body["fingerprint"], source)
