"""What vLLM's scheduler says of its load, step by step: KV cache in use, requests waiting, requests thrown back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class VllmLoad:
    """kv_use: share of the KV cache in use, 0 to 1; waiting: requests; preempted: times a request lost its keys."""

    kv_use: float = 0.0
    waiting: int = 0
    preempted: int = 0

    def logger(self) -> Any:
        """A stat logger of vLLM that writes here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        load = self

        class Logger(StatLoggerBase):
            def __init__(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    load.kv_use, load.waiting = scheduler_stats.kv_cache_usage, scheduler_stats.num_waiting_reqs
                if iteration_stats is not None:
                    load.preempted += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None:
                pass

        return Logger()


def keep_only_ours(llm: Any) -> None:
    """Takes the other stat loggers (Prometheus) away: nobody reads them here, and they cost time at every step."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    manager = llm.logger_manager
    manager.stat_loggers = [one for one in manager.stat_loggers if not isinstance(one, PrometheusStatLogger)]
