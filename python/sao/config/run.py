"""The configuration of a run: TOML in, one strict model out.

Every field has a unit in its name or its description, a default and a range; an unknown key, a value out of range or a
combination that makes no sense is refused before anything starts, and all faults are listed at once.
Defaults are the values of the papers (SAO arXiv 2607.07508, CompactionRL arXiv 2607.05378) where they give one.
"""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from sao.config import estimators, explain
from sao.config.sections import (
    AlgorithmSection,
    BufferSection,
    CompactionSection,
    EnvSection,
    EvalSection,
    GeneratorSection,
    LearnerSection,
    ModelSection,
    RunSection,
    SamplingSection,
    Section,
    StalenessSection,
    TelemetrySection,
    TransportSection,
    ValuePretrainingSection,
    is_loopback,
    refuse,
)
from sao.errors import ConfigError


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection
    env: EnvSection
    sampling: SamplingSection = SamplingSection()
    generator: GeneratorSection = GeneratorSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    compaction: CompactionSection = CompactionSection()
    learner: LearnerSection = LearnerSection()
    value_pretraining: ValuePretrainingSection = ValuePretrainingSection()
    staleness: StalenessSection = StalenessSection()
    buffer: BufferSection = BufferSection()
    eval: EvalSection = EvalSection()
    transport: TransportSection = TransportSection()
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        run, learner, sampling = self.run, self.learner, self.sampling
        warmup, context, batch = learner.critic_warmup_steps, sampling.context_tokens, learner.batch_trajectories
        wrong = {
            f"learner.critic_warmup_steps: {warmup} leaves no policy step in run.steps = {run.steps}": warmup
            >= run.steps
            and run.task == "train"
            and self.algorithm.has_critic,
            f"sampling.max_response_tokens: {sampling.max_response_tokens} must be below sampling.context_tokens"
            f" = {context}": sampling.max_response_tokens >= context,
            f"learner.row_tokens: {learner.row_tokens} must be at least sampling.context_tokens"
            f" = {context}": learner.row_tokens < context,
            f"buffer.max_trajectories: {self.buffer.max_trajectories} must be at least learner.batch_trajectories"
            f" = {batch}": self.buffer.max_trajectories < batch,
            f"run.target_success: {run.target_success} needs held-out evaluation, but eval.every_steps"
            " = 0": run.target_success is not None and self.eval.every_steps == 0,
        }
        host = self.generator.agents_bind.rpartition(":")[0]
        wrong[
            f"generator.agents_bind: {host} is not a loopback address; set transport.allow_remote = true to permit it"
        ] = not is_loopback(host) and not self.transport.allow_remote
        found = [text for text, applies in wrong.items() if applies]
        refuse(
            found
            + self._compaction_faults()
            + estimators.faults(run, self.env, self.algorithm, learner, self.staleness)
        )
        return self

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
        if threshold < needed and not compaction.clip:
            parts = " + ".join(f"{name} = {value}" for name, value in caps.items())
            faults.append(
                f"compaction.threshold_tokens: {threshold} must be at least {needed}: {parts}; or one turn can leave no"
                " room for the summary; set compaction.clip = true to permit it"
            )
        if threshold >= context:
            source = "" if compaction.threshold_tokens else " (from the caps)"
            faults.append(
                f"compaction.threshold_tokens: {threshold}{source} must be below sampling.context_tokens = {context}"
            )
        return threshold, faults

    def _compaction_faults(self) -> list[str]:
        compaction = self.compaction
        if not compaction.enabled:
            return []
        _, faults = self.compaction_threshold(1)  # the request's length is known with the tokenizer
        if compaction.merge_summary and not compaction.train_summaries:
            faults.append(
                "compaction.train_summaries: false needs summaries in rows of their own (merge_summary = false)"
            )
        if self.generator.engine == "scripted" and compaction.summariser is not None:
            faults.append("compaction.summariser: the scripted engine has no model")
        return faults

    @property
    def logprob_gap_limit(self) -> float:
        """`telemetry.max_logprob_gap`, or its default for the learner's type, nats."""
        default = 0.05 if self.model.dtype == "bfloat16" else 0.02
        return self.telemetry.max_logprob_gap or default

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.run.dir) / self.run.name


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file and applies `section.key=value` overrides (values in TOML syntax, bare words are strings).

    Touches nothing. Raises `ConfigError` that lists all faults, with line and column where the TOML itself is broken.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: byte {error.start} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    faults = []
    try:
        data = overridden(data, overrides)
    except ConfigError as error:
        faults.append(str(error))
    try:
        parsed = parse(data, source=str(path))
    except ConfigError as error:
        faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return parsed


def overridden(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Plain data with `section.key=value` overrides, in place. Raises `ConfigError` that lists those it cannot read."""
    faults = []
    for item in overrides:
        try:
            _override(data, item)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return data


def parse(data: dict[str, Any], source: str = "config") -> Config:
    """Builds a `Config` from plain data. Raises `ConfigError` that lists all faults."""
    try:
        return Config.model_validate(data)
    except ValidationError:
        faults = explain.explain(Config, data)
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults)) from None


def save(config: Config, path: Path) -> None:
    """Writes the resolved configuration as JSON; every actor of the run reads this file."""
    path.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")


def load_resolved(path: Path) -> Config:
    """Reads what `save` wrote. Raises `ConfigError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse(data, source=str(path))


def _override(data: dict[str, Any], item: str) -> None:
    key, equals, text = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {item!r}: expected section.key=value")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"]
        if len(parsed) > 1 or isinstance(value, datetime.date | datetime.time):
            value = text.strip()
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {item!r}: {part} is a value, not a section")
    data[parts[-1]] = value
