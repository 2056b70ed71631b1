"""Counts in the patterns of a scan, looked at while they are copied: what is no count, and what a user should know of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError

MOST_COUNTS = 2**32 - 1
"""The largest number of 32 bits: no detector counts as far, and some write it where they have no count."""
BRIGHT = 100
"""Counts of a pattern, in the median, of which none are 0 by chance."""

NAMED = 10
"""Patterns or pixels, at most, that are named in a line."""


class PatternCounts:
    """Everything that is found in patterns which are read some at a time.

    Parameters
    ----------
    count : int
        Number of all patterns of the file.
    counting : ndarray of bool, (rows, columns)
        True where a pixel counts.
    """

    def __init__(self, count: int, counting: NDArray[np.bool_]) -> None:
        self.counting = counting
        self.full = np.zeros(counting.shape, bool)
        """True where a pixel that counts has the largest number of its type in a pattern: a gap of the detector, or saturated."""
        self.sum = np.zeros(counting.shape)
        self.totals = np.full(count, np.nan)
        """Counts of each pattern; NaN for one that was not read."""
        self.least = np.inf
        """The smallest count above 0: about one of a detector, in the unit of the patterns."""

    def cleaned(self, read: NDArray[Any], numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Patterns of these numbers, with 0 for what is no count.

        Raises
        ------
        InputError
            When a pixel that counts is negative or NaN.
        """
        zero = read.dtype.type(0)
        at_most = _at_most(read)
        if at_most.any():
            self.full |= at_most.any(0) & self.counting
            read = np.where(at_most, zero, read)
        wrong = ~(np.isfinite(read) & (read >= 0))
        if wrong.any():  # detectors mark bad pixels with -1 or NaN
            if (wrong & self.counting).any():
                raise InputError(
                    "a pattern has negative pixels or NaN, which are no counts. Take out the offset, or mark these pixels in the mask."
                )
            read = np.where(wrong, zero, read)
        self.sum += read.sum(0, dtype=np.float64)
        self.totals[numbers] = np.where(self.counting, read, zero).sum((1, 2), dtype=np.float64)
        if (positive := read[read > 0]).size:
            self.least = min(self.least, float(positive.min()))
        return read

    def blank(self) -> NDArray[np.int64]:
        """Numbers of the patterns without a count where others have many: the shutter was closed."""
        lit = self.totals[self.totals > 0]
        if not lit.size or np.median(lit) < BRIGHT * self.least:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.totals == 0)


def blank_remarks(blank: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Say which patterns are left out.

    Examples
    --------
    >>> blank_remarks(np.array([10, 77]))
    [('left out', '2 blank patterns, in which nothing was counted: numbers 10, 77 of the file')]
    """
    if not len(blank):
        return []
    one = len(blank) == 1
    what = f"{len(blank):,} blank pattern{'' if one else 's'}, in which nothing was counted"
    return [("left out", f"{what}: number{'' if one else 's'} {_some(map(str, blank))} of the file")]


def _some(names: Iterable[str]) -> str:
    """Names with commas between them, as far as they fit into a line."""
    names = list(names)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


def _at_most(read: NDArray[Any]) -> NDArray[np.bool_]:
    """True where integers have the largest number of their type, and where floats are infinite or have that of an integer of 32 bits."""
    if read.dtype.kind in "iu":
        return np.asarray(read >= min(np.iinfo(read.dtype).max, MOST_COUNTS))
    # A float of 32 bits has no place between these two.
    flags = np.array([MOST_COUNTS, MOST_COUNTS + 1]).astype(np.result_type(read.dtype, np.float32))
    return np.asarray(np.isin(read, flags) | (read > np.finfo(np.float32).max))
