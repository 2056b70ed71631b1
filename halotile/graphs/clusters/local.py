"""Worker processes on this machine, on loopback only, encrypted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import dask
from distributed import Client, LocalCluster
from distributed.security import Security

from halotile.graphs.clusters.base import WORKER_ENVIRONMENT, Cluster, own_environment

START_SECONDS = 120

SETTINGS = {
    "distributed.scheduler.worker-saturation": "inf",
    "distributed.comm.timeouts.connect": "30s",
    # Blocks hold no results on workers: nothing to spill, and pausing would only stall the stream.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 0.98,
    "distributed.nanny.pre-spawn-environ": WORKER_ENVIRONMENT,
}


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """A cluster of processes on this machine."""

    client: Client
    workers: int
    dashboard: str | None


@contextmanager
def start(*, workers: int, memory_bytes: int, dashboard: bool = True) -> Iterator[Cluster]:
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
    """
    with own_environment(), dask.config.set(SETTINGS):
        cluster = LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            protocol="tls://",
            security=Security.temporary(),
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0" if dashboard else None,
            memory_limit=memory_bytes,
            silence_logs=50,
        )
        try:
            client = Client(cluster, timeout=START_SECONDS, set_as_default=False)
            try:
                yield LocalWorkers(client, workers, cluster.dashboard_link if dashboard else None)
            finally:
                client.close(timeout=10)
        finally:
            cluster.close(timeout=30)
