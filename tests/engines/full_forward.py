"""What an engine's log-probs are held to: one plain forward pass of the `transformers` model over all tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from sao.engines.base import Completion, Request
from sao.rollout.recorder import check_completion


def full_forward(model: torch.nn.Module, asked: Request, completion: Completion) -> np.ndarray:
    """Log-probs float64[m] of the completion's tokens, teacher-forced, without any cache."""
    ids = torch.from_numpy(np.concatenate([asked.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
    scores = torch.log_softmax(logits / (asked.temperature or 1.0), -1)
    return scores[asked.prompt_ids.size - 1 : -1].gather(1, ids[asked.prompt_ids.size :, None])[:, 0].numpy()


def largest_difference(models: Mapping[int, torch.nn.Module], asked: Request, completion: Completion) -> float:
    """Over all tokens, each against the model of the version its span names."""
    check_completion(asked, completion)
    worst = 0.0
    for start, stop, version in completion.version_spans.tolist():
        expected = full_forward(models[version], asked, completion)
        worst = max(worst, float(np.abs(expected - completion.logprobs)[start:stop].max()))
    return worst
