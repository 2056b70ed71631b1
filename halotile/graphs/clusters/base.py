"""The contract of a kind of cluster: what it declares, the order that it is given, and the running cluster that it returns.

A kind is a module ``halotile/graphs/clusters/<kind>.py``, or what an entry point names, with:

``start(order)``
    A context manager that yields a running :class:`RunningCluster`, which ends with the context. A batch system that dask-jobqueue
    knows has ``SYSTEM`` instead, a :class:`~halotile.graphs.clusters.launches.batch_system.BatchSystem`: see ``lsf.py``.
``check(choice)``, optional
    Raises a ConfigError or MissingPackage where the kind cannot be started from here.
``TRAITS``, optional
    A :class:`ClusterTraits`: what everybody else needs to know about the kind, so that nobody asks for it by name.

Plans and checks of job files read ``TRAITS``, so the module of a kind imports Dask within its functions only.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halotile import registry
from halotile.errors import ConfigError, HalotileError
from halotile.graphs.kinds import sections

if TYPE_CHECKING:
    from halotile.graphs.clusters.common.security import Credentials

Environment = Mapping[str, str]
AUTO = "auto"
DEFAULT = "local"
VARIABLE = "HALOTILE_CLUSTER"
ADDRESS = "DASK_SCHEDULER_ADDRESS"  # the variable in which Dask itself looks for a running scheduler
ATTENDED = "HALOTILE_ATTENDED"  # set for the workers of a submitted run: only its job may be requeued by one of them

# A worker is not given up before it was silent this long: it is while it loads a model, and where a user's function
# holds Python's lock.
LEAST_SILENCE_SECONDS = 60.0

_FEWER = "Write fewer workers: there are too many processes, or there is too little memory."
_FULL = "Make room: $TMPDIR, your home or /dev/shm is full."
# Remedies by the error number of a scarce resource.
_REMEDIES = {
    errno.EAGAIN: _FEWER,
    errno.ENOMEM: _FEWER,
    errno.EMFILE: "Allow more open files (ulimit -n), or write fewer workers.",
    errno.ENFILE: "All programs of this machine together have too many files open: end some, or write fewer workers.",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
}


@dataclass(frozen=True, kw_only=True)
class ClusterTraits:
    """Declaration of a kind of cluster; the defaults are those of a kind with workers on other machines."""

    is_here: bool = False  # its workers are processes of this machine, which share its cores and memory
    joins: bool = False  # it joins a running scheduler, whose address the job gives, and starts nothing
    of_copies: bool = False  # its workers are the other copies of the command
    # meaning of `cluster.gpus`. number: GPUs for each worker; each: which GPUs of this machine get a worker each;
    # shared: none, since all workers share the first GPU
    gpus: Literal["number", "each", "shared"] = "number"
    ignored: tuple[str, ...] = ()  # keys of the cluster section that mean nothing to it
    # `gives_gpus(run, environment)`: True where each worker has a GPU of its own even if the job asks for none
    gives_gpus: Callable[[sections.Run, Environment], bool] = lambda *_: False
    # `count_workers(run, cluster, device, environment)`: the number of workers for `run.workers: auto` and the reason
    # in a few words; None where the kind gives as many as are asked for
    count_workers: Callable[[sections.Run, sections.Cluster, str, Environment], tuple[int, str] | None] = lambda *_: (
        None
    )
    # `check_memory(run, environment)` raises MemoryRefused where the workers may need more memory than they can get
    check_memory: Callable[[sections.Run, Environment], None] = lambda *_: None

    @property
    def is_remote(self) -> bool:
        """True where other machines connect to a scheduler that it starts, so that TLS is required."""
        return not (self.is_here or self.joins)

    @property
    def has_worker_per_gpu(self) -> bool:
        """True where each GPU of this machine gets a worker."""
        return self.gpus == "each"


@dataclass(frozen=True)
class ChosenCluster:
    """A kind of cluster with the reason for its choice."""

    name: str  # name in `halotile.graphs.clusters`
    why: str  # reason in a few words

    @property
    def traits(self) -> ClusterTraits:
        """Declaration of the kind."""
        return traits_of(self.name)

    def start(self, order: Order) -> AbstractContextManager[RunningCluster]:
        """Start a cluster of the kind, which ends with the context."""
        started: AbstractContextManager[RunningCluster] = starter_of(self.name).start(order)
        return started


def starter_of(name: str) -> Any:
    """The module of a kind, which starts clusters, or the batch system that it declares."""
    kind = registry.find("clusters", name)
    return kind if hasattr(kind, "start") else kind.SYSTEM


def traits_of(name: str) -> ClusterTraits:
    """Declaration of a kind by its name; the defaults for one that declares nothing or cannot be found."""
    try:
        kind = registry.find("clusters", name)
    except ConfigError:  # reported when it is to be started
        return ClusterTraits()
    traits: ClusterTraits = getattr(kind, "TRAITS", ClusterTraits())
    return traits


@dataclass(frozen=True, kw_only=True)
class Order:
    """Requirements for a cluster that is to be started."""

    workers: int  # number of workers
    memory_bytes: int  # worker that grows past this is ended, and its blocks run elsewhere
    choice: sections.Cluster = field(default_factory=sections.Cluster)  # cluster section of the job
    folder: Path | None = None  # folder that the workers see too, for scripts, logs and certificates
    credentials: Credentials | None = None  # certificates to use; by default the cluster makes its own
    gpus: bool = True  # false: no worker sees a GPU, so that its memory has a limit on a machine with GPUs as well
    # number of workers that may die with a task, which then runs elsewhere. With 0 it comes back to the driver at
    # once, which finds out which block was to blame
    deaths: int = 0
    # worker that is silent for this long, and for a minute at least, is ended, and its blocks run elsewhere
    stall_seconds: float = 300.0
    report: Callable[[str], None] = lambda _: None  # takes a line for the user

    @property
    def settings(self) -> dict[str, Any]:
        """Dask settings that follow from the order."""
        return {} if self.choice.dashboard else {"distributed.scheduler.http.routes": []}

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """Options of the scheduler that follow from the order."""
        return {
            "dashboard": False,  # its pages come when they are asked for
            "allowed_failures": self.deaths,
            "worker_ttl": max(self.stall_seconds, LEAST_SILENCE_SECONDS),
        }


@dataclass(eq=False)
class RunningCluster:
    """A running cluster, whose start waits for its workers; other kinds override the methods."""

    client: Any  # a client connected to it
    asked: int  # number of workers asked for
    dashboard: str | None = None  # address of the dashboard's page, if there is one

    @property
    def workers(self) -> int:
        """Number of workers to plan with."""
        return self.asked

    def missing(self, wanted: int = 1) -> str | None:
        """Return the reason in a few words why there are fewer workers than ``wanted``; None once there are as many."""
        return None

    def check(self, wanted: int = 1) -> None:
        """Raise :class:`~halotile.errors.ClusterFailed` when there will not be as many any more."""


@contextmanager
def config_errors_described() -> Iterator[None]:
    """Raise an error that keeps a cluster from starting as one that names its cause and a remedy."""
    try:
        yield
    except HalotileError:
        raise
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and (deeper := cause.__cause__ or cause.__context__):
            cause = deeper  # Dask's own error says only that it failed
        if isinstance(cause, ConnectionError) and cause.errno is None:  # of OwnNanny, not of the system
            raise cause from error
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        number = errno.ENOMEM if isinstance(cause, MemoryError) else getattr(cause, "errno", None)
        if number in _REMEDIES:
            remedy = _REMEDIES[number]
        elif isinstance(cause, OSError) and number and not cause.filename:  # no file that a setting names
            remedy = "This machine refused it: `recon-cli doctor` shows its limits."
        else:
            remedy = "Correct what fails in Dask's configuration, a preload or a setting (~/.config/dask, variables DASK_...)."
            if isinstance(cause, RuntimeError):  # a worker that died without a reason
                remedy += " If that is not it, write fewer workers: processes or memory may be scarce."
        raise ConfigError(f"the cluster did not start ({text}). {remedy}") from error
