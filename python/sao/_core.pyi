"""The native core. Arrays must be one-dimensional, contiguous and of the dtype named (`TypeError` otherwise)."""

from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer as BytesLike

# Versions, packing, advantages

@final
class VersionClock:
    """The current policy version, shared by threads; advanced only by a committed update."""

    def __new__(cls, version: int = 0) -> VersionClock: ...
    @property
    def version(self) -> int: ...
    def advance(self, to: int) -> None:
        """Moves to `to` and wakes who waits. Raises `ValidationError` unless it exceeds the current version."""

    def wait(self, version: int, timeout_s: float | None = None) -> int:
        """Parks until the version is at least `version`; returns it. Raises `DeadlineError`."""

@final
class Admission:
    """Bounds the rollouts in flight so that none trained in order of start lags by more than `max_lag` steps."""

    def __new__(cls, max_lag: int, batch: int) -> Admission: ...
    def permits(self, steps: int, trained: int, leased: int, ready: int, running: int) -> int:
        """(max_lag + steps + 1) * batch - (trained + leased + ready + running), at least 0.

        `steps` counts committed learner steps, those of a critic warm-up included.
        """

def token_lags(
    action_mask: NDArray[np.bool_] | NDArray[np.uint8], version_spans: NDArray[np.int64], learner_version: int
) -> NDArray[np.int32]:
    """Lag of each token: learner_version - version on action tokens, -1 elsewhere; int32 [n].

    `version_spans` int64 [k, 3]: rows (start, stop, version), sorted, disjoint. Lag 0 is a token of the very version
    that is about to be updated. Raises `ValidationError` for a version ahead of the learner's, an action token in no
    span, or spans out of order.
    """

def pack(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs items into few bins of `capacity`: best fit, longest first, deterministic.

    Returns (order int64 [n], offsets int64 [bins + 1]): bin b holds the items order[offsets[b]:offsets[b + 1]].
    Raises `ValidationError` naming index, length and capacity of the first item that is not in 1..capacity.
    """

@final
class Plan:
    """Where every segment of a learner step goes. `position` is its first token inside the row."""

    @property
    def rank(self) -> NDArray[np.int32]: ...
    @property
    def micro_batch(self) -> NDArray[np.int32]: ...
    @property
    def row(self) -> NDArray[np.int32]: ...
    @property
    def position(self) -> NDArray[np.int32]: ...
    @property
    def costs(self) -> NDArray[np.float64]:
        """Cost of each micro-batch, [ranks, n_micro_batches]."""

    @property
    def n_micro_batches(self) -> int: ...
    @property
    def hash(self) -> int:
        """64-bit hash of the input and the whole plan; ranks compare it before they step."""

def plan(
    lengths: NDArray[np.int64],
    ranks: int,
    row_tokens: int,
    rows_per_micro_batch: int,
    *,
    linear_cost: float = 24576.0,
    quadratic_cost: float = 1.0,
) -> Plan:
    """Lays segments out over ranks, micro-batches and rows; deterministic.

    No row exceeds `row_tokens`. Every rank has the same number of micro-batches, the least that holds all rows; a rank
    may have fewer rows in one, or none at all, but no micro-batch is empty on all ranks. Rows are balanced by cost,
    linear_cost * l + quadratic_cost * l^2 per segment of l tokens (only the ratio matters; the default suits 7B
    models), so that the step is short when every micro-batch takes as long as its slowest rank.

    Raises `ValidationError` for no segments, for a length outside 1..row_tokens (naming index, length and limit) and
    for parameters out of range.
    """

def advantages(
    values: NDArray[np.float32],
    action_mask: NDArray[np.bool_] | NDArray[np.uint8],
    segment_offsets: NDArray[np.int64],
    trajectory_offsets: NDArray[np.int64],
    rewards: NDArray[np.float32],
    *,
    gamma: float,
    lambda_policy: float | None,
    lambda_alpha: float,
    lambda_critic: float,
    cross_segment: Literal["paper", "chained", "none"] | str = "paper",
    skip_observations: bool = True,
    bootstrap: NDArray[np.float32] | None = None,
    turn_rewards: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
    after: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
    """(advantages, targets, lambdas); documented at `sao.advantages`."""

# The buffer of encoded trajectories

@final
class Buffer:
    """A bounded buffer of encoded trajectories; `sao.TrajectoryBuffer` is the same for decoded ones."""

    def __new__(cls, max_trajectories: int, max_bytes: int, policy: str = "block") -> Buffer: ...
    def put(
        self,
        header: BytesLike,
        payload: BytesLike,
        *,
        min_version: int,
        timeout_s: float | None = None,
        sidecars: Sequence[BytesLike] | None = None,
        task: int = -1,
    ) -> list[int]:
        """Copies one in, with the frames of its sidecars; returns the tasks of what the policy dropped for it. `task`:
        the ordinal by which it can be taken, -1 for none.

        Raises `DeadlineError`, `FullError`, `ClosedError`; `ValidationError` at once for one that can never fit.
        """

    def put_trajectory(self, trajectory: Any, timeout_s: float | None = None) -> list[int]:
        """Checks a `sao.Trajectory` and encodes it into the buffer's memory, under its `task_ordinal`.

        Returns and raises as `put`, and `ValidationError` when a rule of the trajectory is broken.
        """

    def take(self, what: int | Sequence[int], timeout_s: float | None = None) -> list[Lease]:
        """Leases so many in order of completion, or those of exactly these tasks, in this order (of several of a task
        the first that was completed), all or none. All calls wait in one queue.

        Raises `DeadlineError`, `ClosedError`; `ValidationError` at once for what can never be there and for a task
        named twice.
        """

    def try_take(self, what: int | Sequence[int]) -> list[Lease]:
        """As `take` without waiting: empty when not all are ready or others wait for theirs."""

    def advance(self, version: int, keep_from: int | None = None) -> list[int]:
        """Takes note of the policy version; drops what is ready with min_version < keep_from and returns the tasks."""

    def stats(self) -> dict[str, Any]:
        """trajectories (ready to be taken), leased, copying, bytes, received, committed, dropped {reason: n},
        waiting_takes, waiting_puts, version, closed.
        """

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """What is held, in order of completion: sequence, bytes, min_version, task (int64) and leased (bool), one entry
        a trajectory.
        """

    def wait_to_take(self, what: int | Sequence[int]) -> Waiter:
        """Joins the queue of those who wait to take."""

    def wait_to_put(self, bytes: int) -> Waiter:
        """Joins the queue of those who wait for room for this many bytes, header and payload together."""

    def close(self) -> None:
        """Wakes everybody who waits with `ClosedError` and frees what is ready; leases and views stay valid."""

    def __len__(self) -> int:
        """Trajectories ready to be taken."""

@final
class Lease:
    """One trajectory taken out; dropping it unsettled gives it back. Settled leases raise `ClosedError`."""

    @property
    def sequence(self) -> int: ...
    @property
    def min_version(self) -> int: ...
    @property
    def task(self) -> int: ...
    @property
    def header(self) -> View: ...
    @property
    def payload(self) -> View: ...
    @property
    def sidecars(self) -> list[View]: ...
    def commit(self) -> None: ...
    def give_back(self) -> None: ...

@final
class Waiter:
    """A place in a queue, for event loops: try at once, and again whenever `fileno()` becomes readable."""

    def fileno(self) -> int: ...
    def take(self) -> list[Lease] | None:
        """The trajectories, or None when they are not there yet. Raises `ClosedError`."""

    def put(
        self,
        header: BytesLike,
        payload: BytesLike,
        min_version: int,
        sidecars: Sequence[BytesLike] | None = None,
        *,
        task: int = -1,
    ) -> list[int] | None:
        """Tasks of those that the policy dropped for it; None when there is no room yet. Raises as `Buffer.put`."""

    def close(self) -> None:
        """Leaves the queue; so does dropping it."""

@final
class View:
    """Read-only bytes (buffer protocol, 64-byte aligned) in the buffer's memory, kept by whoever views them.

    A view, or anything made from it without a copy, keeps its memory; it is never used for anything else meanwhile.
    """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

# Trajectories as bytes

MAX_PAYLOAD_BYTES: int
MAX_SEGMENTS: int
MAX_HEADER_BYTES: int
MAX_SIDECARS: int

def check_segment(segment: Any) -> None: ...
def check_trajectory(trajectory: Any, n_actions: int) -> None: ...
def encode(trajectory: Any) -> tuple[bytes, bytes]: ...
def decode(
    header: BytesLike,
    payload: BytesLike,
    max_bytes: int,
    max_segments: int,
    sidecars: Sequence[BytesLike] | None = None,
) -> Any:
    """The `sao.Trajectory`."""

def summary(
    header: BytesLike,
    payload: BytesLike | None = None,
    *,
    max_bytes: int = ...,
    max_segments: int = ...,
    sidecars: Sequence[BytesLike] | None = None,
) -> dict[str, Any]:
    """Facts of an encoded trajectory from its header alone; with `payload`, everything is checked as `decode` does.

    Keys: id (bytes), task_ordinal, attempt, env, n_tokens, n_actions, n_segments, min_version and max_version (over
    sampled tokens, None without any), termination ("finished" | "truncated" | "failed"), reason, reward (None when
    failed), fingerprints (dict by version), payload_bytes, sidecars (dict name -> bytes). Raises `WireError`.
    """

# The ledger

@final
class Ledger:
    """Where every task of a run is and where every sampled token went; any thread may call it.

    A task ordinal goes issued -> generating -> ready -> leased -> trained or dropped(reason). A requeued task is issued
    again with the next attempt; what comes from an earlier attempt is late and changes nothing. An impossible step
    raises `LedgerError` that names ordinal, state and what was wanted, and changes nothing. Memory grows with the
    unfinished tasks only: finished ones are kept as runs of ordinals, so `state` says "finished" for both outcomes.

    With a path every event goes to a journal, a folder of checksummed segments from which the state is recovered, and
    what else belongs to unfinished tasks can be kept there, too (`trajectory`, `turn`, `note`). What was recorded since
    the last `flush` or `sync` is one transaction, of which a crash leaves all or nothing: call one of them before
    telling anyone. Steps are kept in memory, too, until `roll` sums them up.
    """

    def __new__(cls, path: str | PathLike[str] | None = None, *, segment_bytes: int = 16777216) -> Ledger:
        """Opens or creates the folder. Raises `LedgerError` naming file and byte offset when it is damaged; a torn tail
        (what a crash left of the last write) is cut off. Newest segments of `segment_bytes` are `full`."""
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
        """Learner step `step` (must advance) used the lease: totals, or per task in the order of the lease (without
        tasks dropped from it). trained + masked must be the tokens that the lease holds."""
    def drop(self, ordinal: int, attempt: int, reason: str, sampled_tokens: int | None = None) -> bool:
        """The unfinished task ends without training; also out of a lease. False: late, nothing changed.

        `sampled_tokens` were sampled for it; once it is ready they are known and None (or the same number) will do."""
    def requeue(self, ordinal: int, reason: str = "requeued", sampled_tokens: int | None = None) -> None:
        """The unfinished task is to be issued again with attempt + 1; its tokens count as dropped under `reason`."""
    def waste(self, reason: str, sampled_tokens: int) -> None:
        """Counts tokens sampled for no open task (late answers) as sampled and dropped under `reason`."""
    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Takes back every step after `step`, newest first, and returns them like `ledger_history`: their tasks are
        requeued, their tokens count as dropped under "rewound". Needs a path; the ledger must not be behind `step`."""
    def begin_anew(self, ordinal: int) -> None:
        """The rollout of a task that is not ready begins anew: the turns kept of it so far count no longer."""
    def answered(self, ordinal: int, attempt: int) -> bool:
        """Notes that the end of an attempt was reported. False: it was before. The last 16,384 are remembered."""
    def trajectory(self, ordinal: int, frames: Sequence[BytesLike]) -> None:
        """Keeps the trajectory of an unfinished task as long as it is ready or leased. The frames are written at once,
        without a copy, and count from the next `flush` on. Without a path nothing is kept."""
    def turn(self, ordinal: int, part: int, frames: Sequence[BytesLike]) -> None:
        """Keeps turn number `part` of a rollout until its task is ready or finished or it begins anew."""
    def frames(self, ordinal: int) -> list[tuple[bytes, ...]]:
        """What is kept of an unfinished task: its trajectory if it is ready or leased, else its turns in order up to
        the first that is missing."""
    @property
    def damage(self) -> list[str]:
        """Frames that were needed and damaged when the journal was opened, by file and byte."""
    @property
    def note(self) -> bytes:
        """Bytes that are kept beside the ledger, in the same transactions."""
    @note.setter
    def note(self, value: bytes) -> None: ...
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
    @property
    def n_bytes(self) -> int:
        """Bytes of the journal."""
    @property
    def due(self) -> bool:
        """Whether anything waits for `flush`."""
    @property
    def full(self) -> bool:
        """Whether the newest segment is so large that `roll` should be called."""
    def roll(self, upto_step: int) -> None:
        """Begins a new segment and deletes those in which nothing is needed any more. Steps up to `upto_step` are no
        longer listed one by one from then on and cannot be taken back. Raises `LedgerError` when the new one cannot be
        written; the old one then goes on."""
    def flush(self) -> None:
        """Commits what was recorded: it outlives this process, but not a power cut. After an error nothing can be
        recorded before `mend`."""
    def sync(self) -> None:
        """Commits what was recorded and waits for the disk, without the GIL."""
    @property
    def broken(self) -> bool:
        """Whether the journal has failed and `mend` may be tried."""
    def mend(self) -> None:
        """Makes a broken journal usable again, so that the call that failed can be made once more: what a failed write
        has left is cut off, what could not be synced is written anew. Raises `LedgerError` while the disk fails."""
    def close(self) -> None:
        """Syncs and closes; every later call but close raises `ClosedError`."""
    def __enter__(self) -> Ledger: ...
    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None: ...

def ledger_history(
    path: str | PathLike[str], after_step: int = 0
) -> tuple[list[tuple[int, int]], list[dict[str, Any]]]:
    """What a ledger's journal says was trained and not taken back; reads only, a torn tail is left out.

    Returns the ordinals trained up to `after_step` as runs (first, one past the last), and each later step:
    `{step, lease, tasks: [(ordinal, attempt), ...], trained_tokens, masked_tokens}`. Raises `LedgerError`.
    """
