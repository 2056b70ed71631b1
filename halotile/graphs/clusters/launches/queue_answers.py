"""What batch systems answer when they are asked how their jobs stand."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from halotile.graphs.clusters.launches.base import State

CALL_SECONDS = 30.0
_FORGOTTEN = re.compile(r"unknown job|do(es)? not exist|has finished|no such job", re.IGNORECASE)


def together_then_each(
    ask: Callable[[Sequence[str]], Mapping[str, State]], ids: Sequence[str]
) -> dict[str, State]:
    """How jobs stand in a system that may answer for several, or for none of them once one is over.

    The server has others to answer: it is asked once for all, and again only for those of which that told nothing.
    """
    states = dict(ask(ids))
    for each in ids if len(ids) > 1 else ():
        if each not in states:
            states |= ask([each])
    return states


def known_to(
    row: str, words: Callable[[Sequence[str]], Sequence[str]], ids: Sequence[str]
) -> dict[str, State]:
    """How jobs stand in a system that has a row for each that is not over, and says that it knows none of the others.

    What it says besides, such as that its server cannot be reached, tells nothing of a job.

    Parameters
    ----------
    row : str
        How a row of a job begins, with ``{}`` in the place of its number.
    words : callable
        The command for some ids.
    ids : sequence of str
        The jobs.
    """

    def ask(some: Sequence[str]) -> dict[str, State]:
        done = called(words(some))
        if done is None:
            return {}
        there = [each for each in some if re.search(row.format(number_of(each)), done.stdout, re.MULTILINE)]
        if not there and len(some) == 1 and _FORGOTTEN.search(done.stdout + done.stderr):
            return {some[0]: State(True, "not in the queue any more")}
        return dict.fromkeys(there, State(False, "in the queue"))

    return together_then_each(ask, ids)


def number_of(job: str) -> str:
    """The number of a job, without its server.

    Examples
    --------
    >>> number_of("1234.pbs-server"), number_of("17")
    ('1234', '17')
    """
    found = re.match(r"\d+", job)
    return found[0] if found else job


def called(words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """What a command of a batch system answers; None when it does not."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
