"""How the segments of a step lie in rows: what keeps them exact is found by trying it, with the model at hand.

| rows | a row holds | what keeps its segments exact | for |
| --- | --- | --- | --- |
| `masked` | several | one explicit mask: causal, block-diagonal | full attention |
| `positions` | several | position ids that restart: the model makes a mask for each kind of layer | sliding windows |
| `single` | one | nothing is needed: padding at the right is seen by nobody | state across positions, ALiBi, chunks |

The first that gives every segment the states that it has alone is taken. Position encodings that depend on the longest
sequence of a call are exact in all of them, since segments that are scaled differently never share a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sao.engines.positions import probe_tokens, scalings
from sao.errors import ConfigError
from sao.learner.attention import EAGER, FLASH, FLEX, SDPA, mask
from sao.learner.backbone import body_of, head_of

Rows = Literal["masked", "positions", "single"]
_PADDING = -1  # segment number of positions that hold no token
_DRAWS = 2  # of the probe: rounding may swap two experts or keys of equal score, a leak is there every time


@dataclass(frozen=True)
class Layout:
    """Rows, the implementation of attention, and where position scaling changes: see `positions.scalings`."""

    rows: Rows = "masked"
    attention: str = SDPA
    scalings: tuple[tuple[str, int], ...] = ()

    def apart(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each segment a number; segments with different numbers must not share a forward pass."""
        if not self.scalings:
            return np.zeros(len(lengths), dtype=np.int64)
        scaled = [np.where(lengths > n, n + 1 if kind == "longrope" else lengths, 0) for kind, n in self.scalings]
        return np.unique(np.stack([0 * lengths, *scaled]), axis=1, return_inverse=True)[1].reshape(-1)

    @property
    def one_row(self) -> bool:
        """Whether a micro-batch is one row: where positions restart is all that flash attention knows of segments."""
        return self.rows == "positions" and self.attention == FLASH

    def both(self, other: "Layout") -> "Layout":
        """One in which two models are exact."""
        same = (self.rows, self.attention) == (other.rows, other.attention)
        rows = self.rows if same else "single"
        return Layout(rows, self.attention, tuple(sorted({*self.scalings, *other.scalings})))

    def inputs(
        self,
        ids: NDArray[np.integer[Any]],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        padding: int,
        device: torch.device,
    ) -> dict[str, Any]:
        """The backbone's inputs for segments that lie end to end in `ids`; the i-th from (rows[i], starts[i]) on.

        `padding`: the token in places that hold none; a real one, since a zero embedding has no finite gradient in some
        models.
        """
        shape = int(rows.max(initial=0)) + 1, int((starts + lengths).max(initial=1))
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        where = np.repeat(rows, lengths), np.repeat(starts, lengths) + within
        filled = {"input_ids": (padding, ids), "position_ids": (0, within)}
        filled["owners"] = (_PADDING, np.repeat(np.arange(len(lengths)), lengths))
        if self.rows == "single":
            del filled["position_ids"], filled["owners"]
        out = {}
        for name, (empty, values) in filled.items():
            array = np.full(shape, empty, dtype=np.int64)
            array[where] = values
            out[name] = torch.from_numpy(array).to(device)
        if (owners := out.pop("owners", None)) is not None and self.rows == "masked":
            out["attention_mask"] = mask(owners, self.attention)
        return out


def _settle_positions(lm: Any, context_tokens: int, path: str | Path, engine: str) -> None:
    """Makes position encodings a function of the call alone, and those of `generator.engine`.

    transformers keeps the `dynamic` frequencies of the longest call so far. vLLM scales every sequence as one of
    `context_tokens`: so does `longrope` then; `dynamic` is refused (`ConfigError`).
    """
    for kind, n, module in scalings(lm):
        if kind == "dynamic":
            module.register_forward_pre_hook(_forget)
        if engine != "vllm" or context_tokens <= n:
            continue
        if kind == "dynamic":
            raise ConfigError(
                f"generator.engine: vllm scales positions of {path} otherwise than its config says beyond {n} tokens:"
                f" use sampling.context_tokens = {n} at most"
            )
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, module.inv_freq.device, seq_len=n + 1)
        module.register_buffer("inv_freq", frequencies, persistent=False)
        module.rope_type = "default"  # from here on they stay


def _forget(module: Any, arguments: tuple[Tensor, ...]) -> None:
    module.register_buffer("inv_freq", module.original_inv_freq.to(arguments[0].device), persistent=False)
    module.max_seq_len_cached = module.original_max_seq_len


def find_layout(lm: Any, context_tokens: int, path: str | Path, engine: str = "torch") -> Layout:
    """The first layout in which segments have the states that they have alone. Raises `ConfigError` if none has that.

    Probed with the real weights on the real device, at lengths beyond windows and sparse selection if `context_tokens`
    is beyond them. `engine`: `generator.engine`, whose position scaling is used.
    """
    _settle_positions(lm, context_tokens, path, engine)
    text, body, device = lm.config.get_text_config(), body_of(lm), next(lm.parameters()).device
    changes = tuple(sorted({(kind, n) for kind, n, _ in scalings(lm)}))
    attention = str(lm.config._attn_implementation)
    kinds: list[Rows] = ["masked", "positions", "single"] if attention in (SDPA, FLEX) else ["positions", "single"]
    # Flash attention computes in bfloat16 only, and the parameters are float32 outside of FSDP.
    tolerance = 1e-4 if lm.dtype in (torch.float32, torch.float64) and attention in (SDPA, EAGER) else 0.1
    tokens = np.setdiff1d(np.arange(text.vocab_size), [text.pad_token_id or 0])  # padding is a tie for every router
    lengths = np.minimum([5, probe_tokens(lm, context_tokens), 9], context_tokens)
    fault: object = None

    def states(**inputs: Any) -> Tensor:
        return body(**inputs, use_cache=False).last_hidden_state

    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=attention == FLASH):
        for layout in (Layout(kind, attention, changes) for kind in kinds):
            for draw in range(_DRAWS):
                rng = np.random.default_rng(draw)
                segments = [rng.choice(tokens, length) for length in lengths]
                try:
                    gap = max(_gap(layout, segments, states, device), _head_gap(lm, segments[0], device))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # whatever a model's code says of inputs that it does not expect
                    fault = f"{type(error).__name__}: {error}"
                    break
                if gap < tolerance:
                    return layout
                fault = f"gap {gap:.1e}"
    raise ConfigError(
        f"model.path: {path}: {type(lm).__name__} scores a segment in a batch otherwise than alone, even in a row of"
        f" its own: {fault}"
    )


def _head_gap(lm: Any, ids: NDArray[np.int64], device: torch.device) -> float:
    """The same of logits, where the head gets its states from outside."""
    inputs = {"input_ids": torch.from_numpy(ids)[None].to(device), "use_cache": False}
    output, alone = body_of(lm)(**inputs), lm(**inputs).logits[0]
    return _distance(head_of(lm, output, output.last_hidden_state[0]), alone)


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest expected number."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def _gap(
    layout: Layout, segments: list[NDArray[np.int64]], states: Callable[..., Tensor], device: torch.device
) -> float:
    """Largest distance of states in the rows of a layout from those of the segments alone, relative to the largest."""
    lengths, gap = np.array([len(ids) for ids in segments]), 0.0
    labels = layout.apart(lengths)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = np.append(members, members[-1])  # once more in a row of its own, with padding behind it
        sizes = lengths[members]
        if layout.rows == "single":
            rows, starts = np.arange(len(members)), np.zeros(len(members), dtype=np.int64)
        else:
            rows, starts = np.array([0] * (len(members) - 1) + [1]), np.cumsum(sizes) - sizes
            starts[-1] = 0
        if layout.one_row:
            members, rows, starts, sizes = members[:-1], rows[:-1], starts[:-1], sizes[:-1]
        ids = np.concatenate([segments[index] for index in members])
        found = states(**layout.inputs(ids, sizes, rows, starts, int(ids[0]), device))
        for index, row, start in zip(members, rows, starts, strict=True):
            alone = states(input_ids=torch.from_numpy(segments[index])[None].to(device))[0]
            there = found[row, start : start + len(alone)]
            gap = max(gap, _distance(there, alone))
    return gap
