"""A supervisor with stand-in actors as a process of its own: `run_supervisor.py RUN_FOLDER SCENARIO...`.

Prints one JSON line for each record and, last, the outcome; the exit code is the outcome's.
"""

import json
import sys
from pathlib import Path

from sao.config import parse
from sao.runtime import folders, launch, supervisor
from sao.runtime.supervisor import Supervisor

ACTORS = Path(__file__).with_name("actors.py")


def main() -> None:
    folder = Path(sys.argv[1])
    scenario = sys.argv[2:]
    supervisor.GOODBYE_S = 1.0
    supervisor.WORD_S = 60.0 if "word_comes_late" in scenario else 1.0
    launch._module = lambda module, places: (sys.executable, str(ACTORS), module, *places.arguments())
    config = parse(
        {
            "run": {"dir": str(folder.parent), "name": folder.name, "restart_killed": "ends" not in scenario},
            "model": {"path": "m"},
            "env": {"name": "lookup"},
            "transport": {
                "shutdown_s": 60.0 if "patient" in scenario else 1.5,
                "heartbeat_s": 0.2,
                "peer_timeout_s": 2.0,
            },
            "generator": {"count": 2},
        }
    )
    folders.make_run_folder(folder, overwrite=False)
    (folder / "scenario").write_text(" ".join(scenario))

    def report(kind: str, fields: dict[str, object]) -> None:
        print(json.dumps({"kind": kind, **fields}), flush=True)

    with folders.private(folder) as private:
        places = launch.Places.of(config, private.sockets, private.weights)
        report("private", {"sockets": str(private.sockets), "weights": str(private.weights)})
        outcome = Supervisor(config, places, folder / "logs", report).run()
    report("outcome", {"exit_code": outcome.exit_code, "reason": outcome.reason})
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main()
