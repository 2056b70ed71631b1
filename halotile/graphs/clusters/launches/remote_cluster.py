"""A cluster whose scheduler is in this process and whose workers are brought by pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
from distributed import Client
from distributed.security import Security

from halotile.graphs.clusters.base import Cluster, Order, config_errors_described
from halotile.graphs.clusters.connection.addresses import LOOPBACK
from halotile.graphs.clusters.connection.credentials import credentials, private_base
from halotile.graphs.clusters.launches.base import Look
from halotile.graphs.clusters.launches.keeper import Keeper
from halotile.graphs.clusters.workers.environment import own_environment
from halotile.graphs.clusters.workers.scratch import keep_off_path, private_scratch
from halotile.graphs.clusters.workers.settings import SETTINGS
from halotile.graphs.watching.allowed_hosts import answer_allowed_only
from halotile.storage.run_directory.names import WORKERS

START_SECONDS = 120
DEATH_SECONDS = 60
"""How long a worker looks for the scheduler."""

REMOTE_SETTINGS = SETTINGS | {
    # A worker that died is back by then, started anew by its nanny; one that is not, is lost with its piece.
    "distributed.deploy.lost-worker-timeout": "15s",
    "distributed.comm.require-encryption": True,
}


@dataclass(frozen=True)
class RemoteWorkers:
    """A running cluster with a keeper."""

    client: Client
    workers: int
    dashboard: str | None
    keeper: Keeper

    def missing(self) -> str | None:
        """Why no worker is there yet."""
        return self.keeper.missing()

    def check(self) -> None:
        """Raise when there will be none."""
        self.keeper.check()


Hold = Callable[[Security, Path, dict[str, Any]], Any]
"""``hold(security, logs, scheduler_options)``: a SpecCluster that has the scheduler, and no piece yet."""


@contextmanager
def kept(
    order: Order, address: str, hold: Hold, look: Look, room: Callable[[], int] | None = None
) -> Iterator[Cluster]:
    """A cluster whose pieces are kept for the length of the context.

    Parameters
    ----------
    order : Order
        What is asked for.
    address : str
        Where the scheduler listens.
    hold : callable
        Makes what holds the pieces.
    look : callable
        How pieces stand.
    room : callable, optional
        How many pieces there is room for by now.
    """
    order.require_tls()
    base = (order.folder or private_base()) / WORKERS
    base.mkdir(mode=0o700, exist_ok=True)
    options = {
        "host": address,
        "protocol": "tls://",
        "port": 0,
        "dashboard_address": f"{LOOPBACK}:0",
        **order.scheduler_options,
    }
    given = nullcontext(order.credentials) if order.credentials else credentials(base)
    with (
        own_environment(),
        dask.config.set(REMOTE_SETTINGS | order.settings),
        private_scratch(),
        given as made,
    ):
        with config_errors_described():
            cluster = hold(made.security, base, options | {"security": made.security})
        try:
            keep_off_path()
            with Client(cluster, timeout=START_SECONDS, set_as_default=False) as client:
                pages = pages_of(cluster) if order.choice.dashboard else None
                answer_allowed_only(cluster.scheduler, pages)
                with Keeper(cluster, order.workers, look, order.report, room) as keeper:
                    yield RemoteWorkers(client, order.workers, pages, keeper)
        finally:
            with suppress(TimeoutError, OSError):
                cluster.close(timeout=30)


def worker_arguments(order: Order, security: Security, interface: str | None) -> list[str]:
    """What the command of a worker is told, besides the scheduler's address and its own name."""
    tls = security.get_tls_config_for_role("worker")
    return [
        *("--tls-ca-file", tls["ca_file"], "--tls-cert", tls["cert"], "--tls-key", tls["key"]),
        *("--memory-limit", str(order.memory_bytes), "--death-timeout", str(DEATH_SECONDS)),
        *(("--interface", interface) if interface else ()),
    ]


def pages_of(cluster: Any) -> str:
    """Where the dashboard is: on the driver's loopback, wherever its scheduler listens."""
    return f"http://{LOOPBACK}:{cluster.scheduler.http_server.port}/status"
