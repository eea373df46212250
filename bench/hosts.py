"""A whole run over two hosts with a bad line between them, and what pulling weights costs: `python bench/hosts.py`.

Broker and learner in one network namespace, the generator in another, 40 ms each way and 1 % of packets lost, the line
cut four times for 1 to 14 seconds while steps are made, the last time for longer than the broker waits for a peer. The
run must reach its last step with closed books, in order. Beside it the weight bus alone: files of three sizes pulled
over loopback, with and without keys, and over that line. Writes results/hosts.json. Needs root and iproute2; without
them the namespaces are left out and the file says why.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

import tiny_model  # noqa: E402
import torch  # noqa: E402
from common import RESULTS, machine  # noqa: E402
from tests.e2e import long_line  # noqa: E402
from tests.e2e.by_hand import ByHand, closes, pulled  # noqa: E402

from sao.transport import keys  # noqa: E402
from sao.transport.messages import WeightsRef  # noqa: E402
from sao.transport.sockets import Limits  # noqa: E402
from sao.transport.weight_bus import Puller, WeightsServer  # noqa: E402
from sao.transport.weights import publish  # noqa: E402

STEPS, CUTS_S = 50, (1.0, 2.0, 4.0, 14.0)
PEER_TIMEOUT_S = 10.0  # the last cut is longer: the generator is given up, its tasks are free, and it joins again
DELAY_S, LOSS = 0.04, 0.01
SIZES_MB = (1, 30, 300)
PULLS = 5


def whole_run(folder: Path) -> dict[str, Any]:
    """Steps, times, what the generator pulled and what the line did to the packets."""
    model = tiny_model.make_folder(folder / "model")
    begin = time.monotonic()
    with long_line.long_line(DELAY_S, LOSS) as (line, counts):
        before = {"broker": line.on("a"), "learner": line.on("a"), "g0": line.on("b")}
        run = ByHand(folder, model, long_line.ADDRESSES["a"], STEPS, PEER_TIMEOUT_S, before=before)
        try:
            run.broker()
            run.learner()
            run.generator()
            for number, seconds in enumerate(CUTS_S, 1):
                run.until_step(number * STEPS // (len(CUTS_S) + 1))
                line.cut(seconds)
            codes = run.wait()
            assert codes == {"broker": 0, "learner": 0, "g0": 0}, run.everything()
            steps, transfers = run.records("step"), pulled(run.log("g0"))
            log = run.folder / "at-broker" / "r" / "logs" / "broker.log"
            assert [step["step"] for step in steps] == list(range(1, STEPS + 1)), run.everything()
            assert all(closes(step) for step in steps) and not run.leftovers()
        finally:
            run.stop()
    seconds = sorted(took for _, _, took in transfers)
    return {
        "delay_ms_one_way": 1000 * DELAY_S,
        "loss": LOSS,
        "cuts_s": CUTS_S,
        "steps": STEPS,
        "seconds": round(time.monotonic() - begin, 1),
        "exit_codes": codes,
        "generator_joined": len(re.findall(r"generator g0 incarnation \d+ joined", log.read_text())),
        "events": [record["text"] for record in run.records("event")],
        "versions_published": int(steps[-1]["step/version"]),
        "versions_pulled": len(transfers),
        "bytes_a_version": transfers[0][1],
        "pull_s": {"median": seconds[len(seconds) // 2], "longest": seconds[-1]},
        "largest_lag": max(step.get("staleness/lag_max", step.get("lag/max", 0)) for step in steps),
        "books_closed_at_every_step": True,
        "rollouts_dropped": {
            name.rpartition("/")[2]: value
            for name, value in steps[-1].items()
            if name.startswith("broker/rollouts_dropped/")
        },
        "packets": counts,
    }


def pulls(
    endpoint: str, files: list[tuple[int, WeightsRef]], how: str, patience_s: float = 15.0, **more: Any
) -> list[dict[str, Any]]:
    """Rows of the weight bus: seconds and bytes per second of each size, the connection kept."""
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as local:
        puller = Puller(endpoint, Path(local), Limits(peer_timeout_s=patience_s), name="g0", **more)
        for size, ref in files:
            times = []
            for _ in range(PULLS):
                began = time.perf_counter()
                pulled = puller.pull(ref)
                times.append(time.perf_counter() - began)
            times.sort()
            n_bytes = Path(pulled.path).stat().st_size
            median = times[len(times) // 2]
            row = {"how": how, "mb": size, "bytes": n_bytes, "median_s": median, "mb_per_s": n_bytes / median / 1e6}
            rows.append({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
            print(rows[-1], flush=True)
        puller.close()
    return rows


def bus(folder: Path) -> list[dict[str, Any]]:
    """Over loopback, plain and encrypted."""
    keys.write(folder / "keys")
    rows, endpoint = [], "tcp://127.0.0.1:0"
    for how, place in (("loopback", None), ("loopback, keys", folder / "keys")):
        server = WeightsServer(endpoint, Limits(), keys.server_keys(place, endpoint, "learner"))
        files = _publish(folder / how.replace(", ", "-"), server.publish)
        mine = keys.client_keys(place, endpoint, "generator", "g0", "learner")
        rows += pulls(server.endpoint, files, how, keys=mine)
        server.close()
    return rows


def _publish(folder: Path, serve: Callable[[WeightsRef], WeightsRef], sizes: tuple[int, ...] = SIZES_MB) -> Any:
    folder.mkdir()
    files = []
    for version, size in enumerate(sizes, 1):
        ref = publish({f"w{i}": torch.randn(size * 25_000) for i in range(10)}, folder, version)
        files.append((size, replace(serve(ref), path="/nowhere")))
    return files


def bus_on_the_line(folder: Path) -> list[dict[str, Any]]:
    """The same between the two namespaces; this file is started again on each side."""
    (folder / "line").mkdir()
    with long_line.long_line(DELAY_S, LOSS) as (line, _):
        command = [sys.executable, __file__, "--side"]
        server = subprocess.Popen(
            [*line.on("a"), *command, "a", str(folder / "line")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdin is not None and server.stdout is not None
        files = server.stdout.readline()
        done = subprocess.run([*line.on("b"), *command, "b", files], stdout=subprocess.PIPE, text=True, check=True)
        server.stdin.close()
        server.wait(30)
    return list(json.loads(done.stdout.splitlines()[-1]))


def side(name: str, argument: str) -> None:
    """One end of `bus_on_the_line`."""
    if name == "a":
        server = WeightsServer(f"tcp://{long_line.ADDRESSES['a']}:0", Limits())
        files = _publish(Path(argument) / "files", server.publish, (1, 10))
        print(json.dumps([(size, asdict(ref)) for size, ref in files]), flush=True)
        sys.stdin.read()
        server.close()
        return
    files = [(size, WeightsRef(**ref)) for size, ref in json.loads(argument)]
    how = f"{2000 * DELAY_S:g} ms round trip, {100 * LOSS:g} % lost"
    print(json.dumps(pulls(files[0][1].source, files, how, patience_s=60.0)))


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    missing = long_line.missing()
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {"machine": machine(), "bus": bus(Path(folder))}
        if missing:
            result["two_hosts"] = missing
        else:
            result["bus"] += bus_on_the_line(Path(folder))
            (Path(folder) / "run").mkdir()
            result["two_hosts"] = whole_run(Path(folder) / "run")
    (RESULTS / "hosts.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["two_hosts"], indent=1))


if __name__ == "__main__":
    if "--side" in sys.argv:
        side(*sys.argv[-2:])
    else:
        main()
