"""Continuous batching without threads: many sessions, one model, a step at a time.

Each session owns a slot: the ids it has seen and how many of their keys and values are valid. A request is a slot with
ids whose keys are still missing: one id means decoding, more mean prefill. A weight update sets the valid count of all
slots to 0, so that requests in flight recompute their context under the new weights and go on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import Cache

from sao.engines.base import Completion, Request, StopReason, no_tokens, spans_of
from sao.engines.sampling import sample, uniforms
from sao.engines.seeds import derive_seed
from sao.errors import EngineError
from sao.transport import weights

_READ_STEP = 16  # the length attention reads is rounded up to this
_PREFILL_SHARE = 4  # prefill as soon as its rows are 1 in so many of those that decode
_PREFILL_WAIT = 3  # decode steps that a lone prefill may be held back for others to join

Ended = tuple[Request, Completion | EngineError]


class SlotCache(Cache):
    """The key/value cache of the decoder: one preallocated row (slot) per session.

    Keys and values of all layers, each [slots, context + 1, kv heads, head dim] (heads inside positions, so that a
    token's keys are one contiguous row). Position `context` takes what padding writes and is never read. The model
    calls `update` once a layer; `aim` has set before which rows the batch stands for and where their new tokens go, so
    nothing is moved when sessions come and go. Memory is reserved but not touched until used.
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
        """Sets what the next forward pass is about.

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


class Decoder:
    """Slots, batches and samples for a causal language model of `transformers` (dense full attention).

    Not thread-safe; give it one thread. Requests come checked, one of a session at a time, with ids in the vocabulary
    and room for `max_new_tokens`; completions carry no fingerprints. `seed` starts the streams of requests that bring
    no seed of their own: request number k gets a stream derived from (seed, k).
    """

    def __init__(self, model: torch.nn.Module, slots: int, context: int, seed: int, prefill_tokens: int = 4096) -> None:
        self.model = model.eval()
        self.context = context
        self.version = 0
        self.sampled_tokens = 0
        self.waiting: deque[Request] = deque()  # for a slot
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._cache = SlotCache(slots, context)
        self._seed = seed
        self._admitted = 0
        self._prefill_tokens = prefill_tokens
        self._held_back = 0
        self._poisoned = False
        self._ended: list[Ended] = []
        self._sessions: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._free = list(range(slots - 1, -1, -1))
        self._requests: list[Request | None] = [None] * slots
        self._tokens = np.zeros((slots, context), np.int64)
        self._logprobs = np.zeros((slots, context), np.float32)
        self._versions = np.zeros((slots, context), np.int64)
        self._active = np.zeros(slots, bool)
        self._length = np.zeros(slots, np.int64)  # ids held
        self._cached = np.zeros(slots, np.int64)  # of them with valid keys and values
        self._start = np.zeros(slots, np.int64)  # where the completion begins
        self._limit = np.zeros(slots, np.int64)  # length at which sampling ends
        self._seeds = np.zeros(slots, np.int64)
        self._temperature = np.ones(slots, np.float32)
        self._stops = np.full((slots, 1), -1, np.int64)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return int(self._active.sum())

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self.waiting or self._ended or self._active.any())

    def set_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Copies the tensors into the model and drops all cached keys and values; further tokens carry this version.

        Names are those of `weights_of` the model. Raises `WeightsError` before anything is changed (see `weights.fit`).
        """
        wanted = weights_of(self.model)
        first = {id(tensor): name for name, tensor in wanted.items()}
        names = {name: first[id(tensor)] for name, tensor in self.model.state_dict(keep_vars=True).items()}
        found = weights.fit(version, tensors, wanted, {name: one for name, one in names.items() if name != one})
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(found[name])
        self._cached[:] = 0
        if self._poisoned:
            self._cache.clear()
            self._poisoned = False
        self.version = version

    def add(self, request: Request) -> None:
        """Takes a request; it runs as soon as there is a slot."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Drops a request without a completion; what its session has cached stays."""
        slot = self._sessions.get(request.session)
        if request in self.waiting:
            self.waiting.remove(request)
        elif slot is not None and self._requests[slot] is request:
            self._finish(slot, "abort")

    def release(self, session: str) -> None:
        """Frees the session's slot; its request ends as "abort" with the next step."""
        for request in [request for request in self.waiting if request.session == session]:
            self.waiting.remove(request)
            self._ended.append((request, no_tokens("abort")))
        slot = self._sessions.pop(session, None)
        if slot is not None:
            if self._active[slot]:
                self._ended.append(self._finish(slot, "abort"))
            self._cached[slot] = 0
            self._free.append(slot)

    def step(self) -> list[Ended]:
        """Prefills what is new and samples one token for every other running request; returns what ended."""
        while self.waiting and self._admit(self.waiting[0]):
            self.waiting.popleft()
        active = np.flatnonzero(self._active)
        pending = self._length[active] - self._cached[active]
        fresh, ready = active[pending > 1], active[pending == 1]
        # A pass costs nearly the same for one row as for many: let prefills gather unless they are all there is.
        self._held_back += 1
        if fresh.size and (_PREFILL_SHARE * fresh.size >= ready.size or self._held_back > _PREFILL_WAIT):
            self._held_back = 0
            for rows in self._chunks(fresh):
                self._advance(rows, np.minimum(self._length[rows] - self._cached[rows], self._prefill_tokens))
        if ready.size:
            self._advance(ready, None)
        ended, self._ended = self._ended, []
        return ended

    def _admit(self, request: Request) -> bool:
        """Gives a request a slot; False when every slot is running another."""
        slot = self._slot_of(request.session)
        if slot is None:
            return False
        prompt = request.prompt_ids.astype(np.int64)
        # Keys depend on the prefix alone, so whatever part of it agrees is reused; one id must be left to compute.
        same = self._tokens[slot, : min(int(self._cached[slot]), prompt.size - 1)]
        agrees = same == prompt[: same.size]
        self._cached[slot] = same.size if agrees.all() else int(np.argmin(agrees))
        self._tokens[slot, : prompt.size] = prompt
        self._length[slot] = self._start[slot] = prompt.size
        self._limit[slot] = prompt.size + request.max_new_tokens
        own = derive_seed(self._seed, self._admitted) if request.seed is None else request.seed
        self._seeds[slot] = own & (2**63 - 1)
        self._temperature[slot] = request.temperature
        stops = request.stop_token_ids
        if len(stops) > self._stops.shape[1]:
            more = np.full((self._stops.shape[0], len(stops) - self._stops.shape[1]), -1, np.int64)
            self._stops = np.concatenate((self._stops, more), axis=1)
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops
        self._requests[slot] = request
        self._active[slot] = True
        self._admitted += 1
        return True

    def _slot_of(self, session: str) -> int | None:
        slot = self._sessions.get(session)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                idle = next((name for name, at in self._sessions.items() if not self._active[at]), None)
                if idle is None:
                    return None
                slot = self._sessions.pop(idle)
            self._cached[slot] = 0
            self._sessions[session] = slot
        self._sessions.move_to_end(session)
        return slot

    def _chunks(self, rows: np.ndarray) -> list[np.ndarray]:
        """Groups of like length whose padded size stays within `prefill_tokens`."""
        pending = self._length[rows] - self._cached[rows]
        rows = rows[np.argsort(pending, kind="stable")]
        pending = np.minimum(np.sort(pending), self._prefill_tokens)
        groups, begin = [], 0
        for end in range(1, rows.size + 1):
            if end == rows.size or (end + 1 - begin) * pending[end] > self._prefill_tokens:
                groups.append(rows[begin:end])
                begin = end
        return groups

    def _advance(self, rows: np.ndarray, new: np.ndarray | None) -> None:
        """One forward pass over `new` ids a row (None: one each), then one token for the rows that are complete."""
        if new is None:
            logits = self._decode(rows)
            self._cached[rows] += 1
        else:
            logits = self._prefill(rows, new)
            self._cached[rows] += new
            whole = self._cached[rows] == self._length[rows]
            if not whole.all():
                rows, logits = rows[whole], logits[torch.from_numpy(whole)]
                if not rows.size:
                    return
        length = self._length[rows]
        draws = uniforms(self._seeds[rows], length - self._start[rows])
        tokens, logprobs = sample(logits, self._temperature[rows], draws)
        self._tokens[rows, length] = tokens
        self._logprobs[rows, length] = logprobs
        self._versions[rows, length] = self.version
        length += 1
        self._length[rows] = length
        self.sampled_tokens += rows.size
        stop = (self._stops[rows] == tokens[:, None]).any(1)
        bad = ~np.isfinite(logprobs)
        done = np.flatnonzero(stop | bad | (length >= self._limit[rows]))
        for at in done.tolist():
            request, completion = self._finish(int(rows[at]), "stop" if stop[at] else "length")
            if bad[at]:
                self._poisoned = True
                self._cached[rows[at]] = 0
                text = f"bad_logprob: request {request.id}: log-prob {logprobs[at]} under version {self.version}"
                self._ended.append((request, EngineError(text)))
            else:
                self._ended.append((request, completion))

    def _decode(self, rows: np.ndarray) -> torch.Tensor:
        """Logits [len(rows), vocabulary] after the last id of each row."""
        top = int(rows[-1]) + 1
        # If most low slots run, compute on all of them: reading the cache in place beats copying the rows out. The
        # others write to their first invalid position, which is overwritten before it is read.
        dense = 2 * rows.size >= top
        batch = np.arange(top) if dense else rows
        positions = np.minimum(self._cached[batch], self.context - 1)
        write = batch * (self.context + 1) + self._cached[batch]
        ids = self._tokens[batch, positions]
        logits = self._forward(top if dense else batch, ids[:, None], positions[:, None], write)
        return logits[torch.from_numpy(rows)] if dense and rows.size < top else logits

    def _prefill(self, rows: np.ndarray, new: np.ndarray) -> torch.Tensor:
        """Logits [len(rows), vocabulary] after `new` more ids of each row, which are aligned at the right."""
        width = int(new.max())
        first = self._cached[rows][:, None]
        positions = first + (new[:, None] - width) + np.arange(width)
        padding = positions < first
        write = rows[:, None] * (self.context + 1) + np.where(padding, self.context, positions)
        positions = np.maximum(positions, 0)
        return self._forward(rows, self._tokens[rows[:, None], positions], positions, write.reshape(-1))

    def _forward(
        self, rows: np.ndarray | int, ids: np.ndarray, positions: np.ndarray, write: np.ndarray
    ) -> torch.Tensor:
        read = min(-(-(int(positions.max()) + 1) // _READ_STEP) * _READ_STEP, self.context)
        mask = np.where(np.arange(read) <= positions[:, None, :, None], np.float32(0), np.float32(-np.inf))
        at = rows if isinstance(rows, int) else torch.from_numpy(rows)
        self._cache.aim(at, torch.from_numpy(write), read)
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask).to(self.model.dtype),  # type: ignore[arg-type]
                position_ids=torch.from_numpy(positions),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            return output.logits[:, -1]

    def _finish(self, slot: int, reason: StopReason) -> tuple[Request, Completion]:
        request = self._requests[slot]
        assert request is not None
        part = slice(int(self._start[slot]), int(self._length[slot]))
        completion = Completion(
            self._tokens[slot, part].astype(np.int32),
            self._logprobs[slot, part].copy(),
            spans_of(self._versions[slot, part]),
            reason,
        )
        self._requests[slot] = None
        self._active[slot] = False
        return request, completion


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (a tied one once, under its first name) and saved buffers by name: what an update carries."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}
