"""Addresses to listen on: never a wildcard, and beyond this machine only where other machines have to connect."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from halotile.errors import ConfigError

LOOPBACK = "127.0.0.1"


def host_of(address: str) -> str:
    """The host of an address.

    Examples
    --------
    >>> host_of("tls://10.0.0.7:4321"), host_of("10.0.0.7:4321"), host_of("[::1]:80")
    ('10.0.0.7', '10.0.0.7', '::1')
    """
    return urlsplit(address if "://" in address else f"//{address}").hostname or ""


def is_loopback(host: str) -> bool:
    """Return True for a host that only this machine can connect to.

    Examples
    --------
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("10.0.0.7")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_exposed(address: str) -> bool:
    """Return True for a scheduler that other machines can connect to without a certificate.

    Examples
    --------
    >>> is_exposed("tcp://10.0.0.7:1"), is_exposed("tls://10.0.0.7:1"), is_exposed("tcp://127.0.0.1:1"), is_exposed("inproc://10.0.0.7/1")
    (True, False, False, False)
    """
    return not address.startswith(("tls://", "inproc://")) and not is_loopback(host_of(address))


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Raises
    ------
    ConfigError
        When there is none of this name; the message lists the interfaces that have an address.

    Examples
    --------
    >>> address_of_interface("lo")
    '127.0.0.1'
    """
    known = _interfaces()
    if name not in known:
        raise ConfigError(
            f"cluster.interface is {name!r}, and {socket.gethostname()} has {', '.join(sorted(known))}. Write one of these, or "
            "leave it out."
        )
    return known[name]


def own_address() -> str:
    """The address of this machine for others: that of its name, else that of its first interface that is up.

    On a machine without a network it is the loopback.
    """
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = LOOPBACK
    if not is_loopback(named):
        return named
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return next(
        (address for name, address in _interfaces().items() if name in up and not is_loopback(address)),
        LOOPBACK,
    )


def address_towards(host: str) -> str:
    """The address of this machine on the way to a host. Nothing is sent.

    Examples
    --------
    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    import psutil  # here: a job is checked without it

    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
