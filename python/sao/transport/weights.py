"""Policy weights on their way from the learner to the generators: one safetensors file a version in a shared folder.

A version becomes visible by one atomic rename, after all of it is on disk; a reader checks the whole content against
the fingerprint in the reference it was sent, so a torn, truncated or swapped file is an error and never a policy.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sao.errors import WeightsError
from sao.storage.durable import patiently
from sao.storage.failpoints import failpoint
from sao.transport.messages import KEPT_VERSIONS, WEIGHTS_FILES, WeightsRef, weights_file

__all__ = ["WeightsRef", "fingerprint", "fit", "load", "publish"]


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """32 hex digits over names, types, shapes and bytes of all tensors, whatever their order, device and strides.

    BLAKE2b of each tensor's bytes, then of the list of (name, type, shape, digest) sorted by name.
    """

    def digest(name: str) -> bytes:
        content = tensors[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        return hashlib.blake2b(content, digest_size=16).digest()

    names, whole = sorted(tensors), hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, found in zip(names, pool.map(digest, names), strict=True):
            tensor = tensors[name]
            whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode() + found)
    return whole.hexdigest()


def publish(
    tensors: Mapping[str, torch.Tensor],
    folder: str | Path,
    version: int,
    keep: int = KEPT_VERSIONS,
    patience_s: float = 0.0,
) -> WeightsRef:
    """Writes all tensors as version `version` into `folder` and deletes all but the newest `keep` versions.

    The file appears under its final name complete or not at all; while the disk fails it is tried again, for
    `patience_s`. Raises `WeightsError` if there is nothing to write, a
    number is out of range, or the file cannot be written (then no file is left behind).
    """
    if not tensors:
        raise WeightsError(f"weights of version {version}: no tensors to publish")
    if version < 0 or keep < 1:
        raise WeightsError(f"weights: version {version} must be >= 0 and keep {keep} must be >= 1")
    folder = Path(folder)
    # Safetensors refuses tensors that share memory; a copy is taken of those only.
    seen: set[int] = set()
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    mark = fingerprint(plain)
    final = folder / weights_file(version)
    temporary = folder / f".{final.name}.{os.getpid()}"

    def write() -> None:
        try:
            save_file(plain, temporary, metadata={"format": "pt", "version": str(version), "fingerprint": mark})
            failpoint("publish.rename")
            temporary.replace(final)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise WeightsError(f"weights of version {version}: cannot write {final}: {error}") from error

    patiently(write, patience_s)
    for old in sorted(folder.glob(WEIGHTS_FILES))[:-keep]:
        if old != final:
            old.unlink(missing_ok=True)
    return WeightsRef(version, str(final), mark)


def load(ref: WeightsRef) -> dict[str, torch.Tensor]:
    """Reads the weights of `ref` and checks version and fingerprint over the content that was read.

    Returns CPU tensors by name. Raises `WeightsError` naming the file and the difference; nothing is returned then.
    """
    try:
        with safe_open(ref.path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"weights of version {ref.version}: cannot read {ref.path}: {error}") from error
    if metadata.get("version") != str(ref.version):
        raise WeightsError(f"{ref.path}: holds version {metadata.get('version')}, expected {ref.version}")
    found = fingerprint(tensors)
    if found != ref.fingerprint:
        raise WeightsError(f"{ref.path}: fingerprint {found}, expected {ref.fingerprint} for version {ref.version}")
    return tensors


def fit(
    version: int, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tied: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The tensors of an update by the names in `wanted`, of a model that they fit: all of them, of the same shapes.

    wanted: types and shapes, perhaps on the meta device. tied: further name -> the name in `wanted` of the same tensor;
    it may come under one or all of its names. Raises `WeightsError` that names the first fault.
    """
    who = f"weights of version {version}"
    found = {name: tensor for name, tensor in tensors.items() if name not in tied}
    for name in tied.keys() & tensors.keys():
        if not torch.equal(found.setdefault(tied[name], tensors[name]), tensors[name]):
            raise WeightsError(f"{who}: {name}: differs from {tied[name]}, but they are tied")
    for names, what in ((wanted.keys() - found.keys(), "missing"), (found.keys() - wanted.keys(), "unknown")):
        if names:
            raise WeightsError(f"{who}: {len(names)} {what}, first: {min(names)}")
    for name, tensor in found.items():
        model = wanted[name]
        if tensor.shape != model.shape or tensor.is_floating_point() != model.is_floating_point():
            kind = "floats" if model.is_floating_point() else model.dtype
            raise WeightsError(
                f"{who}: {name}: {tensor.dtype}{list(tensor.shape)}, expected {kind} {list(model.shape)}"
            )
    return found
