"""Attention over packed rows: which implementation, and what keeps the segments of a row apart under it.

| implementation | segments are kept apart by | where |
| --- | --- | --- |
| `sdpa` | a boolean matrix, causal inside a segment; rows x length^2 bytes | everywhere |
| `flex_attention` | a block mask of the same rule; nothing of size length^2 | GPUs (no gradients on the CPU) |
| `flash_attention_2` | position ids that restart: all rows are one, without a mask | GPUs, `flash_attn`, bfloat16 |

Whatever is chosen, `layout.find_layout` probes it with the real weights on the real device before training starts.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from sao.errors import ConfigError

if TYPE_CHECKING:
    from sao.config import Config

SDPA, FLEX, FLASH = "sdpa", "flex_attention", "flash_attention_2"
EAGER = "eager"  # a model's own code, where it can do no other; never asked for


def available(device: torch.device) -> list[str]:
    """The implementations that can be trained with on this device, best first."""
    if device.type != "cuda":
        return [SDPA]
    flash = [FLASH] if importlib.util.find_spec("flash_attn") is not None else []
    return [*flash, FLEX, SDPA]


def choose(config: "Config", device: torch.device) -> str:
    """`model.attention` for this device; for `auto` the best that is available and fits the other settings.

    Raises `ConfigError` for one that is not available.
    """
    wanted, found = config.model.attention, available(device)
    if wanted != "auto" and wanted not in found:
        raise ConfigError(f"model.attention: {wanted} is not available on {device}; available: {', '.join(found)}")
    if wanted != "auto":
        return wanted
    if config.learner.deterministic:
        return SDPA
    return next(kind for kind in found if kind != FLASH or config.model.dtype == "bfloat16")


def mask(owners: torch.Tensor, kind: str) -> Any:
    """The `attention_mask` of a transformers model.

    owners: int64[R, L], the segment at each position. Returns bool[R, 1, L, L] for sdpa (true where a position may
    look), a block mask for flex attention, None for flash attention.
    """
    rows, length = owners.shape
    if kind == SDPA:
        causal = torch.ones(length, length, dtype=torch.bool, device=owners.device).tril()
        return ((owners[:, :, None] == owners[:, None, :]) & causal)[:, None]
    if kind == FLEX:
        from torch.nn.attention.flex_attention import create_block_mask

        def same_segment_before(row: Any, _: Any, query: Any, key: Any) -> Any:
            return (owners[row, query] == owners[row, key]) & (query >= key)

        return create_block_mask(same_segment_before, rows, None, length, length, device=str(owners.device))
    return None
