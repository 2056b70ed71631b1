"""A Slurm job for each worker."""

from __future__ import annotations

from collections.abc import Sequence

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import LaunchState, with_reason
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.clusters.launches.slurm_jobs import queued

_WAITS = ("PENDING", "CONFIGURING", "RUNNING", "REQUEUED", "SUSPENDED", "STAGE_OUT", "COMPLETING", "RESIZING")


def states(ids: Sequence[str]) -> dict[str, LaunchState]:
    """States of jobs, from `squeue`; one that it has forgotten is over."""
    try:
        jobs = queued(ids, "--states=all")
    except ClusterFailed:
        return {}
    return {job: _state(*jobs.get(job, ("over", ""))) for job in ids}


def _state(name: str, reason: str) -> LaunchState:
    """A state with its reason.

    Examples
    --------
    >>> _state("PENDING", "Resources"), _state("FAILED", "NonZeroExitCode"), _state("RUNNING", "None")
    (LaunchState(over=False, text='PENDING (Resources)'), LaunchState(over=True, text='FAILED (NonZeroExitCode)'), LaunchState(over=False, text='RUNNING'))
    """
    return LaunchState(name not in _WAITS, with_reason(name, reason))


SYSTEM = BatchSystem(
    title="Slurm",
    module="slurm",
    cluster="SLURMCluster",
    submits="sbatch",
    states=states,
    gpus=lambda choice, _: {"directives": [f"--gres=gpu:{choice.gpus}"]},
    lists="`sinfo` lists its queues",
    driver=(),
)
check = SYSTEM.check
start = SYSTEM.start
