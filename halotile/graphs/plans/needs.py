"""Needs of a job: memory of a worker for one block, by which plans are refused, and the number of workers.

A test compares the memory with measured peaks.
"""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from halotile.errors import ConfigError
from halotile.graphs.clusters.base import AUTO, DEFAULT, VARIABLE
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.machine import cgroups_of, chosen, cores_here, gpus_here, requested_by, slots_here
from halotile.graphs.kinds.base import Requested, kind_of
from halotile.graphs.kinds.sections import AJob, Cluster, Job, Run, parse_bytes
from halotile.graphs.words import bytes_text, counted

MIB = 1024**2
IMPORTS_BYTES = 700 * MIB  # resident memory of a worker before its first block: Python, Dask, zarr, torch
SHARED_BYTES = 240 * MIB  # part of it that is program files; a machine keeps one copy for all its workers
# Allowance for a GPU driver and its libraries in a process that uses a GPU, until a trial has measured them.
GPU_BYTES = 2048 * MIB
CGROUP_LIMITS = ("memory.max", "memory.limit_in_bytes")  # limit files of the two versions of control groups


def machine_bytes() -> int:
    """Return the memory of this machine, or the part that the control groups of this process allow."""
    import psutil

    limits = [int(psutil.virtual_memory().total)]
    for group, name in product(cgroups_of("memory"), CGROUP_LIMITS):
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int((group / name).read_text("utf-8")))
    return min(limit for limit in limits if limit > 0)


def share_bytes(machine: int, workers: int) -> int:
    """Return the most memory that each worker may need where so many share a machine.

    >>> share_bytes(8 * 2**30, 1) // MIB, share_bytes(8 * 2**30, 4) // MIB
    (8192, 2228)
    """
    return (machine - SHARED_BYTES) // workers + SHARED_BYTES


def workers_that_fit(machine: int, needed: int) -> int:
    """Return the number of workers of this need that a machine has memory for.

    >>> workers_that_fit(8 * 2**30, 1024 * MIB)
    10
    """
    return max(0, (machine - SHARED_BYTES) // (needed - SHARED_BYTES))


def gpu_bytes(measured: int | None) -> int:
    """Return the memory of a GPU's own libraries in a worker: from a trial's measurement, else the allowance.

    >>> gpu_bytes(None) // MIB, gpu_bytes(IMPORTS_BYTES + 900 * MIB) // MIB
    (2048, 900)
    """
    return GPU_BYTES if measured is None else max(0, measured - IMPORTS_BYTES)


PROCESS, MODEL, TILES = "the program itself", "the model", "the tiles"
READ, WRITTEN, DECODED = "the pixels read", "the pixels written", "one chunk of the input"


def pinned(size: int) -> int:
    """Return the bytes that torch allocates for so many bytes of pinned memory.

    Source: PyTorch, ``CachingHostAllocator``: the next power of two.

    >>> pinned(150 * MIB) // MIB, pinned(256 * MIB) // MIB
    (256, 256)
    """
    return 1 << max(0, size - 1).bit_length()


USUAL = 2  # number of workers where a cluster gives as many as are asked for


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
            _workers_of_this_machine(run, environment) if device == "cpu" else Count(USUAL, "which share the first GPU")
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
        max(1, room), f"{bytes_text(memory)} have no room for more of {run.memory_per_worker}; {counted(cores, 'core')}"
    )


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
    return replace(job, run=replace(job.run, workers=blocks)), Requested(requested.workers, "one for each block")


def check_allocation(run: Run, cluster: Cluster, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse workers that may need more memory than their cluster has for them."""
    cluster_kind_of(cluster, environment).traits.check_memory(run, environment)


MOST_IO_THREADS = 8  # threads of a worker with a GPU that read and write beside it; more threads would have no work


def device_of(run: Run, cluster: Cluster, environment: Mapping[str, str] = os.environ) -> str:
    """Return ``cpu`` or ``cuda``: as the job sets it, else GPUs where the cluster has them for its workers.

    In a Slurm allocation, GPUs are used where each worker gets one of its own.

    >>> device_of(Run(), Cluster(kind="slurm")), device_of(Run(), Cluster(kind="slurm", gpus=1))
    ('cpu', 'cuda')
    >>> device_of(Run(device="cpu"), Cluster(kind="slurm", gpus=1))
    'cpu'
    """
    if run.device != "auto":
        return run.device
    if cluster.gpus:
        return "cuda"
    return "cuda" if cluster_kind_of(cluster, environment).traits.gives_gpus(run, environment) else "cpu"


def is_here(cluster: Cluster) -> bool:
    """Return True where the workers are processes of this machine, which share its cores and memory."""
    return cluster_kind_of(cluster).traits.is_here


def cluster_for(requested: Cluster, device: str) -> Cluster:
    """Return the cluster of a job on this device: GPUs that were not asked for and would be idle are left alone."""
    spoken_for = requested.kind != AUTO or requested.gpus or os.environ.get(VARIABLE, AUTO) != AUTO
    if device != "cpu" or spoken_for or not cluster_kind_of(requested).traits.has_worker_per_gpu:
        return requested
    return replace(requested, kind=DEFAULT)


def note_of_cluster(job: Job, cluster: Cluster, device: str) -> tuple[str, ...]:
    """Return notes on GPUs that the job cannot use, and on CPUs that it leaves idle."""
    if cluster != job.cluster:
        return ("GPUs are left alone: nothing of this job computes on them",)
    one_for_each = cluster_kind_of(cluster).traits.has_worker_per_gpu
    if device != "cpu":
        on_cpu = kind_of(job).on_cpu
        if not (one_for_each and on_cpu):
            return ()
        return (
            f"{on_cpu} compute on CPUs, one for each GPU on cluster local-cuda; with kind: local and run.device: cuda "
            "as many workers as run.workers share the first GPU",
        )
    if job.run.device == "cuda" and not one_for_each:
        return ("run.device is cuda, and nothing of this job computes on GPUs",)
    if one_for_each:
        return (
            "no part of this job computes on GPUs, but cluster local-cuda starts one worker for each GPU. Write kind: local to choose the number with run.workers",
        )
    return ()


def io_threads_for(run: Run, cluster: Cluster, device: str) -> int:
    """Return the threads of a worker that read and write in parallel: on CPUs, only the one that computes.

    >>> io_threads_for(Run(), Cluster(kind="slurm", cores=6), "cuda"), io_threads_for(Run(), Cluster(kind="slurm", cores=6), "cpu")
    (6, 1)
    """
    if device == "cpu":
        return 1
    cores = cores_here() // run.count if is_here(cluster) else cluster.cores
    return max(1, min(MOST_IO_THREADS, cores))


def check_device(run: Run, cluster: Cluster, device: str) -> None:
    """Refuse a GPU where workers are on this machine and there is none."""
    if device == "cpu" or not is_here(cluster):
        return
    gpus = gpus_here()
    if cluster_kind_of(cluster).traits.has_worker_per_gpu:
        chosen(cluster, gpus)
    if not gpus.names:
        raise ConfigError(
            f"{requested_by(run, cluster)}, and there is no GPU here: {gpus.why_none}. Leave it out to compute on CPUs, or start it where there is one "
            "(`recon-cli doctor` looks for them)."
        )
