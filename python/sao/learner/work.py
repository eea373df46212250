"""What the parts of a step share: the batch, this rank's micro-batches, and where their numbers go."""

from __future__ import annotations

from dataclasses import dataclass, field

from sao.learner.batch import Batch, MicroBatch
from sao.learner.metrics import Clock
from sao.learner.record import Record


@dataclass
class Work:
    """One step in progress on this rank."""

    batch: Batch
    micro: list[MicroBatch]
    clock: Clock
    metrics: dict[str, float] = field(default_factory=dict)
    record: Record | None = None  # collects arrays where `telemetry.keep_trajectories` wants them

    @property
    def n_actions(self) -> int:
        """Action tokens of the whole batch, on all ranks."""
        return int(self.batch.action_mask.sum())
