"""A run that goes on after a kill: which tasks are played again, when work is handed out, what the books say."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from broker.broker_world import BATCH, World, batches_of, config

from sao import _core
from sao.broker import tasks
from sao.errors import TransportError
from sao.transport import messages as m


def weights(version: int) -> m.WeightsRef:
    return m.WeightsRef(version, f"/w/{version}", f"f{version}")


def killed(world: World, folder: Path, name: str) -> Path:
    """The journal as a SIGKILL of the broker leaves it now: without what was not yet written."""
    path = folder / name
    shutil.copytree(folder / "journal", path)
    world.ledger.close()
    shutil.rmtree(folder / "journal")
    return path.replace(folder / "journal")


def trained(path: Path) -> Counter[int]:
    _, steps = _core.ledger_history(path)
    return Counter(ordinal for step in steps for ordinal, _ in step["tasks"])


def test_lost_steps_are_trained_again_and_their_tasks_come_first(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    world = World(config(staleness={"order": "window"}), path)
    world.join("g0", 0)
    batches_of(world, 3)
    world = World(config(staleness={"order": "window"}), killed(world, tmp_path, "k"), resumed=1)
    world.learner(1, weights(1))
    world.join("g0", 0)
    with pytest.raises(TransportError, match="published were f1"):  # of the line of history that is lost
        world.load("g0", 1, "of another line")
    world.slots("g0", BATCH)
    assert not world.tasks.get("g0")
    world.load("g0", 1, "f1")
    world.slots("g0", BATCH)
    again = world.tasks["g0"]
    assert [(task.ordinal, task.attempt) for task in again] == [(4, 1), (5, 1), (6, 1), (7, 1)]
    world.take()
    world.answer_all("g0", version=1)
    world.commit()
    assert world.broker.run.step == 2 and world.broker.versions.current == 2
    batches_of(world, 4)
    assert world.broker.run.done and not world.broker.run.done.failed
    assert trained(path) == Counter(range(6 * BATCH))
    assert world.ledger.tokens()["dropped"]["rewound"] == 2 * BATCH * 5
    world.ledger.check()


def test_nothing_is_handed_out_before_the_learner_continues_and_generators_have_its_weights(tmp_path: Path) -> None:
    cfg = config(eval={"every_steps": 2, "episodes": 1})
    world = World(cfg, tmp_path / "journal")
    world.join("g0", 0)
    world.slots("g0", 8)
    for _ in range(2):
        for task in [t for t in world.tasks["g0"] if t.split == "eval"]:
            world.tasks["g0"].remove(task)
            world.broker.eval_result("g0", m.EvalResult(task.ordinal, 0, 1.0), world.now)
        world.take()
        world.answer_all("g0")
        world.commit()
        world.slots("g0", 8)
    world = World(cfg, killed(world, tmp_path, "k"), resumed=2)
    world.join("g0", 8)
    world.broker.tick(1.0)
    assert world.tasks == {} and world.broker.scheduler.permits() == 0
    with pytest.raises(TransportError, match="continues after step 1, the run after step 2"):
        world.learner(1, weights(2))
    world.learner(2, weights(2))
    assert world.pushed(m.NewWeights, "g0") == [m.NewWeights(weights(2))]
    world.broker.tick(2.0)
    assert world.tasks == {}, "it still serves the start model"
    world.load("g0", 2, "f2")
    world.broker.tick(3.0)
    assert {task.split for task in world.tasks["g0"]} == {"eval", "train"}, "the round of step 2 may have been lost"


def test_a_learner_that_lost_steps_without_new_weights_is_refused(tmp_path: Path) -> None:
    world = World(config(), tmp_path / "journal")
    world.learner(0, None, "a")
    world.join("g0", 0)
    world.slots("g0", BATCH)
    world.take()
    world.answer_all("g0")
    world.commit(weights=False)  # as in a warm-up of the critic
    with pytest.raises(TransportError, match="continues after step 0, the run after step 1"):
        world.learner(0, None, "b")
    world.learner(1, None, "c")
    assert world.broker.run.step == 1


def test_an_evaluation_round_that_was_not_due_is_not_played_at_a_resume(tmp_path: Path) -> None:
    cfg = config(eval={"every_steps": 2, "episodes": 1})
    world = World(cfg, tmp_path / "journal", resumed=0)
    world.learner(0)
    world.join("g0", 8)
    assert [task.split for task in world.tasks["g0"]].count("eval") == 1
    other = World(config(), tmp_path / "other.log")
    other.join("g0", 0)
    batches_of(other, 1)
    other.ledger.close()
    world = World(cfg, tmp_path / "other.log", resumed=1)
    world.learner(1, weights(1))
    world.join("g0", 0)
    world.load("g0", 1, "f1")
    world.slots("g0", 8)
    assert {task.split for task in world.tasks["g0"]} == {"train"}


def test_restarts_of_the_run_do_not_use_up_the_attempts_of_a_task(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for life in range(2 * tasks.MAX_ATTEMPTS):
        world = World(config(), path, resumed=0)
        world.learner(0)
        world.join("g0", 1)
        assert [(t.ordinal, t.attempt) for t in world.tasks["g0"]] == [(0, life)]
        world.ledger.close()


@pytest.mark.parametrize("order", ["window", "completion"])
@pytest.mark.parametrize("seed", range(8))
def test_kills_at_random_moments_lose_no_task_and_train_none_twice(tmp_path: Path, seed: int, order: str) -> None:
    """Random kills of everything, checkpoints every second step; the end must be that of an undisturbed run."""
    rng = random.Random(seed)
    cfg = config(run={"steps": 12}, staleness={"max_lag": 2, "order": order})
    path, step, checkpoint, kills = tmp_path / "journal", 0, 0, 0
    while step < 12:
        world = World(cfg, path, resumed=checkpoint)
        world.learner(checkpoint, weights(checkpoint) if checkpoint else None)
        world.join("g0", 0)
        world.load("g0", checkpoint, f"f{checkpoint}")
        taken = False
        for _ in range(rng.randrange(3, 20)):
            world.slots("g0", rng.randrange(0, 12))
            waiting = [t for t in world.tasks.get("g0", []) if t.split == "train"]
            for task in rng.sample(waiting, min(len(waiting), rng.randrange(0, 4))):
                world.tasks["g0"].remove(task)
                assert world.answer("g0", task, n_sampled=rng.randrange(1, 9)) == ""
            if world.broker.run.done:
                break
            if not taken:
                world.take()
                taken = True
            if world.frames and rng.random() < 0.5:
                world.commit()
                taken, step = False, world.broker.run.step
                if step % 2 == 0:
                    checkpoint = step
        world.ledger.check()
        kills += step < 12
        path = killed(world, tmp_path, f"killed-{kills}")
    assert kills > 0
    done = trained(path)
    assert set(done.values()) == {1} and len(done) == 12 * BATCH
    if order == "window":
        assert done == Counter(range(12 * BATCH))
    with _core.Ledger(path) as ledger:
        counts = ledger.counts()
        assert counts["trained"] == 12 * BATCH
        assert counts["trained"] + counts["dropped"] + len(ledger.unfinished()) == ledger.next_ordinal
