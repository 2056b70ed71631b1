"""Answers of batch systems about the states of jobs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from halotile.graphs.clusters.launches.base import LaunchState

CALL_SECONDS = 30.0
_ERROR = re.compile(r"^error reason\s+\d+:\s*(.*)$", re.MULTILINE)
_FORGOTTEN = re.compile(r"unknown job|do(es)? not exist|has finished|no such job", re.IGNORECASE)


def ask_together_then_singly(
    ask: Callable[[Sequence[str]], Mapping[str, LaunchState]], ids: Sequence[str]
) -> dict[str, LaunchState]:
    """States of jobs in a system that may answer for several, or for none of them once one is over.

    The server has others to answer: it is asked once for all jobs, and again only for those that this answer left out.
    """
    states = dict(ask(ids))
    for job in ids if len(ids) > 1 else ():
        if job not in states:
            states |= ask([job])
    return states


def states_by_row(
    row: str, command: Callable[[Sequence[str]], Sequence[str]], ids: Sequence[str]
) -> dict[str, LaunchState]:
    """States of jobs in a system that prints a row for each that is not over, and an error for a job that it does not know.

    Any other error, such as that its server cannot be reached, is no answer.

    Parameters
    ----------
    row : str
        Pattern for the beginning of a job's row, with ``{}`` in the place of its number.
    command : callable
        The command for some ids.
    ids : sequence of str
        The jobs.
    """

    def ask(some: Sequence[str]) -> dict[str, LaunchState]:
        done = run_command(command(some))
        if done is None:
            return {}
        found = {job: re.search(row.format(number_of(job)), done.stdout, re.MULTILINE) for job in some}
        listed = {job: done.stdout[match.end() :] for job, match in found.items() if match}
        if not listed and len(some) == 1 and _FORGOTTEN.search(done.stdout + done.stderr):
            return {some[0]: LaunchState(True, "not in the queue any more")}
        return {job: _listed(text.split("=====")[0]) for job, text in listed.items()}

    return ask_together_then_singly(ask, ids)


def _listed(text: str) -> LaunchState:
    """The state of a job that is listed: SGE keeps one in error until a person clears it."""
    error = _ERROR.search(text)
    return LaunchState(True, f"Eqw ({error[1]})") if error else LaunchState(False, "in the queue")


def number_of(job: str) -> str:
    """The number of a job, without its server.

    Examples
    --------
    >>> number_of("1234.pbs-server"), number_of("17")
    ('1234', '17')
    """
    found = re.match(r"\d+", job)
    return found[0] if found else job


def run_command(words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command of a batch system; None when it does not start or does not end in time."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
