"""Inside an allocation of Slurm's (``sbatch``, ``salloc``): a step for each worker, the scheduler in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
from distributed import Scheduler, SpecCluster
from distributed.security import Security

from halotile.errors import ConfigError
from halotile.graphs.clusters.base import Cluster, Order
from halotile.graphs.clusters.connection.addresses import LOOPBACK, address_of_interface, own_address
from halotile.graphs.clusters.launches.remote_cluster import kept, worker_arguments
from halotile.graphs.clusters.launches.slurm_steps import Slots, Step, look, nodes_of, slots_in
from halotile.graphs.jobs.sections import Cluster as Choice


def check(_: Choice) -> None:
    """Refuse to start outside of an allocation.

    Raises
    ------
    ConfigError
        When this is none.
    """
    if "SLURM_JOB_NODELIST" not in os.environ:
        raise ConfigError(
            "cluster.kind is slurm-alloc, and this is no allocation of Slurm's. Begin one with salloc or sbatch, or write kind: "
            "slurm for a job for each worker."
        )


@contextmanager
def start(order: Order) -> Iterator[Cluster]:
    """Start workers as steps of this allocation.

    Raises
    ------
    ConfigError
        Outside of one.
    ClusterFailed
        When Slurm does not answer.
    """
    check(order.choice)
    nodes = nodes_of(os.environ["SLURM_JOB_NODELIST"])
    interface = order.choice.interface or dask.config.get("jobqueue.slurm.interface", None)
    slots = Slots(slots_in(os.environ, order.workers))

    def hold(security: Security, logs: Path, scheduler: dict[str, Any]) -> SpecCluster:
        arguments = worker_arguments(order, security, interface)
        return SpecCluster(
            scheduler={"cls": Scheduler, "options": scheduler},
            worker={"cls": Step, "options": {"slots": slots, "logs": logs, "arguments": arguments}},
            security=security,
            silence_logs=50,
        )

    with kept(order, _address(interface, nodes), hold, look, lambda: slots.count) as cluster:
        yield cluster


def _address(interface: str | None, nodes: Sequence[str]) -> str:
    """Where the scheduler listens: on loopback, unless there are other machines."""
    if interface:
        return address_of_interface(interface)
    here = os.environ.get("SLURMD_NODENAME")
    return LOOPBACK if [*nodes] == [here] else own_address()
