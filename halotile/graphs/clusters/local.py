"""Worker processes on this machine, on loopback only, encrypted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import dask
from distributed import Client, LocalCluster
from distributed.security import Security

from halotile.errors import ConfigError
from halotile.graphs.clusters.base import WORKER_ENVIRONMENT, Cluster, own_environment
from halotile.graphs.clusters.forks import (
    FORK_SETTINGS,
    children_spared_from_ctrl_c,
    ensure_forks,
    environment_now,
)
from halotile.graphs.clusters.nanny import OwnNanny

START_SECONDS = 120

SETTINGS = FORK_SETTINGS | {
    # A worker that is not back by then is given up for good, also one that died again only just now.
    "distributed.deploy.lost-worker-timeout": "365 days",
    "distributed.scheduler.worker-saturation": "inf",
    "distributed.comm.timeouts.connect": "30s",
    # What Dask remembers of past tasks: a million of them pass through.
    "distributed.admin.low-level-log-length": 100,
    "distributed.diagnostics.computations.max-history": 2,
    # Blocks hold no results on workers: nothing to spill, and pausing would only stall the stream.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 0.98,
    "distributed.nanny.pre-spawn-environ": WORKER_ENVIRONMENT,
    # Dask looks at itself 50 to 100 times a second in every process: on few cores that is taken from the computation.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.worker.memory.monitor-interval": "500ms",
}

CLOSING = {"distributed.comm.timeouts.connect": "2s"}


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """A cluster of processes on this machine."""

    client: Client
    workers: int
    dashboard: str | None


@contextmanager
def start(*, workers: int, memory_bytes: int, dashboard: bool = True, deaths: int = 0) -> Iterator[Cluster]:
    """Start ``workers`` processes of one thread each; they end with the context.

    Traffic is encrypted with certificates made for this run: any local user could otherwise
    connect and run code as you.

    Parameters
    ----------
    workers : int
        Number of processes.
    memory_bytes : int
        A worker that grows past this is ended, and its blocks run elsewhere.
    dashboard : bool
        Serve the dashboard on 127.0.0.1, at a free port.
    deaths : int
        How many workers may die with a task, which then runs elsewhere. With none it comes back to the driver at once, which
        finds out which block was to blame.

    Raises
    ------
    ConfigError
        When the processes cannot start.
    """
    with own_environment(), dask.config.set(SETTINGS):
        cluster = _start_processes(workers, memory_bytes, dashboard, deaths)
        try:
            client = Client(cluster, timeout=START_SECONDS, set_as_default=False)
            try:
                yield LocalWorkers(client, workers, cluster.dashboard_link if dashboard else None)
            finally:
                with suppress(TimeoutError, OSError):  # what hangs is ended with the cluster
                    client.close(timeout=10)
        finally:
            # What hangs now ends with this process; a scheduler that is gone is not waited for long.
            with suppress(TimeoutError, OSError), dask.config.set(CLOSING):
                cluster.close(timeout=30)


def _start_processes(workers: int, memory_bytes: int, dashboard: bool, deaths: int) -> LocalCluster:
    ensure_forks()  # it imports while the scheduler starts
    try:
        with children_spared_from_ctrl_c():
            return LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                worker_class=OwnNanny,
                protocol="tls://",
                security=Security.temporary(),
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # also without pages: Dask takes its usual port otherwise
                scheduler_kwargs={"dashboard": dashboard, "allowed_failures": deaths},
                memory_limit=memory_bytes,
                env=environment_now(),
                silence_logs=50,
            )
    except RuntimeError as error:
        raise ConfigError(
            f"the worker processes did not start ({error}). The reason is printed above. Write fewer workers if there are too "
            "many processes or too little memory."
        ) from error
