"""What a step refuses, it refuses before anything has changed."""

from dataclasses import replace

import pytest
import torch
from learner.rollouts import VOCABULARY, make_config, random_batch
from learner.test_step import state

from sao.errors import ValidationError
from sao.learner.step import Learner


def test_tokens_that_the_model_does_not_know_and_repeated_rollouts_change_nothing(tiny_model):
    learner, (good, other) = Learner(make_config(tiny_model)), random_batch(0, 2)
    before = state(learner)
    wrong = other.segments[0].token_ids.copy()
    wrong[0] = VOCABULARY
    unknown = replace(other, segments=(replace(other.segments[0], token_ids=wrong), *other.segments[1:]))
    for batch, fault in (
        ([good, unknown], "48 is not in the model's vocabulary, 0 to 47"),
        ([good] * 2, "is at 0 of the batch, and the same one at 1"),
    ):
        with pytest.raises(ValidationError, match=fault):
            learner.step(batch)
    assert (learner.steps, learner.version, learner.skipped_total) == (0, 0, 0)
    assert all(torch.equal(value, before[name]) for name, value in state(learner).items())
    assert learner.step([good, other]).skipped is None
