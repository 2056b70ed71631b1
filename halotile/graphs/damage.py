"""Which blocks of an output are damaged, several looked at side by side."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from halotile.storage.grid import Block, Grid
from halotile.storage.output import Layout, check_block

CHECKED_AT_ONCE = 64


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


def damaged_blocks(
    path: Path, layout: Layout, blocks: Iterable[Block], *, thorough: bool = True
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
    thorough : bool
        Whether every byte is read, or only the end of each file.
    """

    def check(block: Block) -> list[str]:
        return check_block(path, layout, block.core, thorough=thorough)

    pending: deque[tuple[int, Future[list[str]]]] = deque()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for block in itertools.chain(blocks, itertools.repeat(None)):
            if block is not None:
                pending.append((block.number, pool.submit(check, block)))
            elif not pending:
                return
            if block is None or len(pending) >= CHECKED_AT_ONCE:
                number, future = pending.popleft()
                if problems := future.result():
                    yield number, problems


def damaged_among(
    numbers: Iterable[int], path: Path, layout: Layout, grid: Grid, *, thorough: bool = True
) -> list[int]:
    """Which of these blocks of a run are damaged in an output; ``grid`` is that of the run."""
    blocks = map(output_grid(layout, grid.shape, grid.block).block_at, numbers)
    return [number for number, _ in damaged_blocks(path, layout, blocks, thorough=thorough)]
