"""A submitted run inside its batch job: it goes on where the last attempt ended, and requests another job in time."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from halotile.errors import ClusterFailed, ConfigError, DamagedData, OutputInUse, Stopped
from halotile.graphs.clusters.launches.batch_system import SLURM, system_in
from halotile.graphs.clusters.launches.driver_script import DRAIN_AT, NOTICE_SECONDS
from halotile.graphs.runs.outcome import ended_by
from halotile.graphs.runs.signals import drains_within, ignore_signals
from halotile.graphs.waiting import report_if_slow
from halotile.storage.run_directory.directory import TIME_IS_UP, BatchFiles, RunDirectory

END_SECONDS = 40
NUMBER_SECONDS = 60.0
"""Time in which the command that submits a job stores the job's number; the job may begin before that."""
SILENCE_SECONDS = 3600.0
"""An output whose holder is silent for so long is not waited for any more."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submitted run."""

    job: dict[str, Any]  # job, in the form of a run directory
    options: dict[str, bool]  # further options of the command: fresh, same_input, allow_import
    submitted_from: str  # machine that it was submitted from
    submitted: float  # time of the submission (Unix time)
    notice_seconds: float = NOTICE_SECONDS  # seconds from the signal that its time is up to the end of a job
    number: str = ""  # batch job's number
    system: str = SLURM  # its batch system, by the name of its kind of cluster
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
    if (state := system_in(before).state_of(before["number"])) is not None:
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
            number = system_in(vars(submission)).submit(files.script_path)
        except ClusterFailed:
            files.restore(before)
            if is_new:
                run.remove()
            raise
        submitted = replace(submission_in(run), number=number)  # it may have begun
        submitted.keep(files)
    return submitted


def attend(run: RunDirectory, go: Callable[[Submission, bool], None]) -> None:
    """Make one attempt at a submitted run.

    ``go``: `go(submission, fresh)` runs it.
    """
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
    system = system_in(vars(submission))
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
