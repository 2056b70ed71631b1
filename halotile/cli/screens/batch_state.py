"""Status of a submitted run: its batch system's answer about its batch job, compared with the run's own records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import ClusterFailed, DamagedData
from halotile.graphs.amounts import counted
from halotile.storage.run_directory.directory import TIME_IS_UP, BatchFiles, RunDirectory

QUEUED = "queued"
CANCELLED = "cancelled"
_AT_WORK = ("RUNNING", "COMPLETING", "in")
"""First words of states. PBS and SGE are only asked for jobs that are *in the queue*, running or not."""


@dataclass(frozen=True)
class BatchJob:
    """The batch job of a run."""

    number: str  # its number; empty where it has not been accepted
    attempts: int  # number of attempts that have begun
    # submitted, began: times of the submission and of the beginning of the last attempt (Unix time)
    submitted: float
    began: float
    state: str | None  # state according to its batch system; None once the job is over
    known: bool  # the batch system has answered
    failure: str | None  # reason for the failure, where the run is marked as failed

    @property
    def words(self) -> str:
        """Describe the batch job in a few words."""
        state = self.state or (
            "over" if self.known else "unknown: the batch system does not answer from this machine"
        )
        return f"job {self.number or '?'}: {state}, {counted(self.attempts, 'attempt')} so far"

    def to_json(self) -> dict[str, Any]:
        """Return the batch job for programs."""
        return {"job": self.number, "state": self.state, "attempts": self.attempts, "failure": self.failure}

    def corrected(self, recorded: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return state and reason where the run's own record is older than its batch job, else None."""
        updated = float(recorded.get("updated", 0.0))
        is_current = updated >= max(self.submitted, self.began)
        drained = recorded.get("state") == "stopped" and self.failure is None
        if self.state is not None:
            at_work = self.state.split()[0] in _AT_WORK
            # A driver that has drained requests another attempt before its job ends.
            if not (at_work and is_current) or drained:
                return QUEUED, ""
            if self.failure is None:  # otherwise its job is about to end
                return None
        if drained and not self.known and TIME_IS_UP in str(recorded.get("reason")):
            return QUEUED, ""
        if self.failure == CANCELLED:
            return "stopped", CANCELLED
        if self.failure is not None and recorded.get("state") != "finished":
            return "failed", self.failure
        if not is_current and self.known:
            return (
                "failed",
                "its batch job ended before the run began: `recon-cli logs` shows what it printed",
            )
        return None


def batch_job(directory: Path) -> BatchJob | None:
    """Return the batch job of a run; None for a run that was not submitted."""
    from halotile.graphs.clusters.launches.batch_system import system_in

    files = BatchFiles(RunDirectory(directory))
    try:
        record = files.read()
    except DamagedData:
        record = None
    if record is None or not {"number", "attempts", "submitted", "began"} <= record.keys():
        return None
    number, state, has_answer = record["number"], None, True
    try:
        state = system_in(record).state_of(number) if number else None
    except ClusterFailed:
        has_answer = False
    return BatchJob(
        number, record["attempts"], record["submitted"], record["began"], state, has_answer, files.failure()
    )
