"""An OAR job for each worker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.graphs.clusters.launches.batch_system import BatchSystem, JobRows, clock
from halotile.graphs.kinds import sections


def gpus(choice: sections.Cluster, _: int) -> Mapping[str, Any]:
    """GPUs, which are a resource of a host, as cores are one of a GPU: a job that asks for fewer than all cores shares the GPU."""
    return {"resource_spec": f"/nodes=1/gpu={choice.gpus}"}


def requests(_: sections.Cluster, __: int, logs: Path) -> Mapping[str, Any]:
    """The files that a job prints to, which would otherwise be in the folder that it is submitted from."""
    return {"directives": [f"-O {logs}/halotile-%jobid%.out", f"-E {logs}/halotile-%jobid%.err"]}


SYSTEM = BatchSystem(
    title="OAR",
    module="oar",
    cluster="OARCluster",
    submits="oarsub",
    cancels="oardel",
    states=JobRows("oarstat --state --job {}", r"^\s*{}\s*:\s*", "(Terminated|Error)", between=" --job "),
    gpus=gpus,
    lists="`oarnodes` lists its nodes",
    walltime=clock,
    account="project",
    requests=requests,
)
