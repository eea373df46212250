"""What `sao.advantages` takes and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sao.algorithms.advantage import advantages
from sao.errors import ValidationError


def arguments(**changed: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "values": np.zeros(4, np.float32),
        "action_mask": np.array([0, 1, 0, 1], bool),
        "segment_offsets": np.array([0, 2, 4]),
        "trajectory_offsets": np.array([0, 2]),
        "rewards": np.array([1], np.float32),
    }
    return base | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"values": np.zeros(3, np.float32)}, "action_mask: 4 entries, but values has 3"),
        ({"values": np.array([0, np.nan, 0, 0], np.float32)}, r"values\[1\]: NaN at a token of trajectory 0"),
        ({"values": np.array([0, 0, 0, np.inf], np.float32)}, r"values\[3\]: inf"),
        (
            {"segment_offsets": np.array([0, 3, 2, 4]), "trajectory_offsets": [0, 3]},
            r"segment_offsets\[2\]: 2 is below",
        ),
        (
            {"segment_offsets": np.array([0, 2, 5])},
            "segment_offsets: must start with 0 and end with 4, got 0 and 5$",
        ),
        (
            {"segment_offsets": np.array([], np.int64)},
            "segment_offsets: must start with 0 and end with 4, is empty$",
        ),
        ({"trajectory_offsets": np.array([0, 3])}, "trajectory_offsets: must start with 0 and end with 2"),
        ({"trajectory_offsets": np.array([0, -1, 2]), "rewards": [0, 0]}, r"trajectory_offsets\[1\]: -1 is below"),
        ({"rewards": np.array([1, 2], np.float32)}, "rewards: 2 entries for 1 trajectories"),
        ({"rewards": np.array([np.nan], np.float32)}, r"rewards\[0\]: NaN"),
        ({"bootstrap": np.array([np.inf], np.float32)}, r"bootstrap\[0\]: inf"),
        ({"gamma": 0.0}, "gamma: 0 is not"),
        ({"gamma": math.nan}, "gamma: NaN is not"),
        ({"gamma": 1.01}, "gamma: 1.01 is not"),
        ({"lambda_policy": 1.5}, "lambda_policy: 1.5 is not"),
        ({"lambda_policy": math.nan}, "lambda_policy: NaN is not"),
        ({"lambda_alpha": 0.0}, "lambda_alpha: 0 is not"),
        ({"lambda_critic": -0.1}, "lambda_critic: -0.1 is not"),
        ({"cross_segment": "chain"}, 'cross_segment: "chain" is not'),
        ({"turn_rewards": ([0], [1.0])}, r"turn_rewards\[0\]: position 0 is not an action token"),
        ({"turn_rewards": ([-1], [1.0])}, r"turn_rewards\[0\]: position -1 is not"),
        ({"turn_rewards": ([4], [1.0])}, r"turn_rewards\[0\]: position 4 is not"),
        ({"turn_rewards": ([1, 3], [1.0])}, "turn_rewards: 2 positions but 1 rewards"),
        ({"turn_rewards": ([1], [math.nan])}, r"turn_rewards\[0\]: NaN"),
    ],
)
def test_wrong_input_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        advantages(**arguments(**changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"values": np.zeros((2, 2), np.float32)},
        {"values": np.float32(1.0)},
        {"values": ["a", "b", "c", "d"]},
        {"action_mask": np.zeros(4, np.float32)},
        {"segment_offsets": np.array([0.0, 2.0, 4.0])},
    ],
)
def test_wrong_kinds_of_array_are_type_errors(changed: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        advantages(**arguments(**changed))


def test_any_memory_layout_gives_the_same_numbers() -> None:
    rng = np.random.default_rng(0)
    values, mask = rng.standard_normal(50).astype(np.float32), rng.random(50) < 0.5
    rest = ([0, 20, 50], [0, 1, 2], [1.0, -1.0])
    want, _, _ = advantages(values, mask, *rest)
    wide = np.repeat(values, 2)
    frozen = values.copy()
    frozen.flags.writeable = False
    for same in (wide[::2], values[::-1].copy()[::-1], values.astype(">f4"), values.astype(np.float64), frozen):
        np.testing.assert_array_equal(advantages(same, mask, *rest)[0], want)
    for same in (mask.astype(np.uint8), mask.astype(np.int64) * 256, mask.view(np.uint8) * 7, mask[::-1].copy()[::-1]):
        np.testing.assert_array_equal(advantages(values, same, *rest)[0], want)


def test_torch_tensors_in_torch_tensors_out() -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([0.5, 0.6, 9.0, -9.0, 0.4, 0.7], requires_grad=True)
    mask = torch.tensor([1, 1, 0, 0, 1, 1]).bool()
    ends = torch.tensor([0, 6]), torch.tensor([0, 1]), torch.tensor([1.0])
    adv, tgt, _ = advantages(values, mask, *ends, lambda_policy=0.5)
    assert adv.dtype == tgt.dtype == torch.float32
    assert not adv.requires_grad
    np.testing.assert_allclose(adv, [0.1125, 0.025, 0, 0, 0.45, 0.3], atol=1e-6)
    half, _, _ = advantages(values.to(torch.bfloat16), mask, *ends, lambda_policy=0.5)
    np.testing.assert_allclose(half, adv, atol=0.02)
    with pytest.raises(TypeError, match="values: expected a tensor on the CPU, got one on meta"):
        advantages(values.to("meta"), mask, *ends)
