"""Slurm commands for submitted runs, each as a function."""

from __future__ import annotations

import shutil
from pathlib import Path

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import with_reason
from halotile.graphs.clusters.launches.slurm_commands import answer_of, queued


def submit(script: Path) -> str:
    """Submit a script and return the number of the job.

    Raises
    ------
    ClusterFailed
        With Slurm's message when it refuses it.
    """
    if not shutil.which("sbatch"):
        raise ClusterFailed(
            "there is no sbatch here: this is no machine of a Slurm cluster. Run the job with `recon-cli run` instead."
        )
    return answer_of(["sbatch", "--parsable", str(script)]).split(";")[0].strip()


def requeue(job: str) -> None:
    """Put a running job back into the queue: it begins anew later, with the same number.

    Raises
    ------
    ClusterFailed
        Where that is not allowed.
    """
    answer_of(["scontrol", "requeue", job])


def cancel(job: str) -> None:
    """End a job in any state.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    answer_of(["scancel", job])


def state_of(job: str) -> str | None:
    """State of a job, such as ``PENDING (BeginTime)``; None when it is over.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    state = queued([job]).get(job)
    return with_reason(*state) if state else None
