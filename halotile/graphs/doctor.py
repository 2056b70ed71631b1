"""What a run would find here: which cluster, which hardware, which limits, and what the output's file system can do."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import halotile
from halotile.errors import ConfigError, HalotileError
from halotile.graphs.amounts import bytes_text, counted
from halotile.graphs.clusters.base import Order, Start
from halotile.graphs.clusters.detection.cluster_kind import DEFAULT, kind_of
from halotile.graphs.clusters.detection.cores import cores_here
from halotile.graphs.clusters.detection.gpus import INSTALL, gpus_here, has_dask_cuda
from halotile.graphs.clusters.launches.batch_jobs import BatchSystem
from halotile.graphs.jobs.sections import Cluster
from halotile.graphs.plans.devices import LOCAL_CUDA
from halotile.graphs.plans.memory import machine_bytes
from halotile.graphs.plans.plan import existing_parent
from halotile.graphs.runs.identity import package_version
from halotile.registry import find
from halotile.storage.disk.mounts import local_lock_reason

Verdict = Literal["ok", "note", "missing"]
_LIMITS = (
    ("open files", resource.RLIMIT_NOFILE, "n", 4096),
    ("processes", resource.RLIMIT_NPROC, "u", 4096),
    ("address space", resource.RLIMIT_AS, "v", None),
)
"""With the option of ulimit, and what a scheduler with some hundred workers needs."""
LEAST_FREE_BYTES = 2**30
_SLURM = ("sbatch", "squeue", "scontrol", "srun")
_PACKAGES = ("dask", "distributed", "torch", "zarr", "numpy")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Parameters
    ----------
    name : str
        What it is.
    verdict : str
        ok; note, where something could be better; missing, where a run would fail.
    text : str
        What was found, and what to do about it.
    """

    name: str
    verdict: Verdict
    text: str


def examine(choice: Cluster, folder: Path) -> Iterator[Finding]:
    """Look at everything that a run needs, and start nothing.

    Parameters
    ----------
    choice : graphs.job.Cluster
        What the job says of its cluster.
    folder : Path
        Where the output would go.

    Examples
    --------
    >>> {finding.name for finding in examine(Cluster(kind="local"), Path("."))} >= {"cluster", "encryption", "file system"}
    True
    """
    kind = kind_of(choice)
    yield Finding("cluster", "ok", f"{kind.name}: {kind.why}")
    yield _platform()
    yield Finding("machine", "ok", _machine())
    yield Finding("packages", "ok", _packages())
    yield _gpus(kind.name)
    yield _batch_system(kind.name)
    yield _encryption(choice, kind.name)
    yield _limits()
    there = existing_parent(folder.resolve() / "output")
    yield _file_system(there, kind.name)
    yield _free_disk(there)


def compare_workers(order: Order) -> Iterator[Finding]:
    """Start the cluster, and tell where its workers are and which versions differ there."""
    try:
        yield from _compare(order)
    except HalotileError as error:
        yield Finding("workers", "missing", str(error))


def _compare(order: Order) -> Iterator[Finding]:
    from halotile.graphs.clusters.connection.arrival import await_workers
    from halotile.graphs.clusters.detection.versions import differing_versions

    start: Start = find("clusters", kind_of(order.choice).name).start
    with start(order) as cluster:
        await_workers(cluster, order.report)
        workers = cluster.client.scheduler_info(n_workers=-1)["workers"].values()
        hosts = sorted({str(worker["host"]) for worker in workers})
        yield Finding(
            "workers", "ok", f"{counted(len(workers), 'worker')} of {order.workers} on {', '.join(hosts)}"
        )
        differing = differing_versions(cluster.client)
        for line in differing:
            yield Finding("versions", "missing" if "not there" in line else "note", line)
        if not differing:
            yield Finding("versions", "ok", "the same on every worker")


def _platform() -> Finding:
    """Whether the suite is run on machines like this one."""
    here = f"{platform.system()} {platform.machine()}"
    if here == "Linux x86_64":
        return Finding("platform", "ok", f"{here}, on which halotile is tested")
    return Finding(
        "platform", "note", f"{here}, on which halotile is not tested; Linux x86_64 is what it is tested on"
    )


def _machine() -> str:
    memory = bytes_text(machine_bytes())
    return f"{socket.gethostname()}: {counted(cores_here(), 'core')}, {memory}, Python {platform.python_version()}"


def _packages() -> str:
    others = (f"{name} {package_version(name)}" for name in _PACKAGES)
    return ", ".join((f"halotile {halotile.__version__}", *others))


def _gpus(kind: str) -> Finding:
    here = gpus_here()
    installed = has_dask_cuda()
    if kind == LOCAL_CUDA and not (here.names and installed):
        why = f"none ({here.why_none})" if not here.names else f"dask-cuda is not installed: {INSTALL}"
        return Finding("GPU", "missing", f"{why}; cluster local-cuda has a worker on each")
    if not here.names:
        extra = "" if installed else f"; where there are GPUs: {INSTALL}"
        return Finding("GPU", "note", f"none ({here.why_none}): workers compute on CPUs{extra}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = f", those that CUDA_VISIBLE_DEVICES shows ({visible})" if visible is not None else ""
    lacks = "" if installed else f"; for a worker on each: {INSTALL}"
    return Finding("GPU", "note" if lacks else "ok", f"{len(here.names)}{shown}{lacks}")


def _batch_system(kind: str) -> Finding:
    here = [name for name in _SLURM if shutil.which(name)]
    text = f"Slurm's {', '.join(here)}" if here else "no command of Slurm's"
    try:
        system = getattr(find("clusters", kind), "SYSTEM", None)
    except ConfigError as error:  # a package of somebody else's
        return Finding("batch system", "missing", str(error))
    submits = system.submits if isinstance(system, BatchSystem) else None
    if submits and not shutil.which(submits):
        return Finding(
            "batch system", "missing", f"there is no {submits} here: cluster {kind} submits its jobs with it"
        )
    if not importlib.util.find_spec("dask_jobqueue"):
        verdict: Verdict = "missing" if submits else "note"
        return Finding(
            "batch system", verdict, f"{text}; a job for each worker needs pip install 'halotile[hpc]'"
        )
    return Finding(
        "batch system",
        "ok" if here or submits or kind == "local" else "note",
        f"{text}; dask-jobqueue is there",
    )


def _encryption(choice: Cluster, kind: str) -> Finding:
    """Whether certificates can be made; for a scheduler that runs already, those that Dask's configuration names."""
    from distributed.security import Security

    if kind == "scheduler":
        return _certificates(choice)
    try:
        Security.temporary().get_connection_args("client")
    except (ImportError, OSError, ValueError) as error:
        return Finding("encryption", "missing", f"no certificate can be made ({error})")
    return Finding("encryption", "ok", "certificates can be made")


def _certificates(choice: Cluster) -> Finding:
    from distributed.security import Security

    from halotile.graphs.clusters.scheduler import address_of, check_certificates

    try:
        where, address = address_of(choice)
        if not address.startswith("tls://"):
            return Finding("encryption", "note", f"{where} is {address}, which is not encrypted")
        check_certificates(where, address)
        Security().get_connection_args("client")
    except ConfigError as error:
        return Finding("encryption", "missing", str(error))
    except (OSError, ValueError) as error:
        return Finding(
            "encryption", "missing", f"the certificates of distributed.comm.tls cannot be used ({error})"
        )
    return Finding("encryption", "ok", "the certificates of distributed.comm.tls can be used")


def _limits() -> Finding:
    """What the shell allows a process: a run needs open files, threads, and memory that is mapped long before it is used."""
    found, advice = [], []
    for name, limit, option, least in _LIMITS:
        soft, _ = resource.getrlimit(limit)
        free = soft == resource.RLIM_INFINITY
        found.append(f"{name} {'unlimited' if free else soft}")
        if not free and (least is None or soft < least):
            advice.append(f"`ulimit -{option} {least or 'unlimited'}`")
    said = f"; before a run, where it is allowed, write {', '.join(advice)}" if advice else ""
    return Finding("limits", "note" if advice else "ok", f"{', '.join(found)}{said}")


def _file_system(folder: Path, kind: str) -> Finding:
    """Whether what a run relies on is so: durable writes, atomic renames, locks."""
    try:
        with tempfile.TemporaryDirectory(prefix=".halotile-doctor-", dir=folder) as made:
            seconds = _try_writes(Path(made))
    except OSError as error:
        return Finding(
            "file system",
            "missing",
            f"{folder}: {error}. A run needs fsync, rename and flock there; write another output.path",
        )
    if why := local_lock_reason(folder):
        return Finding(
            "file system",
            "note" if kind in (DEFAULT, LOCAL_CUDA) else "missing",
            f"{folder}: flock works, but other machines do not see it, so that two of them could write one output. {why}",
        )
    slow = seconds > 0.1
    text = f"{folder}: rename, fsync ({seconds * 1000:.1f} ms) and flock work"
    return Finding(
        "file system",
        "note" if slow else "ok",
        f"{text}; fsync is slow: larger shards help" if slow else text,
    )


def _try_writes(folder: Path) -> float:
    """Do what a run does with a shard; seconds that it takes to be safe."""
    first, second = folder / "a", folder / "b"
    second.write_bytes(b"old")
    with first.open("wb") as file:
        file.write(b"new")
        file.flush()
        began = time.perf_counter()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(first, second)
    _sync_folder(folder)
    if second.read_bytes() != b"new" or first.exists():
        raise OSError("a file renamed over another one is not there as it was")
    return seconds


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    return Finding(
        "free disk", "ok" if free > LEAST_FREE_BYTES else "note", f"{bytes_text(free)} in {folder}"
    )
