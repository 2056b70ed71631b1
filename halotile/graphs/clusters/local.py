"""Worker processes on this machine, on loopback only, encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from halotile.graphs.clusters.base import ClusterTraits, Order, RunningCluster, config_errors_described
from halotile.graphs.clusters.common.security import LOOPBACK

if TYPE_CHECKING:
    from distributed import LocalCluster

TRAITS = ClusterTraits(is_here=True, gpus="shared")
START_SECONDS = 120
CLOSING = {"distributed.comm.timeouts.connect": "2s"}


@contextmanager
def start(order: Order) -> Iterator[RunningCluster]:
    """Start processes of one thread each; they end with the context.

    Traffic is encrypted with certificates made for this run, which never touch the disk: any local user could otherwise
    connect and run code as you.
    """
    from distributed import LocalCluster

    from halotile.graphs.clusters.workers.fork_server import environment_now

    def make() -> LocalCluster:
        environment = environment_now() | ({} if order.gpus else {"CUDA_VISIBLE_DEVICES": ""})
        return LocalCluster(n_workers=order.workers, processes=True, env=environment, **cluster_options(order))

    with running(order, order.workers, make) as cluster:
        yield cluster


def cluster_options(order: Order) -> dict[str, Any]:
    """Options of a Dask cluster of processes on this machine, on CPUs or GPUs."""
    from distributed.security import Security

    from halotile.graphs.clusters.workers.worker import OwnNanny

    encryption: dict[str, Any] = {"protocol": "tcp://"}
    if order.choice.tls:
        security = order.credentials.security if order.credentials else Security.temporary()
        encryption = {"protocol": "tls://", "security": security}
    return {
        "threads_per_worker": 1,
        "worker_class": OwnNanny,
        "host": LOOPBACK,
        "scheduler_kwargs": order.scheduler_options,
        # Also without pages: Dask takes its usual port otherwise.
        "dashboard_address": f"{LOOPBACK}:0",
        "memory_limit": order.memory_bytes,
        "silence_logs": 50,
        **encryption,
    }


@contextmanager
def running(order: Order, workers: int, make: Callable[[], LocalCluster]) -> Iterator[RunningCluster]:
    """A cluster on this machine for the length of the context.

    ``order``: requirements for the cluster; ``workers``: number of workers that start; ``make``: starts them.
    """
    import dask
    from distributed import Client

    from halotile.graphs.clusters.common.security import answer_allowed_only
    from halotile.graphs.clusters.workers.fork_server import children_spared_from_ctrl_c, ensure_forks
    from halotile.graphs.clusters.workers.settings import LOCAL_SETTINGS, keep_off_path, own_servers

    with own_servers(LOCAL_SETTINGS | order.settings):
        ensure_forks()  # it imports while the scheduler starts
        with config_errors_described(), children_spared_from_ctrl_c():
            cluster = make()
        try:
            keep_off_path()
            client = Client(cluster, timeout=START_SECONDS, set_as_default=False)
            try:
                dashboard = cluster.dashboard_link if order.choice.dashboard else None
                answer_allowed_only(cluster.scheduler, dashboard)
                yield RunningCluster(client, workers, dashboard)
            finally:
                with suppress(TimeoutError, OSError):  # what hangs is ended with the cluster
                    client.close(timeout=10)
        finally:
            # What hangs now ends with this process; a scheduler that is gone is not waited for long.
            with suppress(TimeoutError, OSError), dask.config.set(CLOSING):
                cluster.close(timeout=30)
