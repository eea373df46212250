"""The broker's measurements from step to step, and the alarm of the log-prob gap."""

from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any


class StepMeter:
    """Counts between two steps, and the survival of rollouts by length over the last `window` finished ones."""

    def __init__(self, now: float, sampled_tokens: int, window: int = 2000) -> None:
        self._since, self._sampled = now, sampled_tokens
        self._lags: list[int] = []
        self._ages_s: list[float] = []
        self.wait_s = 0.0
        self._survival: deque[tuple[int, bool]] = deque(maxlen=window)

    def taken(self, lag: int, age_s: float) -> None:
        """A trajectory went to the learner: lag of its oldest token in versions, seconds since it was finished."""
        self._lags.append(lag)
        self._ages_s.append(age_s)

    def ended(self, n_tokens: int, survived: bool) -> None:
        """A finished trajectory was trained (`survived`) or dropped for its age."""
        self._survival.append((n_tokens, survived))

    def survival_by_decile(self) -> list[float]:
        """Share of survivors in each tenth of the rollouts ordered by length, shortest first; empty below 20 rollouts.

        Dropping by age hits long rollouts first; a falling row shows that bias.
        """
        if len(self._survival) < 20:
            return []
        rows = sorted(self._survival)
        cuts = [len(rows) * i // 10 for i in range(11)]
        return [sum(alive for _, alive in rows[a:b]) / (b - a) for a, b in pairwise(cuts)]

    def step(self, now: float, sampled_tokens: int) -> dict[str, float]:
        """Rates, lags and ages since the last call; resets them."""
        span, lags, ages_s = max(now - self._since, 1e-9), sorted(self._lags), self._ages_s
        metrics = {
            "broker/step_s": span,
            "broker/take_wait_s": self.wait_s,
            "broker/sampled_tokens_per_s": (sampled_tokens - self._sampled) / span,
            **{f"broker/survival_decile/{index}": share for index, share in enumerate(self.survival_by_decile())},
        }
        if lags:
            metrics |= {
                "broker/lag_mean": sum(lags) / len(lags),
                "broker/lag_p50": lags[len(lags) // 2],
                "broker/lag_max": lags[-1],
                **{f"broker/lag_count/{lag}": count for lag, count in Counter(lags).items()},
                "broker/age_s_mean": sum(ages_s) / len(ages_s),
                "broker/age_s_max": max(ages_s),
            }
        self._since, self._sampled, self.wait_s, self._lags, self._ages_s = now, sampled_tokens, 0.0, [], []
        return metrics


class GapAlarm:
    """The alarm that engine and learner no longer compute the same policy: the log-prob gap at lag 0, nats.

    A gap that grows is the one sign of an engine that serves other weights, keeps keys of old ones, or samples from
    another distribution than the one that is scored. It sounds once, and again after the gap has been below the limit.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._above = limit, False

    def check(self, metrics: Mapping[str, Any]) -> str:
        """The alarm's text for the metrics of a learner's step; empty when there is none, or nothing new."""
        gap = metrics.get("logprob_gap/mean")
        if gap is None:  # no token of lag 0
            return ""
        before, self._above = self._above, gap > self._limit
        if before or not self._above:
            return ""
        text = f"log-prob gap at lag 0: {gap:.3g} nats on average, expected at most {self._limit:g}"
        return f"{text} (telemetry.max_logprob_gap): engine and learner do not compute the same policy"
