"""The sections of a run's configuration: every key with its unit, default and range."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Beta = Annotated[float, Field(ge=0, lt=1)]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refuse(faults: list[str]) -> None:
    """Raises what pydantic collects, all faults at once; nothing if there are none."""
    if faults:
        raise ValueError("\n".join(faults))


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, nothing converted (`"10"`, `true`, `2.0` are no int)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """The run: its name, where its files go and how long it is."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="name of the run and of its folder: letters, digits, . _ - and first a letter or digit",
    )
    dir: str = Field("runs", description="folder that holds the run's folder")
    seed: int = Field(0, ge=0, lt=2**32, description="seed from which every other seed is derived")
    steps: int = Field(200, ge=1, description="optimizer steps (critic warm-up included)")
    max_failures_in_a_row: int = Field(32, ge=1, description="environment failures in a row that stop the run")
    target_success: float | None = Field(None, gt=0, le=1, description="stop early when held-out success reaches this")
    restart_killed: bool = Field(
        True, description="a broker or learner that was killed is started again and the run goes on; false: it ends"
    )
    task: Literal["train", "pretrain_value"] = Field(
        "train", description="pretrain_value: train only a critic, on rollouts of the start policy; set by the command"
    )


class ModelSection(Section):
    """The model folder (Hugging Face layout, safetensors only) and how it is held by the learner."""

    path: str = Field(description="folder with config.json, *.safetensors, tokenizer and chat template")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="learner parameter type")
    activation_checkpointing: bool = Field(
        False, description="keep only the inputs of every decoder layer and compute the rest again in the backward pass"
    )
    attention: Literal["auto", "sdpa", "flex_attention", "flash_attention_2"] = Field(
        "auto",
        description="attention of the learner; auto: the best that is installed for its device, see `sao doctor`",
    )


class EnvSection(Section):
    """The environment, by registered name, and its limits."""

    name: str = Field(description="registered name, see `sao doctor`")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    max_turns: int = Field(8, ge=1, description="assistant turns after which a rollout is truncated")
    success_reward: float = Field(1.0, description="an episode counts as a success from this reward on")
    train_tasks: int | None = Field(
        None, ge=1, description="different training tasks, repeated in the same order; default: never the same again"
    )
    step_timeout_s: float = Field(60.0, gt=0, description="deadline of one reset or step, seconds")
    episode_timeout_s: float | None = Field(
        None, gt=0, description="wall clock after which a rollout is truncated (`time_limit`), seconds; default: none"
    )
    concurrency: int | None = Field(
        None, ge=1, description="calls of the environment, or agents, at once per generator; default: no limit"
    )


class SamplingSection(Section):
    """Sampling of the policy. Only temperature may shape training samples."""

    temperature: float = Field(1.0, gt=0, le=10, description="of training rollouts; 1 is the model's own distribution")
    max_response_tokens: int = Field(256, ge=1, description="sampled tokens per turn at most")
    context_tokens: int = Field(2048, ge=8, description="context window of the engine, tokens")
    top_p: float = Field(1.0, ge=1, le=1, description="must be 1: the behaviour policy must be the one that is scored")
    top_k: Literal[0] = Field(0, description="must be 0 (off)")
    repetition_penalty: float = Field(1.0, ge=1, le=1, description="must be 1 (off)")


class GeneratorSection(Section):
    """Generator processes."""

    count: int = Field(
        2,
        ge=1,
        le=256,
        description="generator processes started by the supervisor, each with an engine and GPUs of its own",
    )
    engine: Literal["torch", "vllm", "scripted"] = Field(
        "torch",
        description="torch: in-process transformers model; vllm: vLLM (the extra `vllm`); scripted: a test double",
    )
    concurrency: int = Field(64, ge=1, description="episodes in flight per generator, at most")
    load_control: bool = Field(
        True, description="fewer episodes than `concurrency` while the engine's KV cache is full or requests queue"
    )
    threads: int = Field(1, ge=1, description="CPU threads per generator process")
    agents_bind: str = Field(
        "127.0.0.1:0", pattern=r"^.+:\d+$", description="HOST:PORT of the endpoint for agents; port 0: any free one"
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict,
        description="passed to vLLM's engine arguments; kv_after_update, lora_rank: see `docs/explanation/vllm.md`",
    )


class AlgorithmSection(Section):
    """SAO: direct double-sided importance sampling, value and advantage (`docs/reference/algorithms.md`)."""

    estimator: Literal["sao", "vapo", "grpo", "running_mean", "prompt_mean"] = Field(
        "sao",
        description="advantages: sao, vapo: GAE with a critic; grpo: of the group; running_mean, prompt_mean:"
        " reward minus the mean of the last rewards, of all tasks or of the same task",
    )
    group_size: int = Field(1, ge=1, description="rollouts of the same task, trained together; sao: 1, grpo: 2 or more")
    policy_loss: Literal["dis", "ppo", "tis"] = Field(
        "dis", description="dis: out-of-band tokens get weight 0; ppo: clip; tis: weights cut at the upper edge"
    )
    old_logprobs: Literal["rollout", "recomputed"] = Field(
        "rollout", description="denominator of the ratio: as the engine logged, or (ppo) computed at the step's start"
    )
    eps_low: float = Field(0.3, gt=0, lt=1, description="lower band edge is 1 - eps_low (dis: strict; tis: unused)")
    eps_high: float = Field(5.0, gt=0, description="upper band edge is 1 + eps_high (dis: strict)")
    positive_weight: float = Field(
        0.0, ge=0, description="vapo: weight of the log-likelihood loss on rollouts that reach env.success_reward"
    )
    baseline_window: int = Field(128, ge=1, description="running_mean: last rewards that make the mean")
    prompt_window: int = Field(8, ge=1, description="prompt_mean: last rewards of the same task that make the mean")
    denominator: Literal["all", "kept", "trajectory", "segment"] = Field(
        "all",
        description="policy loss mean over all action tokens, tokens in the band, per-trajectory or per-segment means",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per action token")
    lambda_policy: Annotated[float, Field(ge=0, le=1)] | Literal["adaptive"] = Field(
        "adaptive", description="GAE lambda of the policy: a number in [0, 1], or 1 - 1/(lambda_alpha * action tokens)"
    )
    lambda_alpha: float = Field(1.5, gt=0, description="alpha of the length-adaptive lambda_policy")
    lambda_critic: float = Field(1.0, ge=0, le=1, description="GAE lambda of the critic's targets")
    skip_observations: bool = Field(True, description="GAE over action tokens only; off: every position is a step")
    cross_segment: Literal["paper", "chained", "none"] = Field("paper", description="credit across compactions")
    advantage_values: Literal["before", "after"] = Field(
        "before", description="use critic values from before or after this step's critic passes"
    )
    whiten_advantages: bool = Field(False, description="zero mean and unit variance over the step's action tokens")
    bootstrap_truncated: bool = Field(False, description="value of the last state instead of 0 at a truncation")

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.estimator in ("sao", "vapo")


class CompactionSection(Section):
    """Rollouts that outlive their context window (CompactionRL), see `docs/explanation/compaction.md`."""

    enabled: bool = Field(False, description="off: a rollout ends when its context is full")
    threshold_tokens: int | None = Field(
        None,
        ge=1,
        description="compact when fewer tokens than this are left after an observation (paper: 10240); default:"
        " response cap + observation cap + summary prompt + summary cap, the smallest with which nothing is ever cut",
    )
    max_compactions: int = Field(3, ge=1, description="per rollout; when another is due the rollout is truncated")
    keep_steps: int = Field(2, ge=0, description="k: newest steps carried over word for word, fewer if they do not fit")
    max_summary_tokens: int = Field(512, ge=1, description="sampled tokens of a summary at most")
    observation_cap_tokens: int = Field(
        512, ge=1, description="tokens that one observation is expected to have at most, its chat markup included"
    )
    clip: bool = Field(
        False, description="cut an observation that is longer than its cap or leaves no room for the summary request"
    )
    keep_task_prompt: bool = Field(
        False, description="repeat the task's own messages after a compaction; off (paper): only the system prompt"
    )
    merge_summary: bool = Field(
        False, description="summary in one row with the steps before it; off (paper): a row of its own"
    )
    train_summaries: bool = Field(
        True, description="off: summary rows are left out of losses, advantages and the distance to the end"
    )
    summariser: str | None = Field(
        None, description="model folder of a fixed summariser with the policy's tokenizer; default: the policy itself"
    )
    prompt: Literal["summary_v1"] = Field("summary_v1", description="shipped template of the summary request")
    prompt_file: str | None = Field(None, description="own text of the summary request instead")
    resume: Literal["resume_v1"] = Field("resume_v1", description="shipped template of the message after a compaction")
    resume_file: str | None = Field(None, description="own template instead; holds {summary} once")


class LearnerSection(Section):
    """The learner: ranks, batch, optimizers, critic."""

    ranks: int = Field(1, ge=1, description="torchrun processes")
    threads: int = Field(1, ge=1, description="CPU threads per rank")
    batch_trajectories: int = Field(128, ge=1, description="trajectories per optimizer step")
    row_tokens: int = Field(4096, ge=8, description="longest packed row, tokens")
    rows_per_micro_batch: int = Field(8, ge=1, description="packed rows per forward pass")
    policy_lr: float = Field(1e-6, ge=0, description="peak learning rate of the policy (AdamW)")
    critic_lr: float = Field(5e-6, ge=0, description="peak learning rate of the critic (AdamW)")
    lr_warmup_steps: int = Field(0, ge=0, description="linear learning-rate warm-up of both optimizers, steps")
    lr_decay: Literal["constant", "linear"] = Field("constant", description="linear: to 0 at run.steps")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of both optimizers")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False, description="Adam's betas, each in [0, 1)")
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm, policy and critic each")
    policy_passes: int = Field(1, ge=1, description="policy updates per batch; more than 1 only with policy_loss = ppo")
    critic_passes: int = Field(2, ge=1, description="K: critic updates per policy update")
    critic_warmup_steps: int = Field(10, ge=0, description="first steps in which only the critic is updated")
    critic_frozen: Literal["attention", "none"] = Field("attention", description="parameters of the critic that stay")
    critic_path: str | None = Field(None, description="critic to start from; default: the policy with a zero head")
    value_loss: Literal["mse", "clipped"] = Field(
        "mse", description="clipped: the larger of the squared errors of V and of V within value_clip of its old value"
    )
    value_clip: float = Field(0.2, gt=0, description="clipped: distance from V at the start of the step")
    logprob_chunk_tokens: int = Field(
        1024, ge=1, description="action tokens whose logits exist at once; more come in chunks, also backward"
    )
    offload_optimizer: bool = Field(
        False, description="parameters and optimizer state in the memory of the CPU between passes; needs a GPU"
    )
    max_skipped_in_a_row: int = Field(
        5, ge=1, description="skipped steps in a row (non-finite, empty) that stop the run"
    )
    save_every_steps: int = Field(0, ge=0, description="0: only at the end")
    checkpoints_kept: int = Field(2, ge=1, description="newest checkpoints that stay on disk")
    deterministic: bool = Field(False, description="deterministic torch kernels: reproducible, slower")


class ValuePretrainingSection(Section):
    """`sao pretrain-value`: when the critic has learned enough. Its explained variance is that of batches that it has
    not been trained on yet, over the last `window` of them.
    """

    steps: int = Field(50, ge=1, description="batches at most")
    target: float | None = Field(None, gt=0, lt=1, description="stop when the explained variance reaches this")
    window: int = Field(5, ge=1, description="batches over which the explained variance is measured")
    patience: int = Field(10, ge=1, description="stop after this many batches without a gain of `min_gain`")
    min_gain: float = Field(0.01, ge=0, description="smallest gain of explained variance that counts")


class StalenessSection(Section):
    """Staleness: how far behind a token's policy version may be, and what happens beyond."""

    max_lag: int = Field(4, ge=0, description="largest lag in policy versions")
    stale: Literal["mask", "drop"] = Field(
        "mask", description="mask: no policy loss for the token; drop: whole rollout"
    )
    order: Literal["completion", "window"] = Field(
        "completion", description="completion: trained as they finish; window: in task order, no token exceeds max_lag"
    )


class BufferSection(Section):
    """The broker's buffer."""

    max_trajectories: int = Field(4096, ge=1, description="finished trajectories held at most")
    max_bytes: int = Field(1 << 30, ge=1 << 16, description="bytes held at most")
    durability: Literal["off", "process", "machine"] = Field(
        "process",
        description="what finished rollouts survive: off: nothing; process: the broker's death; machine: a power cut",
    )
    prefix_bytes: int = Field(
        1 << 26, ge=0, description="turns of running rollouts, kept to go on after a generator's death; 0: none"
    )
    ledger_growth_bytes: int = Field(
        1 << 24,
        ge=0,
        description="bytes the journal may grow by before steps older than every checkpoint are summed up; 0: never",
    )


class EvalSection(Section):
    """Held-out evaluation during training."""

    every_steps: int = Field(20, ge=0, description="optimizer steps between two evaluations; 0: never")
    episodes: int = Field(128, ge=1, description="held-out episodes of one evaluation")
    temperature: float = Field(1.0, ge=0, le=10, description="of evaluation episodes; 0: greedy")


class TransportSection(Section):
    """Sockets and deadlines."""

    bind: str = Field("ipc", pattern=r"^(ipc|tcp://.+:\d+)$", description="ipc (private folder) or tcp://HOST:PORT")
    keys: str | None = Field(
        None, description="folder of CURVE keys (`sao keys`): over tcp only their owners may join, all is encrypted"
    )
    allow_remote: bool = Field(
        False, description="permit an address that is not loopback without keys: anyone may join and read, in the clear"
    )
    weights_bind: str | None = Field(
        None,
        pattern=r"^tcp://.+:\d+$",
        description="tcp://HOST:PORT where the learner serves weights to generators on other hosts;"
        " host *: every interface, for a learner on the broker's host",
    )
    max_message_bytes: int = Field(
        1 << 28, ge=1 << 16, lt=1 << 32, description="messages with a larger frame are refused before they are read"
    )
    heartbeat_s: float = Field(1.0, gt=0, description="time between two signs of life, seconds")
    peer_timeout_s: float = Field(15.0, gt=0, description="a peer silent for this long is gone, seconds")
    outage_s: float = Field(300.0, ge=0, description="how long peers wait for a broker that is away, seconds; 0: not")
    rollout_timeout_s: float = Field(3600.0, gt=0, description="a rollout older than this is given up, seconds")
    shutdown_s: float = Field(10.0, gt=0, description="time to end in order before processes are killed, seconds")

    @model_validator(mode="after")
    def _sockets(self) -> TransportSection:
        faults = []
        for key, address in (("bind", self.bind), ("weights_bind", self.weights_bind)):
            if address in (None, "ipc"):
                continue
            host, _, port = str(address).removeprefix("tcp://").rpartition(":")
            if not 0 < int(port) < 65536:
                faults.append(f"{key}: port {port} is not in 1..65535")
            if not is_loopback(host) and self.keys is None and not self.allow_remote:
                faults.append(
                    f"{key}: {address} is not a loopback address: set keys = FOLDER (made by `sao keys`), or"
                    " allow_remote = true to permit it without encryption"
                )
        if self.weights_bind is not None and self.bind == "ipc":
            faults.append("weights_bind: with bind = 'ipc' no other host can join; set bind = 'tcp://HOST:PORT'")
        if self.peer_timeout_s <= 2 * self.heartbeat_s:
            faults.append(f"peer_timeout_s: {self.peer_timeout_s} must exceed 2 * heartbeat_s = {2 * self.heartbeat_s}")
        refuse(faults)
        return self


class TelemetrySection(Section):
    """Records of the run: what is written and shown."""

    tensorboard: bool = Field(True, description="TensorBoard files, where tensorboard is installed (extra `tracking`)")
    wandb: bool = Field(False, description="Weights & Biases; needs the package wandb")
    prometheus_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="the newest numbers at http://127.0.0.1:PORT/metrics, for Prometheus (extra `tracking`)",
    )
    live: bool = Field(True, description="live view when the output is a terminal")
    keep_trajectories: int = Field(
        0, ge=0, description="newest steps whose trajectories are kept for `sao inspect` and `sao replay`; 0: none"
    )
    max_logprob_gap: float | None = Field(
        None,
        gt=0,
        description="mean distance of the learner's log-probs from the engine's at lag 0 above which the run warns,"
        " nats; default: 0.02, with model.dtype = bfloat16 0.05",
    )
    plot: bool = Field(True, description="curves.png at the end, where matplotlib is installed (extra `tracking`)")
