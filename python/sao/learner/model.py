"""Policy and critic: a causal language model with its head, and the same backbone with a scalar head.

Both read rows of segments, laid out as `layout` finds it exact for the model, and compute their head only at the
positions asked for. Dropout is off: what is scored must be what was sampled.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from sao.algorithms.logprob import score
from sao.config import Config
from sao.errors import ConfigError, WeightsError
from sao.learner import lora
from sao.learner.attention import EAGER, SDPA, choose
from sao.learner.backbone import body_of, head_of
from sao.learner.batch import MicroBatch
from sao.learner.layout import Layout, find_layout
from sao.learner.world import World
from sao.storage import model_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
CRITIC_FILE = model_folder.CRITIC
HEAD_FILE = "head.safetensors"  # beside a critic's adapter

# A token mixer, by the last part of its module name or by its class; norms that are only named after one are not.
_MIXER_NAME = re.compile(r"(^|_)(attn|attention|mamba|linear_attn|token_mixer|mixer)$")
_FEED_FORWARD_CLASS = re.compile(r"(MLP|Mlp|MoE|MOE|Moe|Experts|FeedForward)$")  # `mixer` is their name in some hybrids
_MIXER_CLASS = re.compile(r"(Attention|Attn|Mixer|DeltaNet|ShortConv)(2D|Block)?$")


class _Model(nn.Module):
    """What one optimizer trains. `through`: called in its stead, where it shares a base."""

    part = ""
    through: Any = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return (self.through or super().__call__)(*inputs, **options)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are its own and not frozen."""
        named = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: named[name] for name in lora.own(named, self.part)}


class Policy(_Model):
    """A causal language model that scores the action tokens of a micro-batch."""

    part = "policy"

    def __init__(self, lm: Any, layout: Layout | None = None) -> None:
        super().__init__()
        self.lm, self.layout = lm.eval(), layout or Layout()
        self.vocabulary = int(lm.get_input_embeddings().weight.shape[0])  # token ids that it knows

    def forward(
        self, batch: MicroBatch, chosen: Tensor | None = None, *, chunk_tokens: int = 1024
    ) -> tuple[Tensor, Tensor]:
        """Log-probs (differentiable) and entropies of the n action tokens of `batch` (or those of bool[n] `chosen`).

        Both float32[n] or better, under each token's own temperature. `chunk_tokens`: see `algorithms.logprob.score`.
        """
        rows, columns, ids, temperatures = batch.state_rows, batch.state_columns, batch.action_ids, batch.temperatures
        if chosen is not None:
            rows, columns, ids, temperatures = rows[chosen], columns[chosen], ids[chosen], temperatures[chosen]
        output = body_of(self.lm)(**batch.inputs, use_cache=False)
        hidden = output.last_hidden_state[rows, columns]
        head = partial(head_of, self.lm, output)
        return score(head, hidden, token_ids=ids, temperatures=temperatures, chunk_tokens=chunk_tokens)


class Critic(_Model):
    """The backbone of a language model with a linear scalar head (with bias), zero until it is trained."""

    part = "critic"

    def __init__(self, backbone: Any, layout: Layout | None = None) -> None:
        super().__init__()
        self.backbone, self.layout = backbone.eval(), layout or Layout()
        self.vocabulary = int(backbone.get_input_embeddings().weight.shape[0])  # token ids that it knows
        first = next(backbone.parameters())
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, device=first.device, dtype=first.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch, rows: Tensor, columns: Tensor) -> Tensor:
        """Values [m], float32 or better, of the states that end at positions (rows[i], columns[i])."""
        hidden = self.backbone(**batch.inputs, use_cache=False).last_hidden_state
        states = hidden[rows, columns].to(self.head.weight.dtype)  # on a base in 16 bits
        values = self.head(states).squeeze(-1).clone()  # FSDP hooks do not like views
        return values if values.dtype == torch.float64 else values.float()


def load_models(config: Config, world: World) -> tuple[Policy | None, Critic | None]:
    """The policy and the critic that the run trains. Raises as the functions for one of them do."""
    train, has_critic = config.run.task == "train", config.algorithm.has_critic
    if not config.lora.rank:
        return load_policy(config, world) if train else None, load_critic(config, world) if has_critic else None
    adapters = has_critic and config.lora.critic == "adapter"
    wanted = [part for part, is_wanted in (("critic", adapters), ("policy", train)) if is_wanted]
    found = _load_on_one_base(config, world, wanted) if wanted else {}
    critic = load_critic(config, world) if has_critic and not adapters else found.get("critic")
    return found.get("policy"), critic


def _load_on_one_base(config: Config, world: World, wanted: list[str]) -> dict[str, Any]:
    """`model.path` in `model.dtype`, frozen, with an adapter for each model that is wanted, float32 or better."""
    path, critic_path = config.model.path, config.learner.critic_path
    lm, layout = _load(config, path, world, "model.path")
    models: dict[str, Any] = {}
    if "critic" in wanted:
        models["critic"] = Critic(body_of(lm), layout)
    if "policy" in wanted:
        models["policy"] = Policy(lm, layout)
    left_out: dict[str, set[str]] = {part: set() for part in models}
    if "critic" in models and config.learner.critic_frozen == "attention":
        left_out["critic"] = {name for name, _ in _mixers(lm)}
    turn = lora.inject(lm, _layers(lm), config.lora, config.run.seed, left_out)
    for parameter in lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[config.model.dtype])
    if "critic" in models and critic_path is not None:
        folder = Path(critic_path) / lora.FOLDERS["critic"]
        lora.read(folder, models["critic"], "critic", config.lora, "learner.critic_path")
        _load_into(models["critic"].head, folder / HEAD_FILE)
    root = shard(lora.OneBase(models, turn), config, world)
    for part, model in models.items():
        model.through = partial(root, part)
    return models


def load_policy(config: Config, world: World) -> Policy:
    """Loads `model.path` as a sharded policy. Raises `ConfigError` if it cannot be loaded, or no layout is exact."""
    return shard(Policy(*_load(config, config.model.path, world, "model.path")), config, world)


def load_critic(config: Config, world: World) -> Critic:
    """Loads the critic: `model.path` with a zero head, or `learner.critic_path`.

    `learner.critic_path` may be another model folder, a checkpoint of a run or a pretrained critic (then the head comes
    with it). Raises `ConfigError` or `WeightsError` naming the path.
    """
    critic_path, frozen = config.learner.critic_path, config.learner.critic_frozen
    source = Path(critic_path or config.model.path)
    trained = critic_path is not None and (source / CRITIC_FILE).exists()
    field = "learner.critic_path" if critic_path else "model.path"
    lm, layout = _load(config, source, world, field, weights=not trained)
    critic = Critic(body_of(lm), layout)
    if trained:
        _load_into(critic, source / CRITIC_FILE)
    elif critic_path is not None and (source / lora.FOLDERS["critic"]).is_dir():
        raise ConfigError(f"learner.critic_path: {source} holds a critic's adapter, which needs lora.rank")
    if frozen == "attention" and not freeze_attention(critic.backbone):
        raise ConfigError(f"learner.critic_frozen: no attention or token-mixer module found in {source}")
    return shard(critic, config, world)


def _load_into(module: nn.Module, file: Path) -> None:
    try:
        module.load_state_dict(load_file(file))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise WeightsError(f"{file}: {error}") from error


def freeze_attention(backbone: nn.Module) -> list[str]:
    """Stops the gradient of every parameter inside an attention or token-mixer module; returns their names.

    Modules are found by kind: last part of the name (`self_attn`, `linear_attn`, `mamba`, ...) or class
    (`...Attention`, `...Mixer`, `...DeltaNet`). Embeddings, norms outside, MLPs and experts stay trainable.
    """
    frozen = []
    for name, module in _mixers(backbone):
        for inner, parameter in module.named_parameters():
            parameter.requires_grad_(False)
            frozen.append(f"{name}.{inner}")
    return sorted(set(frozen))


def _mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        kind = type(module).__name__
        named = _MIXER_NAME.search(name.rpartition(".")[2]) and not _FEED_FORWARD_CLASS.search(kind)
        if named or _MIXER_CLASS.search(kind):
            yield name, module


def linear_cost(model: Policy | Critic) -> float:
    """Cost of a token in a model's layers beside attention, in units of a pair of tokens in attention, for the plan.

    Two floating-point operations for each of the P parameters of L layers, against 4 * width * L for a pair of tokens.
    Experts that a token does not use are counted too.
    """
    lm = model.lm if isinstance(model, Policy) else model.backbone
    layers = _layers(model)
    parameters = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return max(1.0, parameters / (2.0 * lm.config.get_text_config().hidden_size * max(1, len(layers))))


def shard(model: Any, config: Config, world: World) -> Any:
    """Moves a model to the rank's device and shards it with FSDP2: every decoder layer, then the rest.

    Gradients are summed over ranks, not averaged: a step divides once, by its global count. bfloat16 means float32
    parameters and optimizer state, with bfloat16 in the passes and float32 in the reduction. Without a process group
    (`World.alone`) the model is left as it is, all of it in `model.dtype`. One rank is sharded like many
    (`docs/decisions/learner-step.md`). Raises `ConfigError` for `learner.offload_optimizer` without a process group.
    """
    dtype, offload = config.model.dtype, config.learner.offload_optimizer
    model.to(world.device)
    layers = _layers(model)
    if config.model.activation_checkpointing:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if world.mesh is None:
        if offload:
            raise ConfigError("learner.offload_optimizer: needs the process group that `sao train` makes")
        return model if config.lora.rank else model.to(DTYPES[dtype])
    options: dict[str, Any] = {"mesh": world.mesh}
    if dtype == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _layers(model: nn.Module) -> list[Any]:
    groups = [list(group) for group in model.modules() if isinstance(group, nn.ModuleList)]
    named = [all(type(layer).__name__.endswith(("Layer", "Block")) for layer in group) for group in groups]
    return [layer for group, layers in zip(groups, named, strict=True) if layers for layer in group]


def _load(config: Config, path: str | Path, world: World, field: str, *, weights: bool = True) -> tuple[Any, Layout]:
    """The causal language model of a folder on the rank's device, and its layout; without `weights` a random one.

    Raises `ConfigError` if it cannot be loaded, or no layout is exact.
    """
    load, wanted = model_folder.load if weights else model_folder.empty, choose(config, world.device)
    held = torch.float32 if config.model.dtype == "bfloat16" else DTYPES[config.model.dtype]
    # Not every model can do with what its device can; only `auto` may be another one.
    for attention in dict.fromkeys([wanted, SDPA, EAGER] if config.model.attention == "auto" else [wanted]):
        try:
            lm = load(path, field, dtype=held, attn_implementation=attention)
            break
        except ConfigError as error:
            if attention == EAGER or config.model.attention != "auto" or "does not support" not in str(error):
                raise
    lm.eval().to(world.device)
    lm.config.output_router_logits = False  # of mixtures of experts: no loss of theirs is used
    if held == torch.float64:
        lm.set_experts_implementation("eager")  # torch multiplies groups in 32 and 16 bits only
    return lm, find_layout(lm, config.sampling.context_tokens, path, config.generator.engine)
