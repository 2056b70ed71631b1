"""What is asked of a cluster, and what every kind of cluster answers."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from halotile.errors import ConfigError, HalotileError
from halotile.graphs.jobs import sections

if TYPE_CHECKING:
    from distributed import Client

    from halotile.graphs.clusters.connection.credentials import Credentials


LEAST_SILENCE_SECONDS = 60.0
"""A worker is not given up before it was silent this long: it is while it loads a model, and where a function of one's own
keeps Python's lock."""

_FEWER = "Write fewer workers: there are too many processes, or there is too little memory."
_FULL = "Make room: $TMPDIR, your home or /dev/shm is full."
_REMEDIES = {
    errno.EAGAIN: _FEWER,
    errno.ENOMEM: _FEWER,
    errno.EMFILE: "Allow more open files (ulimit -n), or write fewer workers.",
    errno.ENFILE: "All programs of this machine together have too many files open: end some, or write fewer workers.",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
}
"""For what the system says when something is scarce."""


def _silent(_: str) -> None:
    return


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is asked of a cluster.

    Parameters
    ----------
    workers : int
        How many workers.
    memory_bytes : int
        A worker that grows past this is ended, and its blocks run elsewhere.
    choice : graphs.job.Cluster
        What the job says of its cluster.
    folder : Path, optional
        A folder that the workers see too, for scripts, logs and certificates.
    credentials : Credentials, optional
        Certificates to use; by default the cluster makes its own.
    deaths : int
        How many workers may die with a task, which then runs elsewhere. With none it comes back to the driver at once, which
        finds out which block was to blame.
    stall_seconds : float
        A worker of which nothing is heard for this long, and for a minute at least, is ended, and its blocks run elsewhere.
    report : callable
        Takes a line for whoever watches.
    """

    workers: int
    memory_bytes: int
    choice: sections.Cluster = field(default_factory=sections.Cluster)
    folder: Path | None = None
    credentials: Credentials | None = None
    deaths: int = 0
    stall_seconds: float = 300.0
    report: Callable[[str], None] = _silent

    def require_tls(self) -> None:
        """Refuse to go without where other machines connect.

        Raises
        ------
        ConfigError
            When the job says so all the same.
        """
        if not self.choice.tls:
            raise ConfigError(
                "cluster.tls is false, and this cluster is reached from other machines: whoever connects could run code as you. "
                "Leave it out."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What Dask is told of it besides."""
        return {} if self.choice.dashboard else {"distributed.scheduler.http.routes": []}

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """What the scheduler is told of it."""
        return {
            "dashboard": self.choice.dashboard,
            "allowed_failures": self.deaths,
            "worker_ttl": max(self.stall_seconds, LEAST_SILENCE_SECONDS),
        }


class Cluster(Protocol):
    """A running cluster."""

    @property
    def client(self) -> Client:
        """A client connected to it."""
        ...

    @property
    def dashboard(self) -> str | None:
        """Address of the dashboard's page, if there is one."""
        ...

    @property
    def workers(self) -> int:
        """Number of workers asked for."""
        ...

    def missing(self) -> str | None:
        """Why no worker is there yet, in a few words; None once one is."""
        ...

    def check(self) -> None:
        """Raise :class:`~halotile.errors.ClusterFailed` when no worker is to be had any more."""
        ...


@contextmanager
def config_errors_described() -> Iterator[None]:
    """Raise what keeps a cluster from starting as an error that says where it comes from.

    Raises
    ------
    ConfigError
        Of what the system refuses, or else of Dask's configuration: the rest is ours.
    """
    try:
        yield
    except HalotileError:
        raise
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and (deeper := cause.__cause__ or cause.__context__):
            cause = deeper  # Dask's own words say no more than that it failed
        said = " ".join(f"{type(cause).__name__}: {cause}".split())
        number = errno.ENOMEM if isinstance(cause, MemoryError) else getattr(cause, "errno", None)
        if number in _REMEDIES:
            remedy = _REMEDIES[number]
        elif isinstance(cause, OSError) and number and not cause.filename:  # no file that a setting names
            remedy = "That is what this machine says: `recon-cli doctor` tells more of it."
        else:
            remedy = "Correct what fails in Dask's configuration, a preload or a setting (~/.config/dask, variables DASK_...)."
            if isinstance(cause, RuntimeError):  # a worker that died and did not say why
                remedy += " If that is not it, write fewer workers: processes or memory may be scarce."
        raise ConfigError(f"the cluster did not start ({said}). {remedy}") from error


Start = Callable[[Order], AbstractContextManager[Cluster]]
"""``start`` of a kind: a running cluster, which ends with the context."""
