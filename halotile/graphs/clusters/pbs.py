"""A job of PBS's for each worker."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from halotile.graphs.clusters.launches.batch_jobs import BatchSystem, jobs
from halotile.graphs.clusters.launches.queue_answers import known_to
from halotile.graphs.clusters.launches.walltime import clock
from halotile.graphs.jobs import sections


def gpus(choice: sections.Cluster, memory_bytes: int) -> Mapping[str, Any]:
    """GPUs are a part of what a job selects."""
    mebibytes = -(-memory_bytes // 2**20)
    return {"resource_spec": f"select=1:ncpus={choice.cores}:mem={mebibytes}mb:ngpus={choice.gpus}"}


SYSTEM = BatchSystem(
    title="PBS",
    module="pbs",
    cluster="PBSCluster",
    submits="qsub",
    states=partial(known_to, r"^{}\b", lambda ids: ["qstat", *ids]),
    gpus=gpus,
    lists="qstat -Q",
    walltime=clock,
)

check = SYSTEM.check
start = partial(jobs, SYSTEM)
"""Submit a job for each worker; they are deleted with the context."""
