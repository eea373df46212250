"""The key/value cache of the torch engine: one preallocated row (slot) per session.

A `transformers` model calls `update` once a layer; the engine has said before (`aim`) which rows the batch stands for
and where their new tokens go. Nothing is moved when sessions come and go. Memory is reserved but not touched until
used: layers x slots x (context + 1) x kv heads x head dim x 2 elements.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache


class SlotCache(Cache):
    """Keys and values of all layers, each [slots, context + 1, kv heads, head dim] (heads inside positions, so that a
    token's keys are one contiguous row). Position `context` takes what padding writes and is never read.
    """

    def __init__(self, slots: int, context: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.context = context
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows: torch.Tensor | int = 0
        self._write = torch.empty(0, dtype=torch.int64)
        self._read = 0

    def aim(self, rows: torch.Tensor | int, write: torch.Tensor, read: int) -> None:
        """Says what the next forward pass is about.

        rows: int64[b], the slot of each batch row, or a number b: the slots 0..b-1 (read without a copy).
        write: int64[b * t], slot * (context + 1) + position of each new token.
        read: positions 0..read-1 are what attention sees.
        """
        self._rows, self._write, self._read = rows, write, read

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys and values [b, kv heads, t, head dim]; returns those to see, [b, kv heads, read, head dim]."""
        while len(self._keys) <= layer_idx:
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        return self._swap(self._keys[layer_idx], key_states), self._swap(self._values[layer_idx], value_states)

    def clear(self) -> None:
        """Zeroes everything: a NaN that a broken version left behind would reach others through 0 x NaN."""
        with torch.inference_mode():  # the tensors were made in it
            for tensor in (*self._keys, *self._values):
                tensor.zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions and mask are always given to the model, nothing is derived from the cache."""
        return 0

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = states.shape
        return torch.zeros(self.slots, self.context + 1, heads, size, dtype=states.dtype, device=states.device)

    def _swap(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        heads, size = store.shape[2:]
        store.view(-1, heads, size).index_copy_(0, self._write, states.transpose(1, 2).reshape(-1, heads, size))
        if isinstance(self._rows, int):
            return store[: self._rows, : self._read].transpose(1, 2)
        return store[:, : self._read].index_select(0, self._rows).transpose(1, 2)
