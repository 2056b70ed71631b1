"""Reports of slow steps to a user who waits for them."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from halotile.graphs.clusters.common.machine import SYSTEMS

SECONDS = 2.0

# Time that a file system may take to release the locks of a machine that was lost: NFSv4 and GPFS have leases of
# minutes.
LEASE_SECONDS = 600.0
BATCH_JOB = tuple(system.job[-1] for system in SYSTEMS.values())

Report = Callable[[str], object]  # takes a line for the user


def no_report(_: str) -> None:
    """Ignore the line."""


def log_line(text: str) -> None:
    """Log a line, for the log of a batch job and for a person who waits alike."""
    logging.getLogger("halotile").warning(text)


def patience_seconds(usual: float, environment: Mapping[str, str] = os.environ) -> float:
    """Time to wait for a lock: minutes in a batch job, which nobody would start again, and no longer than usual elsewhere.

    >>> patience_seconds(0.5, {})
    0.5
    """
    unattended = any(name in environment for name in BATCH_JOB) and not sys.stderr.isatty()
    return max(usual, LEASE_SECONDS) if unattended else usual


@contextmanager
def report_if_slow(report: Report, what: str, seconds: float | None = None) -> Iterator[None]:
    """Report the step in this context if it takes longer than ``seconds``, by default :data:`SECONDS`.

    >>> with report_if_slow(print, "adding numbers"):
    ...     assert 1 + 1 == 2
    """
    timer = threading.Timer(SECONDS if seconds is None else seconds, report, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
