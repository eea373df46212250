"""A program as an agent, which behaves as its first argument says. It imports little: thousands are started."""

import json
import os
import signal
import socket
import sys
import time


def http(url: str, key: str, body: object, send: int = 1 << 30) -> int:
    """Posts JSON; the status. `send`: so many bytes of the request at most, then it waits for ever."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    text = json.dumps(body)
    head = f"POST /{path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    request = f"{head}Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
    connection.sendall(request[:send])
    if send < len(request):
        time.sleep(3600)
    answer = b""
    while part := connection.recv(1 << 16):
        answer += part
    connection.close()
    return int(answer.split()[1])


def call() -> None:
    body = {"messages": [{"role": "user", "content": "a b"}]}
    assert http(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], body) == 200


def reward(value: float = 1.0) -> int:
    return http(os.environ["SAO_REWARD_URL"], os.environ["SAO_REWARD_KEY"], {"reward": value})


def child(wait_s: float, *, own_session: bool = False) -> None:
    if os.fork() == 0:
        if own_session:
            os.setsid()
        time.sleep(wait_s)
        os._exit(0)


def main(way: str) -> int:
    if way == "hangs before its turn":
        time.sleep(3600)
    if way == "half a request, then nothing":
        http(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], {}, 40)
    if way == "ignores every signal":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
    if way == "no HTTP":
        address = os.environ["OPENAI_BASE_URL"].split("/")[2]
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(bytes(range(256)) * 64)
    call()
    if way in ("hangs after its turn", "ignores every signal"):
        time.sleep(3600)
    if way == "writes a gigabyte":
        for _ in range(1024):
            os.write(1, b"x" * (1 << 20))
    if way == "child keeps the output":
        child(3600)
    if way == "child in a session of its own":
        child(3, own_session=True)
    if way == "forks 20 times":
        for _ in range(20):
            child(3600)
    if way == "exit code 3":
        return 3
    if way == "kills itself":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "last line is NaN":
        print("NaN")
    elif way == "last line is no number":
        print("all done")
    elif way != "no reward":
        assert reward() == 200
        if way == "two rewards":
            assert reward(0.0) == 409
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
