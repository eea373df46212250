"""Memory and CPU time of a learner step: all parameters trained, and adapters on a base in float32 and in bfloat16.

    python bench/lora_memory.py

Writes bench/results/lora_memory.json. The shape of SmolLM2-135M with random weights, policy and critic, one process of
one thread without a process group, a process for each variant. Memory is the growth of anonymous memory since the
imports: at rest after two steps, and the most of the second step, sampled every 5 ms.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import report

VARIANTS = {
    "full, float32": {},
    "LoRA, base float32": {"lora__rank": 16},
    "LoRA, base bfloat16": {"lora__rank": 16, "model__dtype": "bfloat16"},
}
ROLLOUTS, PROMPT, ANSWER = 4, 60, 60


def memory() -> float:
    """Anonymous and shared memory of this process, MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem")) / 1024


def measure(variant: str, folder: str) -> None:
    """One variant in this process; prints a line of JSON."""
    sys.path[0] = str(Path(__file__).parents[1] / "tests")  # instead of this folder, which has a learner.py, too
    import numpy as np
    import torch
    from learner.rollouts import make_config, make_segment, make_trajectory

    from sao.learner.step import Learner

    torch.set_num_threads(1)
    idle = memory()
    window = {"sampling__context_tokens": 128, "learner__row_tokens": 128, "model__dtype": "float32"}
    slow = {"learner__policy_lr": 1e-6, "learner__critic_lr": 1e-6}
    band = {"algorithm__eps_low": 0.99, "algorithm__eps_high": 1e6}  # a random model says 1 / vocabulary, about
    learner = Learner(make_config(Path(folder), **{**window, **slow, **band, **VARIANTS[variant]}))
    rng, most, done = np.random.default_rng(0), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], memory())

    def rollout(number: int) -> Any:
        segment = make_segment(rng, [(PROMPT, ANSWER)], logprob=-math.log(learner.policy.vocabulary))
        return make_trajectory(rng, [segment], reward=float(number % 2))

    batches = [[rollout(number) for number in range(ROLLOUTS)] for _ in range(2)]
    learner.step(batches[0])
    ctypes.CDLL(None).malloc_trim(0)
    began = time.process_time()
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = learner.step(batches[1])
    done.set()
    watcher.join()
    seconds = time.process_time() - began
    assert result.skipped is None, result.skipped
    ctypes.CDLL(None).malloc_trim(0)
    trained = [sum(p.numel() for p in o.parameters.values()) for o in learner.optimizers.values()]
    print(json.dumps([*trained, round(memory() - idle), round(most[0] - idle), round(seconds, 1)]))


def main() -> None:
    """Measures each variant in a process of its own and prints a table."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        config = LlamaConfig(
            vocab_size=49152, num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=2048, **shape
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        for variant in VARIANTS:
            # Large blocks go back to the system at once, so that what is held is what is used.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, variant, folder]
            out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append([variant, *json.loads(out.splitlines()[-1])])
    columns = ["training", "policy trains", "critic trains", "at rest, MiB", "peak, MiB", "CPU s a step"]
    note = f"{ROLLOUTS} rollouts of {PROMPT} + {ANSWER} tokens, random weights; the critic twice, the policy once"
    report("lora_memory", columns, rows, note)


if __name__ == "__main__":
    measure(*sys.argv[1:]) if len(sys.argv) > 1 else main()
