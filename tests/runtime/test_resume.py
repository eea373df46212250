"""From where a run goes on: the newest checkpoint that is complete and of the ledger's line, or a clear no."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from sao import config as configuration
from sao.cli import app
from sao.config import Config
from sao.errors import CheckpointError, ConfigError, LearnerError, LedgerError
from sao.runtime import folders, launch, preflight, resume, train
from sao.runtime import replay as replaying
from sao.runtime.supervisor import Supervisor
from sao.storage import ownership
from sao.storage.checkpoints import STATE, Draft, Ordinals, newest
from sao.telemetry.recording import write_step
from sao.telemetry.sinks import JsonLines, read, record, surviving

BATCH = 2


@pytest.fixture
def run(run_file: Path) -> Config:
    """A run whose folder is made, without a step; six steps of two tasks are wanted."""
    wanted = [f"learner.batch_trajectories={BATCH}", "run.steps=6", "learner.critic_warmup_steps=1"]
    config = configuration.load(run_file, wanted)
    folders.make_run_folder(config.folder, overwrite=False)
    ownership.disown(config.folder)
    configuration.save(config, config.folder / "config.json")
    (config.folder / "checkpoints").mkdir()
    return config


def step(config: Config, ledger, number: int, save: bool = False) -> None:
    """Trains the next two tasks in a step, and saves a checkpoint of it."""
    ordinals = [BATCH * number - 2, BATCH * number - 1]
    for ordinal in ordinals:
        attempt = ledger.issue(ordinal)
        ledger.generating(ordinal, attempt)
        ledger.ready(ordinal, attempt, 5)
    ledger.lease(ordinals, number)
    ledger.trained(number, number, 10, 0)
    ledger.sync()
    if save:
        checkpoint(config, number, ordinals)


def checkpoint(config: Config, number: int, ordinals: list[int], attempt: int = 0, **more: object) -> Path:
    draft = Draft(config.folder / "checkpoints", number)
    (draft.folder / STATE).mkdir()
    (draft.folder / STATE / "a.bin").write_bytes(b"x" * 1000)
    trained = Ordinals([[0, BATCH * number]])
    tasks = [[ordinal, attempt] for ordinal in ordinals]
    ledger = {"lease": number, "tasks": tasks, "trained": trained.runs, **more}
    return draft.commit({"version": number - 1, "ledger": ledger}, 9)


def ledger_of(config: Config):
    from sao._core import Ledger

    return Ledger(config.folder / "journal")


def changed(config: Config, *overrides: str) -> Config:
    """The same run file with overrides."""
    data = config.model_dump(mode="json")
    for override in overrides:
        path, _, value = override.partition("=")
        section, _, key = path.partition(".")
        data[section][key] = json.loads(value)
    return configuration.parse(data)


def test_the_newest_complete_checkpoint_and_what_is_lost(run):
    with ledger_of(run) as ledger:
        for number in range(1, 6):
            step(run, ledger, number, save=number in (2, 4))
    (run.folder / "checkpoints" / "step-4" / STATE / "a.bin").write_bytes(b"x" * 999)
    (run.folder / "checkpoints" / ".step-5.part").mkdir()
    before = sorted(run.folder.rglob("*"))
    found = resume.find(run, run.folder)
    assert sorted(run.folder.rglob("*")) == before, "looking changes nothing"
    assert (found.step, found.version, found.lost_steps, found.start, found.finished) == (2, 1, 3, 0, "")
    assert [path.name for path, _ in found.ignored] == ["step-4"] and "999 bytes" in found.ignored[0][1]
    texts = resume.begin(found, run.folder)
    assert "step-5: its save was cut off" in texts[0] and "ignored checkpoint" in texts[1]
    assert "after step 2, policy version 1" in texts[2] and "3 later steps are lost" in texts[2]
    names = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert names == {"step-2", "ignored-step-4"}
    assert resume.find(run, run.folder).start == 1 and resume.find(run, run.folder).ignored == []


def test_a_checkpoint_whose_replacement_was_cut_off_is_the_newest(run):
    with ledger_of(run) as ledger:
        for number in range(1, 5):
            step(run, ledger, number, save=number in (2, 4))
    saved = run.folder / "checkpoints" / "step-4"
    saved.rename(saved.with_name(".step-4.old"))  # killed between the two renames of `Draft.commit`
    saved.with_name(".step-4.part").mkdir()
    found = resume.find(run, run.folder, tidy=True)
    assert (found.step, found.checkpoint, found.lost_steps) == (4, saved, 0) and saved.is_dir()
    texts = resume.begin(found, run.folder)
    assert any("its replacement was cut off; the earlier one is kept" in text for text in texts)
    assert sum("its save was cut off" in text for text in texts) == 1


def test_a_run_without_a_checkpoint_begins_at_step_0(run):
    with ledger_of(run) as ledger:
        step(run, ledger, 1)
    found = resume.find(run, run.folder)
    assert (found.step, found.checkpoint, found.lost_steps) == (0, None, 1)
    assert "with the start policy: no checkpoint was saved" in resume.begin(found, run.folder)[-1]
    shutil.rmtree(run.folder / "journal")
    assert resume.find(run, run.folder).lost_steps == 0


def test_checkpoints_of_which_none_is_usable_are_not_passed_over(run):
    with ledger_of(run) as ledger:
        step(run, ledger, 1, save=True)
    (run.folder / "checkpoints" / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the checkpoints[\s\S]*no manifest.json"):
        resume.find(run, run.folder)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"attempt": 1}, "rewound since"),
        ({"lease": 9}, "rewound since"),
        ({"trained": [[0, 4], [6, 7]]}, "other tasks were trained than journal says"),
    ],
)
def test_a_checkpoint_that_contradicts_the_ledger_is_ignored(run, wrong, text):
    with ledger_of(run) as ledger:
        step(run, ledger, 1, save=True)
        step(run, ledger, 2)
    checkpoint(run, 2, [2, 3], **wrong)
    found = resume.find(run, run.folder)
    assert found.step == 1 and text in found.ignored[0][1]


def test_a_checkpoint_of_a_line_that_was_lost_is_ignored(run):
    with ledger_of(run) as ledger:
        for number in (1, 2, 3):
            step(run, ledger, number, save=True)
        ledger.rewind(1)
        step(run, ledger, 2)
    found = resume.find(run, run.folder)
    assert found.step == 1
    assert ["knows no step 3" in found.ignored[0][1], "rewound since" in found.ignored[1][1]] == [True, True]


def test_a_damaged_or_absent_ledger_is_no_reason_to_begin_again(run):
    with ledger_of(run) as ledger:
        step(run, ledger, 1, save=True)
    (run.folder / "journal" / "00000001.journal").write_bytes(b"nonsense" * 10)
    with pytest.raises(LedgerError, match="no segment of a journal"):
        resume.find(run, run.folder)
    shutil.rmtree(run.folder / "journal")
    with pytest.raises(LedgerError, match="cannot be read"):
        resume.find(run, run.folder)


def test_a_complete_run_says_so_and_more_steps_go_on(run, capsys):
    with ledger_of(run) as ledger:
        for number in range(1, 7):
            step(run, ledger, number, save=number == 6)
    assert train.train(run, resume=True) == 0
    assert "the run is complete: step 6 of 6 is saved; raise run.steps" in capsys.readouterr().out
    assert not (run.folder / "starts").exists()
    assert resume.find(changed(run, "run.steps=7"), run.folder).finished == ""


def test_a_target_that_was_reached_is_an_end_too(run):
    with ledger_of(run) as ledger:
        for number in (1, 2):
            step(run, ledger, number, save=True)
    with_target = changed(run, "run.target_success=0.5")
    sink = JsonLines(run.folder / "metrics.jsonl")
    sink.write(record("eval", {"step": 2, "success": 0.6, "version": 1, "n": 4}))
    assert "0.5 was reached at step 2" in resume.find(with_target, run.folder).finished
    assert resume.find(changed(run, "run.target_success=0.7"), run.folder).finished == ""
    with ledger_of(run) as ledger:
        step(run, ledger, 3, save=True)
    assert "0.5 was reached at step 2" in resume.find(with_target, run.folder).finished, "saved a step later"
    sink.write(record("resume", {"step": 1, "version": 0, "lost_steps": 1}))
    assert resume.find(with_target, run.folder).finished == "", "that evaluation is of a line that was lost"


def test_what_contradicts_the_run_is_refused_and_limits_win(run):
    limits = ["run.steps=99", "buffer.max_trajectories=77", "generator.count=5", "learner.ranks=3", "eval.episodes=3"]
    limits += ["staleness.max_lag=9", "learner.checkpoints_kept=5", "transport.shutdown_s=1.0"]
    assert resume.faults(changed(run, *limits)) == []
    wrong = ["learner.batch_trajectories=4", "run.seed=7", "algorithm.gamma=0.5", "learner.policy_lr=0.5"]
    found = resume.faults(changed(run, *wrong))
    assert [fault.split(":")[0] for fault in found] == [
        "run.seed",
        "algorithm.gamma",
        "learner.batch_trajectories",
        "learner.policy_lr",
    ]
    assert "learner.batch_trajectories: 4 contradicts the run that is resumed, which has 2" in found
    with pytest.raises(ConfigError, match=r"run\.seed: 7"):
        preflight.check(changed(run, "run.seed=7"), resume=True)


def test_every_key_that_may_change_is_a_key():
    for section, keys in resume.MAY_CHANGE.items():
        assert keys <= set(Config.model_fields[section].annotation.model_fields)
    assert set(Config.model_fields) >= resume.ALL_MAY_CHANGE


def test_only_a_run_can_be_resumed_and_only_once_at_a_time(run_file):
    config = configuration.load(run_file)
    assert "holds no run" in resume.faults(config)[0]
    folders.make_run_folder(config.folder, overwrite=False)
    configuration.save(config, config.folder / "config.json")
    assert resume.faults(config) == [f"run.name: {config.folder} is in use by process {os.getpid()}"]


def test_processes_that_a_killed_supervisor_left_are_waited_for(run):
    waited = []
    handle = folders.hold(run.folder)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.0)"], pass_fds=(handle,))
    os.close(handle)  # the supervisor is gone, its child is not
    with pytest.raises(ConfigError, match="processes of an earlier start have not ended within"):
        folders.hold(run.folder, wait_s=0.2)
    handle = folders.hold(run.folder, wait_s=30, on_wait=lambda: waited.append(1))
    assert waited == [1]
    os.close(handle)
    assert child.wait(5) == 0


def test_a_resumed_run_uses_new_random_numbers_and_tells_broker_and_learner_where_it_is(run):
    def commands(**more):
        places = launch.Places.of(run, Path("/s"), Path("/w"), **more)
        return {command.name: command for command in launch.everything(run, places)}

    first, again = commands(), commands(start=1, resume_step=4, checkpoint=Path("/c/step-4"), lock=5)
    assert "--incarnation 0" in " ".join(first["g0"].argv) and "--incarnation 1048576" in " ".join(again["g0"].argv)
    assert again["broker"].argv[-4:] == ("--resume-step", "4", "--line", "1048576")
    assert "--resume-step" not in first["broker"].argv
    assert again["learner"].argv[-2:] == ("--checkpoint", "/c/step-4") and "--checkpoint" not in first["learner"].argv
    assert all(command.handles == (5,) for command in again.values()) and first["g0"].handles == ()


def test_a_resumed_run_without_a_new_step_has_failed(run, monkeypatch, capsys):
    from sao.runtime.supervisor import EXIT_DONE, Outcome

    with ledger_of(run) as ledger:
        step(run, ledger, 1, save=True)
    monkeypatch.setattr(Supervisor, "run", lambda self: Outcome(EXIT_DONE, "no tasks left"))
    assert train.train(run, resume=True) == 1
    assert "no step was made: no tasks left" in capsys.readouterr().out
    kinds = [r["kind"] for r in read(run.folder / "metrics.jsonl")]
    assert kinds == ["run", "resume", "event", "end"]
    assert (run.folder / "starts").read_text() == "1\n" and not (run.folder / "owner").exists()
    assert newest(run.folder / "checkpoints")[0].step == 1


def test_metrics_go_on_after_a_torn_line_and_lost_steps_do_not_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for number in (1, 2, 3):
        sink.write(record("step", {"step": number, "x": 1}))
    sink.write(record("eval", {"step": 2, "success": 0.5}))
    sink.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    sink = JsonLines(path)
    sink.write(record("resume", {"step": 1}))
    for number in (2, 3, 4):
        sink.write(record("step", {"step": number, "x": 2}))
    records = read(path)
    assert [r["kind"] for r in records] == ["step"] * 3 + ["eval", "resume"] + ["step"] * 3
    assert [(r["step"], r["x"]) for r in surviving(records) if r["kind"] == "step"] == [(1, 1), (2, 2), (3, 2), (4, 2)]
    assert not [r for r in surviving(records) if r["kind"] == "eval"]


def test_a_dry_run_says_where_it_would_go_on_and_changes_nothing(run, monkeypatch):
    monkeypatch.setattr(preflight, "_tensors", lambda path: [])  # it is no real model
    with ledger_of(run) as ledger:
        for number in (1, 2):
            step(run, ledger, number, save=True)
    (run.folder / "checkpoints" / "step-2" / "manifest.json").unlink()
    before = sorted(run.folder.rglob("*"))
    text = train.describe(run, resume=True)
    assert sorted(run.folder.rglob("*")) == before
    assert "--resume-step 1" in text and f"--checkpoint {run.folder.resolve()}/checkpoints/step-1" in text
    assert "# warning: " in text and "step-2: no manifest.json" in text


def test_a_run_goes_on_with_a_copy_of_its_model_and_with_no_other(run, tmp_path):
    run.folder.mkdir(parents=True, exist_ok=True)
    configuration.save(run, run.folder / "config.json")
    resume.remember_models(run, run.folder)
    copy = Path(shutil.copytree(run.model.path, tmp_path / "copy"))

    def faults(path: Path, **env: int) -> list[str]:
        changed = {"model": {**run.model.model_dump(), "path": str(path)}, "env": {**run.env.model_dump(), **env}}
        return resume.faults(configuration.parse({**run.model_dump(mode="json"), **changed}))

    assert faults(copy) == faults(copy, concurrency=4, episode_timeout_s=600.0) == []
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(before + b" ")
        (fault,) = faults(copy)
        assert fault.startswith(f"model.path: '{copy}' contradicts the run that is resumed")
        (copy / name).write_bytes(before)
    assert faults(copy, max_turns=99)[0].startswith("env.max_turns: 99 contradicts")


def test_a_run_is_replaced_or_goes_on_but_not_both(run_file):
    result = CliRunner().invoke(app, ["train", str(run_file), "--overwrite", "--resume"])
    assert result.exit_code == 2 and "--overwrite and --resume" in result.output
    absent = CliRunner().invoke(app, ["train", str(run_file), "--resume"])
    assert absent.exit_code == 2 and "holds no run" in absent.output


def test_what_is_missing_for_a_replay_is_said(tmp_path):
    nothing = CliRunner().invoke(app, ["replay", str(tmp_path), "3"])
    assert nothing.exit_code == 2 and "holds no run" in nothing.output
    (tmp_path / "config.json").write_text("{}")
    none = CliRunner().invoke(app, ["replay", str(tmp_path), "3"])
    assert none.exit_code == 2 and "none is recorded: set telemetry.keep_trajectories" in none.output


def test_steps_that_the_ledger_has_folded_are_replayed_from_a_checkpoint_or_said_to_be_gone(run, monkeypatch):
    config = run.model_dump(mode="json")
    with ledger_of(run) as ledger:
        for number in range(1, 7):
            step(run, ledger, number, save=number in (4, 6))
            meta = {"config": config, "tasks": [[2 * number - 2, 0], [2 * number - 1, 0]], "metrics": {}}
            write_step(run.folder / "trajectories", number, [], {}, meta)
        ledger.roll(3)
    assert resume.find(run, run.folder).step == 6
    same = {"step": 5, "losses": {}, "different": {}, "metrics": 0, "arrays": 0, "weights": False}
    monkeypatch.setattr(replaying, "_run", lambda *arguments: [same])
    assert replaying.replay(run.folder, 5)[1]
    gone = CliRunner().invoke(app, ["replay", str(run.folder), "3"])
    assert gone.exit_code == 1 and "steps up to 3 are no longer listed one by one" in " ".join(gone.output.split())


def test_a_replay_that_takes_too_long_is_ended_by_name(run, tmp_path, monkeypatch):
    monkeypatch.setattr(replaying, "LIMIT_S", 0.05)
    before = set(psutil.Process().children())
    with pytest.raises(LearnerError, match=r"the replay was not done within 0.05 s and was ended"):
        replaying._run(run, [tmp_path / "step-000001.safetensors"], None)
    assert set(psutil.Process().children()) == before


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("learner.ranks=2", "needs a checkpoint after step 1: .* learner.ranks = 1, it with 2"),
        ("run.steps=9", "needs a checkpoint after step 1: .* run.steps = 6, it with 9"),
        ("learner.checkpoints_kept=5", None),
        ("generator.concurrency=3", None),
    ],
)
def test_steps_of_other_settings_are_not_replayed_together(run, monkeypatch, override, fault):
    """The first step was made before a resume with an override, the second after it; no checkpoint lies between."""
    before = changed(run, 'learner.lr_decay="linear"')
    with ledger_of(run) as ledger:
        for number, config in enumerate((before, changed(before, override)), 1):
            step(run, ledger, number)
            tasks = [[2 * number - 2, 0], [2 * number - 1, 0]]
            meta = {"config": config.model_dump(mode="json"), "tasks": tasks, "metrics": {}}
            write_step(run.folder / "trajectories", number, [], {}, meta)
    ran = []
    same = {"step": 2, "losses": {}, "different": {}, "metrics": 0, "arrays": 0, "weights": False}
    monkeypatch.setattr(replaying, "_run", lambda *arguments: ran.append(arguments) or [same])
    if fault is None:
        assert replaying.replay(run.folder, 2)[1] and len(ran) == 1
        return
    with pytest.raises(ConfigError, match=fault):
        replaying.replay(run.folder, 2)
    assert not ran
