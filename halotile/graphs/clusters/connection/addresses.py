"""Addresses to listen on: never a wildcard, and beyond this machine only where other machines have to connect."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tornado.httputil import HTTPServerRequest, split_host_and_port
from tornado.routing import Matcher, Router, Rule, RuleRouter
from tornado.web import ErrorHandler

from halotile.errors import ConfigError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
LEFT_OUT = {"sitemap.json", "exceptions", "individual-exceptions", "hardware"}
"""Dask's list of its pages, which fails on halotile's page; tracebacks, which name folders; and the page that has workers measure their disks."""


def answer_allowed_only(scheduler: Any, link: str | None) -> None:
    """Answer only requests to, and from pages under, the names of loopback and of the link; others get a 404.

    Any web page in the browser may reach a server on loopback: under a name of its own that leads here (DNS rebinding), or by
    a websocket, whose Origin names the page. Some of Dask's pages are left out for everybody.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        The scheduler that serves the dashboard.
    link : str, optional
        The address of the dashboard as it is reported to the user.
    """
    allowed = AllowedHosts((*LOOPBACK_NAMES, urlsplit(link or "").hostname))
    pages = LatePages(scheduler) if link else scheduler.http_application
    scheduler.http_server.request_callback = RuleRouter([Rule(allowed, pages)])


class AllowedHosts(Matcher):
    """Matches requests to and from some hosts.

    Parameters
    ----------
    names : tuple of str
        The hosts.
    """

    def __init__(self, names: tuple[str | None, ...]) -> None:
        self.names = names

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """Return no arguments for a request that is answered, None for others."""
        origin = request.headers.get("Origin", f"//{request.host}").partition("//")[2]
        hosts = {request.host_name, split_host_and_port(origin.lower())[0]}
        answered = hosts.issubset(self.names) and LEFT_OUT.isdisjoint(request.path.split("/"))
        return {} if answered else None


class LatePages(Router):
    """A scheduler's addresses; Dask's own pages are added at the first request that nothing else answers.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        A scheduler that was started without them.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.are_there = False

    def find_handler(self, request: HTTPServerRequest, **options: Any) -> Any:
        """Return what answers a request."""
        application = self.scheduler.http_application
        handler = application.find_handler(request, **options)
        if self.are_there or (handler and not issubclass(handler.handler_class, ErrorHandler)):
            return handler
        self.are_there = True
        with suppress(ImportError):  # without a fitting bokeh, it has no such pages
            from distributed.dashboard.scheduler import connect

            connect(application, self.scheduler.http_server, self.scheduler)
        return application.find_handler(request, **options)


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
