"""Addresses: what the configuration accepts can be listened at, and what cannot is named before the start."""

import socket

import pytest
import zmq

from sao.config import addresses, parse
from sao.errors import ConfigError, TransportError
from sao.transport import sockets
from sao.transport.sockets import Limits


def faults(**sections):
    with pytest.raises(ConfigError) as caught:
        parse({"model": {"path": "m"}, "env": {"name": "lookup"}, **sections})
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("a.b:1", "a.b", 1),
        ("tcp://[::1]:65535", "[::1]", 65535),
        ("*:0", "*", 0),
        ("[fe80::1%eth0]:7", "[fe80::1%eth0]", 7),
    ],
)
def test_host_and_port(address, host, port):
    assert addresses.split(address) == (host, port)


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:65536", "a:-1", "a:x", "::1:5", "[::1:5", "[x]:5", "a:\u0661"])
def test_what_is_no_address_is_said(address):
    with pytest.raises(ValueError, match=r"HOST:PORT|0\.\.65535|brackets|IPv6"):
        addresses.split(address)
    with pytest.raises(TransportError, match="expected tcp://HOST:PORT"):
        sockets.check_endpoint(f"tcp://{address}")


@pytest.mark.parametrize(
    ("bind", "count", "expected"),
    [
        ("127.0.0.1:8123", 2, "port 8123 is for one generator, but generator.count = 2"),
        ("127.0.0.1:70000", 1, "port 70000 is not in 0..65535"),
        ("::1:80", 1, "an IPv6 address stands in brackets"),
        ("0.0.0.0:0", 1, "0.0.0.0 is not a loopback address"),
    ],
)
def test_the_agents_endpoint(bind, count, expected):
    (fault,) = faults(generator={"agents_bind": bind, "count": count})
    assert fault.startswith("config: generator.agents_bind: ") and expected in fault


@pytest.mark.parametrize("key", ["bind", "weights_bind"])
def test_a_port_that_is_none(key):
    found = faults(transport={"bind": "tcp://127.0.0.1:5000", key: "tcp://127.0.0.1:70000"})
    assert found == [f"config: transport.{key}: port 70000 is not in 0..65535"]


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1", "localhost"])
def test_what_is_loopback_can_be_listened_at_and_reached(host):
    assert addresses.is_loopback(host)
    try:
        socket.create_server(
            (host.strip("[]"), 0), family=socket.AF_INET6 if host == "[::1]" else socket.AF_INET
        ).close()
    except OSError:
        pytest.skip(f"no {host} on this machine")
    with zmq.Context() as context:
        router, _ = sockets.bind_router(context, f"tcp://{host}:0", Limits())
        port = router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        dealer = sockets.make_dealer(context, f"tcp://{host}:{port}", b"d", Limits())
        try:
            sockets.connect(dealer, f"tcp://{host}:{port}")
            assert dealer.poll(5000, zmq.POLLOUT)
            dealer.send(b"x")
            assert router.poll(5000) and router.recv_multipart() == [b"d", b"x"]
        finally:
            dealer.close(linger=0)
            router.close(linger=0)


def test_a_name_without_an_ipv4_address_is_spoken_to_over_ipv6(monkeypatch):
    def found(families):
        return lambda host, *_, **__: [(family, socket.SOCK_STREAM, 6, "", ("x", 0)) for family in families]

    monkeypatch.setattr(socket, "getaddrinfo", found([socket.AF_INET6]))
    assert addresses.is_ipv6("six")
    monkeypatch.setattr(socket, "getaddrinfo", found([socket.AF_INET6, socket.AF_INET]))
    assert not addresses.is_ipv6("both")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("127.0.0.1:5", "127.0.0.1:5", True),
        ("*:5", "127.0.0.1:5", True),
        ("[::]:5", "tcp://[::1]:5", True),
        ("LOCALHOST:5", "localhost:5", True),
        ("127.0.0.1:5", "127.0.0.1:6", False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("10.0.0.1:5", "10.0.0.2:5", False),
    ],
)
def test_overlap(one, other, expected):
    assert addresses.overlap(one, other) is expected is addresses.overlap(other, one)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"transport.weights_bind": "tcp://127.0.0.1:5903"}, "transport.weights_bind"),
        ({"transport.weights_bind": "tcp://*:5903", "transport.allow_remote": "true"}, "transport.weights_bind"),
        ({"generator.agents_bind": "127.0.0.1:5903", "generator.count": "1"}, "generator.agents_bind"),
        ({"telemetry.prometheus_port": "5903"}, "telemetry.prometheus_port"),
    ],
)
def test_one_port_for_two_is_refused_by_name(settings, field):
    overrides = ["transport.bind=tcp://127.0.0.1:5903", *(f"{key}={value}" for key, value in settings.items())]
    with pytest.raises(ConfigError) as caught:
        parse({"env": {"name": "lookup"}, "model": {"path": "m"}}, overrides)
    (line,) = str(caught.value).splitlines()
    assert f"{field}: " in line and "transport.bind" in line
