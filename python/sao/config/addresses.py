"""Addresses as people write them: HOST:PORT, the host a name, an IPv4 address, an IPv6 address in brackets, or `*`."""

import ipaddress
import socket

EVERY_INTERFACE = ("*", "0.0.0.0", "[::]")  # to listen at; none that somebody could connect to


def split(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `tcp://HOST:PORT`. Raises `ValueError` that says what is wrong with it."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not HOST:PORT")
    if int(port) > 65535:
        raise ValueError(f"port {port} is not in 0..65535")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1] if host.endswith("]") else "")
        except ValueError:
            raise ValueError(f"host {host!r} is not an IPv6 address in brackets") from None
    elif ":" in host:
        raise ValueError(f"host {host!r}: an IPv6 address stands in brackets, [{host}]:{port}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is of this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def overlap(one: str, other: str) -> bool:
    """Whether nobody can listen at both: the same port, and the same host or one of them every interface."""
    (host, port), (host_2, port_2) = split(one), split(other)
    every = {host, host_2} & set(EVERY_INTERFACE)
    return port == port_2 != 0 and (bool(every) or host.lower() == host_2.lower() or _same(host, host_2))


def _same(host: str, other: str) -> bool:
    return is_loopback(host) and is_loopback(other) and is_ipv6(host) == is_ipv6(other)


def is_ipv6(host: str) -> bool:
    """Whether a socket for this host has to speak IPv6: an address in brackets, or a name that has no other address."""
    if host.startswith("["):
        return True
    try:
        return all(found[0] == socket.AF_INET6 for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:  # `*`, an interface, or a name that is not known yet
        return False
