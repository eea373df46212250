r"""Advantages and critic targets of a ragged batch: generalised advantage estimation over action tokens.

The compact list of action tokens k = 1..L of a trajectory is all there is; an observation, however long, lies between
two steps (SAO, arXiv 2607.07508, Eq. 4-5):

    delta_k = r_k + gamma * V_(k+1) - V_k
    A_k     = delta_k + gamma * lambda * A_(k+1)
    target_k = A_k^(lambda_critic) + V_k

V_k is the critic's value of the prefix *before* token k. After the last step V is 0, or the bootstrap value of a
truncated trajectory. `lambda_policy=None` is length-adaptive: lambda = 1 - 1 / (alpha * L), clamped to [0, 1], with
the L action tokens of *all* segments of the trajectory.

Across context compactions (CompactionRL, arXiv 2607.05378), `cross_segment`:

* `paper` - every segment is an episode of its own that ends with the trajectory's reward and bootstrap; its advantages
  are then multiplied by (gamma * lambda)^N, N action tokens in later segments (Eq. 13-14). Critic targets stay local.
* `chained` - the segments form one chain: the reward comes once, at the last action token of the trajectory, and the
  first action token of a segment follows the last of the one before. Targets are those of the chain.
* `none` - as `paper` without the factor.

Where segments are not in order in time (an agent's conversations interleave), `after` says how many action tokens were
sampled after each one, which is N, and which segment goes on behind it: `chained` follows these, and the reward comes
at the end of each chain.

Turn rewards are added at their own action tokens and act like any reward from there backwards: within their segment for
`paper` (sharing its factor) and `none`, along the chain for `chained`.
"""

import sys
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from sao import _core

Array = TypeVar("Array")


def advantages(
    values: Array,
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
    after: tuple[Any, Any] | None = None,
) -> tuple[Array, Array, npt.NDArray[np.float64]]:
    """Advantages and critic targets of every action token; see the module for the equations.

    The n tokens of all segments of all trajectories lie one after another. Arguments are NumPy arrays, sequences or
    torch tensors on the CPU; floats are taken as float32, offsets as int64.

    Args:
        values: float [n], critic values; read at action tokens only, so anything may stand elsewhere.
        action_mask: bool or integer [n], true where the policy sampled the token.
        segment_offsets: integer [s + 1], first token of each segment, then n.
        trajectory_offsets: integer [t + 1], first segment of each trajectory, then s.
        rewards: float [t], outcome of each trajectory.
        gamma: discount per action token, in (0, 1].
        lambda_policy: in [0, 1], or None for the length-adaptive one.
        lambda_alpha: alpha of the adaptive lambda, above 0.
        lambda_critic: lambda of the targets, in [0, 1].
        cross_segment: credit across segments, see above.
        skip_observations: False makes every position between the first and the last action token of a segment a step
            (naive GAE, for ablations); the values there are read then. L and N still count action tokens.
        bootstrap: float [t], value after the last action token of each trajectory (0 unless truncated), or None.
        turn_rewards: (integer [m] indices into the n tokens, float [m] rewards), each at an action token.
        after: (integer [s] action tokens sampled after the last one of each segment, integer [s] the segment that goes
            on behind it, later in the same trajectory, or -1): segments that are not in order, as an agent's. None: N
            counts all later segments, and each goes on in the next one.

    Returns:
        advantages float32 [n], targets float32 [n] (both 0 where the mask is false; torch tensors if `values` is one),
        lambdas float64 [t]: the policy lambda of each trajectory, NaN for one without any action token, which takes no
        part; `numpy.isnan(lambdas).sum()` counts those.

    Raises:
        ValidationError: names the argument, index and value that is wrong, non-finite values at a step included.
        TypeError: an argument has a dtype, shape or device that cannot be taken.
    """
    as_torch = type(values).__module__.partition(".")[0] == "torch"
    out, targets, lambdas = _core.advantages(
        _array("values", values, np.float32),
        _array("action_mask", action_mask, np.bool_),
        _array("segment_offsets", segment_offsets, np.int64),
        _array("trajectory_offsets", trajectory_offsets, np.int64),
        _array("rewards", rewards, np.float32),
        gamma=gamma,
        lambda_policy=lambda_policy,
        lambda_alpha=lambda_alpha,
        lambda_critic=lambda_critic,
        cross_segment=cross_segment,
        skip_observations=skip_observations,
        bootstrap=None if bootstrap is None else _array("bootstrap", bootstrap, np.float32),
        turn_rewards=turn_rewards
        and (
            _array("turn_rewards[0]", turn_rewards[0], np.int64),
            _array("turn_rewards[1]", turn_rewards[1], np.float32),
        ),
        after=after and (_array("after[0]", after[0], np.int64), _array("after[1]", after[1], np.int64)),
    )
    if as_torch:
        torch = sys.modules["torch"]
        return torch.from_numpy(out), torch.from_numpy(targets), lambdas
    return out, targets, lambdas  # type: ignore[return-value]


def whiten(advantages: npt.NDArray[np.float32], action_mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """Whitened advantages, off by default: not part of SAO, and it re-centres the credit that discounting has set.

        A'_t = (A_t - mean) / (std + 1e-8)      mean and population std over all action tokens of the batch

    advantages float32[n] of a whole batch, action_mask bool[n] -> float32[n], 0 at non-actions.

    Statistics in float64 over the mask only: each sampled token counts once, however a rollout is cut into segments.
    Fewer than two action tokens are returned unchanged.
    """
    chosen = advantages[action_mask].astype(np.float64)
    out = np.zeros_like(advantages)
    out[action_mask] = chosen if chosen.size < 2 else (chosen - chosen.mean()) / (chosen.std() + 1e-8)
    return out


# Kinds of dtypes that may be taken as each type.
_KINDS: dict[type[np.generic], str] = {np.bool_: "biu", np.int64: "iu", np.float32: "fiu"}


def _array(name: str, value: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """A 1-D array; a tensor on another device is refused rather than copied behind the caller's back."""
    if type(value).__module__.partition(".")[0] == "torch":
        if value.device.type != "cpu":
            raise TypeError(f"{name}: expected a tensor on the CPU, got one on {value.device}")
        value = value.detach()
        value = (value.float() if value.is_floating_point() else value).numpy()
    array = np.asarray(value)
    if array.ndim != 1:
        raise TypeError(f"{name}: expected 1 dimension, got shape {array.shape}")
    if array.dtype.kind not in _KINDS[dtype] and array.size:
        raise TypeError(f"{name}: {array.dtype} cannot be taken as {np.dtype(dtype)}")
    return np.ascontiguousarray(array, dtype)
