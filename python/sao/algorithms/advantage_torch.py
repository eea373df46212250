r"""`sao.advantages` for tensors that lie on an accelerator: the same steps, chains and numbers, without leaving it.

Action tokens are compacted first, so that observations do not exist, as for the kernel. A_k = delta_k + d_k * A_(k+1)
with d_k = 0 at the end of a chain is then a scan, which needs no loop over time: pairs (d, A) combine associatively,

    (d_1, A_1) o (d_2, A_2) = (d_1 d_2, A_1 + d_1 A_2),

either by doubling (log2 of the longest chain passes of plain torch) or, where Triton is there and the tensors are on
its device, in one pass with a program a chain. Float64 throughout, as in the kernel; results are float32.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch

from sao.errors import ValidationError

Scan = Literal["auto", "doubling", "triton"]


def advantages_torch(
    values: torch.Tensor,
    action_mask: Any,
    segment_offsets: Any,
    trajectory_offsets: Any,
    rewards: Any,
    *,
    gamma: float = 1.0,
    lambda_policy: float | None = None,
    lambda_alpha: float = 1.5,
    lambda_critic: float = 1.0,
    cross_segment: Literal["paper", "chained", "none"] = "paper",
    skip_observations: bool = True,
    bootstrap: Any = None,
    turn_rewards: tuple[Any, Any] | None = None,
    scan: Scan = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `sao.advantages`, on the device of `values`; the other arguments may be anywhere.

    Returns advantages float32 [n], targets float32 [n] and lambdas float64 [t], all on that device. `scan`: how, see
    above; `auto` is `triton` on CUDA where it can be imported. Offsets, rewards and positions are checked on the host.
    Raises `ValidationError` as the kernel does.
    """
    device = values.device
    n = _shape("values", values)
    mask = torch.as_tensor(action_mask).to(device)
    if _shape("action_mask", mask) != n:
        raise ValidationError(f"action_mask: {len(mask)} entries, but values has {n}")
    mask = mask != 0
    segments, trajectories = _offsets("segment_offsets", segment_offsets, n), _host(trajectory_offsets, np.int64)
    trajectories = _offsets("trajectory_offsets", trajectories, len(segments) - 1)
    count = len(trajectories) - 1
    outcome = _finite("rewards", rewards, count)
    after = np.zeros(count) if bootstrap is None else _finite("bootstrap", bootstrap, count)
    _check(gamma, lambda_policy, lambda_alpha, lambda_critic, cross_segment)

    put = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
    segment_of_token = torch.repeat_interleave(put(np.diff(segments)))
    trajectory_of_segment = put(np.repeat(np.arange(count), np.diff(trajectories)))
    steps, of_segment = _steps(mask, segment_of_token, skip_observations)
    of_trajectory = trajectory_of_segment[of_segment]
    chain = of_trajectory if cross_segment == "chained" else of_segment
    ends = torch.ones(len(steps), dtype=torch.bool, device=device)
    ends[:-1] = chain[1:] != chain[:-1]

    value = values.detach()[steps].double()
    if not bool(torch.isfinite(value).all()):
        at = int(steps[~torch.isfinite(value)][0])
        which = int(of_trajectory[~torch.isfinite(value)][0])
        raise ValidationError(f"values[{at}]: {float(values[at])} at a token of trajectory {which} is not finite")
    following = torch.where(ends, put(after)[of_trajectory], torch.cat([value[1:], value[:1]]))
    reward = torch.where(ends, put(outcome)[of_trajectory], 0.0)
    if turn_rewards is not None:
        reward = reward + _turns(turn_rewards, mask, n).to(device)[steps]
    delta = reward + gamma * following - value

    actions = torch.zeros(len(segments) - 1, dtype=torch.float64, device=device)
    actions.index_add_(0, of_segment, mask[steps].double())
    length = torch.zeros(count, dtype=torch.float64, device=device).index_add_(0, trajectory_of_segment, actions)
    if lambda_policy is None:
        lambdas = (1.0 - 1.0 / (lambda_alpha * length)).clamp(0.0, 1.0)
    else:
        lambdas = torch.full_like(length, lambda_policy)
    lambdas = torch.where(length > 0, lambdas, math.nan)
    decays = torch.stack([gamma * lambdas[of_trajectory], torch.full_like(delta, gamma * lambda_critic)])
    policy, critic = _scan(delta, decays, ends, scan)
    if cross_segment == "paper":
        # Action tokens in later segments of the same trajectory.
        ahead = actions.flip(0).cumsum(0).flip(0)
        ahead = torch.cat([ahead, ahead.new_zeros(1)])
        later = ahead[1:][of_segment] - ahead[put(trajectories[1:])][of_trajectory]
        policy = policy * (gamma * lambdas[of_trajectory]) ** later
    keep = mask[steps]
    outputs = []
    for result in (policy, critic + value):
        out = torch.zeros(n, dtype=torch.float32, device=device)
        outputs.append(out.index_copy_(0, steps[keep], result[keep].float()))
    return outputs[0], outputs[1], lambdas


def _steps(mask: torch.Tensor, segment: torch.Tensor, skip: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that are steps, in order, and their segments."""
    steps = mask.nonzero().squeeze(1)
    if not skip:  # everything from a segment's first to its last action token
        owner = segment[steps]
        number = int(segment[-1]) + 1 if len(segment) else 0
        first = torch.full((number,), len(mask), device=mask.device).scatter_reduce(0, owner, steps, "amin")
        last = torch.full((number,), -1, device=mask.device).scatter_reduce(0, owner, steps, "amax")
        token = torch.arange(len(mask), device=mask.device)
        steps = ((token >= first[segment]) & (token <= last[segment])).nonzero().squeeze(1)
    return steps, segment[steps]


def _scan(delta: torch.Tensor, decays: torch.Tensor, ends: torch.Tensor, scan: Scan) -> torch.Tensor:
    """A of both decays, float64 [2, steps]."""
    if not len(delta):
        return decays
    last = ends.nonzero().squeeze(1)
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    if scan == "triton" or (scan == "auto" and delta.device.type == "cuda" and _has_triton()):
        from sao.algorithms.advantage_triton import reverse_scan

        return reverse_scan(delta, decays[:, first].contiguous(), first, last + 1)
    decay = torch.where(ends, 0.0, decays)
    total = delta.expand(2, -1).clone()
    longest, reach = int((last - first).max()) + 1, 1
    while reach < longest:
        total[:, :-reach] += decay[:, :-reach] * total[:, reach:].clone()
        decay[:, :-reach] *= decay[:, reach:].clone()
        decay[:, -reach:] = 0.0
        reach *= 2
    return total


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def _turns(turn_rewards: tuple[Any, Any], mask: torch.Tensor, n: int) -> torch.Tensor:
    positions, extra = _host(turn_rewards[0], np.int64), _host(turn_rewards[1], np.float64)
    if len(positions) != len(extra):
        raise ValidationError(f"turn_rewards: {len(positions)} positions but {len(extra)} rewards")
    flags = mask.cpu().numpy()
    for index, (position, reward) in enumerate(zip(positions.tolist(), extra.tolist(), strict=True)):
        if not (0 <= position < n and flags[position]):
            raise ValidationError(f"turn_rewards[{index}]: position {position} is not an action token")
        if not math.isfinite(reward):
            raise ValidationError(f"turn_rewards[{index}]: {reward} is not finite")
    dense = np.zeros(n)
    np.add.at(dense, positions, extra)
    return torch.from_numpy(dense)


def _host(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.ndim != 1 or (np.issubdtype(dtype, np.integer) and array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"expected 1 dimension of {np.dtype(dtype)}, got shape {array.shape} of {array.dtype}")
    return array.astype(dtype)


def _shape(name: str, tensor: torch.Tensor) -> int:
    if tensor.ndim != 1:
        raise TypeError(f"{name}: expected 1 dimension, got shape {tuple(tensor.shape)}")
    return len(tensor)


def _offsets(name: str, value: Any, end: int) -> np.ndarray[Any, Any]:
    offsets = _host(value, np.int64)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != end:
        raise ValidationError(f"{name}: must start with 0 and end with {end}, got {offsets[:1]} and {offsets[-1:]}")
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls):
        at = int(falls[0]) + 1
        raise ValidationError(f"{name}[{at}]: {offsets[at]} is below its predecessor {offsets[at - 1]}")
    return offsets


def _finite(name: str, value: Any, count: int) -> np.ndarray[Any, Any]:
    array = _host(value, np.float64)
    if len(array) != count:
        raise ValidationError(f"{name}: {len(array)} entries for {count} trajectories")
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise ValidationError(f"{name}[{bad[0]}]: {array[bad[0]]} is not finite")
    return array


def _check(gamma: float, lambda_policy: float | None, alpha: float, lambda_critic: float, cross_segment: str) -> None:
    if not 0.0 < gamma <= 1.0:
        raise ValidationError(f"gamma: {gamma} is not in (0, 1]")
    for name, value in (("lambda_policy", lambda_policy), ("lambda_critic", lambda_critic)):
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValidationError(f"{name}: {value} is not in [0, 1]")
    if lambda_policy is None and not (math.isfinite(alpha) and alpha > 0):
        raise ValidationError(f"lambda_alpha: {alpha} is not a positive number")
    if cross_segment not in ("paper", "chained", "none"):
        raise ValidationError(f"cross_segment: {cross_segment!r} is not paper, chained or none")
