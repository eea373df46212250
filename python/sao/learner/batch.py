"""From trajectories to micro-batches: flat arrays that are the same on every rank, then this rank's packed rows.

A batch is laid out flat: all segments of all trajectories, one after another. Every token has one flat index; values,
advantages and targets are arrays over that index, so a micro-batch only needs to know which flat tokens it holds.

A row holds one segment or several, and a segment sees itself and nothing else: see `layout`. The log-prob of the token
at position k comes from the logits at k - 1, and its value is the critic's output at k - 1: the state before the token.
k - 1 is in the same segment, since a segment never begins with a sampled token.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sao import _core
from sao.errors import ValidationError
from sao.learner.layout import Layout
from sao.learner.plan import Plan
from sao.trajectory import Trajectory, encode_frames


@dataclass(frozen=True, eq=False)
class Batch:
    """All tokens of a batch, flat (N tokens, S segments, T trajectories); equal on every rank."""

    token_ids: NDArray[np.int32]  # [N]
    action_mask: NDArray[np.bool_]  # [N]
    logprobs: NDArray[np.float32]  # [N], of the rollout; NaN at non-actions
    lags: NDArray[np.int32]  # [N], policy versions behind; -1 at non-actions
    segment_offsets: NDArray[np.int64]  # [S + 1], into tokens
    trajectory_offsets: NDArray[np.int64]  # [T + 1], into segments
    ordinals: NDArray[np.int64]  # [T], of the tasks
    rewards: NDArray[np.float32]  # [T]
    temperatures: NDArray[np.float32]  # [T]
    truncated: NDArray[np.bool_]  # [T]
    timed_out: NDArray[np.bool_]  # [T], truncated by the wall clock
    summary: NDArray[np.bool_]  # [S], whether the segment is a summary
    sampled_tokens: int  # of all trajectories, also those of summaries that are left out
    turn_rewards: tuple[NDArray[np.int64], NDArray[np.float32]]  # flat positions and rewards
    later_actions: NDArray[np.int64]  # [S], action tokens sampled after the last one of each segment
    next_segment: NDArray[np.int64]  # [S], the segment that goes on behind it, -1: none

    @property
    def n_trajectories(self) -> int:
        return len(self.rewards)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per segment, int64[S]."""
        return np.diff(self.segment_offsets)

    @property
    def trajectory_of_token(self) -> NDArray[np.int64]:
        """Index of the trajectory of each token, int64[N]."""
        starts = self.segment_offsets[self.trajectory_offsets]
        return np.repeat(np.arange(self.n_trajectories), np.diff(starts))

    @property
    def segment_of_token(self) -> NDArray[np.int64]:
        """Index of the segment of each token, int64[N]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def ends(self) -> NDArray[np.int64]:
        """Flat index behind the segment of each trajectory in which a token was sampled last, int64[T]."""
        last = self.trajectory_offsets[1:] - 1
        final = np.flatnonzero(self.later_actions == 0)
        owners = np.repeat(np.arange(self.n_trajectories), np.diff(self.trajectory_offsets))[final]
        np.maximum.at(found := np.full_like(last, -1), owners, final)
        return self.segment_offsets[np.where(found < 0, last, found) + 1]

    def checksum(self) -> int:
        """CRC-32 over all arrays, to compare between ranks."""
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)] + [*self.turn_rewards]
        return reduce(lambda crc, array: zlib.crc32(np.ascontiguousarray(array).data, crc), arrays, 0)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """R rows of L positions, and the n action tokens in them, on the rank's device."""

    inputs: dict[str, Any]  # what the backbone takes, see `Layout.inputs`
    state_rows: torch.Tensor  # int64[n], row of the state before each action token
    state_columns: torch.Tensor  # int64[n], its position
    action_ids: torch.Tensor  # int64[n]
    rollout_logprobs: torch.Tensor  # float32[n]
    temperatures: torch.Tensor  # float32[n]
    lags: torch.Tensor  # int64[n]
    flat: torch.Tensor  # int64[n], flat index of each action token
    all_rows: torch.Tensor  # int64[m], row of each of the m tokens
    all_columns: torch.Tensor  # int64[m]
    all_flat: torch.Tensor  # int64[m]

    @property
    def token_ids(self) -> torch.Tensor:
        """int64[R, L]."""
        ids: torch.Tensor = self.inputs["input_ids"]
        return ids


def flatten(
    trajectories: Sequence[Trajectory], version: int, *, summaries: bool = True, vocabulary: int | None = None
) -> Batch:
    """Lays trajectories out flat; `version` is the policy version that the coming update will replace.

    Without `summaries` (an ablation) summary segments are left out of everything but `sampled_tokens`. `vocabulary`:
    token ids that the models know, 0 to below it.
    Raises `ValidationError` for an empty batch, a failed trajectory (it has no reward), one that stands twice, a token
    from a later version or beyond the vocabulary, a turn reward on a row that is left out, or when no row with action
    tokens is kept.
    """
    if not trajectories:
        raise ValidationError("batch: no trajectories")
    places: dict[bytes, int] = {}
    for number, t in enumerate(trajectories):
        if (first := places.setdefault(t.id, number)) != number:
            same = encode_frames(trajectories[first]) == encode_frames(t)
            what = "the same one" if same else "another one with this id"
            raise ValidationError(f"trajectory {t.id.hex()}: is at {first} of the batch, and {what} at {number}")
        if t.reward is None:
            raise ValidationError(f"trajectory {t.id.hex()}: failed ({t.termination.reason}): it cannot be trained on")
    kept = [  # trajectory and segment number of each row
        (number, index)
        for number, t in enumerate(trajectories)
        for index, segment in enumerate(t.segments)
        if summaries or segment.kind != "summary"
    ]
    segments = [trajectories[number].segments[index] for number, index in kept]
    if not any(segment.n_actions for segment in segments):
        raise ValidationError("batch: no action token that is trained: all are in summaries, which are left out")
    segment_offsets = _offsets([segment.n_tokens for segment in segments])
    token_ids = np.concatenate([segment.token_ids for segment in segments])
    if vocabulary is not None and token_ids.max() >= vocabulary:
        flat = int(np.argmax(token_ids >= vocabulary))
        row = int(np.searchsorted(segment_offsets, flat, "right")) - 1
        number, index = kept[row]
        raise ValidationError(
            f"trajectory {trajectories[number].id.hex()}: segments[{index}].token_ids[{flat - segment_offsets[row]}]:"
            f" {token_ids[flat]} is not in the model's vocabulary, 0 to {vocabulary - 1}"
        )
    later_actions, next_segment = _after(trajectories, kept)
    return Batch(
        token_ids=token_ids,
        action_mask=np.concatenate([segment.action_mask for segment in segments]).astype(np.bool_),
        logprobs=np.concatenate([segment.logprobs for segment in segments]),
        lags=np.concatenate([_core.token_lags(s.action_mask, s.version_spans, version) for s in segments]),
        segment_offsets=segment_offsets,
        trajectory_offsets=_offsets(np.bincount([number for number, _ in kept], minlength=len(trajectories))),
        ordinals=np.array([t.task_ordinal for t in trajectories], dtype=np.int64),
        rewards=np.array([t.reward for t in trajectories], dtype=np.float32),
        temperatures=np.array([t.temperature for t in trajectories], dtype=np.float32),
        truncated=np.array([t.termination.kind == "truncated" for t in trajectories], dtype=np.bool_),
        timed_out=np.array([t.termination.reason == "time_limit" for t in trajectories], dtype=np.bool_),
        turn_rewards=_turn_rewards(trajectories, dict(zip(kept, segment_offsets.tolist(), strict=False))),
        summary=np.array([segment.kind == "summary" for segment in segments], dtype=np.bool_),
        sampled_tokens=sum(t.n_actions for t in trajectories),
        later_actions=later_actions,
        next_segment=next_segment,
    )


def _after(
    trajectories: Sequence[Trajectory], kept: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`Trajectory.after` of the segments that are kept; those that are left out are no future, and are passed over."""
    places = {pair: place for place, pair in enumerate(kept)}
    later, following = [], []
    for number, t in enumerate(trajectories):
        counts = [segment.n_actions for segment in t.segments]
        n = len(counts)
        after = t.after or [(sum(counts[i + 1 :]), i + 1 if i + 1 < n else -1) for i in range(n)]
        for index in (index for index in range(n) if (number, index) in places):
            actions, behind = after[index]
            actions -= sum(counts[i] for i in range(index + 1, n) if (number, i) not in places)
            while behind != -1 and (number, behind) not in places:
                behind = after[behind][1]
            later.append(actions)
            following.append(-1 if behind == -1 else places[number, behind])
    return np.array(later, dtype=np.int64), np.array(following, dtype=np.int64)


def _offsets(counts: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _turn_rewards(
    trajectories: Sequence[Trajectory], starts: dict[tuple[int, int], int]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Flat positions and rewards; `starts`: the first token of each segment that is kept."""
    positions, rewards = [], []
    for number, t in enumerate(trajectories):
        for index, position, reward in t.turn_rewards:
            if (number, index) not in starts:
                raise ValidationError(
                    f"trajectory {t.id.hex()}: turn reward {reward} is on segment {index}, a summary: left out"
                )
            positions.append(starts[number, index] + position)
            rewards.append(reward)
    return np.array(positions, dtype=np.int64), np.array(rewards, dtype=np.float32)


def micro_batches(
    batch: Batch, plan: Plan, rank: int, device: torch.device, layout: Layout | None = None
) -> list[MicroBatch]:
    """Builds this rank's micro-batches for a layout of rows; all ranks get the same number.

    A rank without work in a micro-batch gets one row of padding and no action token: it takes part in every collective
    and adds zero to every sum.
    """
    layout, built = layout or Layout(), []
    temperatures = batch.temperatures[batch.trajectory_of_token]

    def put(array: NDArray[Any]) -> torch.Tensor:
        kind = torch.float32 if array.dtype.kind == "f" else torch.int64
        return torch.from_numpy(array).to(device=device, dtype=kind)

    for index in range(plan.n_micro_batches):
        segments = np.flatnonzero((plan.rank == rank) & (plan.micro_batch == index))
        starts, lengths = batch.segment_offsets[:-1][segments], batch.lengths[segments]
        ends = np.cumsum(lengths)
        if layout.one_row:
            rows, places = np.zeros_like(segments), ends - lengths
        else:
            rows = np.unique(plan.row[segments], return_inverse=True)[1]
            places = plan.position[segments].astype(np.int64)
        # Index arithmetic over all tokens of the group at once: which flat token goes to which row and column.
        within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        flat = np.repeat(starts, lengths) + within
        row, column = np.repeat(rows, lengths), np.repeat(places, lengths) + within
        action = batch.action_mask[flat]
        chosen = flat[action]
        part = MicroBatch(
            inputs=layout.inputs(batch.token_ids[flat], lengths, rows, places, int(batch.token_ids[0]), device),
            state_rows=put(row[action]),
            state_columns=put(column[action] - 1),
            action_ids=put(batch.token_ids[chosen]),
            rollout_logprobs=put(batch.logprobs[chosen]),
            temperatures=put(temperatures[chosen]),
            lags=put(batch.lags[chosen]),
            flat=put(chosen),
            all_rows=put(row),
            all_columns=put(column),
            all_flat=put(flat),
        )
        built.append(part)
    return built
