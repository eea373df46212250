"""`agent`: episodes that a program of others plays, by calling the generator's endpoint (`sao.agents.server`)."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable
from urllib.parse import urlsplit

from sao.envs import program
from sao.envs.protocol import check_choice, check_range
from sao.errors import ConfigError, EnvironmentFailure
from sao.storage.surroundings import inherited

Start = Literal["episode", "once", "never"]
RewardFrom = Literal["posted", "last_line"]
OnError = Literal["failure", "lowest_reward"]


class Access(NamedTuple):
    """The access of an agent to one episode: to the API, and to where its reward is posted."""

    base_url: str
    api_key: str
    model: str
    reward_url: str
    reward_key: str

    def variables(self) -> dict[str, str]:
        """The same as environment variables, among them those that the clients of OpenAI and Anthropic read."""
        names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "SAO_MODEL", "SAO_REWARD_URL", "SAO_REWARD_KEY")
        anthropic = {"ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": self.api_key}
        return dict(zip(names, self, strict=True)) | anthropic


@runtime_checkable
class AgentEnvironment(Protocol):
    """An environment that asks for the policy's turns itself, by an OpenAI-compatible API, instead of being asked."""

    reward_range: tuple[float, float]
    replayable: bool

    async def play(self, seed: int, split: str, access: Access) -> float | None:
        """Plays one episode to its end; its reward, or None when that is posted. Raises `EnvironmentFailure`."""

    async def close(self) -> None:
        """Frees what the episode holds; called once, also after a failure or a cancelled call."""


class Agent:
    """A command as an agent.

    command: program and arguments, as a list or as one line for no shell; `{seed}` and `{split}` in them are replaced.
    start: episode: once per episode, with the variables of `Access` and SAO_SEED, SAO_SPLIT; it has to end by itself
        with exit code 0, anything else is a failure. once: one process per generator, with SAO_AGENT_URL and
        SAO_AGENT_TOKEN, which opens sessions for as many episodes at once as it likes. never: the same, started by
        somebody else, who finds address and token in the run folder (`agents/<generator>.json`).
    reward: posted: by HTTP, with the reward key of the session. last_line: the last line of the program's output, a
        number or `{"reward": number}`; only with start = "episode".
    reward_range: smallest and largest reward. replayable: whether a lost episode may be started again from its seed.
    cwd: folder that the program runs in. environment: further variables. inherit: names of variables of ours that it
        gets beside those of `sao.storage.surroundings.FOR_AGENTS`, `*` for any end.
    on_error: of a program that ends with another exit code than 0 behind a turn of the policy. failure: the episode is
        left out of training, for the program may be at fault. lowest_reward: the policy is (many libraries raise when
        it does not answer in the form that they ask for), and gets the smallest reward.
    strict: calls with fields that are not followed (sampling, tool_choice, response_format, unknown ones) are refused.

    Raises `ConfigError` that names the argument.
    """

    def __init__(
        self,
        command: str | Sequence[str] = (),
        start: Start = "episode",
        reward: RewardFrom = "posted",
        reward_range: Sequence[float] = (0.0, 1.0),
        replayable: bool = True,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        inherit: Sequence[str] = (),
        on_error: OnError = "failure",
        strict: bool = False,
    ) -> None:
        try:
            self.command = shlex.split(command) if isinstance(command, str) else [str(part) for part in command]
        except ValueError as error:
            raise ConfigError(f"env.args.command: {command!r}: {error}") from None
        if any("\0" in part for part in self.command):
            raise ConfigError(f"env.args.command: {command!r}: no argument can hold a NUL")
        if self.command:
            self.command[0] = os.path.expanduser(self.command[0])  # noqa: PTH111 - `./` stays
        check_choice("start", start, get_args(Start))
        check_choice("reward", reward, get_args(RewardFrom))
        check_choice("on_error", on_error, get_args(OnError))
        if not isinstance(strict, bool):
            raise ConfigError(f"env.args.strict: {strict!r}, expected true or false")
        if (start == "never") == bool(self.command):
            wanted = "none with start = 'never'" if self.command else f"a program, since start = {start!r}"
            raise ConfigError(f"env.args.command: {command!r}, expected {wanted}")
        if reward == "last_line" and start != "episode":
            raise ConfigError(f"env.args.reward: 'last_line' needs start = 'episode', it is {start!r}")
        if isinstance(inherit, str) or not all(isinstance(name, str) for name in inherit):
            raise ConfigError(f"env.args.inherit: {inherit!r}, expected a list of names")
        self._inherited = inherited(os.environ, inherit)
        self._cwd, self._more = Path(cwd or ".").expanduser().resolve(), dict(environment or {})
        if not self._cwd.is_dir():
            raise ConfigError(f"env.args.cwd: {cwd}: no such folder")
        if self.command:
            self._check_program(self.command[0])
        self.reward_range = check_range(reward_range)
        self.start, self.reward, self.replayable = start, reward, replayable
        self.on_error, self.strict = on_error, strict

    def _check_program(self, name: str) -> None:
        """Looks a program up as it will be: in the folder and with the PATH that it will have."""
        path = {**self._inherited, **self._more}.get("PATH")
        found = shutil.which(self._cwd / name if "/" in name else name, path=path)
        if found is None:
            where = f"from {self._cwd}" if "/" in name else "in PATH"
            raise ConfigError(f"env.args.command: {name!r} is no program {where}")
        try:
            with Path(found).open("rb") as file:
                begin, _, line = file.readline(256).partition(b"#!")
        except OSError:  # it may be run, not read
            return
        if not begin and line.split() and not Path(runs := os.fsdecode(line.split()[0])).exists():
            raise ConfigError(f"env.args.command: {name!r} is a script for {runs}, which is absent")

    async def play(self, seed: int, split: str, access: Access) -> float | None:
        """See `AgentEnvironment`. Failures: `agent_start`, `agent_exit`, `bad_reward`."""
        parts = [part.replace("{seed}", str(seed)).replace("{split}", split) for part in self.command]
        code, out, err = await self.run(parts, {**access.variables(), "SAO_SEED": str(seed), "SAO_SPLIT": split})
        if code:
            raise EnvironmentFailure("agent_exit", f"exit code {code}: {err}")
        return _last_line(out) if self.reward == "last_line" else None

    async def run(self, parts: Sequence[str], variables: Mapping[str, str]) -> program.Ended:
        """Runs the program to its end, see `sao.envs.program`. Raises `EnvironmentFailure("agent_start")`."""
        environment = without_proxy({**self._inherited, **self._more, **variables})
        try:
            return await program.run(parts, cwd=self._cwd, environment=environment)
        except OSError as error:
            raise EnvironmentFailure("agent_start", f"{parts[0]}: {error}") from error

    async def close(self) -> None:
        """Nothing is held between calls."""


def without_proxy(environment: dict[str, str]) -> dict[str, str]:
    """The environment with this machine and the API's host outside of any proxy that it names."""
    api = urlsplit(environment.get("OPENAI_BASE_URL") or environment.get("SAO_AGENT_URL") or "").hostname
    names = ("no_proxy", "NO_PROXY")  # libraries read either, and not the other one beside it
    hosts = [host.strip() for name in names for host in environment.get(name, "").split(",") if host.strip()]
    for name in names:
        environment[name] = ",".join(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1", *([api] if api else [])]))
    return environment


def _last_line(output: str) -> float:
    last = output.rpartition("\n")[2]
    try:
        found = json.loads(last)
        value = found["reward"] if isinstance(found, dict) else found
    except (ValueError, KeyError):
        value = None
    if type(value) not in (int, float):
        expected = 'expected a number or {"reward": number}'
        raise EnvironmentFailure("bad_reward", f"last line of output {last[:200]!r}, {expected}")
    return float(value)
