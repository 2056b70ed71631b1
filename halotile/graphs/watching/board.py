"""A small map of the blocks of a pass: the state and the duration of each.

An image may have a million blocks, and nobody can see as many at once. The map has at most :data:`EDGE` cells on
an edge; a cell sums up the blocks that lie in it. It keeps a byte for each block and some numbers for each cell, so the cost of
an update grows with the number of changed blocks, and the cost of the map does not grow with the number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.intp]

EDGE = 128
"""Cells along an edge of the map, at most."""
STATES = ("todo", "running", "done", "retried", "quarantined")
"""States of a block. One that is retried has failed, and is not done yet."""
WAITING, RUNNING, DONE, RETRIED, QUARANTINED = range(len(STATES))
_FIRST_SEEN = (QUARANTINED, RETRIED, RUNNING)
"""The states that a cell shows before others where its blocks differ: rarer and more important ones first."""
FILLED = 9
"""Value of ``filled`` for a cell whose blocks are all done."""
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Durations from the shortest to the longest, on a logarithmic scale."""
UNKNOWN = "."
"""Stands for the duration of a cell in which no block was timed."""


class Board:
    """The state of every block of a pass.

    Parameters
    ----------
    counts : tuple of int
        Numbers of blocks along each axis of the image. The last two axes that are cut are those of the map; others are summed
        over.
    done : iterable of range
        Blocks that are done already.
    quarantined : collection of int
        Blocks that were given up already.

    Examples
    --------
    >>> board = Board((2, 3), done=[range(0, 1)])
    >>> board.mark([1, 2], DONE, {1: 0.5, 2: 2.0})
    >>> board.mark([3], RETRIED)
    >>> board.counted(in_flight=[5])
    {'todo': 1, 'running': 1, 'done': 3, 'retried': 1, 'quarantined': 0}
    >>> board.cells(in_flight=[5])["states"]
    '222301'
    """

    def __init__(
        self, counts: tuple[int, ...], done: Iterable[range] = (), quarantined: Collection[int] = ()
    ) -> None:
        self.counts = counts
        cut = [axis for axis, count in enumerate(counts) if count > 1] or [0]
        self.axes = tuple(cut[-2:])
        """The axes of the image that the map shows: rows and columns, or columns alone."""
        self._edges = [min(EDGE, counts[axis]) for axis in self.axes]
        self.rows, self.columns = self._edges if len(self._edges) == 2 else (1, *self._edges)
        self._state = np.zeros(math.prod(counts), np.uint8)
        for numbers in done:
            self._state[numbers.start : numbers.stop] = DONE
        self._state[list(quarantined)] = QUARANTINED
        cells = self._cells_of(np.arange(self._state.size))
        size = self.rows * self.columns
        self._blocks = np.bincount(cells, minlength=size)
        self._totals = np.stack(
            [np.bincount(cells[self._state == s], minlength=size) for s in range(len(STATES))]
        )
        self._seconds = np.zeros(size)
        self._timed = np.zeros(size, np.intp)

    def mark(self, numbers: Iterable[int], state: int, seconds: Mapping[int, float] | None = None) -> None:
        """Change the state of blocks; ``seconds`` are their durations."""
        which = _array(numbers)
        cells = self._cells_of(which)
        np.subtract.at(
            self._totals.reshape(-1), self._state[which].astype(np.intp) * self._blocks.size + cells, 1
        )
        np.add.at(self._totals[state], cells, 1)
        self._state[which] = state
        if seconds:
            timed = self._cells_of(_array(seconds))
            np.add.at(self._seconds, timed, list(seconds.values()))
            np.add.at(self._timed, timed, 1)

    def counted(self, in_flight: Iterable[int] = ()) -> dict[str, int]:
        """Number of blocks in each state; ``in_flight`` are those that the workers are processing."""
        totals = self._totals.sum(axis=1)
        running = int(np.count_nonzero(self._state[_array(in_flight)] == WAITING))
        totals[WAITING] -= running
        totals[RUNNING] += running
        return {name: int(count) for name, count in zip(STATES, totals, strict=True)}

    def cells(self, in_flight: Iterable[int] = ()) -> dict[str, Any]:
        """The map, row by row: a character for each cell.

        ``states`` is the index in :data:`STATES` of the state that a cell shows, ``filled`` the part of it that is done in ninths,
        ``seconds`` the duration of its blocks, between ``least`` and ``most``, as an index in :data:`LEVELS`.
        """
        which = _array(in_flight)
        running = np.bincount(
            self._cells_of(which[self._state[which] == WAITING]), minlength=self.rows * self.columns
        )
        done = self._totals[DONE]
        seen = np.where(done == self._blocks, DONE, WAITING)
        for state in reversed(_FIRST_SEEN):
            seen[(running if state == RUNNING else self._totals[state]) > 0] = state
        return {
            "rows": self.rows,
            "columns": self.columns,
            "states": "".join(map(str, seen)),
            "filled": "".join(map(str, FILLED * done // self._blocks)),
            **self._durations(),
        }

    def _durations(self) -> dict[str, Any]:
        """The mean duration of the blocks of each cell."""
        timed = self._timed > 0
        if not timed.any():
            return {"least": None, "most": None, "seconds": UNKNOWN * timed.size}
        means = np.maximum(self._seconds[timed] / self._timed[timed], 1e-6)
        least, most = _separated(float(means.min()), float(means.max()))
        scale = math.log(most / least)
        levels = np.full(timed.size, len(LEVELS))
        levels[timed] = np.rint(np.log(means / least) / scale * (len(LEVELS) - 1))
        seconds = "".join(map((LEVELS + UNKNOWN).__getitem__, levels))
        return {"least": least, "most": most, "seconds": seconds}

    def _cells_of(self, numbers: Numbers) -> Numbers:
        """The cell that each block lies in."""
        index = np.unravel_index(numbers, self.counts)
        places = [
            index[axis] * edge // self.counts[axis] for axis, edge in zip(self.axes, self._edges, strict=True)
        ]
        cells: Numbers = places[-1]
        return cells if len(places) == 1 else cells + places[0] * self.columns


def _separated(least: float, most: float) -> tuple[float, float]:
    """Move two durations at least a factor of two apart: durations that are nearly equal look equal."""
    middle = math.sqrt(least * most)
    return min(least, middle / math.sqrt(2)), max(most, middle * math.sqrt(2))


def _array(numbers: Iterable[int]) -> Numbers:
    return np.fromiter(numbers, np.intp)
