"""Verification of an output: every shard present, every checksum right; and repair of damaged blocks."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData, OutputRefused
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import check_same_job, journal_fingerprint
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.records import RecordedImage, damaged_blocks, written_of
from halotile.graphs.watching.progress import Observer
from halotile.storage.disk.object_path import ObjectPath, OutputPath, full_path, path_of
from halotile.storage.disk.place import check_reachable, refusing_silence
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.run_directory.object_claim import ObjectClaim, elsewhere
from halotile.storage.sharded.output import ABSENT, FileLayout, create_output, open_output
from halotile.storage.sharded.ownership import added_levels, restore_metadata, unmark_advice


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check: one line for each problem."""

    blocks: int
    checked: int
    problems: tuple[str, ...]
    repaired: int
    # Blocks that the run has not done, or has given up: there is nothing to check.
    undone: RangeSet = field(default_factory=RangeSet)
    # True where there is a run directory with the job that wrote the output. Without one, shards are checked against
    # their checksums only: those of another place or time pass.
    repairable: bool = True
    iterates: bool = False  # true where a repair of blocks has to iterate again from the start
    unchecked_levels: int = 0  # levels that were added to the image, which no journal knows
    # Words on how to make missing chunks pixels of the fill value, where metadata say that none may be missing.
    unmark: str = ""

    @property
    def sound(self) -> bool:
        """True where every block that was done is as it was written, by now."""
        return self.repaired >= len(self.problems)


@refusing_silence()
def verify(
    output: str | OutputPath,  # the Zarr that a run wrote
    *,
    job: Job | None = None,  # job that wrote it; needed to repair
    # restore the metadata, remove damaged blocks from the journal and run the job again: for them, and for those that
    # are not done, which include those of a repair that was killed. A reconstruction is iterated again, and then
    # writes only these blocks
    repair: bool = False,
    observer: Observer | None = None,  # called with the progress of a repair
) -> Verdict:
    """Check every block that the journal records as done, or every shard where there is no journal."""
    path = full_path(output)
    check_reachable(path, "the output")
    directory = RunDirectory.beside(path).of_run()
    if not path.name or (path.exists() and not path.is_dir() and not directory.path.is_dir()):
        raise OutputRefused(f"{path} is not the output of a run. Give the output.path of a job.")
    stored = _plan_of(directory)
    if stored is not None and path not in _paths_of(directory, stored):  # it belonged to a run that is gone
        stored = None
    if stored is None:
        if not path.exists():
            raise OutputRefused(f"{path}: nothing is there. Give the output.path of a job.")
        if repair:
            raise OutputRefused(
                f"{path} has no run directory {directory.path}: there is no job to repair it with. "
                f"Leave out --repair to check it.{elsewhere(path)}"
            )
        layout = open_output(path)
        unmark = unmark_advice(path, layout)
        damaged = dict(damaged_blocks(path, layout, layout.grid))
        if not unmark:
            damaged = {n: lines for n, lines in damaged.items() if not lines[-1].endswith(ABSENT)}
        return Verdict(
            len(layout.grid),
            len(layout.grid),
            _lines("shard", damaged),
            0,
            repairable=False,
            unchecked_levels=added_levels(path, layout),
            unmark=unmark,
        )
    if isinstance(path, ObjectPath):
        ObjectClaim(path, directory).check(may_replace=False)
    written = _outputs(directory, stored)
    problems = tuple(problem for state in written for problem in (*state.metadata_problems(), *state.lines))
    undone = _undone(written)
    # Blocks that are not done may be those that an earlier repair removed from the journal before it was killed.
    if not repair or not (problems or undone):
        iterates = bool(stored.get("scratch")) and not directory.state_path.is_dir()
        return Verdict(
            _total(written),
            sum(len(state.journal.done) for state in written),
            problems,
            0,
            undone,
            iterates=iterates,
            unchecked_levels=sum(added_levels(state.path, state.layout) for state in written),
            unmark=" and ".join(filter(None, (unmark_advice(state.path, state.layout) for state in written))),
        )
    _repair(path, stored, written, job, observer)
    after = _outputs(directory, stored, look_at=[state.problems for state in written])
    remaining = sum(len(state.lines) for state in after)
    done = sum(len(state.journal.done) for state in after)
    return Verdict(_total(after), done, problems, len(problems) - remaining, _undone(after))


def _paths_of(directory: RunDirectory, stored: dict[str, Any]) -> list[OutputPath]:
    """Return the paths of all outputs of a run: where they were moved together, the present ones."""
    first = directory.output
    before, *others = (output["path"] for output in stored.get("outputs", [{"path": first}]))
    folder = os.path.dirname(before)

    def present(place: OutputPath) -> OutputPath:
        if isinstance(place, ObjectPath) or isinstance(first, ObjectPath):
            return place
        return Path(os.path.normpath(first.parent / os.path.relpath(place, folder)))

    return [first, *map(present, map(path_of, others))]


@dataclass(frozen=True)
class _Written(RecordedImage):
    """One output of a run in its current state."""

    directory: RunDirectory
    problems: dict[int, list[str]]
    lines: tuple[str, ...]  # the problems of its blocks as text


def _outputs(
    directory: RunDirectory, stored: dict[str, Any], look_at: Sequence[Iterable[int]] | None = None
) -> list[_Written]:
    """Check every output of a run: the blocks that are done, or the given blocks."""
    outputs, paths = [], _paths_of(directory, stored)
    for number, (layout, grid) in enumerate(written_of(stored)):
        path = paths[number]
        beside = RunDirectory.beside(path)
        if not beside.journal_path.exists():
            raise OutputRefused(
                f"{beside.journal_path} is not there: it keeps the blocks of {path} that are done. Put it back."
            )
        owner = journal_fingerprint(stored["fingerprint"], number)
        journal = Journal.open(beside.journal_path, owner, len(grid), read_only=True)
        image = RecordedImage(path, layout, grid, journal)
        problems = image.damaged(None if look_at is None else look_at[number], thorough=True)
        lines = _lines(f"{path.name} block" if number else "block", problems)
        outputs.append(_Written(path, layout, grid, journal, beside, problems, lines))
    return outputs


def _total(written: Iterable[_Written]) -> int:
    return sum(len(output.grid) for output in written)


def _undone(written: Iterable[_Written]) -> RangeSet:
    """Return the blocks that are not done; the numbers of further outputs continue those of the first."""
    undone, before = RangeSet(), 0
    for output in written:
        undone.add(before + number for number in output.journal.done.complement(len(output.grid)))
        before += len(output.grid)
    return undone


def _plan_of(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the plan; if its format is not of this version, the journal shows whether another one wrote it."""
    try:
        return directory.read_plan()
    except DamagedData:
        with suppress(FileNotFoundError):
            Journal.open_any(directory.journal_path)
        raise


def _repair(
    path: OutputPath, stored: dict[str, Any], written: Sequence[_Written], job: Job | None, observer: Observer | None
) -> None:
    if job is None:
        raise OutputRefused(f"{path} cannot be repaired without its job. Give the job that wrote it.")
    plan = make_plan(job)
    check_same_job(plan, stored)
    with ExitStack() as locks:
        for output in sorted(written, key=lambda output: output.directory.path):
            locks.enter_context(output.directory.lock())
        for output in written:
            journal = output.journal
            restore_metadata(output.path, output.layout)
            if isinstance(output.layout, FileLayout) and (output.problems or not output.path.exists()):
                create_output(output.path, output.layout, overwrite=True)
            with Journal.open(journal.path, journal.fingerprint, journal.total) as writable:
                writable.unmark(output.problems)
    run(plan, observer=observer)


def _lines(word: str, damaged: dict[int, list[str]]) -> tuple[str, ...]:
    return tuple(f"{word} {number}: {problem}" for number, problems in damaged.items() for problem in problems)
