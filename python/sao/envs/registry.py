"""Environments by name: built in, from an installed package's entry points, or by path `package.module:Class`.

A module named by path is looked for among the installed ones and in the current folder.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from typing import Any

from sao.envs.protocol import Environment
from sao.errors import ConfigError

ENTRY_POINT_GROUP = "sao.environments"

_BUILT_IN = {
    "lookup": "sao.envs.lookup:Lookup",
    "recall": "sao.envs.recall:Recall",
    "workspace": "sao.envs.workspace:Workspace",
    "agent": "sao.envs.agent:Agent",
    "reasoning_gym": "sao.envs.reasoning_gym:ReasoningGym",
}


def _known() -> dict[str, EntryPoint]:
    known = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    # A built-in name always means the built-in: an installed package cannot take it over.
    known.update({name: EntryPoint(name, path, ENTRY_POINT_GROUP) for name, path in _BUILT_IN.items()})
    return known


def names() -> list[str]:
    """Known names, sorted: the built-in ones and the entry points of the group `sao.environments`."""
    return sorted(_known())


def factory(name: str) -> Callable[..., Environment]:
    """The class or function behind a name or a path `package.module:Class`.

    Raises `ConfigError` if the name is unknown (it lists the known ones and the nearest), or does not import.
    """
    known = _known()
    point = known.get(name)
    if point is None and ":" in name:
        point = EntryPoint(name, name, ENTRY_POINT_GROUP)
        if (here := str(Path.cwd())) not in sys.path:  # the actors have it there, being started with `python -m`
            sys.path.append(here)
    if point is None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"env.name: {name!r} is unknown; expected one of {', '.join(sorted(known))} or 'package.module:Class'{hint}"
        )
    if not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", point.value):
        raise ConfigError(f"env.name: {name!r} names {point.value!r}, expected 'package.module:Class'")
    try:
        found: Any = attrgetter(point.attr)(importlib.import_module(point.module))
    except ImportError as error:
        raise ConfigError(f"env.name: {name!r}: module {point.module!r} does not import: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"env.name: {name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"env.name: {name!r} is a {type(found).__name__}, expected a class or a function")
    return found


def make(name: str, /, **args: Any) -> Environment:
    """An environment, not yet reset.

    Raises `ConfigError` if the name is unknown, an argument is unknown, missing or refused by the environment, an
    optional package is not installed, or the result is not an `Environment`.
    """
    build = factory(name)
    try:
        inspect.signature(build).bind(**args)
    except TypeError as error:
        accepted = ", ".join(inspect.signature(build).parameters) or "none"
        raise ConfigError(f"env.args: {error}; {name!r} takes: {accepted}") from None
    except ValueError:  # a signature that cannot be read (some native classes): the call itself will tell
        pass
    environment = build(**args)
    calls = ("play",) if hasattr(environment, "play") else ("reset", "step")  # it asks for turns, or is asked
    missing = [member for member in ("reward_range", "replayable", *calls, "close") if not hasattr(environment, member)]
    if missing:
        raise ConfigError(f"env.name: {name!r} is no environment: it lacks {', '.join(missing)}")
    low, high = environment.reward_range
    if not low < high:
        raise ConfigError(f"env.name: {name!r}: reward_range: {(low, high)}, expected low < high")
    return environment
