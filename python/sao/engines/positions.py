"""Lengths at which a model changes: where position scaling begins, and how long a probe must be to see the rest."""

import re
from collections.abc import Iterator
from typing import Any

# A window, a chunk, a sparse selection, a compression: something that is not seen in shorter sequences.
_LENGTHS = re.compile(r"window|chunk|block_size|topk|top_k|compress|extent")


def scalings(model: Any) -> list[tuple[str, int, Any]]:
    """(`longrope` or `dynamic`, n, module): position encodings that are others when a call has more than n positions.

    `longrope` has one set of frequencies beyond n, `dynamic` a set for each length; either depends on what else is in
    the call. Nothing else that transformers calls a type of position scaling does.
    """
    found = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            found.append((kind, int(module.config.rope_parameters["original_max_position_embeddings"]), module))
        elif kind == "dynamic":
            found.append((kind, int(module.original_max_seq_len), module))
    return found


def probe_tokens(model: Any, context_tokens: int) -> int:
    """A length at which windows, chunks, selection and scaling show, or `context_tokens` if that is shorter."""
    lengths = [*_lengths(model.config.get_text_config().to_dict()), *(n for _, n, _ in scalings(model))]
    return min(context_tokens, 2 * max([n for n in lengths if n < context_tokens], default=0) + 80)


def _lengths(value: Any, named: bool = False) -> Iterator[int]:
    """The whole numbers below every key that names a length."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lengths(inner, named or _LENGTHS.search(str(key)) is not None)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _lengths(inner, named)
    elif named and isinstance(value, int) and not isinstance(value, bool):
        yield value
