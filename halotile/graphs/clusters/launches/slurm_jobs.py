"""Slurm commands for submitted runs, each as a function, and states of jobs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import with_reason
from halotile.graphs.clusters.launches.queue_answers import answer_of, failure_of, run_command

_GONE = "Invalid job id"


def submit(script: Path) -> str:
    """Submit a script and return the number of the job."""
    if not shutil.which("sbatch"):
        raise ClusterFailed(
            "sbatch is not installed here: this machine is not part of a Slurm cluster. Write cluster.kind: pbs, sge or lsf, "
            "or run the job with `recon-cli run`."
        )
    return answer_of(["sbatch", "--parsable", str(script)]).split(";")[0].strip()


def requeue(job: str) -> None:
    """Put a running job back into the queue: it begins anew later, with the same number."""
    answer_of(["scontrol", "requeue", job])


def cancel(job: str) -> None:
    """End a job in any state."""
    answer_of(["scancel", job])


def state_of(job: str) -> str | None:
    """State of a job, such as ``PENDING (BeginTime)``; None when it is over."""
    state = queued([job]).get(job)
    return with_reason(*state) if state else None


def queued(ids: Sequence[str], *options: str) -> dict[str, tuple[str, str]]:
    """The state and its reason of each job that `squeue` lists; one that Slurm has forgotten is left out.

    Parameters
    ----------
    ids : sequence of str
        The jobs.
    *options : str
        Options of `squeue`, which lists jobs that are not over, unless it has ``--states=all``.
    """
    done = run_command(["squeue", "--noheader", f"--jobs={','.join(ids)}", "--format=%A|%T|%r", *options])
    if done.returncode != 0 and _GONE not in done.stderr:
        raise failure_of(done)
    rows = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") > 1]
    return {number: (state, reason) for number, state, reason in rows}
