"""Answers of batch systems about the states of jobs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.commands import run_command

IN_QUEUE = "in the queue"
_FORGOTTEN = re.compile(
    r"unknown job|do(es)? not exist|has finished|no such job|job\b.*\bnot found", re.IGNORECASE
)


@dataclass(frozen=True)
class JobRows:
    """States of jobs in a system that prints a row for each that it knows, and an error or nothing for one that it has forgotten.

    Any other error, such as that its server cannot be reached, is no answer. A system may answer for several jobs, or for none of them
    once one is over. Its server has others to answer: it is asked once for all jobs, and again only for those that this answer left out.

    Parameters
    ----------
    command : str
        The command, with ``{}`` in the place of the jobs.
    row : str
        Pattern for the beginning of a job's row, with ``{}`` in the place of its number.
    over : str
        Pattern for what follows in the row of a job that brings no worker any more.
    state : str
        The state of such a job, with ``{}`` in the place of the first group of the pattern.
    between : str
        What the command has between two jobs.
    """

    command: str
    row: str
    over: str = "(?!)"
    state: str = "{}"
    between: str = " "

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
