"""The run: how far it is, whether its learner has continued, and how it ends."""

from __future__ import annotations

from typing import Any

import msgspec

from sao.config import Config
from sao.transport.messages import Done, StepReport


class Run:
    """The step that the learner has committed last, and the end. `resumed`: the step from which a run is resumed;
    nothing is handed out before the learner continues there.
    """

    def __init__(self, config: Config, resumed: int | None = None) -> None:
        self._env, self._max_failures = config.env.name, config.run.max_failures_in_a_row
        self.step = resumed or 0
        self.awaiting = resumed is not None
        self.ending = ""
        """Why no more training tasks and batches are given; the run is over when the held-out rounds are."""
        self.done: Done | None = None
        self.shown: StepReport | None = None
        """The last step with its metrics, as the supervisor gets it."""
        self.failures_in_a_row = 0

    @property
    def over(self) -> str:
        """Why the learner gets no more batches; empty while it does."""
        return self.done.reason if self.done else self.ending

    def end(self, reason: str) -> None:
        """The end begins; the first reason counts."""
        self.ending = self.ending or reason

    def failed(self, reason: str, detail: str) -> str:
        """Counts a failed rollout; returns why the run ends now, when there were too many in a row."""
        self.failures_in_a_row += 1
        if self.failures_in_a_row < self._max_failures:
            return ""
        text = f"{self.failures_in_a_row} rollouts in a row failed in environment {self._env}"
        return f"{text}: {reason}: {detail}"

    def note(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {key: getattr(self, key) for key in ("step", "awaiting", "ending", "done", "shown")}

    def restore(self, note: dict[str, Any]) -> None:
        """Goes on where an earlier broker was."""
        self.step, self.awaiting = note["step"], note["awaiting"]
        self.ending = note["ending"]
        self.done = msgspec.convert(note["done"], Done | None)
        self.shown = msgspec.convert(note["shown"], StepReport | None)
