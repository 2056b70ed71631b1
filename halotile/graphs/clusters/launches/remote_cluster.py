"""A cluster whose scheduler is in this process and whose workers are on other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
from distributed import Client
from distributed.security import Security
from distributed.utils import silence_logging_cmgr

from halotile.graphs.clusters.base import Order, RunningCluster, config_errors_described
from halotile.graphs.clusters.connection.addresses import LOOPBACK
from halotile.graphs.clusters.connection.allowed_hosts import answer_allowed_only
from halotile.graphs.clusters.connection.credentials import Credentials, credentials, private_base
from halotile.graphs.clusters.launches.base import QueryStates
from halotile.graphs.clusters.launches.supervisor import Supervisor
from halotile.graphs.clusters.workers.environment import own_environment
from halotile.graphs.clusters.workers.scratch import keep_off_path, private_scratch
from halotile.graphs.clusters.workers.settings import SETTINGS, SILENT
from halotile.storage.run_directory.names import WORKERS

START_SECONDS = 120
DEATH_SECONDS = 60
"""Time for which a worker looks for the scheduler."""

REMOTE_SETTINGS = SETTINGS | {
    # A worker that died is back by then, started anew by its nanny; one that is not, is lost with its launch.
    "distributed.deploy.lost-worker-timeout": "15s",
    "distributed.comm.require-encryption": True,
}


@dataclass(frozen=True)
class RemoteWorkers:
    """A running cluster with a supervisor."""

    client: Client
    workers: int
    dashboard: str | None
    supervisor: Supervisor

    def missing(self, wanted: int = 1) -> str | None:
        """Return the reason why there are fewer workers."""
        return self.supervisor.missing(wanted)

    def check(self, wanted: int = 1) -> None:
        """Raise when there will not be as many."""
        self.supervisor.check(wanted)


MakeCluster = Callable[[Security, Path, dict[str, Any]], Any]
"""``make(security, logs, scheduler_options)``: a SpecCluster with its scheduler, and no launch yet."""


@contextmanager
def supervised_cluster(
    order: Order,
    address: str,
    make: MakeCluster,
    query: QueryStates,
    capacity: Callable[[], int] | None = None,
) -> Iterator[RunningCluster]:
    """A cluster whose launches are replaced when they are lost, for the length of the context.

    Parameters
    ----------
    order : Order
        Requirements for the cluster.
    address : str
        Address that the scheduler listens on.
    make : callable
        Makes the cluster that holds the launches.
    query : callable
        States of launches.
    capacity : callable, optional
        Number of launches that there is room for by now.
    """
    options = {
        "host": address,
        "protocol": "tls://",
        "port": 0,
        "dashboard_address": f"{LOOPBACK}:0",
        **order.scheduler_options,
    }
    with remote_environment(order) as (base, tls):
        with config_errors_described():
            cluster = make(tls.security, base, options | {"security": tls.security})
        try:
            with (
                connected(cluster, order) as (client, dashboard),
                Supervisor(cluster, order.workers, query, order.report, capacity) as supervisor,
            ):
                yield RemoteWorkers(client, order.workers, dashboard, supervisor)
        finally:
            with suppress(TimeoutError, OSError):
                cluster.close(timeout=30)


@contextmanager
def remote_environment(order: Order) -> Iterator[tuple[Path, Credentials]]:
    """The settings and scratch folder for a scheduler that other machines reach; yields the folder of its files and its certificates."""
    order.require_tls()
    base = (order.folder or private_base()) / WORKERS
    base.mkdir(mode=0o700, exist_ok=True)
    certificates = nullcontext(order.credentials) if order.credentials else credentials(base)
    with (
        own_environment(),
        dask.config.set(REMOTE_SETTINGS | order.settings),
        private_scratch(),
        silence_logging_cmgr(SILENT),
        certificates as tls,
    ):
        yield base, tls


@contextmanager
def connected(cluster: Any, order: Order) -> Iterator[tuple[Client, str | None]]:
    """A client of a new cluster, and the address of its dashboard, if it has one: on the driver's loopback, wherever its scheduler
    listens."""
    keep_off_path()
    with Client(cluster, timeout=START_SECONDS, set_as_default=False) as client:
        dashboard = None
        if order.choice.dashboard:
            dashboard = f"http://{LOOPBACK}:{cluster.scheduler.http_server.port}/status"
        answer_allowed_only(cluster.scheduler, dashboard)
        yield client, dashboard


def worker_arguments(order: Order, security: Security, interface: str | None) -> list[str]:
    """Arguments of the worker's command, besides the scheduler's address and its own name."""
    tls = security.get_tls_config_for_role("worker")
    return [
        *("--tls-ca-file", tls["ca_file"], "--tls-cert", tls["cert"], "--tls-key", tls["key"]),
        *("--memory-limit", str(order.memory_bytes), "--death-timeout", str(DEATH_SECONDS)),
        *(("--interface", interface) if interface else ()),
    ]
