"""The sections of a run's configuration: every key with its unit, default and range."""

import datetime
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sao.config import addresses

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Day = Annotated[str, AfterValidator(lambda text: datetime.date.fromisoformat(text).isoformat())]


def _expanded(path: str) -> str:
    """A path with `~`, `~USER`, `$NAME` and `${NAME}` expanded, the last two unless there is a file of that very name.

    Raises `ValueError` for a home or a variable that is not known.
    """
    if "\0" in path:
        raise ValueError(f"a path holds no NUL (got {path!r})")
    if "$" in path and not os.path.lexists(path):
        path = os.path.expandvars(path)
        if unknown := re.search(r"\$(\w+|\{[^}]*\})", path):
            raise ValueError(f"the variable {unknown[0]} is not set (got {path!r})")
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        raise ValueError(f"the home folder of {path.partition('/')[0]} is not known (got {path!r})") from None


FilePath = Annotated[str, AfterValidator(_expanded)]


def key(default: Any, description: str, *, paper: str = "", **limits: Any) -> Any:
    """A key with its default, the meaning that pages and errors give, the place in a paper if the default is from
    there (else it is ours), and limits beyond those of its type."""
    return Field(default, description=description, json_schema_extra={"paper": paper}, **limits)


def refuse(faults: list[str]) -> None:
    """Raises what pydantic collects, all faults at once; nothing if there are none."""
    if faults:
        raise ValueError("\n".join(faults))


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, nothing converted (`"10"`, `true`, `2.0` are no int)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """The run: its name, where its files go and how long it is."""

    name: str = key("run", "name of the run and of its folder", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: FilePath = key("runs", "folder that holds the run's folder")
    seed: int = key(0, "seed from which every other seed is derived", ge=0, lt=2**32)
    steps: Count = key(200, "optimizer steps (critic warm-up included)")
    max_failures_in_a_row: Count = key(32, "environment failures in a row that stop the run")
    target_success: float | None = key(None, "stop early when held-out success reaches this", gt=0, le=1)
    restart_killed: bool = key(True, "start a killed broker or learner again and go on with the run; false: it ends")
    disk_patience_s: float = key(
        30.0, "how long a failed write of journal, weights or last checkpoint is tried again, seconds", ge=0
    )
    task: Literal["train", "pretrain_value"] = key("train", "pretrain_value: train only a critic; set by the command")


class ModelSection(Section):
    """The model folder (Hugging Face layout, safetensors only) and how it is held by the learner."""

    path: FilePath = Field(description="folder with config.json, *.safetensors, tokenizer and chat template")
    chat_template: FilePath | None = key(None, "file with a chat template; default: the folder's own")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as enable_thinking or reasoning_effort"
    )
    reasoning: Literal["keep", "template"] = key(
        "keep",
        "earlier reasoning in the context; keep: as sampled; template: gone when the chat template leaves it out, and "
        "a new segment begins",
    )
    date: Day | None = key(None, "day that the chat template sees, YYYY-MM-DD; default: the run's first")
    dtype: Literal["float32", "bfloat16", "float64"] = key("float32", "learner parameter type")
    activation_checkpointing: bool = key(False, "keep only inputs of decoder layers, compute the rest again backward")
    attention: Literal["auto", "sdpa", "flex_attention", "flash_attention_2"] = key(
        "auto", "attention of the learner; auto: the best that is installed for its device, see `sao doctor`"
    )


class EnvSection(Section):
    """The environment, by registered name, and its limits."""

    name: str = Field(description="registered name, see `sao doctor`")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    max_turns: Count = key(8, "assistant turns after which a rollout is truncated")
    success_reward: float = key(1.0, "an episode counts as a success from this reward on")
    train_tasks: int | None = key(None, "different training tasks, repeated in order; default: never again", ge=1)
    step_timeout_s: Positive = key(60.0, "deadline of one reset or step, seconds")
    episode_timeout_s: float | None = key(None, "wall clock that truncates a rollout (`time_limit`), seconds", gt=0)
    at_time_limit: Literal["train", "bootstrap", "drop"] = key(
        "train",
        "a rollout cut by the wall clock, which is no wrong answer; train: like any truncated one; bootstrap: the"
        " critic's value of its last state follows; drop: a failure (`time_limit`), not trained",
    )
    concurrency: int | None = key(None, "environment calls or agents at once per generator; default: any", ge=1)


class SamplingSection(Section):
    """Sampling of the policy. Only temperature may shape training samples."""

    temperature: float = key(1.0, "of training rollouts; 1 is the model's own distribution", gt=0, le=10)
    max_response_tokens: Count = key(256, "sampled tokens per turn at most")
    context_tokens: int = key(2048, "context window of the engine, tokens", ge=8)
    top_p: float = key(1.0, "must be 1: the behaviour policy must be the one that is scored", ge=1, le=1)
    top_k: Literal[0] = key(0, "must be 0 (off)")
    repetition_penalty: float = key(1.0, "must be 1 (off)", ge=1, le=1)


class GeneratorSection(Section):
    """Generator processes."""

    count: int = key(2, "generators of `sao train`, each with its own engine and GPUs; 0: all join", ge=0, le=256)
    engine: Literal["torch", "vllm", "scripted"] = key(
        "torch", "torch: in-process transformers model; vllm: vLLM (the extra `vllm`); scripted: a test double"
    )
    concurrency: Count = key(64, "episodes in flight per generator, at most")
    load_control: bool = key(True, "fewer episodes while the engine's KV cache is full or requests queue")
    threads: Count = key(1, "CPU threads per generator process")
    agents_bind: str = key("127.0.0.1:0", "HOST:PORT of the agents' endpoint; port 0: any", pattern=r"^.+:\d+$")
    vllm_args: dict[str, Any] = Field(
        default_factory=dict,
        description="passed to vLLM's engine arguments; kv_after_update, lora_rank: see `docs/explanation/vllm.md`",
    )


class AlgorithmSection(Section):
    """SAO: direct double-sided importance sampling, value and advantage (`docs/reference/algorithms.md`)."""

    preset: (
        Literal["sao", "sao_code", "sao_full_critic", "sao_one_value_update", "sao_with_observations", "sao_lambda_1"]
        | Literal["compaction_rl", "ppo", "vapo", "grpo", "grpo_dis", "tis", "running_mean", "prompt_mean"]
        | None
    ) = key(None, "all settings of a method at once, see `docs/reference/algorithms.md`; keys beside it win")
    estimator: Literal["sao", "vapo", "grpo", "running_mean", "prompt_mean"] = key(
        "sao",
        "advantages: sao, vapo: GAE with a critic; grpo: of the group; running_mean, prompt_mean: reward minus the mean"
        " of the last rewards, of all tasks or of the same task",
        paper="SAO, 3.2",
    )
    group_size: Count = key(1, "rollouts of the same task, trained together; sao: 1, grpo: 2 or more", paper="SAO, 4.1")
    policy_loss: Literal["dis", "ppo", "tis"] = key(
        "dis", "dis: out-of-band tokens get weight 0; ppo: clip; tis: weights cut at the upper edge", paper="SAO, 3.1"
    )
    old_logprobs: Literal["rollout", "recomputed"] = key(
        "rollout",
        "denominator of the ratio: as the engine logged, or (ppo) computed at the step's start",
        paper="SAO, 3.1",
    )
    eps_low: float = key(
        0.3,
        "lower band edge is 1 - eps_low (dis: strict; tis: unused); default: ppo 0.2, else 0.3",
        gt=0,
        lt=1,
        paper="SAO, 4.1, mathematics",
    )
    eps_high: Positive = key(
        5.0,
        "upper band edge is 1 + eps_high (dis: strict); default: dis 5.0, ppo 0.2, tis 1.0",
        paper="SAO, 4.1, mathematics",
    )
    positive_weight: float = key(0.0, "vapo: weight of the log-likelihood loss on successful rollouts", ge=0)
    baseline_window: Count = key(128, "running_mean: last rewards that make the mean", paper="SAO, 4.5")
    prompt_window: Count = key(8, "prompt_mean: last rewards of the same task that make the mean", paper="SAO, 4.3")
    denominator: Literal["all", "kept", "trajectory", "segment"] = key(
        "all",
        "policy loss mean over all action tokens, tokens in the band, per-trajectory or per-segment means",
        paper="CompactionRL, eq. 12",
    )
    gamma: float = key(1.0, "discount per action token", gt=0, le=1)
    lambda_policy: Annotated[float, Field(ge=0, le=1)] | Literal["adaptive"] = key(
        "adaptive",
        "GAE lambda of the policy: a number in [0, 1], or 1 - 1/(lambda_alpha * action tokens)",
        paper="SAO, 4.1",
    )
    lambda_alpha: Positive = key(1.5, "alpha of the length-adaptive lambda_policy", paper="SAO, 4.1")
    lambda_critic: float = key(1.0, "GAE lambda of the critic's targets", ge=0, le=1, paper="SAO, 4.1")
    skip_observations: bool = key(True, "GAE over action tokens only; off: every position is a step", paper="SAO, 3.2")
    cross_segment: Literal["paper", "chained", "none"] = key(
        "paper", "credit across compactions", paper="CompactionRL, eq. 14"
    )
    advantage_values: Literal["before", "after"] = key("before", "critic values of before or after this step's passes")
    whiten_advantages: bool = key(False, "zero mean and unit variance over the step's action tokens")
    bootstrap_truncated: bool = key(False, "value of the last state instead of 0 at a truncation")

    @model_validator(mode="before")
    @classmethod
    def _band_of_the_loss(cls, data: Any) -> Any:
        """A band that is not given is that of the loss, never another's."""
        if not isinstance(data, dict):
            return data
        loss = data.get("policy_loss")
        bands = {"ppo": {"eps_low": 0.2, "eps_high": 0.2}, "tis": {"eps_high": 1.0}}
        return {**bands.get(loss if isinstance(loss, str) else "", {}), **data}

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.estimator in ("sao", "vapo")


class CompactionSection(Section):
    """Rollouts that outlive their context window (CompactionRL), see `docs/explanation/compaction.md`."""

    enabled: bool = key(False, "off: a rollout ends when its context is full")
    threshold_tokens: int | None = key(
        None,
        "compact when fewer tokens than this are left after an observation (paper: 10240); default: what a response, an"
        " observation, the summary request and a summary have at most: nothing is ever cut",
        ge=1,
    )
    max_compactions: Count = key(
        3, "per rollout; when another is due the rollout is truncated", paper="CompactionRL, 5.1"
    )
    keep_steps: Natural = key(
        2, "k: newest steps carried over word for word, fewer if they do not fit", paper="CompactionRL, eq. 9"
    )
    max_summary_tokens: Count = key(4096, "sampled tokens of a summary at most (the paper's have 2100 to 2400)")
    observation_cap_tokens: Count = key(512, "tokens of an observation at most, chat markup included")
    small_threshold: bool = key(
        False,
        "permit a threshold_tokens below that; where the summary then has no room, the newest steps are rolled back",
    )
    clip: bool = key(False, "cut an observation that is longer than its cap or leaves no room for the summary request")
    keep_task_prompt: bool = key(
        False,
        "repeat the task's messages after a compaction; off (paper): the system prompt",
        paper="CompactionRL, eq. 9",
    )
    merge_summary: bool = key(
        False,
        "summary in one row with the steps before it; off (paper): a row of its own",
        paper="CompactionRL, eq. 10",
    )
    train_summaries: bool = key(
        True, "off: no summary rows in losses, advantages and the distance to the end", paper="CompactionRL, eq. 10"
    )
    summariser: FilePath | None = key(
        None, "model of a fixed summariser, same tokenizer; default: the policy itself", paper="CompactionRL, eq. 8"
    )
    prompt: Literal["summary_v1"] = key("summary_v1", "shipped template of the summary request")
    prompt_file: FilePath | None = key(None, "own text of the summary request instead")
    resume: Literal["resume_v1"] = key("resume_v1", "shipped template of the message after a compaction")
    resume_file: FilePath | None = key(None, "own template instead; holds {summary} once")


class LearnerSection(Section):
    """The learner: ranks, batch, optimizers, critic."""

    ranks: Count = key(1, "torchrun processes")
    threads: Count = key(1, "CPU threads per rank")
    batch_trajectories: Count = key(128, "trajectories per optimizer step", paper="both, 4.1 and 5.1")
    row_tokens: int = key(4096, "longest row of segments, tokens", ge=8)
    rows_per_micro_batch: Count = key(8, "rows of that length per forward pass")
    policy_lr: float = key(1e-6, "peak learning rate of the policy (AdamW)", ge=0, paper="SAO, 4.1")
    critic_lr: float = key(5e-6, "peak learning rate of the critic (AdamW)", ge=0, paper="SAO, 4.1")
    policy_lr_warmup_steps: Natural = key(0, "linear warm-up of the policy's rate, steps that update the policy")
    critic_lr_warmup_steps: Natural = key(0, "linear warm-up of the critic's rate, steps that update the critic")
    lr_decay: Literal["constant", "linear"] = key("constant", "linear: to 0 at run.steps")
    weight_decay: float = key(0.0, "decoupled weight decay of both optimizers", ge=0)
    betas: tuple[Beta, Beta] = key((0.9, 0.95), "Adam's betas, each in [0, 1)", strict=False)
    grad_clip: Positive = key(1.0, "largest gradient norm, policy and critic each")
    policy_passes: Count = key(1, "policy updates per batch; more than 1 only with policy_loss = ppo")
    critic_passes: Count = key(2, "K: critic updates per policy update", paper="both, 4.1 and 5.1")
    critic_warmup_steps: Natural = key(10, "first steps in which only the critic is updated", paper="SAO, 4.1")
    critic_frozen: Literal["attention", "none"] = key(
        "attention", "parameters of the critic that stay", paper="SAO, 3.2"
    )
    critic_path: FilePath | None = key(None, "critic to start from; default: the policy with a zero head")
    value_loss: Literal["mse", "clipped"] = key(
        "mse",
        "clipped: the larger of the squared errors of V and of V within value_clip of its old value",
        paper="SAO, 2",
    )
    value_clip: Positive = key(0.2, "clipped: distance from V at the start of the step")
    logprob_chunk_tokens: Count = key(1024, "action tokens whose logits exist at once, also backward")
    offload_optimizer: bool = key(False, "parameters and optimizer state in CPU memory between passes; needs a GPU")
    max_skipped_in_a_row: Count = key(5, "skipped steps in a row (non-finite, empty) that stop the run")
    save_every_steps: Natural = key(0, "0: only at the end")
    checkpoints_kept: Count = key(2, "newest checkpoints that stay on disk")
    deterministic: bool = key(False, "deterministic torch kernels: reproducible, slower")


class LoraSection(Section):
    """LoRA: small factors are trained, the model itself stays (`docs/how-to/lora.md`)."""

    rank: Natural = key(0, "r: columns of the factors; 0: all parameters are trained")
    alpha: Positive = key(32.0, "the additions are scaled by alpha / rank")
    targets: Literal["all"] | list[str] = key(
        "all", "last names of the adapted linear layers; all: every one inside decoder layers except routers"
    )
    critic: Literal["adapter", "full"] = key(
        "adapter", "adapter: a second adapter and a head on the policy's own base; full: a model of its own"
    )
    policy_lr: float | None = key(None, "peak rate of the policy's adapter; default: learner.policy_lr", ge=0)
    critic_lr: float | None = key(None, "peak rate of the critic's adapter; default: learner.critic_lr", ge=0)


class ValuePretrainingSection(Section):
    """`sao pretrain-value`: when the critic has learned enough. Its explained variance is that of batches that it has
    not been trained on yet, over the last `window` of them.
    """

    steps: Count = key(50, "batches at most", paper="CompactionRL, 5.1")
    target: float | None = key(None, "stop when the explained variance reaches this", gt=0, lt=1)
    window: Count = key(5, "batches over which the explained variance is measured")
    patience: int | None = key(None, "stop after this many batches without a gain of `min_gain`; default: go on", ge=1)
    min_gain: float = key(0.01, "smallest gain of explained variance that counts", ge=0)


class StalenessSection(Section):
    """Staleness: how far behind a token's policy version may be, and what happens beyond."""

    max_lag: Natural = key(4, "largest lag in policy versions at which a rollout may start; see `stale`")
    stale: Literal["keep", "mask", "drop"] = key(
        "keep",
        "tokens beyond max_lag: keep: DIS alone decides (as SAO); mask: no policy loss; drop: nor the rollout",
        paper="SAO, 3.1",
    )
    order: Literal["completion", "window"] = key(
        "completion", "completion: trained as they finish; window: in task order, no token exceeds max_lag"
    )


class BufferSection(Section):
    """The broker's buffer."""

    max_trajectories: Count = key(4096, "finished trajectories held at most")
    max_bytes: int = key(1 << 30, "bytes held at most", ge=1 << 16)
    durability: Literal["off", "process", "machine"] = key(
        "process", "what finished rollouts survive: off: nothing; process: the broker's death; machine: a power cut"
    )
    prefix_bytes: Natural = key(1 << 26, "turns of running rollouts, kept to go on after a generator's death; 0: none")
    ledger_growth_bytes: Natural = key(
        1 << 24, "bytes the journal may grow by before steps older than every checkpoint are summed up; 0: never"
    )


class EvalSection(Section):
    """Held-out evaluation during training."""

    every_steps: Natural = key(20, "optimizer steps between two evaluations; 0: never")
    episodes: Count = key(128, "held-out episodes of one evaluation")
    temperature: float = key(1.0, "of evaluation episodes; 0: greedy", ge=0, le=10)


class TransportSection(Section):
    """Sockets and deadlines."""

    bind: str = key("ipc", "ipc (private folder) or tcp://HOST:PORT", pattern=r"^(ipc|tcp://.+:\d+)$")
    keys: FilePath | None = key(None, "folder of CURVE keys (`sao keys`): over tcp only their owners join")
    allow_remote: bool = key(False, "permit other addresses than loopback without keys, in the clear")
    weights_bind: str | None = key(
        None,
        "tcp://HOST:PORT where the learner serves weights to other hosts; host *: every interface, for a learner on the"
        " broker's host",
        pattern=r"^tcp://.+:\d+$",
    )
    max_message_bytes: int = key(1 << 28, "a larger frame is refused before it is read", ge=1 << 16, lt=1 << 32)
    heartbeat_s: Positive = key(1.0, "time between two signs of life, seconds")
    peer_timeout_s: Positive = key(15.0, "a peer silent for this long is gone, seconds")
    outage_s: float = key(300.0, "how long peers wait for a broker that is away, seconds; 0: not", ge=0)
    rollout_timeout_s: Positive = key(3600.0, "a rollout older than this is given up, seconds")
    shutdown_s: Positive = key(10.0, "time to end in order before processes are killed, seconds")

    @model_validator(mode="after")
    def _sockets(self) -> Self:
        faults = []
        for key, address in (("bind", self.bind), ("weights_bind", self.weights_bind)):
            if address in (None, "ipc"):
                continue
            try:
                host, port = addresses.split(str(address))
            except ValueError as error:
                faults.append(f"{key}: {error}")
                continue
            if port == 0:
                faults.append(f"{key}: port 0 is not in 1..65535")
            if not addresses.is_loopback(host) and self.keys is None and not self.allow_remote:
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

    tensorboard: bool = key(True, "TensorBoard files, where tensorboard is installed (extra `tracking`)")
    wandb: bool = key(False, "Weights & Biases; needs the package wandb")
    trackio: bool = key(False, "Trackio, on this machine; needs the package trackio")
    prometheus_port: int | None = key(None, "port on 127.0.0.1 for Prometheus (extra `tracking`)", ge=1, le=65535)
    live: bool = key(True, "live view when the output is a terminal")
    keep_trajectories: Natural = key(0, "newest steps kept for `sao inspect` and `sao replay`; 0: none")
    max_logprob_gap: float | None = key(
        None,
        "mean distance of the learner's log-probs from the engine's at lag 0 above which the run warns, nats; default:"
        " 0.02, with model.dtype = bfloat16 0.05",
        gt=0,
    )
    plot: bool = key(
        True, "curves.png and report.html at the end, where matplotlib and dygraphs are installed (extra `tracking`)"
    )
