"""What the broker shows of itself: the metrics of a step, a snapshot, one line about where things stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sao.broker.metrics import generator_metrics

if TYPE_CHECKING:
    from sao.broker.state import State


def step_metrics(state: State, now: float) -> dict[str, float]:
    """The broker's metrics of a step, all under `broker/`; rates, lags and ages are of the time since the last step."""
    tokens, counts, book = state.book.ledger.tokens(), state.book.ledger.counts(), state.book
    metrics: dict[str, float] = {f"broker/{name}": counts[name] for name in ("ready", "leased", "trained", "dropped")}
    metrics |= {
        "broker/running": len(book.running),
        "broker/queued": book.n_queued,
        "broker/permits": state.permits(),
        "broker/free_slots": state.pool.free,
        "broker/buffer_bytes": state.store.stats()["bytes"],
        "broker/policy_version": state.versions.current,
        "broker/eval_rounds_skipped": state.evals.skipped,
    }
    metrics |= {f"broker/tokens_{name}": tokens[name] for name in ("sampled", "trained", "masked", "held")}
    metrics |= {f"broker/tokens_dropped/{reason}": count for reason, count in tokens["dropped"].items()}
    metrics |= {f"broker/rollouts_dropped/{reason}": count for reason, count in state.book.dropped.items()}
    return {**metrics, **state.meter.step(now, tokens["sampled"]), **generator_metrics(state.pool)}


def snapshot(state: State) -> dict[str, Any]:
    """Sizes of all queues and maps, and where tasks and tokens are."""
    book, evals = state.book, state.evals
    return {
        "step": state.step,
        "version": state.versions.current,
        "permits": state.permits(),
        "generators": {
            g.name: {"free": g.free, "train": len(g.train), "evals": len(g.evals), "loaded": g.loaded}
            for g in state.pool.by_name.values()
        },
        "live": len(book.live),
        "running": len(book.running),
        "queued": book.n_queued,
        "ready": book.n_ready,
        "leased": book.n_leased,
        "leases": len(state.leases),
        "takes": len(state.takes),
        "waiting_for_room": state.store.n_waiting,
        "eval_todo": evals.n_todo,
        "eval_open": evals.n_open,
        "failures_in_a_row": state.failures_in_a_row,
        "fingerprints": len(state.versions.fingerprints),
        "dropped": dict(state.book.dropped),
        "ledger": state.book.ledger.counts(),
        "tokens": state.book.ledger.tokens(),
        "buffer": state.store.stats(),
        "done": state.done,
    }


def standing(state: State, now: float) -> str:
    """One line: what there is and which task is the oldest."""
    book = state.book
    text = (
        f"{book.n_ready} ready, {len(book.running)} running, {book.n_queued} to be started again, "
        f"{state.permits()} permits, {len(state.pool.by_name)} generators with {state.pool.free} free slots"
    )
    oldest = next(iter(book.running.values()), None)
    if oldest is not None:
        text += f"; oldest: task {oldest.ordinal} attempt {oldest.attempt} on {oldest.generator}, "
        text += f"{now - oldest.started:.0f} s"
    return text


def stuck(state: State) -> str:
    """A buffer that is too small for one batch would wait for ever: why, or an empty text."""
    book, store = state.book, state.store
    full = store.room(book.n_leased, book.n_ready, 0) == 0
    if not (state.takes and full) or book.running or state.leases:
        return ""
    ready, n, size = book.n_ready, state.takes[0].n, store.largest_bytes
    text = f"the buffer is full with {ready} trajectories and the learner waits for {n}: raise buffer.max_bytes"
    return f"{text} = {store.max_bytes} (largest trajectory: {size} bytes)"
