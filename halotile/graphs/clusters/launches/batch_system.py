"""A batch system as the kinds of clusters declare it, without Dask being imported."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, MissingPackage
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.clusters.common.security import address_of_interface
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.kinds import sections

SLURM = "slurm"


@dataclass(frozen=True)
class BatchSystem:
    """Differences of one batch system from the others."""

    title: str  # its name
    module: str  # its name in dask-jobqueue's configuration, and of the module
    cluster: str  # its class in dask-jobqueue
    # command that submits a job: the one that its class calls, written here to be known without dask-jobqueue
    submits: str
    # states of jobs by their ids. One that is left out is not known to be over
    states: Callable[[Sequence[str]], Mapping[str, LaunchState]]
    # request for GPUs, from the cluster section and the memory of a job: arguments of the class, and `directives`
    gpus: Callable[[sections.Cluster, int], Mapping[str, Any]]
    lists: str  # command that lists its queues, or else its machines, in words
    account: str = "account"  # dask-jobqueue's argument for the account
    walltime: Callable[[str], str] = str  # converts a walltime to the system's format
    directives: Callable[[list[str]], Any] = list  # converts directives to dask-jobqueue's format
    prologue: Callable[[str], str] = str  # escapes a line of the prologue for the system's scripts
    # arguments that the class requires and its configuration leaves empty
    usual: Mapping[str, Any] = field(default_factory=dict)
    # further directives of a job that holds the driver of a submitted run; None where it cannot
    driver: Sequence[str] | None = None
    # requests that the class leaves out, from the same as `gpus` and the folder of logs: likewise arguments, and
    # `directives`
    requests: Callable[[sections.Cluster, int, Path], Mapping[str, Any]] = lambda *_: {}
    # pattern for options in directives that apply to the jobs of workers, and not to that of the driver
    of_workers: str = "(?!)"

    def start(self, order: Order) -> AbstractContextManager[RunningCluster]:
        """Submit a job for each worker; they are removed with the context."""
        from halotile.graphs.clusters.launches.batch_jobs import start_jobs

        return start_jobs(self, order)

    def check(self, choice: sections.Cluster) -> None:
        """Refuse to submit from a machine that cannot."""
        self.cluster_class()
        if not shutil.which(self.submits):
            raise ConfigError(
                f"cluster.kind is {self.module}, and there is no {self.submits} here, which submits {self.title} jobs. "
                "Start it on a machine of that cluster, or write kind: local."
            )
        if interface := self.interface(choice):
            address_of_interface(interface)
        self.requests(choice, 0, Path())

    def configured(self, key: str) -> Any:
        """A setting in the user's configuration of dask-jobqueue."""
        import dask

        return dask.config.get(f"jobqueue.{self.module}.{key}", None)

    def interface(self, choice: sections.Cluster) -> str | None:
        """The network interface of a job, or else of the user's configuration."""
        found: str | None = choice.interface or self.configured("interface")
        return found

    def directives_of(self, choice: sections.Cluster) -> Sequence[str]:
        """The directives of a job, or else those of the user's configuration."""
        return choice.directives or tuple(self.configured("job-extra-directives") or ())

    def cluster_class(self) -> Any:
        """Its class in dask-jobqueue."""
        try:
            with _signal_handlers_kept():
                import dask_jobqueue
        except ImportError as error:
            raise MissingPackage(
                f"cluster {self.module} needs dask-jobqueue, which is not installed. Write: pip install 'halotile[hpc]'"
            ) from error
        return getattr(dask_jobqueue, self.cluster)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Keep the handler of Ctrl-C, which the import of dask-jobqueue replaces; the import would also fail outside the main thread."""
    replaced, signal.signal = signal.signal, lambda *_: None
    try:
        yield
    finally:
        signal.signal = replaced
