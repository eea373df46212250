"""Versions of tokens for a vLLM that does not label them: how many had arrived when its core was paused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np


async def arrived(llm: Any, request_ids: Sequence[str]) -> dict[str, int]:
    """Tokens of each unfinished request that a paused `AsyncLLM` has processed: all that its core has made.

    The core sends its outputs before it answers the pause, over the same socket, so they are in the output queue by
    now; vLLM's output handler takes them out and processes them in chunks, giving way to this loop between two chunks.
    """
    while not llm.engine_core.outputs_queue.empty():
        await asyncio.sleep(0)
    for _ in range(3 + len(request_ids) // 64):
        await asyncio.sleep(0)
    states = llm.output_processor.request_states
    return {name: states[name].detokenizer.num_output_tokens() for name in request_ids if name in states}


def spans_of_bounds(bounds: Sequence[tuple[int, int]], n_tokens: int) -> np.ndarray:
    """Version spans int64[k, 3] of `n_tokens` tokens from (first token, version), in order, the first one (0, v)."""
    stops = [*(start for start, _ in bounds[1:]), n_tokens]
    rows = [(start, min(stop, n_tokens), v) for (start, v), stop in zip(bounds, stops, strict=True) if start < stop]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
