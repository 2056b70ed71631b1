"""An HTCondor job for each worker."""

from __future__ import annotations

import re
from collections.abc import Sequence

from halotile.graphs.clusters.base import ClusterTraits
from halotile.graphs.clusters.launches.base import LaunchState, with_reason
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.clusters.launches.queue_answers import run_command

TRAITS = ClusterTraits(ignored=("queue", "account", "walltime"))
_NAMES = {
    "1": "idle",
    "2": "running",
    "3": "removed",
    "4": "completed",
    "5": "held",
    "6": "transferring",
    "7": "suspended",
}
_OVER = ("3", "4", "5")


def states(ids: Sequence[str]) -> dict[str, LaunchState]:
    """States of jobs, from `condor_q`; one that has left the queue is over, and one on hold waits for a person."""
    done = run_command(["condor_q", *ids, "-af:j", "JobStatus", "HoldReason"])
    if done is None or done.returncode != 0:
        return {}
    rows = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    return {job: _state(rows.get(job, "4 undefined")) for job in ids}


def _state(text: str) -> LaunchState:
    """A state with its reason.

    Examples
    --------
    >>> _state("1 undefined"), _state("5 Error from slot1: no such file")
    (LaunchState(over=False, text='idle'), LaunchState(over=True, text='held (Error from slot1: no such file)'))
    """
    number, _, reason = text.partition(" ")
    return LaunchState(number in _OVER, with_reason(_NAMES.get(number, number), reason))


SYSTEM = BatchSystem(
    title="HTCondor",
    module="htcondor",
    cluster="HTCondorCluster",
    submits="condor_submit",
    states=states,
    gpus=lambda choice, _: {"directives": [f"request_gpus = {choice.gpus}"]},
    lists="condor_status",
    directives=lambda lines: dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines),
    prologue=lambda line: line.replace("$(", "$(DOLLAR)("),  # HTCondor would expand it as a macro of its own
    ignored=TRAITS.ignored,
    usual={"disk": "2GiB"},
)
check = SYSTEM.check
start = SYSTEM.start
