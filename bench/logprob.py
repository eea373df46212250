"""Log-probs of chosen tokens in chunks beside all at once: time and peak memory of forward and backward pass.

A head of 32,000 x 256 over n hidden states, float32, one thread; every case in processes of its own, one for the time
and one for the memory. Memory is the peak of live tensors, less that of a process that has the same tensors and
computes 16 tokens. `python bench/logprob.py`
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from common import report
from learner import PEAK, answer, child

from sao.algorithms.logprob import score

VOCABULARY, WIDTH = 32_000, 256
LARGEST_PLAIN = 4096  # above it, the plain path needs more than 3 GiB


def run(n: int, chunk: int, computed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = (torch.randn(VOCABULARY, WIDTH) / 16).requires_grad_()
    hidden = torch.randn(n, WIDTH).requires_grad_()
    ids, temperatures = torch.randint(0, VOCABULARY, (n,)), torch.ones(n)
    start = time.process_time()
    part = slice(0, computed)
    logprobs, entropies = score(
        lambda states: states @ weight.T,
        hidden[part],
        token_ids=ids[part],
        temperatures=temperatures[part],
        chunk_tokens=chunk,
    )
    logprobs.sum().backward()
    answer(seconds=time.process_time() - start, entropy=float(entropies.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run(**json.loads(arguments.case))
        return
    rows: list[list[Any]] = []
    for n in (1024, 2048, 4096, 16_384):
        base = child(__file__, live=True, n=n, chunk=n, computed=16)[PEAK]
        for name, chunk in (("at once", n), ("chunks of 1024", 1024), ("chunks of 256", 256)):
            if name == "at once" and n > LARGEST_PLAIN:
                continue
            case = {"n": n, "chunk": chunk, "computed": n}
            seconds, peak = child(__file__, **case)["seconds"], child(__file__, live=True, **case)[PEAK]
            rows.append([n, name, seconds, (peak - base) / 2**20, n * VOCABULARY * 4 / 2**20])
    columns = ["tokens", "how", "CPU s", "peak MiB", "all logits MiB"]
    report("logprob", columns, rows, f"head {VOCABULARY} x {WIDTH}, float32, forward and backward")


if __name__ == "__main__":
    main()
