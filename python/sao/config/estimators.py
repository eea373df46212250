"""Rules of the estimators of advantages: which settings go with which; what has no effect is refused, not ignored."""

from collections.abc import Iterator

from sao.config.sections import AlgorithmSection, EnvSection, LearnerSection, RunSection, Section, StalenessSection

WIDEST_CLIP = 0.5
"""A wider clip of PPO bounds nothing: at r = 3, A = 1 the mask's band (0.2, 4) would leave a coefficient of 3."""

# Settings that only a critic reads.
OF_A_CRITIC = {
    "algorithm": (
        *("gamma", "lambda_policy", "lambda_alpha", "lambda_critic", "skip_observations", "cross_segment"),
        *("advantage_values", "bootstrap_truncated"),
    ),
    "learner": ("critic_lr", "critic_passes", "critic_frozen", "critic_path", "value_loss", "value_clip"),
}


def faults(
    run: RunSection, env: EnvSection, algorithm: AlgorithmSection, learner: LearnerSection, staleness: StalenessSection
) -> Iterator[str]:
    """All combinations of estimator, group, loss and critic that make no sense, one line each."""
    name, size, batch = algorithm.estimator, algorithm.group_size, learner.batch_trajectories
    loss, weight, warmup = algorithm.policy_loss, algorithm.positive_weight, learner.critic_warmup_steps
    if size > 1 and name in ("sao", "running_mean", "prompt_mean"):
        yield f"algorithm.group_size: {size} must be 1 with estimator = {name}: one rollout per task"
    if size == 1 and name == "grpo":
        yield f"algorithm.group_size: {size} must be at least 2 with estimator = grpo: a group is its own baseline"
    if batch % size > 0:
        yield f"learner.batch_trajectories: {batch} must be a multiple of algorithm.group_size = {size}"
    if size > 1 and staleness.stale == "drop":
        yield "staleness.stale: drop would tear groups apart (algorithm.group_size > 1); use keep or mask"
    if name == "prompt_mean" and env.train_tasks is None:
        yield "env.train_tasks: prompt_mean needs tasks that come again: set their number"
    if algorithm.old_logprobs == "recomputed" and loss != "ppo":
        yield f"algorithm.old_logprobs: recomputed needs policy_loss = ppo (got {loss}), the others take the rollout's"
    if learner.policy_passes > 1 and loss != "ppo":
        yield f"learner.policy_passes: {learner.policy_passes} needs policy_loss = ppo (got {loss})"
    if loss == "ppo" and (algorithm.eps_low > WIDEST_CLIP or algorithm.eps_high > WIDEST_CLIP):
        yield (
            f"algorithm.eps_high: {algorithm.eps_low}/{algorithm.eps_high} is a band of the double-sided mask, no clip"
            f" of PPO (at most {WIDEST_CLIP} each); leave both out, or choose algorithm.preset = ppo"
        )
    if weight > 0 and name != "vapo":
        yield f"algorithm.positive_weight: {weight} needs estimator = vapo (got {name})"
    if weight > 0 and algorithm.denominator == "kept":
        yield "algorithm.positive_weight: needs a denominator that is known before the pass (got kept)"
    if name not in ("running_mean", "prompt_mean") and _changed(algorithm, "baseline_window"):
        yield f"algorithm.baseline_window: has no effect with estimator = {name}"
    if name != "prompt_mean" and _changed(algorithm, "prompt_window"):
        yield f"algorithm.prompt_window: has no effect with estimator = {name}"
    if algorithm.has_critic:
        if learner.value_loss == "mse" and _changed(learner, "value_clip"):
            yield "learner.value_clip: has no effect with value_loss = mse"
        return
    if env.at_time_limit == "bootstrap":
        yield f"env.at_time_limit: bootstrap has no effect with estimator = {name}, which has no critic"
    if warmup:
        yield f"learner.critic_warmup_steps: {warmup} must be 0 with estimator = {name}: no critic"
    if run.task == "pretrain_value":
        yield f"run.task: pretrain_value needs an estimator with a critic (got {name})"
    for section, values in (("algorithm", algorithm), ("learner", learner)):
        for field in OF_A_CRITIC[section]:
            if _changed(values, field):
                yield f"{section}.{field}: has no effect with estimator = {name}, which has no critic"


def _changed(section: Section, field: str) -> bool:
    return bool(getattr(section, field) != type(section).model_fields[field].default)
