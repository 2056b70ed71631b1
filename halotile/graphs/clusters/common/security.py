"""Addresses to listen on, and the certificates of one run.

No address is a wildcard, and none is beyond this machine unless other machines have to connect. The certificates are a pair for scheduler,
workers and client alike, removed at the end of the run. Where workers start on other machines they are files of mode 0600 in a folder of mode
0700. Its owner holds a lock in it; a folder whose lock nobody holds was left by a killed process, and is removed.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tornado.httputil import HTTPServerRequest, split_host_and_port
from tornado.routing import Matcher, Router, Rule, RuleRouter
from tornado.web import ErrorHandler

from halotile.errors import ConfigError, OutputRefused
from halotile.storage.cache import user_cache
from halotile.storage.run_directory.locks import flock

if TYPE_CHECKING:
    from distributed.security import Security


PREFIX = "tls-"
_OWNER = "owner"
_CERTIFICATE = "certificate.pem"
_KEY = "key.pem"


@dataclass(frozen=True)
class Credentials:
    """Certificates in a folder."""

    folder: Path

    @property
    def security(self) -> Security:
        """In Dask's form; encryption is required."""
        from distributed.security import Security

        certificate, key = self.paths
        roles = ("scheduler", "worker", "client")
        files = {f"tls_{role}_cert": certificate for role in roles}
        files |= {f"tls_{role}_key": key for role in roles}
        return Security(tls_ca_file=certificate, require_encryption=True, **files)

    @property
    def paths(self) -> tuple[str, str]:
        """The certificate, which is its own authority, and its key."""
        return str(self.folder / _CERTIFICATE), str(self.folder / _KEY)

    def environment(self) -> dict[str, str]:
        """Variables by which any Dask client finds them. They name files, and hold no secret."""
        certificate, key = self.paths
        tls = "DASK_DISTRIBUTED__COMM__TLS__"
        variables = {f"{tls}CA_FILE": certificate, "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true"}
        for role in ("SCHEDULER", "WORKER", "CLIENT"):
            variables |= {f"{tls}{role}__CERT": certificate, f"{tls}{role}__KEY": key}
        return variables


@contextmanager
def credentials(base: Path) -> Iterator[Credentials]:
    """Certificates made for this context, in a folder of their own inside ``base``, which workers see too.

    Folders there whose owners are gone are removed.
    """
    from distributed.security import Security

    with owned_folder(base, PREFIX) as folder:
        tls = Credentials(folder)
        temporary = Security.temporary().get_tls_config_for_role("client")
        for path, text in zip(tls.paths, (temporary["cert"], temporary["key"]), strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        yield tls


@contextmanager
def owned_folder(base: Path, prefix: str) -> Iterator[Path]:
    """A folder of mode 0700 in ``base``, for the length of the context.

    Folders of its prefix that owners on this machine left behind are removed. Locks of other machines may not be seen here.
    """
    own_prefix = f"{prefix}{socket.gethostname()}-tmp"
    remove_stale(base, own_prefix)
    # It gets its name once it is owned: nobody removes it in between.
    unnamed = Path(tempfile.mkdtemp(prefix="tmp", dir=base))  # of mode 0700
    folder = unnamed.with_name(own_prefix + unnamed.name.removeprefix("tmp"))
    try:
        with ExitStack() as lock:
            with suppress(OutputRefused):  # on a file system without locks nobody removes folders
                lock.enter_context(owned(unnamed))
            unnamed.rename(folder)
            yield folder
    finally:
        for path in (unnamed, folder):
            shutil.rmtree(path, ignore_errors=True)


def remove_stale(base: Path, prefix: str = PREFIX, mark: str = "") -> list[Path]:
    """Remove folders, by default of certificates, whose owners are gone; none on a file system without locks.

    With ``mark``, only folders in which the owner made a lock file of this name. Returns the folders that were removed.
    """
    removed = []
    for folder in base.glob(f"{prefix}*/{mark}"):
        place = folder.parent if mark else folder
        with suppress(OSError, OutputRefused), owned(place, os.geteuid(), mark or _OWNER):
            shutil.rmtree(place)
            removed.append(place)
    return removed


def private_base() -> Path:
    """A private folder of the user, for certificates of a cluster without a run directory.

    It is in the home, which machines of a cluster share.
    """
    folder = user_cache()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


@contextmanager
def owned(folder: Path, user: int | None = None, name: str = _OWNER) -> Iterator[None]:
    """Hold the lock of a folder, a file of this name in it."""
    with ExitStack() as opened:
        # A link that another user planted under such a name is not followed, and nothing is created in it.
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, place)
        if user not in (None, os.fstat(place).st_uid):
            raise PermissionError(f"{folder} is another user's")
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
        opened.callback(os.close, lock)
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# Dask's list of its pages, which fails on halotile's page; tracebacks, which name folders; and the page that has
# workers measure their disks.
LEFT_OUT = {"sitemap.json", "exceptions", "individual-exceptions", "hardware"}


def answer_allowed_only(scheduler: Any, link: str | None) -> None:
    """Answer only requests to, and from pages under, the names of loopback and of the link; others get a 404.

    Any web page in the browser may reach a server on loopback: under a name of its own that leads here (DNS rebinding), or by
    a websocket, whose Origin names the page. Some of Dask's pages are left out for everybody.

    ``scheduler``: scheduler that serves the dashboard; ``link``: address of the dashboard as it is reported to the user.
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

    Their import takes half a second and 18 MB, and most runs are watched on halotile's page alone.

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

    >>> host_of("tls://10.0.0.7:4321"), host_of("10.0.0.7:4321"), host_of("[::1]:80")
    ('10.0.0.7', '10.0.0.7', '::1')
    """
    return urlsplit(address if "://" in address else f"//{address}").hostname or ""


def is_loopback(host: str) -> bool:
    """Return True for a host that only this machine can connect to.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("10.0.0.7")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_exposed(address: str) -> bool:
    """Return True for a scheduler that other machines can connect to without a certificate.

    >>> is_exposed("tcp://10.0.0.7:1"), is_exposed("tls://10.0.0.7:1"), is_exposed("tcp://127.0.0.1:1"), is_exposed("inproc://10.0.0.7/1")
    (True, False, False, False)
    """
    return not address.startswith(("tls://", "inproc://")) and not is_loopback(host_of(address))


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface of this machine.

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


def listening_address(interface: str | None, *, is_alone: bool = False) -> str:
    """The address for a scheduler: that of an interface, else loopback where its workers are all here, else that of this machine."""
    if interface:
        return address_of_interface(interface)
    return LOOPBACK if is_alone else own_address()


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
        (address for name, address in _interfaces().items() if name in up and not is_loopback(address)), LOOPBACK
    )


def address_towards(host: str) -> str:
    """The address of this machine on the way to a host. Nothing is sent.

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
