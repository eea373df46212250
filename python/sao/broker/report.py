"""The report of the broker: the metrics of a step, a snapshot, and everything that the run waits for. It only reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from sao.broker.evaluation import Evaluation
from sao.broker.leases import LeaseTable
from sao.broker.metrics import StepMeter
from sao.broker.run import Run
from sao.broker.scheduler import Scheduler
from sao.broker.store import ReadyStore
from sao.broker.tasks import TaskBook, TrainingTask
from sao.broker.versions import Versions
from sao.config import Config


@dataclass(frozen=True, slots=True)
class Report:
    """What the owners of the broker's state show together."""

    config: Config
    run: Run
    book: TaskBook
    store: ReadyStore
    versions: Versions
    scheduler: Scheduler
    leases: LeaseTable
    evaluation: Evaluation
    meter: StepMeter

    def step_metrics(self, now: float) -> dict[str, float]:
        """The broker's metrics of a step, all under `broker/`; rates, lags and ages are of the time since the last
        step.
        """
        tokens, counts, book = self.book.ledger.tokens(), self.book.ledger.counts(), self.book
        metrics: dict[str, float] = {
            **{f"broker/{name}": counts[name] for name in ("ready", "leased", "trained", "dropped")},
            "broker/running": len(book.running),
            "broker/queued": book.n_queued,
            "broker/permits": self.scheduler.permits(),
            "broker/free_slots": self.scheduler.free,
            "broker/buffer_bytes": self.store.stats()["bytes"],
            "broker/policy_version": self.versions.current,
            "broker/eval_rounds_skipped": self.evaluation.skipped,
            **{f"broker/tokens_{name}": tokens[name] for name in ("sampled", "trained", "masked", "held")},
            **{f"broker/tokens_dropped/{reason}": count for reason, count in tokens["dropped"].items()},
            **{f"broker/rollouts_dropped/{reason}": count for reason, count in book.dropped.items()},
        }
        return metrics | self.meter.step(now, tokens["sampled"]) | self._generator_metrics()

    def snapshot(self) -> dict[str, Any]:
        """Sizes of all queues and maps, and where tasks and tokens are."""
        book, evaluation = self.book, self.evaluation
        train = Counter(task.generator for task in book.running.values())
        evals = Counter(evaluation.open.values())
        return {
            "step": self.run.step,
            "version": self.versions.current,
            "permits": self.scheduler.permits(),
            "generators": {
                name: {"free": g.free, "train": train[name], "evals": evals[name], "loaded": g.loaded}
                for name, g in self.scheduler.generators.items()
            },
            "live": len(book.live),
            "running": len(book.running),
            "queued": book.n_queued,
            "ready": book.n_ready,
            "leased": book.n_leased,
            "leases": len(self.leases.open),
            "takes": len(self.leases.takes),
            "waiting_for_room": self.store.n_waiting,
            "eval_todo": evaluation.n_todo,
            "eval_open": len(evaluation.open),
            "failures_in_a_row": self.run.failures_in_a_row,
            "fingerprints": len(self.versions.fingerprints),
            "dropped": dict(book.dropped),
            "ledger": book.ledger.counts(),
            "tokens": book.ledger.tokens(),
            "buffer": self.store.stats(),
            "done": msgspec.to_builtins(self.run.done),
        }

    def waits(self, now: float) -> list[str]:
        """Everything that the run waits for, one line each, who waits first: how long it has been and how long it may
        be. Empty when the run is over.
        """
        if self.run.done is not None:
            return []
        found, book, scheduler = list[str](), self.book, self.scheduler
        if scheduler.missing:
            names = ", ".join(sorted(scheduler.missing))
            found.append(f"broker: {names} to join again, {max(0.0, scheduler.missing_until - now):.0f} s more")
        for take in self.leases.takes:
            there = f"{book.n_ready} ready, {len(book.running)} running, {book.n_queued} to be started again"
            found.append(f"learner: a batch of {take.n} trajectories, for {now - take.since:.0f} s ({there})")
        for number, lease in self.leases.open.items():
            found.append(f"broker: the learner's commit of lease {number} with {len(lease.held)} trajectories")
        oldest: dict[str, TrainingTask] = {}
        for task in book.running.values():
            oldest.setdefault(task.generator, task)
        running = Counter(task.generator for task in book.running.values())
        limit, permits = self.config.transport.rollout_timeout_s, scheduler.permits()
        for name, generator in scheduler.generators.items():
            if name in oldest:
                found.append(
                    f"{name}: the end of {running[name]} rollouts, task {oldest[name].ordinal} attempt"
                    f" {oldest[name].attempt} for {now - oldest[name].started:.0f} s of"
                    f" transport.rollout_timeout_s = {limit:g}"
                )
            elif generator.free and not permits:
                found.append(f"{name}: a permit for {generator.free} free slots")
            if generator.loaded < self.versions.current:
                found.append(f"{name}: weights of version {self.versions.current}, serves {generator.loaded}")
        return found

    def stuck(self) -> str:
        """Why the run waits for ever, as with a buffer that is too small for one batch; empty while it does not."""
        book, store = self.book, self.store
        if not self.leases.takes or self.leases.open or book.running or store.room(book.n_leased, book.n_ready, 0):
            return ""
        text = f"the buffer is full with {book.n_ready} trajectories and the learner waits for"
        text += f" {self.leases.takes[0].n}: raise buffer.max_bytes"
        return f"{text} = {store.max_bytes} (largest trajectory: {store.largest_bytes} bytes)"

    def _generator_metrics(self) -> dict[str, float]:
        """The last reports of the joined generators: busy share of each and their mean, tokens per second in all."""
        generators = self.scheduler.generators
        metrics: dict[str, float] = {"broker/generators": len(generators)}
        reports = {name: generator.report for name, generator in generators.items() if generator.report is not None}
        if reports:
            metrics |= {f"broker/busy_share/{name}": report.busy_share for name, report in reports.items()}
            metrics["broker/busy_share"] = sum(report.busy_share for report in reports.values()) / len(reports)
            metrics["broker/kv_use"] = max(report.kv_use for report in reports.values())
            metrics["broker/episode_limit"] = sum(report.episode_limit for report in reports.values())
            metrics["broker/engine_tokens_per_s"] = sum(report.tokens_per_s for report in reports.values())
        return metrics
