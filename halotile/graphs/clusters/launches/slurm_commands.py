"""Slurm commands and their answers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from halotile.errors import ClusterFailed

CALL_SECONDS = 30.0
_GONE = "Invalid job id"


def answer_of(words: Sequence[str]) -> str:
    """Run a command and return its output.

    Raises
    ------
    ClusterFailed
        With Slurm's message when it fails.
    """
    done = _run(words)
    if done.returncode != 0:
        raise _failure(done)
    return done.stdout


def queued(ids: Sequence[str], *options: str) -> dict[str, tuple[str, str]]:
    """The state and its reason of each job that `squeue` lists; one that Slurm has forgotten is left out.

    Parameters
    ----------
    ids : sequence of str
        The jobs.
    *options : str
        Options of `squeue`, which lists jobs that are not over, unless it has ``--states=all``.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    done = _run(["squeue", "--noheader", f"--jobs={','.join(ids)}", "--format=%A|%T|%r", *options])
    if done.returncode != 0 and _GONE not in done.stderr:
        raise _failure(done)
    rows = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") > 1]
    return {number: (state, reason) for number, state, reason in rows}


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
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
    message = " ".join(done.stderr.split())
    return ClusterFailed(message or f"{done.args[0]} ended with exit code {done.returncode}")
