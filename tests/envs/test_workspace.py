"""`workspace`: what earns the reward, what does not, and that nothing in reach of the policy helps it."""

from __future__ import annotations

import asyncio
import random
import shlex
import tempfile
from pathlib import Path

import pytest

from sao.envs import sandbox
from sao.envs.protocol import StepResult
from sao.envs.workspace import Workspace
from sao.envs.workspace_tasks import RepositoryTask, draw
from sao.errors import ConfigError, EnvironmentFailure

pytestmark = pytest.mark.skipif(
    sandbox.bubblewrap()[0] is None and sandbox.namespaces()[0] is None,
    reason=f"no sandbox: {sandbox.bubblewrap()[1]}; {sandbox.namespaces()[1]}",
)
SEED, MODULES = 11, 3


def task() -> RepositoryTask:
    """What the environment plays for `SEED`."""
    return draw(random.Random(f"train {SEED}"), MODULES)


def writing(files: dict[str, str]) -> list[str]:
    """Scripts that write files."""
    return [f"cat > {path} <<'END'\n{text}END" for path, text in files.items()]


def play(*scripts: str, **args: object) -> list[StepResult]:
    """What the environment says to each script."""

    async def episode() -> list[StepResult]:
        environment = Workspace(**{"modules": MODULES, "wall_s": 15, "allow_unprotected": True, **args})  # type: ignore[arg-type]
        await environment.reset(SEED, "train")
        try:
            return [await environment.step(script) for script in scripts]
        finally:
            await environment.close()

    return asyncio.run(episode())


def reward(*scripts: str, **args: object) -> float | None:
    """The reward after the last script."""
    return play(*scripts, **args)[-1].reward


def said(result: StepResult) -> str:
    return result.messages[0].content


def test_the_documented_work_earns_1_and_less_does_not() -> None:
    right = writing(task().solution())
    commit = "git add -A && git commit -qm fixed"
    assert reward(*right, commit, "done") == 1.0
    assert reward(*right, commit, " ```sh\ndone\n``` ") == 1.0
    assert reward("done") == 0.0
    assert reward(*right, "done") == 0.0  # not committed
    assert reward(*right[1:], commit, "done") == 0.0  # one module is left as it was


def test_a_right_commit_counts_where_a_limit_ends_the_episode_before_done() -> None:
    async def graded(*scripts: str) -> float:
        environment = Workspace(modules=MODULES, wall_s=15, allow_unprotected=True)
        await environment.reset(SEED, "train")
        try:
            for script in scripts:
                await environment.step(script)
            return await environment.grade()
        finally:
            await environment.close()

    right = writing(task().solution())
    assert asyncio.run(graded(*right, "git add -A && git commit -qm fixed")) == 1.0
    assert asyncio.run(graded(*right)) == 0.0


def test_the_rules_can_be_found_in_the_repository() -> None:
    """A reader of docs/ knows all that the hidden tests ask for."""
    answers = play("cat docs/order.md", *(f"cat docs/{name}.md" for name in task().rules))
    assert f"`{task().function}`" in said(answers[0])
    places = [said(answers[0]).index(name) for name in task().rules]
    assert places == sorted(places)
    for rule, answer in zip(task().rules.values(), answers[1:], strict=True):
        in_force = said(answer).partition("## In force")[2]
        assert rule.text in in_force
    for call in task().calls[: len(task().rules)]:
        rule = task().rules[call.module.partition(".")[2]]
        amount, count = call.arguments
        assert eval(rule.expression, {"amount": amount, "count": count}) == call.expected  # noqa: S307


def test_the_policy_sees_exit_code_and_output_within_limits() -> None:
    shown, empty, failed, endless, binary = play(
        "echo out; echo err >&2", "true", "exit 7", "seq 100000", "head -c 100 /dev/urandom", output_chars=100
    )
    assert said(shown) == "exit code 0\nout\nerr"
    assert said(empty) == "exit code 0"
    assert said(failed) == "exit code 7"
    assert len(said(endless)) < 250
    assert "not shown" in said(endless)
    assert said(binary).startswith("exit code 0")


@pytest.mark.parametrize(
    "script", ["echo a\0b", "echo \ud800", "echo " + "\u20ac" * 50_000], ids=["NUL", "surrogate", "long"]
)
def test_what_cannot_be_passed_to_a_shell_is_told_to_the_policy(script: str) -> None:
    """It is the policy's doing, and no failure of the sandbox."""
    wrong, after = play(script, "echo still here")
    assert said(wrong) == "exit code 2: not a shell script"
    assert said(after) == "exit code 0\nstill here"


def test_a_script_that_takes_too_long_is_killed_and_the_episode_goes_on() -> None:
    slow, after = play("echo a; sleep 600", "echo still here", wall_s=1.0)
    assert said(slow) == "killed after 1 s\na"
    assert said(after) == "exit code 0\nstill here"


CHEATS = {
    "prints what a grader might look for": "import sys; print('[1, 2, 3]'); print('OK'); sys.stdout.flush()",
    "writes results into every descriptor": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\n[0]')\n    except OSError: pass"
    ),
    "exits as if all had passed": "import os; os._exit(0)",
    "returns what equals everything": (
        "class E(int):\n    def __eq__(self, other): return True\n"
        "def {function}(amount, count): return E(0)\ntotal = {function}"
    ),
    "makes json lie": "import json; json.dumps = lambda *a: 'true'",
    "never ends": "while True: pass",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_code_that_runs_while_it_is_graded_cannot_make_its_reward(cheat: str) -> None:
    code = CHEATS[cheat].replace("{function}", task().function)
    files = {path: code + "\n" for path in task().solution()}
    assert reward(*writing(files), "git commit -qam cheat", "done", wall_s=3.0) == 0.0


def test_hidden_tests_are_nowhere_to_be_found() -> None:
    expected = {str(call.expected) for call in task().calls if call.expected > 9999}
    assert expected
    spy = (
        "import sys, os, glob\n"
        "seen = open('/proc/self/cmdline').read() + repr(dict(os.environ)) + repr(sys._getframe(0).f_globals)\n"
        "frame = sys._getframe()\n"
        "while frame: seen += repr(frame.f_locals) + repr(frame.f_globals); frame = frame.f_back\n"
        f"os.write(2, seen.encode())\nfrom {task().package} import *\n"
    )
    # What the grader's process knows, printed by the policy's own copy of it, holds arguments but no result.
    right = task().solution()
    module = next(iter(right))
    outcome = play(
        *writing({**right, module: spy + right[module]}), "git commit -qam spy", f"python3 {shlex.quote(module)} 2>&1"
    )
    assert not any(number in said(outcome[-1]) for number in expected)


@pytest.mark.parametrize(
    "sabotage",
    [
        "rm -rf .git",
        "git checkout -q --orphan empty && git rm -rfq . && git commit -q --allow-empty -m empty",
        "mkdir -p deep && chmod 000 deep . 2>/dev/null; true",
        "ln -s /etc/passwd link; ln -s / root; ln -sf /dev/zero zero; git add -A; git commit -qm links",
        "git config core.fsmonitor 'touch /tmp/ran; false'; echo '* export-subst' > .gitattributes",
        "rm -rf ..?* .[!.]* *; rmdir ../workspace; true",
    ],
)
def test_a_ruined_repository_is_worth_nothing_and_leaves_nothing_behind(
    sabotage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[str](), tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: made.append(make(**options)) or made[-1])
    assert reward(sabotage, "done") == 0.0
    assert made and not any(Path(folder).exists() for folder in made)


def test_filling_the_disk_ends_the_episode() -> None:
    results = play("for i in $(seq 40); do head -c 1000000 /dev/zero > f$i; done", tree_bytes=1 << 24)
    assert results[-1] == StepResult((), 0.0, True)


def test_bad_arguments_and_calls_out_of_order() -> None:
    for args in (
        {"modules": 1},
        {"modules": 11},
        {"output_chars": 5},
        {"wall_s": 0},
        {"wall_s": True},
        {"tree_bytes": 1},
    ):
        with pytest.raises(ConfigError, match=next(iter(args))):
            Workspace(**args, allow_unprotected=True)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFailure, match="not_running"):
        play("done", "echo")


def test_a_sandbox_that_breaks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode() -> None:
        environment = Workspace(modules=2, allow_unprotected=True)
        await environment.reset(0, "train")
        monkeypatch.setattr(
            environment._sandbox, "_command", lambda *args: ["/bin/sh", "-c", "echo no namespaces; exit 1"]
        )
        try:
            await environment.step("true")
        finally:
            await environment.close()

    with pytest.raises(EnvironmentFailure, match="no namespaces") as caught:
        asyncio.run(episode())
    assert caught.value.reason == "sandbox_error"
