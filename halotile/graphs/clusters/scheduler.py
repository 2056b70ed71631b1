"""A scheduler that runs already, joined by its address or its scheduler file, and left running."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from halotile.errors import ConfigError
from halotile.graphs.clusters.base import ADDRESS, ChosenCluster, ClusterTraits, Environment, Order, RunningCluster
from halotile.graphs.clusters.common.answers import ask, present_workers
from halotile.graphs.clusters.common.security import host_of, is_exposed, is_loopback
from halotile.graphs.clusters.workers.settings import ALLOCATOR_ENVIRONMENT
from halotile.graphs.kinds import sections
from halotile.graphs.words import counted

if TYPE_CHECKING:
    from distributed import Client

TRAITS = ClusterTraits(joins=True)
CONNECT_SECONDS = 15  # time in which a scheduler has to answer
_CREDENTIALS = ("ca-file", "client.cert", "client.key")


def detect(environment: Environment) -> ChosenCluster | None:
    """This kind where the environment gives the address of a scheduler."""
    if address := environment.get(ADDRESS):
        return ChosenCluster("scheduler", f"{ADDRESS} is {address}")
    return None


class JoinedWorkers(RunningCluster):
    """The workers of somebody else's scheduler, who looks after them."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, 1, client.dashboard_link)

    @property
    def workers(self) -> int:
        """Number of workers that are there now, one at least."""
        return max(1, len(present_workers(self.client)))

    def missing(self, wanted: int = 1) -> str | None:
        """Return a message that there are fewer."""
        if (count := len(present_workers(self.client))) >= wanted:
            return None
        return f"the scheduler has {count or 'none'}; start some, as with `dask worker`"


@contextmanager
def start(order: Order) -> Iterator[RunningCluster]:
    """Join a scheduler for the length of the context; it is left running."""
    source, address = address_of(order.choice)
    if order.choice.tls and is_loopback(host_of(address)) and not address.startswith("tls://"):
        raise ConfigError(
            f"{source} is {address}, which is unencrypted: anyone who connects can run code as you. If it is yours, write "
            "tls: false, or --no-tls."
        )
    with joined(source, address) as client:
        yield _checked(client, order.report)


def workers_given(argument: object) -> RunningCluster | None:
    """Return the workers of a Client, where a call was given one as its cluster."""
    from distributed import Client

    return _checked(argument, warnings.warn) if isinstance(argument, Client) else None


def _checked(client: Client, report: Callable[[str], None]) -> JoinedWorkers:
    from halotile.graphs.clusters.common.answers import differing_versions

    for line in differing_versions(client):
        if line.startswith("halotile") and "not there" in line:
            raise ConfigError(f"{line}: workers need halotile. Install it where they run.")
        report(f"note: {line}")
    if note := missing_environment(client):
        report(f"note: {note}")
    return JoinedWorkers(client)


def missing_environment(client: Client) -> str:
    """A note about the environment that workers should have been started in; empty where they were."""
    with suppress(TimeoutError, OSError, ValueError):
        answers = ask(client, client.run, _has_allocator_environment, on_error="ignore")
        without = list(answers.values()).count(False)
        if without:
            wanted = " ".join(f"{name}={value}" for name, value in ALLOCATOR_ENVIRONMENT.items())
            return (
                f"{counted(without, 'worker')} of {len(answers)} started without the environment variables that keep memory of large tiles mapped: it is mapped again "
                f"each time, which can cost more than half of their speed. Start them as: {wanted} dask worker ..."
            )
    return ""


def _has_allocator_environment() -> bool:
    return all(name in os.environ for name in ALLOCATOR_ENVIRONMENT)


@contextmanager
def joined(source: str, address: str) -> Iterator[Client]:
    """A connection to a running scheduler, with the certificates that Dask's configuration names.

    ``source``: key or variable that gives the address, for messages.
    """
    from distributed import Client
    from distributed.security import Security

    if is_exposed(address):
        raise ConfigError(
            f"{source} is {address}, which is unencrypted and reachable from other machines: anyone who connects can run "
            "code as you. Start it with TLS."
        )
    if address.startswith("tls://"):
        check_certificates(source, address)
    try:
        client = Client(address, set_as_default=False, timeout=CONNECT_SECONDS, security=Security())
    except (OSError, ValueError, TypeError) as error:
        kind = " and write cluster.kind: local" if source == "cluster.address" else ""
        raise ConfigError(
            f"{source} is {address}, and no scheduler answers there ({error}). Start it, or remove {source}{kind} to have workers on this "
            "machine."
        ) from error
    with client:
        yield client


def check_certificates(source: str, address: str) -> None:
    """Refuse a Dask configuration whose certificates do not suffice to connect."""
    import dask

    tls = {key: dask.config.get(f"distributed.comm.tls.{key}", None) for key in _CREDENTIALS}
    if unset := [f"distributed.comm.tls.{key}" for key, path in tls.items() if not path]:
        raise ConfigError(
            f"{source} is {address}, and Dask's configuration names no certificate to connect with: set "
            f"{', '.join(unset)} in ~/.config/dask/distributed.yaml, or DASK_DISTRIBUTED__COMM__TLS__CA_FILE and so on."
        )
    for key, path in tls.items():
        if not Path(path).is_file():
            raise ConfigError(f"distributed.comm.tls.{key} is {path}, and there is no such file.")


def address_of(choice: sections.Cluster) -> tuple[str, str]:
    """The key or variable that gives the scheduler's address, and the address."""
    if choice.address:
        return "cluster.address", choice.address
    if choice.scheduler_file:
        return "cluster.scheduler_file", _address_in(Path(choice.scheduler_file))
    if os.environ.get(ADDRESS):
        return ADDRESS, os.environ[ADDRESS]
    raise ConfigError(f"cluster.kind is scheduler, and no address is given. Write cluster.address, or set {ADDRESS}.")


def _address_in(file: Path) -> str:
    try:
        return str(json.loads(file.read_text("utf-8"))["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cluster.scheduler_file is {file}, which has no scheduler's address ({error}). Write the file that "
            "`dask scheduler --scheduler-file` was given."
        ) from error
