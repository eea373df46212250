"""The parts of a generator, made from the configuration; none of them is started."""

from __future__ import annotations

from sao.config import Config
from sao.engines.base import Engine
from sao.engines.group import EngineGroup
from sao.engines.seeds import derive_seed
from sao.errors import ConfigError
from sao.rollout.chat import Renderer


def make_renderer(config: Config) -> Renderer:
    """The renderer of the model folder; for the scripted engine one that needs no tokenizer. Raises `ConfigError`."""
    if config.generator.engine != "scripted":
        return Renderer(config.model.path)
    from sao.rollout.scripted_chat import ScriptedRenderer

    return ScriptedRenderer(config.model.path)


def make_engine(config: Config, renderer: Renderer, seed: int) -> Engine:
    """The engine that `generator.engine` names, not yet started; a group of them where `generator.engines` > 1."""
    count = config.generator.engines
    if count == 1:
        return _make_one(config, renderer, seed)
    return EngineGroup([_make_one(config, renderer, derive_seed(seed, "engine", k), k) for k in range(count)])


def _make_one(config: Config, renderer: Renderer, seed: int, index: int | None = None) -> Engine:
    generator, sampling = config.generator, config.sampling
    if generator.engine == "torch":
        from sao.engines.torch_engine import TorchEngine

        return TorchEngine(
            config.model.path,
            slots=generator.concurrency,
            context_tokens=sampling.context_tokens,
            seed=seed,
            threads=generator.threads,
        )
    if generator.engine == "vllm":
        from sao.engines.vllm_engine import VllmEngine

        return VllmEngine(
            config.model.path,
            context_tokens=sampling.context_tokens,
            threads=generator.threads,
            concurrency=generator.concurrency,
            seed=seed,
            vllm_args=generator.vllm_args,
            index=index,
        )
    from sao.engines.scripted import ScriptedEngine

    return ScriptedEngine(vocab_size=renderer.vocab_size, seed=seed, record=False)


def make_summariser(config: Config, renderer: Renderer, seed: int) -> Engine | None:
    """The engine of `compaction.summariser`, not yet started; None when the policy writes its summaries itself.

    Raises `ConfigError` when its tokenizer is not the policy's: it is given the policy's token ids.
    """
    path = config.compaction.summariser
    if path is None or not config.compaction.enabled:
        return None
    if not renderer.same_tokens(Renderer(path)):
        raise ConfigError(
            f"compaction.summariser: {path}: its tokenizer is not that of model.path = {config.model.path}"
        )
    model = config.model.model_copy(update={"path": path})
    return make_engine(config.model_copy(update={"model": model}), renderer, derive_seed(seed, "summariser"))
