"""What a generation engine is: token ids in, token ids with log-probs and policy versions out.

An engine never sees text. It samples with temperature only, so that the log-prob it reports is the log-prob of the
distribution it drew from. This file imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from sao.errors import EngineError

if TYPE_CHECKING:
    from sao.transport.reference import WeightsRef

StopReason = Literal["stop", "length", "context", "abort"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One assistant turn to sample.

    id: unique among the requests in flight.
    session: the conversation it belongs to; an engine may reuse what it cached for this session when `prompt_ids`
        extends it. At most one request of a session is in flight.
    prompt_ids: int32[n], n >= 1: the whole context, from its first token.
    max_new_tokens: most tokens to sample, >= 1; an engine further limits it to the room left in its context window.
    temperature: logits are divided by it; 0 takes the most likely token (evaluation only).
    stop_token_ids: sampling ends with the first of these; it is part of the completion.
    seed: own stream of random numbers where an engine has one per request (see the engine); None: the engine's stream.
    """

    id: str
    session: str
    prompt_ids: np.ndarray
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was sampled.

    token_ids: int32[m], the stop token included when it was sampled.
    logprobs: float32[m], natural logarithm, under logits / temperature (temperature 0: of the unscaled logits).
    version_spans: int64[k, 3], rows (start, stop, version) that tile [0, m) in order, versions non-decreasing.
    stop_reason: stop (a stop token was sampled), length (the token limit or the end of the context window was reached),
        context (no room for even one token; m = 0), abort (released or closed while in flight; what was sampled until
        then is in it).
    fingerprints: policy version -> fingerprint of the weights that sampled.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: np.ndarray
    stop_reason: StopReason
    fingerprints: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since `start`, and the present load.

    Since the start: busy_s (seconds of computing), sampled_tokens, preempted (times that a running request was thrown
    back to the queue for lack of memory). Now: running and waiting requests, kv_use (share of the KV cache, 0 to 1).
    """

    busy_s: float = 0.0
    sampled_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    preempted: int = 0


class Engine(Protocol):
    """A generation engine. All methods are called from one asyncio loop, which they never block."""

    @property
    def version(self) -> int:
        """Policy version of the weights that sample the next token."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of these weights (32 hex characters)."""
        ...

    @property
    def facts(self) -> dict[str, str]:
        """What a trajectory's metadata tell of the engine: `engine`, `version_source` and `kv_after_update`."""
        ...

    @property
    def broken(self) -> str | None:
        """Why this engine will never sample again, or None."""
        ...

    async def start(self, ref: WeightsRef | None) -> None:
        """Loads the model; with `ref` the published weights instead of those in the model folder (version 0).

        Raises `EngineError`, or `WeightsError` when `ref` does not fit the model.
        """
        ...

    async def generate(self, request: Request) -> Completion:
        """Samples one turn. Raises `EngineError` for a request that makes no sense, `ClosedError` after `close`.

        Cancelling the awaiting task drops the request.
        """
        ...

    async def update_weights(self, ref: WeightsRef) -> None:
        """Takes over published weights; returns when every further token is sampled from them.

        Requests in flight continue: their next tokens carry the new version. All or nothing: raises `WeightsError` and
        keeps the old weights when the update is incomplete, does not fit or its fingerprint differs, and `EngineError`
        when `ref.version` is below the present version.
        """
        ...

    async def release(self, session: str) -> None:
        """Frees what is cached for the session; a request in flight ends with "abort". Unknown sessions are ignored."""
        ...

    async def close(self) -> None:
        """Frees everything; requests in flight end with `ClosedError`. May be called twice."""
        ...

    def stats(self) -> EngineStats:
        """Counters; cheap, from any thread."""
        ...


def check_request(request: Request) -> None:
    """Raises `EngineError` that names the field when the request makes no sense."""
    ids = request.prompt_ids
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise EngineError(f"request {request.id}: prompt_ids: expected a non-empty int32[n] array")
    if int(ids.min()) < 0:
        raise EngineError(f"request {request.id}: prompt_ids: negative token id {int(ids.min())}")
    if request.max_new_tokens < 1:
        raise EngineError(f"request {request.id}: max_new_tokens: {request.max_new_tokens}, expected >= 1")
    if not (np.isfinite(request.temperature) and request.temperature >= 0):
        raise EngineError(f"request {request.id}: temperature: {request.temperature}, expected a finite number >= 0")


def check_completion(request: Request, completion: Completion) -> None:
    """Raises `EngineError` when a completion breaks its contract; nothing that fails here may be trained on.

    Checked: arrays and their lengths (ids without log-probs is the usual fault of an engine), finite log-probs <= 0,
    spans that tile the tokens with non-decreasing versions and a fingerprint each, the token limit, and that the stop
    reason agrees with the last token. The message starts with a reason code: `no_token_capture`, `bad_logprob` or
    `bad_completion`.
    """
    who = f"request {request.id}"
    ids, logprobs, spans = completion.token_ids, completion.logprobs, completion.version_spans
    if ids is None or logprobs is None or spans is None:
        missing = [n for n, v in (("token_ids", ids), ("logprobs", logprobs), ("version_spans", spans)) if v is None]
        raise EngineError(f"no_token_capture: {who}: {', '.join(missing)} missing from the completion")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise EngineError(f"bad_completion: {who}: token_ids: {ids.dtype}[{ids.shape}], expected int32[m]")
    if logprobs.shape != ids.shape:
        raise EngineError(
            f"no_token_capture: {who}: {ids.size} token ids but {logprobs.size} log-probs"
            if ids.size
            else f"bad_completion: {who}: {logprobs.size} log-probs without token ids"
        )
    if ids.size == 0 and completion.stop_reason not in ("context", "abort"):
        raise EngineError(f"no_token_capture: {who}: no token ids, stop reason {completion.stop_reason}")
    wrong = ~(np.isfinite(logprobs) & (logprobs <= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise EngineError(f"bad_logprob: {who}: log-prob {logprobs[at]} of token {at}, expected finite and <= 0")
    if ids.size and int(ids.min()) < 0:
        raise EngineError(f"bad_completion: {who}: negative token id {int(ids.min())}")
    if ids.size > request.max_new_tokens:
        raise EngineError(f"bad_completion: {who}: {ids.size} tokens, at most {request.max_new_tokens} were asked for")
    _check_spans(who, ids.size, completion)
    stops = set(request.stop_token_ids)
    if completion.stop_reason == "stop" and int(ids[-1]) not in stops:
        raise EngineError(
            f"bad_completion: {who}: stop reason stop, but the last token {int(ids[-1])} is no stop token"
        )
    inner = (ids[:-1] if completion.stop_reason == "stop" else ids).tolist()
    if not stops.isdisjoint(inner):
        at = next(at for at, token in enumerate(inner) if token in stops)
        raise EngineError(f"bad_completion: {who}: stop token {inner[at]} at {at} did not end the completion")


def _check_spans(who: str, n: int, completion: Completion) -> None:
    spans = completion.version_spans
    if spans.ndim != 2 or spans.shape[1] != 3:
        raise EngineError(f"bad_completion: {who}: version_spans: shape {spans.shape}, expected [k, 3]")
    at, last = 0, 0
    for start, stop, version in spans.tolist():
        if start != at or stop <= start or version < last:
            raise EngineError(f"bad_completion: {who}: version span {(start, stop, version)} after {(at, last)}")
        if version not in completion.fingerprints:
            raise EngineError(f"bad_completion: {who}: no fingerprint of version {version}")
        at, last = stop, version
    if at != n:
        raise EngineError(f"no_token_capture: {who}: version_spans end at {at}, there are {n} tokens")


def empty_completion(reason: StopReason) -> Completion:
    """No token: there was no room ("context"), or the request was dropped before it began ("abort")."""
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), np.empty((0, 3), np.int64), reason)


def spans_of(versions: np.ndarray) -> np.ndarray:
    """Run-length form of one policy version per token: int64[m] -> int64[k, 3] rows (start, stop, version)."""
    versions = np.asarray(versions, dtype=np.int64)
    if versions.size == 0:
        return np.empty((0, 3), dtype=np.int64)
    if (versions == versions[0]).all():
        return np.array([[0, versions.size, versions[0]]], dtype=np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(versions)) + 1))
    stops = np.concatenate((starts[1:], [versions.size]))
    return np.stack([starts, stops, versions[starts]], axis=1).astype(np.int64)
