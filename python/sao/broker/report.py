"""The report of the broker: the metrics of a step, a snapshot, and everything that the run waits for. It only reads."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from sao.broker.leases import LeaseTable
from sao.broker.scheduler import Scheduler
from sao.broker.tasks import TrainingTask


@dataclass(frozen=True, slots=True)
class Report:
    """The view of the broker's state over all its owners."""

    scheduler: Scheduler
    leases: LeaseTable

    def step_metrics(self, now: float) -> dict[str, float]:
        """The broker's metrics of a step, all under `broker/`; rates, lags and ages are those since the last step."""
        scheduler, book = self.scheduler, self.scheduler.book
        tokens, counts, generators = book.ledger.tokens(), book.ledger.counts(), scheduler.generators.values()
        metrics: dict[str, float] = {
            **{f"broker/{name}": counts[name] for name in ("ready", "leased", "trained", "dropped")},
            "broker/running": len(book.running),
            "broker/queued": len(book.queue),
            "broker/permits": scheduler.permits(),
            "broker/free_slots": sum(generator.free for generator in generators),
            "broker/buffer_bytes": scheduler.store.buffer.stats()["bytes"],
            "broker/policy_version": scheduler.versions.current,
            "broker/eval_rounds_skipped": scheduler.evaluation.skipped,
            **{f"broker/tokens_{name}": tokens[name] for name in ("sampled", "trained", "masked", "held")},
            **{f"broker/tokens_dropped/{reason}": count for reason, count in tokens["dropped"].items()},
            **{f"broker/rollouts_dropped/{reason}": count for reason, count in book.dropped.items()},
            **self.leases.meter.step(now, tokens["sampled"]),
            "broker/generators": len(generators),
        }
        if reports := {name: g.report for name, g in scheduler.generators.items() if g.report is not None}:
            last = reports.values()
            metrics |= {
                **{f"broker/busy_share/{name}": report.busy_share for name, report in reports.items()},
                "broker/busy_share": sum(report.busy_share for report in last) / len(last),
                "broker/kv_use": max(report.kv_use for report in last),
                "broker/episode_limit": sum(report.episode_limit for report in last),
                "broker/engine_tokens_per_s": sum(report.tokens_per_s for report in last),
            }
        return metrics

    def snapshot(self) -> dict[str, Any]:
        """Sizes of all queues and maps, and where tasks and tokens are."""
        scheduler, book = self.scheduler, self.scheduler.book
        counts, train = book.ledger.counts(), Counter(task.generator for task in book.running.values())
        evals = Counter(scheduler.evaluation.open.values())
        return {
            "step": scheduler.run.step,
            "version": scheduler.versions.current,
            "permits": scheduler.permits(),
            "generators": {
                name: {"free": g.free, "train": train[name], "evals": evals[name], "loaded": g.loaded}
                for name, g in scheduler.generators.items()
            },
            "live": len(book.live),
            "running": len(book.running),
            "queued": len(book.queue),
            "ready": counts["ready"],
            "leased": counts["leased"],
            "leases": len(self.leases.open),
            "takes": len(self.leases.takes),
            "waiting_for_room": len(scheduler.store.waiting),
            "eval_todo": evals[""],
            "eval_open": len(scheduler.evaluation.open),
            "failures_in_a_row": scheduler.run.failures_in_a_row,
            "fingerprints": len(scheduler.versions.fingerprints),
            "dropped": dict(book.dropped),
            "ledger": counts,
            "tokens": book.ledger.tokens(),
            "buffer": scheduler.store.buffer.stats(),
            "done": msgspec.to_builtins(scheduler.run.done),
        }

    def waits(self, now: float) -> list[str]:
        """The waits of the run in the order in which they run out: how long each has been and may be."""
        scheduler, book, found = self.scheduler, self.scheduler.book, list[str]()
        if scheduler.run.done is not None:
            return found
        if scheduler.missing:
            names = ", ".join(sorted(scheduler.missing))
            found.append(f"broker: {names} to join again, {max(0.0, scheduler.missing_until - now):.0f} s more")
        n_ready = book.ledger.counts()["ready"]
        for take in self.leases.takes:
            there = f"{n_ready} ready, {len(book.running)} running, {len(book.queue)} to be started again"
            found.append(f"learner: a batch of {take.n} trajectories, for {now - take.since:.0f} s ({there})")
        for number, lease in self.leases.open.items():
            found.append(f"broker: the learner's commit of lease {number} with {len(lease.ordinals)} trajectories")
        oldest: dict[str, TrainingTask] = {}
        for task in book.running.values():
            oldest.setdefault(task.generator, task)
        running = Counter(task.generator for task in book.running.values())
        limit, permits = scheduler.config.transport.rollout_timeout_s, scheduler.permits()
        version = scheduler.versions.current
        for name, generator in scheduler.generators.items():
            if first := oldest.get(name):
                found.append(
                    f"{name}: the end of {running[name]} rollouts, task {first.ordinal} attempt {first.attempt} for"
                    f" {now - first.started:.0f} s of transport.rollout_timeout_s = {limit:g}"
                )
            elif generator.free and not permits:
                found.append(f"{name}: a permit for {generator.free} free slots")
            if generator.loaded < version:
                found.append(f"{name}: weights of version {version}, serves {generator.loaded}")
        return found

    def stuck(self) -> str:
        """Why the run waits for ever, as with a buffer that is too small for one batch; empty while it does not."""
        book, store = self.scheduler.book, self.scheduler.store
        if not self.leases.takes or self.leases.open or book.running:
            return ""
        n_ready = book.ledger.counts()["ready"]
        if store.room(0, n_ready, 0):
            return ""
        text = f"the buffer is full with {n_ready} trajectories and the learner waits for {self.leases.takes[0].n}"
        limit = f"buffer.max_bytes = {store.max_bytes} (largest trajectory: {store.largest_bytes} bytes)"
        return f"{text}: raise {limit}"
