"""Checking an output: every shard there, every checksum right; and doing damaged blocks again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData, OutputRefused
from halotile.graphs.jobs.sections import Job
from halotile.graphs.plans.make import make_plan
from halotile.graphs.plans.plan import run_directory_of
from halotile.graphs.runs.claim import check_same_job
from halotile.graphs.runs.damage import damaged_blocks, written_of
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.progress import Observer
from halotile.graphs.runs.replacing import journal_fingerprint
from halotile.storage.disk.ownership import metadata_problems, restore_metadata
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.sharded.output import Layout, open_output


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
    output: str | Path, *, job: Job | None = None, repair: bool = False, observer: Observer | None = None
) -> Verdict:
    """Check every block that the journal calls done, or every shard where there is no journal.

    Parameters
    ----------
    output : path
        The Zarr that a run wrote.
    job : Job, optional
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
    directory = _keeper(RunDirectory(run_directory_of(path)))
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
    written = _outputs(directory, stored)
    problems = tuple(problem for each in written for problem in (*each.metadata(), *each.lines()))
    undone = _undone(written)
    # Blocks that are not done may be those that an earlier repair struck before it was killed.
    if not repair or not (problems or undone):
        iterates = bool(stored.get("scratch")) and not directory.state_path.is_dir()
        return Verdict(
            _total(written), sum(len(each.done) for each in written), problems, 0, undone, iterates=iterates
        )
    _repair(path, directory, stored, written, job, observer)
    after = _outputs(directory, stored, look_at=[each.damaged for each in written])
    left = sum(len(each.lines()) for each in after)
    done = sum(len(each.done) for each in after)
    return Verdict(_total(after), done, problems, len(problems) - left, _undone(after))


def _keeper(directory: RunDirectory) -> RunDirectory:
    """Return the directory that keeps the run, also from beside a further output of it."""
    first = directory.read_primary()
    return RunDirectory(Path(first)) if first else directory


@dataclass(frozen=True)
class _Written:
    """One output of a run as it is now."""

    path: Path
    layout: Layout
    grid: Grid
    directory: RunDirectory
    owner: str
    """Fingerprint of its journal."""
    done: RangeSet
    damaged: dict[int, list[str]]
    prefix: str = ""

    def metadata(self) -> tuple[str, ...]:
        """Return the problems of its metadata."""
        return tuple(metadata_problems(self.path, self.layout))

    def lines(self) -> tuple[str, ...]:
        """Return the problems of its blocks."""
        return _lines(f"{self.prefix}block", self.damaged)


def _outputs(
    directory: RunDirectory, stored: dict[str, Any], look_at: Sequence[Iterable[int]] | None = None
) -> list[_Written]:
    """Check every output of a run; of blocks those that are done, or those that are named."""
    found = []
    for place, (layout, grid) in enumerate(written_of(stored)):
        first = directory.path.with_name(directory.path.name.removesuffix(".run"))
        path = Path(stored["outputs"][place]["path"]) if place else first
        beside = RunDirectory(run_directory_of(path))
        owner = journal_fingerprint(stored["fingerprint"], place)
        journal = Journal.open(beside.journal_path, owner, len(grid), read_only=True)
        numbers = journal.done if look_at is None else look_at[place]
        damaged = dict(damaged_blocks(path, layout, map(grid.block_at, numbers), journal.digest))
        prefix = f"{path.name} " if place else ""
        found.append(_Written(path, layout, grid, beside, owner, journal.done, damaged, prefix))
    return found


def _total(written: Iterable[_Written]) -> int:
    return sum(len(each.grid) for each in written)


def _undone(written: Iterable[_Written]) -> RangeSet:
    """Return the blocks that are not done; those of further outputs are numbered on from the first."""
    undone, before = RangeSet(), 0
    for each in written:
        undone.add(before + number for number in each.done.complement(len(each.grid)))
        before += len(each.grid)
    return undone


def _plan_of(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the plan; where it is not as this version writes one, its journal tells whether another version did."""
    try:
        return directory.read_plan()
    except DamagedData:
        with suppress(FileNotFoundError):
            Journal.open_any(directory.journal_path)
        raise


def _repair(
    path: Path,
    directory: RunDirectory,
    stored: dict[str, Any],
    written: Iterable[_Written],
    job: Job | None,
    observer: Observer | None,
) -> None:
    if job is None:
        raise OutputRefused(f"{path} cannot be repaired without its job. Give the job that wrote it.")
    plan = make_plan(job)
    check_same_job(plan, stored)
    with directory.lock():
        for each in written:
            restore_metadata(each.path, each.layout)
            with Journal.open(each.directory.journal_path, each.owner, len(each.grid)) as journal:
                journal.unmark(each.damaged)
    run(plan, observer=observer)


def _lines(word: str, damaged: dict[int, list[str]]) -> tuple[str, ...]:
    return tuple(
        f"{word} {number}: {problem}" for number, problems in damaged.items() for problem in problems
    )
