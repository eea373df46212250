"""The run: how far it is, whether its learner has continued, and how it ends."""

import msgspec

from sao.transport.messages import Done, StepReport


class Run(msgspec.Struct):
    """Where the run is. All of it outlives a broker."""

    step: int = 0
    """The last one that the learner has committed."""
    awaiting: bool = False
    """The run is resumed after `step`: nothing is handed out before the learner continues there."""
    ending: str = ""
    """Why no more training tasks and batches are given; the run is over when the held-out rounds are."""
    done: Done | None = None
    shown: StepReport | None = None
    """The last step with its metrics, as the supervisor gets it."""
    failures_in_a_row: int = 0
    first_failure: str = ""
    """Of these: reason and detail."""
