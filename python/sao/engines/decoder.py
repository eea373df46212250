"""Continuous batching without threads: many sessions, one model, a step at a time.

Each session owns a slot: the ids it has seen and how many of their keys and values are valid. A request is a slot with
ids whose keys are still missing: one id means decoding, more mean prefill. A weight update sets the valid count of all
slots to 0, so that requests in flight recompute their context under the new weights and go on.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import Cache

from sao.engines.base import Completion, Request, StopReason, no_tokens, spans_of
from sao.engines.sampling import sample, uniforms
from sao.engines.seeds import derive_seed
from sao.errors import EngineError, Error
from sao.transport import weights

PREFILL_TOKENS = 4096  # of one forward pass, padding included
_READ_STEP = 16  # the length attention reads is rounded up to this
_PREFILL_SHARE = 4  # prefill as soon as its rows are 1 in so many of those that decode
_PREFILL_WAIT = 3  # decode steps that a lone prefill may be held back for others to join

Ended = tuple[Request, Completion | Error]


class SlotCache(Cache):
    """The key/value cache of the decoder: one row (slot) per session, reserved but not touched until used.

    Keys and values of a layer, each [slots, context + 1, kv heads, head dim] (heads inside positions, so that a token's
    keys are one contiguous row). Position `context` takes what padding writes and is never read. The model calls
    `update` once a layer; `aim` has set before which rows the batch stands for and where their new tokens go, so
    nothing is moved when sessions come and go.
    """

    def __init__(self, slots: int, context: int) -> None:
        super().__init__(layers=[])
        self._shape = slots, context + 1
        self._stores: list[tuple[torch.Tensor, torch.Tensor]] = []

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
        if layer_idx == len(self._stores):
            self._stores.append((self._allocate(key_states), self._allocate(value_states)))
        keys, values = self._stores[layer_idx]
        return self._swap(keys, key_states), self._swap(values, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions and mask are always given to the model, nothing is derived from the cache."""
        return 0

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(*self._shape, states.shape[1], states.shape[3])

    def _swap(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        new = states.transpose(1, 2).flatten(0, 1)
        store.flatten(0, 1).index_copy_(0, self._write, new)
        if isinstance(self._rows, int):
            return store[: self._rows, : self._read].transpose(1, 2)
        return store[:, : self._read].index_select(0, self._rows).transpose(1, 2)


class Decoder:
    """Slots, batches and samples for a causal language model of `transformers` (dense full attention).

    Not thread-safe; give it one thread. Requests come checked, one of a session at a time, with ids in the vocabulary
    and room for `max_new_tokens`; completions carry no fingerprints. `seed` starts the streams of requests that bring
    no seed of their own: request number k gets a stream derived from (seed, k).

    waiting: new requests, append to it; each runs as soon as there is a slot. running: those that have one, by slot.
    """

    def __init__(self, model: torch.nn.Module, slots: int, context: int, seed: int) -> None:
        self.model = model.eval()
        self.context = context
        self.version = 0
        self.sampled_tokens = 0
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._cache = SlotCache(slots, context)
        self._seed = seed
        self._admitted = 0
        self._held_back = 0
        self._ended: list[Ended] = []
        # Slots by session, the one to be used next first: free ones under their number, then the least recently used.
        self._sessions: OrderedDict[str | int, int] = OrderedDict((slot, slot) for slot in range(slots))
        self._tokens = np.zeros((slots, context), np.int64)
        self._logprobs = np.zeros((slots, context), np.float32)
        self._versions = np.zeros((slots, context), np.int64)
        self._length = np.zeros(slots, np.int64)  # ids held
        self._cached = np.zeros(slots, np.int64)  # of them with valid keys and values
        self._start = np.zeros(slots, np.int64)  # where the completion begins
        self._seeds = np.zeros(slots, np.int64)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self.waiting or self._ended or self.running)

    def set_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Copies the tensors into the model and drops all cached keys and values; further tokens carry this version.

        Names are those of `weights_of` the model. Raises `WeightsError` before anything is changed (see `weights.fit`).
        """
        wanted, tied = weights_of(self.model)
        found = weights.fit(version, tensors, wanted, tied)
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(found[name])
        self._cached[:] = 0
        self._cache = SlotCache(len(self._cached), self.context)  # a NaN of broken weights would spread by 0 x NaN
        self.version = version

    def abort(self, request: Request) -> None:
        """Drops a request without a completion; what its session has cached stays."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif self.running.get(slot := self._sessions.get(request.session, -1)) is request:
            self._finish(slot, "abort")

    def release(self, session: str) -> None:
        """Frees the session's slot; its request ends as "abort" with the next step."""
        for request in [request for request in self.waiting if request.session == session]:
            self.waiting.remove(request)
            self._ended.append((request, no_tokens("abort")))
        slot = self._sessions.pop(session, None)
        if slot is not None:
            if slot in self.running:
                self._ended.append(self._finish(slot, "abort"))
            self._sessions[slot] = slot
            self._sessions.move_to_end(slot, last=False)

    def step(self) -> list[Ended]:
        """Prefills what is new and samples one token for every other running request; returns what ended."""
        while self.waiting and self._admit(self.waiting[0]):
            self.waiting.popleft()
        running = np.array(sorted(self.running), np.int64)
        pending = self._length[running] - self._cached[running]
        fresh, ready = running[pending > 1], running[pending == 1]
        # A pass costs nearly the same for one row as for many: let prefills gather unless they are all there is.
        self._held_back += 1
        if fresh.size and (_PREFILL_SHARE * fresh.size >= ready.size or self._held_back > _PREFILL_WAIT):
            self._held_back = 0
            for rows in self._chunks(fresh):
                self._advance(rows)
        if ready.size:
            self._advance(ready)
        ended, self._ended = self._ended, []
        return ended

    def _admit(self, request: Request) -> bool:
        """Gives a request a slot; False when every slot is running another."""
        session = request.session
        if session not in self._sessions:
            idle = next((name for name, slot in self._sessions.items() if slot not in self.running), None)
            if idle is None:
                return False
            self._sessions[session] = slot = self._sessions.pop(idle)
            self._cached[slot] = 0
        self._sessions.move_to_end(session)
        slot = self._sessions[session]
        prompt = request.prompt_ids.astype(np.int64)
        # Keys depend on the prefix alone, so whatever part of it agrees is reused; one id must be left to compute.
        same = self._tokens[slot, : min(int(self._cached[slot]), prompt.size - 1)]
        agrees = same == prompt[: same.size]
        self._cached[slot] = same.size if agrees.all() else int(np.argmin(agrees))
        self._tokens[slot, : prompt.size] = prompt
        self._length[slot] = self._start[slot] = prompt.size
        own = derive_seed(self._seed, self._admitted) if request.seed is None else request.seed
        self._seeds[slot] = own & (2**63 - 1)
        self.running[slot] = request
        self._admitted += 1
        return True

    def _chunks(self, rows: np.ndarray) -> list[np.ndarray]:
        """Groups of like length whose padded size stays within `PREFILL_TOKENS`."""
        pending = np.minimum(self._length[rows] - self._cached[rows], PREFILL_TOKENS)
        groups: list[list[int]] = [[]]
        for at in np.argsort(pending, kind="stable").tolist():
            if groups[-1] and (len(groups[-1]) + 1) * pending[at] > PREFILL_TOKENS:
                groups.append([])
            groups[-1].append(at)
        return [rows[group] for group in groups]

    def _advance(self, rows: np.ndarray) -> None:
        """One forward pass over the ids whose keys are missing, then one token for the rows that are complete."""
        new = np.minimum(self._length[rows] - self._cached[rows], PREFILL_TOKENS)
        logits = self._forward(rows, new)
        self._cached[rows] += new
        whole = self._cached[rows] == self._length[rows]
        if not whole.all():
            rows, logits = rows[whole], logits[torch.from_numpy(whole)]
            if not rows.size:
                return
        requests = [self.running[slot] for slot in rows.tolist()]
        length, temperatures = self._length[rows], np.array([one.temperature for one in requests], np.float32)
        before = length - self._start[rows]
        tokens, logprobs = sample(logits, temperatures, uniforms(self._seeds[rows], before))
        self._tokens[rows, length] = tokens
        self._logprobs[rows, length] = logprobs
        self._versions[rows, length] = self.version
        self._length[rows] = length + 1
        self.sampled_tokens += rows.size
        columns = (rows.tolist(), tokens.tolist(), logprobs.tolist(), before.tolist())
        for request, slot, token, logprob, n in zip(requests, *columns, strict=True):
            stop = token in request.stop_token_ids
            if not math.isfinite(logprob):
                self._finish(slot, "abort")
                self._cached[slot] = 0
                text = f"bad_logprob: request {request.id}: log-prob {logprob} under version {self.version}"
                self._ended.append((request, EngineError(text)))
            elif stop or n + 1 >= request.max_new_tokens:
                if request.watch is not None:
                    request.watch(token)
                self._ended.append(self._finish(slot, "stop" if stop else "length"))
            elif request.watch is not None and request.watch(token):
                self._ended.append(self._finish(slot, "watch"))

    def _forward(self, rows: np.ndarray, new: np.ndarray) -> torch.Tensor:
        """Logits [len(rows), vocabulary] after `new` more ids of each row, which are aligned at the right."""
        batch, width, top = rows, int(new.max()), int(rows.max()) + 1
        # If most low slots decode, compute on all of them: reading the cache in place beats copying the rows out.
        dense = width == 1 and 2 * rows.size >= top
        if dense:
            batch, new = np.arange(top), np.bincount(rows)
        first = self._cached[batch][:, None]
        positions = first + new[:, None] - width + np.arange(width)
        write = batch[:, None] * (self.context + 1) + np.where(positions < first, self.context, positions)
        positions = np.maximum(positions, 0)
        read = min(-(-(int(positions.max()) + 1) // _READ_STEP) * _READ_STEP, self.context)
        mask = np.where(np.arange(read) <= positions[:, None, :, None], np.float32(0), np.float32(-np.inf))
        self._cache.aim(top if dense else torch.from_numpy(rows), torch.from_numpy(write.reshape(-1)), read)
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.from_numpy(self._tokens[batch[:, None], positions]),
                attention_mask=torch.from_numpy(mask).to(self.model.dtype),  # type: ignore[arg-type]
                position_ids=torch.from_numpy(positions),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        return logits[torch.from_numpy(rows)] if rows.size < len(batch) else logits

    def _finish(self, slot: int, reason: StopReason) -> tuple[Request, Completion]:
        part = slice(int(self._start[slot]), int(self._length[slot]))
        ids, logprobs = self._tokens[slot, part].astype(np.int32), self._logprobs[slot, part].copy()
        return self.running.pop(slot), Completion(ids, logprobs, spans_of(self._versions[slot, part]), reason)


def weights_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The content of an update: parameters and saved buffers by name; the further names of tied ones -> the first."""
    saved, first = model.state_dict(keep_vars=True), {}  # type: dict[str, torch.Tensor], dict[int, str]
    tied = {name: one for name, tensor in saved.items() if (one := first.setdefault(id(tensor), name)) != name}
    return {name: tensor for name, tensor in saved.items() if name not in tied}, tied
