"""An LSF job for each worker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.graphs.clusters.launches.batch_system import BatchSystem, JobRows, seconds_of
from halotile.graphs.kinds import sections


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
    cancels="bkill",
    states=JobRows("bjobs -noheader -o 'jobid stat' {}", r"^{}\s+", "(DONE|EXIT|ZOMBI)"),
    gpus=lambda choice, _: {"directives": [f'-gpu "num={choice.gpus}"']},
    lists="`bqueues` lists its queues",
    account="project",
    walltime=lambda text: str(-(-seconds_of(text) // 60)),
    driver=("-o %J.out",),
    requests=requests,
)
