"""A whole step in one process: against a plain oracle, and invariant to everything that must not matter."""

import copy
import math

import numpy as np
import pytest
import torch
from learner.oracle import Oracle
from learner.rollouts import make_config, make_segment, make_trajectory, random_batch

from sao.errors import ConfigError, LearnerError, ValidationError
from sao.learner.checkpoint import Checkpointer
from sao.learner.model import load_policy
from sao.learner.step import Learner
from sao.learner.world import World
from sao.transport.weights import load


def state(learner):
    """Every parameter of policy and critic, by name."""
    named = [("policy." + n, p) for n, p in learner.policy.named_parameters()]
    named += [("critic." + n, p) for n, p in learner.critic.named_parameters()]
    return {name: parameter.detach().clone() for name, parameter in named}


def moments(optimizer):
    return copy.deepcopy(optimizer.adam.state_dict()["state"])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_moments(one, other):
    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


def numbers(result):
    """Metrics without times."""
    return {name: value for name, value in result.metrics.items() if not name.startswith("time/")}


# -- the oracle


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm__gamma": 0.97, "algorithm__lambda_critic": 0.9, "algorithm__lambda_policy": 0.8},
        {"learner__critic_passes": 3, "learner__grad_clip": 0.01, "learner__weight_decay": 0.1},
        {"staleness__max_lag": 1, "staleness__stale": "mask", "algorithm__eps_high": 1.0},
    ],
    ids=["defaults", "discount", "passes", "stale"],
)
def test_three_steps_equal_the_plain_oracle(tiny_model, settings):
    config = make_config(tiny_model, **settings)
    learner = Learner(config)
    oracle = Oracle(load_policy(config, World.alone()).lm, config)
    if config.learner.weight_decay:  # the oracle knows no groups: put everything that decays nowhere into none
        for adam in (oracle.critic_adam, oracle.policy_adam):
            decaying = [p for p in adam.param_groups[0]["params"] if p.ndim >= 2]
            rest = [p for p in adam.param_groups[0]["params"] if p.ndim < 2]
            adam.param_groups[0]["params"] = decaying
            adam.add_param_group({"params": rest, "weight_decay": 0.0})
    for number in range(3):
        versions = (0,) if number < 2 else (0, 1, 2)
        batch = random_batch(number, 10, versions=versions)
        expected = oracle.step(batch, number)
        got = learner.step(batch)
        assert got.version == number + 1 and got.skipped is None
        for name, value in expected.items():
            # Adam multiplies the rounding of a gradient near 0 by up to rate / eps: agreement is less after an update.
            tight = number == 0 and name in ("loss/critic_1", "loss/policy", "tokens/trained")
            assert got.metrics[name] == pytest.approx(value, rel=1e-8 if tight else 1e-5), name
    plain = dict(oracle.lm.named_parameters())
    for name, tensor in learner.policy.lm.named_parameters():
        torch.testing.assert_close(tensor, plain[name], rtol=0, atol=2e-5)
    plain = dict(oracle.backbone.named_parameters())
    for name, tensor in learner.critic.backbone.named_parameters():
        torch.testing.assert_close(tensor, plain[name], rtol=0, atol=2e-5)
    torch.testing.assert_close(learner.critic.head.weight, oracle.head.weight, rtol=0, atol=2e-5)


# -- invariance


@pytest.fixture(scope="module")
def reference(tiny_model):
    """Metrics and parameters after two steps with the default packing; one rollout is long, the others are tiny."""
    return run_two(tiny_model)


def run_two(tiny_model, order=None, **settings):
    learner = Learner(make_config(tiny_model, **settings))
    results = []
    for number in range(2):
        batch = random_batch(10 + number, 12, long=60)
        results.append(numbers(learner.step([batch[i] for i in order] if order else batch)))
    return results, state(learner)


@pytest.mark.parametrize(
    "settings",
    [
        {"learner__rows_per_micro_batch": 1},
        {"learner__rows_per_micro_batch": 3},
        {"learner__rows_per_micro_batch": 64},
        {"learner__row_tokens": 512},
        {"learner__logprob_chunk_tokens": 5},
        {"model__activation_checkpointing": True},
        {"order": [5, 11, 0, 3, 1, 2, 4, 10, 9, 8, 7, 6]},
        {"algorithm__lambda_critic": 1.0 - 1e-15},
    ],
    ids=["rows-1", "rows-3", "rows-64", "long-rows", "chunks", "activations", "order", "values-in-their-own-pass"],
)
def test_nothing_depends_on_packing_micro_batches_or_order(tiny_model, reference, settings):
    results, parameters = run_two(tiny_model, **settings)
    for got, expected in zip(results, reference[0], strict=True):
        assert got.keys() == expected.keys()
        for name in got:
            assert got[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name
    for name in parameters:
        torch.testing.assert_close(parameters[name], reference[1][name], rtol=0, atol=1e-9)


def test_cutting_a_rollout_does_not_change_its_weight(tiny_model):
    """Scores 1 (three segments) and 0 (one): every statistic of trajectories sees 0.5, not 0.75."""
    rng = np.random.default_rng(0)
    batch = [
        make_trajectory(rng, [make_segment(rng, [(3, 2)]) for _ in range(3)], reward=1.0),
        make_trajectory(rng, [make_segment(rng, [(3, 2), (2, 1)])], reward=0.0),
    ]
    metrics = Learner(make_config(tiny_model)).step(batch).metrics
    assert metrics["reward/mean"] == metrics["reward/success"] == 0.5
    assert metrics["rollout/segments"] == 2.0 and metrics["rollout/turns"] == 2.5
    assert metrics["tokens/action"] == 9 and metrics["rollout/actions"] == 4.5 and metrics["rollout/actions_max"] == 6


def test_as_many_updates_however_many_segments(tiny_model):
    rng = np.random.default_rng(0)
    learner = Learner(make_config(tiny_model))
    learner.step([make_trajectory(rng, [make_segment(rng, [(3, 2)]) for _ in range(n)]) for n in (1, 2, 3, 7)])
    assert {int(entry["step"]) for entry in moments(learner.optimizers["policy"]).values()} == {1}
    assert {int(entry["step"]) for entry in moments(learner.optimizers["critic"]).values()} == {2}


def test_a_rollout_without_trained_tokens_takes_no_part(tiny_model):
    """Left with summaries alone, where those are not trained, it changes no number but those that count rollouts."""
    rng = np.random.default_rng(0)
    busy = [make_trajectory(rng, [make_segment(rng, [(3, 4)])], reward=r) for r in (1.0, 0.0)]
    idle = make_trajectory(rng, [make_segment(rng, [(3, 2)], kind="summary")], reward=1.0)
    config = make_config(tiny_model, compaction__train_summaries=False)
    alone, together = (Learner(config).step(batch).metrics for batch in (busy, [*busy, idle]))
    assert together["lambda/mean"] == alone["lambda/mean"] == pytest.approx(1 - 1 / (1.5 * 4))
    for name in ("loss/policy", "loss/critic_1", "loss/critic_2", "policy/grad_norm", "tokens/action", "advantage/std"):
        assert together[name] == pytest.approx(alone[name], rel=1e-12), name
    assert together["tokens/masked"] == alone["tokens/masked"] + 2 and together["reward/mean"] == pytest.approx(2 / 3)


# -- what moves, and which way


def test_everything_trainable_moves_and_frozen_parts_do_not(tiny_model):
    learner = Learner(make_config(tiny_model))
    before = state(learner)
    learner.step(random_batch(0, 8))
    learner.step(random_batch(1, 8))  # a zero head gives the critic's backbone no gradient in the very first pass
    after = state(learner)
    frozen = {name for name in before if name.startswith("critic.") and ".self_attn." in name}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(frozen) == 8 and moved == before.keys() - frozen
    parameters = dict(learner.critic.named_parameters())
    assert all(parameters[name.removeprefix("critic.")].grad is None for name in frozen)
    held = {id(p) for group in learner.optimizers["critic"].adam.param_groups for p in group["params"]}
    assert held == {id(p) for p in learner.critic.parameters() if p.requires_grad}


@pytest.mark.parametrize("policy_loss", ["dis", "ppo"])
@pytest.mark.parametrize("reward", [1.0, -1.0, 0.0])
def test_a_rewarded_token_becomes_more_likely(tiny_model, policy_loss, reward):
    rng = np.random.default_rng(0)
    learner = Learner(make_config(tiny_model, algorithm__policy_loss=policy_loss))
    # A rollout log-prob equal to the policy's own: find it by scoring once.
    segment = make_segment(rng, [(5, 1)])
    oracle = Oracle(learner.policy.lm, learner.config)
    segment = make_segment(np.random.default_rng(0), [(5, 1)], logprob=float(oracle.logprob(segment, 1.0)))
    before = float(oracle.logprob(segment, 1.0))
    parameters = state(learner)
    result = learner.step([make_trajectory(rng, [segment], reward=reward)])
    change = float(Oracle(learner.policy.lm, learner.config).logprob(segment, 1.0)) - before
    assert (change > 1e-4) if reward > 0 else (change < -1e-4) if reward < 0 else abs(change) == 0
    assert result.metrics["logprob_gap/max"] < 1e-6
    if reward == 0:
        assert same(parameters, state(learner))


def test_ratio_is_that_of_the_current_policy_to_the_rollout(tiny_model):
    """Rollout log-prob -1 under weights that give x: the reported ratio is exp(x + 1), not 1."""
    rng = np.random.default_rng(0)
    segment = make_segment(rng, [(5, 1)], logprob=-1.0)
    learner = Learner(make_config(tiny_model, algorithm__eps_low=0.999))
    expected = math.exp(float(Oracle(learner.policy.lm, learner.config).logprob(segment, 1.0)) + 1.0)
    metrics = learner.step([make_trajectory(rng, [segment])]).metrics
    assert metrics["policy/ratio_mean"] == pytest.approx(expected, rel=1e-6) != pytest.approx(1.0)


# -- warm-up, staleness, versions


def test_critic_warmup_leaves_policy_and_version_alone(tiny_model, tmp_path):
    learner = Learner(make_config(tiny_model, learner__critic_warmup_steps=2), weights_folder=tmp_path)
    before = state(learner)
    for number in range(2):
        result = learner.step(random_batch(number, 6))
        assert result.version == 0 and result.weights is None and result.skipped is None
        assert result.masked_tokens == 0 and result.trained_tokens == result.metrics["tokens/action"]
    after = state(learner)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("policy."))
    assert not torch.equal(before["critic.head.bias"], after["critic.head.bias"])
    assert not moments(learner.optimizers["policy"]) and list(tmp_path.iterdir()) == []
    result = learner.step(random_batch(2, 6))
    assert result.version == 1 and result.weights is not None


def test_a_published_version_is_the_policy(tiny_model, tmp_path):
    learner = Learner(make_config(tiny_model, model__dtype="float32"), weights_folder=tmp_path)
    result = learner.step(random_batch(0, 6))
    got = load(result.weights)
    expected = dict(learner.policy.lm.named_parameters())
    assert result.weights.version == 1 and got.keys() == expected.keys() and "lm_head.weight" not in got
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_stale_tokens_give_the_policy_nothing_and_keep_their_place(tiny_model):
    """Limit 1 at version 2: tokens of versions 1 and 2 train, those of 0 do not, and the denominator counts all."""
    rng = np.random.default_rng(0)
    segment = make_segment(rng, [(2, 9)], versions=(0, 1, 2))
    learner = Learner(
        make_config(
            tiny_model, staleness__max_lag=1, staleness__stale="mask", algorithm__eps_low=0.999, algorithm__eps_high=1e6
        )
    )
    learner.version = 2
    result = learner.step([make_trajectory(rng, [segment], reward=1.0)])
    assert (result.trained_tokens, result.masked_tokens) == (6, 3)
    assert result.metrics["policy/stale"] == pytest.approx(1 / 3)
    assert result.metrics["lag/max"] == 2 and result.metrics["lag/mean"] == 1.0


@pytest.mark.parametrize("limit", range(4))
@pytest.mark.parametrize("stamp", range(6, 12))
def test_table_of_lags_and_limits(tiny_model, limit, stamp, shared_learner):
    rng = np.random.default_rng(0)
    learner = shared_learner(limit)
    learner.version, learner.steps, learner._skipped_in_a_row = 10, 0, 0
    trajectory = make_trajectory(rng, [make_segment(rng, [(2, 3)], versions=(stamp,))], reward=1.0)
    if stamp > 10:
        with pytest.raises(ValidationError):
            learner.step([trajectory])
        return
    result = learner.step([trajectory])
    assert (result.metrics["policy/stale"] == 0) == (10 - stamp <= limit)
    assert (result.skipped is None) == (10 - stamp <= limit)
    assert result.version == 10 + (result.skipped is None)


@pytest.fixture(scope="module")
def shared_learner(tiny_model):
    made = {}

    def make(limit):
        if limit not in made:
            config = make_config(
                tiny_model,
                staleness__max_lag=limit,
                staleness__stale="mask",
                algorithm__eps_low=0.999,
                algorithm__eps_high=1e6,
            )
            made[limit] = Learner(config)
        return made[limit]

    return make


# -- skipped steps


def test_a_batch_without_policy_gradient_leaves_the_policy_bit_identical(tiny_model, tmp_path):
    rng = np.random.default_rng(0)
    learner = Learner(make_config(tiny_model, staleness__max_lag=0, staleness__stale="mask"), weights_folder=tmp_path)
    learner.step(random_batch(0, 4))  # moments exist
    stale = [make_trajectory(rng, [make_segment(rng, [(3, 4)], versions=(0,))])]
    outside = [make_trajectory(rng, [make_segment(rng, [(3, 4)], versions=(1,), logprob=-40.0)])]
    for number, batch in enumerate((stale, outside), start=1):
        before, held = state(learner), moments(learner.optimizers["policy"])
        result = learner.step(batch)
        after = state(learner)
        assert result.skipped == "no action token with a policy gradient" and result.version == 1
        assert result.weights is None and (result.trained_tokens, result.masked_tokens) == (0, 4)
        assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("policy."))
        assert same_moments(held, moments(learner.optimizers["policy"]))
        assert result.metrics["loss/policy"] == 0 and result.metrics["step/skipped_total"] == number
        assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_a_non_finite_gradient_is_named_and_never_reaches_the_optimizer(tiny_model, part):
    learner = Learner(make_config(tiny_model, learner__max_skipped_in_a_row=3))
    learner.step(random_batch(0, 4))
    name = {"policy": "lm.model.layers.1.mlp.up_proj.weight", "critic": "backbone.layers.0.mlp.down_proj.weight"}[part]
    module = getattr(learner, part)
    poison = dict(module.named_parameters())[name].register_hook(poisoned)
    before, held = state(learner), moments(learner.optimizers[part])
    result = learner.step(random_batch(1, 4))
    after = state(learner)
    assert result.skipped == f"non-finite gradient of {part} {name}" and result.version == 1 and result.weights is None
    assert all(torch.equal(before[key], after[key]) for key in before if key.startswith(f"{part}."))
    assert same_moments(held, moments(learner.optimizers[part]))
    assert learner.step(random_batch(2, 4)).metrics["step/skipped_total"] == 2
    with pytest.raises(LearnerError, match=f"3 steps in a row.*{name}"):
        learner.step(random_batch(3, 4))
    poison.remove()
    assert learner.step(random_batch(4, 4)).skipped is None


def poisoned(gradient):
    gradient = gradient.clone()
    gradient[1, 2] = math.nan
    return gradient


# -- variants and options


def test_denominators(tiny_model):
    rng = np.random.default_rng(3)
    batch = [
        make_trajectory(rng, [make_segment(rng, [(3, n)], versions=versions)], reward=1.0)
        for n, versions in ((2, (0,)), (6, (0, 1)))
    ]
    settings = {
        "staleness__max_lag": 0,
        "staleness__stale": "mask",
        "algorithm__eps_low": 0.999,
        "algorithm__eps_high": 1e6,
        "algorithm__lambda_policy": 1.0,
    }
    losses = {}
    for denominator in ("all", "kept", "trajectory"):
        learner = Learner(make_config(tiny_model, algorithm__denominator=denominator, **settings))
        learner.version = 1
        result = learner.step(batch)
        assert result.trained_tokens == 3
        losses[denominator] = result.metrics["loss/policy"]
    # Fresh: the last three tokens of the second rollout; all: of eight, kept: of three, trajectory: 1/6 each, of two.
    assert losses["kept"] == pytest.approx(losses["all"] * 8 / 3)
    assert losses["trajectory"] == pytest.approx(losses["all"] * 8 / 6 / 2)


def test_whitened_advantages_have_mean_0_and_deviation_1(tiny_model):
    metrics = Learner(make_config(tiny_model, algorithm__whiten_advantages=True)).step(random_batch(0, 8)).metrics
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(1, abs=1e-6)


def test_values_after_the_critic_passes_feed_the_advantage_when_asked(tiny_model):
    rng = np.random.default_rng(0)
    batch = [make_trajectory(rng, t.segments, reward=1.0) for t in random_batch(0, 8)]
    means = {}
    for when in ("before", "after"):
        learner = Learner(make_config(tiny_model, algorithm__advantage_values=when, algorithm__lambda_policy=1.0))
        metrics = learner.step(batch).metrics
        means[when] = metrics["advantage/mean"]
        assert metrics["critic/value_mean"] == 0.0
    # Before: A = R - 0 for everyone (times nothing at lambda 1). After two passes towards R = 1 the baseline has grown.
    assert means["before"] == pytest.approx(1.0) and means["after"] < 0.99


def test_truncation_is_bootstrapped_when_asked(tiny_model):
    """Truncated rollouts get V of the last state, finished ones 0."""
    rng = np.random.default_rng(0)
    segments = [make_segment(rng, [(4, 3), (2, 0)])]
    config = make_config(tiny_model, algorithm__bootstrap_truncated=True, algorithm__lambda_policy=1.0)
    targets = {}
    for kind in ("finished", "truncated"):
        learner = Learner(config)
        with torch.no_grad():
            learner.critic.head.bias.fill_(0.5)
        learner.critic.head.weight.requires_grad_(True)
        metrics = learner.step([make_trajectory(np.random.default_rng(1), segments, reward=0.25, kind=kind)]).metrics
        targets[kind] = (metrics["advantage/mean"], metrics["loss/critic_1"])
    assert targets["finished"] == pytest.approx((0.25 - 0.5, 0.25**2))
    assert targets["truncated"] == pytest.approx((0.25 + 0.5 - 0.5, 0.25**2))


@pytest.mark.parametrize("trailing", [0, 2])
def test_the_bootstrap_is_the_value_behind_the_rollouts_own_last_token(tiny_model, trailing):
    """Not of the state before the last action, nor of the next rollout's first; an observation at the end is seen."""
    rng = np.random.default_rng(0)
    kinds = ("truncated", "finished", "truncated")
    batch = [make_trajectory(rng, [make_segment(rng, [(4, 3), (trailing, 0)])], reward=0.25, kind=k) for k in kinds]
    settings = {"algorithm__bootstrap_truncated": True, "algorithm__lambda_policy": 1.0}
    learner = Learner(make_config(tiny_model, telemetry__keep_trajectories=1, **settings))
    critic = learner.critic
    with torch.no_grad():
        critic.head.weight.normal_(generator=torch.Generator().manual_seed(0))
        alone = [torch.from_numpy(t.segments[0].token_ids.astype("int64"))[None] for t in batch]
        last = [critic.head(critic.backbone(input_ids=ids).last_hidden_state[0, -1]).item() for ids in alone]
    arrays = learner.step(batch).arrays
    after = np.repeat([v if kind == "truncated" else 0.0 for v, kind in zip(last, kinds, strict=True)], 7 + trailing)
    mask = np.concatenate([t.segments[0].action_mask for t in batch])
    assert arrays["advantages"][mask] == pytest.approx((0.25 + after - arrays["values"])[mask], abs=1e-5)


def test_naive_advantages_read_values_at_observations(tiny_model):
    rng = np.random.default_rng(0)
    batch = [make_trajectory(rng, [make_segment(rng, [(3, 2), (4, 2)])], reward=1.0)]
    means = {}
    for skip in (True, False):
        learner = Learner(make_config(tiny_model, algorithm__skip_observations=skip, algorithm__lambda_policy=0.5))
        with torch.no_grad():
            learner.critic.head.weight.normal_(generator=torch.Generator().manual_seed(0))
        means[skip] = learner.step(batch).metrics["advantage/mean"]
    assert abs(means[True] - means[False]) > 1e-3


def test_deterministic_runs_repeat_to_the_bit(tiny_model):
    config = make_config(tiny_model, model__dtype="float32", learner__deterministic=True)
    try:
        runs = []
        for _ in range(2):
            learner = Learner(config)
            metrics = [numbers(learner.step(random_batch(number, 6))) for number in range(2)]
            runs.append((metrics, state(learner)))
        assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
    finally:
        torch.use_deterministic_algorithms(False)


def test_bfloat16_steps_are_finite(tiny_model, tmp_path):
    learner = Learner(make_config(tiny_model, model__dtype="bfloat16"), weights_folder=tmp_path)
    result = learner.step(random_batch(0, 6))
    assert result.skipped is None
    assert {tensor.dtype for tensor in load(result.weights).values()} == {torch.bfloat16}


# -- checkpoints as models


def test_a_checkpoint_is_a_folder_that_transformers_loads_and_a_critic_to_go_on_with(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = Learner(make_config(tiny_model, model__dtype="float32", learner__checkpoints_kept=2))
    saver = Checkpointer(learner, tmp_path / "checkpoints")
    for number in range(3):
        learner.step(random_batch(number, 4))
        assert saver.save(number, []) is None and saver.finish() is None
    folder = tmp_path / "checkpoints" / "step-3"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-2", "step-3"]
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert same(dict(learner.policy.lm.named_parameters()), dict(again.named_parameters()))
    assert len(AutoTokenizer.from_pretrained(folder)) == 48 and again.config.dtype == torch.float32
    assert (
        AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(tiny_model).chat_template
    )
    other = Learner(make_config(folder, model__dtype="float32", learner__critic_path=str(folder)))
    assert same(state(learner), state(other))
    assert saver.save(2, []) is None and saver.finish() is None  # the same step once more
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-2", "step-3"]


def test_a_wrong_critic_is_named(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="nothing-here"):
        Learner(make_config(tiny_model, learner__critic_path=str(tmp_path / "nothing-here")))


@pytest.mark.parametrize("policy_loss", ["dis", "ppo"])
def test_shares_are_shares(tiny_model, policy_loss):
    settings = {"algorithm__policy_loss": policy_loss, "staleness__max_lag": 1}
    for seed in range(4):
        learner = Learner(make_config(tiny_model, **settings))
        learner.version = 2
        metrics = learner.step(random_batch(seed, 5, versions=(0, 1, 2))).metrics
        shares = [metrics[f"policy/{name}"] for name in ("masked_low", "masked_high", "stale")]
        assert all(0 <= share <= 1 for share in shares) and sum(shares) <= 1
        if policy_loss == "dis":
            masked = metrics["tokens/masked"] / metrics["tokens/action"]
            assert masked == pytest.approx(sum(shares), abs=1e-12)
