"""The broker as a process, with real sockets and scripted peers."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from broker.broker_world import config
from broker.peers import Generator, Learner, Process, Watcher, broker
from waiting import until

from sao import _core
from sao.broker.server import Server
from sao.errors import TransportError, ValidationError
from sao.transport import messages as m
from sao.transport import private_folder

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("generator_s", "learner_s"), [(0.0, 0.05), (0.02, 0.0)])
def test_a_whole_run_ends_by_itself(tmp_path: Path, generator_s: float, learner_s: float) -> None:
    """Generators much faster than the learner and the other way round: all leave within seconds of the last step."""
    with broker(tmp_path, run={"steps": 5}, eval={"every_steps": 2, "episodes": 3}) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher = Watcher(endpoint, cfg).join()
        learner = Learner(endpoint, cfg).join()
        generators = [Generator(endpoint, cfg, f"g{i}") for i in range(2)]
        for generator in generators:
            generator.delay_s = generator_s
            generator.start()
        learner.train(5, learner_s)
        assert isinstance(learner.take(), m.Stop)
        end = time.monotonic()
        assert watcher.wait(m.Done).reason == "all steps done"
        for generator in generators:
            assert generator.stopped.wait(5)
            generator.close()
        learner.client.close()
        assert process.wait(10) == 0
        assert time.monotonic() - end < 10
        watcher.client.close()
        assert [body.step for body in watcher.of(m.StepReport)] == [1, 2, 3, 4, 5]
        assert {body.step for body in watcher.of(m.EvalReport)} >= {0, 5}
        assert watcher.of(m.StepReport)[0].metrics["loss"] == 0.5
        assert len(set(learner.ordinals)) == 20
        tokens = watcher.of(m.Done)[0].tokens
        assert tokens["held"] == 0
        assert tokens["sampled"] == tokens["trained"] + sum(tokens["dropped"].values())
        assert not Path(endpoint.removeprefix("ipc://")).exists()
    with _core.Ledger(str(process.folder / "journal")) as ledger:
        assert ledger.counts()["trained"] == 20
        assert ledger.unfinished() == []
        ledger.check()


def test_a_killed_generators_tasks_are_done_by_others(tmp_path: Path) -> None:
    with broker(tmp_path, run={"steps": 3}) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher = Watcher(endpoint, cfg).join()
        argv = [sys.executable, "-m", "broker.peers", str(process.folder), endpoint, "g0"]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=TESTS)
        assert child.stdout is not None and int(child.stdout.readline()) > 0
        assert watcher.snapshot()["running"] == 8
        child.send_signal(signal.SIGKILL)
        child.wait(5)
        child.stdout.close()
        until(lambda: watcher.snapshot()["generators"] == {})
        snapshot = watcher.snapshot()
        assert (snapshot["running"], snapshot["queued"]) == (0, 8)
        learner = Learner(endpoint, cfg).join()
        replacement = Generator(endpoint, cfg, "g0", incarnation=1).start()
        learner.train(3)
        assert sorted(learner.ordinals) == list(range(12))
        assert not watcher.wait(m.Done).failed
        assert any("8 tasks in flight are started again" in e.text for e in watcher.of(m.Event))
        for peer in (replacement, learner.client, watcher.client):
            peer.close()
        assert process.wait() == 0


def test_a_killed_broker_starts_again_where_the_ledger_says(tmp_path: Path) -> None:
    with broker(tmp_path, run={"steps": 100}) as process:
        cfg, endpoint = process.config, process.endpoint
        learner = Learner(endpoint, cfg).join()
        generator = Generator(endpoint, cfg).start()
        learner.train(4)
        process.child.send_signal(signal.SIGKILL)
        process.child.wait(5)
        assert learner.lost.wait(8)  # the silence is noticed
        assert generator.lost.wait(8)
        generator.close()
        learner.client.close()
        again = Process(cfg, process.folder, endpoint)  # over the socket file that was left
        try:
            watcher = Watcher(endpoint, cfg).join()
            second = Learner(endpoint, cfg, incarnation=1).join(step=4)
            generator = Generator(endpoint, cfg, incarnation=1).start()
            second.welcome.step = 4
            second.train(4)
            trained = learner.ordinals + second.ordinals
            assert len(trained) == len(set(trained)) == 32
            assert max(trained) < 16 + 32
            assert watcher.snapshot()["ledger"]["trained"] == 32
            for peer in (generator, second.client, watcher.client):
                peer.close()
        finally:
            again.child.kill()
            again.child.wait(5)


def test_a_dead_learner_returns_its_batch_and_may_come_back(tmp_path: Path) -> None:
    with broker(tmp_path, run={"steps": 4}) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher = Watcher(endpoint, cfg).join()
        generator = Generator(endpoint, cfg).start()
        learner = Learner(endpoint, cfg).join()
        batch = learner.take()
        other = Learner(endpoint, cfg, name="second")
        with pytest.raises(TransportError, match="one learner"):
            other.join()
        other.client.close()
        again = Learner(endpoint, cfg, incarnation=1).join()  # fences the first
        assert learner.lost.wait(5)
        assert again.take().ordinals == batch.ordinals
        again.client.close()
        until(lambda: watcher.snapshot()["leased"] == 0)
        third = Learner(endpoint, cfg, incarnation=2).join()
        third.train(4)
        assert watcher.wait(m.Done).step == 4
        for peer in (generator, third.client, watcher.client):
            peer.close()
        assert process.wait() == 0


def test_a_take_that_timed_out_blocks_nobody(tmp_path: Path) -> None:
    with broker(tmp_path) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher, learner = Watcher(endpoint, cfg).join(), Learner(endpoint, cfg).join()
        with pytest.raises(TimeoutError, match="take: no answer"):
            learner.take(0.2)
        until(lambda: watcher.snapshot()["takes"] == 0)
        generator = Generator(endpoint, cfg).start()
        learner.train(2)
        with pytest.raises(ValidationError, match=r"take\.n: 99"):
            learner.call(m.Take(99))
        for peer in (generator, learner.client, watcher.client):
            peer.close()


def test_a_late_joiner_knows_version_and_weights_at_once(tmp_path: Path) -> None:
    with broker(tmp_path) as process:
        cfg, endpoint = process.config, process.endpoint
        generator, learner = Generator(endpoint, cfg).start(), Learner(endpoint, cfg).join()
        learner.train(3)
        until(lambda: generator.version == 3)
        late = Watcher(endpoint, cfg).join()
        assert late.welcome.version == 3
        assert late.welcome.weights == m.WeightsRef(3, "/w/3", "f3")
        assert [body.step for body in (late.wait(m.StepReport, n) for n in (1, 2, 3))] == [1, 2, 3]  # kept for it
        for peer in (generator, learner.client, late.client):
            peer.close()


def test_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    with broker(tmp_path, run={"max_failures_in_a_row": 5}) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher, learner = Watcher(endpoint, cfg).join(), Learner(endpoint, cfg).join()
        waiting = learner.client.call(m.Take(4))
        generator = Generator(endpoint, cfg)
        generator.fails = lambda task: "reset_failed"
        generator.start()
        done = watcher.wait(m.Done)
        assert done.failed
        assert "5 rollouts in a row failed in environment scripted: reset_failed: scripted" in done.reason
        assert isinstance(waiting.result(5), m.Stop)
        assert generator.stopped.wait(5)
        for peer in (generator, learner.client, watcher.client):
            peer.close()
        assert process.wait() == 0


def test_a_learner_that_leaves_for_good_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sao.broker.server.LEARNER_GRACE_S", 0.3)
    folder = private_folder()
    cfg, endpoint = config(), f"ipc://{folder}/broker"
    server = Server(cfg, tmp_path, endpoint)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    generator, learner = Generator(endpoint, cfg).start(), Learner(endpoint, cfg).join()
    learner.train(2)
    learner.client.close()
    again = Learner(endpoint, cfg, incarnation=1).join()  # comes back in time
    time.sleep(0.5)
    again.train(1)
    again.client.close()
    watcher = Watcher(endpoint, cfg).join()
    assert "left after step 3 of 6 and did not come back" in watcher.wait(m.Done).reason
    assert generator.stopped.wait(5)
    for peer in (generator, watcher.client):
        peer.close()
    thread.join(10)
    assert not thread.is_alive()
    folder.rmdir()


def test_it_ends_when_the_supervisor_has_heard_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run is over before a supervisor has joined; the broker that is started again after the end waits for it,
    too, and for the learner.
    """
    monkeypatch.setattr("sao.broker.server.TICK_S", 0.05)
    folder = private_folder()
    cfg, endpoint = config(run={"steps": 2}), f"ipc://{folder}/broker"

    def serve() -> threading.Thread:
        thread = threading.Thread(target=Server(cfg, tmp_path, endpoint).run, daemon=True)
        thread.start()
        return thread

    def told_late(thread: threading.Thread) -> Watcher:
        time.sleep(0.5)
        assert thread.is_alive()
        watcher = Watcher(endpoint, cfg).join()
        assert watcher.wait(m.Done).reason == "all steps done"
        return watcher

    first = serve()
    generator, learner = Generator(endpoint, cfg).start(), Learner(endpoint, cfg).join()
    learner.train(2)
    assert generator.stopped.wait(5)
    generator.close()
    learner.client.close()
    told_late(first).client.close()
    first.join(5)
    assert not first.is_alive()

    second = serve()
    watcher = told_late(second)
    learner = Learner(endpoint, cfg).join()
    assert isinstance(learner.pushes.get(timeout=5), m.Stop)
    learner.client.close()
    second.join(5)
    assert not second.is_alive()
    watcher.client.close()
    folder.rmdir()


def test_false_books_end_the_run(tmp_path: Path) -> None:
    with broker(tmp_path) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher, learner = Watcher(endpoint, cfg).join(), Learner(endpoint, cfg).join()
        generator = Generator(endpoint, cfg).start()
        batch = learner.take()
        with pytest.raises(Exception, match="holds 20"):
            learner.call(m.Commit(batch.lease, 1, 0, 1, 1, {}))
        assert "holds 20" in watcher.wait(m.Done).reason
        for peer in (generator, learner.client, watcher.client):
            peer.close()
        assert process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(tmp_path: Path, number: int) -> None:
    with broker(tmp_path) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher, learner = Watcher(endpoint, cfg).join(), Learner(endpoint, cfg).join()
        generator = Generator(endpoint, cfg)
        generator.hold = True
        generator.start()
        waiting = learner.client.call(m.Take(4))
        until(lambda: len(generator.held) == 8)
        process.child.send_signal(number)
        assert isinstance(waiting.result(5), m.Stop)
        assert signal.Signals(number).name in watcher.wait(m.Done).reason
        assert generator.stopped.wait(5)
        for peer in (generator, learner.client, watcher.client):
            peer.close()
        assert process.wait() == 0
    with _core.Ledger(str(process.folder / "journal")) as ledger:
        assert len(ledger.unfinished()) == 8  # for the next run


def test_it_does_not_wait_for_ever_after_a_signal(tmp_path: Path) -> None:
    with broker(tmp_path, transport={"shutdown_s": 1.0}) as process:
        watcher = Watcher(process.endpoint, process.config).join()
        learner = Learner(process.endpoint, process.config).join()  # never leaves
        process.child.send_signal(signal.SIGTERM)
        watcher.wait(m.Done)
        assert process.wait(5) == 0
        learner.client.close()
        watcher.client.close()


def test_a_stop_of_the_supervisor_ends_it(tmp_path: Path) -> None:
    with broker(tmp_path) as process:
        watcher = Watcher(process.endpoint, process.config).join()
        generator = Generator(process.endpoint, process.config).start()
        watcher.call(m.Stop("user"))
        assert watcher.wait(m.Done).reason == "user"
        assert generator.stopped.wait(5)
        generator.close()
        assert process.wait() == 0
        watcher.client.close()


def test_what_cannot_work_is_said_at_the_start(tmp_path: Path) -> None:
    with broker(tmp_path) as process:
        Watcher(process.endpoint, process.config).join().client.close()
        second = Process(process.config, process.folder, process.endpoint)
        assert second.wait() == 1
        assert "another process listens here" in second.text()
        long = Process(process.config, process.folder, "ipc:///tmp/" + "x" * 150)
        assert long.wait() == 1
        assert "path of 155 bytes exceeds the limit of 107 bytes" in long.text()
        (process.folder / "config.json").write_text('{"model": {"path": "m"}}')
        argv = [sys.executable, "-m", "sao.broker", "--run-folder", str(process.folder), "--endpoint", "ipc:///tmp/x/y"]
        wrong = subprocess.run(argv, capture_output=True, text=True, timeout=20)
        assert wrong.returncode == 2
        assert "required, not given" in wrong.stderr


def test_only_the_given_endpoint_is_open_and_idle_costs_nothing(tmp_path: Path) -> None:
    with broker(tmp_path, transport={"heartbeat_s": 1.0, "peer_timeout_s": 15.0}) as process:
        watcher, learner = (
            Watcher(process.endpoint, process.config).join(),
            Learner(process.endpoint, process.config).join(),
        )
        waiting = learner.client.call(m.Take(4))
        inside = psutil.Process(process.child.pid)
        assert inside.net_connections("inet") == []
        listening = [c.laddr for c in inside.net_connections("unix") if c.laddr]
        assert set(listening) <= {process.endpoint.removeprefix("ipc://")}
        assert "torch" not in {Path(m.path).name.split(".")[0] for m in inside.memory_maps()}
        before = inside.cpu_times()
        time.sleep(2.0)
        after = inside.cpu_times()
        assert after.user + after.system - before.user - before.system <= 0.1  # parked, not polling
        waiting.cancel()
        learner.client.close()
        watcher.client.close()


def test_memory_and_maps_return_after_many_short_lived_generators(tmp_path: Path) -> None:
    with broker(tmp_path, run={"steps": 10_000}, transport={"peer_timeout_s": 5.0}) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher = Watcher(endpoint, cfg).join()
        inside = psutil.Process(process.child.pid)
        sizes = []
        for n in range(120):
            generator = Generator(endpoint, cfg, f"g{n}", slots=2)
            generator.hold = True
            generator.start()
            if n % 2:
                until(lambda g=generator: g.held)
            generator.close()
            if n in (20, 119):
                until(lambda: watcher.snapshot()["generators"] == {})
                sizes.append((watcher.snapshot(), inside.memory_info().rss, inside.num_fds()))
        (before, memory_before, fds_before), (after, memory_after, fds_after) = sizes
        for key in ("peers", "pushes_not_acknowledged", "running", "takes", "leases"):
            assert after[key] == before[key], key
        assert after["peers"] == 1
        assert after["live"] <= 8
        assert fds_after <= fds_before
        assert memory_after < memory_before * 1.05
        watcher.client.close()


def test_it_ends_when_its_parent_is_killed_and_all_peers_are_silent(tmp_path: Path) -> None:
    """Started under a parent-death signal, as the supervisor starts it."""
    with broker(tmp_path) as process:
        process.child.kill()
        process.wait()
        launcher = Path(sys.modules["sao"].__file__ or "").parent / "storage" / "parent_death.py"
        code = (
            "import os, subprocess, sys, time;"
            "p = subprocess.Popen([sys.executable, '-IS', sys.argv[1], str(os.getpid()), '15', *sys.argv[2:]]);"
            "print(p.pid, flush=True); time.sleep(60)"
        )
        command = [
            sys.executable,
            "-m",
            "sao.broker",
            "--run-folder",
            str(process.folder),
            "--endpoint",
            process.endpoint,
        ]
        parent = subprocess.Popen([sys.executable, "-c", code, str(launcher), *command], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        learner = Learner(process.endpoint, process.config).join()
        parent.send_signal(signal.SIGKILL)
        parent.wait(5)
        parent.stdout.close()
        learner.client.close()
        child.wait(5)
        assert not Path(process.endpoint.removeprefix("ipc://")).exists()
