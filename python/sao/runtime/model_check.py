"""`sao check-model`: whether a model can be sampled from and trained here, tried before there is a run.

Each row is what was looked at, how it is (ok, note, fault) and what was found, with the way out. What a run would find
later is found by the same code: the files, the chat template, the rows of the learner, and ten tokens that the engine
samples and the learner scores.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from sao.config import Config
from sao.engines.base import Completion, Request
from sao.errors import Error
from sao.generator.player import make_engine
from sao.learner.layout import Layout
from sao.learner.model import load_policy
from sao.learner.world import World
from sao.rollout.chat import Renderer
from sao.runtime.doctor import Finding
from sao.storage import model_folder

TOKENS: Final = 10  # that the engine samples and the learner scores
GAP: Final = 1e-3  # nats that float32 rounding may make between the two
START_S: Final = 300.0  # for an engine to start
ROWS: Final = {
    "masked": "several segments a row, one explicit mask",
    "positions": "several segments a row, a mask of the model's own for each kind of layer",
    "single": "one segment a row: its layers carry state, or know places only by counting",
}


def findings(config: Config) -> Iterator[Finding]:
    """All rows for the model of `config`, in order; ends behind a fault without which nothing later can be tried."""
    folder = Path(config.model.path)
    faults = list(model_folder.file_faults(folder)) or model_folder.tensor_faults(folder)
    if faults:
        yield from (("files", "fault", fault) for fault in faults)
        return
    shapes = model_folder.shapes(folder)
    n_parameters = sum(int(np.prod(shape)) for shape in shapes.values())
    described = model_folder.read_config(folder)
    kind = ", ".join(described.get("architectures") or [str(described.get("model_type"))])
    yield (
        "files",
        "ok",
        f"{kind}, {n_parameters / 1e6:,.1f} M parameters in {len(shapes)} tensors, all as the architecture says",
    )
    yield _positions(config, folder)
    try:
        renderer = Renderer.of(config.model)
    except Error as error:
        yield "template", "fault", f"{error}; another one: model.chat_template = FILE"
        return
    yield from _template(renderer, described)
    try:
        policy = load_policy(config, World.alone())
    except Error as error:
        yield "learner", "fault", str(error)
        return
    layout: Layout = policy.layout
    yield "learner", "ok", f"{layout.rows}: {ROWS[layout.rows]}; attention by {layout.attention}"
    prompt = renderer.encode("The quick brown fox") if renderer.vocab_size > 256 else np.arange(1, 9, dtype=np.int32)
    prompt = np.clip(prompt, 0, policy.vocabulary - 1).astype(np.int32)
    try:
        completion = asyncio.run(_sample(config, renderer, prompt))
        gap = _gap(policy, prompt, completion)
    except Error as error:
        yield "engine", "fault", f"{config.generator.engine}: {error}"
    else:
        sampled = f"{config.generator.engine}: {completion.token_ids.size} tokens sampled"
        yield "engine", ("ok" if gap < GAP else "fault"), f"{sampled}, log-probs within {gap:.1e} nats of the learner's"
    yield _memory(config, n_parameters)


def _positions(config: Config, folder: Path) -> Finding:
    limit, learned = model_folder.positions(folder)
    context = config.sampling.context_tokens
    if limit is None or context <= limit:
        return "positions", "ok", f"{limit or 'no limit said'}; sampling.context_tokens = {context}"
    if learned:
        return "positions", "fault", f"{limit} at most; sampling.context_tokens = {context}"
    return "positions", "note", f"{limit} were trained; sampling.context_tokens = {context} goes beyond"


def _template(renderer: Renderer, described: dict[str, Any]) -> Iterator[Finding]:
    calls = "calls of tools are read" if renderer.reader.calls else "no format of tool calls is known: calls stay text"
    results = "" if renderer.renders_tools else "; it renders no results of tools"
    yield "template", "ok" if renderer.reader.calls and renderer.renders_tools else "note", f"{calls}{results}"
    ends = ", ".join(renderer.token_names(renderer.stop_token_ids))
    rows = (described.get("text_config") or described).get("vocab_size")
    text = f"{renderer.vocab_size} tokens, embedding for {rows}; turns end with {ends}"
    if isinstance(rows, int) and renderer.vocab_size > rows:
        yield "tokenizer", "fault", f"{text}: ids from {rows} on have no embedding"
    else:
        yield "tokenizer", "ok", text


async def _sample(config: Config, renderer: Renderer, prompt: np.ndarray) -> Completion:
    engine = make_engine(config, config.model.path, renderer, config.run.seed)
    try:
        async with asyncio.timeout(START_S):
            await engine.start()
            return await engine.generate(Request("0", "0", prompt, TOKENS, 1.0, (), seed=0))
    finally:
        await engine.close()


@torch.no_grad()
def _gap(policy: Any, prompt: np.ndarray, completion: Completion) -> float:
    """Largest distance of the engine's log-probs from those of the learner's model, nats."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
    logits = policy.lm(input_ids=ids, use_cache=False).logits[0, prompt.size - 1 : -1].float()
    expected = logits.log_softmax(-1)[torch.arange(len(logits)), ids[0, prompt.size :]]
    return float((expected - torch.from_numpy(completion.logprobs)).abs().max())


def _memory(config: Config, n_parameters: int) -> Finding:
    item = 2 if config.model.dtype == "bfloat16" else 4
    policy, critic = 16 * n_parameters, 16 * n_parameters if config.algorithm.has_critic else 0
    learner = (policy + critic) / config.learner.ranks
    at_rest = f"learner {learner / 2**30:.2f} GiB a rank at rest (weights, gradients, AdamW of policy and critic)"
    return "memory", "note", f"{at_rest}, activations on top; engine {item * n_parameters / 2**30:.2f} GiB of weights"
