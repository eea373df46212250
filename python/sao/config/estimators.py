"""Which settings go together with which estimator of advantages; what has no effect is refused, not ignored."""

from __future__ import annotations

from sao.config.sections import AlgorithmSection, EnvSection, LearnerSection, RunSection, Section, StalenessSection

# Settings that only a critic reads.
_OF_A_CRITIC = {
    "algorithm": (
        *("gamma", "lambda_policy", "lambda_alpha", "lambda_critic", "skip_observations", "cross_segment"),
        *("advantage_values", "bootstrap_truncated"),
    ),
    "learner": ("critic_lr", "critic_passes", "critic_frozen", "critic_path", "value_loss", "value_clip"),
}


def faults(
    run: RunSection, env: EnvSection, algorithm: AlgorithmSection, learner: LearnerSection, staleness: StalenessSection
) -> list[str]:
    """All combinations of estimator, group, loss and critic that make no sense, one line each."""
    name, size, batch = algorithm.estimator, algorithm.group_size, learner.batch_trajectories
    wrong = {
        f"algorithm.group_size: {size} must be 1 with estimator = {name}: one rollout per task": size > 1
        and name in ("sao", "running_mean", "prompt_mean"),
        f"algorithm.group_size: {size} must be at least 2 with estimator = grpo: a group is its own baseline": size == 1
        and name == "grpo",
        f"learner.batch_trajectories: {batch} must be a multiple of algorithm.group_size = {size}": batch % size > 0,
        "staleness.stale: drop would tear groups apart (algorithm.group_size > 1); use mask": size > 1
        and staleness.stale == "drop",
        "env.train_tasks: prompt_mean needs tasks that come again: set their number": name == "prompt_mean"
        and env.train_tasks is None,
        f"algorithm.old_logprobs: recomputed needs policy_loss = ppo (got {algorithm.policy_loss}), the others take"
        " the rollout's": algorithm.old_logprobs == "recomputed" and algorithm.policy_loss != "ppo",
        f"learner.policy_passes: {learner.policy_passes} needs policy_loss = ppo (got {algorithm.policy_loss})": (
            learner.policy_passes > 1 and algorithm.policy_loss != "ppo"
        ),
        f"algorithm.positive_weight: {algorithm.positive_weight} needs estimator = vapo (got {name})": name != "vapo"
        and algorithm.positive_weight > 0,
        "algorithm.positive_weight: needs a denominator that is known before the pass (got kept)": (
            algorithm.positive_weight > 0 and algorithm.denominator == "kept"
        ),
        f"algorithm.baseline_window: has no effect with estimator = {name}": name not in ("running_mean", "prompt_mean")
        and _changed(algorithm, "baseline_window"),
        f"algorithm.prompt_window: has no effect with estimator = {name}": name != "prompt_mean"
        and _changed(algorithm, "prompt_window"),
    }
    found = [text for text, applies in wrong.items() if applies]
    if algorithm.has_critic:
        if learner.value_loss == "mse" and _changed(learner, "value_clip"):
            found.append("learner.value_clip: has no effect with value_loss = mse")
        return found
    if learner.critic_warmup_steps:
        found.append(
            f"learner.critic_warmup_steps: {learner.critic_warmup_steps} must be 0 with estimator = {name}: no critic"
        )
    if run.task == "pretrain_value":
        found.append(f"run.task: pretrain_value needs an estimator with a critic (got {name})")
    for section, values in (("algorithm", algorithm), ("learner", learner)):
        for field in _OF_A_CRITIC[section]:
            if _changed(values, field):
                found.append(f"{section}.{field}: has no effect with estimator = {name}, which has no critic")
    return found


def _changed(section: Section, field: str) -> bool:
    return bool(getattr(section, field) != type(section).model_fields[field].default)
