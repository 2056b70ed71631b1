"""The commands of Slurm's that a submitted run needs, each as a function."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from halotile.errors import ClusterFailed
from halotile.graphs.pieces.base import with_reason

CALL_SECONDS = 30.0
_GONE = "Invalid job id"


def submit(script: Path) -> str:
    """Submit a script; the number of the job.

    Raises
    ------
    ClusterFailed
        With Slurm's words when it does not take it.
    """
    if not shutil.which("sbatch"):
        raise ClusterFailed(
            "there is no sbatch here: this is no machine of a Slurm cluster. Run the job with `recon-cli run` instead."
        )
    return _called(["sbatch", "--parsable", str(script)]).split(";")[0].strip()


def requeue(job: str) -> None:
    """Put a running job back into the queue: it begins anew later, with the same number.

    Raises
    ------
    ClusterFailed
        Where that is not allowed.
    """
    _called(["scontrol", "requeue", job])


def cancel(job: str) -> None:
    """End a job, whatever it does.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    _called(["scancel", job])


def state_of(job: str) -> str | None:
    """How a job stands, such as ``PENDING (BeginTime)``; None when it is over.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    try:
        said = _called(["squeue", "--noheader", f"--jobs={job}", "--format=%T|%r"]).strip()
    except ClusterFailed as error:
        if _GONE in str(error):
            return None
        raise
    name, _, reason = said.partition("|")
    return with_reason(name, reason) if name else None


def _called(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
    except FileNotFoundError as error:
        raise ClusterFailed(f"there is no {words[0]} here: this is no machine of a Slurm cluster.") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterFailed(
            f"{words[0]} did not answer within {CALL_SECONDS:g} s. Try again later."
        ) from error
    if done.returncode != 0:
        raise ClusterFailed(
            " ".join(done.stderr.split()) or f"{words[0]} ended with exit code {done.returncode}"
        )
    return done.stdout
