"""Asynchronous reinforcement learning for long-horizon language-model agents.

The parts work alone: `from sao import TrajectoryBuffer, pack, advantages, dis_loss`. Names are imported when they are
first used, so `import sao` is quick and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Segment": "sao.trajectory",
    "SegmentBuilder": "sao.trajectory",
    "Termination": "sao.trajectory",
    "Trajectory": "sao.trajectory",
    "decode": "sao.trajectory",
    "encode": "sao.trajectory",
    "encode_frames": "sao.trajectory",
    "Ledger": "sao._core",
    "summary": "sao._core",
    "Admission": "sao._core",
    "VersionClock": "sao._core",
    "pack": "sao._core",
    "plan": "sao._core",
    "token_lags": "sao._core",
    "TrajectoryBuffer": "sao.embed.buffer",
    "advantages": "sao.algorithms.advantage",
    "dis_loss": "sao.algorithms.policy_loss",
    "dis_weights": "sao.algorithms.policy_loss",
    "Config": "sao.config",
    "Error": "sao.errors",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'sao' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
