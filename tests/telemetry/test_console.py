"""Output that cannot be written ends no run."""

import io
import subprocess
import sys
from pathlib import Path

from sao.errors import printable
from sao.telemetry.live import SteadyConsole


def test_a_full_disk_under_the_output_is_told_once_and_the_program_goes_on(tmp_path):
    done = tmp_path / "done"
    code = (
        "from pathlib import Path; from sao.telemetry.live import SteadyConsole; console = SteadyConsole();"
        f"[console.print('step') for _ in range(3)]; Path({str(done)!r}).touch()"
    )
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0 and done.exists(), ended.stderr
    assert (
        ended.stderr
        == "the output cannot be written any more (No space left on device); the run goes on, see its folder\n"
    )


def test_no_control_character_of_others_reaches_the_terminal():
    """An agent's last words may move the cursor, set the title or claim to be another line."""
    out = io.StringIO()
    console = SteadyConsole(file=out, force_terminal=True, width=300)
    said = "exit code 1: \x1b[2J\x1b]0;title\x07 50%s [red]x[/b] a\rb \udc80\nnext"
    console.print(said, markup=False, highlight=False)
    assert out.getvalue() == "exit code 1: \\x1b[2J\\x1b]0;title\\x07 50%s [red]x[/b] a\\rb \\udc80\nnext\n"


def test_words_of_every_script_stay():
    assert printable("läufe 日本 [x] \t|\n100 % 🙂") == "läufe 日本 [x] \t|\n100 % 🙂"
