"""Checking an output: every shard there, every checksum right; and doing damaged blocks again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData, OutputRefused
from halotile.graphs.jobs.engines import engine_of
from halotile.graphs.jobs.reconstruct.continuation import is_gone
from halotile.graphs.jobs.sections import AnyJob
from halotile.graphs.plans.plan import run_directory_of
from halotile.graphs.runs.claim import check_same_job
from halotile.graphs.runs.damage import damaged_blocks, written_of
from halotile.graphs.runs.progress import Observer
from halotile.storage.disk.ownership import metadata_problems, restore_metadata
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.sharded.output import open_output


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found: one line for each problem."""

    blocks: int
    checked: int
    problems: tuple[str, ...]
    repaired: int
    undone: RangeSet = field(default_factory=RangeSet)
    """Blocks that the run has not done, or has given up: there is nothing to check."""
    repairable: bool = True
    """Whether there is a run directory, which says by what job it was written."""
    iterates: bool = False
    """Whether a repair of blocks has to iterate again, from the start."""

    @property
    def sound(self) -> bool:
        """Whether every block that was done is as it was written, by now."""
        return self.repaired >= len(self.problems)


def verify(
    output: str | Path, *, job: AnyJob | None = None, repair: bool = False, observer: Observer | None = None
) -> Verdict:
    """Check every block that the journal calls done, or every shard where there is no journal.

    Parameters
    ----------
    output : path
        The Zarr that a run wrote.
    job : Job or Reconstruction, optional
        The job that wrote it; needed to repair.
    repair : bool
        Restore the metadata, strike damaged blocks from the journal and run the job again: for them, and for those that are not
        done, among which are those of a repair that was killed. A reconstruction is iterated again, and then writes them alone.
    observer : callable, optional
        Called with the progress of a repair.

    Raises
    ------
    OutputRefused
        When nothing, a file or another Zarr is there, directories stand where a run keeps files, a repair is asked for and
        the output has no run directory, or a run is writing it.
    ResumeRefused
        When a repair is asked for and the job is no longer the one that wrote the output.
    """
    path = Path(os.path.abspath(output))
    if not path.name or (path.exists() and not path.is_dir()):
        raise OutputRefused(f"{path} is no Zarr that a run wrote. Give the output.path of a job.")
    directory = RunDirectory(run_directory_of(path))
    directory.check_files()
    stored = _plan_of(directory)
    if stored is None:
        if not path.exists():
            raise OutputRefused(f"{path}: nothing is there. Give the output.path of a job.")
        if repair:
            raise OutputRefused(
                f"{path} has no run directory {directory.path}: there is no job to repair it with. "
                "Leave out --repair to check it."
            )
        layout = open_output(path)
        damaged = dict(damaged_blocks(path, layout, layout.grid))
        return Verdict(len(layout.grid), len(layout.grid), _lines("shard", damaged), 0, repairable=False)
    layout, grid = written_of(stored)
    total = len(grid)
    journal = _journal(directory, stored, total)
    metadata = metadata_problems(path, layout)
    damaged = dict(damaged_blocks(path, layout, map(grid.block_at, journal.done), journal.digest))
    problems = (*metadata, *_lines("block", damaged))
    undone = journal.done.complement(total)
    # Blocks that are not done may be those that an earlier repair struck before it was killed.
    if not repair or not (problems or undone):
        return Verdict(total, len(journal.done), problems, 0, undone, iterates=is_gone(directory))
    _repair(path, directory, stored, damaged, job, observer)
    after = _journal(directory, stored, total)
    left = dict(damaged_blocks(path, layout, map(grid.block_at, damaged), after.digest))
    undone = after.done.complement(total)
    return Verdict(total, len(after.done), problems, len(problems) - len(_lines("block", left)), undone)


def _plan_of(directory: RunDirectory) -> dict[str, Any] | None:
    """The plan; where it is not as this version writes one, its journal tells whether another version did."""
    try:
        return directory.read_plan()
    except DamagedData:
        with suppress(FileNotFoundError):
            Journal.open_any(directory.journal_path)
        raise


def _journal(directory: RunDirectory, stored: dict[str, Any], total: int) -> Journal:
    """The journal as it is now, to read."""
    return Journal.open(directory.journal_path, stored["fingerprint"], total, read_only=True)


def _repair(
    path: Path,
    directory: RunDirectory,
    stored: dict[str, Any],
    damaged: Iterable[int],
    job: AnyJob | None,
    observer: Observer | None,
) -> None:
    if job is None:
        raise OutputRefused(f"{path} cannot be repaired without its job. Give the job that wrote it.")
    engine = engine_of(job)
    plan = engine.plan(job)
    check_same_job(plan, stored)
    with directory.lock():
        restore_metadata(path, plan.layout)
        journal = Journal.open(directory.journal_path, stored["fingerprint"], len(plan.grid))
        journal.unmark(damaged)
        journal.close()
    engine.run(plan, observer=observer)


def _lines(word: str, damaged: dict[int, list[str]]) -> tuple[str, ...]:
    return tuple(
        f"{word} {number}: {problem}" for number, problems in damaged.items() for problem in problems
    )
