"""The device of a job, decided when it is planned: no run is resumed with the bits of another device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from halotile.errors import ConfigError
from halotile.graphs.clusters.base import AUTO, DEFAULT, VARIABLE
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.machine import chosen, cores_here, gpus_here, requested_by
from halotile.graphs.kinds.finder import kind_of
from halotile.graphs.kinds.sections import Cluster, Job, Run

MOST_IO_THREADS = 8
"""Threads of a worker with a GPU that read and write beside it; more threads would have no work."""


def device_of(run: Run, cluster: Cluster, environment: Mapping[str, str] = os.environ) -> str:
    """Return ``cpu`` or ``cuda``: as the job sets it, else GPUs where the cluster has them for its workers.

    In a Slurm allocation, GPUs are used where each worker gets one of its own.

    Examples
    --------
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
            "run.workers of them share the first GPU",
        )
    if job.run.device == "cuda" and not one_for_each:
        return ("run.device is cuda, and nothing of this job computes on GPUs",)
    if one_for_each:
        return (
            "nothing of this job computes on GPUs, and cluster local-cuda has one worker for each: kind: local has run.workers of them",
        )
    return ()


def io_threads_for(run: Run, cluster: Cluster, device: str) -> int:
    """Return the threads of a worker that read and write in parallel: on CPUs, only the one that computes.

    Examples
    --------
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
