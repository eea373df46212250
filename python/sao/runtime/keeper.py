"""A command with secret files, run for somebody who may be killed: `python -m sao.runtime.keeper COMMAND...`.

The first line of our input holds the files, as a JSON object of texts. They lie in a private folder, whose path
replaces `{folder}` in the command, until the command has ended. Any further line asks it to end; the end of the input,
which comes however our owner dies, ends it within seconds. Our exit code is that of the command.
"""

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Final

from sao.runtime import folders
from sao.runtime.processes import Command, Family, on_signals
from sao.storage.ownership import PREFIX, own
from sao.transport.sockets import private_folder

HURRY_S: Final = 3.0  # between the requests to end of a command whose owner has died, and before it is killed


def main() -> int:
    """Runs the command of our arguments to its end; returns the exit code."""
    base = folders.SHARED_MEMORY if folders.free_bytes(folders.SHARED_MEMORY) else folders.sockets_base()
    folder = Path(private_folder(PREFIX, str(base)))
    try:
        own(folder)
        for name, text in json.loads(sys.stdin.readline()).items():
            path = folder / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o600)
        argv = tuple(argument.replace("{folder}", str(folder)) for argument in sys.argv[1:])
        with Family() as family:
            child = family.start(Command("kept", "kept", argv, {}))

            def follow() -> None:
                for _ in sys.stdin:
                    child.terminate()
                for end in (child.terminate, child.terminate, child.kill):
                    end()
                    finished.wait(HURRY_S)

            finished = threading.Event()
            threading.Thread(target=follow, daemon=True).start()
            with on_signals(lambda number, frame: child.terminate()):
                code = child.wait()
            finished.set()
        return code if code >= 0 else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread may still be reading our input
