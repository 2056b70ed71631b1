"""Counts in the patterns of a scan, looked at while they are copied: what is no count, and what a user should know of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_dilation, label, minimum_filter

from halotile.errors import InputError
from halotile.storage.scans.framing import Framing

MOST_COUNTS = 2**32 - 1
"""The largest number of 32 bits: no detector counts as far, and some write it where they have no count."""
BRIGHT = 100
"""Counts, of a pattern in the median or all around a pixel, beside which none are 0 by chance."""
DARK = 1e-3
"""Counts of a blank pattern at most, relative to the median: dark counts while the shutter is closed."""
SPREAD = 3
"""Ratio of the counts of bright and of faint patterns from which the beam may have varied."""

LOOKED_AT = 8
"""Patterns of those read at once that are searched for hot pixels; a scan of fewer is not."""
FAR_ABOVE, NEARLY_ALL, BEAM = 10, 0.9, 2
"""A hot pixel is so many times above its neighbours, in this share of the patterns, and farther than so many pixels from the middle."""
CORNERS, NEAR_FIRST = 3, 0.25
"""The light is in the corners where they have so many times that of the middle, and its centre is as near to the first pixel, in edges of a corner."""
NEAR, PILED, MANY = 0.99, 3, 500
"""Pixels are saturated at MANY counts or more, where more than PILED of a pattern have the largest count, and more than half of those from NEAR times that."""
AROUND = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]])
"""The eight neighbours of a pixel."""
MANY_LEFT_OUT = 0.5
"""Share of the pixels that a mask leaves out from which it may be an inverted one."""
MOST_NAMED = 10
"""Patterns or pixels, at most, that are named in a line."""


class PatternCounts:
    """Everything that is found in patterns which are read some at a time.

    Parameters
    ----------
    shape : tuple of int
        (positions, rows, columns) of all patterns.
    mask : ndarray of bool, (rows, columns), optional
        True where a pixel counts.
    framing : Framing
        The part of them that is read.
    leaves_negative_out : bool
        True where pixels that are negative or NaN in a pattern do not count, False where they are refused.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        mask: NDArray[np.bool_] | None,
        framing: Framing,
        *,
        leaves_negative_out: bool = False,
    ) -> None:
        self.framing, self.shape, self.leaves_negative_out = framing, shape, leaves_negative_out
        counting = np.ones(shape[1:], bool) if mask is None else mask
        self.counting = counting[framing.windows(*shape[1:])]
        self.full = np.zeros(self.counting.shape, bool)
        """True where a pixel that counts has the largest number of its type in a pattern: a gap of the detector, or saturated."""
        self.negative = np.zeros(self.counting.shape, bool)
        """True where a pixel that counts is negative or NaN in a pattern."""
        self.sum = np.zeros(self.counting.shape)
        self.totals = np.full(shape[0], np.nan)
        """Counts of each pattern; NaN for one that was not read."""
        self.least = np.inf
        """The smallest count above 0: about one of a detector, in the unit of the patterns."""
        self.peak = np.zeros(self.counting.shape)
        """The largest count of each pixel that counts."""
        self.piled = (0.0, 0)
        """The largest of them, and the pixels that have it in one pattern."""
        self.alone, self.looked_at = np.zeros(self.counting.shape, np.int64), 0
        """Patterns in which a pixel is far above all around it, of those that were looked at for it."""

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
            wrong_counts = wrong & self.counting
            if wrong_counts.any() and not self.leaves_negative_out:
                raise self._negative_error(read, wrong_counts, numbers)
            self.negative |= wrong_counts.any(0)
            read = np.where(wrong, zero, read)
        self.sum += read.sum(0, dtype=np.float64)
        self.totals[numbers] = np.where(self.counting, read, zero).sum((1, 2), dtype=np.float64)
        if (positive := read[read > 0]).size:
            self.least = min(self.least, float(positive.min()))
        lit = np.where(self.counting, read, zero)
        self.peak = np.maximum(self.peak, lit.max(0))
        self.piled = max(self.piled, (float(lit.max()), int((lit == lit.max()).sum((1, 2)).max())))
        some = read[np.linspace(0, len(read) - 1, min(len(read), LOOKED_AT)).astype(int)]
        self.alone += _alone(np.where(self.counting, some, zero)).sum(0)
        self.looked_at += len(some)
        return read

    def _negative_error(
        self, read: NDArray[Any], wrong: NDArray[np.bool_], numbers: NDArray[np.int64]
    ) -> InputError:
        """Say which pixels are no counts, and what to write."""
        first = np.argwhere(wrong)[0]
        row, column = self.framing.in_file(first[None, 1:], *self.shape[1:])[0]
        places, patterns = int(wrong.any(0).sum()), int(wrong.any((1, 2)).sum())
        found = (
            f"{places:,} of the pixels {'is' if places == 1 else 'are'} negative or NaN in {patterns:,} of {len(read):,} patterns: the first one is "
            f"{read[tuple(first)]:g} in pattern {numbers[first[0]]}, row {row}, column {column}."
        )
        if int(wrong.sum()) == places * len(read):
            return InputError(
                f"{found} These negative pixels or NaN are no counts, and the same in each pattern, as gaps and bad pixels are. Leave them out: --bad-pixels negative"
            )
        return InputError(
            f"{found} These negative pixels or NaN are no counts. Where a dark image was subtracted, write the counts as they were, or 0 for what is below it; "
            "bad pixels are left out of all patterns with --bad-pixels negative"
        )

    def blank(self) -> NDArray[np.int64]:
        """Numbers of the patterns with next to no count where others have many: the shutter was closed."""
        lit = self.totals[self.totals > 0]
        if not lit.size or np.median(lit) < BRIGHT * self.least:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.totals <= DARK * np.median(lit))

    def hot(self) -> NDArray[np.int64]:
        """Rows and columns of the file, (pixels, 2), of what is far above its neighbours in nearly every pattern; not near the middle, where the beam may be."""
        middle: NDArray[np.int64] = np.reshape(self.alone.shape, (2, 1, 1)) // 2
        away = np.abs(np.indices(self.alone.shape) - middle).max(0)
        is_hot = self.looked_at >= LOOKED_AT and self.alone >= NEARLY_ALL * self.looked_at
        return self._in_file(is_hot & (away > BEAM))

    def dead(self) -> NDArray[np.int64]:
        """Those of what never counts though all around does."""
        least = minimum_filter(self.sum, footprint=AROUND, mode="constant")
        known = self.counting & ~self.full & ~self.negative
        return self._in_file((self.sum == 0) & known & (least >= BRIGHT * self.least))

    def saturated(self) -> NDArray[np.int64]:
        """Those of what has the largest count, where more pixels have it than nearly as much: no light does that."""
        most, together = self.piled
        at_most, near = self.peak == most, self.peak >= NEAR * most
        is_cut = most >= MANY and together > PILED and 2 * at_most.sum() > near.sum()
        return self._in_file(at_most & is_cut)

    def stop(self) -> NDArray[np.int64]:
        """Those of some pixels around the middle that never count though what is beside them does."""
        regions, _ = label(self.sum == 0)
        number = regions[tuple(n // 2 for n in regions.shape)]
        region = (regions == number) & self.counting & (number > 0)
        beside = binary_dilation(region) & ~region & self.counting
        is_stop = region.sum() > 1 and beside.any() and np.median(self.sum[beside]) >= BRIGHT * self.least
        return self._in_file(region & is_stop)

    def _in_file(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.unique(self.framing.in_file(np.argwhere(chosen), *self.shape[1:]), axis=0)

    def notes(self) -> list[tuple[str, str]]:
        """Say what is most likely wrong with the patterns."""
        found = []
        if is_in_corners(np.where(self.counting, self.sum, 0)):
            found.append(
                "the light is in the four corners of the patterns, as a Fourier transform leaves it. The far field needs the beam in their middle: write --corner"
            )
        hot, dead = self.hot(), self.dead()
        if len(hot):
            are = "a pixel is" if len(hot) == 1 else f"{len(hot):,} pixels are"
            found.append(
                f"{are} more than {FAR_ABOVE} times as bright as all around in nearly every pattern, as hot ones are"
            )
        if len(dead):
            count = (
                "a pixel that never counts is"
                if len(dead) == 1
                else f"{len(dead):,} pixels that never count are"
            )
            found.append(f"{count} in the midst of light, as dead ones are")
        if len(saturated := self.saturated()):
            found.append(
                f"{len(saturated):,} pixels have {self.peak.max():,.0f} counts in some pattern, and none more, as saturated ones do"
            )
        if len(stop := self.stop()):
            found.append(
                f"{len(stop):,} pixels in the middle never count, in the midst of light, as behind a beam stop"
            )
        if len(bad := np.concatenate([hot, dead, saturated, stop])):
            places = " ".join(f"{row},{column}" for row, column in bad[:MOST_NAMED])
            found[-1] += f". Leave {'it' if len(bad) == 1 else 'them'} out: " + (
                f'--bad-pixels "{places}"'
                if len(bad) <= MOST_NAMED
                else f"name an image of them as --bad-pixels; the first ones are {places}"
            )
        if (left_out := 1 - self.counting.mean()) >= MANY_LEFT_OUT:
            found.append(
                f"the mask leaves out {left_out:.0%} of the pixels. If it should be the other way round, name it as --good-pixels"
            )
        few, many = np.nanpercentile(np.delete(self.totals, self.blank()), (5, 95))
        if many > SPREAD * few > 0:
            found.append(
                f"one in twenty patterns has less than {few:.3g} counts, and one in twenty more than {many:.3g}. Where the beam varied, write intensities into model.refine"
            )
        return [("note", text) for text in found]


def is_in_corners(image: NDArray[Any]) -> bool:
    """Return True where an image has its light around its first pixel, which is in all four corners, and little in its middle.

    Examples
    --------
    >>> disc = np.hypot(*np.indices((32, 32)) - 16) < 6
    >>> is_in_corners(disc), is_in_corners(np.fft.ifftshift(disc))
    (False, True)
    """
    height, width = (length // 4 for length in image.shape)
    if not height or not width:
        return False
    middle = np.sum(image[height:-height, width:-width])
    # The corners side by side, with the first pixel in their middle.
    corners = np.roll(image, (height, width), (0, 1))[: 2 * height, : 2 * width]
    if not np.sum(corners) > CORNERS * middle:
        return False
    centre = [np.average(np.indices(corners.shape)[axis], weights=corners) for axis in (0, 1)]
    return all(
        abs(place - length) <= NEAR_FIRST * length
        for place, length in zip(centre, (height, width), strict=True)
    )


def _alone(images: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a pixel is far above its eight neighbours; those beyond an edge are at the other one, as in a Fourier transform."""
    light = images.astype(np.float32)
    beside = np.maximum(np.roll(light, 1, -1), np.roll(light, -1, -1))
    row = np.maximum(beside, light)
    around = np.maximum(beside, np.maximum(np.roll(row, 1, -2), np.roll(row, -1, -2)))
    return np.asarray(light > FAR_ABOVE * around)


def blank_remarks(blank: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Say which patterns are left out.

    Examples
    --------
    >>> blank_remarks(np.array([10, 77]))
    [('left out', '2 blank patterns, in which next to nothing was counted: numbers 10, 77 of the file')]
    """
    if not len(blank):
        return []
    one = len(blank) == 1
    what = f"{len(blank):,} blank pattern{'' if one else 's'}, in which next to nothing was counted"
    named = ", ".join(map(str, blank[:MOST_NAMED]))
    more = f" and {len(blank) - MOST_NAMED:,} more" if len(blank) > MOST_NAMED else ""
    return [("left out", f"{what}: number{'' if one else 's'} {named}{more} of the file")]


def _at_most(read: NDArray[Any]) -> NDArray[np.bool_]:
    """True where integers have the largest number of their type, and where floats are infinite or have that of an integer of 32 bits."""
    if read.dtype.kind in "iu":
        return np.asarray(read >= min(np.iinfo(read.dtype).max, MOST_COUNTS))
    # A float of 32 bits has no place between these two.
    flags = np.array([MOST_COUNTS, MOST_COUNTS + 1]).astype(np.result_type(read.dtype, np.float32))
    return np.asarray(np.isin(read, flags) | (read > np.finfo(np.float32).max))
