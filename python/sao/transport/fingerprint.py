"""The fingerprint of a set of tensors: 32 hex digits over names, types, shapes and bytes. Without torch.

BLAKE2b of each tensor's bytes, then of the list of (name, type, shape, digest) sorted by name; independent of order,
device and strides. The same for tensors in memory (`weights.fingerprint`) and for a safetensors file from elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from sao.errors import WeightsError

_MAX_HEADER_BYTES: Final = 1 << 27
_THREADED_BYTES: Final = 1 << 25  # below this, starting threads costs more than they save
# Name in a file -> name and bytes per element of the type as torch calls it.
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


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor: `torch.` type, shape, size, and its bytes in order when they are needed."""

    dtype: str
    shape: Sequence[int]
    n_bytes: int
    content: Callable[[], memoryview]

    def digest(self) -> bytes:
        """Of its bytes."""
        with self.content() as content:
            return hashlib.blake2b(content, digest_size=16).digest()


def of_parts(parts: Mapping[str, Part]) -> str:
    """The fingerprint of tensors by name."""
    names = sorted(parts)
    small = sum(part.n_bytes for part in parts.values()) < _THREADED_BYTES
    with ThreadPoolExecutor(1 if small else min(8, os.cpu_count() or 1)) as pool:
        each = map if small else pool.map
        digests = list(each(lambda name: parts[name].digest(), names))
    whole = hashlib.blake2b(digest_size=16)
    for name, digest in zip(names, digests, strict=True):
        whole.update(f"{name}\0{parts[name].dtype}\0{tuple(parts[name].shape)}\0".encode() + digest)
    return whole.hexdigest()


def of_file(path: Path) -> str:
    """The fingerprint of the tensors in this file. Raises `WeightsError` unless it is a safetensors file in which every
    byte belongs to exactly one tensor of a known type.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as content,
        ):
            try:
                return of_parts(_parts(content))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise WeightsError(f"{path}: not a safetensors file: {error}") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from None


def _parts(content: memoryview) -> dict[str, Part]:
    size = int.from_bytes(content[:8], "little")
    if not 2 <= size <= min(_MAX_HEADER_BYTES, len(content) - 8):
        raise ValueError(f"a header of {size} bytes in {len(content)} bytes")
    header = json.loads(bytes(content[8 : 8 + size]))
    header.pop("__metadata__", None)
    places = sorted((*_place(entry), name) for name, entry in header.items())
    first, end = 8 + size, 0
    for begin, stop, name in places:
        if begin != end:
            raise ValueError(f"{name} begins at {begin}, expected {end}")
        end = stop
    if end != len(content) - first:
        raise ValueError(f"tensors of {end} bytes, {len(content) - first} bytes are there")
    return {
        name: Part(
            _TYPES[header[name]["dtype"]][0],
            header[name]["shape"],
            stop - begin,
            partial(_slice, content, first + begin, first + stop),
        )
        for begin, stop, name in places
    }


def _slice(content: memoryview, begin: int, stop: int) -> memoryview:
    return content[begin:stop]


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
