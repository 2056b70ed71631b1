"""Scripts of batch jobs: one that holds driver, scheduler and workers, as on Slurm, or the driver alone."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dask

from halotile.errors import ConfigError
from halotile.graphs.clusters.base import Order
from halotile.graphs.clusters.launches.batch_jobs import NAME, NANNY_BYTES, job_arguments, refusals_described
from halotile.graphs.clusters.launches.batch_system import SLURM, BatchSystem, is_walltime, seconds_of
from halotile.graphs.kinds.sections import Cluster, Job, parse_bytes
from halotile.storage.disk.object_path import path_of
from halotile.storage.run_directory.directory import LOG

DRAIN_AT = "HALOTILE_DRAIN_AT"
"""Time at which a run drains (Unix time), in jobs of batch systems that do not signal."""
NOTICE_SECONDS = 120
"""Seconds from the signal that its time is up to the end of a job."""
EARLY_SECONDS = 60
"""Slurm may signal so much earlier than requested (manual page of sbatch, option --signal)."""
_SIGNAL = re.compile(r"--signal[=\s]\s*(\S+)")
_DRAINS = re.compile(r"[BR]*B[BR]*:(?:SIG)?(?:USR1|10)@(\d+)")
"""A signal to the batch shell that drains a run; the number is its notice in seconds."""
_CONFIGURED = {
    "queue": "queue",
    "account": "account",
    "walltime": "walltime",
    "prologue": "job-script-prologue",
    "directives": "job-extra-directives",
    "directives_skip": "job-directives-skip",
}
"""Keys of a cluster section with their names in dask-jobqueue's configuration."""
DRIVER_BYTES = 2**30
"""Memory for the driver, on each machine: which one it will be is not known before."""


def script_of(system: BatchSystem, job: Job, run: Path, umask: int) -> str:
    """The script that is submitted to a batch system, with the arguments of :func:`batch_script`."""
    if system.module == SLURM:
        return batch_script(job, run, umask)
    return driver_script(system, job, run, umask)


def driver_script(system: BatchSystem, job: Job, run: Path, umask: int) -> str:
    """The script of a job that holds the driver alone, with the directives of dask-jobqueue; its workers are jobs of their own."""
    directives = (*system.directives_of(job.cluster), *(system.driver or ()))
    options = {key: value for key, value in job.cluster.options.items() if key != "resource_spec"}  # of workers
    choice = dataclasses.replace(job.cluster, cores=1, gpus=0, directives=directives, options=options)
    order = Order(workers=1, memory_bytes=parse_bytes(job.run.memory_per_worker) + DRIVER_BYTES, choice=choice)
    with refusals_described(system, choice):
        arguments = job_arguments(system, order, run) | {"log_directory": None}
        header = system.cluster_class().job_cls("", name=NAME, **arguments).job_header
    # And without the lines that held nothing else.
    header = re.sub(r"(?m)^#\S+[ \t]*$\n?", "", re.sub(system.worker_options, "", header)).rstrip()
    seconds = walltime_seconds(system, choice)
    drain_at = f"$(( $(date +%s) + {seconds - NOTICE_SECONDS} ))" if seconds else ""
    head = [
        f"{system.configured('shebang')}\n{header}",
        f"exec >> {shlex.quote(str(run / LOG))} 2>&1",
        f"cd {shlex.quote(os.getcwd())}",
        f"export {DRAIN_AT}={drain_at}",
    ]
    prologue = arguments.get("job_script_prologue", system.configured("job-script-prologue") or ())
    return _script(head, umask, prologue, run)


def walltime_seconds(system: BatchSystem, choice: Cluster) -> int | None:
    """Walltime of a job of dask-jobqueue; None where neither the job nor the user's configuration has one."""
    system.cluster_class()  # its import makes the default settings known
    configured = str(choice.walltime or system.configured("walltime") or "")
    if not choice.walltime and system.module == "lsf":  # minutes, or hours and minutes
        configured += ":00" if ":" in configured else ""
    elif not choice.walltime and configured.isdecimal():
        return int(configured)
    return seconds_of(configured) if is_walltime(configured) else None


def _script(head: Sequence[str], umask: int, prologue: Sequence[str], run: Path) -> str:
    # In the place of the shell, which would handle a signal only once its command has ended.
    attend = f"exec {shlex.join([sys.executable, '-P', '-m', 'halotile', 'attend', str(run)])}"
    return "\n".join([*head, f"umask {umask:03o}", *prologue, attend, ""])


def batch_script(job: Job, run: Path, umask: int) -> str:
    """The script that is submitted to Slurm.

    ``job``: its `run` and `cluster` sections determine the directives; ``run``: run directory; ``umask``: mask of file permissions, as in the shell
    that submits.

    Returns
    -------
    str
        A shell script with directives.
    """
    cluster = with_configured(job.cluster, _configured())
    memory = parse_bytes(job.run.memory_per_worker) + NANNY_BYTES + DRIVER_BYTES
    requested = {
        "--job-name": path_of(job.place).name,
        "--output": str(run / LOG).replace("%", "%%"),
        "--open-mode": "append",
        "--ntasks": job.run.count,
        "--cpus-per-task": cluster.cores,
        "--mem-per-cpu": f"{-(-memory // 2**20 // cluster.cores)}M",
        "--gpus-per-task": cluster.gpus or None,
        "--time": cluster.walltime,
        "--partition": cluster.queue,
        "--account": cluster.account,
        # To the script itself, which has become the driver: it drains, and requests another job.
        "--signal": f"B:USR1@{NOTICE_SECONDS}",
        "--requeue": "",
        # A node that dies takes its own workers, and no others.
        "--no-kill": "",
    }
    given = {key: value for key, value in requested.items() if value is not None}
    lines = [f"{key}={shlex.quote(str(value))}" if value != "" else key for key, value in given.items()]
    lines = [line for line in lines if not any(skip in line for skip in cluster.directives_skip)]
    head = ["#!/bin/bash", *(f"#SBATCH {line}" for line in [*lines, *cluster.directives])]
    return _script(head, umask, cluster.prologue, run)


def check_walltime(cluster: Cluster, system: BatchSystem) -> None:
    """Refuse a walltime whose notice would come before anything is done."""
    if system.module != SLURM:
        limit = walltime_seconds(system, cluster)
        if limit is not None and limit <= 2 * NOTICE_SECONDS:
            raise ConfigError(
                f"cluster.walltime is {limit} s, and a run drains {NOTICE_SECONDS} s before its end: nothing would be done. Write at "
                f"least {2 * NOTICE_SECONDS // 60 + 1} minutes."
            )
        return
    cluster = with_configured(cluster, _configured())
    for directive in cluster.directives:
        if (requested := _SIGNAL.search(directive)) and not _DRAINS.fullmatch(requested[1]):
            raise ConfigError(
                f"cluster.directives has {directive}, and a run drains when USR1 comes to the batch shell. Write "
                '"--signal=B:USR1@60", with the seconds that its blocks take.'
            )
    notice = notice_seconds(cluster)
    walltime = str(cluster.walltime)  # jobqueue.yaml may have a bare number
    if is_walltime(walltime) and (seconds := seconds_of(walltime)) <= 2 * notice + EARLY_SECONDS:
        shorter = (seconds - EARLY_SECONDS) // 3
        hint = f', or directives: ["--signal=B:USR1@{shorter}"] for a shorter notice' if shorter >= 10 else ""
        raise ConfigError(
            f"cluster.walltime is {walltime}, and a run drains {notice} s before its end, to which Slurm adds up to {EARLY_SECONDS} s: "
            f"nothing would be done. Write at least {(2 * notice + EARLY_SECONDS) // 60 + 1} minutes{hint}."
        )


def notice_seconds(cluster: Cluster, system: str = SLURM) -> int:
    """Seconds from the signal that its time is up to the end of a job with this cluster section.

    >>> notice_seconds(Cluster()), notice_seconds(Cluster(directives=("--signal B:USR1@20",)))
    (120, 20)
    """
    directives = with_configured(cluster, _configured()).directives if system == SLURM else ()
    requested = [match[1] for directive in directives if (match := _SIGNAL.search(directive))]
    drains = _DRAINS.fullmatch(requested[-1]) if requested else None
    return int(drains[1]) if drains else NOTICE_SECONDS


def with_configured(cluster: Cluster, configured: Mapping[str, Any]) -> Cluster:
    """A cluster section with the settings of the user's ``jobqueue.yaml`` for keys that the job leaves out.

    >>> found = with_configured(Cluster(queue="mine"), {"queue": "theirs", "account": "phys", "job-script-prologue": ["a"]})
    >>> found.queue, found.account, found.prologue
    ('mine', 'phys', ('a',))
    """
    default = Cluster()
    settings: dict[str, Any] = {}
    for key, name in _CONFIGURED.items():
        value = configured.get(name)
        if value and getattr(cluster, key) == getattr(default, key):
            settings[key] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(cluster, **settings)


def _configured() -> Mapping[str, Any]:
    """The settings of ``jobqueue.yaml``, without dask-jobqueue's own defaults, such as half an hour."""
    found: Mapping[str, Any] = dask.config.collect().get("jobqueue", {}).get("slurm", {})
    return found
