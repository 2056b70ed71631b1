"""Submitted runs: the script of the batch job that holds the driver, its attempts, and the request for another job in time."""

import dataclasses
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import dask

from halotile.errors import ClusterFailed, ConfigError, DamagedData, OutputInUse, Stopped
from halotile.graphs.clusters.base import Order
from halotile.graphs.clusters.launches import batch_system
from halotile.graphs.kinds.sections import Cluster, Job, parse_bytes
from halotile.graphs.runs.driver import ended_by
from halotile.graphs.runs.signals import drains_within, ignore_signals
from halotile.graphs.waiting import report_if_slow
from halotile.storage.disk.object_path import path_of
from halotile.storage.run_directory.directory import LOG, TIME_IS_UP, BatchFiles, RunDirectory

DRAIN_AT = "HALOTILE_DRAIN_AT"  # time at which a run drains (Unix time), in jobs of batch systems that do not signal
NOTICE_SECONDS = 120  # seconds from the signal that its time is up to the end of a job
EARLY_SECONDS = 60  # Slurm may signal so much earlier than requested (manual page of sbatch, option --signal)
_SIGNAL = re.compile(r"--signal[=\s]\s*(\S+)")
# A signal to the batch shell that drains a run; the number is its notice in seconds.
_DRAINS = re.compile(r"[BR]*B[BR]*:(?:SIG)?(?:USR1|10)@(\d+)")
# Keys of a cluster section with their names in dask-jobqueue's configuration.
_CONFIGURED = {
    "queue": "queue",
    "account": "account",
    "walltime": "walltime",
    "prologue": "job-script-prologue",
    "directives": "job-extra-directives",
    "directives_skip": "job-directives-skip",
}
DRIVER_BYTES = 2**30  # memory for the driver, on each machine: which one it will be is not known before


def script_of(system: batch_system.BatchSystem, job: Job, run: Path, umask: int) -> str:
    """The script that is submitted to a batch system, with the arguments of :func:`batch_script`."""
    if system.module == batch_system.SLURM:
        return batch_script(job, run, umask)
    return driver_script(system, job, run, umask)


def driver_script(system: batch_system.BatchSystem, job: Job, run: Path, umask: int) -> str:
    """The script of a job that holds the driver alone, with the directives of dask-jobqueue; its workers are jobs of their own."""
    directives = (*system.directives_of(job.cluster), *(system.driver or ()))
    options = {key: value for key, value in job.cluster.options.items() if key != "resource_spec"}  # of workers
    choice = dataclasses.replace(job.cluster, cores=1, gpus=0, directives=directives, options=options)
    order = Order(workers=1, memory_bytes=parse_bytes(job.run.memory_per_worker) + DRIVER_BYTES, choice=choice)
    with batch_system.refusals_described(system, choice):
        arguments = batch_system.job_arguments(system, order, run) | {"log_directory": None}
        header = system.cluster_class().job_cls("", name=batch_system.NAME, **arguments).job_header
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


def walltime_seconds(system: batch_system.BatchSystem, choice: Cluster) -> int | None:
    """Walltime of a job of dask-jobqueue; None where neither the job nor the user's configuration has one."""
    system.cluster_class()  # its import makes the default settings known
    configured = str(choice.walltime or system.configured("walltime") or "")
    if not choice.walltime and system.module == "lsf":  # minutes, or hours and minutes
        configured += ":00" if ":" in configured else ""
    elif not choice.walltime and configured.isdecimal():
        return int(configured)
    return batch_system.seconds_of(configured) if batch_system.is_walltime(configured) else None


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
    memory = parse_bytes(job.run.memory_per_worker) + batch_system.NANNY_BYTES + DRIVER_BYTES
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


def check_walltime(cluster: Cluster, system: batch_system.BatchSystem) -> None:
    """Refuse a walltime whose notice would come before anything is done."""
    if system.module != batch_system.SLURM:
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
    if (
        batch_system.is_walltime(walltime)
        and (seconds := batch_system.seconds_of(walltime)) <= 2 * notice + EARLY_SECONDS
    ):
        shorter = (seconds - EARLY_SECONDS) // 3
        hint = f', or directives: ["--signal=B:USR1@{shorter}"] for a shorter notice' if shorter >= 10 else ""
        raise ConfigError(
            f"cluster.walltime is {walltime}, and a run drains {notice} s before its end, to which Slurm adds up to {EARLY_SECONDS} s: "
            f"nothing would be done. Write at least {(2 * notice + EARLY_SECONDS) // 60 + 1} minutes{hint}."
        )


def notice_seconds(cluster: Cluster, system: str = batch_system.SLURM) -> int:
    """Seconds from the signal that its time is up to the end of a job with this cluster section.

    >>> notice_seconds(Cluster()), notice_seconds(Cluster(directives=("--signal B:USR1@20",)))
    (120, 20)
    """
    directives = with_configured(cluster, _configured()).directives if system == batch_system.SLURM else ()
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


END_SECONDS = 40
# Time in which the command that submits a job stores the job's number; the job may begin before that.
NUMBER_SECONDS = 60.0
SILENCE_SECONDS = 3600.0  # an output whose holder is silent for so long is not waited for any more


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submitted run."""

    job: dict[str, Any]  # job, in the form of a run directory
    options: dict[str, bool]  # further options of the command: fresh, same_input, allow_import
    submitted_from: str  # machine that it was submitted from
    submitted: float  # time of the submission (Unix time)
    notice_seconds: float = NOTICE_SECONDS  # seconds from the signal that its time is up to the end of a job
    number: str = ""  # batch job's number
    system: str = batch_system.SLURM  # its batch system, by the name of its kind of cluster
    attempts: int = 0  # number of attempts so far
    began: float = 0.0  # begin of the last attempt

    def keep(self, files: BatchFiles) -> None:
        """Write it into the run directory."""
        files.write(asdict(self))


def submission_in(run: RunDirectory) -> Submission:
    """Read the submission of a run directory."""
    record = BatchFiles(run).read()
    if record is None:
        raise ConfigError(f"{run.path} was not submitted: `recon-cli submit CONFIG` does that.")
    try:
        return Submission(**record)
    except TypeError:
        raise DamagedData(
            f"{run.path}: the record of its submission is damaged. Submit it again: `recon-cli submit CONFIG`."
        ) from None


def check_not_waiting(run: RunDirectory) -> None:
    """Refuse a run whose batch job waits or runs already."""
    before = BatchFiles(run).read()
    if not before or not before.get("number"):
        return
    if (state := batch_system.system_in(before).state_of(before["number"])) is not None:
        raise ConfigError(
            f"job {before['number']} of this run is {state}. Wait for it, or end it with `recon-cli cancel {shlex.quote(str(run.path))}`."
        )


def submit(submission: Submission, script: str, run: RunDirectory) -> Submission:
    """Submit a run to its batch system; all of its files are in its run directory."""
    files = BatchFiles(run)
    is_new = not run.path.exists()
    run.create()
    with run.lock():  # of two submissions at once, one finds the other's batch job
        check_not_waiting(run)
        before = files.state()
        files.clear_end()
        files.write_script(script)
        files.log_path.touch(mode=0o600)
        submission.keep(files)
        try:
            number = batch_system.system_in(vars(submission)).submit(files.script_path)
        except ClusterFailed:
            files.restore(before)
            if is_new:
                run.remove()
            raise
        submitted = replace(submission_in(run), number=number)  # it may have begun
        submitted.keep(files)
    return submitted


def attend(run: RunDirectory, go: Callable[[Submission, bool], None]) -> None:
    """Make one attempt at a submitted run. ``go``: `go(submission, fresh)` runs it."""
    files = BatchFiles(run)
    # Slurm requeues jobs for reasons of its own too, and a job that was resubmitted has another number.
    number, deadline = os.environ.get("SLURM_JOB_ID"), time.monotonic() + NUMBER_SECONDS
    while not (before := submission_in(run)).number and not number and time.monotonic() < deadline:
        time.sleep(0.2)
    begun = replace(before, attempts=before.attempts + 1, number=number or before.number, began=time.time())
    begun.keep(files)
    files.clear_end()
    try:
        drains = drains_within(drain_seconds(begun.notice_seconds))
        # Slurm signals itself; where the script of a job says when its time is up, this process sends itself the signal.
        moment = min(float(os.environ.get(DRAIN_AT) or "inf") - begun.began, threading.TIMEOUT_MAX)
        with drains, report_if_slow(_signal_itself, TIME_IS_UP, moment):
            go(begun, begun.options["fresh"] and not has_begun(run, begun.submitted))
    except Stopped as stopped:
        if stopped.requested_by != TIME_IS_UP:
            raise
        if isinstance(stopped.__cause__, OutputInUse):
            _retry_later(stopped.__cause__, begun, run)
        if not _done_since(run, begun.began):
            reason = "its time was up before anything was done, so no other job is requested: write a longer cluster.walltime"
            files.mark_end(reason)
            raise ClusterFailed(reason) from stopped
        ignore_signals()  # a requeue ends this process with a signal
        _request_again(begun, files)
        raise
    except OutputInUse as in_use:
        _retry_later(in_use, begun, run)
    except BaseException as error:
        files.mark_end(ended_by(error))
        raise
    files.mark_end(None)


def _signal_itself(name: str) -> None:
    os.kill(os.getpid(), signal.Signals[name])


def _retry_later(in_use: OutputInUse, submission: Submission, run: RunDirectory) -> NoReturn:
    """End an attempt that did not get its output: if its holder is lost, another attempt may find it free."""
    files, status = BatchFiles(run), run.read_status() or {}
    updated = status.get("updated", 0.0)
    if (status.get("pid"), status.get("host")) == (os.getpid(), socket.gethostname()):
        is_lost = _done_since(run, submission.began) > 0  # of several images, the others were done
    elif updated > submission.began:  # another driver is at work there: it is its run
        raise in_use
    else:
        is_lost = time.time() - max(updated, submission.submitted) <= SILENCE_SECONDS
    if not is_lost:
        files.mark_end(ended_by(in_use))
        raise in_use
    ignore_signals()
    _request_again(submission, files)
    raise Stopped(f"{in_use} Its holder has been silent, so this job is requested again.") from in_use


def drain_seconds(notice_seconds: float) -> float:
    """Time for the blocks in flight: the rest is for the workers to end, and to request another attempt.

    >>> drain_seconds(120), drain_seconds(20)
    (80, 10.0)
    """
    return max(notice_seconds - END_SECONDS, notice_seconds / 2)


def has_begun(run: RunDirectory, since: float) -> bool:
    """Return True if a run has had its output for itself since then: the effect of --fresh happens once."""
    return any(event.get("event") == "begin" and event.get("time", 0) > since for event in run.read_events())


def _done_since(run: RunDirectory, began: float) -> int:
    """Number of blocks that an attempt has done."""
    status = run.read_status() or {}
    return int(status["done"]) - int(status["resumed"]) if status.get("updated", 0) > began else 0


def _request_again(submission: Submission, files: BatchFiles) -> None:
    """Requeue the same job; where jobs may not be requeued, submit another one."""
    system = batch_system.system_in(vars(submission))
    try:
        system.requeue(submission.number)
    except ClusterFailed as refused:
        try:
            number = system.submit(files.script_path)
            replace(submission_in(files.run), number=number).keep(files)
        except ClusterFailed as error:
            reason = (
                f"it has to go on in another job, and can be neither requeued ({refused}) nor submitted again ({error})"
            )
            files.mark_end(f"{reason}: `recon-cli submit` goes on")
            raise ClusterFailed(f"{reason}.") from error
