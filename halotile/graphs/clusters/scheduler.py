"""A scheduler that runs already, joined by its address or its scheduler file, and left running."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import dask
from distributed import Client
from distributed.security import Security

from halotile.errors import ConfigError
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.base import Cluster, Order
from halotile.graphs.clusters.connection.addresses import host_of, is_exposed, is_loopback
from halotile.graphs.clusters.detection.cluster_kind import ADDRESS
from halotile.graphs.clusters.detection.versions import differing_versions
from halotile.graphs.clusters.workers.environment import ALLOCATOR_ENVIRONMENT
from halotile.graphs.jobs import sections

CONNECT_SECONDS = 15
"""How long a scheduler may take to answer."""
_CREDENTIALS = ("ca-file", "client.cert", "client.key")


@dataclass(frozen=True, slots=True)
class JoinedWorkers:
    """The workers of somebody's scheduler."""

    client: Client

    @property
    def workers(self) -> int:
        """How many there are now, one at least."""
        return max(1, self._count())

    @property
    def dashboard(self) -> str | None:
        """Its dashboard, where it has one."""
        link: str | None = self.client.dashboard_link
        return link

    def missing(self) -> str | None:
        """That there are none."""
        return None if self._count() else "the scheduler has none; start some, as with `dask worker`"

    def check(self) -> None:
        """Nothing: whoever started the scheduler sees to its workers."""

    def _count(self) -> int:
        return len(self.client.scheduler_info(n_workers=-1)["workers"])


@contextmanager
def start(order: Order) -> Iterator[Cluster]:
    """Join a scheduler for the length of the context; it is left running.

    Raises
    ------
    ConfigError
        When it is not said where it is, nobody answers, it is not encrypted, or its workers lack halotile.
    """
    where, address = address_of(order.choice)
    if order.choice.tls and is_loopback(host_of(address)) and not address.startswith("tls://"):
        raise ConfigError(
            f"{where} is {address}, which is not encrypted: whoever connects to it could run code as you. If it is yours, write "
            "tls: false, or --no-tls."
        )
    with joined(where, address) as client:
        for line in differing_versions(client):
            if line.startswith("halotile") and "not there" in line:
                raise ConfigError(f"{line}: workers need halotile. Install it where they run.")
            order.report(f"note: {line}")
        if lacking := lacking_environment(client):
            order.report(f"note: {lacking}")
        yield JoinedWorkers(client)


def lacking_environment(client: Client) -> str:
    """What workers of somebody's scheduler should have been started with; nothing where they were."""
    with suppress(TimeoutError, OSError, ValueError):
        told = client.run(_allocator, on_error="ignore")
        poor = [worker for worker, has in told.items() if not has]
        if poor:
            wanted = " ".join(f"{name}={value}" for name, value in ALLOCATOR_ENVIRONMENT.items())
            return (
                f"{counted(len(poor), 'worker')} of {len(told)} without the environment in which large tiles are not mapped anew "
                f"each time, which can cost more than half of their speed. Start them as: {wanted} dask worker ..."
            )
    return ""


def _allocator() -> bool:
    return all(name in os.environ for name in ALLOCATOR_ENVIRONMENT)


@contextmanager
def joined(where: str, address: str) -> Iterator[Client]:
    """A connection to a running scheduler, with the certificates that Dask's configuration names.

    Parameters
    ----------
    where : str
        What said where it is.
    address : str
        Its address.

    Raises
    ------
    ConfigError
        When nobody answers, certificates are missing, or it is reached from other machines without.
    """
    if is_exposed(address):
        raise ConfigError(
            f"{where} is {address}, which is not encrypted and reached from other machines: whoever connects to it could run "
            "code as you. Start it with TLS."
        )
    if address.startswith("tls://"):
        check_certificates(where, address)
    try:
        client = Client(address, set_as_default=False, timeout=CONNECT_SECONDS, security=Security())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{where} is {address}, and no scheduler answers there ({error}). Start it, or leave {where} out to have workers "
            "started on this machine."
        ) from error
    with client:
        yield client


def check_certificates(where: str, address: str) -> None:
    """Refuse what Dask's configuration says of certificates, where that is not enough to connect.

    Raises
    ------
    ConfigError
        When some are not named, or are not there.
    """
    tls = {key: dask.config.get(f"distributed.comm.tls.{key}", None) for key in _CREDENTIALS}
    if lacking := [f"distributed.comm.tls.{key}" for key, path in tls.items() if not path]:
        raise ConfigError(
            f"{where} is {address}, and Dask's configuration does not say with which certificate to connect: set "
            f"{', '.join(lacking)} in ~/.config/dask/distributed.yaml, or DASK_DISTRIBUTED__COMM__TLS__CA_FILE and so on."
        )
    for key, path in tls.items():
        if not Path(path).is_file():
            raise ConfigError(f"distributed.comm.tls.{key} is {path}, and there is no such file.")


def address_of(choice: sections.Cluster) -> tuple[str, str]:
    """What says where the scheduler is, and its address."""
    if choice.address:
        return "cluster.address", choice.address
    if choice.scheduler_file:
        return "cluster.scheduler_file", _address_in(Path(choice.scheduler_file))
    if os.environ.get(ADDRESS):
        return ADDRESS, os.environ[ADDRESS]
    raise ConfigError(
        f"cluster.kind is scheduler, and nothing says where it is. Write cluster.address, or set {ADDRESS}."
    )


def _address_in(file: Path) -> str:
    try:
        address = json.loads(file.read_text())["address"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cluster.scheduler_file is {file}, which has no scheduler's address ({error}). Write the file that "
            "`dask scheduler --scheduler-file` was given."
        ) from error
    return str(address)
