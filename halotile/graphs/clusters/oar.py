"""A job of OAR's for each worker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from halotile.graphs.clusters.launches.base import State
from halotile.graphs.clusters.launches.batch_jobs import BatchSystem, jobs
from halotile.graphs.clusters.launches.queue_answers import called, together_then_each
from halotile.graphs.clusters.launches.walltime import clock
from halotile.graphs.jobs import sections

_OVER = ("Terminated", "Error")


def states(ids: Sequence[str]) -> dict[str, State]:
    """How jobs stand, from `oarstat`."""
    done = called(["oarstat", "--state", *(word for each in ids for word in ("--job", each))])
    rows = re.findall(r"^\s*(\d+)\s*:\s*(\w+)", done.stdout, re.MULTILINE) if done else []
    return {number: State(name in _OVER, name) for number, name in rows if number in ids}


def gpus(choice: sections.Cluster, _: int) -> Mapping[str, Any]:
    """GPUs are a resource of a host, and cores one of a GPU: whoever asks for fewer than all of them shares it with other jobs."""
    return {"resource_spec": f"/nodes=1/gpu={choice.gpus}"}


def asks(_: sections.Cluster, __: int, logs: Path) -> Mapping[str, Any]:
    """Where a job prints to, which is the folder that it is submitted from else."""
    return {"directives": [f"-O {logs}/halotile-%jobid%.out", f"-E {logs}/halotile-%jobid%.err"]}


SYSTEM = BatchSystem(
    title="OAR",
    module="oar",
    cluster="OARCluster",
    submits="oarsub",
    states=partial(together_then_each, states),
    gpus=gpus,
    lists="oarnodes",
    walltime=clock,
    account="project",
    asks=asks,
)

check = SYSTEM.check
start = partial(jobs, SYSTEM)
"""Submit a job for each worker; they are deleted with the context."""
