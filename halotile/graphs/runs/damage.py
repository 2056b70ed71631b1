"""Search for the blocks of an output that differ from what was written, several of them in parallel."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from halotile.errors import DamagedData
from halotile.graphs.clusters.common.machine import cores_here
from halotile.storage.disk.object_path import ObjectPath, OutputPath
from halotile.storage.grid import Block, Grid
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.output import AnyLayout, FileLayout, check_block, inspect_block, layout_from_json
from halotile.storage.sharded.output_disk import READS_AT_ONCE
from halotile.storage.sharded.ownership import metadata_problems
from halotile.storage.sharded.shards import digest_of

T = TypeVar("T")

CHECKED_AT_ONCE = 64
WAITING_SECONDS = 1e-3
"""A check that takes longer waits for the disk, as many after it will; checks in memory only hinder each
other as threads."""
HELD_BYTES = 2**30
"""Most bytes of shards in memory while they are read whole: the memory of a driver is in no plan."""


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
