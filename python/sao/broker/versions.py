"""The policy versions of the run: the clock, the newest weights, and what may be trained at this version."""

from typing import Any, Final

import msgspec

from sao.config.sections import StalenessSection
from sao.errors import TransportError, ValidationError
from sao.transport.messages import WeightsRef

KNOWN_FINGERPRINTS: Final = 64  # versions whose fingerprints are kept


class Versions:
    """The `current` version, which the learner updates next, its weights, and the fingerprints of the last ones."""

    def __init__(self, staleness: StalenessSection) -> None:
        self._staleness = staleness
        self.current = 0
        self.weights: WeightsRef | None = None
        self.fingerprints: dict[int, str] = {}

    @property
    def oldest_kept(self) -> int:
        """The oldest version that is still trained; 0 when nothing is dropped for its age."""
        return max(0, self.current - self._staleness.max_lag) if self._staleness.stale == "drop" else 0

    def check(self, weights: WeightsRef | None) -> None:
        """Raises `ValidationError` for weights that are not newer than the current ones."""
        if weights is not None and weights.version <= self.current:
            raise ValidationError(f"weights.version: {weights.version} must be above the current {self.current}")

    def publish(self, weights: WeightsRef) -> None:
        """Takes checked weights as the current ones."""
        self.current, self.weights = weights.version, weights
        self.fingerprints[weights.version] = weights.fingerprint
        if len(self.fingerprints) > KNOWN_FINGERPRINTS:
            del self.fingerprints[next(iter(self.fingerprints))]

    def repeated(self, weights: WeightsRef) -> bool:
        """Whether these are the current weights once more, perhaps at another place; they are then the ones to load."""
        if (weights.version, weights.fingerprint) != (self.current, self.fingerprints.get(self.current)):
            return False
        self.weights = weights
        return True

    def verify(self, version: int, fingerprint: str) -> None:
        """Raises `TransportError` when a generator's weights of a published version are not the published ones."""
        wanted = self.fingerprints.get(version)
        if wanted is not None and wanted != fingerprint:
            raise TransportError(f"weights of version {version} are {fingerprint}, published were {wanted}")

    def fault(self, metadata: dict[str, Any]) -> tuple[str, str]:
        """Why no token of the trajectory with this header can be trusted, as a reason code and in words; else empty."""
        if metadata["max_version"] > self.current:
            return "future_version", f"tokens of version {metadata['max_version']}, which is not published"
        try:
            for version, fingerprint in metadata["fingerprints"].items():
                self.verify(version, fingerprint)
        except TransportError as error:
            return "wrong_fingerprint", str(error)
        return "", ""

    def note(self) -> dict[str, Any]:
        """The state that `restore` needs."""
        return {"version": self.current, "weights": self.weights, "fingerprints": self.fingerprints}

    def restore(self, note: dict[str, Any]) -> None:
        """Goes on where an earlier broker was."""
        self.current, self.fingerprints = note["version"], note["fingerprints"]
        self.weights = msgspec.convert(note["weights"], WeightsRef | None)
