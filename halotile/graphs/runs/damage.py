"""Which blocks of an output are not what was written, several looked at side by side."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from halotile.errors import DamagedData
from halotile.graphs.clusters.detection.cores import cores_here
from halotile.storage.grid import Block, Grid
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.output import Layout, check_block, inspect_block
from halotile.storage.sharded.shards import digest_of

T = TypeVar("T")

CHECKED_AT_ONCE = 64
WAITING_SECONDS = 1e-3
"""A look that waits so long is one of many that will. Threads that do not wait hinder each other, in the interpreter."""
HELD_BYTES = 2**30
"""Of shards that are in memory to be read whole: a driver's memory is in no plan."""


def output_grid(layout: Layout, shape: tuple[int, ...], block: tuple[int, ...]) -> Grid:
    """The blocks of a run as they lie in its output, numbered as in the journal.

    Parameters
    ----------
    layout : Layout
        The output.
    shape, block : tuple of int
        Shape of the input and of a super-block, in pixels of the input.
    """
    edges = tuple(b * m // n for b, m, n in zip(block, layout.shape, shape, strict=True))
    return Grid(layout.shape, edges, ((0, 0),) * len(edges))


def written_of(kept: Mapping[str, Any]) -> list[tuple[Layout, Grid]]:
    """Return layout and :func:`output_grid` of each output, from what the run directory keeps of the plan."""
    found = []
    for output in kept["outputs"]:
        layout = Layout.from_json(output["layout"])
        found.append((layout, output_grid(layout, tuple(output["shape"]), tuple(output["block"]))))
    return found


def damaged_blocks(
    path: Path,
    layout: Layout,
    blocks: Iterable[Block],
    digest: Callable[[int], bytes | None] = lambda _: None,
    *,
    thorough: bool = True,
) -> Iterator[tuple[int, list[str]]]:
    """Numbers of the blocks with problems, and the problems.

    Parameters
    ----------
    path : Path
        The output.
    layout : Layout
        Its layout.
    blocks : iterable of Block
        Blocks of :func:`output_grid`.
    digest : callable
        Gives the digest of what was written of a block, by its number; None where nobody knows.
    thorough : bool
        Whether every byte is read, or only the checksums in each file.
    """

    def check(block: Block) -> list[str]:
        return check_block(path, layout, block.core, digest(block.number), thorough=thorough)

    threads = _threads_for(layout) if thorough else cores_here()
    found = _side_by_side(check, blocks, threads, at_once=thorough)
    return ((number, problems) for number, problems in found if problems)


def damaged_among(
    numbers: Iterable[int],
    journal: Journal,
    path: Path,
    layout: Layout,
    grid: Grid,
    *,
    image: int = 0,
    thorough: bool = True,
) -> list[int]:
    """Which of these blocks of a run are not what its journal tells of an image; ``grid`` is that of the run."""
    blocks = map(output_grid(layout, grid.shape, grid.block).block_at, numbers)
    digest = partial(journal.digest, image=image)
    return [number for number, _ in damaged_blocks(path, layout, blocks, digest, thorough=thorough)]


def image_digest(path: Path, layout: Layout, grid: Grid) -> bytes:
    """The digest of an image that lies there whole, from the checksums in its files.

    Raises
    ------
    DamagedData
        When a shard is missing or not whole.
    """

    def inspect(block: Block) -> tuple[list[str], bytes]:
        return inspect_block(path, layout, block.core, thorough=False)

    digests = []
    blocks = output_grid(layout, grid.shape, grid.block)
    for _, (problems, digest) in _side_by_side(inspect, blocks, cores_here()):
        if problems:
            raise DamagedData(problems[0])
        digests.append(digest)
    return digest_of(digests)


def _threads_for(layout: Layout) -> int:
    """How many threads may each hold a whole shard."""
    shard_bytes = math.prod(layout.form.counts) * layout.form.chain.nbytes
    return max(1, min(cores_here(), HELD_BYTES // shard_bytes))


def _side_by_side(
    look: Callable[[Block], T], blocks: Iterable[Block], threads: int, *, at_once: bool = False
) -> Iterator[tuple[int, T]]:
    """What a look at each block finds, in their order: by several threads ``at_once``, or once a look has to wait for the disk."""
    rest = iter(blocks)
    waits = at_once
    while not waits and (block := next(rest, None)) is not None:
        began = time.perf_counter() - time.thread_time()
        found = look(block)
        waits = time.perf_counter() - time.thread_time() - began > WAITING_SECONDS
        yield block.number, found
    pending: deque[tuple[int, Future[T]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for more in itertools.chain(rest, itertools.repeat(None)):
            if more is not None:
                pending.append((more.number, pool.submit(look, more)))
            elif not pending:
                return
            if more is None or len(pending) >= CHECKED_AT_ONCE:
                number, future = pending.popleft()
                yield number, future.result()
