"""Checkpoints of a learner: saved beside training, and read again.

Saved is what decides the next step: all parameters, both AdamW states, the random states of every rank, the counters,
and which tasks were trained. Tensors are stored in shards by `torch.distributed.checkpoint`, as safetensors files, so a
run may be resumed on another number of ranks. Writing goes on in a thread, with a process group of its own, so that its
collectives cannot mix with those of training.
"""

from __future__ import annotations

import logging
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from sao import __version__
from sao.errors import CheckpointError
from sao.learner.export import full_tensors, model_tensors, named_tensors, write_model
from sao.learner.lora import own
from sao.learner.step import Learner
from sao.storage.checkpoints import STATE, Checkpoint, Draft, Ordinals
from sao.storage.durable import PAUSES_S, may_pass
from sao.storage.failpoints import failpoint
from sao.transport.weights import WeightsRef, fingerprint

log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

_PARTS = ("policy", "critic", "policy_optimizer", "critic_optimizer", "rng")  # a file of each per rank
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Checkpointer:
    """Saves one learner's checkpoints in a folder. Every rank makes the same calls in the same order."""

    def __init__(self, learner: Learner, folder: Path, trained: Ordinals | None = None) -> None:
        """`folder`: the run's `checkpoints`. `trained`: of the checkpoint that the learner continues from.

        A collective. The attribute `trained` holds all tasks that led to the present state; rank 0 keeps it.
        """
        self.learner, self.world, self.folder = learner, learner.world, folder
        self.trained = trained or Ordinals()
        self._group = None if self.world.mesh is None else dist.new_group(backend="gloo")
        self._writer = ThreadPoolExecutor(1, "sao-checkpoint")
        self._saving: Future[str | None] | None = None
        self._step = -1

    def save(self, lease: int, tasks: list[tuple[int, int]], ended: int = 0) -> str | None:
        """Copies the learner's state and begins to write it; `lease` and `tasks` (ordinal, attempt): the last step's.
        `ended`: as `Ordinals.close` was told.

        Waits for the save before, if it still goes on, and returns what `finish` says of it.
        """
        failpoint("save.begin")
        before = self.finish()
        learner, world = self.learner, self.world
        self._step = learner.steps
        tensors = state_tensors(learner)
        ledger = {"lease": lease, "tasks": [list(task) for task in tasks], "trained": self.trained.runs, "ended": ended}
        metadata = {**_metadata(learner, tensors), "ledger": ledger}
        staged: Any = DefaultStager(StagingOptions(False, False, False, False)).stage(tensors)
        model = model_tensors(learner.policy, learner.critic, learner.config, world) or {}
        self._saving = self._writer.submit(self._write, staged, model, metadata)
        return before

    def finish(self) -> str | None:
        """Waits until nothing is being written. Returns why the save failed, on every rank, or None."""
        fault = None if self._saving is None else self._saving.result()
        self._saving = None
        failed = self.world.share([fault is not None])[0]
        return f"step {self._step}: {self.folder}: {fault or 'rank 0 failed'}" if failed else None

    def _write(self, staged: dict[str, Tensor], model: dict[str, Any], metadata: dict[str, Any]) -> str | None:
        """Writes what was copied, again and again while the disk fails; returns why it could not."""
        began, patience_s = time.perf_counter(), self.learner.config.run.disk_patience_s
        for pause_s in chain(PAUSES_S, repeat(1.0)):
            fault = self._try_to_write(staged, model, metadata)
            failed, final, over = self._on_any_rank(
                fault is not None,
                fault is not None and not may_pass(fault),
                self.world.rank == 0 and time.perf_counter() - began + pause_s > patience_s,
            )
            if not failed:
                if self.world.rank == 0:
                    log.info("checkpoint of step %d is complete, after %.1f s", self._step, time.perf_counter() - began)
                return None
            log.error("checkpoint of step %d: %s", self._step, fault or "another rank failed")
            if final or over:
                return fault or "another rank failed"
            time.sleep(pause_s)
        raise AssertionError("the pauses have no end")

    def _try_to_write(self, staged: dict[str, Tensor], model: dict[str, Any], metadata: dict[str, Any]) -> str | None:
        config, draft = self.learner.config, None
        fault: BaseException | None = None
        if self.world.rank == 0:
            try:
                failpoint("save.staged")
                draft = Draft(self.folder, self._step)
            except OSError as error:
                fault = error
        if self._on_any_rank(fault is not None)[0]:
            return None if fault is None else _explain(fault)
        try:
            folder = self.folder / f".step-{self._step}.part" / STATE
            files = {name: _PARTS.index(name.partition("/")[0]) + 1 for name in metadata["tensors"]}
            writer = dcp.HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
            dcp.save(staged, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            failpoint("save.state")
            if draft is not None:
                write_model(self.learner.policy.lm, model, config, draft.folder)
                failpoint("save.model")
                draft.commit({**metadata, "fingerprint": fingerprint(model["policy"])}, config.learner.checkpoints_kept)
            return None
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            if draft is not None:
                draft.abandon()
            return _explain(error)

    def _on_any_rank(self, *flags: bool) -> list[bool]:
        """Which of the flags any rank has set. A collective of the writers."""
        found = torch.tensor(flags, dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return [flag > 0 for flag in found.tolist()]


def state_tensors(learner: Learner) -> dict[str, Tensor]:
    """Every tensor of the learner's state by name: `policy/NAME`, `policy_optimizer/exp_avg/NAME`, `rng/cpu/rank-0`.

    Of models with adapters these alone: the base is that of `model.path`.
    """
    tensors: dict[str, Tensor] = {}
    for part, module in _models(learner).items():
        tensors |= {f"{part}/{name}": tensor for name, tensor in own(named_tensors(module), part).items()}
    for part, optimizer in learner.optimizers.items():
        for name, parameter in optimizer.parameters.items():
            moments = optimizer.adam.state.get(parameter, {})
            tensors |= {f"{part}_optimizer/{moment}/{name}": tensor for moment, tensor in moments.items()}
    rank, device = learner.world.rank, learner.world.device
    tensors[f"rng/cpu/rank-{rank}"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors[f"rng/cuda/rank-{rank}"] = torch.cuda.get_rng_state(device)
    return tensors


def restore(learner: Learner, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's state into a learner that was made with the same model. A collective.

    Raises `CheckpointError` for any tensor that is needed and absent, there and not needed, or of another type or
    shape. With another number of ranks the random states of ranks that were not there are derived from the run's seed.
    """
    world, manifest = learner.world, checkpoint.manifest
    listed: dict[str, list[Any]] = manifest["tensors"]
    _make_moments(learner, listed)
    tensors = state_tensors(learner)
    held = {name: entry for name, entry in listed.items() if not name.startswith("rng/") or name in tensors}
    new_rank = world.rank >= manifest["ranks"]
    wanted = {name: tensor for name, tensor in tensors.items() if not (new_rank and name.startswith("rng/"))}
    described = {name: _described(tensor) for name, tensor in wanted.items()}
    faults = [
        f"{name}: {held.get(name, 'not')} in the checkpoint, {described.get(name, 'not')} in the model"
        for name in sorted(held.keys() | described.keys())
        if held.get(name) != described.get(name)
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(faults[:5])}{more}")
    reader = dcp.HuggingFaceStorageReader(str(checkpoint.state))
    try:
        dcp.load(wanted, storage_reader=reader, no_dist=world.mesh is None)  # in place
    except CheckpointException as error:
        raise CheckpointError(f"{checkpoint.path}: {_explain(error)}") from error
    if new_rank:
        torch.manual_seed(learner.config.run.seed + 1_000_003 * (checkpoint.step + 1) + world.rank)
    else:
        torch.set_rng_state(wanted[f"rng/cpu/rank-{world.rank}"])
        if world.device.type == "cuda":
            torch.cuda.set_rng_state(wanted[f"rng/cuda/rank-{world.rank}"], world.device)
    numbers = manifest["numbers"]
    if numbers.keys() != set(learner.NUMBERS):
        raise CheckpointError(f"{checkpoint.path}: counters {sorted(numbers)}, expected {sorted(learner.NUMBERS)}")
    for name, value in numbers.items():
        setattr(learner, name, value)


def republish(learner: Learner, checkpoint: Checkpoint) -> WeightsRef | None:
    """Publishes the restored policy under its version again (None on other ranks, and for version 0: the start model).

    Raises `CheckpointError` when these are not the weights whose fingerprint the checkpoint holds. A collective.
    """
    tensors = full_tensors(learner.policy.lm, learner.config.published_dtype, learner.world)
    if tensors is None:
        return None
    restored, saved = fingerprint(tensors), checkpoint.manifest["fingerprint"]
    if restored != saved:
        raise CheckpointError(f"{checkpoint.path}: the restored policy is {restored}, saved was {saved}")
    return learner.publish(tensors) if learner.version else None


def _models(learner: Learner) -> dict[str, nn.Module]:
    return {"policy": learner.policy.lm} | ({} if learner.critic is None else {"critic": learner.critic})


def _described(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape)]


def _metadata(learner: Learner, tensors: dict[str, Tensor]) -> dict[str, Any]:
    world, described = learner.world, {name: _described(tensor) for name, tensor in tensors.items()}
    for rank in range(world.size):  # the others' random states have the same shapes
        for name in [name for name in tensors if name.startswith("rng/")]:
            described[name.replace(f"rank-{world.rank}", f"rank-{rank}")] = described[name]
    return {
        "version": learner.version,
        "time_s": round(time.time(), 3),
        "sao": __version__,
        "torch": torch.__version__,
        "ranks": world.size,
        "numbers": {name: getattr(learner, name) for name in learner.NUMBERS},
        "config": learner.config.model_dump(mode="json"),
        "tensors": described,
    }


def _make_moments(learner: Learner, listed: dict[str, list[Any]]) -> None:
    """Makes AdamW's state of the parameters that had one when the checkpoint was written: all of it or none."""
    for part, optimizer in learner.optimizers.items():
        optimizer.adam.state.clear()
        for name, parameter in optimizer.parameters.items():
            if any(f"{part}_optimizer/{moment}/{name}" in listed for moment in ("step", *_MOMENTS)):
                zeros = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in _MOMENTS}
                optimizer.adam.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **zeros}


def _explain(error: BaseException) -> str:
    """Which errors there were, of the ranks where they were, without their tracebacks."""
    failures = getattr(error, "failures", None)
    if not failures:
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(failures.items()))
