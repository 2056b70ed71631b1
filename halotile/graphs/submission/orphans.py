"""Workers whose driver's node is lost: nobody else is left to end their batch job, which Slurm holds on the other nodes."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.slurm_commands import answer_of
from halotile.graphs.clusters.launches.slurm_steps import nodes_of
from halotile.graphs.submission.slurm import cancel, requeue

CONNECT_SECONDS = 5.0
ENDED_PAUSES = (2.0,) * 5
"""Seconds between looks where the machine of the driver answers, and the driver does not: it may just have ended."""
LOST_PAUSES = (10.0,) * 60
"""The same where nothing answers there: Slurm takes minutes to see that a node is lost."""
ATTENDED = "HALOTILE_ATTENDED"
"""Set for the workers of a submitted run: only its job is ours to put back."""


def put_back(scheduler: str, environment: Mapping[str, str] = os.environ) -> None:
    """Put the batch job of this worker back into the queue where the node of its driver is lost; where it may not be, end it.

    Parameters
    ----------
    scheduler : str
        Its address: where it answers still, nothing is lost, and Slurm is not asked.
    environment : mapping
        Which job it is.
    """
    job = environment.get("SLURM_JOB_ID", "") if ATTENDED in environment else ""
    for pause in (0.0, *_pauses(scheduler)) if job else ():
        time.sleep(pause)
        if _answers(scheduler):
            return
        with suppress(ClusterFailed):  # Slurm is slow, or another worker was faster: the next look tells
            told = answer_of(["scontrol", "show", "job", job])
            if _is_orphan(told):
                # That a requeue fails does not say that it is not allowed.
                (cancel if re.search(r"\bRequeue=0\b", told) else requeue)(job)
                return


def _pauses(address: str) -> tuple[float, ...]:
    """How long to wait before each further look."""
    try:
        _connect(address)
    except ConnectionRefusedError:
        return ENDED_PAUSES
    except OSError:
        return LOST_PAUSES
    return ()


def _answers(address: str) -> bool:
    with suppress(OSError):
        _connect(address)
        return True
    return False


def _connect(address: str) -> None:
    place = urlsplit(address)
    socket.create_connection((place.hostname, place.port), timeout=CONNECT_SECONDS).close()


def _is_orphan(text: str) -> bool:
    """Whether a job that Slurm tells of has lost the node of its script.

    Examples
    --------
    >>> _is_orphan("JobState=RUNNING Reason=None")
    False
    """
    told = dict(re.findall(r"^ *(BatchHost|NodeList|JobState)=(\S+)", text, re.MULTILINE))
    return (
        told.get("JobState") == "RUNNING"
        and "BatchHost" in told
        and told["BatchHost"] not in nodes_of(told.get("NodeList", ""))
    )
