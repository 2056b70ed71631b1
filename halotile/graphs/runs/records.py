"""Records of blocks: journals and sums of passes over scratch arrays, and the search for blocks that differ from what was written."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from halotile.errors import DamagedData, ResumeRefused
from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.kinds.base import Records, Sums
from halotile.storage.disk.object_path import ObjectPath, OutputPath
from halotile.storage.grid import Block, Grid
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import Ledger
from halotile.storage.sharded.output import AnyLayout, FileLayout, check_block, inspect_block, layout_from_json
from halotile.storage.sharded.output_disk import READS_AT_ONCE
from halotile.storage.sharded.ownership import metadata_problems
from halotile.storage.sharded.shards import digest_of
from halotile.tasks.exact_sums import add_exactly

T = TypeVar("T")

CHECKED_AT_ONCE = 64
# A check that takes longer waits for the disk, as many after it will; checks in memory only hinder each other as
# threads.
WAITING_SECONDS = 1e-3
HELD_BYTES = 2**30  # most bytes of shards in memory while they are read whole: the memory of a driver is in no plan


def output_grid(layout: AnyLayout, shape: tuple[int, ...], block: tuple[int, ...]) -> Grid:
    """Return the blocks of a run as they are in its output, numbered as in the journal.

    ``layout``: layout of the output; ``shape, block``: shape of the input and of a super-block, in pixels of the input.
    """
    edges = tuple(b * m // n for b, m, n in zip(block, layout.shape, shape, strict=True))
    return Grid(layout.shape, edges, ((0, 0),) * len(edges))


def written_of(kept: Mapping[str, Any]) -> list[tuple[AnyLayout, Grid]]:
    """Return layout and :func:`output_grid` of each output, from what the run directory keeps of the plan."""
    if "outputs" not in kept:
        raise DamagedData(
            "plan.json of the run directory is of an older version of halotile. Run with --fresh to start over."
        )
    outputs = []
    for output in kept["outputs"]:
        layout = layout_from_json(output["layout"])
        outputs.append((layout, output_grid(layout, tuple(output["shape"]), tuple(output["block"]))))
    return outputs


def damaged_blocks(
    path: OutputPath,
    layout: AnyLayout,
    blocks: Iterable[Block],  # blocks of `output_grid`
    # returns the digest of a block as it was written, by its number; None where it is unknown
    digest: Callable[[int], bytes | None] = lambda _: None,
    *,
    thorough: bool = True,  # read every byte, not only the checksums in each file
) -> Iterator[tuple[int, list[str]]]:
    """Return the problems of damaged blocks, by block number."""

    def check(block: Block) -> list[str]:
        return check_block(path, layout, block.core, digest(block.number), thorough=thorough)

    threads = _threads_for(layout) if thorough else _cheap_threads(path)
    checked = _check_in_parallel(check, blocks, threads, at_once=thorough)
    return ((number, problems) for number, problems in checked if problems)


@dataclass(frozen=True)
class RecordedImage:
    """An image that a run wrote, with the record of its blocks."""

    path: OutputPath
    layout: AnyLayout
    grid: Grid  # that of `output_grid`
    journal: Journal
    image: int = field(default=0, kw_only=True)  # number of the image among those of the journal

    def damaged(self, numbers: Iterable[int] | None = None, *, thorough: bool = False) -> dict[int, list[str]]:
        """Return the problems of each block that is not stored as it was written; by default of those that are done."""
        blocks = map(self.grid.block_at, self.journal.done if numbers is None else numbers)
        digest = partial(self.journal.digest, image=self.image)
        return dict(damaged_blocks(self.path, self.layout, blocks, digest, thorough=thorough))

    def metadata_problems(self) -> list[str]:
        """Describe damaged metadata; refuse those of another array, unless most of the pixels are the run's own."""
        return metadata_problems(self.path, self.layout, lambda: 2 * len(self.damaged()) < len(self.journal.done))


def image_digest(path: OutputPath, layout: AnyLayout, grid: Grid) -> bytes:
    """Return the digest of a complete stored image, from the checksums in its files."""

    def inspect(block: Block) -> tuple[list[str], bytes]:
        return inspect_block(path, layout, block.core, thorough=False)

    digests = []
    blocks = output_grid(layout, grid.shape, grid.block)
    for _, (problems, digest) in _check_in_parallel(inspect, blocks, _cheap_threads(path)):
        if problems:
            raise DamagedData(problems[0])
        digests.append(digest)
    return digest_of(digests)


def _cheap_threads(path: OutputPath) -> int:
    """Return the number of threads for checks that hold little memory, and of a store mostly wait."""
    return READS_AT_ONCE if isinstance(path, ObjectPath) else cores_here()


def _threads_for(layout: AnyLayout) -> int:
    """Return the number of threads that may each hold a whole shard."""
    if isinstance(layout, FileLayout):
        return 1
    shard_bytes = math.prod(layout.form.counts) * layout.form.chain.nbytes
    return max(1, min(cores_here(), HELD_BYTES // shard_bytes))


def _check_in_parallel(
    check: Callable[[Block], T], blocks: Iterable[Block], threads: int, *, at_once: bool = False
) -> Iterator[tuple[int, T]]:
    """Check blocks and yield the results in order, in threads if ``at_once`` or once a check waits for the disk."""
    remaining = iter(blocks)
    waits = at_once
    while not waits and (block := next(remaining, None)) is not None:
        began = time.perf_counter() - time.thread_time()
        result = check(block)
        waits = time.perf_counter() - time.thread_time() - began > WAITING_SECONDS
        yield block.number, result
    pending: deque[tuple[int, Future[T]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for block_or_none in itertools.chain(remaining, itertools.repeat(None)):
            if block_or_none is not None:
                pending.append((block_or_none.number, pool.submit(check, block_or_none)))
            elif not pending:
                return
            if block_or_none is None or len(pending) >= CHECKED_AT_ONCE:
                number, future = pending.popleft()
                yield number, future.result()


@dataclass(frozen=True)
class OpenRecords:
    """Journal and ledger of a pass in progress."""

    journal: Journal
    ledger: Ledger
    arrays: int = 0  # number of arrays that the pass writes

    def sums(self) -> Sums:
        """Return the totals of the finished pass."""
        digests = tuple(self.journal.image_digest(number).hex() for number in range(self.arrays))
        return Sums(add_up(self.ledger.sums), digests)


@contextmanager
def open_records(records: Records, grid: Grid, fingerprint: str) -> Iterator[OpenRecords]:
    """Open the records of a pass over the blocks of ``grid``; damaged entries are removed.

    Nothing of them has to survive a power cut: a pass without records starts again. So they are synced only where the
    pass is interrupted, and an iteration waits for the disk once, for its checkpoint.

    ``records``: folder and name of the records; ``grid``: blocks; ``fingerprint``: fingerprint of the job.
    """
    images = max(1, len(records.arrays))
    path, owner = records.folder / f"journal.{records.name}", f"{fingerprint}-{records.name}"
    records.folder.mkdir(parents=True, exist_ok=True)
    try:
        journal = Journal.open(path, owner, len(grid), images=images)
    except ResumeRefused:  # it is of the job as it was before it was changed
        remove_records(records.folder, records.name)
        journal = Journal.create(path, owner, len(grid), images=images, sync=False)
    except (FileNotFoundError, DamagedData):
        journal = Journal.create(path, owner, len(grid), images=images, sync=False)
    ledger = Ledger(records.folder / f"sums.{records.name}")
    _strike(records, journal, ledger, grid)
    try:
        yield OpenRecords(journal, ledger, len(records.arrays))
    except BaseException:
        with suppress(OSError):  # what the disk loses is computed again
            ledger.sync()
            journal.sync()
        raise


def _strike(records: Records, journal: Journal, ledger: Ledger, grid: Grid) -> None:
    """Remove blocks from the records that are marked, and have lost their sums or a shard."""
    if not journal.done:
        return
    lost = {number for number in journal.done if number not in ledger.sums}
    for image, path in enumerate(records.arrays):
        assert records.layout is not None
        blocks = output_grid(records.layout, grid.shape, grid.block)
        lost.update(RecordedImage(path, records.layout, blocks, journal, image=image).damaged())
    journal.unmark(sorted(lost))


def remove_records(folder: Path, name: str) -> None:
    """Remove the records of a finished pass, and those of its stages."""
    for kind in ("journal", "sums"):
        for pattern in (f"{kind}.{name}", f"{kind}.{name}.*"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)


def add_up(sums: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the totals of the sums of blocks, exact regardless of the order in which the blocks were done.

    A sum over a block is a list with an entry for each of its shards: a number, or nested lists for an array.

    >>> add_up({0: {"misfit": [0.5, 2.0]}, 1: {"misfit": [0.25]}})
    {'misfit': 2.75}
    >>> add_up({0: {"histogram": [[1.0, 2.0]]}, 1: {"histogram": [[3.0, 4.0], [5.0, 6.0]]}})["histogram"].tolist()
    [9.0, 12.0]
    """
    entries: dict[str, list[Any]] = {}
    for number in sorted(sums):
        for name, values in sums[number].items():
            entries.setdefault(name, []).extend(values)
    return {name: _total(values) for name, values in entries.items()}


def _total(values: list[Any]) -> Any:
    if not isinstance(values[0], list):
        return add_exactly(values)
    columns = np.asarray(values, np.float64).reshape(len(values), -1)
    total = np.array([add_exactly(column) for column in columns.T])
    return total.reshape(np.shape(values[0]))
