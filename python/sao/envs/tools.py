"""Python functions as tools: their schemas from their signatures, their calls checked against these.

A call that is wrong (no such function, arguments that do not fit, a function that raises) is the policy's matter: it
gets the error as the result. Only an `EnvironmentFailure` of a function fails the episode.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pydantic

from sao.envs.protocol import Message, ToolCall, as_unicode
from sao.envs.threads import called
from sao.errors import ConfigError, EnvironmentFailure

_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_MAX_ERROR = 2000  # characters of an error that the policy sees


class Tools:
    """Functions, plain or async, with annotated parameters; the first paragraph of a docstring describes its tool.

    schemas: a JSON list of function schemas, as `ToolEnvironment.tools`. Raises `ConfigError` for a function without a
    name, of a name that comes twice, or of parameters for which there is no schema.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._functions: dict[str, Any] = {}
        found = []
        for function in functions:
            name = getattr(function, "__name__", "")
            if not name.isidentifier() or name in self._functions:
                raise ConfigError(f"tools: {function!r}: expected functions with names, each name once")
            try:
                if any(one.kind in _UNNAMED for one in inspect.signature(function).parameters.values()):
                    raise TypeError("a call names its arguments, so none may be positional only or *args")
                checked = pydantic.validate_call(function)
                adapter: Any = pydantic.TypeAdapter  # of a function, which its type does not know
                schema = adapter(checked).json_schema()
            except Exception as error:  # of a signature that is others' code, or of pydantic
                raise ConfigError(f"tools: {name}: no schema of its parameters: {error}") from None
            self._functions[name] = checked
            text = (inspect.getdoc(function) or "").partition("\n\n")[0]
            described = {"name": name, "description": text, "parameters": schema}
            found.append({"type": "function", "function": described})
        self.schemas = json.dumps(found, ensure_ascii=False)

    async def results(self, turn: Message) -> tuple[Message, ...]:
        """The results of a turn's calls, in their order, one after the other. Raises `EnvironmentFailure`."""
        return tuple([await self._result(call) for call in turn.tool_calls])

    async def _result(self, call: ToolCall) -> Message:
        try:
            function = self._functions[call.name]
        except KeyError:
            text = f"error: there is no tool {call.name!r}, only {', '.join(self._functions)}"
        else:
            text = await self._called(function, call.arguments)
        # What a function gives back may be the policy's own doing, so it must not be what fails the episode.
        return Message("tool", as_unicode(text), (), call.id, as_unicode(call.name))

    async def _called(self, function: Any, arguments: str) -> str:
        try:
            given = json.loads(arguments)
            # A function that blocks holds up its own episode alone, until the deadline of the environment's step.
            found = await called(lambda: function(**given), None, "tool")
            return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        except EnvironmentFailure as failure:
            if failure.reason != "tool_error" or failure.__cause__ is None:
                raise
            return _told(failure.__cause__)
        except Exception as error:  # arguments that are none, a result that is no JSON
            return _told(error)


def _told(error: BaseException) -> str:
    """The text of what a function raised, which may be anything: the policy's call was wrong."""
    if isinstance(error, pydantic.ValidationError):
        text = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    else:
        text = f"{type(error).__name__}: {error}"
    return f"error: {text}"[:_MAX_ERROR]
