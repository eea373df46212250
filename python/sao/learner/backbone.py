"""The two parts of a causal language model of transformers: its backbone, and what comes behind."""

from typing import Any

import torch
from torch import Tensor


def body_of(lm: Any) -> Any:
    """The backbone: what the model's own `forward` calls before its head."""
    body = lm.base_model if lm.base_model is not lm else lm.model
    return getattr(body, "decoder", body)  # of families that had an encoder, too


def head_of(lm: Any, output: Any, states: Tensor) -> Tensor:
    """Logits [n, vocabulary] of hidden states [n, width]: the model's own code behind its backbone.

    Positions are chosen in front of the head, so that nothing of vocabulary size is computed for context, and whatever
    a model does to its logits afterwards (scaling, soft caps) still happens. `output` is what the backbone returned.
    """
    body = body_of(lm)
    answer = type(output)(**{**output, "last_hidden_state": states[None]})
    before = body.__dict__.get("forward")
    body.forward = lambda *_, **__: answer
    try:
        return lm(input_ids=states.new_zeros(1, states.shape[0], dtype=torch.int64), use_cache=False).logits[0]
    finally:
        del body.forward
        if before is not None:
            body.forward = before
