"""Environments by name: built in, from an installed package's entry points, or by path `package.module:Class`.

A module named by path is looked for among the installed ones and in the current folder.
"""

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
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
    "dataset": "sao.envs.dataset:Dataset",
    "agent": "sao.envs.agent:Agent",
    "reasoning_gym": "sao.envs.reasoning_gym:ReasoningGym",
}


def _known() -> dict[str, str]:
    # A built-in name always means the built-in: an installed package cannot take it over.
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)} | _BUILT_IN


def names() -> list[str]:
    """Known names, sorted: the built-in ones and the entry points of the group `sao.environments`."""
    return sorted(_known())


def factory(name: str) -> Callable[..., Environment]:
    """The class or function behind a name or a path `package.module:Class`.

    Raises `ConfigError` if the name is unknown (it lists the known ones and the nearest), or does not import.
    """
    known = _known()
    path = known.get(name, name)
    if path == name and (here := str(Path.cwd())) not in sys.path:  # actors have it, being started with `python -m`
        sys.path.append(here)
    if ":" not in path:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"env.name: {name!r} is unknown; expected one of {', '.join(sorted(known))} or 'package.module:Class'{hint}"
        )
    if not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", path):
        raise ConfigError(f"env.name: {name!r} names {path!r}, expected 'package.module:Class'")
    module, _, attribute = path.partition(":")
    try:
        found: Any = attrgetter(attribute)(importlib.import_module(module))
    except ImportError as error:
        raise ConfigError(f"env.name: {name!r}: module {module!r} does not import: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"env.name: {name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"env.name: {name!r} is a {type(found).__name__}, expected a class or a function")
    return found


def make(name: str, /, **args: Any) -> Environment:
    """An environment, not yet reset.

    Raises `ConfigError` for an unknown name, an argument that is unknown, missing or refused, a package that is not
    installed, and a result that is no environment.
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
    asked = ("reset", "act", "tools") if hasattr(environment, "act") else ("reset", "step")
    calls = ("play",) if hasattr(environment, "play") else asked  # it asks for turns, or is asked
    missing = [member for member in ("reward_range", "replayable", *calls, "close") if not hasattr(environment, member)]
    if missing:
        raise ConfigError(f"env.name: {name!r} is no environment: it lacks {', '.join(missing)}")
    low, high = environment.reward_range
    if not low < high:
        raise ConfigError(f"env.name: {name!r}: reward_range: {(low, high)}, expected low < high")
    return environment
