"""Worker processes on this machine, on loopback only, encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Client, LocalCluster
from distributed.security import Security

from halotile.graphs.clusters.base import Cluster, Order, config_errors_described
from halotile.graphs.clusters.connection.addresses import LOOPBACK
from halotile.graphs.clusters.workers.environment import own_environment
from halotile.graphs.clusters.workers.fork_server import (
    FORK_SETTINGS,
    children_spared_from_ctrl_c,
    ensure_forks,
    environment_now,
)
from halotile.graphs.clusters.workers.nanny import OwnNanny
from halotile.graphs.clusters.workers.scratch import keep_off_path, private_scratch
from halotile.graphs.clusters.workers.settings import SETTINGS
from halotile.graphs.watching.allowed_hosts import answer_allowed_only

START_SECONDS = 120

LOCAL_SETTINGS = (
    SETTINGS
    | FORK_SETTINGS
    # A worker that is not back by then is given up for good, also one that died again only just now.
    | {"distributed.deploy.lost-worker-timeout": "365 days"}
)

CLOSING = {"distributed.comm.timeouts.connect": "2s"}


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """A cluster of processes on this machine."""

    client: Client
    workers: int
    dashboard: str | None

    def missing(self) -> str | None:
        """Nothing: they are waited for when they start."""
        return None

    def check(self) -> None:
        """Nothing: a nanny sees to each of them."""


@contextmanager
def start(order: Order) -> Iterator[Cluster]:
    """Start processes of one thread each; they end with the context.

    Traffic is encrypted with certificates made for this run, which never touch the disk: any local user could otherwise
    connect and run code as you.

    Raises
    ------
    ConfigError
        When the processes cannot start.
    """

    def make() -> LocalCluster:
        return LocalCluster(
            n_workers=order.workers, processes=True, env=environment_now(), **options_of(order)
        )

    with held(order, order.workers, make) as cluster:
        yield cluster


def options_of(order: Order) -> dict[str, Any]:
    """What Dask is told of processes on this machine, wherever they compute."""
    return {
        "threads_per_worker": 1,
        "worker_class": OwnNanny,
        "host": LOOPBACK,
        "scheduler_kwargs": order.scheduler_options,
        # Also without pages: Dask takes its usual port otherwise.
        "dashboard_address": f"{LOOPBACK}:0",
        "memory_limit": order.memory_bytes,
        "silence_logs": 50,
        **_encryption(order),
    }


@contextmanager
def held(order: Order, workers: int, make: Callable[[], LocalCluster]) -> Iterator[Cluster]:
    """A cluster on this machine for the length of the context.

    Parameters
    ----------
    order : Order
        What is asked for.
    workers : int
        How many come.
    make : callable
        Starts them.

    Raises
    ------
    ConfigError
        When they do not start.
    """
    with own_environment(), dask.config.set(LOCAL_SETTINGS | order.settings), private_scratch():
        cluster = _made(make)
        try:
            keep_off_path()
            client = Client(cluster, timeout=START_SECONDS, set_as_default=False)
            try:
                pages = cluster.dashboard_link if order.choice.dashboard else None
                answer_allowed_only(cluster.scheduler, pages)
                yield LocalWorkers(client, workers, pages)
            finally:
                with suppress(TimeoutError, OSError):  # what hangs is ended with the cluster
                    client.close(timeout=10)
        finally:
            # What hangs now ends with this process; a scheduler that is gone is not waited for long.
            with suppress(TimeoutError, OSError), dask.config.set(CLOSING):
                cluster.close(timeout=30)


def _made(make: Callable[[], LocalCluster]) -> LocalCluster:
    ensure_forks()  # it imports while the scheduler starts
    with config_errors_described(), children_spared_from_ctrl_c():
        return make()


def _encryption(order: Order) -> dict[str, Any]:
    if not order.choice.tls:
        return {"protocol": "tcp://"}
    security = order.credentials.security if order.credentials else Security.temporary()
    return {"protocol": "tls://", "security": security}
