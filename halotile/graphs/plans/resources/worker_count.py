"""Number of workers where the job leaves it open: as cores and memory permit, or all of an allocation."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from halotile.graphs.amounts import bytes_text, counted
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.machine import chosen, cores_here, slots_here
from halotile.graphs.kinds.sections import AJob, Cluster, Run, parse_bytes
from halotile.graphs.plans.resources.memory import IMPORTS_BYTES, machine_bytes, workers_that_fit
from halotile.tasks.options import Auto

USUAL = 2
"""Number of workers where a cluster gives as many as are asked for."""


class Count(NamedTuple):
    """A number of workers, with its reason.

    Parameters
    ----------
    workers : int
        The number.
    why : str
        The reason in a few words; empty where the number is as written.
    """

    workers: int
    why: str = ""


def workers_of(run: Run, cluster: Cluster, device: str, environment: Mapping[str, str] = os.environ) -> Count:
    """Return the number of workers of a run that computes on ``device``.

    Examples
    --------
    >>> workers_of(Run(workers=3), Cluster(kind="local"), "cpu")
    Count(workers=3, why='')
    >>> workers_of(Run(), Cluster(kind="slurm"), "cpu")
    Count(workers=2, why='as many as are asked for: run.workers')
    """
    traits = cluster_kind_of(cluster, environment).traits
    if traits.has_worker_per_gpu:
        return Count(len(chosen(cluster)), "one for each GPU")
    if isinstance(run.workers, int):
        return Count(run.workers)
    if traits.is_here:
        return (
            _workers_of_this_machine(run, environment)
            if device == "cpu"
            else Count(USUAL, "which share the first GPU")
        )
    if found := traits.count_workers(run, cluster, device, environment):
        return Count(*found)
    return Count(USUAL, "as many as are asked for: run.workers")


def _workers_of_this_machine(run: Run, environment: Mapping[str, str]) -> Count:
    cores, memory = cores_here(environment), machine_bytes()
    room = workers_that_fit(memory, max(parse_bytes(run.memory_per_worker), IMPORTS_BYTES))
    if cores <= room:
        slots = slots_here(environment)
        return Count(cores, slots.why if slots and slots.cores == cores else "one for each core")
    return Count(
        max(1, room),
        f"{bytes_text(memory)} have no room for more of {run.memory_per_worker}; {counted(cores, 'core')}",
    )


class Requested(NamedTuple):
    """The number of workers that a job asked for, and why the plan has another.

    Parameters
    ----------
    workers : int or "auto"
        The number as written.
    why : str
        The reason in a few words; empty where the plan has the number as written.
    """

    workers: int | Auto
    why: str


def with_workers(job: AJob, cluster: Cluster, device: str) -> tuple[AJob, Requested]:
    """Return a job with its number of workers decided, and the number that it asked for."""
    workers, why = workers_of(job.run, cluster, device)
    return replace(job, run=replace(job.run, workers=workers)), Requested(job.run.workers, why)


def no_more_than(
    job: AJob, requested: Requested, shape: tuple[int, ...], unit: tuple[int, ...]
) -> tuple[AJob, Requested]:
    """Return the same without workers that would be idle, where their number was not set by the user.

    ``job``: job with its number of workers decided; ``requested``: number that was asked for; ``shape, unit``: shapes of the image and of the
    smallest block, in pixels.
    """
    blocks = math.prod(-(-n // u) for n, u in zip(shape, unit, strict=True))
    if not requested.why or job.run.count <= blocks:
        return job, requested
    return replace(job, run=replace(job.run, workers=blocks)), Requested(
        requested.workers, "one for each block"
    )


def check_allocation(run: Run, cluster: Cluster, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse workers that may need more memory than their cluster has for them."""
    cluster_kind_of(cluster, environment).traits.check_memory(run, environment)
