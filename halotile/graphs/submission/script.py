"""The script of one batch job that holds driver, scheduler and workers."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask

from halotile.errors import ConfigError
from halotile.graphs.clusters.launches.batch_jobs import NANNY_BYTES
from halotile.graphs.clusters.launches.walltime import is_walltime, seconds_of
from halotile.graphs.jobs.sections import Cluster, Job, parse_bytes
from halotile.storage.run_directory.names import LOG

NOTICE_SECONDS = 120
"""How long before its time is up the job is told."""
_SIGNAL = re.compile(r"--signal[=\s]\s*(\S+)")
_TOLD = re.compile(r"[BR]*B[BR]*:(?:SIG)?(?:USR1|10)@(\d+)")
"""What the batch shell is told, of which the second number counts."""
_CONFIGURED = {
    "queue": "queue",
    "account": "account",
    "walltime": "walltime",
    "prologue": "job-script-prologue",
    "directives": "job-extra-directives",
    "directives_skip": "job-directives-skip",
}
"""Keys of a cluster section, by what dask-jobqueue calls them."""
DRIVER_BYTES = 2**30
"""What the machine with the driver needs besides: which one that is, nobody knows before."""


def batch_script(job: Job, run: Path, umask: int) -> str:
    """What is submitted to Slurm.

    Parameters
    ----------
    job : Job
        Its ``run`` and ``cluster`` say what is asked for.
    run : Path
        The run directory.
    umask : int
        Who may not do what with the output, as the shell has it that submits.

    Returns
    -------
    str
        A shell script with directives.
    """
    cluster = with_configured(job.cluster, _configured())
    memory = parse_bytes(job.run.memory_per_worker) + NANNY_BYTES + DRIVER_BYTES
    requested = {
        "--job-name": Path(job.place).name,
        "--output": str(run / LOG).replace("%", "%%"),
        "--open-mode": "append",
        "--ntasks": job.run.count,
        "--cpus-per-task": cluster.cores,
        "--mem-per-cpu": f"{-(-memory // 2**20 // cluster.cores)}M",
        "--gpus-per-task": cluster.gpus or None,
        "--time": cluster.walltime,
        "--partition": cluster.queue,
        "--account": cluster.account,
        # To the script itself, which has become the driver: it drains, and asks for another go.
        "--signal": f"B:USR1@{NOTICE_SECONDS}",
        "--requeue": "",
        # A node that dies takes its own workers, and no others.
        "--no-kill": "",
    }
    lines = [_line(key, str(value)) for key, value in requested.items() if value is not None]
    kept = [line for line in lines if not any(skip in line for skip in cluster.directives_skip)]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in [*kept, *cluster.directives]),
            f"umask {umask:03o}",
            *cluster.prologue,
            # In the place of the shell, which would hear of a signal only once its command has ended.
            f"exec {shlex.join([sys.executable, '-P', '-m', 'halotile', 'attend', str(run)])}",
            "",
        ]
    )


def check_walltime(cluster: Cluster) -> None:
    """Refuse a walltime whose end would be told before anything is done.

    Raises
    ------
    ConfigError
        When it is that short.
    """
    cluster = with_configured(cluster, _configured())
    for directive in cluster.directives:
        if (requested := _SIGNAL.search(directive)) and not _TOLD.fullmatch(requested[1]):
            raise ConfigError(
                f"cluster.directives has {directive}, and a run drains when USR1 comes to the batch shell. Write "
                '"--signal=B:USR1@60", with the seconds that its blocks take.'
            )
    notice = notice_seconds(cluster)
    walltime = str(cluster.walltime)  # jobqueue.yaml may have a bare number
    if is_walltime(walltime) and seconds_of(walltime) <= 2 * notice:
        raise ConfigError(
            f"cluster.walltime is {walltime}, and a run drains {notice} s before its end: nothing would be done. Write a "
            'longer one, or directives: ["--signal=B:USR1@60"] for a shorter notice.'
        )


def notice_seconds(cluster: Cluster) -> int:
    """How long before its time is up a job is told.

    Examples
    --------
    >>> notice_seconds(Cluster()), notice_seconds(Cluster(directives=("--signal B:USR1@20",)))
    (120, 20)
    """
    directives = with_configured(cluster, _configured()).directives
    requested = [match[1] for directive in directives if (match := _SIGNAL.search(directive))]
    told = _TOLD.fullmatch(requested[-1]) if requested else None
    return int(told[1]) if told else NOTICE_SECONDS


def with_configured(cluster: Cluster, known: Mapping[str, Any]) -> Cluster:
    """A cluster section with what the user's ``jobqueue.yaml`` says where the job says nothing.

    Examples
    --------
    >>> found = with_configured(Cluster(queue="mine"), {"queue": "theirs", "account": "phys", "job-script-prologue": ["a"]})
    >>> found.queue, found.account, found.prologue
    ('mine', 'phys', ('a',))
    """
    told: dict[str, Any] = {key: known.get(theirs) for key, theirs in _CONFIGURED.items()}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items() if value}
    said = {key for key in values if getattr(cluster, key) != getattr(Cluster(), key)}
    kept: Any = {key: value for key, value in values.items() if key not in said}
    return dataclasses.replace(cluster, **kept)


def _configured() -> Mapping[str, Any]:
    """What ``jobqueue.yaml`` says; not what dask-jobqueue itself would take for granted, such as half an hour."""
    found: Mapping[str, Any] = dask.config.collect().get("jobqueue", {}).get("slurm", {})
    return found


def _line(key: str, value: str) -> str:
    return f"{key}={shlex.quote(value)}" if value else key
