"""Waiting for the first worker of a cluster, which in a batch system may take hours."""

from __future__ import annotations

import time
from collections.abc import Callable

from halotile.graphs.amounts import counted
from halotile.graphs.clusters.base import RunningCluster

POLL_SECONDS = 0.2
QUIET_SECONDS = 3.0
"""A shorter wait is not reported."""


def await_workers(
    cluster: RunningCluster, report: Callable[[str], None], between: Callable[[], None] = lambda: None
) -> None:
    """Wait until there is a worker; report whenever the reason changes for which there is none.

    Parameters
    ----------
    cluster : RunningCluster
        A running cluster.
    report : callable
        Takes a line for the user.
    between : callable
        Called several times a second; what it raises ends the wait.

    Raises
    ------
    ClusterFailed
        When there will be none.
    """
    began, reported = time.monotonic(), None
    while (missing := cluster.missing()) is not None:
        if missing != reported and time.monotonic() - began > QUIET_SECONDS:
            report(f"waiting for the first of {counted(cluster.workers, 'worker')}: {missing}")
            reported = missing
        cluster.check()
        between()
        time.sleep(POLL_SECONDS)
