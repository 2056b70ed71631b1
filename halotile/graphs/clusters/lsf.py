"""An LSF job for each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.clusters.launches.queue_answers import run_command
from halotile.graphs.clusters.launches.walltime import whole_minutes
from halotile.graphs.kinds import sections

_OVER = ("DONE", "EXIT", "ZOMBI")


def states(ids: Sequence[str]) -> dict[str, LaunchState]:
    """States of jobs, from `bjobs`, which knows them for an hour after they ended."""
    done = run_command(["bjobs", "-noheader", "-o", "jobid stat", *ids])
    rows = [line.split() for line in done.stdout.splitlines()] if done else []
    names = {row[0]: row[1] for row in rows if len(row) > 1}
    return {job: LaunchState(names[job] in _OVER, names[job]) for job in ids if job in names}


def requests(choice: sections.Cluster, memory_bytes: int, _: Path) -> Mapping[str, Any]:
    """Memory that is reserved, unless the job asks for it itself: dask-jobqueue writes only the limit at which a job is ended."""
    if any("rusage[" in line for line in SYSTEM.directives_of(choice)):
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
    driver=("-o %J.out",),
    requests=requests,
)
check = SYSTEM.check
start = SYSTEM.start
