"""Waiting for the workers of a cluster, which in a batch system may take hours."""

from __future__ import annotations

import time
from collections.abc import Callable

from halotile.graphs.amounts import counted
from halotile.graphs.clusters.base import RunningCluster

POLL_SECONDS = 0.2
QUIET_SECONDS = 3.0
"""A shorter wait is not reported."""


def await_workers(
    cluster: RunningCluster,
    report: Callable[[str], None],
    between: Callable[[], None] = lambda: None,
    wanted: int = 1,
) -> None:
    """Wait until there is a worker, or so many; report whenever the reason changes for which there are fewer.

    Parameters
    ----------
    cluster : RunningCluster
        A running cluster.
    report : callable
        Takes a line for the user.
    between : callable
        Called several times a second; what it raises ends the wait.
    wanted : int
        Number of workers to wait for.

    Raises
    ------
    ClusterFailed
        When there will not be as many.
    """
    began, reported = time.monotonic(), None
    first = f"the first of {counted(cluster.workers, 'worker')}"
    while (missing := cluster.missing(wanted)) is not None:
        if missing != reported and time.monotonic() - began > QUIET_SECONDS:
            report(f"waiting for {first if wanted == 1 else f'{wanted} workers'}: {missing}")
            reported = missing
        cluster.check(wanted)
        between()
        time.sleep(POLL_SECONDS)
