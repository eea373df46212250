"""The whole configuration of a run: what its sections may be together, and how it is read and written.

A file is TOML; the resolved configuration, which every actor reads, is JSON. An unknown key, a value out of range or a
combination that makes no sense is refused before anything starts, and all faults are listed at once. Defaults that are
values of the papers (SAO arXiv 2607.07508, CompactionRL arXiv 2607.05378) say where they are from; the others are ours.
"""

import copy
import datetime
import itertools
import json
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import ValidationError, model_validator

from sao.config import addresses, estimators, presets, sections
from sao.config.explain import explain
from sao.errors import ConfigError
from sao.storage import durable


class Config(sections.Section):
    """A whole run. A rule that compares sections and needs nothing but the file has its only home here; what needs the
    model, the machine or the run's folder is looked at by `sao.runtime.preflight`.
    """

    run: sections.RunSection = sections.RunSection()
    model: sections.ModelSection
    env: sections.EnvSection
    sampling: sections.SamplingSection = sections.SamplingSection()
    generator: sections.GeneratorSection = sections.GeneratorSection()
    algorithm: sections.AlgorithmSection = sections.AlgorithmSection()
    compaction: sections.CompactionSection = sections.CompactionSection()
    learner: sections.LearnerSection = sections.LearnerSection()
    lora: sections.LoraSection = sections.LoraSection()
    value_pretraining: sections.ValuePretrainingSection = sections.ValuePretrainingSection()
    staleness: sections.StalenessSection = sections.StalenessSection()
    buffer: sections.BufferSection = sections.BufferSection()
    eval: sections.EvalSection = sections.EvalSection()
    transport: sections.TransportSection = sections.TransportSection()
    telemetry: sections.TelemetrySection = sections.TelemetrySection()

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return presets.fill(data)

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        rules = estimators.faults(self.run, self.env, self.algorithm, self.learner, self.staleness)
        sections.refuse([*self._faults(), *rules])
        return self

    def _faults(self) -> Iterator[str]:
        run, learner, sampling, compaction = self.run, self.learner, self.sampling, self.compaction
        warmup, context, batch = learner.critic_warmup_steps, sampling.context_tokens, learner.batch_trajectories
        response, held = sampling.max_response_tokens, self.buffer.max_trajectories
        if run.task == "train" and self.algorithm.has_critic and warmup >= run.steps:
            yield f"learner.critic_warmup_steps: {warmup} leaves no policy step in run.steps = {run.steps}"
        if response >= context:
            yield f"sampling.max_response_tokens: {response} must be below sampling.context_tokens = {context}"
        if learner.row_tokens < context:
            yield f"learner.row_tokens: {learner.row_tokens} must be at least sampling.context_tokens = {context}"
        if held < batch:
            yield f"buffer.max_trajectories: {held} must be at least learner.batch_trajectories = {batch}"
        if run.target_success is not None and self.eval.every_steps == 0:
            yield f"run.target_success: {run.target_success} needs held-out evaluation, but eval.every_steps = 0"
        if self.model.attention == "flash_attention_2" and self.model.dtype != "bfloat16":
            yield f"model.attention: flash_attention_2 needs model.dtype = bfloat16 (got {self.model.dtype})"
        lora = self.lora
        changed = [name for name, field in type(lora).model_fields.items() if getattr(lora, name) != field.default]
        if not lora.rank and changed:
            yield f"lora.{changed[0]}: has no effect with lora.rank = 0"
        if lora.rank and not self.algorithm.has_critic and {"critic", "critic_lr"} & {*changed}:
            yield f"lora.critic: has no effect with algorithm.estimator = {self.algorithm.estimator}, without a critic"
        if lora.critic == "full" and lora.critic_lr is not None:
            yield "lora.critic_lr: has no effect with critic = full; use learner.critic_lr"
        if lora.targets == []:
            yield "lora.targets: names no layer"
        yield from self._agents_address()
        yield from self._same_port()
        if compaction.enabled:
            yield from self.compaction_threshold(1)[1]  # how long the request really is, only the tokenizer knows
            if compaction.merge_summary and not compaction.train_summaries:
                yield "compaction.train_summaries: false needs summaries in rows of their own (merge_summary = false)"
            if compaction.summariser is not None and self.generator.engine == "scripted":
                yield "compaction.summariser: the scripted engine has no model"

    def _agents_address(self) -> Iterator[str]:
        count = self.generator.count
        if not count and self.transport.bind == "ipc":
            yield "generator.count: 0 needs generators from elsewhere; set transport.bind to tcp://HOST:PORT"
        try:
            host, port = addresses.split(self.generator.agents_bind)
        except ValueError as error:
            yield f"generator.agents_bind: {error}"
            return
        if port and count > 1:
            yield f"generator.agents_bind: port {port} is for one generator, but generator.count = {count}; 0: any port"
        if not addresses.is_loopback(host) and not self.transport.allow_remote:
            permit = "set transport.allow_remote = true to permit it"
            yield f"generator.agents_bind: {host} is not a loopback address; {permit}"

    def _same_port(self) -> Iterator[str]:
        port = self.telemetry.prometheus_port
        listening = {
            "transport.bind": self.transport.bind,
            "transport.weights_bind": self.transport.weights_bind,
            "generator.agents_bind": self.generator.agents_bind,
            "telemetry.prometheus_port": port and f"127.0.0.1:{port}",
        }
        listening = {field: address for field, address in listening.items() if address and address != "ipc"}
        for (field, address), (other, also) in itertools.combinations(listening.items(), 2):
            with suppress(ValueError):  # what is no address is said already
                if addresses.overlap(str(address), str(also)):
                    yield f"{other}: {also}: nobody else can listen there, {field} = {address} does"

    def prompt_of(self, ordinal: int) -> int:
        """Number of the training task that rollout `ordinal` plays: the same for a group, and again after all tasks."""
        prompt = ordinal // self.algorithm.group_size
        return prompt if self.env.train_tasks is None else prompt % self.env.train_tasks

    def compaction_threshold(self, request_tokens: int) -> tuple[int, list[str]]:
        """T of compaction, tokens, and what is wrong with it: the default is the least that holds a turn, an
        observation, the summary request of `request_tokens` and a summary.
        """
        compaction, context = self.compaction, self.sampling.context_tokens
        caps = {
            "sampling.max_response_tokens": self.sampling.max_response_tokens,
            "compaction.observation_cap_tokens": compaction.observation_cap_tokens,
            "the summary request": request_tokens,
            "compaction.max_summary_tokens": compaction.max_summary_tokens,
        }
        needed, faults = sum(caps.values()), []
        threshold = compaction.threshold_tokens or needed
        if threshold < needed and not (compaction.small_threshold or compaction.clip):
            parts = " + ".join(f"{name} = {value}" for name, value in caps.items())
            faults.append(
                f"compaction.threshold_tokens: {threshold} must be at least {needed}: {parts}; or one turn can leave no"
                " room for the summary; set compaction.small_threshold = true to permit it"
            )
        if threshold >= context:
            source = "" if compaction.threshold_tokens else " (from the caps)"
            faults.append(
                f"compaction.threshold_tokens: {threshold}{source} must be below sampling.context_tokens = {context}"
            )
        return threshold, faults

    @property
    def published_dtype(self) -> str:
        """The type of published weights: the learner's; merged adapters come in float32 at least, since 16 bits round
        small ones away.
        """
        return "float32" if self.lora.rank and self.model.dtype == "bfloat16" else self.model.dtype

    @property
    def logprob_gap_limit(self) -> float:
        """`telemetry.max_logprob_gap`, or its default for the learner's type, nats."""
        return self.telemetry.max_logprob_gap or (0.05 if self.model.dtype == "bfloat16" else 0.02)

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.run.dir) / self.run.name


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a run file (TOML), or what `save` wrote (`.json`), and applies overrides, see `parse`.

    Touches nothing. Raises `ConfigError` that lists all faults, with line and column where the file itself is broken.
    """
    path = Path(path)
    syntax, decode = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        data = decode(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid {syntax}: byte {error.start} is not UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {syntax}: {error}") from None
    return parse(data, overrides, source=str(path))


def save(config: Config, path: Path) -> None:
    """Writes the resolved configuration as JSON; every actor of the run reads this file."""
    durable.write_text(path, json.dumps(config.model_dump(mode="json"), indent=2) + "\n")


def parse(data: dict[str, Any], overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Builds a `Config` from plain data, in which overrides are put first: `section.key=value`, the value in TOML
    syntax, bare words are strings; `none` unsets a key that may be unset. Raises `ConfigError` that lists all faults.
    """
    data = copy.deepcopy(data)
    faults = [fault for item in overrides if (fault := _override(data, item))]
    try:
        config = Config.model_validate(data)
    except ValidationError:
        faults += [f"{source}: {fault}" for fault in explain(Config, data)]
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def toml_override(key: str, text: str) -> str:
    """The override that sets `key` to a text, whatever is in it."""
    return f"{key}={json.dumps(text, ensure_ascii=False)}".replace("\x7f", "\\u007f")


def _override(data: dict[str, Any], item: str) -> str | None:
    """Puts one override in; returns what is wrong with it."""
    key, equals, text = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return f"override {item!r}: expected section.key=value"
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"]
        if len(parsed) > 1 or isinstance(value, datetime.date | datetime.time):
            value = text.strip()
    except tomllib.TOMLDecodeError:
        value = None if text.strip() == "none" and _may_be_none(*parts) else text.strip()
    whole = data
    for part in parts[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            return f"override {item!r}: {part} is a value, not a section"
    data[parts[-1]] = value
    if parts == ["algorithm", "preset"]:
        presets.replace_method(whole)
    return None


def _may_be_none(section: str, key: str = "", *_: str) -> bool:
    """Whether a key may be without a value."""
    found = Config.model_fields.get(section)
    keys: dict[str, Any] = found.annotation.model_fields if found is not None else {}  # type: ignore[union-attr]
    return key in keys and type(None) in get_args(keys[key].annotation)
