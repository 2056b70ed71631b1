"""How many workers a run has where the job leaves that open: what the cores and the memory here allow, or all of an allocation."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from halotile.graphs.amounts import bytes_text, counted
from halotile.graphs.clusters.detection.batch_cores import slots_here
from halotile.graphs.clusters.detection.cluster_kind import kind_of
from halotile.graphs.clusters.detection.cores import cores_here
from halotile.graphs.jobs.sections import Auto, Cluster, Job, Run, parse_bytes
from halotile.graphs.plans.devices import chosen
from halotile.graphs.plans.memory import IMPORTS_BYTES, machine_bytes, workers_that_fit

USUAL = 2
"""Where others give as many as are asked for."""
AJob = TypeVar("AJob", bound=Job)


class Count(NamedTuple):
    """A number of workers.

    Parameters
    ----------
    workers : int
        How many.
    why : str
        In a few words; nothing where it is as written.
    """

    workers: int
    why: str = ""


def workers_of(run: Run, cluster: Cluster, device: str, environment: Mapping[str, str] = os.environ) -> Count:
    """The number of workers of a run that computes on ``device``.

    Raises
    ------
    ConfigError
        Where a GPU is asked for that is not there.
    ClusterFailed
        In an allocation, when Slurm does not answer.

    Examples
    --------
    >>> workers_of(Run(workers=3), Cluster(kind="local"), "cpu")
    Count(workers=3, why='')
    >>> workers_of(Run(), Cluster(kind="slurm"), "cpu")
    Count(workers=2, why='as many as are asked for: run.workers')
    """
    traits = kind_of(cluster, environment).traits
    if traits.has_worker_per_gpu:
        return Count(len(chosen(cluster)), "one for each GPU")
    if isinstance(run.workers, int):
        return Count(run.workers)
    if traits.is_here:
        return (
            _of_this_machine(run, environment)
            if device == "cpu"
            else Count(USUAL, "which share the first GPU")
        )
    if found := traits.count_workers(run, cluster, device, environment):
        return Count(*found)
    return Count(USUAL, "as many as are asked for: run.workers")


def _of_this_machine(run: Run, environment: Mapping[str, str]) -> Count:
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
    """The number of workers that a job has asked for, and why it has another.

    Parameters
    ----------
    workers : int or "auto"
        As it is written.
    why : str
        In a few words; nothing where it has what is written.
    """

    workers: int | Auto
    why: str


def with_workers(job: AJob, cluster: Cluster, device: str) -> tuple[AJob, Requested]:
    """A job with its number of workers decided, and what it was before."""
    workers, why = workers_of(job.run, cluster, device)
    return replace(job, run=replace(job.run, workers=workers)), Requested(job.run.workers, why)


def no_more_than(
    job: AJob, requested: Requested, shape: tuple[int, ...], unit: tuple[int, ...]
) -> tuple[AJob, Requested]:
    """The same without workers that would have nothing to do, where their number is not somebody's own.

    Parameters
    ----------
    job : Job
        With its number of workers decided.
    requested : Asked
        What it was before.
    shape, unit : tuple of int
        Shapes of the image and of the smallest block, in pixels.
    """
    blocks = math.prod(-(-n // u) for n, u in zip(shape, unit, strict=True))
    if not requested.why or job.run.count <= blocks:
        return job, requested
    return replace(job, run=replace(job.run, workers=blocks)), Requested(
        requested.workers, "one for each block"
    )


def check_allocation(run: Run, cluster: Cluster, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse workers that may need more memory than their cluster has for them.

    Raises
    ------
    MemoryRefused
        With the figures, and what to write instead.
    """
    kind_of(cluster, environment).traits.check_memory(run, environment)
