"""The native core of `sao` (Rust, built from `rust/python`). Every function raises only classes of `sao.errors`."""

from collections.abc import Buffer, Sequence
from os import PathLike
from types import TracebackType
from typing import Any

# --- trajectory and wire ---

MAX_PAYLOAD_BYTES: int
MAX_SEGMENTS: int
MAX_HEADER_BYTES: int

def check_segment(segment: Any) -> None: ...
def check_trajectory(trajectory: Any, n_actions: int) -> None: ...
def encode(trajectory: Any) -> tuple[bytes, bytes]: ...
def decode(
    header: Buffer, payload: Buffer, max_bytes: int, max_segments: int
) -> tuple[dict[str, Any], list[tuple[str, int, int, int, int, bytes]]]: ...
def summary(
    header: Buffer,
    payload: Buffer | None = None,
    *,
    max_bytes: int = ...,
    max_segments: int = ...,
) -> dict[str, Any]:
    """Facts of an encoded trajectory from its header alone; with `payload`, everything is checked as `decode` does.

    Keys: id (bytes), task_ordinal, attempt, env, n_tokens, n_actions, n_segments, min_version and max_version (over
    sampled tokens, None without any), termination ("finished" | "truncated" | "failed"), reason, reward (None when
    failed), payload_bytes. Raises `WireError`.
    """

# --- ledger ---

class Ledger:
    """Where every task of a run is and where every sampled token went; any thread may call it.

    A task ordinal goes issued -> generating -> ready -> leased -> trained or dropped(reason). A requeued task is issued
    again with the next attempt; what comes from an earlier attempt is late and changes nothing. An impossible step
    raises `LedgerError` that names ordinal, state and what was wanted, and changes nothing. Memory grows with the
    unfinished tasks only: finished ones are kept as runs of ordinals, so `state` says "finished" for both outcomes.

    With a path every event is appended to a file of checksummed records and the state is recovered from it. Events are
    buffered in memory until 64 KiB are due or `sync`, which also waits for the disk: call it before telling anyone.
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        """Opens or creates the file. Raises `LedgerError` naming file and byte offset when it is damaged; a torn tail
        (what a crash left of the last write) is cut off."""
    def issue(self, ordinal: int) -> int:
        """A new task (attempt 0) or a requeued one; returns its attempt."""
    def generating(self, ordinal: int, attempt: int) -> None:
        """A generator works on the issued task."""
    def ready(self, ordinal: int, attempt: int, sampled_tokens: int) -> bool:
        """Its trajectory arrived. False: late or twice, nothing changed (see `waste` for its tokens)."""
    def lease(self, ordinals: Sequence[int], lease_id: int) -> None:
        """The learner takes ready tasks; all or none."""
    def give_back(self, lease_id: int) -> None:
        """The tasks of the lease are ready again."""
    def trained(
        self, lease_id: int, step: int, trained_tokens: int | Sequence[int], masked_tokens: int | Sequence[int]
    ) -> None:
        """Learner step `step` (must advance) used the lease: totals, or per task in the order of the lease (tasks dropped
        from it left out). trained + masked must be the tokens that the lease holds."""
    def drop(self, ordinal: int, attempt: int, reason: str, sampled_tokens: int | None = None) -> bool:
        """The unfinished task ends without training; also out of a lease. False: late, nothing changed.

        `sampled_tokens` were sampled for it; once it is ready they are known and None (or the same number) will do."""
    def requeue(self, ordinal: int, reason: str = "requeued", sampled_tokens: int | None = None) -> None:
        """The unfinished task is to be issued again with attempt + 1; its tokens count as dropped under `reason`."""
    def waste(self, reason: str, sampled_tokens: int) -> None:
        """Counts tokens sampled for no open task (late answers) as sampled and dropped under `reason`."""
    def counts(self) -> dict[str, int]:
        """Tasks per state: requeued, issued, generating, ready, leased, trained, dropped."""
    def tokens(self) -> dict[str, Any]:
        """sampled, trained, masked, held: int; dropped: dict reason -> int."""
    def check(self) -> None:
        """Raises `LedgerError` unless sampled = trained + masked + dropped + held."""
    def state(self, ordinal: int) -> str:
        """ "unknown", "requeued", "issued", "generating", "ready", "leased" or "finished"."""
    def unfinished(self) -> list[tuple[int, int, str]]:
        """(ordinal, attempt, state) of every unfinished task, in order."""
    def leases(self) -> list[tuple[int, list[int]]]:
        """Open leases with their ordinals."""
    @property
    def next_ordinal(self) -> int:
        """One more than the highest ordinal ever issued."""
    @property
    def last_step(self) -> int | None:
        """The last committed learner step."""
    @property
    def entries(self) -> int:
        """Entries held in memory."""
    def sync(self) -> None:
        """Writes what is buffered and waits for the disk, without the GIL."""
    def close(self) -> None:
        """Syncs and closes; every later call but close raises `ClosedError`."""
    def __enter__(self) -> Ledger: ...
    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None: ...
