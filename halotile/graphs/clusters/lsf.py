"""A job of LSF's for each worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from halotile.graphs.clusters.base import Cluster, Order
from halotile.graphs.pieces.base import State
from halotile.graphs.pieces.batch import BatchSystem, called, jobs

_OVER = ("DONE", "EXIT", "ZOMBI")


def states(ids: Sequence[str]) -> dict[str, State]:
    """How jobs stand, from `bjobs`, which knows them for an hour after they ended."""
    done = called(["bjobs", "-noheader", "-o", "jobid stat", *ids])
    told = (
        dict(line.split()[:2] for line in done.stdout.splitlines() if len(line.split()) > 1) if done else {}
    )
    return {each: State(told[each] in _OVER, told[each]) for each in ids if each in told}


def minutes(walltime: str) -> str:
    """A walltime as LSF reads it: hours and minutes.

    Examples
    --------
    >>> minutes("04:00:00"), minutes("1-12:30:00"), minutes("04:30"), minutes("90"), minutes("00:00:30")
    ('4:00', '36:30', '4:30', '90', '0:01')
    """
    days, _, clock = walltime.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if len(parts) == 1 and not days:
        return walltime
    hours, mins, seconds = [*parts, 0, 0][:3]
    whole = (int(days or 0) * 24 + hours) * 60 + mins + (seconds > 0)
    return f"{whole // 60}:{whole % 60:02d}"


SYSTEM = BatchSystem(
    title="LSF",
    module="lsf",
    cluster="LSFCluster",
    states=states,
    gpus=lambda choice, _: {"directives": [f'-gpu "num={choice.gpus}"']},
    lists="bqueues",
    account="project",
    walltime=minutes,
)


@contextmanager
def start(order: Order) -> Iterator[Cluster]:
    """Submit a job for each worker; they are killed with the context."""
    with jobs(SYSTEM, order) as cluster:
        yield cluster
