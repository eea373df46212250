"""A broker that is away, was started again, or has given a peer up: the line goes on and nothing is heard twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transport.peers import Server
from waiting import until

from sao.errors import TransportError
from sao.transport import Callbacks, Client, Limits, private_folder
from sao.transport.messages import Ack, Message, Slots, Stats, Stop, Take, Welcome

TIMES = {"heartbeat_s": 0.1, "peer_timeout_s": 1.0}


@pytest.fixture
def endpoint() -> Any:
    folder = private_folder()
    yield f"ipc://{folder / 'broker'}"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_a_broker_that_was_started_again_gets_what_is_unanswered_and_pushes_are_counted_anew(endpoint: str) -> None:
    pushes: list[Message] = []
    welcomes: list[Welcome] = []
    first = Server(endpoint).start()
    client = Client(
        endpoint,
        role="learner",
        name="learner",
        limits=Limits(**TIMES, outage_s=20.0),
        calls=Callbacks(
            pushed=pushes.append,
            greet=lambda hello: replace(hello, tasks=((len(welcomes), 0),)),
            rejoined=welcomes.append,
            transient=(Stats,),
        ),
    )
    try:
        client.connect(5, step=3)
        for number in range(3):
            first.push(first.joined[0], Stop(f"first {number}"))
        until(lambda: len(pushes) == 3)
        waiting = client.call(Take(4))  # never answered by this one
        first.stop()
        stale = client.call(Stats())
        sent = [client.call(Slots(number)) for number in range(20)]
        second = Server(endpoint, **TIMES)
        second.version = 8
        second.start()
        assert [future.result(30).reason for future in sent] == [str(number) for number in range(20)]
        assert welcomes[0].version == 8 and stale.result(30) == Ack() and not waiting.done()
        (peer,) = second.joined
        assert peer.hello.tasks == ((0, 0),) and peer.hello.step == 3
        second.push(peer, Stop("second 0"))
        until(lambda: len(pushes) == 4)
        assert [message.reason for message in pushes][-1] == "second 0" and client.lost is None
        second.stop()
    finally:
        client.close()


def test_a_peer_that_was_given_up_greets_again_in_the_same_session(endpoint: str) -> None:
    server = Server(endpoint, **TIMES).start()
    client = Client(endpoint, role="generator", name="g0", limits=Limits(**TIMES, outage_s=20.0))
    try:
        client.connect(5)
        server.in_loop(lambda: server.actor.mailbox.drop(server.joined[0], "silent for a test"))
        assert client.call(Slots(1), deadline_s=30).result(30).reason == "1"
        first, second = server.joined
        assert first.hello.session == second.hello.session and first.conversation != second.conversation
    finally:
        client.close()
        server.stop()


def test_without_patience_or_after_it_the_broker_is_lost(endpoint: str) -> None:
    lost: list[Exception] = []
    server = Server(endpoint, **TIMES).start()
    limits, calls = Limits(**TIMES, outage_s=2.0), Callbacks(lost=lost.append)
    client = Client(endpoint, role="generator", name="g0", limits=limits, calls=calls)
    client.connect(5)
    server.stop()
    until(lambda: bool(lost), 60)
    silent_s = re.search(r"broker silent for ([0-9.]+) s", str(lost[0]))
    assert isinstance(lost[0], TransportError) and silent_s is not None and float(silent_s[1]) >= 2.0, lost
    client.close()


BROKER = """
import sys
sys.path.insert(0, sys.argv[2])
from transport.peers import Server
server = Server(sys.argv[1], heartbeat_s=0.1, peer_timeout_s=2.5)
print("up", flush=True)
server.actor.run()
"""


def test_a_broker_that_stands_still_is_waited_for_and_gives_nobody_up(endpoint: str) -> None:
    command = [sys.executable, "-c", BROKER, endpoint, str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as broker:
        assert broker.stdout is not None and broker.stdout.readline() == b"up\n"
        rejoined: list[Any] = []
        limits, calls = Limits(heartbeat_s=0.1, outage_s=60.0), Callbacks(rejoined=rejoined.append)
        client = Client(endpoint, role="generator", name="g0", limits=limits, calls=calls)
        try:
            client.connect(30)
            os.kill(broker.pid, signal.SIGSTOP)
            sent = [client.call(Slots(number)) for number in range(10)]
            time.sleep(5.0)  # twice what a peer may be silent
            assert client.lost is None and client.pending == 10
            os.kill(broker.pid, signal.SIGCONT)
            assert [future.result(30).reason for future in sent] == [str(number) for number in range(10)]
            assert rejoined == []
        finally:
            client.close()
            broker.kill()
