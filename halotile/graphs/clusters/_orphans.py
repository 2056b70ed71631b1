"""Workers whose driver's node is lost: nobody else is left to end their batch job, which Slurm keeps on the other nodes."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.queue_answers import answer_of
from halotile.graphs.clusters.launches.slurm_allocation import nodes_of
from halotile.graphs.clusters.launches.slurm_jobs import cancel, requeue

CONNECT_SECONDS = 5.0
ENDED_PAUSES = (2.0,) * 5
"""Seconds between checks where the machine of the driver answers, and the driver does not: it may just have ended."""
LOST_PAUSES = (10.0,) * 60
"""Seconds between checks where the machine does not answer: Slurm takes minutes to notice that a node is lost."""
ATTENDED = "HALOTILE_ATTENDED"
"""Set for the workers of a submitted run: only its job may be requeued from here."""


def requeue_orphan(scheduler: str, environment: Mapping[str, str] = os.environ) -> None:
    """Requeue the batch job of this worker where the node of its driver is lost; cancel it where jobs may not be requeued.

    ``scheduler``: its address: while it answers, nothing is lost, and Slurm is not asked; ``environment``: variables with the job's number.
    """
    job = environment.get("SLURM_JOB_ID", "") if ATTENDED in environment else ""
    for pause in (0.0, *_pauses(scheduler)) if job else ():
        time.sleep(pause)
        if _connection_error(scheduler) is None:
            return
        with suppress(ClusterFailed):  # Slurm is slow, or another worker was faster: the next check decides
            description = answer_of(["scontrol", "show", "job", job])
            if _is_orphan(description):
                # The failure of a requeue does not mean that it is not allowed.
                (cancel if re.search(r"\bRequeue=0\b", description) else requeue)(job)
                return


def _pauses(address: str) -> tuple[float, ...]:
    """Seconds to wait before each further check."""
    error = _connection_error(address)
    if error is None:
        return ()
    return ENDED_PAUSES if isinstance(error, ConnectionRefusedError) else LOST_PAUSES


def _connection_error(address: str) -> OSError | None:
    """Connect to an address and return the error, if there is one."""
    place = urlsplit(address)
    try:
        socket.create_connection((place.hostname, place.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None


def _is_orphan(description: str) -> bool:
    """Return True where a job, by Slurm's description, has lost the node of its script.

    Examples
    --------
    >>> _is_orphan("JobState=RUNNING Reason=None")
    False
    """
    job = dict(re.findall(r"^ *(BatchHost|NodeList|JobState)=(\S+)", description, re.MULTILINE))
    return (
        job.get("JobState") == "RUNNING"
        and "BatchHost" in job
        and job["BatchHost"] not in nodes_of(job.get("NodeList", ""))
    )
