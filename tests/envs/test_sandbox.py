"""What a hostile script can do: nothing to files, network, other processes, and not for long."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sao.envs import sandbox
from sao.envs.sandbox import Limits, Outcome, Sandbox
from sao.errors import ConfigError, EnvironmentFailure

with_bubblewrap = pytest.mark.skipif(sandbox.bubblewrap()[0] is None, reason=sandbox.bubblewrap()[1])
with_namespaces = pytest.mark.skipif(sandbox.namespaces()[0] is None, reason=sandbox.namespaces()[1])
LIMITS = Limits(wall_s=8.0, cpu_s=4, memory_bytes=1 << 29, file_bytes=1 << 20, processes=24, output_bytes=4096)

MARKER = f"86399.{os.getpid()}"  # of this process's sleepers: seconds, and found in their command lines

Run = Callable[..., Outcome]


@pytest.fixture(params=[pytest.param("bwrap", marks=with_bubblewrap), pytest.param("unshare", marks=with_namespaces)])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to run a script; the second is what is left where bubblewrap is missing."""
    if request.param == "unshare":
        monkeypatch.setattr(sandbox, "bubblewrap", lambda: (None, "bwrap is not installed"))
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that scripts may write to; its parents let everybody through, as those of a temporary folder do."""
    inner = tmp_path / "work"
    inner.mkdir()
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return inner


@pytest.fixture
def run(kind: str, folder: Path) -> Run:
    """Runs a script under `LIMITS`, or others."""

    def call(script: str, limits: Limits = LIMITS, stdin: bytes = b"", **environment: str) -> Outcome:
        box = Sandbox(limits, allow_unprotected=kind == "unshare")
        box.own(folder)
        return asyncio.run(box.run(script, folder, writable=True, environment=environment, stdin=stdin))

    return call


def test_output_exit_code_input_and_environment(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the host")
    outcome = run('cat; echo "$NAME-$SECRET" >&2; echo kept > file; exit 3', stdin=b"in\n", NAME="n")
    assert (outcome.exit_code, outcome.output, outcome.timed_out, outcome.cut) == (3, b"in\nn-\n", False, False)
    assert (folder / "file").read_text() == "kept\n"


@with_bubblewrap
def test_the_folder_has_the_name_that_it_is_given(folder: Path) -> None:
    box = Sandbox(LIMITS)
    box.own(folder)
    names = ("/workspace", "/data/in here", str(folder))
    found = [asyncio.run(box.run("pwd; touch x; ls", folder, writable=True, inside=name)).output for name in names]
    assert found == [f"{name}\nx\n".encode() for name in names]


def test_no_network(run: Run) -> None:
    port = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1])"
    assert run(f'python3 -c "{port}"').exit_code == 0  # python works, so what follows fails for want of a network
    reach = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=3)"
    outcome = run(f'python3 -c "{reach}"')
    assert outcome.exit_code != 0
    assert b"unreachable" in outcome.output
    assert run("tail -n +3 /proc/net/dev | grep -v lo:").output == b""


def test_a_service_of_the_host_is_out_of_reach(run: Run) -> None:
    async def serve() -> Outcome:
        hits: list[int] = []
        server = await asyncio.start_server(lambda reader, writer: hits.append(1), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        reach = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=3)"
        outcome = await asyncio.to_thread(run, f'python3 -c "{reach}"')
        server.close()
        assert hits == []
        return outcome

    output = asyncio.run(serve()).output
    assert b"unreachable" in output or b"refused" in output


def test_processes_of_the_host_are_out_of_sight(run: Run) -> None:
    outcome = run(f"ls /proc | grep -c '^[0-9]'; kill -9 {os.getpid()} || echo none; kill -9 -1; echo not reached")
    lines = outcome.output.decode().splitlines()
    assert int(lines[0]) < 12
    assert "none" in outcome.output.decode()


@with_bubblewrap
def test_nothing_outside_can_be_read_or_written(folder: Path) -> None:
    outside = folder.parent / "hidden"
    outside.write_text("expected results")
    outside.chmod(0o666)
    box = Sandbox(LIMITS)
    box.own(folder)
    places = ["/usr/x", "/etc/x", "/bin/x", "/x", str(outside), "/var/x", "/home/x"]
    tries = "; ".join(f"echo stolen > {place}" for place in places)
    look = f"cat {outside} /etc/shadow {Path.home()}/.ssh/id_rsa; ls /home /var /work; ln -s {outside} link; cat link"
    outcome = asyncio.run(box.run(f"{tries}; {look}", folder, writable=True))
    assert b"expected results" not in outcome.output
    assert outside.read_text() == "expected results"
    assert not any(Path(place).exists() for place in places if place != str(outside))
    assert b"root:" not in outcome.output


@with_bubblewrap
def test_a_folder_is_read_only_unless_it_is_writable_and_tmp_is_private_and_bounded(folder: Path) -> None:
    (folder / "file").write_text("as it was")
    box = Sandbox(Limits(wall_s=8.0, tmp_bytes=1 << 20, file_bytes=1 << 24))
    box.own(folder)
    script = "echo new > file; echo new > /tmp/x; cat /tmp/x; head -c 3000000 /dev/zero > /tmp/big || echo full"
    outcome = asyncio.run(box.run(script, folder))
    assert (folder / "file").read_text() == "as it was"
    assert b"new" in outcome.output
    assert b"full" in outcome.output
    assert b"new" not in asyncio.run(box.run("cat /tmp/x", folder)).output


@with_bubblewrap
def test_no_privileges(folder: Path) -> None:
    box = Sandbox(LIMITS)
    box.own(folder)
    script = (
        "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status; id -u; mount -t tmpfs x /workspace || echo refused"
    )
    outcome = asyncio.run(box.run(script, folder, writable=True)).output.decode()
    found = dict(line.split(":\t") for line in outcome.splitlines() if ":\t" in line)
    assert int(found["CapEff"], 16) == 0
    assert found["NoNewPrivs"] == "1"
    assert "refused" in outcome
    assert "\n0\n" not in outcome


def test_sleeping_forever_ends_at_the_wall_clock_limit_with_all_children(run: Run) -> None:
    limits = Limits(wall_s=1.0)
    began, marker = time.monotonic(), MARKER
    outcome = run(f"setsid sh -c 'sleep {marker}' & nohup sleep {marker} & echo begun; sleep {marker}", limits)
    assert time.monotonic() - began < 5
    assert outcome.timed_out
    assert outcome.output == b"begun\n"
    deadline = time.monotonic() + 5
    while any(marker in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "a child outlives its sandbox"
        time.sleep(0.05)


def test_what_is_left_in_the_background_is_gone_when_the_outcome_is_there(run: Run) -> None:
    """Not just soon after: a grader reads the folder next. The newest processes are looked at first, and often."""
    began, marker = time.monotonic(), MARKER
    for _ in range(10):
        outcome = run(f"for i in 1 2 3 4 5 6 7 8; do (sleep {marker} > /dev/null 2>&1 &); done; echo over")
        for pid in reversed(psutil.pids()):
            with suppress(OSError):
                assert marker.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert (outcome.exit_code, outcome.output) == (0, b"over\n")
    assert time.monotonic() - began < 50


def test_a_fork_bomb_meets_the_limit_of_processes(run: Run) -> None:
    count = "import os, time\nn = 0\ntry:\n  while os.fork(): n += 1\n  time.sleep(5)\nexcept OSError: print('at', n)"
    outcome = run(f'python3 -c "{count}"')
    found = outcome.output.decode()
    assert found.startswith("at ")
    assert int(found.split()[-1]) <= LIMITS.processes
    bomb = run("bomb() { bomb | bomb & }; bomb; sleep 60", Limits(wall_s=1.5, processes=24))
    assert bomb.timed_out or bomb.exit_code != 0


def test_huge_files_memory_and_cpu_time_are_refused(run: Run, folder: Path) -> None:
    assert run("head -c 3000000 /dev/zero > big").exit_code != 0
    assert (folder / "big").stat().st_size <= LIMITS.file_bytes
    assert b"MemoryError" in run('python3 -c "bytearray(1 << 30)"').output
    began = time.process_time(), time.monotonic()
    outcome = run("while :; do :; done", Limits(wall_s=30.0, cpu_s=1))
    assert outcome.exit_code != 0
    assert not outcome.timed_out
    assert time.monotonic() - began[1] < 20


def test_output_without_end_is_read_but_not_kept(run: Run) -> None:
    outcome = run("head -c 2000000 /dev/zero | tr '\\0' x; echo; echo end")
    assert outcome.exit_code == 0
    assert outcome.cut
    assert outcome.output == b"x" * LIMITS.output_bytes


def test_a_sandbox_that_does_not_come_up_is_a_failure_not_an_outcome(kind: str, tmp_path: Path) -> None:
    box = Sandbox(LIMITS, allow_unprotected=kind == "unshare")
    with pytest.raises(EnvironmentFailure) as caught:
        asyncio.run(box.run("true", tmp_path / "missing"))
    assert caught.value.reason == "sandbox_error"


def test_without_bubblewrap_nothing_runs_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "bubblewrap", lambda: (None, "bwrap is not installed"))
    with pytest.raises(ConfigError, match=r"bwrap is not installed.*allow_unprotected"):
        Sandbox()
    monkeypatch.setattr(sandbox, "namespaces", lambda: (None, "unshare is not installed"))
    with pytest.raises(ConfigError, match="unshare is not installed"):
        Sandbox(allow_unprotected=True)


REFUSING = """#!{python} -S
import os, sys
given = sys.argv[1:]
if "--version" in given:
    print("bubblewrap 0.6.1")
elif {refused!r} in given:
    sys.exit("bwrap: Unknown option " + {refused!r})
else:
    os.execv({real!r}, [{real!r}, *given])
"""


@with_bubblewrap
@pytest.mark.parametrize(
    "refused", ["--size", "--perms", "--proc", "--info-fd", "--die-with-parent", "--cap-drop", None]
)
def test_a_bubblewrap_that_refuses_any_option_of_a_real_start_is_found_out_before(
    refused: str | None, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = str(sandbox.bubblewrap()[0])
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text(REFUSING.format(python=sys.executable, refused=refused, real=real))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    sandbox.bubblewrap.cache_clear()
    try:
        if refused is None:
            box = Sandbox(LIMITS)
            box.own(folder)
            assert asyncio.run(box.run("echo hi", folder)).output == b"hi\n"
        else:
            with pytest.raises(ConfigError, match=f"does not work here: bwrap: Unknown option {refused}"):
                Sandbox(LIMITS)
    finally:
        sandbox.bubblewrap.cache_clear()


def test_a_cancelled_script_is_ended(kind: str, folder: Path) -> None:
    async def cancel() -> None:
        box = Sandbox(Limits(wall_s=60.0), allow_unprotected=kind == "unshare")
        box.own(folder)
        running = asyncio.create_task(box.run(f"sleep {MARKER}", folder))
        await asyncio.sleep(1.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    assert not any(MARKER in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_script_can_be_cancelled_at_any_moment_of_its_beginning(kind: str, folder: Path) -> None:
    """Nothing is left then, no process and no descriptor, and the cancellation ends."""
    box = Sandbox(Limits(wall_s=60.0), allow_unprotected=kind == "unshare")
    box.own(folder)

    async def cancel(wait: Callable[[], Awaitable[None]]) -> None:
        running = asyncio.create_task(box.run(f"sleep {MARKER}", folder))
        await wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    async def ticks(n: int) -> None:
        for _ in range(n):
            await asyncio.sleep(0)

    async def all_moments() -> None:
        await cancel(lambda: ticks(2))
        await ticks(20)
        before = open_files()
        async with asyncio.timeout(60):
            for n in range(12):
                await cancel(lambda n=n: ticks(n))  # type: ignore[misc]
            for n in range(40):
                await cancel(lambda n=n: asyncio.sleep(n * 0.0003))  # type: ignore[misc]
        await ticks(20)
        assert open_files() == before

    asyncio.run(all_moments())
    assert not any(MARKER in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


def test_the_first_process_of_a_namespace_is_killed_even_when_it_has_left_the_group(folder: Path) -> None:
    """As bubblewrap's is between its new session and its wish to die with its parent."""
    imitation = folder.parent / "bwrap"
    imitation.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --info-fd ]; do shift; done\nsetsid sleep {MARKER} &\n'
        'format=\'{"child-pid": %s, "pid-namespace": %s}\'\n'
        'printf "$format" $! $(/usr/bin/stat -L -c %i /proc/self/ns/pid) > /proc/self/fd/$2\nwait\n'
    )
    imitation.chmod(0o755)
    box = Sandbox(Limits(wall_s=1.0), allow_unprotected=True)
    box._bwrap = str(imitation)
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure, match="did not start"):
        asyncio.run(box.run("true", folder))
    assert time.monotonic() - began < 8
    assert not any(MARKER in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize("script", ["echo a\0b", "echo \ud800", "x" * 200_000])
def test_a_script_that_cannot_be_passed_is_a_failure_and_leaves_no_descriptor(
    kind: str, folder: Path, script: str
) -> None:
    box = Sandbox(LIMITS, allow_unprotected=kind == "unshare")

    async def try_it() -> int:
        with pytest.raises(EnvironmentFailure) as caught:
            await box.run(script, folder)
        assert caught.value.reason == "sandbox_error"
        return open_files()

    async def twice() -> tuple[int, int]:
        return await try_it(), await try_it()

    before, after = asyncio.run(twice())
    assert before == after
