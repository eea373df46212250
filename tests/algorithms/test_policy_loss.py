"""The policy losses: worked numbers, gradients, and that nothing outside the mask is ever read."""

import math

import pytest
import torch

from sao.algorithms.logprob import token_entropies, token_logprobs
from sao.algorithms.policy_loss import LossSums, dis_loss, dis_weights, log_ratio, positive_loss, ppo_loss, tis_loss

MATH = {"eps_low": 0.3, "eps_high": 5.0}
LOSSES = {
    "dis": (dis_loss, MATH),
    "ppo": (ppo_loss, {"eps_low": 0.2, "eps_high": 0.2}),
    "tis": (tis_loss, {"eps_low": 0.2, "eps_high": 1.0}),
}
F64 = torch.float64


def t(*numbers, dtype=F64):
    return torch.tensor(numbers, dtype=dtype)


def at_ratio(logprobs, ratios):
    """Rollout log-probs that make these ratios."""
    return logprobs.detach() - ratios.log()


def weights(ratios, low, high):
    ratios = torch.as_tensor(ratios, dtype=F64)
    return dis_weights(logprobs=ratios.log(), rollout_logprobs=torch.zeros_like(ratios), eps_low=low, eps_high=high)


def mean(parts: LossSums):
    return parts.total / parts.count


# -- worked numbers


def test_weights_and_loss_of_the_worked_example():
    ratios, advantages = t(1, 0.69, 0.71, 5.99, 6.01, 0.2), t(1, -1, 2, -0.5, 1, -3)
    logp = t(-0.1, -2, -1.5, -0.05, -0.7, -4).requires_grad_()
    torch.testing.assert_close(weights(ratios, 0.3, 5.0), t(1, 0, 0.71, 5.99, 0, 0))
    parts = dis_loss(logprobs=logp, rollout_logprobs=at_ratio(logp, ratios), advantages=advantages, **MATH)
    assert parts.total.item() == pytest.approx(2.080250, abs=1e-9)
    assert (int(parts.count), int(parts.kept)) == (6, 3)
    mean(parts).backward()
    assert mean(parts).item() == pytest.approx(0.346708333, abs=1e-9)
    assert float(parts.total / parts.kept) == pytest.approx(0.693416667, abs=1e-9)
    torch.testing.assert_close(logp.grad, t(-1 / 6, 0, -0.71 * 2 / 6, 5.99 * 0.5 / 6, 0, 0))
    assert logp.grad.tolist() == pytest.approx([-0.166667, 0, -0.236667, 0.499167, 0, 0], abs=1e-6)
    surrogate = -(weights(ratios, 0.3, 5.0) * advantages).mean()  # the form without log pi: another value
    assert float(surrogate) == pytest.approx(0.095833, abs=1e-6)


def test_band_of_the_coding_runs():
    torch.testing.assert_close(weights([0.19, 0.21, 1, 3.99, 4.01], 0.8, 3.0), t(0, 0.21, 1, 3.99, 0))


def test_the_band_is_open_at_both_ends():
    assert weights([0.5, 0.75, 1, 1.75, 2], 0.5, 1.0).tolist() == pytest.approx([0, 0.75, 1, 1.75, 0])
    assert weights([0.5, 2.0], 0.5, 1.0).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "ppo", "dis"),
    [(0.5, 1, 0.5, 0), (0.5, -1, 0, 0), (1.1, 1, 1.1, 1.1), (3, 1, 0, 3), (3, -1, -3, -3), (8, -1, -8, 0)],
)
def test_coefficient_of_the_score_in_ppo_and_dis(ratio, advantage, ppo, dis):
    for (loss, band), expected in zip((LOSSES["ppo"], LOSSES["dis"]), (ppo, dis), strict=True):
        logp = t(-1.0).requires_grad_()
        parts = loss(logprobs=logp, rollout_logprobs=at_ratio(logp, t(ratio)), advantages=t(advantage), **band)
        mean(parts).backward()
        assert float(-logp.grad) == pytest.approx(expected, abs=1e-12)
        assert int(parts.kept) == (expected != 0)


@pytest.mark.parametrize(("logprob", "with_gradient"), [(-1.0, 0.0), (-3.0, 2.0)])
def test_the_weight_has_no_gradient(logprob, with_gradient):
    """Differentiating f as well would give 0 at log-prob -1 and the wrong sign at -3."""
    logp = t(logprob).requires_grad_()
    (-(logp - at_ratio(logp, t(2.0))).exp() * 0.5 * logp).sum().backward()
    assert float(logp.grad) == pytest.approx(with_gradient, abs=1e-12)
    logp = t(logprob).requires_grad_()
    parts = dis_loss(logprobs=logp, rollout_logprobs=at_ratio(logp, t(2.0)), advantages=t(0.5), **MATH)
    mean(parts).backward()
    assert float(logp.grad) == pytest.approx(-1.0, abs=1e-12)


def test_gradient_equals_that_of_the_masked_ratio_surrogate():
    torch.manual_seed(0)
    logp = -torch.rand(50, dtype=F64).mul(4).requires_grad_()
    rollout, advantages = -torch.rand(50, dtype=F64) * 4, torch.randn(50, dtype=F64)
    (got,) = torch.autograd.grad(
        mean(dis_loss(logprobs=logp, rollout_logprobs=rollout, advantages=advantages, **MATH)), logp
    )
    ratio = (logp - rollout).exp()
    inside = (ratio > 0.7) & (ratio < 6.0)
    (expected,) = torch.autograd.grad(-(ratio * inside * advantages).mean(), logp)
    assert 5 < int(inside.sum()) < 45
    torch.testing.assert_close(got, expected)


def test_token_mean_is_one_division_whatever_the_cut():
    """Rollout X in segments [1,1,1,1], [2,2], [6,6] and Y with eight 0.5: 1.5, not a mean of means (2.61, 2.375)."""
    pieces = [t(1, 1, 1, 1), t(2, 2), t(6, 6), torch.full((8,), 0.5, dtype=F64)]

    def sums(per_token):
        ones = torch.ones_like(per_token)
        return dis_loss(logprobs=-ones, rollout_logprobs=-ones, advantages=per_token, **MATH)

    for cut in (pieces, [torch.cat(pieces[:2]), pieces[2], pieces[3]], [torch.cat(pieces)]):
        parts = [sums(piece) for piece in cut]
        assert float(sum(p.total for p in parts) / sum(p.count for p in parts)) == pytest.approx(1.5, abs=1e-12)
    of_micro_batches = [mean(sums(torch.cat(pieces[:2]))), mean(sums(pieces[2])), mean(sums(pieces[3]))]
    assert float(sum(of_micro_batches) / 3) == pytest.approx(2.611111, abs=1e-6)  # what must not come out


@pytest.mark.parametrize(
    ("segments", "wanted"),
    [
        ([[1] * 4, [2] * 2, [6] * 2, [0.5] * 8], 2.375),
        ([[1] * 4 + [2] * 2 + [6] * 2, [0.5] * 8], 1.5),  # the same tokens, one rollout cut less often
        ([[1] * 9, [9]], 5.0),
        ([[1] * 3, [1] * 3, [1] * 3, [9]], 3.0),
        ([[1] * 9 + [9]], 1.8),
    ],
)
def test_a_mean_over_segments_depends_on_the_cut(segments, wanted):
    """The ablation that divides by segments: each segment counts once, so cutting a rollout changes the loss."""
    losses = t(*(loss for segment in segments for loss in segment))
    share = t(*(1 / len(segment) for segment in segments for _ in segment))
    ones = torch.ones_like(losses)
    parts = dis_loss(logprobs=-ones, rollout_logprobs=-ones, advantages=losses, token_weights=share, **MATH)
    assert float(parts.total) / len(segments) == pytest.approx(wanted, abs=1e-9)
    plain = dis_loss(logprobs=-ones, rollout_logprobs=-ones, advantages=losses, **MATH)
    assert float(mean(plain)) == pytest.approx(1.8 if 9 in losses else 1.5, abs=1e-12)


def test_combined_mode_end_to_end():
    """An execution segment with an observation and a summary segment: loss 0.213386 over five action tokens."""
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    advantages = t(0.365875, 0.335496, 0.0, 0.300444, 0.473333, 0.2)
    logp, ratios = t(-0.5, -1, math.nan, -0.2, -0.3, -2), t(1, 2, math.nan, 0.5, 1.5, 7)
    parts = dis_loss(logprobs=logp, rollout_logprobs=at_ratio(logp, ratios), advantages=advantages, mask=mask, **MATH)
    assert parts.total.item() == pytest.approx(1.066930, abs=2e-6)
    assert mean(parts).item() == pytest.approx(0.213386, abs=1e-6)
    assert (int(parts.count), int(parts.kept)) == (5, 3)


def test_log_prob_carries_the_temperature():
    logits = t(2.0, 1.0, 0.0, -1.0).unsqueeze(0)
    got = token_logprobs(logits=logits, token_ids=torch.tensor([0]), temperatures=t(2.0))
    assert float(got) == pytest.approx(-0.787339, abs=1e-6)


def test_log_prob_of_bfloat16_logits_is_computed_in_float32():
    torch.manual_seed(0)
    logits = (torch.randn(16, 32_000) * 3).bfloat16()
    tokens = torch.randint(0, 32_000, (16,))
    got = token_logprobs(logits=logits, token_ids=tokens, temperatures=torch.ones(16))
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert got.dtype == torch.float32
    assert float((got - exact).abs().max()) < 1e-5
    assert float((logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0] - exact).abs().max()) > 1e-3


def test_entropy_of_a_uniform_and_of_a_sure_distribution():
    got = token_entropies(logits=torch.tensor([[0.0] * 8, [100.0] + [0.0] * 7]), temperatures=torch.ones(2))
    assert got.tolist() == pytest.approx([math.log(8), 0.0], abs=1e-6)


def test_truncated_importance_sampling_cuts_weights_and_leaves_no_token_out():
    ratios = t(0.01, 0.69, 1.5, 2.0, 8.0)
    logp = t(-1, -2, -1, -3, -0.5).requires_grad_()
    rollout = at_ratio(logp, ratios)
    parts = tis_loss(logprobs=logp, rollout_logprobs=rollout, advantages=t(1, 1, -1, 1, 2), eps_low=0.3, eps_high=1.0)
    mean(parts).backward()
    torch.testing.assert_close(-logp.grad * 5, t(0.01, 0.69, -1.5, 2.0, 4.0))
    assert (int(parts.count), int(parts.kept)) == (5, 5)


def test_ppo_divides_by_the_policy_of_the_steps_start_when_it_is_given():
    """Three arrays that differ: rollout -1.0, start of the step -1.2, current -1.5."""
    given = {"logprobs": t(-1.5), "rollout_logprobs": t(-1.0), "advantages": t(1.0), "eps_low": 0.9, "eps_high": 9.0}
    assert float(-ppo_loss(**given).total) == pytest.approx(0.606531, abs=1e-6)
    old = t(-1.2).requires_grad_()
    parts = ppo_loss(**given | {"rollout_logprobs": old})
    assert float(-parts.total) == pytest.approx(0.740818, abs=1e-6)
    assert not parts.total.requires_grad  # nothing flows into the old policy


def test_likelihood_of_successes_counts_their_tokens_only():
    logp = t(-1, -2, math.nan, -4).requires_grad_()
    parts = positive_loss(logprobs=logp, positive=torch.tensor([True, True, False, False]))
    mean(parts).backward()
    assert mean(parts).item() == pytest.approx(1.5) and int(parts.count) == 2
    torch.testing.assert_close(logp.grad, t(-0.5, -0.5, 0, 0))


# -- properties of every policy loss

loss_kinds = pytest.mark.parametrize("kind", LOSSES)


@loss_kinds
def test_ratio_is_current_minus_rollout_and_arguments_have_names(kind):
    loss, band = LOSSES[kind]
    difference = log_ratio(logprobs=t(-1.5), rollout_logprobs=t(-1.0))
    assert float(difference.exp()) == pytest.approx(0.606531, abs=1e-6)
    with pytest.raises(TypeError):
        loss(t(-1.5), t(-1.0), t(1.0), **band)
    with pytest.raises(TypeError):
        loss(logprobs=t(-1.5), advantages=t(1.0), **band)


@loss_kinds
@pytest.mark.parametrize("sizes", [[4], [1, 3], [3, 1], [1, 1, 1, 1], [2, 2]])
def test_micro_batches_of_any_size_give_the_same(kind, sizes):
    """One token with advantage +1 and three with -1: loss 0.5, gradient -+1/4; a mean of means would give 0."""
    loss, band = LOSSES[kind]
    logp = t(-1, -2, -1, -0.5).requires_grad_()
    advantages = t(1, -1, -1, -1)
    rollout = logp.detach().clone()
    parts = [
        loss(logprobs=a, rollout_logprobs=b, advantages=c, **band)
        for a, b, c in zip(logp.split(sizes), rollout.split(sizes), advantages.split(sizes), strict=True)
    ]
    (sum(p.total for p in parts) / sum(p.count for p in parts)).backward()
    torch.testing.assert_close(logp.grad, t(-0.25, 0.25, 0.25, 0.25))


@loss_kinds
@pytest.mark.parametrize("garbage", [0.0, 1e30, -1e30, math.nan, math.inf, -math.inf, 200.0])
def test_garbage_outside_the_mask_changes_no_bit(kind, garbage):
    loss, band = LOSSES[kind]
    torch.manual_seed(1)
    mask = torch.rand(64) < 0.5

    def run(filler):
        torch.manual_seed(2)
        arrays = [-torch.rand(64), -torch.rand(64), torch.randn(64), torch.rand(64)]
        for array in arrays:
            array[~mask] = filler
        logp = arrays[0].requires_grad_()
        parts = loss(
            logprobs=logp, rollout_logprobs=arrays[1], advantages=arrays[2], token_weights=arrays[3], mask=mask, **band
        )
        mean(parts).backward()
        return parts.total.detach(), parts.kept, logp.grad

    for clean, dirty in zip(run(0.5), run(garbage), strict=True):
        assert torch.equal(clean, dirty)
    assert bool((run(garbage)[2][~mask] == 0).all())


@loss_kinds
def test_all_masked_is_zero_and_finite(kind):
    loss, band = LOSSES[kind]
    logp = t(-1, -2).requires_grad_()
    arguments = {"logprobs": logp, "rollout_logprobs": t(-1, -2), "advantages": t(1, 1), **band}
    parts = loss(**arguments, mask=torch.zeros(2, dtype=torch.bool))
    parts.total.backward()
    assert parts.total.item() == 0 and int(parts.kept) == 0
    assert logp.grad.tolist() == [0, 0]


@loss_kinds
def test_extreme_log_ratios_stay_finite(kind):
    loss, band = LOSSES[kind]
    logp = t(-1e4, -1e-3, -1, dtype=torch.float32).requires_grad_()
    parts = loss(
        logprobs=logp, rollout_logprobs=t(-1e-3, -1e4, -1, dtype=torch.float32),
        advantages=t(1, 1, 1, dtype=torch.float32), **band,
    )  # fmt: skip
    parts.total.backward()
    assert bool(parts.total.isfinite()) and bool(logp.grad.isfinite().all())


@loss_kinds
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_gradient_step_moves_the_probability_the_right_way(kind, advantage):
    loss, band = LOSSES[kind]
    logits = torch.zeros(1, 5, dtype=F64, requires_grad=True)
    arguments = {"token_ids": torch.tensor([2]), "temperatures": t(1.0)}
    before = token_logprobs(logits=logits, **arguments)
    mean(loss(logprobs=before, rollout_logprobs=before.detach(), advantages=t(advantage), **band)).backward()
    after = token_logprobs(logits=logits.detach() - 0.1 * logits.grad, **arguments)
    change = float(after - before)
    assert (change > 1e-3) if advantage > 0 else (change < -1e-3) if advantage < 0 else change == 0


@loss_kinds
def test_token_weights_give_the_mean_of_trajectory_means(kind):
    loss, band = LOSSES[kind]
    logp = t(-1, -1, -1, -1)
    parts = loss(
        logprobs=logp, rollout_logprobs=logp, advantages=t(3, 1, 1, 1), token_weights=t(1, 1 / 3, 1 / 3, 1 / 3), **band
    )
    plain = loss(logprobs=logp, rollout_logprobs=logp, advantages=t(3, 1, 1, 1), **band)
    assert float(parts.total / plain.total) == pytest.approx((3 + 1) / 6)
