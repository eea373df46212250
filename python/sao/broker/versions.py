"""The policy version and the weights that belong to each."""

from __future__ import annotations

from typing import Any

from sao import _core
from sao.errors import TransportError, ValidationError

KNOWN_FINGERPRINTS = 64  # versions whose fingerprints are kept


class Versions:
    """The version clock, the newest weights, and the fingerprints of the last versions that were published."""

    def __init__(self) -> None:
        self._clock = _core.VersionClock()
        self.weights: dict[str, Any] | None = None
        self.fingerprints: dict[int, str] = {}

    @property
    def current(self) -> int:
        """The version of the weights that the learner updates next."""
        version: int = self._clock.version
        return version

    def check(self, weights: dict[str, Any]) -> None:
        """Raises `ValidationError` unless these are complete and newer than the current ones."""
        for key, kind in (("version", int), ("path", str), ("fingerprint", str), ("source", str)):
            if not isinstance(weights.get(key, "" if key == "source" else None), kind):
                raise ValidationError(f"weights.{key}: expected {kind.__name__}, got {weights.get(key)!r}")
        if weights["version"] <= self.current:
            raise ValidationError(f"weights.version: {weights['version']} must be above the current {self.current}")

    def publish(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Advances the clock to checked weights and returns what generators are told."""
        self._clock.advance(weights["version"])
        self.weights = {key: weights[key] for key in ("version", "path", "fingerprint", "source") if key in weights}
        self.fingerprints[weights["version"]] = weights["fingerprint"]
        if len(self.fingerprints) > KNOWN_FINGERPRINTS:
            del self.fingerprints[next(iter(self.fingerprints))]
        return self.weights

    def restore(self, version: int, weights: dict[str, Any] | None, fingerprints: dict[int, str]) -> None:
        """Goes on where an earlier broker was."""
        if version > self.current:
            self._clock.advance(version)
        self.weights, self.fingerprints = weights, dict(fingerprints)

    def repeated(self, weights: dict[str, Any]) -> bool:
        """Whether these are the current weights once more, perhaps at another place; they are then the ones to load."""
        known = self.fingerprints.get(self.current)
        if (weights.get("version"), weights.get("fingerprint")) != (self.current, known):
            return False
        self.weights = dict(weights)
        return True

    def verify(self, version: int, fingerprint: str) -> None:
        """Raises `TransportError` when a generator's weights of a published version are not the published ones."""
        wanted = self.fingerprints.get(version)
        if wanted is not None and wanted != fingerprint:
            raise TransportError(f"weights of version {version} are {fingerprint}, published were {wanted}")
