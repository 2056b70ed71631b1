"""A job of SGE's for each worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from halotile.graphs.clusters.base import Cluster, Order
from halotile.graphs.pieces.batch import BatchSystem, jobs, known_to
from halotile.graphs.pieces.walltime import clock

SYSTEM = BatchSystem(
    title="SGE",
    module="sge",
    cluster="SGECluster",
    states=partial(known_to, ["qstat", "-j"]),
    gpus=lambda choice, _: {"directives": [f"-l gpu={choice.gpus}"]},
    lists="qconf -sql",
    walltime=clock,
    account="project",
)


@contextmanager
def start(order: Order) -> Iterator[Cluster]:
    """Submit a job for each worker; they are deleted with the context."""
    with jobs(SYSTEM, order) as cluster:
        yield cluster
