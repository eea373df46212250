"""The torch and Triton forms of advantages against the kernel, on the CPU (Triton in its interpreter)."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sao.algorithms.advantage import advantages
from sao.algorithms.advantage_torch import advantages_torch
from sao.errors import ValidationError


def batch(lengths: list[list[int]], seed: int, density: float = 0.5) -> dict[str, Any]:
    """Trajectories of segments of these lengths; garbage where nothing was sampled."""
    rng = np.random.default_rng(seed)
    flat = [n for segments in lengths for n in segments]
    n = sum(flat)
    mask = rng.random(n) < density
    values = np.where(mask, rng.standard_normal(n), rng.choice([np.nan, np.inf, 1e30, 0.0], n)).astype(np.float32)
    return {
        "values": values,
        "action_mask": mask,
        "segment_offsets": np.cumsum([0, *flat]),
        "trajectory_offsets": np.cumsum([0, *[len(segments) for segments in lengths]]),
        "rewards": rng.standard_normal(len(lengths)).astype(np.float32),
    }


def close(data: dict[str, Any], scan: str = "doubling", **options: Any) -> None:
    want = advantages(**data, **options)
    tensor = torch.from_numpy(data["values"])
    got = advantages_torch(**(data | {"values": tensor}), scan=scan, **options)  # type: ignore[arg-type]
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(got[2].numpy(), want[2], rtol=1e-12)
    off = ~data["action_mask"]
    assert not got[0][off].any() and not got[1][off].any()


lengths = st.lists(st.lists(st.integers(0, 30), min_size=0, max_size=4), max_size=5)


@given(
    lengths,
    st.integers(0, 99),
    st.sampled_from(["paper", "chained", "none"]),
    st.sampled_from([None, 0.0, 0.9, 1.0]),
    st.booleans(),
)
def test_it_agrees_with_the_kernel(
    cuts: list[list[int]], seed: int, cross: str, lam: float | None, bootstrapped: bool
) -> None:
    data = batch(cuts, seed)
    rng = np.random.default_rng(seed + 1)
    bootstrap = rng.standard_normal(len(cuts)).astype(np.float32) if bootstrapped else None
    where = rng.permutation(np.flatnonzero(data["action_mask"]))[:5]
    turns = (where, rng.standard_normal(len(where)).astype(np.float32)) if len(where) and seed % 2 else None
    options = {"gamma": 0.97, "lambda_policy": lam, "lambda_critic": 0.9, "cross_segment": cross}
    close(data, bootstrap=bootstrap, turn_rewards=turns, **options)


@pytest.mark.parametrize("cross", ["paper", "chained", "none"])
def test_observations_can_be_steps_here_too(cross: str) -> None:
    data = batch([[12, 0, 9], [7], [5, 5]], 3)
    data["values"] = np.random.default_rng(0).standard_normal(len(data["values"])).astype(np.float32)
    close(data, skip_observations=False, gamma=0.9, lambda_policy=0.8, cross_segment=cross)


def test_long_chains_keep_their_precision() -> None:
    close(batch([[200_000], [5], [60_000, 1, 0, 3000]], 1, 0.3), gamma=0.9999, lambda_policy=None)


def test_garbage_changes_no_bit() -> None:
    data = batch([[50, 40], [30]], 5)
    first = advantages_torch(**(data | {"values": torch.from_numpy(data["values"])}))
    clean = np.where(data["action_mask"], data["values"], 0.0).astype(np.float32)
    second = advantages_torch(**(data | {"values": torch.from_numpy(clean)}))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_tensors_that_are_not_on_the_cpu_take_this_way() -> None:
    """Without an accelerator to test on the meta device shows which way is taken; the CPU's is the kernel's."""
    data = batch([[5]], 0)
    with pytest.raises(Exception, match="meta"):
        advantages(**(data | {"values": torch.from_numpy(data["values"]).to("meta")}))
    out, _, lambdas = advantages(**(data | {"values": torch.from_numpy(data["values"])}))
    assert isinstance(out, torch.Tensor) and isinstance(lambdas, np.ndarray)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 0.0}, "gamma: 0.0 is not in"),
        ({"lambda_policy": 1.5}, "lambda_policy: 1.5 is not in"),
        ({"lambda_critic": -0.1}, "lambda_critic: -0.1 is not in"),
        ({"lambda_alpha": 0.0}, "lambda_alpha: 0.0 is not a positive"),
        ({"cross_segment": "all"}, "cross_segment: 'all' is not"),
        ({"rewards": [np.nan]}, r"rewards\[0\]: nan is not finite"),
        ({"rewards": [1.0, 2.0]}, "rewards: 2 entries for 1 trajectories"),
        ({"bootstrap": [np.inf]}, r"bootstrap\[0\]: inf is not finite"),
        ({"segment_offsets": [0, 3]}, "segment_offsets: must start with 0 and end with 4"),
        ({"segment_offsets": [0, 5, 4], "trajectory_offsets": [0, 2]}, r"segment_offsets\[2\]: 4 is below"),
        ({"values": [0.0, 1.0, np.inf, 2.0]}, r"values\[2\]: inf at a token of trajectory 0"),
        ({"turn_rewards": ([0], [1.0])}, r"turn_rewards\[0\]: position 0 is not an action token"),
        ({"turn_rewards": ([1], [np.nan])}, r"turn_rewards\[0\]: nan is not finite"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    data: dict[str, Any] = {
        "values": [0.0, 1.0, 2.0, 3.0],
        "action_mask": [False, True, True, True],
        "segment_offsets": [0, 4],
        "trajectory_offsets": [0, 1],
        "rewards": [1.0],
    } | change
    with pytest.raises(ValidationError, match=message):
        advantages_torch(torch.tensor(data.pop("values")), **data)


INTERPRETED = """
import numpy as np, torch
from sao.algorithms.advantage_triton import reverse_scan
rng = np.random.default_rng(0)
for lengths in ([1, 3, 512, 513, 1500], [7] * 5):
    stop = torch.tensor(np.cumsum(lengths)); first = torch.cat([stop.new_zeros(1), stop[:-1]])
    delta = torch.from_numpy(rng.standard_normal(int(stop[-1])))
    decays = torch.from_numpy(rng.uniform(0.5, 1.0, (2, len(lengths))))
    got, want = reverse_scan(delta, decays, first, stop), torch.zeros(2, len(delta), dtype=torch.float64)
    for which in range(2):
        for chain, (a, b) in enumerate(zip(first.tolist(), stop.tolist())):
            carry = 0.0
            for k in range(b - 1, a - 1, -1):
                carry = float(delta[k]) + float(decays[which, chain]) * carry
                want[which, k] = carry
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
print("agrees")
"""


def test_the_triton_kernel_agrees_in_its_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "agrees\n", done.stderr[-2000:]


def test_offsets_may_be_tensors() -> None:
    data = batch([[5, 6], [7]], 0)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in data.items()}
    for a, b in itertools.pairwise([advantages_torch(**tensors)[0].numpy(), advantages(**data)[0]]):
        np.testing.assert_allclose(a, b, atol=1e-6)
