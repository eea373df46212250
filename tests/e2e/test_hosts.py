"""Actors started by hand: on two hosts with a bad line between them, refused without keys, ended in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tiny_model
from e2e import long_line
from e2e.by_hand import ByHand, closes, pulled

from sao.storage.checkpoints import newest
from sao.transport import keys

NO_LINE = long_line.missing()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def by_hand(tmp_path: Path, model: Path) -> Iterator[ByHand]:
    run = ByHand(tmp_path, model)
    yield run
    run.stop()


@pytest.mark.skipif(bool(NO_LINE), reason=f"two hosts: {NO_LINE}")
def test_two_hosts_with_delay_loss_and_a_cut_line_train_to_the_end(tmp_path: Path, model: Path) -> None:
    """Broker and learner on one host, the generator on the other, which sees none of the learner's files."""
    with long_line.long_line(delay_s=0.04, loss=0.01) as (line, counts):
        before = {"broker": line.on("a"), "learner": line.on("a"), "g0": line.on("b")}
        run = ByHand(tmp_path, model, long_line.ADDRESSES["a"], steps=12, before=before)
        try:
            run.broker()
            run.learner()
            run.generator()
            run.until_step(3)
            line.cut(2.0)
            assert run.wait() == {"broker": 0, "learner": 0, "g0": 0}, run.everything()
            steps = run.records("step")
            assert [step["step"] for step in steps] == list(range(1, 13))
            assert all(closes(step) for step in steps), steps
            versions = [version for version, _, _ in pulled(run.log("g0"))]
            assert len(versions) > 2 and versions == sorted(set(versions)), run.log("g0")
            assert run.leftovers() == []
        finally:
            run.stop()
    assert counts["carried"] > 500 and counts["lost"] > 0 and counts["cut"] > 0, counts


def test_who_has_no_right_key_joins_nothing_and_is_told(by_hand: ByHand, tmp_path: Path) -> None:
    by_hand.broker()
    keys.write(tmp_path / "other")
    (tmp_path / "other" / "broker.key").write_bytes((tmp_path / "keys" / "broker.key").read_bytes())
    join = ("generator", "--connect", by_hand.endpoint, "--name", "g0", "--folder", "elsewhere")
    by_hand.start("no-key", *join)
    by_hand.start("unknown", *join, "--keys", "other")
    (tmp_path / "open").mkdir(mode=0o755)
    by_hand.start("open", *join, "--keys", "open")
    by_hand.start("foreign", *join, "--keys", "keys", "run.steps=9")
    by_hand.start("no-model", *join, "--keys", "keys")
    by_hand.start("doctor", "doctor", "--connect", by_hand.endpoint, "--keys", "keys")
    wanted = {
        "no-key": (1, "refused: keys are needed there: set transport.keys, or pass --keys"),
        "unknown": (1, "refused: the key 'generator' of other is not known there"),
        "open": (2, "keys: open must belong to this user with mode 0700, has 0755"),
        "foreign": (2, "override 'run.steps=9': belongs to the run"),
        "no-model": (2, "model.path: no-such-folder-on-the-brokers-host is not a folder"),
        "doctor": (0, "generators"),
    }
    for name, (code, text) in wanted.items():
        assert by_hand.processes[name].wait(60) == code, by_hand.log(name)
        assert text in by_hand.log(name), by_hand.log(name)
    assert "Traceback" not in by_hand.everything()
    by_hand.watch()
    by_hand.processes["broker"].terminate()
    assert by_hand.processes["broker"].wait(30) == 130, by_hand.log("broker")
    assert by_hand.leftovers() == []


def test_a_run_that_was_interrupted_goes_on_from_its_folder(by_hand: ByHand) -> None:
    by_hand.broker("run.steps=60")
    by_hand.learner(folder="at-broker/r")
    by_hand.generator()
    by_hand.until_step(3)
    by_hand.processes["broker"].terminate()
    assert by_hand.wait() == {"broker": 130, "learner": 0, "g0": 0}, by_hand.everything()
    assert "to go on: `sao broker at-broker/r`" in by_hand.log("broker")
    done = len(by_hand.records("step"))
    by_hand.start("broker", "broker", "at-broker/r", f"run.steps={done + 2}")
    by_hand.learner("--resume", folder="at-broker/r")
    by_hand.generator()
    assert by_hand.wait() == {"broker": 0, "learner": 0, "g0": 0}, by_hand.everything()
    steps = by_hand.records("step")
    assert [step["step"] for step in steps] == list(range(1, done + 3)), by_hand.everything()
    assert all(closes(step) for step in steps) and by_hand.leftovers() == []


def test_a_generator_that_is_asked_to_leave_leaves_in_order(by_hand: ByHand) -> None:
    by_hand.broker()
    by_hand.generator()
    deadline = time.monotonic() + 60
    while "ready: weights of version 0" not in by_hand.log("g0"):
        assert time.monotonic() < deadline and by_hand.processes["g0"].poll() is None, by_hand.everything()
        time.sleep(0.05)
    by_hand.watch()
    (weights,) = [
        Path(word)
        for process in by_hand.family
        for word, before in zip(_words(process)[1:], _words(process), strict=False)
        if before == "--weights-folder"
    ]
    assert weights.stat().st_mode & 0o777 == 0o700
    by_hand.processes["g0"].terminate()
    assert by_hand.processes["g0"].wait(30) == 0, by_hand.log("g0")
    assert not weights.exists()
    by_hand.watch()
    by_hand.processes["broker"].terminate()
    assert by_hand.processes["broker"].wait(30) == 130, by_hand.log("broker")
    assert by_hand.leftovers() == []


def test_a_learner_that_is_asked_to_leave_ends_its_step_and_saves(by_hand: ByHand, tmp_path: Path) -> None:
    """However seldom it saves; another one goes on with the same broker."""
    by_hand.broker("run.steps=60", "learner.save_every_steps=50")
    by_hand.learner(folder="at-broker/r")
    by_hand.generator()
    by_hand.until_step(3)
    by_hand.processes["learner"].terminate()
    assert by_hand.processes["learner"].wait(60) == 130, by_hand.log("learner")
    saved, ignored = newest(tmp_path / "at-broker" / "r" / "checkpoints")
    assert saved is not None and not ignored and saved.step == len(by_hand.records("step")), by_hand.everything()
    assert "received SIGTERM" in by_hand.log("learner")
    by_hand.learner("--resume", folder="at-broker/r")
    by_hand.until_step(saved.step + 2)
    by_hand.processes["broker"].terminate()
    assert by_hand.wait() == {"broker": 130, "learner": 0, "g0": 0}, by_hand.everything()
    steps = by_hand.records("step")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), by_hand.everything()
    assert all(closes(step) for step in steps) and by_hand.leftovers() == []


@pytest.mark.slow
def test_a_killed_learner_comes_back_and_what_it_lost_is_made_again(by_hand: ByHand) -> None:
    """The same commands again are all that it takes; they begin the run, too."""

    def learner() -> None:
        by_hand.learner("--resume", folder="at-broker/r")

    by_hand.broker("run.steps=14", "learner.save_every_steps=100", "--resume")
    learner()
    by_hand.generator()
    by_hand.until_step(6)
    for process in psutil.Process(by_hand.processes["learner"].pid).children(recursive=True):
        process.kill()  # first of all, since it saves when it only hears of its parent's end
    by_hand.processes["learner"].kill()
    by_hand.processes["learner"].wait()
    learner()
    assert by_hand.processes["g0"].wait(60) == 1, by_hand.everything()  # it has weights that were taken back
    by_hand.generator()
    assert by_hand.wait() == {"broker": 0, "learner": 0, "g0": 0}, by_hand.everything()
    (resumed,) = by_hand.records("resume")
    assert resumed["step"] == 0 and resumed["lost_steps"] >= 6, resumed
    made = [step["step"] for step in by_hand.records("step")]
    assert made[-1] == 14 and made.count(1) == 2
    last = by_hand.records("step")[-1]
    assert closes(last) and last["broker/trained"] == 14 * 8
    assert last["broker/tokens_dropped/rewound"] > 0 and by_hand.leftovers() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whoever_is_killed_recovers_by_its_own_command(by_hand: ByHand) -> None:
    """As under a scheduler, or a loop of the shell: each is started again with the command that began it."""
    commands = {
        "broker": lambda: by_hand.broker("run.steps=16", "learner.save_every_steps=2", "--resume"),
        "learner": lambda: by_hand.learner("--resume", folder="at-broker/r"),
        "g0": by_hand.generator,
    }
    for start in commands.values():
        start()
    to_kill, deadline = deque(["g0", "learner", "broker", "learner", "broker"]), time.monotonic() + 200
    furthest = 0
    while any(process.poll() != 0 for process in by_hand.processes.values()):
        assert time.monotonic() < deadline, by_hand.everything()
        by_hand.watch()
        for name, start in commands.items():
            if by_hand.processes[name].poll() not in (None, 0):
                start()
        made = max((step["step"] for step in by_hand.records("step")), default=0)
        if to_kill and made > furthest + 1:
            furthest = made
            by_hand.processes[to_kill.popleft()].kill()
        time.sleep(0.1)
    last = by_hand.records("step")[-1]
    assert not to_kill and last["step"] == 16, by_hand.everything()
    assert closes(last) and last["broker/trained"] == 16 * 8 and by_hand.leftovers() == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_an_absent_broker_is_named_in_time(by_hand: ByHand) -> None:
    by_hand.start("g0", "generator", "--connect", by_hand.endpoint, "--name", "g0", "--keys", "keys", "--wait", "0.5")
    assert by_hand.processes["g0"].wait(30) == 1
    text = f"hello: no answer from {by_hand.endpoint} within 0.5 s: nothing can be reached there"
    assert text in by_hand.log("g0")
