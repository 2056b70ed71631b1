"""A job of LSF's for each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from halotile.graphs.clusters.launches.base import State
from halotile.graphs.clusters.launches.batch_jobs import BatchSystem, jobs, written
from halotile.graphs.clusters.launches.queue_answers import called
from halotile.graphs.clusters.launches.walltime import whole_minutes
from halotile.graphs.jobs import sections

_OVER = ("DONE", "EXIT", "ZOMBI")


def states(ids: Sequence[str]) -> dict[str, State]:
    """How jobs stand, from `bjobs`, which knows them for an hour after they ended."""
    done = called(["bjobs", "-noheader", "-o", "jobid stat", *ids])
    told = (
        dict(line.split()[:2] for line in done.stdout.splitlines() if len(line.split()) > 1) if done else {}
    )
    return {each: State(told[each] in _OVER, told[each]) for each in ids if each in told}


def asks(choice: sections.Cluster, memory_bytes: int, _: Path) -> Mapping[str, Any]:
    """Memory that is set aside, unless the job says so itself: what dask-jobqueue writes is only where a job is ended."""
    if any("rusage[" in line for line in written("lsf", choice)):
        return {}
    return {"directives": [f'-R "rusage[mem={-(-memory_bytes // 2**20)}MB]"']}


SYSTEM = BatchSystem(
    title="LSF",
    module="lsf",
    cluster="LSFCluster",
    submits="bsub",
    states=states,
    gpus=lambda choice, _: {"directives": [f'-gpu "num={choice.gpus}"']},
    lists="bqueues",
    account="project",
    walltime=whole_minutes,
    asks=asks,
)

check = SYSTEM.check
start = partial(jobs, SYSTEM)
"""Submit a job for each worker; they are killed with the context."""
