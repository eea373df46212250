"""Stand-ins for the three actors: real processes and sockets, no model. `actors.py ROLE-MODULE --run-folder DIR ...`.

What they do is chosen by words in `scenario` in the run folder, so that a test can have any of them fail.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from sao.transport.actor import Actor
from sao.transport.client import Callbacks, Client
from sao.transport.mailbox import Peer, Request
from sao.transport.messages import Done, EvalReport, GetSnapshot, Message, Snapshot, StepReport, Stop, Welcome
from sao.transport.sockets import Limits


def broker(args: argparse.Namespace, scenario: set[str]) -> int:
    """Tells the supervisor of three steps and one evaluation, then that the run is done, and everybody to stop."""
    supervisors: list[Peer] = []

    def joined(peer: Peer) -> Welcome:
        if peer.role == "supervisor":
            supervisors.append(peer)
            actor.after(0.05, lambda: tell(1))
        return Welcome()

    def tell(step: int) -> None:
        if "broker_dies" in scenario and step == 2:
            print("the ledger is full", flush=True)
            os._exit(7)
        if "broker_leaves" in scenario and step == 2:
            actor.stop()
            return
        if "endless" in scenario or step <= 3:
            actor.mailbox.push(supervisors[0], StepReport(step, {"reward/mean": 0.5}))
            actor.after(0.5 if "slow" in scenario else 0.1, lambda: tell(step + 1))
            return
        actor.mailbox.push(supervisors[0], EvalReport(version=3, success=0.5, mean_reward=0.5, n=4, failed=0))
        failed = "environment_fails" in scenario
        reason = "environment lookup failed 32 times in a row: timeout" if failed else "3 steps done"
        actor.mailbox.push(supervisors[0], Done(reason, failed))
        end(reason)

    def end(reason: str) -> None:
        for peer in actor.mailbox.peers.values():
            if peer.role != "supervisor":
                actor.mailbox.push(peer, Stop(reason))
        actor.after(0.3, actor.stop)

    def stop(request: Request[Stop]) -> None:
        if "deaf" not in scenario:
            end(request.message.reason)

    actor = Actor(args.endpoint, on_join=joined, on_leave=lambda peer, reason: None, limits=Limits(heartbeat_s=0.2))
    actor.on(Stop, stop)
    actor.on(GetSnapshot, lambda request: Snapshot({"ready": 5}))
    actor.run()
    actor.close()
    return 0


def peer(args: argparse.Namespace, scenario: set[str], role: str) -> int:
    """Joins and waits for the word to stop."""
    stopped = threading.Event()

    def pushed(message: Message) -> None:
        if isinstance(message, Stop):
            stopped.set()

    if f"{role}_forks" in scenario:  # a helper process that would survive: own session, deaf to SIGTERM
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        helper = subprocess.Popen([sys.executable, "-c", code], start_new_session="own_session" in scenario)
        print(f"helper {helper.pid}", flush=True)
    if "deaf" in scenario:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    calls = Callbacks(pushed=pushed)
    with Client(args.endpoint, role=role, name=args.name, incarnation=args.incarnation, calls=calls) as client:
        client.connect(deadline_s=20)
        if f"{role}_dies" in scenario and args.incarnation < args.deaths:
            print("Traceback: out of memory", flush=True)
            time.sleep(0.1)
            return 3
        if f"{role}_leaves" in scenario:
            return 0
        if "deaf" in scenario:
            time.sleep(600)
        return 0 if stopped.wait(60) else 9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--run-folder", type=Path)
    parser.add_argument("--endpoint")
    parser.add_argument("--name", default="learner")
    parser.add_argument("--incarnation", type=int, default=0)
    args, _ = parser.parse_known_args()
    scenario = set((args.run_folder / "scenario").read_text().split())
    args.deaths = 99 if "always" in scenario else 1
    role = args.module.removeprefix("sao.")
    sys.exit(broker(args, scenario) if role == "broker" else peer(args, scenario, role))


if __name__ == "__main__":
    main()
