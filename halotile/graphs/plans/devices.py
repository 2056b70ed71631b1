"""What computes a job, decided when it is planned: what is begun on one device does not go on with the bits of another."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from halotile.errors import ConfigError
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.detection.cluster_kind import AUTO, DEFAULT, VARIABLE, kind_of
from halotile.graphs.clusters.detection.cores import cores_here
from halotile.graphs.clusters.detection.gpus import Gpus, gpus_here
from halotile.graphs.jobs.kinds import kind_of as kind_of_job
from halotile.graphs.jobs.sections import Cluster, Job, Run
from halotile.graphs.rules.words import shown

MOST_IO_THREADS = 8
"""Threads of a worker with a GPU that read and write beside it; more find no more to do."""


def device_of(run: Run, cluster: Cluster, environment: Mapping[str, str] = os.environ) -> str:
    """``cpu`` or ``cuda``: what is written, else GPUs where the cluster has them for its workers.

    In an allocation of Slurm's that is so where each worker gets one of its own.

    Raises
    ------
    ClusterFailed
        In an allocation, when Slurm does not answer.

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
    return "cuda" if kind_of(cluster, environment).traits.gives_gpus(run, environment) else "cpu"


def is_here(cluster: Cluster) -> bool:
    """Whether the workers are processes of this machine, which share its cores and memory."""
    return kind_of(cluster).traits.is_here


def cluster_for(requested: Cluster, device: str) -> Cluster:
    """The cluster of a job that this computes: GPUs that nobody asked for are left alone where they would have nothing to do."""
    spoken_for = requested.kind != AUTO or requested.gpus or os.environ.get(VARIABLE, AUTO) != AUTO
    if device != "cpu" or spoken_for or not kind_of(requested).traits.has_worker_per_gpu:
        return requested
    return replace(requested, kind=DEFAULT)


def note_of_cluster(job: Job, cluster: Cluster, device: str) -> tuple[str, ...]:
    """What is to be said of GPUs that a job has nothing for, and of CPUs that it leaves alone or does not ask for."""
    return _note_of_gpus(job, cluster, device) + kind_of(cluster).traits.notes(cluster)


def _note_of_gpus(job: Job, cluster: Cluster, device: str) -> tuple[str, ...]:
    if cluster != job.cluster:
        return ("GPUs are left alone: nothing of this job computes on them",)
    one_for_each = kind_of(cluster).traits.has_worker_per_gpu
    if device != "cpu":
        on_cpu = kind_of_job(job).on_cpu
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


def chosen(cluster: Cluster, here: Gpus | None = None) -> tuple[str, ...]:
    """The GPUs of this machine that a cluster section means, as CUDA_VISIBLE_DEVICES names them.

    Raises
    ------
    ConfigError
        Where there is none, or not the one that is asked for.

    Examples
    --------
    >>> two = Gpus(("0", "1"))
    >>> chosen(Cluster(), two), chosen(Cluster(gpus=1), two), chosen(Cluster(gpus=(1,)), two)
    (('0', '1'), ('0',), ('1',))
    >>> chosen(Cluster(gpus=(0, 2)), two)
    Traceback (most recent call last):
    halotile.errors.ConfigError: cluster.gpus is [0, 2], and there are 2 GPUs here. Write gpus: all, or how many, or which of them as a list, counted from 0.
    """
    here = here or gpus_here()
    if not here.names:
        raise ConfigError(
            f"cluster.kind is local-cuda, and there is no GPU here: {here.why_none}. Write kind: local to compute on CPUs."
        )
    requested = cluster.gpus
    if requested in (0, "all"):
        return here.names
    places = (
        tuple(range(requested))
        if isinstance(requested, int)
        else tuple(place for place in requested if isinstance(place, int))
    )
    if not places or max(places) >= len(here.names):
        count = counted(len(here.names), "GPU")
        raise ConfigError(
            f"cluster.gpus is {shown(requested)}, and there {'is' if len(here.names) == 1 else 'are'} {count} here. Write gpus: all, "
            "or how many, or which of them as a list, counted from 0."
        )
    return tuple(dict.fromkeys(here.names[place] for place in places))


def io_threads_for(run: Run, cluster: Cluster, device: str) -> int:
    """Threads of a worker that read and write the pieces of a block side by side: of CPUs, none beside the one that does.

    Examples
    --------
    >>> io_threads_for(Run(), Cluster(kind="slurm", cores=6), "cuda"), io_threads_for(Run(), Cluster(kind="slurm", cores=6), "cpu")
    (6, 1)
    """
    if device == "cpu":
        return 1
    cores = cores_here() // run.count if is_here(cluster) else cluster.cores
    return max(1, min(MOST_IO_THREADS, cores))


def requested_by(run: Run, cluster: Cluster) -> str:
    """What of a job asks for GPUs.

    Examples
    --------
    >>> requested_by(Run(device="cuda"), Cluster()), requested_by(Run(), Cluster(gpus=1))
    ('run.device is cuda', 'cluster.gpus is 1')
    """
    return "run.device is cuda" if run.device == "cuda" else f"cluster.gpus is {shown(cluster.gpus)}"


def check_device(run: Run, cluster: Cluster, device: str) -> None:
    """Refuse a GPU where workers live on this machine and there is none.

    Raises
    ------
    ConfigError
        Saying why there is none, and what to write.
    """
    if device == "cpu" or not is_here(cluster):
        return
    here = gpus_here()
    if kind_of(cluster).traits.has_worker_per_gpu:
        chosen(cluster, here)
    if not here.names:
        raise ConfigError(
            f"{requested_by(run, cluster)}, and there is no GPU here: {here.why_none}. Leave it out to compute on CPUs, or start it where there is one "
            "(`recon-cli doctor` looks for them)."
        )
