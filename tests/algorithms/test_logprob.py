"""Log-probs in chunks: the numbers of the plain path, and never more logits than a chunk's."""

import pytest
import torch

from sao.algorithms.logprob import score, token_entropies, token_logprobs

WIDTH, VOCABULARY, CHUNK = 6, 500, 16
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


class Case:
    """Hidden states, a head and what is asked of them; `run` returns scores and gradients of a weighted sum."""

    def __init__(self, n, dtype=torch.float64):
        generator = torch.Generator().manual_seed(n)
        self.hidden = torch.randn(n, WIDTH, generator=generator, dtype=dtype).requires_grad_()
        self.weight = (torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype) / 2).requires_grad_()
        self.ids = torch.randint(0, VOCABULARY, (n,), generator=generator)
        self.temperatures = torch.rand(n, generator=generator) + 0.5
        self.factors = torch.randn(n, generator=generator, dtype=dtype)
        self.rows = []

    def head(self, states):
        self.rows.append(states.shape[0])
        return torch.tanh(states @ self.weight.T / 30) * 30  # what some models do behind their head

    def score(self, chunk_tokens):
        given = {"token_ids": self.ids, "temperatures": self.temperatures}
        return score(self.head, self.hidden, **given, chunk_tokens=chunk_tokens)

    def run(self, chunk_tokens):
        logprobs, entropies = self.score(chunk_tokens)
        gradients = torch.autograd.grad((logprobs * self.factors).sum(), [self.hidden, self.weight])
        assert not entropies.requires_grad
        return logprobs.detach(), entropies, *gradients


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 83])
def test_chunks_give_the_values_and_gradients_of_the_plain_path(n, dtype):
    case = Case(n, dtype)
    for got, expected in zip(case.run(CHUNK), case.run(max(1, n)), strict=True):
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def test_the_plain_path_is_the_two_functions():
    case = Case(20)
    logprobs, entropies = case.score(20)
    given = {"logits": case.head(case.hidden), "temperatures": case.temperatures}
    assert torch.equal(logprobs, token_logprobs(**given, token_ids=case.ids))
    assert torch.equal(entropies, token_entropies(**given))


def test_no_more_logits_than_a_chunk_exist_and_none_are_kept_for_the_backward_pass():
    kept = {}
    for chunk in (CHUNK, 1000):
        case, sizes = Case(160), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            logprobs, _ = case.score(chunk)
        kept[chunk] = sum(sizes)
        assert max(case.rows) == min(chunk, 160)
        logprobs.sum().backward()
        assert max(case.rows) == min(chunk, 160)
    assert kept[1000] > 160 * VOCABULARY
    assert kept[CHUNK] < 160 * (WIDTH + 8) + 2 * case.weight.numel()


def test_a_chunk_is_computed_once_more_in_the_backward_pass_and_no_more():
    case = Case(4 * CHUNK)
    case.run(CHUNK)
    assert case.rows == [CHUNK] * 8
    case.rows.clear()
    case.run(4 * CHUNK)
    assert case.rows == [4 * CHUNK]
