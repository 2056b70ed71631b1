"""A PBS job for each worker."""

from collections.abc import Mapping
from typing import Any

from halotile.graphs.clusters.launches.batch_system import BatchSystem, JobRows, clock
from halotile.graphs.kinds import sections


def gpus(choice: sections.Cluster, memory_bytes: int) -> Mapping[str, Any]:
    """GPUs as a part of the resources that a job selects."""
    mebibytes = -(-memory_bytes // 2**20)
    return {"resource_spec": f"select=1:ncpus={choice.cores}:mem={mebibytes}mb:ngpus={choice.gpus}"}


SYSTEM = BatchSystem(
    title="PBS",
    module="pbs",
    cluster="PBSCluster",
    submits="qsub",
    cancels="qdel",
    # Torque keeps the rows of jobs that are over for a while.
    states=JobRows("qstat {}", r"^{}\b", r".*\s([CFX])\s+\S+\s*$", "over ({})"),
    gpus=gpus,
    lists="`qstat -Q` lists its queues",
    walltime=clock,
    driver=(),
)
