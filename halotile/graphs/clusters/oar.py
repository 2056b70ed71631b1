"""An OAR job for each worker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from halotile.graphs.clusters.base import ClusterTraits
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.clusters.launches.queue_answers import ask_together_then_singly, run_command
from halotile.graphs.clusters.launches.walltime import clock
from halotile.graphs.kinds import sections

_OVER = ("Terminated", "Error")


def states(ids: Sequence[str]) -> dict[str, LaunchState]:
    """States of jobs, from `oarstat`."""
    done = run_command(["oarstat", "--state", *(word for job in ids for word in ("--job", job))])
    rows = re.findall(r"^\s*(\d+)\s*:\s*(\w+)", done.stdout, re.MULTILINE) if done else []
    return {number: LaunchState(name in _OVER, name) for number, name in rows if number in ids}


def gpus(choice: sections.Cluster, _: int) -> Mapping[str, Any]:
    """GPUs, which are a resource of a host, as cores are one of a GPU: a job that asks for fewer than all cores shares the GPU."""
    return {"resource_spec": f"/nodes=1/gpu={choice.gpus}"}


def requests(_: sections.Cluster, __: int, logs: Path) -> Mapping[str, Any]:
    """The files that a job prints to, which would otherwise be in the folder that it is submitted from."""
    return {"directives": [f"-O {logs}/halotile-%jobid%.out", f"-E {logs}/halotile-%jobid%.err"]}


def notes(cluster: sections.Cluster) -> tuple[str, ...]:
    """A note about cores that come with a GPU and are not requested besides."""
    if not cluster.gpus or cluster.cores <= 1 or "resource_spec" in cluster.options:
        return ()
    return (
        f"OAR gives a GPU with the cores that its site ties to it, so cluster.cores: {cluster.cores} is not asked for; "
        "cluster.options: {resource_spec: ...} asks for something else",
    )


TRAITS = ClusterTraits(notes=notes)
SYSTEM = BatchSystem(
    title="OAR",
    module="oar",
    cluster="OARCluster",
    submits="oarsub",
    states=partial(ask_together_then_singly, states),
    gpus=gpus,
    lists="oarnodes",
    walltime=clock,
    account="project",
    requests=requests,
)
check = SYSTEM.check
start = SYSTEM.start
