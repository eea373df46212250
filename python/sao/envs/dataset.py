"""`dataset`: prompts from files, one answer each, scored by a function or a command of the user's.

Rows are read from JSON lines, Parquet, or a folder of such files as dataset libraries write them (also Arrow files). A
file is opened once in a process, rows are read when they are played.
"""

import asyncio
import importlib
import inspect
import json
import random
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from sao.envs import program
from sao.envs.protocol import (
    Message,
    SingleTask,
    StepResult,
    belongs,
    check_messages,
    check_range,
    check_reward,
    check_split,
)
from sao.envs.threads import called
from sao.errors import ConfigError, EnvironmentFailure

_DRAWS = 1000  # after which a split is taken to be empty
_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
Row = dict[str, Any]


class Dataset(SingleTask[Row]):
    """The environment; see the module. The same seed is always the same row; rows are drawn with replacement.

    path: a file, or a folder; in a folder, files named test, validation, valid, val, dev or eval are held out.
    eval_path: the held-out rows; without any, one row in 8 is held out, by a digest of its prompt.
    reward: `module:function`, looked for in the current folder, too, called with the answer (without its reasoning) and
        the row; it may be async. Or a command, which gets `{"answer": ..., "row": ...}` on its input and prints a
        number as its last line. prompt: the field of a row with the prompt: text, or a list of messages. system: a
    message before it. reward_range: smallest and largest reward. timeout_s: deadline of one scoring.

    Raises `ConfigError` that names the argument, the file and the row.
    """

    tools = "[]"

    def __init__(
        self,
        path: str,
        reward: str | Sequence[str],
        *,
        eval_path: str | None = None,
        prompt: str = "prompt",
        system: str = "",
        reward_range: Sequence[float] = (0.0, 1.0),
        timeout_s: float = 60.0,
    ) -> None:
        self.reward_range = check_range(reward_range)
        if isinstance(timeout_s, bool) or not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise ConfigError(f"env.args.timeout_s: {timeout_s!r}, expected a number of seconds > 0")
        for name, text in (("prompt", prompt), ("system", system)):
            if not isinstance(text, str):
                raise ConfigError(f"env.args.{name}: {text!r}, expected text")
        if not isinstance(reward, str) and not (
            isinstance(reward, list | tuple) and all(isinstance(one, str) for one in reward)
        ):
            raise ConfigError(
                f"env.args.reward: {reward!r}, expected 'module:function', a command, or a list of its words"
            )
        self._prompt, self._limit_s = prompt, timeout_s
        self._system = (Message("system", system),) if system else ()
        self._score = _command(reward) if _is_command(reward) else _function(str(reward))
        train, held_out = _files("path", path)
        if eval_path is not None:
            found = _files("eval_path", eval_path)
            train, held_out = [*train, *held_out], [*found[0], *found[1]]
        self._rows = {"train": _rows(tuple(train), prompt), "eval": _rows(tuple(held_out), prompt)}
        if not self._rows["train"]:
            raise ConfigError(f"env.args.path: {path}: no rows to train on")
        self._divided = not self._rows["eval"]
        if self._divided:
            rows = self._rows["train"]
            texts = (json.dumps(rows[index][prompt]) for index in range(min(len(rows), _DRAWS)))
            if len({belongs(text, "eval") for text in texts}) < 2:
                raise ConfigError(
                    f"env.args.path: {path}: {len(rows)} rows are too few to hold some out; give eval_path"
                )

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        """The prompt of a row. Raises `EnvironmentFailure("empty_split")`."""
        check_split(seed, split)
        self._task, rng = None, random.Random(seed)
        rows = self._rows["train" if self._divided else split]
        for _ in range(_DRAWS):
            row = rows[rng.randrange(len(rows))]
            if not self._divided or belongs(json.dumps(row[self._prompt]), split):
                self._task = row
                return (*self._system, *_messages(row[self._prompt]))
        raise EnvironmentFailure("empty_split", f"no row of split {split!r} in {_DRAWS} draws of {len(rows)} rows")

    async def act(self, turn: Message) -> StepResult:
        """Scores the answer. Raises `EnvironmentFailure`: "scorer_error", "timeout", "bad_reward", "not_running"."""
        row = self._running()
        return self._end(check_reward(await self._score(turn.content, row, self._limit_s), self.reward_range))


class _Score(Protocol):
    async def __call__(self, answer: str, row: Row, limit_s: float) -> Any: ...


def _function(path: str) -> _Score:
    module, _, name = path.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        score: Any = attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # code of others
        text = f"{path!r} does not import: {type(error).__name__}: {error}; expected 'module:function' or a command"
        raise ConfigError(f"env.args.reward: {text}") from error
    try:
        inspect.signature(score).bind("answer", {})
    except TypeError as error:
        raise ConfigError(f"env.args.reward: {path!r}: {error}; expected a function of (answer, row)") from None
    except ValueError:  # a signature that cannot be read
        pass

    async def scored(answer: str, row: Row, limit_s: float) -> Any:
        return await called(lambda: score(answer, row), limit_s, "scorer")

    return scored


def _is_command(reward: str | Sequence[str]) -> bool:
    return not isinstance(reward, str) or " " in reward.strip() or "/" in reward or ":" not in reward


def _command(reward: str | Sequence[str]) -> _Score:
    try:
        parts = shlex.split(reward) if isinstance(reward, str) else [str(part) for part in reward]
    except ValueError as error:
        raise ConfigError(f"env.args.reward: {reward!r}: {error}") from None
    if not parts or shutil.which(parts[0]) is None:
        text = f"{reward!r} is neither 'module:function' nor a program that is found"
        raise ConfigError(f"env.args.reward: {text}")

    async def scored(answer: str, row: Row, limit_s: float) -> Any:
        given = json.dumps({"answer": answer, "row": row}, default=str).encode()
        try:
            async with asyncio.timeout(limit_s):
                ended = await program.run(parts, given=given)
        except TimeoutError:
            raise EnvironmentFailure("timeout", f"scorer did not end within {limit_s:g} s") from None
        except OSError as error:
            raise EnvironmentFailure("scorer_error", f"{parts[0]}: {error}") from None
        last = ended.out.rpartition("\n")[2]
        try:
            if ended.code:
                raise ValueError(f"exit code {ended.code}: {ended.err[-500:]}")
            return float(last)
        except ValueError as error:
            raise EnvironmentFailure("scorer_error", f"last line {last[:200]!r}: {error}") from None

    return scored


def _files(name: str, path: str) -> tuple[list[Path], list[Path]]:
    """(files to train on, files held out) of a file or folder. Raises `ConfigError`."""
    if not isinstance(path, str):
        raise ConfigError(f"env.args.{name}: {path!r}, expected a path")
    root = Path(path).expanduser()
    if root.is_file():
        return [root], []
    found = sorted(file for file in root.rglob("*") if _has_rows(file.relative_to(root)) and file.is_file())
    if not found:
        expected = f"expected a file or folder of {', '.join(_SUFFIXES)}"
        wrong = "no such files in it" if root.is_dir() else "not there"
        raise ConfigError(f"env.args.{name}: {path}: {wrong}; {expected}")

    def held_out(file: Path) -> bool:
        parts = [*file.relative_to(root).parts[:-1], file.stem.partition("-")[0].partition("_")[0]]
        return any(part.lower() in _HELD_OUT for part in parts)

    return [file for file in found if not held_out(file)], [file for file in found if held_out(file)]


def _has_rows(file: Path) -> bool:
    """Whether a file of a folder holds rows: none that is hidden, of a library's cache, or of a model beside it."""
    hidden = any(part.startswith(".") for part in file.parts)
    beside = file.name.endswith(("_info.json", "_infos.json", "_dict.json", "config.json", "state.json"))
    return file.suffix in _SUFFIXES and not (hidden or beside or file.name.startswith(("cache-", "tokenizer")))


def _rows(files: tuple[Path, ...], prompt: str) -> Sequence[Row]:
    stamps = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _opened(stamps, prompt)


@lru_cache(8)
def _opened(stamps: tuple[tuple[Path, int, int], ...], prompt: str) -> Sequence[Row]:
    """The rows of some files, each checked once. Raises `ConfigError` that names file and row."""
    parts = [_reader(file)(file) for file, _, _ in stamps]
    for part in parts:
        for index in range(len(part)):
            row = part[index]
            if prompt not in row:
                fields = ", ".join(map(str, row)) or "none"
                raise ConfigError(
                    f"env.args.prompt: {part.name}, row {index + 1}: no field {prompt!r}; it has {fields}"
                )
            try:
                messages = _messages(row[prompt])
                check_messages(messages, prompt)
                if messages[-1].role == "assistant" or not messages[-1].content.strip():
                    text = "is of the assistant, who is to answer" if messages[-1].role == "assistant" else "is empty"
                    raise EnvironmentFailure("bad_messages", f"its last message {text}")
            except EnvironmentFailure as error:
                raise ConfigError(f"env.args.prompt: {part.name}, row {index + 1}: {error.detail}") from None
    return _Joined(parts)


def _messages(given: Any) -> tuple[Message, ...]:
    if isinstance(given, str):
        return (Message("user", given),)
    if isinstance(given, list) and given and all(isinstance(one, dict) for one in given):
        return tuple(Message(one.get("role", ""), one.get("content", "")) for one in given)
    raise EnvironmentFailure("bad_messages", f"{given!r:.200}, expected text or a list of messages")


class _Joined(Sequence[Row]):
    """Several sequences of rows as one."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self._parts = parts
        self._size = sum(map(len, parts))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        for part in self._parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)


class _Lines(Sequence[Row]):
    """The rows of a file of JSON lines, by their places in it."""

    def __init__(self, file: Path) -> None:
        self.name = str(file)
        self._file = file.open("rb")  # open as long as the rows may be read
        self._starts, at = [], 0
        for line in self._file:
            if line.strip():
                self._starts.append(at)
            at += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        self._file.seek(self._starts[index])
        try:
            row = json.loads(self._file.readline())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"env.args.path: {self.name}, row {index + 1}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"env.args.path: {self.name}, row {index + 1}: {row!r:.100}, expected an object")
        return row


class _Table(Sequence[Row]):
    """The rows of a table of pyarrow, or of a list."""

    def __init__(self, name: str, table: Any) -> None:
        self.name, self._table = name, table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        return self._table[index] if isinstance(self._table, list) else self._table.slice(index, 1).to_pylist()[0]


def _reader(file: Path) -> Callable[[Path], Any]:
    if file.suffix in (".parquet", ".arrow"):
        return _arrow
    return _json if file.suffix == ".json" else _Lines


def _json(file: Path) -> Any:
    """A JSON file with a list of rows, or with one row; one with a row a line is read as lines."""
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return _Lines(file)
    if isinstance(found, dict):
        found = [found]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ConfigError(f"env.args.path: {file}: expected a list of objects, or an object a line")
    return _Table(str(file), found)


def _arrow(file: Path) -> _Table:
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"env.args.path: {file}: needs the package pyarrow: pip install 'sao[envs]' ({error})"
        ) from None
    try:
        if file.suffix == ".parquet":
            return _Table(str(file), parquet.read_table(file))
        return _Table(str(file), pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all())
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"env.args.path: {file}: not readable: {error}") from None
