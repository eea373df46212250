"""Client and actor over real sockets: delivery, deadlines, silence, fencing, forks and rubbish."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq
from transport.peers import Server, client_of, serving
from waiting import until

from sao.errors import ClosedError, DeadlineError, TransportError, WireError
from sao.transport import Callbacks
from sao.transport.encoding import encode
from sao.transport.messages import Event, FinishedRollout, Hello, Message, Slots, Take, TaskEntry, Tasks, Welcome


def test_eight_threads_send_ten_thousand_messages_through_one_client() -> None:
    with serving(peer_timeout_s=30.0) as server, client_of(server, peer_timeout_s=30.0) as client:
        client.connect(5)
        wrong: list[Any] = []

        def work(first: int) -> None:
            futures = [(n, client.call(Slots(n), deadline_s=50)) for n in range(first, first + 1250)]
            wrong.extend(n for n, future in futures if future.result(50).reason != str(n))

        threads = [threading.Thread(target=work, args=(i * 1250,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert sorted(message.free for message in server.got) == list(range(10_000))
        assert client.pending == 0


def test_a_timeout_leaves_the_client_usable() -> None:
    with serving() as server, client_of(server) as client:
        client.connect(5)
        server.delay_s = 0.6
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"slots: no answer from ipc://.* within 0\.3 s"):
            client.call(Slots(1), deadline_s=0.3).result()
        assert 0.3 <= time.monotonic() - start < 5
        server.delay_s = 0.0
        assert client.call(Slots(2), deadline_s=5).result().reason == "2"


def test_a_call_that_was_given_up_is_cancelled_at_the_other_end() -> None:
    with serving() as server, client_of(server, role="learner") as client:
        client.connect(5)
        with pytest.raises(DeadlineError):
            client.call(Take(1), deadline_s=0.1).result()
        until(lambda: server.cancelled == [1])
        assert client.call(Take(1)).cancel()
        until(lambda: server.cancelled == [1, 2])
        assert client.pending == 0


def test_a_wrong_address_is_named_in_time() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    with client_of(endpoint) as client:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=f"hello: no answer from {endpoint} within 0.5 s"):
            client.connect(0.5)
        assert time.monotonic() - start < 10


def test_close_fails_all_waiters_and_later_calls() -> None:
    with serving() as server:
        client = client_of(server, role="learner")
        client.connect(5)
        waiting = [client.call(Take(1)) for _ in range(3)]
        start = time.monotonic()
        client.close()
        for future in waiting:
            with pytest.raises(ClosedError):
                future.result(10)
        assert time.monotonic() - start < 10
        with pytest.raises(ClosedError):
            client.call(Slots(1))
        client.close()
        until(lambda: server.left == [("c:0", "left in order")])


@pytest.mark.parametrize("high_water", [2])
def test_a_sender_that_leaves_at_once_has_delivered_all(high_water: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 messages of 28 KB to a slow reader over short queues: acknowledged before the sender ends."""
    monkeypatch.setattr("sao.transport.sockets.HIGH_WATER", high_water)
    with serving(peer_timeout_s=30.0) as server:
        server.delay_s = 0.01
        with client_of(server, peer_timeout_s=30.0) as client:
            client.connect(5)
            for n in range(128):
                client.call(FinishedRollout(frames=(b"%d" % n, bytes([n]) * 28_000)))
            client.flush(30)
        assert sorted(int(number) for number, _ in server.got) == list(range(128))
        assert all(payload == bytes([int(number)]) * 28_000 for number, payload in server.got)


def test_flush_says_what_was_not_delivered() -> None:
    with serving() as server, client_of(server) as client:
        client.connect(5)
        server.delay_s = 0.4
        futures = [client.call(Slots(n)) for n in range(5)]
        with pytest.raises(DeadlineError, match=r"5 messages \(slots\) not acknowledged by ipc://.* within 0\.1 s"):
            client.flush(0.1)
        client.flush(10)
        assert all(future.done() for future in futures)


def test_silence_of_the_broker_fails_waiters_and_calls_back_once() -> None:
    lost: list[Exception] = []
    with (
        serving() as server,
        client_of(server, role="learner", calls=Callbacks(lost=lost.append), peer_timeout_s=1.0) as client,
    ):
        client.connect(5)
        future = client.call(Take(1))
        server.delay_s = 3.0
        client.call(Slots(1))
        with pytest.raises(TransportError, match=r"broker silent for 1\.\d s"):
            future.result(3)
        with pytest.raises(TransportError, match="silent"):
            client.call(Slots(2))
        assert len(lost) == 1
        assert client.lost is lost[0]


def test_silence_of_a_peer_is_noticed() -> None:
    with serving(peer_timeout_s=1.0) as server:
        context: zmq.Context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"generator:mute:0")
        dealer.connect(server.actor.endpoint)
        dealer.send_multipart(encode(Hello("generator", "mute", 0, session="s"), 1 << 20, seq=1))
        until(lambda: server.joined)
        until(lambda: server.left)
        assert server.left[0][0] == "mute:0"
        assert server.left[0][1].startswith("silent for 1.")
        assert not server.actor.mailbox.peers
        context.destroy(linger=0)


def test_a_closed_connection_is_noticed_before_the_timeout() -> None:
    with serving(peer_timeout_s=60.0) as server:
        process = multiprocessing.get_context("spawn").Process(target=_join_and_die, args=(server.actor.endpoint,))
        process.start()
        process.join(60)
        until(lambda: server.left, 30)  # half of the timeout
        assert "unreachable" in server.left[0][1]


def _join_and_die(endpoint: str) -> None:
    client_of(endpoint).connect(10)
    os._exit(9)


def test_pushes_arrive_once_and_are_acknowledged() -> None:
    pushed: list[Message] = []
    with serving() as server, client_of(server, calls=Callbacks(pushed=pushed.append)) as client:
        client.connect(5)
        peer = server.joined[0]
        for n in range(500):
            server.push(peer, Event("info", str(n)))
        until(lambda: len(pushed) >= 500)
        until(lambda: server.in_loop(lambda: len(peer.link.sent)) == 0)
        assert [m.text for m in pushed] == [str(n) for n in range(500)]


def test_what_the_socket_has_no_room_for_waits_and_comes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 pushes of 1 MB to a client that reads nothing for a while, over short queues."""
    monkeypatch.setattr("sao.transport.sockets.HIGH_WATER", 2)
    pushed: list[int] = []

    def slow(message: Message) -> None:
        time.sleep(0.0 if pushed else 0.5)
        assert isinstance(message, Tasks) and len(message.frames[0]) == 1 << 20
        pushed.append(message.tasks[0].ordinal)

    with (
        serving(peer_timeout_s=30.0) as server,
        client_of(server, calls=Callbacks(pushed=slow), peer_timeout_s=30.0) as client,
    ):
        client.connect(5)
        peer, payload = server.joined[0], bytes(1 << 20)
        for n in range(60):
            server.push(peer, Tasks((TaskEntry(n, 1, 0, "train"),), frames=(payload,)))
        assert server.in_loop(lambda: len(peer.outbox)) > 0
        until(lambda: len(pushed) == 60)
        assert pushed == list(range(60))
        until(lambda: server.in_loop(lambda: len(peer.link.sent)) == 0)
        assert not peer.outbox


def test_one_that_acknowledges_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sao.transport.link.WINDOW", 16)
    with serving() as server, client_of(server) as client:
        client.connect(5)
        peer = server.joined[0]
        monkeypatch.setattr(client, "_post", lambda *a, **k: None)  # no acknowledgements, no heartbeats
        server.in_loop(lambda: [server.actor.mailbox.push(peer, Event("info", "x")) for _ in range(20)])
        assert not server.left  # not in the middle of a decision
        until(lambda: server.left)
        assert "does not acknowledge" in server.left[0][1]


def test_a_push_callback_that_fails_does_not_end_the_client(caplog: pytest.LogCaptureFixture) -> None:
    def broken(message: Message) -> None:
        raise ValueError("bug")

    with serving() as server, client_of(server, calls=Callbacks(pushed=broken)) as client:
        client.connect(5)
        server.push(server.joined[0], Event("info", "x"))
        until(lambda: "a callback failed" in caplog.text)
        client.call(Slots(1), deadline_s=5).result()


def test_a_new_incarnation_fences_the_old_one() -> None:
    lost: list[Exception] = []
    with serving() as server, client_of(server, "g0", calls=Callbacks(lost=lost.append)) as old:
        old.connect(5)
        with client_of(server, "g0", incarnation=1) as new:
            new.connect(5)
            until(lambda: lost)
            assert "fenced by incarnation 1" in str(lost[0])
            assert server.left == [("g0:0", "fenced by incarnation 1")]
            with client_of(server, "g0", incarnation=0) as late, pytest.raises(TransportError, match="is fenced"):
                late.connect(5)
            new.call(Slots(1), deadline_s=5).result()


def test_a_new_process_of_the_same_incarnation_replaces_the_old_one() -> None:
    with serving() as server:
        old = client_of(server, "g0")
        old.connect(5)
        old.call(Slots(1), deadline_s=5).result()
        with client_of(server, "g0") as new:
            new.connect(5)
            assert new.call(Slots(2), deadline_s=5).result().reason == "2"
        old.close()


def test_one_that_was_given_up_is_told_to_leave() -> None:
    lost: list[Exception] = []
    with serving() as server, client_of(server, calls=Callbacks(lost=lost.append)) as client:
        client.connect(5)
        server.in_loop(lambda: server.actor.mailbox.drop(server.joined[0], "test"))
        with pytest.raises(TransportError, match="join again"):
            client.call(Slots(1), deadline_s=5).result()
        until(lambda: lost)


def test_a_greeting_in_anothers_name_is_refused() -> None:
    with serving() as server, client_of(server, "g0") as client, client_of(server, "g1") as liar:
        client.connect(5)
        with pytest.raises(TransportError, match="from another peer"):
            liar.connect(5, name="g0")
        client.call(Slots(1), deadline_s=5).result()


def test_refused_greetings_name_the_reason() -> None:
    with serving() as server:

        def refuse(peer: Any) -> Welcome:
            raise TransportError("role 'x' is unknown")

        server.actor.mailbox._on_join = refuse
        with client_of(server) as client, pytest.raises(TransportError, match="role 'x' is unknown"):
            client.connect(5)
        assert not server.actor.mailbox.peers


def test_a_refusal_that_repeats_a_long_greeting_is_cut_and_the_others_go_on() -> None:
    with serving() as server:

        def refuse(peer: Any) -> Welcome:
            raise WireError(f"hello.tasks: expected a list, got {peer.hello.tasks!r}")

        server.actor.mailbox._on_join = refuse
        with client_of(server) as client, pytest.raises(WireError, match=r"got \(\(0, 0\), ") as raised:
            client.connect(5, tasks=((0, 0),) * 300_000)  # three bytes each as sent, eight as text
        assert len(str(raised.value)) == 4096
        server.actor.mailbox._on_join = server._join
        with client_of(server) as client:
            client.connect(5)


def test_wrong_messages_are_answered_and_the_connection_lives() -> None:
    with serving(max_message_bytes=1 << 16) as server, client_of(server, max_message_bytes=1 << 16) as client:
        client.connect(5)
        for message, text in [
            (Slots("x"), r"slots\.free: expected int, got str"),  # type: ignore[arg-type]
            (Slots(-1), r"slots\.free: expected int >= 0, got -1"),
            (Take(1), "'take' is not accepted from a generator"),
        ]:
            with pytest.raises(WireError, match=text):
                client.call(message, deadline_s=5).result()
        with pytest.raises(WireError, match="frame 1 of 65537 bytes exceeds"):
            client.call(FinishedRollout(frames=(b"", bytes((1 << 16) + 1))))
        assert client.pending == 0
        client.call(FinishedRollout(frames=(b"", bytes(1 << 16))), deadline_s=5).result()


def test_rubbish_is_counted_and_ignored(tmp_path: Path) -> None:
    """Pickles, http and random bytes at the port: nothing runs, nothing ends."""
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    server = Server("tcp://127.0.0.1:0", max_message_bytes=1 << 16).start()
    context: zmq.Context = zmq.Context()
    try:
        with client_of(server) as client:
            client.connect(5)
            dealer = context.socket(zmq.DEALER)
            dealer.connect(server.actor.endpoint)
            bomb = pickle.dumps(Bomb())
            for frames in ([bomb], [b"", bomb], [b"GET / HTTP/1.1"], [b"x"] * 20, [b""]):
                dealer.send_multipart(frames)
            until(lambda: server.actor.mailbox.bad_messages == 5)
            port = int(server.actor.endpoint.rpartition(":")[2])
            for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), b"\xff" + bytes(8) + b"\x7f" + bytes(200)):
                with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
                    raw.sendall(data)
            dealer.send(bytes((1 << 16) + 1))  # over MAXMSGSIZE: that connection is closed by the library
            assert client.call(Slots(1), deadline_s=5).result().reason == "1"
            assert not marker.exists()
            assert len(server.actor.mailbox.peers) == 1
    finally:
        context.destroy(linger=0)
        server.stop()


def test_a_forked_child_gets_an_error_and_can_make_its_own() -> None:
    with serving() as server, client_of(server, "parent") as client:
        client.connect(5)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                client.call(Slots(1))
            except TransportError as error:
                os.write(write, str(error).encode())
            finally:
                client.close()
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        assert "make a new one after fork" in text
        assert client.call(Slots(2), deadline_s=5).result().reason == "2"


def test_the_last_answer_survives_a_lost_connection() -> None:
    """A proxy that cuts connections: answers are repeated from memory, nothing is worked on twice, pushes come once."""
    server = Server("tcp://127.0.0.1:0", peer_timeout_s=20.0, heartbeat_s=0.2).start()
    port = int(server.actor.endpoint.rpartition(":")[2])
    cut = threading.Event()
    lines: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(4096):
                b.sendall(data)
        except OSError:
            pass
        for line in (a, b):
            line.close()

    def accept() -> None:
        while not cut.is_set():
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                return
            lines.extend((near, far))
            threading.Thread(target=pump, args=(near, far), daemon=True).start()
            threading.Thread(target=pump, args=(far, near), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    proxied = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    try:
        pushed: list[Message] = []
        with client_of(proxied, peer_timeout_s=20.0, heartbeat_s=0.2, calls=Callbacks(pushed=pushed.append)) as client:
            client.connect(5)
            futures: list[Future[Message]] = []
            for n in range(60):
                futures.append(client.call(Slots(n)))
                server.push(server.joined[0], Event("info", str(n)))
                if n % 10 == 5:
                    for line in lines:
                        with_shutdown(line)
                    lines.clear()
                time.sleep(0.01)
            assert [f.result(15).reason for f in futures] == [str(n) for n in range(60)]
            assert sorted(message.free for message in server.got) == list(range(60))
            until(lambda: len(pushed) == 60)
            assert sorted(int(event.text) for event in pushed if isinstance(event, Event)) == list(range(60))
            assert len(server.joined) == 1
    finally:
        cut.set()
        listener.close()
        server.stop()


def with_shutdown(line: socket.socket) -> None:
    """Cuts a connection, if it is still there."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
