"""Whether a well-formed trajectory may be trained on."""

from __future__ import annotations

from typing import Any, Final

from sao.broker.versions import Versions
from sao.errors import TransportError

FAILED: Final = "failed"


def fault(facts: dict[str, Any], n_bytes: int, max_bytes: int, versions: Versions) -> tuple[str, str]:
    """Why the trajectory with the header `facts` cannot be trained on, as a reason code (`FAILED`: the rollout itself
    says so), and what a user should be told; both empty when it can.
    """
    if facts["termination"] == "failed" or facts["reward"] is None:
        return FAILED, ""
    if n_bytes > max_bytes:
        return "larger_than_buffer", ""
    if facts["max_version"] > versions.current:
        return "future_version", f"tokens of version {facts['max_version']}, which is not published"
    try:
        for version, fingerprint in facts["fingerprints"].items():
            versions.verify(version, fingerprint)
    except TransportError as error:
        return "wrong_fingerprint", str(error)
    return "", ""
