"""What Slurm's commands answer."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from halotile.errors import ClusterFailed

CALL_SECONDS = 30.0
_GONE = "Invalid job id"


def answer_of(words: Sequence[str]) -> str:
    """What a command prints.

    Raises
    ------
    ClusterFailed
        With Slurm's words when it fails.
    """
    done = _called(words)
    if done.returncode != 0:
        raise _failure(done)
    return done.stdout


def queued(ids: Sequence[str], *options: str) -> dict[str, tuple[str, str]]:
    """The state and its reason of each job that `squeue` knows; one that Slurm has forgotten is left out.

    Parameters
    ----------
    ids : sequence of str
        The jobs.
    *options : str
        Which of them `squeue` tells of: those that are not over, unless it is told ``--states=all``.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    done = _called(["squeue", "--noheader", f"--jobs={','.join(ids)}", "--format=%A|%T|%r", *options])
    if done.returncode != 0 and _GONE not in done.stderr:
        raise _failure(done)
    rows = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") > 1]
    return {number: (state, reason) for number, state, reason in rows}


def _called(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
    except FileNotFoundError as error:
        raise ClusterFailed(f"there is no {words[0]} here: this is no machine of a Slurm cluster.") from error
    except OSError as error:
        raise ClusterFailed(f"{words[0]} does not start ({error}).") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterFailed(
            f"{words[0]} did not answer within {CALL_SECONDS:g} s. Try again later."
        ) from error


def _failure(done: subprocess.CompletedProcess[str]) -> ClusterFailed:
    said = " ".join(done.stderr.split())
    return ClusterFailed(said or f"{done.args[0]} ended with exit code {done.returncode}")
