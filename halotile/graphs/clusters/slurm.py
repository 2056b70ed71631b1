"""A job of Slurm's for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import State, with_reason
from halotile.graphs.clusters.launches.batch_jobs import BatchSystem, jobs
from halotile.graphs.clusters.launches.slurm_commands import queued

_WAITS = ("PENDING", "CONFIGURING", "RUNNING", "REQUEUED", "SUSPENDED", "STAGE_OUT", "COMPLETING", "RESIZING")


def states(ids: Sequence[str]) -> dict[str, State]:
    """How jobs stand, from `squeue`; one that it has forgotten is over."""
    try:
        told = queued(ids, "--states=all")
    except ClusterFailed:
        return {}
    return {each: _state(*told.get(each, ("over", ""))) for each in ids}


def _state(name: str, reason: str) -> State:
    """A state with its reason.

    Examples
    --------
    >>> _state("PENDING", "Resources"), _state("FAILED", "NonZeroExitCode"), _state("RUNNING", "None")
    (State(over=False, words='PENDING (Resources)'), State(over=True, words='FAILED (NonZeroExitCode)'), State(over=False, words='RUNNING'))
    """
    return State(name not in _WAITS, with_reason(name, reason))


SYSTEM = BatchSystem(
    title="Slurm",
    module="slurm",
    cluster="SLURMCluster",
    submits="sbatch",
    states=states,
    gpus=lambda choice, _: {"directives": [f"--gres=gpu:{choice.gpus}"]},
    lists="sinfo",
)

check = SYSTEM.check
start = partial(jobs, SYSTEM)
"""Submit a job for each worker; they are cancelled with the context."""
