"""Output that cannot be written ends no run."""

import subprocess
import sys
from pathlib import Path


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
