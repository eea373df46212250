"""The fingerprint of a safetensors file from elsewhere, computed from its bytes: nothing is loaded, no torch."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from sao.errors import WeightsError

_MAX_HEADER_BYTES: Final = 1 << 27
# Name in the file -> name and bytes per element of the type that the fingerprint is made of (`weights.fingerprint`).
_TYPES: Final = {
    "F64": ("torch.float64", 8),
    "F32": ("torch.float32", 4),
    "BF16": ("torch.bfloat16", 2),
    "F16": ("torch.float16", 2),
    "F8_E4M3": ("torch.float8_e4m3fn", 1),
    "F8_E5M2": ("torch.float8_e5m2", 1),
    "I64": ("torch.int64", 8),
    "I32": ("torch.int32", 4),
    "I16": ("torch.int16", 2),
    "I8": ("torch.int8", 1),
    "U8": ("torch.uint8", 1),
    "BOOL": ("torch.bool", 1),
}


def fingerprint_file(path: Path) -> str:
    """What `weights.fingerprint` says of the tensors in this file. Raises `WeightsError` unless it is a safetensors
    file in which every byte belongs to exactly one tensor of a known type.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            view = memoryview(content)
            try:
                return _fingerprint(view)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise WeightsError(f"{path}: not a safetensors file: {error}") from None
            finally:
                view.release()
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path}: cannot be read: {error}") from None


def _fingerprint(view: memoryview) -> str:
    size = int.from_bytes(view[:8], "little")
    if not 2 <= size <= min(_MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError(f"a header of {size} bytes in {len(view)} bytes")
    header = json.loads(bytes(view[8 : 8 + size]))
    header.pop("__metadata__", None)
    places = sorted((*_place(entry), name) for name, entry in header.items())
    end = 0
    for begin, stop, name in places:
        if begin != end:
            raise ValueError(f"{name} begins at {begin}, expected {end}")
        end = stop
    if end != len(view) - 8 - size:
        raise ValueError(f"tensors of {end} bytes, {len(view) - 8 - size} bytes are there")

    def digest(name: str) -> bytes:
        begin, stop = _place(header[name])
        with view[8 + size + begin : 8 + size + stop] as part:
            return hashlib.blake2b(part, digest_size=16).digest()

    names = sorted(header)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(digest, names))
    whole = hashlib.blake2b(digest_size=16)
    for name, mark in zip(names, digests, strict=True):
        entry = header[name]
        whole.update(f"{name}\0{_TYPES[entry['dtype']][0]}\0{tuple(entry['shape'])}\0".encode() + mark)
    return whole.hexdigest()


def _place(entry: dict[str, Any]) -> tuple[int, int]:
    """First and last byte of a tensor, if its size is that of its shape and type."""
    begin, stop = entry["data_offsets"]
    size = _TYPES[entry["dtype"]][1]
    for length in entry["shape"]:
        if type(length) is not int or length < 0:
            raise ValueError(f"a shape of {entry['shape']}")
        size *= length
    if type(begin) is not int or type(stop) is not int or not 0 <= begin <= stop or stop - begin != size:
        raise ValueError(f"{entry['shape']} of {entry['dtype']} at {begin} to {stop}")
    return begin, stop
