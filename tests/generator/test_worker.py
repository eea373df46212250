"""The generator process against a broker's end of the line that is scripted by the test."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
import torch
from scripted import Reply, ScriptedEngine
from tiny_model import make_model

from sao.config import Config, parse, save
from sao.engines.base import Request
from sao.engines.torch_engine import load_model
from sao.envs.protocol import Message, StepResult
from sao.errors import ConfigError, EngineError, EnvironmentFailure, TransportError, WeightsError
from sao.generator.player import Player
from sao.generator.worker import Generator
from sao.rollout.chat import Renderer
from sao.trajectory import Trajectory, decode
from sao.transport import messages
from sao.transport.actor import Actor
from sao.transport.client import Callbacks, Client
from sao.transport.mailbox import Peer
from sao.transport.mailbox import Request as Incoming
from sao.transport.messages import (
    Ack,
    CancelTask,
    Diverged,
    EvalResult,
    FailedRollout,
    FinishedRollout,
    KeptTurn,
    Loaded,
    NewWeights,
    Slots,
    Stats,
    Stop,
    TaskEntry,
    Tasks,
    WeightsRef,
    Welcome,
)
from sao.transport.sockets import Limits, private_folder
from sao.transport.weights import publish

END = 2
SILENCE_S = 5.0  # on the line: a busy machine may let a process wait for a second
FAST = {"heartbeat_s": 0.1, "peer_timeout_s": 1.0, "shutdown_s": 2.0}


class Count:
    """Two turns; the reward is 1. What `trouble` says happens at the first step."""

    reward_range = (0.0, 1.0)
    replayable = True
    open = 0

    def __init__(self, trouble: str = "") -> None:
        self.trouble, self.turns = trouble, 0
        Count.open += 1

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        return (Message("user", "a b"),)

    async def step(self, text: str) -> StepResult:
        self.turns += 1
        if self.trouble == "fail":
            raise EnvironmentFailure("tool_gone", "no such tool")
        if self.trouble == "odd failure":
            raise EnvironmentFailure("tool_gone", "no such file: \udcff")
        if self.trouble == "odd text":
            return StepResult((Message("tool", "\udcff"),), None, False)
        if self.trouble == "odd reward":
            return StepResult((), 10**400, True)
        if self.trouble == "hang":
            await asyncio.sleep(3600)
        return StepResult((), 1.0, True) if self.turns == 2 else StepResult((Message("tool", "c"),), None, False)

    async def close(self) -> None:
        Count.open -= 1


M = TypeVar("M", bound=messages.Message)


class Broker:
    """Keeps all it gets and acknowledges it, after `ack_delay_s`."""

    def __init__(self, endpoint: str) -> None:
        self.got: list[messages.Message] = []
        self.trajectories: list[Trajectory] = []
        self.peers: list[Peer] = []
        self.left: list[str] = []
        self.welcome = Welcome()
        self.accept = True
        self._news = threading.Condition()
        self.actor = Actor(
            endpoint, on_join=self._join, on_leave=self._leave, limits=Limits(heartbeat_s=0.1, peer_timeout_s=SILENCE_S)
        )
        for kind in (Slots, FinishedRollout, FailedRollout, EvalResult, Stats, Loaded, Diverged, KeptTurn):
            self.actor.on(kind, self._take)
        self._thread = threading.Thread(target=self.actor.run, daemon=True)
        self._thread.start()

    def push(self, message: messages.Message) -> None:
        self.actor.call(lambda: self.actor.mailbox.push(self.peers[-1], message))

    def tasks(self, *ordinals: int, split: Literal["train", "eval"] = "train", attempt: int = 1) -> None:
        self.push(Tasks(tuple(TaskEntry(n, attempt, n, split) for n in ordinals)))

    def wait(self, true: Callable[[], Any], limit_s: float = 30.0) -> Any:
        with self._news:
            assert self._news.wait_for(true, limit_s), self.got
        return true()

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.got if isinstance(message, kind)]

    def close(self) -> None:
        self.actor.stop()
        self._thread.join(5)
        self.actor.close(0)

    def _join(self, peer: Peer) -> Welcome:
        with self._news:
            self.peers.append(peer)
            self._news.notify_all()
        return self.welcome

    def _leave(self, peer: Peer, reason: str) -> None:
        with self._news:
            self.left.append(reason)
            self._news.notify_all()

    def _take(self, request: Incoming[messages.Message]) -> Ack:
        with self._news:
            self.got.append(request.message)
            if isinstance(request.message, FinishedRollout):
                header, payload, *sidecars = map(bytes, request.message.frames)
                self.trajectories.append(decode(header, payload, sidecars=sidecars))
            self._news.notify_all()
        return Ack(self.accept, "" if self.accept else "late")


@pytest.fixture
def broker() -> Iterator[Broker]:
    folder = private_folder()
    made = Broker(f"ipc://{folder}/broker")
    yield made
    made.close()
    shutil.rmtree(folder)


def configured(path: Path, trouble: str = "", **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": {"path": str(path)},
        "env": {"name": f"{__name__}:Count", "args": {"trouble": trouble}},
        "sampling": {"max_response_tokens": 6, "context_tokens": 64},
        "generator": {"engine": "scripted", "concurrency": 4},
        "transport": FAST,
        "eval": {"temperature": 0.0},
    }
    return parse({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


@contextmanager
def running(
    broker: Broker, config: Config, engine: Any, ready: bool = True, summariser: Any = None
) -> Iterator[Generator]:
    """A generator in a thread of its own; what ends it is raised at the end."""
    renderer = Renderer(config.model.path)

    def connect(calls: Callbacks) -> Client:
        limits = Limits(config.transport.max_message_bytes, heartbeat_s=0.1, peer_timeout_s=SILENCE_S)
        return Client(broker.actor.endpoint, role="generator", name="g0", limits=limits, calls=calls)

    made: list[Generator] = []
    raised: list[BaseException] = []
    begun = threading.Event()

    async def main() -> None:
        made.append(Generator(Player(config, engine, renderer, 5, summariser), connect))
        begun.set()
        await made[0].run()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            raised.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait(10)
    try:
        if ready:
            broker.wait(lambda: broker.all(Slots) or raised)
        if ready and raised:
            raise raised[0]
        yield made[0]
        if thread.is_alive() and broker.peers:
            broker.push(Stop("end of test"))
    finally:
        thread.join(10)
        assert not thread.is_alive()
    if raised:
        raise raised[0]


def one_token_then(script: Callable[[Request, int], Reply]) -> Callable[[Request, int], Reply]:
    """The health check is answered well, then comes the script."""
    return lambda request, n: Reply([20], stop_reason="length") if n == 0 else script(request, n - 1)


def engine_that(script: Callable[[Request, int], Reply] = lambda r, n: Reply([20, 21, END]), **more: Any) -> Any:
    return ScriptedEngine(one_token_then(script), **more)


def test_tasks_become_trajectories_and_slots_are_stated_absolutely(tiny_model: Path, broker: Broker) -> None:
    engine = engine_that()
    with running(broker, configured(tiny_model), engine):
        assert broker.all(Slots) == [Slots(4, 0)]
        assert broker.all(Loaded) == [Loaded(0, engine.fingerprint)]
        broker.tasks(10, 11)
        broker.tasks(12)
        broker.wait(lambda: len(broker.trajectories) == 3)
        broker.wait(lambda: broker.all(Slots)[-1] == Slots(4, 3))
        broker.wait(lambda: broker.all(Stats))
    assert {t.task_ordinal for t in broker.trajectories} == {10, 11, 12}
    assert all(t.reward == 1.0 and t.n_actions == 6 and t.attempt == 1 for t in broker.trajectories)
    assert broker.all(Stats)[-1].episode_limit == 4
    assert broker.wait(lambda: broker.left) == ["left in order"]
    assert engine.closed and Count.open == 0
    assert engine.calls[0] == ("start", None)


def test_a_slot_is_free_only_after_the_acknowledgement(tiny_model: Path, broker: Broker) -> None:
    broker.accept = False  # refused is acknowledged too
    with running(broker, configured(tiny_model), engine_that()):
        broker.tasks(1)
        broker.wait(lambda: len(broker.all(Slots)) > 1)
    order = [type(message) for message in broker.got if not isinstance(message, Stats | KeptTurn)]
    assert order[:4] == [Loaded, Slots, FinishedRollout, Slots]


def test_evaluation_is_greedy_and_sends_a_result_only(tiny_model: Path, broker: Broker) -> None:
    engine = engine_that()
    with running(broker, configured(tiny_model), engine):
        broker.tasks(3, split="eval")
        broker.tasks(3)
        broker.wait(lambda: broker.all(EvalResult) and broker.trajectories)
    (result,) = broker.all(EvalResult)
    assert (result.ordinal, result.reward, result.version) == (3, 1.0, 0)
    assert len(broker.trajectories) == 1 and broker.trajectories[0].metadata["split"] == "train"
    kinds = {request.session.split("/")[0]: request.temperature for request in engine.requests[1:]}
    assert kinds == {"eval": 0.0, "train": 1.0}


@pytest.mark.parametrize(
    ("trouble", "script", "reason", "tokens"),
    [
        ("fail", lambda r, n: Reply([20, 21, END]), "tool_gone", 3),
        ("odd failure", lambda r, n: Reply([20, 21, END]), "tool_gone", 3),
        ("odd text", lambda r, n: Reply([20, 21, END]), "bad_messages", 3),
        ("odd reward", lambda r, n: Reply([20, 21, END]), "bad_reward", 3),
        ("", lambda r, n: Reply([20, END], [-1, float("nan")]), "bad_logprob", 2),
        ("", lambda r, n: Reply([20, 21, END], [-1, -1]), "no_token_capture", 3),
        ("", lambda r, n: Reply([20] if n else [20, END], stop_reason="abort" if n else "stop"), "aborted", 3),
    ],
)
def test_failures_are_messages_with_a_reason(
    tiny_model: Path, broker: Broker, trouble: str, script: Any, reason: str, tokens: int
) -> None:
    with running(broker, configured(tiny_model, trouble), engine_that(script)):
        broker.tasks(7)
        (failure,) = broker.wait(lambda: broker.all(FailedRollout))
        broker.tasks(8, split="eval")
        (result,) = broker.wait(lambda: broker.all(EvalResult))
        broker.wait(lambda: broker.all(Slots)[-1] == Slots(4, 2))
    assert (failure.ordinal, failure.attempt, failure.reason) == (7, 1, reason)
    assert failure.sampled_tokens == tokens
    assert result.reward is None and result.reason == reason
    assert not broker.trajectories and Count.open == 0


def test_turns_that_are_none_cost_only_themselves(tiny_model: Path, broker: Broker) -> None:
    tasks = (TaskEntry(5, 1, 5, "train", 1), TaskEntry(6, 1, 6, "train", 1), TaskEntry(7, 1, 5, "train"))
    with running(broker, configured(tiny_model), engine_that(lambda r, n: Reply([20, 21, END]))):
        broker.push(Tasks(tasks, frames=(b"\xc1", b"", b"\xc1", b"")))
        broker.wait(lambda: len(broker.trajectories) == 3)
    assert [message.ordinal for message in broker.all(Diverged)] == [5, 6]


def test_the_newest_weights_win(tiny_model: Path, broker: Broker) -> None:
    engine = engine_that(update_delay_s=0.2)
    with running(broker, configured(tiny_model), engine):
        for version in (1, 2, 3, 4):
            broker.push(NewWeights(WeightsRef(version, "nowhere", f"{version:032x}")))
        broker.wait(lambda: broker.all(Loaded)[-1].version == 4)
        broker.tasks(1)
        broker.wait(lambda: broker.trajectories)
    updates = [version for kind, version in engine.calls if kind == "update_weights"]
    assert updates[-1] == 4 and len(updates) <= 2 and updates == sorted(updates)
    assert broker.trajectories[0].fingerprints == {4: f"{4:032x}"}


def test_weights_of_the_welcome_are_loaded_before_the_first_slot_is_offered(tiny_model: Path, broker: Broker) -> None:
    broker.welcome = Welcome(9, WeightsRef(9, "x", "9" * 32))
    engine = engine_that()
    with running(broker, configured(tiny_model), engine):
        assert broker.got[0] == Loaded(9, "9" * 32)
    assert [kind for kind, _ in engine.calls[:3]] == ["start", "update_weights", "generate"]


def test_refused_weights_wait_for_newer_ones_and_else_end_the_generator(tiny_model: Path, broker: Broker) -> None:
    engine = engine_that()
    with pytest.raises(WeightsError, match="torn"), running(broker, configured(tiny_model), engine):
        engine.weights_error = WeightsError("gone")
        broker.push(NewWeights(WeightsRef(1, "x", "1" * 32)))
        while ("update_weights", 1) not in engine.calls:
            time.sleep(0.01)
        broker.push(NewWeights(WeightsRef(2, "x", "2" * 32)))
        broker.wait(lambda: broker.all(Loaded)[-1].version == 2)
        engine.weights_error = WeightsError("torn")
        broker.push(NewWeights(WeightsRef(3, "x", "3" * 32)))
        broker.wait(lambda: broker.left)


def test_a_cancelled_task_frees_its_slot_without_a_word(tiny_model: Path, broker: Broker) -> None:
    with running(broker, configured(tiny_model, "hang"), engine_that()):
        broker.tasks(1, 2)
        broker.tasks(1, split="eval")  # the number is the same, and nobody has left it
        broker.wait(lambda: Count.open == 3)
        broker.push(CancelTask(1, 1))
        broker.wait(lambda: broker.all(Slots)[-1] == Slots(2, 3))
        assert not broker.all(FailedRollout) and not broker.trajectories
    assert Count.open == 0


def test_stop_ends_hanging_episodes_in_time(tiny_model: Path, broker: Broker) -> None:
    engine = engine_that(lambda r, n: Reply([20, END], delay_s=60))
    with running(broker, configured(tiny_model), engine):
        broker.tasks(1, 2, 3)
        broker.wait(lambda: Count.open == 3)
        began = time.monotonic()
    assert time.monotonic() - began < 8.0  # their answers take a minute; `shutdown_s` is 2
    assert engine.closed and Count.open == 0 and not broker.all(FailedRollout)


def test_a_silent_broker_ends_the_generator(tiny_model: Path, broker: Broker) -> None:
    engine = engine_that(lambda r, n: Reply([20, END], delay_s=60))
    with pytest.raises(TransportError, match="silent"), running(broker, configured(tiny_model), engine) as generator:
        broker.tasks(1)
        broker.actor.stop()
        while not generator._stopped.is_set():
            time.sleep(0.05)
    assert engine.closed and Count.open == 0


def test_an_engine_that_fails_its_first_token_never_joins_the_work(tiny_model: Path, broker: Broker) -> None:
    for reply in (Reply([20], []), Reply([], stop_reason="abort"), Reply([20], error=EngineError("no"))):
        engine = ScriptedEngine(lambda request, n, reply=reply: reply)
        with pytest.raises(EngineError), running(broker, configured(tiny_model), engine, ready=False):
            pass
    assert not broker.all(Slots)


def test_an_engine_that_is_broken_for_good_ends_the_generator_not_the_run(tiny_model: Path, broker: Broker) -> None:
    engine = engine_that(lambda r, n: Reply([], error=EngineError("engine: out of memory")))
    with pytest.raises(EngineError, match="out of memory"), running(broker, configured(tiny_model), engine):
        broker.tasks(1, 2, 3)
        broker.wait(lambda: broker.left)
    assert not broker.all(FailedRollout)


def test_an_engine_that_failed_once_costs_one_task(tiny_model: Path, broker: Broker) -> None:
    def script(request: Request, n: int) -> Reply:
        if n == 0:
            return Reply([], error=EngineError("engine: hiccup"))
        return Reply([20], stop_reason="length") if request.max_new_tokens == 1 else Reply([20, END])

    engine = engine_that(script)
    with running(broker, configured(tiny_model), engine):
        broker.tasks(1)
        (failure,) = broker.wait(lambda: broker.all(FailedRollout))
        broker.tasks(2)
        broker.wait(lambda: broker.trajectories)
    assert failure.reason == "engine_error" and "hiccup" in failure.detail


def test_a_trajectory_larger_than_a_message_may_be_is_a_failure_of_its_own(broker: Broker, tiny_model: Path) -> None:
    large = configured(
        tiny_model,
        sampling={"max_response_tokens": 9000, "context_tokens": 20_000},
        learner={"row_tokens": 20_000},
        transport=FAST | {"max_message_bytes": 1 << 16},
    )
    engine = engine_that(lambda r, n: Reply([20] * (8000 if r.session.startswith("train/1/") else 3) + [END]))
    with running(broker, large, engine):
        broker.tasks(1, 2)
        broker.wait(lambda: broker.trajectories and broker.all(FailedRollout))
        (failure,) = broker.all(FailedRollout)
        assert failure.ordinal == 1 and failure.reason == "bad_trajectory"
        assert "transport.max_message_bytes = 65536" in failure.detail and failure.sampled_tokens == 16002
        assert [trajectory.task_ordinal for trajectory in broker.trajectories] == [2]


def test_a_wrong_environment_is_a_wrong_configuration(tiny_model: Path, broker: Broker) -> None:
    config = configured(tiny_model, env={"args": {"no": 1}})
    with pytest.raises(ConfigError, match="no"), running(broker, config, engine_that(), ready=False):
        pass


def start_process(config: Config, folder: Path, endpoint: str, **options: Any) -> subprocess.Popen[bytes]:
    save(config, folder / "config.json")
    argv = ["--run-folder", str(folder), "--endpoint", endpoint, "--name", "g0", "--incarnation", "0"]
    # The environments of this file are named by its module, which the process has to find too.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-m", "sao.generator", *argv], env=environment, **options)


def test_the_process_with_the_torch_engine(tiny_model: Path, tmp_path: Path, broker: Broker) -> None:
    """Real model, real weights, real line: every log-prob that arrives is that of its version's weights."""
    config = configured(
        tiny_model, env={"name": "lookup", "args": {}, "max_turns": 3}, generator={"engine": "torch", "concurrency": 8}
    )
    models = {0: load_model(tiny_model), 1: make_model(1)}
    process = start_process(config, tmp_path, broker.actor.endpoint, stderr=subprocess.PIPE)
    try:
        broker.wait(lambda: broker.all(Slots), 60)
        broker.tasks(*range(8))
        broker.wait(lambda: len(broker.trajectories) == 8, 30)
        ref = publish(dict(models[1].named_parameters()), tmp_path, 1)
        broker.push(NewWeights(ref))
        broker.wait(lambda: broker.all(Loaded)[-1] == Loaded(1, ref.fingerprint))
        broker.tasks(*range(8, 16))
        broker.wait(lambda: len(broker.trajectories) == 16, 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, process.stderr.read()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.communicate()
    for trajectory in broker.trajectories:
        (segment,) = trajectory.segments
        expected = 1 if trajectory.task_ordinal >= 8 else 0
        assert (trajectory.min_version, trajectory.max_version) == (expected, expected)
        with torch.inference_mode():
            ids = torch.from_numpy(segment.token_ids.astype(np.int64))[None]
            scores = torch.log_softmax(models[expected](input_ids=ids).logits[0].float(), -1)
        at = np.flatnonzero(segment.action_mask)
        again = scores[at - 1, segment.token_ids[at]].numpy()
        assert np.abs(again - segment.logprobs[at]).max() < 1e-4


def test_exit_codes_and_a_tool_that_blocks_for_ever(tiny_model: Path, tmp_path: Path, broker: Broker) -> None:
    wrong = configured(tiny_model, env={"name": "no_such_environment", "args": {}})
    process = start_process(wrong, tmp_path, broker.actor.endpoint, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and b"no_such_environment" in errors
    blocked = configured(tiny_model, env={"name": f"{__name__}:Blocked", "args": {}, "step_timeout_s": 0.2})
    process = start_process(blocked, tmp_path, broker.actor.endpoint)
    try:
        broker.wait(lambda: broker.all(Slots), 60)
        broker.tasks(1, 2)
        failures = broker.wait(lambda: len(broker.all(FailedRollout)) == 2 and broker.all(FailedRollout))
        assert {failure.reason for failure in failures} == {"timeout"}
        broker.push(Stop("done"))
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()


class Blocked(Count):
    """Its tool blocks in a thread and cannot be interrupted."""

    async def step(self, text: str) -> StepResult:
        await asyncio.to_thread(time.sleep, 600)
        raise AssertionError("unreachable")
