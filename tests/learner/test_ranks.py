"""One rank, two, four, no process group: the same step (gloo on loopback, FSDP2 on the CPU)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner.ranks import run_ranks
from safetensors.torch import load_file

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(450)  # three launches, each bounded by its own limit


@pytest.fixture(scope="module")
def launch(tiny_model, tmp_path_factory):
    """What became of a scenario with so many ranks: reports of all ranks, final tensors, the folder."""
    folders = {}

    def run(scenario, ranks):
        if ranks not in folders:
            folders[ranks] = out = tmp_path_factory.mktemp("ranks")
            if ranks == 1:  # as a user would; the others without torchrun, which takes its time
                command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
                command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
                command += ["-m", "learner.ranks_program", str(tiny_model), str(out)]
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
                environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
                ended = subprocess.run(command, env=environment, timeout=140, capture_output=True, text=True)
                assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
            else:
                run_ranks("learner.ranks_program", ranks, tiny_model, out)
        folder = folders[ranks] / scenario
        reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        return reports, torch.load(folder / "tensors.pt", weights_only=True), folder

    return run


def agree(one, other, tolerance):
    for first, second in zip(one[0][0]["steps"], other[0][0]["steps"], strict=True):
        assert first.keys() == second.keys()
        for name in first:
            assert first[name] == pytest.approx(second[name], rel=tolerance, abs=tolerance), name
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("scenario", ["long-and-tiny", "idle", "five-long-one-short", "kept"])
def test_two_ranks_do_exactly_what_one_does(launch, scenario):
    one, two = launch(scenario, 1), launch(scenario, 2)
    agree(one, two, 1e-9)
    first, second = two[0]
    assert first["steps"] == second["steps"] and first["versions"] == second["versions"]


@pytest.mark.parametrize("scenario", ["budget-and-hundreds", "idle", "five-long-one-short"])
def test_four_ranks_do_exactly_what_one_does(launch, scenario):
    """One segment of the whole budget beside hundreds of ten tokens; three ranks without any work at all."""
    one, four = launch(scenario, 1), launch(scenario, 4)
    agree(one, four, 1e-9)
    assert all(report["steps"] == four[0][0]["steps"] for report in four[0])
    same, other = (torch.load(out / "gradients.pt", weights_only=True) for out in (one[2], four[2]))
    assert same.keys() == other.keys() and len(same) > 20
    for name in same:
        assert float(same[name].abs().max()) > 0
        torch.testing.assert_close(same[name], other[name], rtol=0, atol=1e-9)


def test_two_ranks_follow_one_over_eight_float32_steps(launch):
    agree(launch("float32", 1), launch("float32", 2), 1e-5)


def test_two_ranks_follow_one_where_a_row_holds_one_segment(launch):
    agree(launch("hybrid", 1), launch("hybrid", 2), 1e-5)


def test_a_process_group_of_one_is_the_learner_without_any(launch, tiny_model):
    from learner.ranks_program import batches
    from learner.rollouts import make_config

    from sao.learner.step import Learner

    learner = Learner(make_config(tiny_model, model__dtype="float64"))
    for batch in batches("long-and-tiny"):
        learner.step(batch)
    tensors = launch("long-and-tiny", 1)[1]
    for name, tensor in learner.policy.named_parameters():
        torch.testing.assert_close(tensor.detach(), tensors[f"policy.{name}"], rtol=0, atol=1e-9)


def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_both(launch):
    reports, tensors, _ = launch("poison", 2)
    for report in reports:
        assert [number for number, why in enumerate(report["skipped"]) if why] == [2]
        assert report["skipped"][2].startswith("non-finite gradient of policy lm.model.")
        assert report["versions"] == [1, 2, 2, 3]
        assert report["steps"][-1]["step/skipped_total"] == 1
    assert reports[0]["published"] == [1, 2, None, 3]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_ranks_that_do_not_have_the_same_batch_stop_before_the_first_pass(launch):
    reports, _, _ = launch("disagree", 2)
    assert all(report["error"][0].startswith("batch and plan: ranks differ") for report in reports)
    assert all(report["versions"] == [1] for report in reports)


def test_published_weights_and_export_are_whole(launch):
    _, tensors, out = launch("long-and-tiny", 2)
    policy = {name.removeprefix("policy.lm."): t for name, t in tensors.items() if name.startswith("policy.")}
    newest = load_file(out / "weights" / "weights-0000000003.safetensors")
    exported = load_file(out / "checkpoints" / "step-3" / "model.safetensors")
    critic = load_file(out / "checkpoints" / "step-3" / "critic.safetensors")
    assert newest.keys() == policy.keys() and all(torch.equal(newest[name], policy[name]) for name in policy)
    assert exported.keys() == policy.keys() and all(torch.equal(exported[name], policy[name]) for name in policy)
    assert all(torch.equal(critic[name], tensors[f"critic.{name}"]) for name in critic)
