"""`workspace`: editing several files of a git repository with a shell, in a sandbox.

A turn is a shell script (bare, or in one fenced block); the observation is its exit code and output. A turn `done`
ends the episode: the reward is 1 if what has been *committed* passes every hidden test, else 0; so it is where a limit
ends the episode instead. The work is to make a
package's modules, the names of their functions and the order in which they are applied agree with its documentation.

The hidden tests are arguments and expected results. At the end, the committed files are unpacked in a fresh sandbox,
which gets the arguments only and returns what the functions return; they are compared in this process. So nothing in
reach of the policy tells or makes a reward. The folder is temporary and made from the seed: a lost episode can be
played again.

Failures: "sandbox_error" (a sandbox did not come up, or the repository could not be made), "timeout" (a script could
not be ended). A script that takes too long is no failure: it is killed, and the policy is told so.
"""

import asyncio
import json
import os
import random
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sao.envs.protocol import Message, SingleTask, StepResult, check_integer, check_split, is_unicode
from sao.envs.sandbox import Limits, Outcome, Sandbox
from sao.envs.workspace_tasks import RepositoryTask
from sao.envs.workspace_tasks import draw as draw_task
from sao.errors import ConfigError, EnvironmentFailure

_SYSTEM = (
    "You work in a git repository through a shell. Each of your turns is a shell script and runs in the repository's"
    " folder; you see its exit code and output. The turn `done` ends the work; only what is committed counts."
)
_REQUEST = (
    "The modules of the package `{package}` no longer do what docs/ says. For every module there is a file in docs/"
    " with its rule (the section `In force`); docs/order.md says what the modules' functions are called and in which"
    " order `{package}/total.py` applies them. Make the code agree with the documentation and commit it."
)
_VARIABLES = {
    **{f"GIT_{role}_NAME": "agent" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "a@b" for role in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# Runs inside: unpacks the commit, then makes the calls and writes their results where print() does not reach.
_GRADE = 'cd "$(mktemp -d)" && git -C "$OLDPWD" archive HEAD | tar -x && exec python3 -I -B -c "$GRADER"'
_GRADER = """
import importlib, json, os, sys
calls, found = json.load(sys.stdin), []
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.path.insert(0, os.getcwd())
for module, function, arguments in calls:
    try:
        value = getattr(importlib.import_module(module), function)(*arguments)
        found.append(value if type(value) is int else None)
    except Exception:
        found.append(None)
os.write(out, b"\\n" + json.dumps(found).encode())
"""
_SCRIPT_BYTES = 100_000  # Linux takes 128 KiB as an argument of a program
_FENCED = re.compile(r"\A\s*```[a-z]*\n(.*?)\n?```\s*\Z", re.DOTALL)


class Workspace(SingleTask[RepositoryTask]):
    """The environment; see the module. Reward 0 or 1.

    modules: to be corrected, 2 to 10. output_chars: of a script's output that the policy sees, at least 80.
    wall_s: a script's time, seconds. tree_bytes: of the repository, .git included; beyond, the episode ends with 0.
    allow_unprotected: run scripts without bubblewrap, see `sao.envs.sandbox`.
    """

    def __init__(
        self,
        modules: int = 4,
        output_chars: int = 2000,
        wall_s: float = 20.0,
        tree_bytes: int = 1 << 26,
        allow_unprotected: bool = False,
    ) -> None:
        self._modules = check_integer("modules", modules, 2, 10)
        self._output_chars = check_integer("output_chars", output_chars, 80)
        self._tree_bytes = check_integer("tree_bytes", tree_bytes, 1 << 20)
        if isinstance(wall_s, bool) or not isinstance(wall_s, int | float) or not 0 < wall_s <= 3600:
            raise ConfigError(f"env.args.wall_s: {wall_s!r}, expected seconds above 0, at most 3600")
        if shutil.which("git") is None:
            raise ConfigError("env.name: 'workspace' needs git, which is not installed")
        limits = Limits(wall_s=float(wall_s), cpu_s=max(1, round(wall_s)))
        self._sandbox = Sandbox(limits, allow_unprotected=allow_unprotected)
        self._folder: Path | None = None

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        """Makes the repository of (seed, split) with one commit. Raises `EnvironmentFailure("sandbox_error")`."""
        check_split(seed, split)
        await self.close()
        task = draw_task(random.Random(f"{split} {seed}"), self._modules)
        self._folder = Path(tempfile.mkdtemp(prefix="sao-workspace-"))
        weakref.finalize(self, _remove, self._folder)  # for owners that never call `close`
        await asyncio.to_thread(_write, task.files, self._folder)
        self._sandbox.own(self._folder)
        made = await self._run("git init -q -b main . && git add -A && git commit -q -m 'As it was'")
        if made.exit_code != 0:
            raise EnvironmentFailure("sandbox_error", f"git: {made.output[:400]!r}")
        self._task = task
        return (Message("system", _SYSTEM), Message("user", _REQUEST.format(package=task.package)))

    async def step(self, text: str) -> StepResult:
        """Runs a script, or grades after `done`. Raises `EnvironmentFailure` as the module says."""
        task = self._running()
        assert self._folder is not None
        script = _FENCED.sub(r"\1", text)
        if script.strip() == "done":
            return self._end(await self._grade(task))
        if not is_unicode(script) or "\0" in script or len(script.encode()) > _SCRIPT_BYTES:
            return StepResult((Message("tool", "exit code 2: not a shell script"),), None, False)
        outcome = await self._run(script)
        if await asyncio.to_thread(_larger, self._folder, self._tree_bytes):
            return self._end(0.0)
        return StepResult((Message("tool", self._show(outcome)),), None, False)

    async def grade(self) -> float:
        """The reward of what is committed, also where the turn `done` never came."""
        return await self._grade(self._running())

    async def close(self) -> None:
        folder, self._folder, self._task = self._folder, None, None
        if folder is not None:
            await asyncio.to_thread(_remove, folder)

    async def _run(self, script: str, *, writable: bool = True, stdin: bytes = b"", **more: str) -> Outcome:
        assert self._folder is not None
        self._folder.chmod(stat.S_IRWXU)  # a script that locked itself out must not pass for a broken sandbox
        variables = {**_VARIABLES, **more}
        return await self._sandbox.run(script, self._folder, writable=writable, environment=variables, stdin=stdin)

    async def _grade(self, task: RepositoryTask) -> float:
        """1.0 if every call returns what it has to; whatever the repository's code does instead is 0.0."""
        asked = json.dumps([(call.module, call.function, call.arguments) for call in task.calls]).encode()
        outcome = await self._run(_GRADE, writable=False, stdin=asked, GRADER=_GRADER)
        try:
            found: Any = json.loads(outcome.output.rpartition(b"\n")[2])
        except ValueError:
            return 0.0
        return float(found == [call.expected for call in task.calls])

    def _show(self, outcome: Outcome) -> str:
        text = outcome.output.decode(errors="replace").strip()
        if len(text) > self._output_chars or outcome.cut:
            half = self._output_chars // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters and perhaps more are not shown]\n{text[-half:]}"
        killed = f"killed after {self._sandbox.limits.wall_s:g} s"
        end = killed if outcome.timed_out else f"exit code {outcome.exit_code}"
        return f"{end}\n{text}" if text else end


def _write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _larger(folder: Path, limit: int) -> bool:
    """Whether the files under a folder, links not followed, have more than `limit` bytes; 4 KiB each at least."""
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):
                total += max(4096, Path(parent, name).lstat().st_size)
        if total > limit:
            return True
    return False


def _remove(folder: Path) -> None:
    if not folder.exists():
        return

    def force(remove: Callable[..., Any], path: str, error: Any) -> None:
        """A folder without permissions keeps its owner out, too, until it is given some."""
        with suppress(OSError):
            Path(path).parent.chmod(stat.S_IRWXU)
            if not Path(path).is_symlink():
                Path(path).chmod(stat.S_IRWXU)
            remove(path)

    shutil.rmtree(folder, onerror=force)
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
