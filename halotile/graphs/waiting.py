"""What is being done, told to whoever waits for it; what is done at once is not worth a line."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

SECONDS = 2.0

LEASE_SECONDS = 600.0
"""How long a file system may take to let go of the locks of a machine that was lost: NFSv4 and GPFS have leases of minutes."""
BATCH_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OAR_JOB_ID", "SGE_TASK_ID", "_CONDOR_JOB_AD")
"""Set inside a job of a batch system."""

Report = Callable[[str], object]
"""Passes a line on."""


def no_report(_: str) -> None:
    """Nobody waits."""


def log_line(text: str) -> None:
    """Put a line into the log of a batch job; a person who waits reads it as well."""
    logging.getLogger("halotile").warning(text)


def patience_seconds(usual: float, environment: Mapping[str, str] = os.environ) -> float:
    """How long a lock is waited for: minutes in a batch job, which nobody would start again, and no longer than usual elsewhere.

    Examples
    --------
    >>> patience_seconds(0.5, {})
    0.5
    """
    unattended = any(name in environment for name in BATCH_JOB) and not sys.stderr.isatty()
    return max(usual, LEASE_SECONDS) if unattended else usual


@contextmanager
def report_if_slow(report: Report, what: str, seconds: float | None = None) -> Iterator[None]:
    """Say what is being done if it takes longer than so many ``seconds``, or :data:`SECONDS`.

    Examples
    --------
    >>> with told_if_slow(print, "adding numbers"):
    ...     assert 1 + 1 == 2
    """
    timer = threading.Timer(SECONDS if seconds is None else seconds, report, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
