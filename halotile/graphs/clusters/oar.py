"""A job of OAR's for each worker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from halotile.graphs import job
from halotile.graphs.pieces.base import State
from halotile.graphs.pieces.batch import BatchSystem, called, jobs
from halotile.graphs.pieces.walltime import clock

_OVER = ("Terminated", "Error")


def states(ids: Sequence[str]) -> dict[str, State]:
    """How jobs stand, from `oarstat`."""
    told = {}
    for each in ids:
        done = called(["oarstat", "--state", "--job", each])
        if done is not None and (found := re.search(r":\s*(\w+)", done.stdout)):
            told[each] = State(found[1] in _OVER, found[1])
    return told


def gpus(choice: job.Cluster, _: int) -> Mapping[str, Any]:
    """GPUs are a resource of a host."""
    return {"resource_spec": f"/nodes=1/gpu={choice.gpus}"}


SYSTEM = BatchSystem(
    title="OAR",
    module="oar",
    cluster="OARCluster",
    states=states,
    gpus=gpus,
    lists="oarnodes",
    walltime=clock,
    account="project",
)

start = partial(jobs, SYSTEM)
"""Submit a job for each worker; they are deleted with the context."""
