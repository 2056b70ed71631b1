"""Answers of batch systems about the states of jobs."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import LaunchState

CALL_SECONDS = 30.0


def answer_of(words: Sequence[str], title: str = "Slurm", **options: Any) -> str:
    """Run a command and return its output."""
    done = run_command(words, title, **options)
    if done.returncode != 0:
        raise failure_of(done)
    return done.stdout


def run_command(
    words: Sequence[str], title: str = "Slurm", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command of a batch system."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=CALL_SECONDS, check=False, **options
        )
    except FileNotFoundError as error:
        raise ClusterFailed(
            f"{words[0]} is not installed here: this machine is not part of a {title} cluster."
        ) from error
    except OSError as error:
        raise ClusterFailed(f"{words[0]} does not start ({error}).") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterFailed(
            f"{words[0]} did not answer within {CALL_SECONDS:g} s. Try again later."
        ) from error


def failure_of(done: subprocess.CompletedProcess[str]) -> ClusterFailed:
    """The message of a command that failed, as an error."""
    message = " ".join(done.stderr.split())
    return ClusterFailed(message or f"{done.args[0]} ended with exit code {done.returncode}")


IN_QUEUE = "in the queue"
_FORGOTTEN = re.compile(
    r"unknown job|do(es)? not exist|has finished|no such job|job\b.*\bnot found", re.IGNORECASE
)


@dataclass(frozen=True)
class JobRows:
    """States of jobs in a system that prints a row for each that it knows, and an error or nothing for one that it has forgotten.

    Any other error, such as that its server cannot be reached, is no answer. A system may answer for several jobs, or for none of them
    once one is over. Its server has others to answer: it is asked once for all jobs, and again only for those that this answer left out.
    """

    command: str  # command, with `{}` in the place of the jobs
    row: str  # pattern for the beginning of a job's row, with `{}` in the place of its number
    over: str = "(?!)"  # pattern for what follows in the row of a job that brings no worker any more
    state: str = "{}"  # state of such a job, with `{}` in the place of the first group of the pattern
    between: str = " "  # what the command has between two jobs

    def __call__(self, ids: Sequence[str]) -> dict[str, LaunchState]:
        """States of jobs by their ids; one that is left out is not known to be over."""
        try:
            done = run_command(shlex.split(self.command.format(self.between.join(ids))))
        except ClusterFailed:
            return {}
        states = {}
        for job in ids:
            if found := re.search(self.row.format(number_of(job)), done.stdout, re.MULTILINE):
                ended = re.match(self.over, done.stdout[found.end() :].split("=====")[0], re.MULTILINE)
                states[job] = LaunchState(bool(ended), self.state.format(ended[1]) if ended else IN_QUEUE)
            elif len(ids) > 1:
                states |= self([job])
            elif done.returncode == 0 or _FORGOTTEN.search(done.stdout + done.stderr):
                states[job] = LaunchState(True, "not in the queue any more")
        return states


def number_of(job: str) -> str:
    """The number of a job, without its server.

    Examples
    --------
    >>> number_of("1234.pbs-server"), number_of("17")
    ('1234', '17')
    """
    found = re.match(r"\d+", job)
    return found[0] if found else job
