"""Value loss, explained variance and whitening: worked numbers and independence of everything masked."""

import math

import numpy as np
import pytest
import torch

from sao.algorithms.advantage import whiten
from sao.algorithms.value import explained_variance, value_loss, value_moments

F64 = torch.float64
MASK = torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.bool)


def test_squared_error_of_the_worked_example():
    values = torch.tensor([0.5, 0.6, math.nan, -9, 0.4, 0.7], dtype=F64, requires_grad=True)
    targets = torch.tensor([1, 1, 1e30, math.inf, 1, 1], dtype=F64)
    parts = value_loss(values=values, targets=targets, mask=MASK)
    loss = parts.total / parts.count
    loss.backward()
    assert float(loss) == pytest.approx(0.215, abs=1e-12)
    torch.testing.assert_close(values.grad, torch.tensor([-0.25, -0.2, 0, 0, -0.3, -0.15], dtype=F64))


def test_clipped_error_of_the_worked_example():
    old = torch.tensor([0.5, 0.6, math.nan, 9, 0.4, 0.7], dtype=F64)
    values = torch.tensor([0.8, 0.65, math.inf, -9, 0.1, 0.95], dtype=F64, requires_grad=True)
    targets = torch.tensor([1, 1, 1e30, math.nan, 1, 1], dtype=F64)
    parts = value_loss(values=values, old_values=old, targets=targets, clip=0.2, mask=MASK)
    parts.total.backward()
    assert float(parts.total) == pytest.approx(0.09 + 0.1225 + 0.81 + 0.01, abs=1e-12)
    assert (int(parts.count), int(parts.clipped)) == (4, 3)
    # First: the held value has the larger error and no gradient; third: V moved away and is pulled back.
    torch.testing.assert_close(values.grad, torch.tensor([0, -0.7, 0, 0, -1.8, 0], dtype=F64))


@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_changes_no_bit(garbage):
    def run(filler):
        values = torch.tensor([0.5, 0.6, filler, filler, 0.4, 0.7], requires_grad=True)
        targets = torch.tensor([1, 0, filler, filler, 1, 1])
        parts = value_loss(values=values, targets=targets, mask=MASK)
        parts.total.backward()
        return parts.total.detach(), values.grad, value_moments(values=values, returns=targets, mask=MASK)

    assert all(torch.equal(clean, dirty) for clean, dirty in zip(run(0.25), run(garbage), strict=True))


def test_explained_variance_of_the_worked_example_and_of_its_parts():
    returns, values = torch.tensor([1.0, 0, 1, 0]), torch.tensor([0.9, 0.2, 0.6, 0.1])
    assert explained_variance(value_moments(values=values, returns=returns)) == pytest.approx(0.79, abs=1e-6)
    parts = sum(
        value_moments(values=v, returns=r) for v, r in zip(values.split([1, 3]), returns.split([1, 3]), strict=True)
    )
    assert explained_variance(parts) == pytest.approx(0.79, abs=1e-6)


def test_explained_variance_without_variance_does_not_exist():
    same = torch.ones(5)
    assert explained_variance(value_moments(values=torch.rand(5), returns=same)) is None
    assert explained_variance(value_moments(values=same[:0], returns=same[:0])) is None


def test_whitening_counts_action_tokens_only():
    mask = np.array([True, False, True])
    for padding in (100.0, np.nan, np.inf):
        got = whiten(np.array([1.0, padding, 3.0], dtype=np.float32), mask)
        assert got.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


def test_whitening_of_one_token_is_the_token():
    assert whiten(np.array([3.0, 9.0], dtype=np.float32), np.array([True, False])).tolist() == [3.0, 0.0]
