"""How the batch job of a run stands, as Slurm says it."""

from __future__ import annotations

from pathlib import Path

from halotile.errors import ClusterFailed, DamagedData
from halotile.storage.batchfiles import BatchFiles
from halotile.storage.rundir import RunDirectory

OVER = "over"
NOT_YET = "not submitted yet"


def is_in_queue(directory: Path) -> bool:
    """Whether a run was submitted, and its batch job is not over."""
    try:
        record = BatchFiles(RunDirectory(directory)).read()
    except DamagedData:
        return False
    return record is not None and _state_in_words(record["number"]) not in (OVER, NOT_YET)


def batch_rows(directory: Path) -> list[tuple[str, str]]:
    """How the batch job of a run stands; nothing for a run that was not submitted."""
    record = BatchFiles(RunDirectory(directory)).read()
    if not record:
        return []
    words = f"job {record['number'] or '?'}: {_state_in_words(record['number'])}"
    attempts = int(record["attempts"])
    return [("batch", f"{words}, {attempts} {'attempt' if attempts == 1 else 'attempts'} so far")]


def _state_in_words(number: str) -> str:
    from halotile.graphs.submission import slurm

    if not number:
        return NOT_YET
    try:
        return slurm.state_of(number) or OVER
    except ClusterFailed as error:
        return f"unknown ({error})"
