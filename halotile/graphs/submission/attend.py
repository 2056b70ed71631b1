"""A submitted run inside its batch job: it goes on where the last attempt ended, and asks for another one in time."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from halotile.errors import ClusterFailed, ConfigError, DamagedData, OutputInUse, Stopped
from halotile.graphs.runs.outcome import ended_by
from halotile.graphs.runs.signals import drains_within, ignore_signals
from halotile.graphs.submission import slurm
from halotile.graphs.submission.script import NOTICE_SECONDS
from halotile.storage.run_directory.batch_files import BatchFiles
from halotile.storage.run_directory.directory import RunDirectory

END_SECONDS = 40
SILENCE_SECONDS = 3600.0
"""An output that is held for so long without a word of whoever holds it is not waited for any more."""
TIME_IS_UP = "SIGUSR1"
"""What the batch system sends before it ends a job."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What was submitted.

    Parameters
    ----------
    job : mapping
        The job, as a run directory keeps one.
    options : mapping
        What the command said besides: fresh, same_input, allow_import.
    submitted_from : str
        The machine where it was.
    submitted : float
        When it was (Unix time).
    notice_seconds : float
        How long before its time is up a job of it is told.
    number : str
        The batch job's number.
    attempts : int
        How often it has begun.
    began : float
        When the last attempt began.
    """

    job: dict[str, Any]
    options: dict[str, bool]
    submitted_from: str
    submitted: float
    notice_seconds: float = NOTICE_SECONDS
    number: str = ""
    attempts: int = 0
    began: float = 0.0

    def keep(self, files: BatchFiles) -> None:
        """Write it down."""
        files.write(asdict(self))


def submission_in(run: RunDirectory) -> Submission:
    """What a run directory was submitted as.

    Raises
    ------
    ConfigError
        When it was not.
    DamagedData
        When what was written down of it cannot be understood.
    """
    record = BatchFiles(run).read()
    if record is None:
        raise ConfigError(f"{run.path} was not submitted: `recon-cli submit CONFIG` does that.")
    try:
        return Submission(**record)
    except TypeError:
        raise DamagedData(
            f"{run.path}: what it was submitted as is damaged. Submit it again: `recon-cli submit CONFIG`."
        ) from None


def check_not_waiting(run: RunDirectory) -> None:
    """Refuse a run whose batch job waits or runs already.

    Raises
    ------
    ConfigError
        When it does.
    ClusterFailed
        When Slurm does not answer.
    """
    before = BatchFiles(run).read()
    if before and before.get("number") and (state := slurm.state_of(before["number"])) is not None:
        raise ConfigError(
            f"job {before['number']} of this run is {state}. Wait for it, or end it with `recon-cli cancel {shlex.quote(str(run.path))}`."
        )


def submit(submission: Submission, script: str, run: RunDirectory) -> Submission:
    """Hand a run to Slurm; everything about it lies in its run directory.

    Raises
    ------
    ConfigError
        When a batch job of this run is waiting or running already.
    ClusterFailed
        When Slurm does not take it.
    """
    files = BatchFiles(run)
    is_new = not run.path.exists()
    run.create()
    with run.lock():  # of two at once, one finds the other's batch job
        check_not_waiting(run)
        before = files.state()
        files.clear_end()
        files.write_script(script)
        files.log_path.touch(mode=0o600)
        submission.keep(files)
        try:
            made = replace(submission, number=slurm.submit(files.script_path))
        except ClusterFailed:
            files.restore(before)
            if is_new:
                run.disk.remove_tree(run.path)
            raise
        made.keep(files)
    return made


def attend(run: RunDirectory, go: Callable[[Submission, bool], None]) -> None:
    """Make one attempt at a submitted run.

    Parameters
    ----------
    run : RunDirectory
        Where it lies.
    go : callable
        ``go(submission, fresh)`` runs it.

    Raises
    ------
    Stopped
        When its time was up, or a machine that was lost holds its output; it has been asked for again.
    OutputInUse
        When another driver is at work on its output.
    ClusterFailed
        When its time was up, and nothing was done in it.
    """
    files = BatchFiles(run)
    before = submission_in(run)
    # Slurm puts jobs back for reasons of its own too, and a job that was resubmitted has another number.
    number = os.environ.get("SLURM_JOB_ID", before.number)
    begun = replace(before, attempts=before.attempts + 1, number=number, began=time.time())
    begun.keep(files)
    files.clear_end()
    try:
        with drains_within(drain_seconds(begun.notice_seconds)):
            go(begun, begun.options["fresh"] and not _has_begun(run, begun.submitted))
    except Stopped as stopped:
        if stopped.requested_by != TIME_IS_UP:
            raise
        if isinstance(stopped.__cause__, OutputInUse):
            _leave_held(stopped.__cause__, begun, run)
        if not _done_since(run, begun.began):
            reason = "its time was up before anything was done, so it is not asked for again: write a longer cluster.walltime"
            files.mark_end(reason)
            raise ClusterFailed(reason) from stopped
        ignore_signals()  # who is put back is told to end
        _ask_again(begun, files)
        raise
    except OutputInUse as held:
        _leave_held(held, begun, run)
    except BaseException as error:
        files.mark_end(ended_by(error))
        raise
    files.mark_end(None)


def _leave_held(held: OutputInUse, submission: Submission, run: RunDirectory) -> NoReturn:
    """End an attempt that did not get its output: who holds it may be lost, and another attempt find it free."""
    files = BatchFiles(run)
    heard = (run.read_status() or {}).get("updated", 0.0)
    if heard > submission.began:  # another driver is at work there: it is its run
        raise held
    if time.time() - max(heard, submission.submitted) > SILENCE_SECONDS:
        files.mark_end(ended_by(held))
        raise held
    ignore_signals()
    _ask_again(submission, files)
    raise Stopped(f"{held} Nothing has been heard of it, so this job is asked for again.") from held


def drain_seconds(notice_seconds: float) -> float:
    """How long the blocks in flight may take: what is left is for the workers to end, and for another attempt to be asked for.

    Examples
    --------
    >>> drain_seconds(120), drain_seconds(20)
    (80, 10.0)
    """
    return max(notice_seconds - END_SECONDS, notice_seconds / 2)


def _has_begun(run: RunDirectory, since: float) -> bool:
    """Whether a run has had its output for itself since then: what --fresh asks for is done once."""
    return any(event.get("event") == "begin" and event.get("time", 0) > since for event in run.read_events())


def _done_since(run: RunDirectory, began: float) -> int:
    """Blocks that an attempt has done."""
    status = run.read_status() or {}
    return int(status["done"]) - int(status["resumed"]) if status.get("updated", 0) > began else 0


def _ask_again(submission: Submission, files: BatchFiles) -> None:
    """The same job once more; where jobs may not be put back, another one.

    Raises
    ------
    ClusterFailed
        Where no job may be submitted either.
    """
    try:
        slurm.requeue(submission.number)
    except ClusterFailed as refused:
        try:
            replace(submission, number=slurm.submit(files.script_path)).keep(files)
        except ClusterFailed as error:
            reason = f"it has to go on in another job, and can be neither put back ({refused}) nor submitted again ({error})"
            files.mark_end(f"{reason}: `recon-cli submit` goes on")
            raise ClusterFailed(f"{reason}.") from error
