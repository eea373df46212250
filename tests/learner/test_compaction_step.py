"""Compacted rollouts in the learner: a cut changes nothing that it should not, and the switches do what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner.rollouts import make_config, make_segment, make_trajectory
from learner.test_step import state

from sao.errors import ValidationError
from sao.learner.batch import flatten
from sao.learner.step import Learner
from sao.trajectory import Segment, SegmentBuilder, Trajectory


def compacted_batch(seed: int = 0, count: int = 4) -> list[Trajectory]:
    """Rollouts of execution and summary segments in turn; the first ends right after a summary."""
    rng = np.random.default_rng(seed)
    batch = []
    for index in range(count):
        kinds = ["execution", "summary"] * (index % 3 + 1) + ["execution"] * (index > 0)
        segments = [make_segment(rng, [(4, 2), (3, 3)] if k == "execution" else [(9, 4)], kind=k) for k in kinds]
        rewards = {"turn_rewards": ((len(segments) - 1, 5, 0.5),)} if index == 2 else {}
        facts = {"metadata": {"compactions": kinds.count("summary")}}
        batch.append(make_trajectory(rng, segments, reward=float(index % 2), ordinal=index, **rewards, **facts))
    return batch


def without_summaries(trajectory: Trajectory) -> Trajectory:
    kept = [index for index, segment in enumerate(trajectory.segments) if segment.kind != "summary"]
    return make_trajectory(
        np.random.default_rng(0),
        [trajectory.segments[index] for index in kept],
        reward=trajectory.reward,
        name=trajectory.id,
        turn_rewards=tuple((kept.index(s), at, r) for s, at, r in trajectory.turn_rewards),
    )


def test_untrained_summaries_are_out_of_losses_advantages_and_distances(tiny_model):
    """As if they had never been rows, but counted: sampled = trained + masked."""
    batch = compacted_batch()
    ablated = Learner(make_config(tiny_model, compaction__train_summaries=False))
    result, plain = ablated.step(batch), Learner(make_config(tiny_model))
    expected = plain.step([without_summaries(trajectory) for trajectory in batch])
    for name in ("loss/policy", "loss/critic_1", "loss/critic_2", "advantage/mean", "lambda/mean", "tokens/action"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-12), name
    found, wanted = state(ablated), state(plain)
    assert all(np.allclose(found[name], wanted[name], rtol=0, atol=1e-12) for name in wanted)
    summaries = sum(s.n_actions for t in batch for s in t.segments if s.kind == "summary")
    sampled = sum(trajectory.n_actions for trajectory in batch)
    assert result.trained_tokens + result.masked_tokens == sampled
    assert result.masked_tokens == expected.masked_tokens + summaries
    assert result.metrics["rollout/compactions"] == np.mean([1, 2, 3, 1])
    assert "rollout/summary_tokens" not in result.metrics


def test_trained_summaries_are_rows_like_any_other(tiny_model):
    batch = compacted_batch()
    metrics = Learner(make_config(tiny_model)).step(batch).metrics
    assert metrics["tokens/action"] == sum(trajectory.n_actions for trajectory in batch)
    assert metrics["rollout/summary_tokens"] == 4.0 and metrics["rollout/segments"] == np.mean([2, 5, 7, 3])


def test_turn_rewards_find_their_place_when_rows_are_left_out():
    batch = compacted_batch()
    whole, part = flatten(batch, 0), flatten(batch, 0, summaries=False)
    (at,), (still,) = whole.turn_rewards[0].tolist(), part.turn_rewards[0].tolist()
    assert whole.token_ids[at] == part.token_ids[still] and part.action_mask[still]
    assert part.token_ids.size < whole.token_ids.size and not part.summary.any()
    assert part.sampled_tokens == whole.sampled_tokens == whole.action_mask.sum()


@pytest.mark.parametrize("lambda_critic", [1.0, 1.0 - 1e-9], ids=["returns", "values first"])
def test_turn_rewards_reach_the_targets_of_their_own_segment(tiny_model, lambda_critic):
    rng = np.random.default_rng(0)
    segments = [make_segment(rng, [(3, 2), (2, 2)]), make_segment(rng, [(4, 3)])]
    batch = [make_trajectory(rng, segments, reward=1.0, turn_rewards=((0, 4, 0.5), (1, 6, 0.25)))]
    batch.insert(0, make_trajectory(rng, [make_segment(rng, [(2, 2)])], reward=0.0))
    settings = {"telemetry__keep_trajectories": 1, "algorithm__lambda_critic": lambda_critic}
    arrays = Learner(make_config(tiny_model, **settings)).step(batch).arrays
    mask = np.concatenate([segment.action_mask for trajectory in batch for segment in trajectory.segments])
    assert arrays["targets"][mask] == pytest.approx([0, 0, 1.5, 1.5, 1, 1, 1.25, 1.25, 1.25], abs=1e-6)


def test_nothing_but_summaries_left_is_refused_or_takes_no_part(tiny_model):
    """A rollout of which every row is left out cannot come from a generator; it must not bring a step down."""
    rng = np.random.default_rng(0)
    only = make_trajectory(rng, [make_segment(rng, [(3, 2)], kind="summary")], reward=1.0)
    learner = Learner(make_config(tiny_model, compaction__train_summaries=False))
    result = learner.step([only, *compacted_batch()])
    assert result.trained_tokens + result.masked_tokens == 2 + sum(t.n_actions for t in compacted_batch())
    before = {name: tensor.clone() for name, tensor in learner.policy.named_parameters()}
    with pytest.raises(ValidationError, match="no action token that is trained"):
        learner.step([only])
    rewarded = [make_segment(rng, [(3, 2)]), make_segment(rng, [(3, 2)], kind="summary")]
    with pytest.raises(ValidationError, match=r"turn reward 0\.5 is on segment 1"):
        learner.step([make_trajectory(rng, rewarded, reward=1.0, turn_rewards=((1, 4, 0.5),))])
    assert learner.steps == 1 and all(torch.equal(before[name], t) for name, t in learner.policy.named_parameters())


def recut(rng: np.random.Generator, trajectory: Trajectory, share: float) -> Trajectory:
    """The same tokens in more segments: each begins with all that came before, which is context there.

    So every token is sampled under the very context that it had, and a cut is nothing but a cut.
    """
    segments: list[Segment] = []
    for segment in trajectory.segments:
        actions = np.flatnonzero(segment.action_mask)
        cuts = [int(at) for at in actions[1:] if rng.random() < share]
        for first, last in zip([int(actions[0]), *cuts], [*cuts, segment.n_tokens], strict=True):
            builder = SegmentBuilder(segment.kind)
            builder.append_context(segment.token_ids[:first])
            for at in range(first, last):
                ids = segment.token_ids[at : at + 1]
                if segment.action_mask[at]:
                    builder.append_sampled(ids, segment.logprobs[at : at + 1], [(0, 1, 0)])
                else:
                    builder.append_context(ids)
            segments.append(builder.build())
    return make_trajectory(np.random.default_rng(0), segments, reward=trajectory.reward, name=trajectory.id)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("policy_loss", ["dis", "ppo"])
def test_recutting_rollouts_leaves_the_step_unchanged(tiny_model, share, policy_loss):
    """Token means do not see a cut: with lambda 1 and a fresh critic (V = 0) all advantages are the outcome, so the
    loss agrees to 1e-12 in float64. The mean over segments does see it."""
    rng = np.random.default_rng(2)
    batch = [make_trajectory(rng, [make_segment(rng, [(4, 4), (3, 4)])], reward=r) for r in (1.0, 0.0, 1.0)]
    cut = [recut(rng, trajectory, share) for trajectory in batch]
    assert sum(len(trajectory.segments) for trajectory in cut) > len(batch)

    def run(trajectories, **more):
        learner = Learner(
            make_config(tiny_model, algorithm__lambda_policy=1.0, algorithm__policy_loss=policy_loss, **more)
        )
        return learner.step(trajectories).metrics

    whole, pieces = run(batch), run(cut)
    for name in ("loss/policy", "loss/critic_1", "tokens/trained", "advantage/mean", "advantage/std", "reward/mean"):
        assert pieces[name] == pytest.approx(whole[name], rel=1e-12, abs=1e-12), name
    for name in ("policy/grad_norm", "critic/grad_norm_1"):  # the model's own norms work in float32
        assert pieces[name] == pytest.approx(whole[name], rel=1e-7), name
    by_segment = [run(b, algorithm__denominator="segment")["loss/policy"] for b in (batch, cut)]
    assert share == 1.0 or abs(by_segment[0] - by_segment[1]) > 1e-6


def test_the_mean_over_segments_is_the_mean_of_their_means(tiny_model):
    """The ablation, on a batch in which one segment has no action token: it is no segment of the mean."""
    rng = np.random.default_rng(3)
    segments = [make_segment(rng, [(3, 5)]), make_segment(rng, [(4, 0)]), make_segment(rng, [(2, 1)])]
    batch = [
        make_trajectory(rng, segments, reward=1.0),
        make_trajectory(rng, [make_segment(rng, [(3, 8)])], reward=1.0),
    ]
    options = {"algorithm__lambda_policy": 1.0, "learner__policy_lr": 0.0, "algorithm__eps_low": 1 - 1e-9}
    options["algorithm__eps_high"] = 1e9
    means = []
    for segment in (segments[0], segments[2], batch[1].segments[0]):
        alone = make_trajectory(rng, [segment], reward=1.0)
        means.append(Learner(make_config(tiny_model, **options)).step([alone]).metrics["loss/policy"])
    learner = Learner(make_config(tiny_model, algorithm__denominator="segment", **options))
    assert learner.step(batch).metrics["loss/policy"] == pytest.approx(np.mean(means), rel=1e-12)


def test_a_step_leaves_what_it_was_made_of(tiny_model):
    """Advantages and log-probs by flat index, equal to those of a run without recording."""
    batch = compacted_batch()
    config = make_config(tiny_model, telemetry__keep_trajectories=2, staleness__max_lag=1)
    plain = make_config(tiny_model, staleness__max_lag=1)
    result, expected = Learner(config).step(batch), Learner(plain).step(batch)
    assert expected.arrays is None and result.metrics["loss/policy"] == expected.metrics["loss/policy"]
    flat, arrays = flatten(batch, 0), result.arrays
    mask = flat.action_mask
    assert np.array_equal(np.isfinite(arrays["logprobs"]), mask)
    assert not arrays["advantages"][~mask].any()
    assert arrays["advantages"][mask].mean() == pytest.approx(result.metrics["advantage/mean"], rel=1e-6)
    ratios = np.exp(arrays["logprobs"][mask].astype(float) - arrays["rollout_logprobs"][mask])
    assert ratios.mean() == pytest.approx(result.metrics["policy/ratio_mean"], rel=1e-6)
    assert arrays["segment_offsets"].tolist() == flat.segment_offsets.tolist()
    assert len(arrays["plan_rank"]) == len(flat.lengths)


def test_log_probs_that_were_not_computed_are_no_numbers(tiny_model):
    """In the critic's warm-up the policy is not run at all."""
    config = make_config(tiny_model, telemetry__keep_trajectories=1, learner__critic_warmup_steps=3)
    arrays = Learner(config).step(compacted_batch()).arrays
    assert np.isnan(arrays["logprobs"]).all() and np.isfinite(arrays["values"]).all()
