"""The rollout, defined once for everybody: `Segment`, `SegmentBuilder`, `Trajectory`, and their bytes.

Token ids from the engine are the only truth: nothing here decodes text or repairs an array. The rules are checked by
the native core, the same ones when an object is built and when bytes from outside are decoded.
`docs/reference/wire.md` describes the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sao import _core
from sao.errors import ValidationError, WireError

SegmentKind = Literal["execution", "summary"]
TerminationKind = Literal["finished", "truncated", "failed"]
Metadata = str | int | float | bool | None


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One physical token sequence of a rollout; n tokens, n >= 1.

    `token_ids` int32[n]: ids >= 0. `action_mask` bool[n]: True where the policy sampled the token, never at position 0.
    `logprobs` float32[n]: natural-log probability under the distribution that was sampled from (temperature applied),
    finite and <= 0 where the mask is True, NaN where it is False; bits are kept. A value above 0, however small, is an
    error of the engine and is not clamped. `version_spans` int64[k, 3]: rows (start, stop, policy version), sorted,
    disjoint, versions non-decreasing; every sampled token lies in one span and every span holds a sampled token.

    Arrays are read-only; a writable argument is copied. Other strides and byte orders are converted, other dtypes that
    could change a number raise `ValidationError`, as does every broken rule, naming field, index and value.
    """

    kind: SegmentKind
    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    version_spans: NDArray[np.int64]

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "token_ids", _integers(self.token_ids, np.int32, "token_ids"))
        put(self, "action_mask", _exact(self.action_mask, np.bool_, "action_mask"))
        put(self, "logprobs", _exact(self.logprobs, np.float32, "logprobs"))
        put(self, "version_spans", _spans(self.version_spans))
        _core.check_segment(self)

    @property
    def n_tokens(self) -> int:
        """Number of tokens, context included."""
        return len(self.token_ids)

    @property
    def n_actions(self) -> int:
        """Number of sampled tokens."""
        return int(np.count_nonzero(self.action_mask))


class SegmentBuilder:
    """Builds a segment turn by turn; the arrays grow together and in no other way.

    A failed append raises `ValidationError` and leaves the builder as it was.
    """

    def __init__(self, kind: SegmentKind = "execution") -> None:
        self.kind = kind
        self._ids: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.bool_]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._spans: list[tuple[int, int, int]] = []
        self.n_tokens = 0

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """All tokens so far, int32[n] (a copy)."""
        return np.concatenate(self._ids) if self._ids else np.zeros(0, np.int32)

    def append_context(self, ids: ArrayLike) -> None:
        """Adds tokens that the policy was given: prompt, observation, template glue."""
        new = _integers(ids, np.int32, "ids")
        self._extend(new, np.zeros(len(new), np.bool_), np.full(len(new), np.nan, np.float32))

    def append_sampled(self, ids: ArrayLike, logprobs: ArrayLike, version_spans: ArrayLike) -> None:
        """Adds tokens that the policy sampled: ids and log-probs of equal length n and spans (start, stop, version).

        The spans count from the first of these ids and cover 0..n without a gap.
        """
        new, logs = _integers(ids, np.int32, "ids"), _exact(logprobs, np.float32, "logprobs")
        if len(new) != len(logs):
            raise ValidationError(f"ids and logprobs have lengths {len(new)} and {len(logs)}; they must be equal")
        spans, end = [(int(a), int(b), int(v)) for a, b, v in _spans(version_spans)], 0
        for index, (start, stop, _) in enumerate(spans):
            if start != end or stop <= start:
                raise ValidationError(f"version_spans[{index}]: {spans[index]} does not start at {end} or is empty")
            end = stop
        if end != len(new):
            raise ValidationError(f"version_spans: cover 0..{end} of {len(new)} sampled tokens")
        if len(new) and not self.n_tokens:
            raise ValidationError("append_sampled: no context yet; a sampled token has something before it")
        shift = self.n_tokens
        for start, stop, version in spans:
            if self._spans and self._spans[-1][1:] == (start + shift, version):
                self._spans[-1] = (self._spans[-1][0], stop + shift, version)
            else:
                self._spans.append((start + shift, stop + shift, version))
        self._extend(new, np.ones(len(new), np.bool_), logs)

    def build(self) -> Segment:
        """The segment; every rule is checked here."""
        masks = np.concatenate(self._masks) if self._masks else np.zeros(0, np.bool_)
        logprobs = np.concatenate(self._logprobs) if self._logprobs else np.zeros(0, np.float32)
        return Segment(self.kind, self.token_ids, masks, logprobs, np.array(self._spans, np.int64).reshape(-1, 3))

    def _extend(self, ids: NDArray[np.int32], mask: NDArray[np.bool_], logprobs: NDArray[np.float32]) -> None:
        self._ids.append(ids)
        self._masks.append(mask)
        self._logprobs.append(logprobs)
        self.n_tokens += len(ids)


@dataclass(frozen=True, slots=True)
class Termination:
    """How a rollout ended. `reason` is a code, empty exactly when `kind` is "finished"."""

    kind: TerminationKind
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One logical rollout: segments in order and what came of them.

    `reward` is finite, or None exactly when the rollout failed: a failure is never a number. `temperature` is that of
    every sampled token (0: greedy). `turn_rewards`: (segment index, token position, reward) on sampled tokens, in
    order, in addition to `reward`. `after`: for each segment the action tokens that were sampled after its last one,
    and the segment that goes on behind it (-1: none); empty: all later segments, and the next one. `fingerprints`:
    policy version -> fingerprint of the weights that sampled. `timings_s`: durations in seconds. `sidecars`: arrays
    that belong to it and are large (routed experts, images), by name; read-only, a writable argument is copied; they
    travel as frames of their own. At least one token was sampled
    unless the rollout failed.

    Raises `ValidationError` naming field, index and value.
    """

    id: bytes
    task_ordinal: int
    attempt: int
    env: str
    segments: tuple[Segment, ...]
    reward: float | None
    termination: Termination
    temperature: float
    turn_rewards: tuple[tuple[int, int, float], ...] = ()
    after: tuple[tuple[int, int], ...] = ()
    fingerprints: dict[int, str] = field(default_factory=dict)
    timings_s: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Metadata] = field(default_factory=dict)
    sidecars: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("segments", "turn_rewards", "after"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                if not isinstance(value, list):
                    raise ValidationError(f"{name}: {type(value).__name__}, expected a tuple")
                object.__setattr__(self, name, tuple(value))
        for index, segment in enumerate(self.segments):
            if not isinstance(segment, Segment):
                raise ValidationError(f"segments[{index}]: {type(segment).__name__}, expected Segment")
        if not isinstance(self.termination, Termination):
            raise ValidationError(f"termination: {self.termination!r}, expected Termination")
        if self.sidecars:
            arrays = {name: _asarray(value, f"sidecars[{name!r}]") for name, value in self.sidecars.items()}
            frozen = {name: _freeze(array, array.dtype.newbyteorder("=")) for name, array in arrays.items()}
            object.__setattr__(self, "sidecars", frozen)
        _core.check_trajectory(self, self.n_actions)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all segments, context included."""
        return sum(segment.n_tokens for segment in self.segments)

    @property
    def n_actions(self) -> int:
        """Number of sampled tokens of all segments."""
        return sum(segment.n_actions for segment in self.segments)

    @property
    def min_version(self) -> int:
        """Oldest policy version over the sampled tokens. Raises `ValidationError` when nothing was sampled."""
        return min(self._versions())

    @property
    def max_version(self) -> int:
        """Newest policy version over the sampled tokens. Raises `ValidationError` when nothing was sampled."""
        return max(self._versions())

    def _versions(self) -> list[int]:
        versions = [int(v) for segment in self.segments for v in segment.version_spans[:, 2]]
        if not versions:
            raise ValidationError("segments: no sampled token, so no policy version")
        return versions


def encode(trajectory: Trajectory) -> tuple[bytes, bytes]:
    """(header, payload): a msgpack map and one blob that holds all arrays. 9 bytes a token plus some hundred.

    The header names sidecars, with their checksums; their bytes are in neither, see `encode_frames`. Raises
    `ValidationError` when a rule is broken (an array was changed behind the object's back) or the header, which holds
    metadata and version spans, would exceed 1 MiB.
    """
    return _core.encode(trajectory)


def encode_frames(trajectory: Trajectory) -> tuple[bytes | memoryview, ...]:
    """Header, payload and one frame for each sidecar, which is not copied: what a socket sends as one message.

    Raises `ValidationError` as `encode`.
    """
    frames = encode(trajectory)  # what is no trajectory is refused here
    return (*frames, *(array.reshape(-1).view(np.uint8).data for array in trajectory.sidecars.values()))


def split_frames(frames: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Frames of trajectories that lie one after another, as (header, payload, sidecar, ...) for each.

    Raises `WireError` for a header that is none, and when frames are missing.
    """
    found, at = [], 0
    while at < len(frames):
        end = at + 2 + len(_core.summary(frames[at])["sidecars"])
        if end > len(frames):
            raise WireError(f"frames: {len(frames) - at} of the {end - at} of a trajectory, from frame {at} on")
        found.append(tuple(frames[at:end]))
        at = end
    return found


def decode(
    header: Any,
    payload: Any,
    *,
    sidecars: Sequence[Any] = (),
    max_bytes: int = _core.MAX_PAYLOAD_BYTES,
    max_segments: int = _core.MAX_SEGMENTS,
) -> Trajectory:
    """The trajectory in these two buffers (bytes, memoryview, zmq.Frame, ...) and the frames of its sidecars, if any.

    Its arrays are read-only views of `payload` and frames, nothing is copied. Checksums and every rule are checked
    before anything is built. The views keep the payload alive; a payload that can be written to must not be changed
    while they are in use. Raises `WireError` when the bytes are corrupt, cut short, longer than `max_bytes`, of another
    format or not a trajectory.
    """
    trajectory: Trajectory = _core.decode(header, payload, max_bytes, max_segments, [*sidecars] if sidecars else None)
    return trajectory


def _spans(value: ArrayLike) -> NDArray[np.int64]:
    array = _asarray(value, "version_spans")
    if array.size == 0:
        array = np.zeros((0, 3), np.int64)
    return _integers(array, np.int64, "version_spans", shape="(k, 3)")


def _integers(value: ArrayLike, dtype: Any, name: str, shape: str = "(n,)") -> NDArray[Any]:
    """`value` as a read-only contiguous array of an integer dtype; no number may change."""
    array = _asarray(value, name)
    if array.size == 0 and isinstance(value, Sequence):
        array = array.astype(dtype)
    _check_layout(array, name, shape, array.dtype.kind in "iu", dtype, " (or another integer dtype)")
    if array.dtype != dtype and array.size:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        bad = (array < low) | (array > high) if array.dtype.kind == "i" else array > high
        if bad.any():
            index = int(np.argmax(bad.reshape(-1)))
            raise ValidationError(f"{name}[{index}]: {array.reshape(-1)[index]} does not fit {np.dtype(dtype)}")
    return _freeze(array, dtype)


def _exact(value: ArrayLike, dtype: Any, name: str) -> NDArray[Any]:
    """`value` as a read-only contiguous array; an array must have the dtype, a list of numbers is rounded to it."""
    array = _asarray(value, name)
    if isinstance(value, Sequence) and (array.size == 0 or (array.dtype == np.float64 and dtype is np.float32)):
        with np.errstate(over="ignore"):  # becomes -inf, which is then refused with its index
            array = array.astype(dtype)
    right = array.dtype.newbyteorder("=") == np.dtype(dtype)
    _check_layout(array, name, "(n,)", right, dtype)
    return _freeze(array, dtype)


def _asarray(value: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except Exception as error:  # a tensor on another device raises its own kind
        raise ValidationError(f"{name}: {type(value).__name__} is not an array: {error}") from None


def _check_layout(array: NDArray[Any], name: str, shape: str, dtype_ok: bool, dtype: Any, more: str = "") -> None:
    shape_ok = array.ndim == 1 if shape == "(n,)" else array.ndim == 2 and array.shape[1] == 3
    if not (dtype_ok and shape_ok):
        raise ValidationError(
            f"{name}: dtype {array.dtype}, shape {array.shape}, strides {array.strides}; "
            f"expected {np.dtype(dtype)}{more}, shape {shape}"
        )


def _freeze(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    if array.flags.writeable or array.dtype != dtype or not (array.flags.c_contiguous and array.flags.aligned):
        array = np.array(array, dtype, order="C")
        array.flags.writeable = False
    return array
