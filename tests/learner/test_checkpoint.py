"""What a learner saves is what it needs: a restored one goes on as if nothing had happened, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from learner.ranks import run_ranks
from learner.rollouts import make_config, random_batch
from safetensors.torch import load_file, save_file

from sao.errors import CheckpointError
from sao.learner.checkpoint import Checkpointer, republish, restore, state_tensors
from sao.learner.export import full_tensors
from sao.learner.step import Learner
from sao.storage import failpoints as faults
from sao.storage.checkpoints import newest, read
from sao.transport.weights import fingerprint, load

SETTINGS = {
    "model__dtype": "float32",
    "learner__lr_decay": "linear",
    "learner__policy_lr_warmup_steps": 3,
    "learner__critic_lr_warmup_steps": 3,
}


@pytest.fixture(autouse=True)
def uncounted():
    faults._reached.clear()


@pytest.fixture
def make(tiny_model, tmp_path):
    def build(**values):
        weights = tmp_path / "weights"
        weights.mkdir(exist_ok=True)
        return Learner(
            make_config(tiny_model, **{"learner__critic_warmup_steps": 1, **SETTINGS, **values}), None, weights
        )

    return build


def batch(step):
    return random_batch(step, 5)


def train(learner, until):
    """Steps up to `until`; their metrics, without clocks."""
    found = []
    while learner.steps < until:
        metrics = learner.step(batch(learner.steps)).metrics
        found.append({name: value for name, value in metrics.items() if not name.startswith("time/")})
    return found


def copied(learner):
    return {name: tensor.clone() for name, tensor in state_tensors(learner).items()}


def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def save(learner, folder, lease=1):
    saver = Checkpointer(learner, folder)
    saver.trained.add(range(4 * learner.steps))
    assert saver.save(lease, [(4 * learner.steps - 1, 0)]) is None
    assert saver.finish() is None
    return newest(folder)[0]


def test_three_generations_go_on_as_if_nothing_had_happened(make, tmp_path):
    whole = make()
    expected = train(whole, 6)
    found = []
    for stop in (2, 4, 6):
        learner = make()
        checkpoint, _ = newest(tmp_path / "checkpoints")
        if checkpoint is not None:
            torch.manual_seed(99)
            restore(learner, checkpoint)
            assert learner.steps == stop - 2 and learner.version == learner.steps - 1
        found += train(learner, stop)
        save(learner, tmp_path / "checkpoints")
    assert found == expected, "rates, losses and all other metrics, to the bit"
    assert same(copied(learner), copied(whole)) == []


def test_every_tensor_and_counter_comes_back(make, tmp_path):
    learner = make()
    train(learner, 3)
    torch.rand(7)
    learner.skipped_total, learner._skipped_in_a_row = 5, 2
    before = copied(learner)
    checkpoint = save(learner, tmp_path / "c")
    other = make()
    restore(other, checkpoint)
    assert same(before, copied(other)) == []
    assert {name.split("/")[0] for name in before} == {
        "policy",
        "critic",
        "policy_optimizer",
        "critic_optimizer",
        "rng",
    }
    assert [getattr(other, name) for name in Learner.NUMBERS] == [getattr(learner, name) for name in Learner.NUMBERS]
    assert (other.steps, other.version, other.skipped_total, other._skipped_in_a_row) == (3, 2, 5, 2)
    groups = [group["lr"] for optimizer in other.optimizers.values() for group in optimizer.adam.param_groups]
    wanted = [group["lr"] for optimizer in learner.optimizers.values() for group in optimizer.adam.param_groups]
    for optimizer in (*learner.optimizers.values(), *other.optimizers.values()):
        optimizer.set_step(3, 2)
    assert groups and groups != wanted, "the rate of the step that comes, not of the one that was"
    assert torch.rand(1) == (torch.set_rng_state(before["rng/cpu/rank-0"]), torch.rand(1))[1]
    assert checkpoint.manifest["ledger"] == {"lease": 1, "tasks": [[11, 0]], "trained": [[0, 12]], "ended": 0}


def test_a_save_is_of_its_own_step_however_long_it_takes(make, tmp_path, monkeypatch):
    learner = make()
    train(learner, 2)
    before, saver = copied(learner), Checkpointer(learner, tmp_path / "c")
    go_on = threading.Event()
    real = dcp.save  # the first that is written: shards, model and manifest all come after two more steps
    monkeypatch.setattr(dcp, "save", lambda *rest, **more: (go_on.wait(60), real(*rest, **more))[1])
    saver.save(1, [(0, 0)])
    train(learner, 4)
    assert not (tmp_path / "c" / "step-2").exists()
    go_on.set()
    assert saver.finish() is None
    found = newest(tmp_path / "c")[0]
    other = make()
    restore(other, found)
    assert found.step == 2 and same(before, copied(other)) == []
    exported = load_file(found.path / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], before["policy/model.norm.weight"])


def test_the_weights_are_published_again_under_their_version_and_fingerprint(make, tmp_path):
    learner = make()
    train(learner, 3)
    mark = fingerprint(full_tensors(learner.policy.lm, "float32", learner.world))
    checkpoint = save(learner, tmp_path / "c")
    other = make()
    restore(other, checkpoint)
    reference = republish(other, checkpoint)
    assert (reference.version, reference.fingerprint) == (2, mark) and load(reference)
    with torch.no_grad():
        next(other.policy.parameters()).add_(1.0)
    with pytest.raises(CheckpointError, match="the restored policy is"):
        republish(other, checkpoint)
    first = make()
    train(first, 1)
    still = save(first, tmp_path / "warm-up")
    assert republish(first, still) is None, "in the critic's warm-up the policy is the start model"


def test_what_does_not_fit_is_named(make, tmp_path):
    learner = make()
    train(learner, 2)
    checkpoint = save(learner, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"float32', .* in the checkpoint, \['torch.float64'"):
        restore(make(model__dtype="float64"), checkpoint)
    gone = next(name for name in checkpoint.manifest["tensors"] if name.startswith("policy/"))
    moment = next(name for name in checkpoint.manifest["tensors"] if name.startswith("critic_optimizer/exp_avg/"))
    more = {"policy/more": ["torch.float32", [1]]}
    for less, extra, text in (
        (gone, {}, f"{gone}: not in the checkpoint"),
        (moment, {}, f"{moment}: not in the checkpoint"),
        (None, more, "policy/more: .* not in the model"),
    ):
        found = read(checkpoint.path)
        found.manifest["tensors"].pop(less, None)
        found.manifest["tensors"].update(extra)
        other = make()
        untouched = {name: tensor for name, tensor in copied(other).items() if "optimizer" not in name}
        with pytest.raises(CheckpointError, match=text):
            restore(other, found)
        now = {name: tensor for name, tensor in copied(other).items() if "optimizer" not in name}
        assert same(untouched, now) == [], "nothing was read"
    found = read(checkpoint.path)
    del found.manifest["numbers"]["skipped_total"]
    with pytest.raises(CheckpointError, match="counters"):
        restore(make(), found)


@pytest.mark.parametrize("place", ["save.staged", "save.state", "save.model", "save.manifest"])
def test_a_full_disk_leaves_the_last_good_one_and_says_so(make, tmp_path, monkeypatch, place):
    learner = make(run__disk_patience_s=0.0)
    train(learner, 2)
    save(learner, tmp_path / "c")
    train(learner, 3)
    saver = Checkpointer(learner, tmp_path / "c")
    monkeypatch.setenv(faults.FAIL, place)
    assert saver.save(1, [(0, 0)]) is None
    fault = saver.finish()
    assert "step 3" in fault and "No space left on device" in fault
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-2"] and newest(tmp_path / "c")[0].step == 2
    monkeypatch.delenv(faults.FAIL)
    assert saver.save(1, [(0, 0)]) is None and saver.finish() is None
    assert newest(tmp_path / "c")[0].step == 3


@pytest.mark.parametrize("place", ["save.staged", "save.state", "save.model", "save.manifest"])
def test_a_disk_that_is_full_for_a_moment_costs_nothing(make, tmp_path, monkeypatch, place):
    learner = make()
    train(learner, 2)
    saver = Checkpointer(learner, tmp_path / "c")
    faults._reached.clear()
    monkeypatch.setenv(faults.FAIL, f"{place}:1")
    assert saver.save(1, [(0, 0)]) is None and saver.finish() is None
    found, ignored = newest(tmp_path / "c")
    assert found.step == 2 and not ignored and len(list((tmp_path / "c").iterdir())) == 1


def test_a_file_that_the_system_refuses_to_write_is_a_failed_save(tmp_path, tiny_model):
    """A real limit of the operating system, in the middle of a shard."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from learner.rollouts import make_config, random_batch
from sao.learner.checkpoint import Checkpointer
from sao.learner.step import Learner
from pathlib import Path
learner = Learner(make_config(Path({str(tiny_model)!r}), model__dtype="float32"))
saver = Checkpointer(learner, Path({str(tmp_path)!r}))
learner.step(random_batch(0, 5))
assert saver.save(1, [(0, 0)]) is None and saver.finish() is None
learner.step(random_batch(1, 5))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
saver.save(2, [(1, 0)])
fault = saver.finish()
assert fault and "step 2" in fault and "File too large" in fault, fault
"""
    environment = os.environ | {"TQDM_DISABLE": "1"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"] and newest(tmp_path)[0].step == 1


def test_a_checkpoint_is_a_model_that_transformers_loads(make, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = make()
    train(learner, 2)
    path = save(learner, tmp_path / "c").path
    model = AutoModelForCausalLM.from_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).chat_template
    for name, parameter in learner.policy.lm.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_two_runs_over_the_same_batches_are_the_same_to_the_bit(make):
    one, other = make(learner__deterministic=True), make(learner__deterministic=True)
    assert train(one, 4) == train(other, 4)
    assert same(copied(one), copied(other)) == []
    torch.use_deterministic_algorithms(False)


def test_a_checkpoint_of_sharded_files_cannot_run_anything(make, tmp_path):
    """No pickle: everything in the folder is JSON, text or safetensors."""
    learner = make()
    train(learner, 1)
    path = save(learner, tmp_path / "c").path
    for file in path.rglob("*"):
        if file.is_file():
            assert file.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model"), file
    for file in path.rglob("*.safetensors"):
        assert load_file(file)
        save_file(load_file(file), tmp_path / "again.safetensors")
    json.loads((path / "manifest.json").read_text())


@pytest.fixture(scope="module")
def launch(tiny_model, tmp_path_factory):
    """Trains to a step on so many ranks, from the checkpoint in the folder if there is one; the full tensors."""
    folder = tmp_path_factory.mktemp("resume")

    def run(name, ranks, until, resume=None):
        out = folder / name
        run_ranks("learner.resume_program", ranks, tiny_model, out, until, *([folder / resume] if resume else []))
        return torch.load(out / "tensors.pt", weights_only=True)

    return run


@pytest.mark.timeout(300)
def test_a_run_goes_on_with_another_number_of_ranks(launch):
    whole = launch("whole", 2, 4)
    launch("half", 2, 2)
    again = launch("again", 2, 4, resume="half")
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == [], "the same ranks: the same bits"
    for ranks in (1, 3):
        other = launch(f"on-{ranks}", ranks, 4, resume="half")
        for name, tensor in whole.items():
            if not name.startswith("rng/"):
                np.testing.assert_allclose(other[name], tensor, rtol=0, atol=1e-9, err_msg=f"{name} on {ranks}")
        for rank in range(min(ranks, 2)):
            assert torch.equal(other[f"rng/{rank}"], whole[f"rng/{rank}"])
        states = [other[f"rng/{rank}"].numpy().tobytes() for rank in range(ranks)]
        assert len(set(states)) == ranks, "no two ranks share a random stream"
