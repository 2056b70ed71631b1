"""Checking an output: every shard there, every checksum right; and doing damaged blocks again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from halotile.errors import OutputRefused
from halotile.graphs.job import Job
from halotile.graphs.plan import Plan, run_directory_of
from halotile.graphs.planner import make_plan
from halotile.graphs.progress import Observer
from halotile.graphs.tiles import run
from halotile.storage.grid import Block, Grid, Region
from halotile.storage.journal import Journal
from halotile.storage.output import Layout, check_block, create_metadata, metadata_digest, open_output
from halotile.storage.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found: one line for each problem."""

    blocks: int
    checked: int
    problems: tuple[str, ...]
    repaired: int


def verify(
    output: str | Path, *, job: Job | None = None, repair: bool = False, observer: Observer | None = None
) -> Verdict:
    """Check every block that the journal calls done, or every block where there is no journal.

    Parameters
    ----------
    output : path
        The Zarr that a run wrote.
    job : Job, optional
        The job that wrote it; needed to repair.
    repair : bool
        Strike damaged blocks from the journal and run the job again for them alone.
    observer : callable, optional
        Called with the progress of a repair.

    Raises
    ------
    OutputRefused
        When a repair is asked for and the output has no run directory.
    """
    path = Path(os.path.abspath(output))
    directory = RunDirectory(run_directory_of(path))
    stored = directory.read_plan()
    if stored is None:
        if repair:
            raise OutputRefused(
                f"{path} has no run directory {directory.path}: there is no job to repair it with."
            )
        layout = open_output(path)
        grid = _shard_grid(layout)
        damaged = dict(_damaged(path, layout, ((b, b.core) for b in grid)))
        return Verdict(len(grid), len(grid), _lines(damaged), 0)
    layout = Layout.from_json(stored["layout"])
    problems = []
    if metadata_digest(path, layout) != stored["metadata"]:
        problems.append(f"{path}: its metadata is not what the run wrote")
        if repair:
            create_metadata(path, layout)
    if job is None:
        raise OutputRefused(
            f"{directory.path} holds no job.json: cannot tell which blocks it has. Check with zarr itself."
        )
    plan = make_plan(job)
    with Journal.open(
        directory.journal_path, stored["fingerprint"], len(plan.grid), read_only=True
    ) as journal:
        done = journal.done
        damaged = dict(_damaged(path, layout, _written_by(plan, done)))
    problems += _lines(damaged)
    if repair and damaged:
        _strike(directory, stored["fingerprint"], len(plan.grid), damaged)
        run(replace(plan, fresh=False), observer=observer)
    return Verdict(len(plan.grid), len(done), tuple(problems), len(problems) if repair else 0)


def _strike(directory: RunDirectory, fingerprint: str, total: int, damaged: Iterable[int]) -> None:
    with directory.lock():
        journal = Journal.open(directory.journal_path, fingerprint, total)
        journal.strike(damaged)
        journal.close()


def _written_by(plan: Plan, done: Iterable[int]) -> Iterator[tuple[Block, Region]]:
    task = plan.task
    for number in done:
        block = plan.grid.block_at(number)
        yield block, task.roles.output_region(block.core, task.tiling.scale, task.channels_out)


def _shard_grid(layout: Layout) -> Grid:
    return Grid(layout.shape, layout.shard, ((0, 0),) * len(layout.shape))


def _damaged(
    path: Path, layout: Layout, blocks: Iterable[tuple[Block, Region]]
) -> Iterator[tuple[int, list[str]]]:
    """Numbers of the blocks with problems; a few blocks are checked at once."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        checks = _bounded_map(pool, path, layout, blocks)
        yield from ((number, problems) for number, problems in checks if problems)


def _bounded_map(
    pool: ThreadPoolExecutor, path: Path, layout: Layout, blocks: Iterable[tuple[Block, Region]]
) -> Iterator[tuple[int, list[str]]]:
    pending = []
    for block, region in blocks:
        pending.append((block.number, pool.submit(check_block, path, layout, region)))
        if len(pending) >= 64:
            number, future = pending.pop(0)
            yield number, future.result()
    for number, future in pending:
        yield number, future.result()


def _lines(damaged: dict[int, list[str]]) -> tuple[str, ...]:
    return tuple(f"block {number}: {problem}" for number, problems in damaged.items() for problem in problems)
