"""Asynchronous reinforcement learning for long-horizon language-model agents.

The parts work alone: `from sao import TrajectoryBuffer, pack, advantages, dis_loss`. Names are imported when they are
first used, so `import sao` is quick and imports no torch.
"""

from importlib import import_module
from typing import Any

from sao.errors import missing_package

__version__ = "0.1.0"

_NAMES = {
    "sao.trajectory": ("Segment", "SegmentBuilder", "Termination", "Trajectory", "decode", "encode", "encode_frames"),
    "sao._core": ("Ledger", "summary", "Admission", "VersionClock", "pack", "plan", "token_lags"),
    "sao.embed.buffer": ("TrajectoryBuffer",),
    "sao.algorithms.advantage": ("advantages",),
    "sao.algorithms.policy_loss": ("dis_loss", "dis_weights"),
    "sao.config": ("Config",),
    "sao.errors": ("Error",),
}
_EXPORTS = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'sao' has no attribute {name!r}")
    try:
        value = getattr(import_module(_EXPORTS[name]), name)
    except ModuleNotFoundError as error:
        raise missing_package(error, f"sao.{name}") or error from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
