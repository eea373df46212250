"""`sao train --on ray` on a cluster of three nodes, which are processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_model
from e2e.by_hand import RUN, closes

from sao.telemetry import sinks

pytest.importorskip("ray", reason="needs the extra `ray`")
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Ray's own head places nothing; beside it are three nodes with room for one process each."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        found.add_node(num_cpus=1)
    yield found
    found.shutdown()


class OnRay:
    """One `sao train --on ray` in a folder, and the processes and private folders that it makes."""

    def __init__(self, folder: Path, cluster: Cluster, steps: int, *flags: str, run: Path | None = None) -> None:
        self.folder, self.log = folder, folder / "driver.log"
        self.before = set(Path("/dev/shm").glob("sao-*")) | set(Path("/tmp").glob("sao-*"))
        if run is None:
            run = folder / "run.toml"
            values = {"host": "127.0.0.1", "port": 1, "weights_port": 2, "max_lag": 2}
            text = RUN.format(steps=steps, peer_timeout_s=5.0, **values)
            run.write_text(
                text.replace("no-such-folder-on-the-brokers-host", str(tiny_model.make_folder(folder / "m")))
            )
        command = [sys.executable, "-m", "sao.cli", "train", str(run), "--on", f"ray:{cluster.address}", *flags]
        with self.log.open("wb") as log:
            self.driver = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.log.read_text()

    def steps(self) -> list[dict[str, Any]]:
        (file,) = list(self.folder.glob("*/*/metrics.jsonl")) or [None]
        return [] if file is None else [one for one in sinks.read(file) if one["kind"] == "step"]

    def until_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while len(self.steps()) < step:
            assert time.monotonic() < deadline and self.driver.poll() is None, self.text()
            time.sleep(0.1)

    def left(self) -> list[object]:
        """Processes and private folders of the run that are still there."""
        folders = set(Path("/dev/shm").glob("sao-*")) | set(Path("/tmp").glob("sao-*"))
        ours = []
        for process in psutil.process_iter(["cmdline", "cwd"]):
            line = " ".join(process.info["cmdline"] or ())
            if "-m sao." in line and process.info["cwd"] == str(self.folder):
                ours.append(line)
        return [*ours, *(folder for folder in folders - self.before if (folder / "keys").exists())]

    def nothing_left(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.2)
        return not self.left()


def node_of(name: str, run: OnRay, nodes: Iterable[Any]) -> Any:
    """The node that a process was placed on last."""
    (*_, at) = re.findall(rf"{name} is placed on \S+ \(node (\w+)\)", run.text())
    return next(node for node in nodes if node.node_id.startswith(at))


def test_a_generators_node_is_killed_twice_and_the_run_ends_well(tmp_path: Path, cluster: Cluster) -> None:
    run = OnRay(tmp_path, cluster, 60, "generator.count=1")
    try:
        for at_step in (4, 12):
            run.until_step(at_step)
            placed = run.text().count("g0 is placed")
            cluster.add_node(num_cpus=1)
            cluster.remove_node(node_of("g0", run, cluster.worker_nodes), allow_graceful=False)
            killed = time.monotonic()
            while run.text().count("g0 is placed") == placed:
                assert time.monotonic() < killed + 30 and run.driver.poll() is None, run.text()
                time.sleep(0.1)
        assert run.driver.wait(200) == 0, run.text()
        steps = run.steps()
        assert [step["step"] for step in steps] == list(range(1, 61)) and all(closes(step) for step in steps)
        assert "g0 | " in run.text() and run.nothing_left(10), run.left()
    finally:
        run.driver.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_of_a_run_whose_driver_is_ended(
    tmp_path: Path, cluster: Cluster, number: int, code: int
) -> None:
    run = OnRay(tmp_path, cluster, 1000, "generator.count=2")
    try:
        run.until_step(2)
        assert run.left()
        os.kill(run.driver.pid, number)
        assert run.driver.wait(60) == code, run.text()
        assert run.nothing_left(10), run.left()
    finally:
        run.driver.kill()


def test_the_quickstart_by_one_command(tmp_path: Path, cluster: Cluster) -> None:
    subprocess.run([sys.executable, QUICKSTART / "make_model.py", "runs/quickstart-model"], cwd=tmp_path, check=True)
    run = OnRay(tmp_path, cluster, 0, "run.steps=40", run=QUICKSTART / "run.toml")
    try:
        assert run.driver.wait(280) == 0, run.text()
        assert len(run.steps()) == 40 and all(closes(step) for step in run.steps())
    finally:
        run.driver.kill()
