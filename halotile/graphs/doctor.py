"""Checks of the environment of a run: the cluster, the hardware, the limits, and the output's file system."""

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
from halotile.graphs.clusters.base import DEFAULT, ChosenCluster, Order
from halotile.graphs.clusters.common.answers import present_workers
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.machine import INSTALL, cores_here, gpus_here, has_dask_cuda
from halotile.graphs.clusters.launches.batch_system import system_of
from halotile.graphs.kinds.sections import Cluster
from halotile.graphs.plans.identity import package_version
from halotile.graphs.plans.needs import machine_bytes
from halotile.graphs.plans.plan import existing_parent
from halotile.graphs.words import bytes_text, counted
from halotile.storage.disk.durable import DISK
from halotile.storage.disk.place import local_lock_reason
from halotile.tasks.denoisers.compiled.library import library

CheckLevel = Literal["ok", "note", "missing"]
Result = tuple[CheckLevel, str]
# Limits with their option of ulimit and the value that a scheduler with some hundred workers needs.
_LIMITS = (
    ("open files", resource.RLIMIT_NOFILE, "n", 4096),
    ("processes", resource.RLIMIT_NPROC, "u", 4096),
    ("address space", resource.RLIMIT_AS, "v", None),
)
LEAST_FREE_BYTES = 2**30
_SLURM = ("sbatch", "squeue", "scontrol", "srun")
_PACKAGES = ("dask", "distributed", "torch", "zarr", "numpy")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str  # name of the check
    verdict: CheckLevel  # ok; note, where something could be better; missing, where a run would fail
    text: str  # result, and a remedy where it needs one


def examine(choice: Cluster, folder: Path) -> Iterator[Finding]:
    """Check everything that a run needs, and start nothing.

    ``choice``: cluster section of the job; ``folder``: folder of the output.

    >>> {finding.name for finding in examine(Cluster(kind="local"), Path("."))} >= {"cluster", "encryption", "file system"}
    True
    """
    kind = cluster_kind_of(choice)
    parent = existing_parent(folder.resolve() / "output")
    yield Finding("cluster", "ok", f"{kind.name}: {kind.why}")
    yield Finding("platform", *_platform())
    yield Finding("machine", "ok", _machine())
    yield Finding("packages", "ok", _packages())
    yield Finding("filters", *_filters())
    yield Finding("GPU", *_gpus(kind))
    yield Finding("batch system", *_batch_system(kind.name))
    yield Finding("encryption", *_encryption(choice, kind))
    yield Finding("limits", *_limits())
    yield Finding("file system", *_file_system(parent, kind))
    yield Finding("free disk", *_free_disk(parent))


def compare_workers(order: Order) -> Iterator[Finding]:
    """Start the cluster, and list the hosts of its workers and the versions that differ there."""
    try:
        yield from _compare(order)
    except HalotileError as error:
        yield Finding("workers", "missing", str(error))


def _compare(order: Order) -> Iterator[Finding]:
    from halotile.graphs.clusters.common.answers import await_workers, differing_versions

    with cluster_kind_of(order.choice).start(order) as cluster:
        await_workers(cluster, order.report)
        workers = present_workers(cluster.client).values()
        hosts = sorted({str(worker["host"]) for worker in workers})
        yield Finding("workers", "ok", f"{counted(len(workers), 'worker')} of {order.workers} on {', '.join(hosts)}")
        differing = differing_versions(cluster.client)
        for line in differing:
            yield Finding("versions", "missing" if "not there" in line else "note", line)
        if not differing:
            yield Finding("versions", "ok", "the same on every worker")


def _platform() -> Result:
    """Compare this machine with those that the tests are run on."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine == "Linux x86_64":
        return "ok", f"{machine}, on which halotile is tested"
    return "note", f"{machine}, on which halotile is not tested; it is tested on Linux x86_64"


def _machine() -> str:
    memory = bytes_text(machine_bytes())
    return f"{socket.gethostname()}: {counted(cores_here(), 'core')}, {memory}, Python {platform.python_version()}"


def _packages() -> str:
    others = (f"{name} {package_version(name)}" for name in _PACKAGES)
    return ", ".join((f"halotile {halotile.__version__}", *others))


def _filters() -> Result:
    """Look for the filters in C."""
    if library() is not None:
        return "ok", "gaussian, median, tv and nlm are compiled"
    return "note", (
        "gaussian, median, tv and nlm were not compiled, and give the same results more slowly: with a C compiler, cc, install halotile again"
    )


def _gpus(kind: ChosenCluster) -> Result:
    here = gpus_here()
    installed = has_dask_cuda()
    if kind.traits.has_worker_per_gpu and not (here.names and installed):
        why = f"none ({here.why_none})" if not here.names else f"dask-cuda is not installed: {INSTALL}"
        return "missing", f"{why}; cluster {kind.name} has a worker on each"
    if not here.names:
        hint = "" if installed else f"; where there are GPUs: {INSTALL}"
        return "note", f"none ({here.why_none}): workers compute on CPUs{hint}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = f", those that CUDA_VISIBLE_DEVICES shows ({visible})" if visible is not None else ""
    hint = "" if installed else f"; for a worker on each: {INSTALL}"
    return "note" if hint else "ok", f"{len(here.names)}{shown}{hint}"


def _batch_system(kind: str) -> Result:
    commands = [name for name in _SLURM if shutil.which(name)]
    text = f"Slurm commands {', '.join(commands)}" if commands else "no Slurm commands"
    try:
        system = system_of(kind)
    except ConfigError as error:  # a plug-in that cannot be loaded
        return "missing", str(error)
    submits = system.submits if system else None
    if submits and not shutil.which(submits):
        return "missing", f"there is no {submits} here: cluster {kind} submits its jobs with it"
    if not importlib.util.find_spec("dask_jobqueue"):
        verdict: CheckLevel = "missing" if submits else "note"
        return verdict, f"{text}; a job for each worker needs pip install 'halotile[hpc]'"
    verdict = "ok" if commands or submits or kind == DEFAULT else "note"
    return verdict, f"{text}; dask-jobqueue is installed"


def _encryption(choice: Cluster, kind: ChosenCluster) -> Result:
    """Try to make certificates; for a scheduler that runs already, check those that Dask's configuration names."""
    from distributed.security import Security

    if kind.traits.joins:
        return _certificates(choice)
    try:
        Security.temporary().get_connection_args("client")
    except (ImportError, OSError, ValueError) as error:
        return "missing", f"no certificate can be made ({error})"
    return "ok", "certificates can be made"


def _certificates(choice: Cluster) -> Result:
    from distributed.security import Security

    from halotile.graphs.clusters.scheduler import address_of, check_certificates

    try:
        source, address = address_of(choice)
        if not address.startswith("tls://"):
            return "note", f"{source} is {address}, which is unencrypted"
        check_certificates(source, address)
        Security().get_connection_args("client")
    except ConfigError as error:
        return "missing", str(error)
    except (OSError, ValueError) as error:
        return "missing", f"the certificates of distributed.comm.tls cannot be used ({error})"
    return "ok", "the certificates of distributed.comm.tls can be used"


def _limits() -> Result:
    """Read the limits of a process: a run needs open files, threads, and memory that is mapped long before it is used."""
    limits, advice = [], []
    for name, limit, option, least in _LIMITS:
        soft, _ = resource.getrlimit(limit)
        unlimited = soft == resource.RLIM_INFINITY
        limits.append(f"{name} {'unlimited' if unlimited else soft}")
        if not unlimited and (least is None or soft < least):
            advice.append(f"`ulimit -{option} {least or 'unlimited'}`")
    remedy = f"; before a run, where it is allowed, write {', '.join(advice)}" if advice else ""
    return "note" if advice else "ok", f"{', '.join(limits)}{remedy}"


def _file_system(folder: Path, kind: ChosenCluster) -> Result:
    """Try what a run relies on: durable writes, atomic renames, locks."""
    try:
        with tempfile.TemporaryDirectory(prefix=".halotile-doctor-", dir=folder) as scratch:
            seconds = _try_writes(Path(scratch))
    except OSError as error:
        return ("missing", f"{folder}: {error}. A run needs fsync, rename and flock there; write another output.path")
    if why := local_lock_reason(folder):
        verdict: CheckLevel = "note" if kind.traits.is_here else "missing"
        return verdict, (
            f"{folder}: flock works, but other machines do not see it, so that two of them could write one output. {why}"
        )
    text = f"{folder}: rename, fsync ({seconds * 1000:.1f} ms) and flock work"
    return ("note", f"{text}; fsync is slow: larger shards help") if seconds > 0.1 else ("ok", text)


def _try_writes(folder: Path) -> float:
    """Replace a file as a run does; return the seconds until it is safe on the disk."""
    path, began = folder / "a", time.perf_counter()
    path.write_bytes(b"old")
    DISK.write_file(path, [b"new"])
    seconds = time.perf_counter() - began
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file.read() != b"new":
            raise OSError("a file that was renamed over another one does not have its contents")
    return seconds


def _free_disk(folder: Path) -> Result:
    free = shutil.disk_usage(folder).free
    return "ok" if free > LEAST_FREE_BYTES else "note", f"{bytes_text(free)} in {folder}"
