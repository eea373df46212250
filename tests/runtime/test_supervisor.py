"""The supervisor with stand-in actors: whatever ends a run, it is said why, and no process or file is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sao.config import parse
from sao.runtime import supervisor

SCRIPT = Path(__file__).with_name("run_supervisor.py")
LIMIT_S = 30.0


class Run:
    """A supervisor process; its records are read line by line."""

    def __init__(self, folder: Path, *scenario: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *scenario], stdout=subprocess.PIPE, text=True
        )
        self.records: list[dict] = []
        self.private = [Path(path) for key, path in self.until("private").items() if key != "kind"]
        self.family: set[psutil.Process] = set()

    def until(self, kind: str, text: str = "") -> dict:
        """Reads on to the next record of a kind (that holds a text)."""
        for line in self.process.stdout:
            self.records.append(json.loads(line))
            if self.records[-1]["kind"] == kind and text in json.dumps(self.records[-1]):
                return self.records[-1]
        raise AssertionError(f"no {kind} record with {text!r}, only {self.records}")

    def look(self, count: int = 0) -> None:
        """Remembers all processes of the run, when there are so many."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
            if len(self.family) >= count or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        assert not count or len(self.family) == count, self.family

    def end(self) -> dict:
        """Waits for the end, checks that nothing is left, and returns the outcome."""
        outcome = self.until("outcome")
        self.process.wait(LIMIT_S)
        assert self.process.returncode == outcome["exit_code"]
        self.nothing_left()
        return outcome

    def nothing_left(self, within_s: float = 5.0) -> None:
        _, alive = psutil.wait_procs(self.family, timeout=within_s)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], alive
        mine = [p for p in psutil.process_iter(["cmdline"]) if str(self.folder) in " ".join(p.info["cmdline"] or [])]
        assert not mine, mine
        assert not [path for path in self.private if path.exists()]


@pytest.fixture
def start(tmp_path):
    runs = []

    def begin(*scenario: str) -> Run:
        runs.append(Run(tmp_path / "run", *scenario))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.wait(LIMIT_S)
        run.process.stdout.close()


def test_a_regular_run_ends_with_the_brokers_word(start):
    run = start("normal")
    outcome = run.end()
    assert outcome == {"kind": "outcome", "exit_code": 0, "reason": "3 steps done"}
    assert [record["step"] for record in run.records if record["kind"] == "step"] == [1, 2, 3]
    assert [record["success"] for record in run.records if record["kind"] == "eval"] == [0.5]
    assert {path.name for path in (run.folder / "logs").iterdir()} == {"broker.log", "learner.log", "g0.log", "g1.log"}


def test_a_failure_that_the_broker_names_is_the_outcome(start):
    outcome = start("environment_fails").end()
    assert (outcome["exit_code"], outcome["reason"]) == (1, "environment lookup failed 32 times in a row: timeout")


def test_a_generator_that_dies_is_started_again_under_the_next_incarnation(start):
    run = start("endless", "generator_dies")
    texts = [run.until("event", "incarnation 1")["text"] for _ in range(2)]
    assert {text.split()[0] for text in texts} == {"g0", "g1"}
    assert all("exit code 3" in text and "out of memory" in text for text in texts)
    run.until("step")
    run.process.send_signal(signal.SIGTERM)
    assert run.end()["exit_code"] == 130


def test_a_generator_that_keeps_dying_ends_the_run_with_its_last_words(start):
    outcome = start("endless", "generator_dies", "always").end()
    assert outcome["exit_code"] == 1
    first, *words = outcome["reason"].splitlines()
    assert "ended unexpectedly 4 times in 300 s (exit code 3)" in first and "logs/g" in first
    assert words == ["Traceback: out of memory"]


@pytest.mark.parametrize("role", ["learner", "broker"])
def test_the_death_of_learner_or_broker_ends_the_run_with_its_last_words(start, role):
    outcome = start("endless", f"{role}_dies").end()
    assert outcome["exit_code"] == 1
    assert outcome["reason"].startswith(f"{role} ended unexpectedly (exit code {7 if role == 'broker' else 3})")
    assert outcome["reason"].endswith("the ledger is full" if role == "broker" else "Traceback: out of memory")


def test_a_killed_process_is_named_with_its_signal(start):
    run = start("endless", "ends")
    run.until("step")
    run.look()
    (broker,) = [p for p in run.family if "sao.broker" in p.cmdline()]
    broker.kill()
    assert "broker ended unexpectedly (killed by SIGKILL)" in run.end()["reason"]


def test_a_generator_that_leaves_in_order_is_replaced(start):
    text = start("generator_leaves", "endless").until("event", "ended unexpectedly (exit code 0)")["text"]
    assert "started again as incarnation 1" in text


def test_a_generator_that_leaves_before_the_brokers_word_is_known_is_not(start):
    run = start("generator_leaves", "word_comes_late")
    assert run.end()["exit_code"] == 0 and not [r for r in run.records if r["kind"] == "event"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_whose_private_folder_is_removed_ends_with_a_word(start, which):
    run = start("endless")
    run.until("step")
    shutil.rmtree(run.private[which])
    assert run.end()["reason"] == f"{run.private[which]}: removed while the run was using it"


def test_a_broker_that_leaves_too_early_is_named(start):
    outcome = start("endless", "broker_leaves").end()
    assert (outcome["exit_code"], outcome["reason"]) == (1, "the broker ended before the run was done")


def test_a_learner_may_leave_before_the_last_evaluation_is_over(start):
    outcome = start("learner_leaves", "slow").end()
    assert (outcome["exit_code"], outcome["reason"]) == (0, "3 steps done")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_in_order(start, number):
    run = start("endless", "generator_forks")
    run.until("step")
    run.look(6)
    run.process.send_signal(number)
    assert run.end()["reason"] == f"interrupted by {number.name}"


def test_processes_that_ignore_everything_are_killed(start):
    run = start("endless", "deaf", "generator_forks", "own_session")
    run.until("step")
    run.look()
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end()["exit_code"] == 130
    assert 1.5 < time.monotonic() - began < 12


def test_a_second_interrupt_kills_at_once(start):
    run = start("endless", "deaf", "patient")
    run.until("step")
    run.look()
    run.process.send_signal(signal.SIGINT)
    run.until("event", "ending in order")
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert time.monotonic() - began < 30  # half of what it would wait after one


def test_what_a_dead_generator_had_started_dies_with_it(start):
    run = start("endless", "generator_forks", "own_session", "generator_dies")
    run.until("event", "incarnation 1")
    run.until("event", "incarnation 1")
    helpers = [int(line.split()[1]) for name in ("g0", "g1") for line in _log(run, name) if line.startswith("helper")]
    alive = [pid for pid in helpers if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert len(alive) <= 2, "only those of the second incarnations may live"
    run.look()
    run.process.send_signal(signal.SIGTERM)
    run.end()


def test_when_the_supervisor_itself_is_killed_its_children_end(start):
    run = start("endless")
    run.until("step")
    run.look(4)
    run.process.kill()
    run.process.wait(LIMIT_S)
    _, alive = psutil.wait_procs(run.family, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    from sao.runtime import folders

    found = set(folders.stale())
    assert not [path for path in run.private if path not in found and path.exists()]  # or another start removed them
    folders.remove_stale()
    run.nothing_left()


def _log(run: Run, name: str) -> list[str]:
    return (run.folder / "logs" / f"{name}.log").read_text().splitlines()


def test_a_report_that_fails_does_not_keep_processes_alive(tmp_path):
    from sao.runtime import launch
    from sao.runtime.supervisor import Supervisor

    def broken(kind, fields):
        raise OSError("no space left on device")

    places = launch.Places(tmp_path, tmp_path, tmp_path / "store", f"ipc://{tmp_path}/b")
    limits = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0, "shutdown_s": 0.5}
    config = parse({"model": {"path": "m"}, "env": {"name": "lookup"}, "transport": limits, "generator": {"count": 1}})
    (tmp_path / "logs").mkdir()
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        dying = ("/bin/sh", "-c", "sleep 0.3; sleep 60 & exit 3")
        idle = ("/bin/sh", "-c", "sleep 60")
        patch.setattr(launch, "_module", lambda name, _: dying if "generator" in name else idle)
        with pytest.raises(OSError, match="no space"):
            Supervisor(config, places, tmp_path / "logs", broken).run()
    assert not set(psutil.Process().children(recursive=True)) - before


def test_signal_handlers_are_put_back(tmp_path):
    from sao.runtime import launch
    from sao.runtime.supervisor import Supervisor

    before = signal.getsignal(signal.SIGTERM)
    places = launch.Places(tmp_path, tmp_path, tmp_path / "store", "nonsense://")
    config = parse({"model": {"path": "m"}, "env": {"name": "lookup"}, "generator": {"count": 1}})
    (tmp_path / "logs").mkdir()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception, match="nonsense"):
        patch.setattr(launch, "_module", lambda module, places: ("/bin/sleep", "60"))
        Supervisor(config, places, tmp_path / "logs", lambda kind, fields: None).run()
    assert signal.getsignal(signal.SIGTERM) == before
    assert not [child for child in psutil.Process(os.getpid()).children() if "sleep" in child.name()]


def test_who_dies_at_the_same_step_each_time_is_not_started_for_ever(monkeypatch):
    now = 0.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    limit = supervisor.Restarts()

    def restarts(name: str, step: int, times: int) -> list[bool]:
        nonlocal now
        answers = []
        for _ in range(times):
            now += supervisor.RESTART_WINDOW_S  # slower than the limit on starts lately
            limit.step(step)
            now += 1.0
            answers.append(limit.permit(name))
        return answers

    assert restarts("learner", 3, 5) == [True, True, True, False, False]
    assert limit.described("learner") == " 4 times since step 3"
    assert restarts("learner", 4, 1) == [True]  # further than ever
    assert restarts("g0", 4, 9) == [True] * 9  # the others go on without it
    assert limit.described("broker") == ""
