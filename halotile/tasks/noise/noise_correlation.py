"""Correlation of the noise of neighbouring pixels, its likely cause, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halotile.tasks.noise.quiet_windows import (
    EMPTY_AT_MOST,
    SATURATED_AT_MOST,
    WINDOW,
    Values,
    mean_beside,
    saturated_ends,
    without_marks,
)

LAGS = (1, 2, 3)
ORDER = 4
"""Order of the differences across the axis of a correlation: they leave hardly anything of an image, and white noise uncorrelated along it."""
QUIETEST, LEAST, OUTLYING = 0.25, 32, 2.0
"""Share of the windows that are compared, those with the quietest neighbours; their number, at least; and multiple of their median energy from which
one does not count."""
SQUARES = 16
"""Squares of a plane that are looked at."""
CLEAR, CLEAR_FAR = 0.27, 0.14
"""Correlation at lag 1, and at each of three lags, from which noise is not white: see docs/design/037."""
LEVEL = 0.6
"""Ratio of the correlations at lags 3 and 1 from which noise is the same along whole lines."""
MOSAIC, BLOCKS, TINY = 1.5, 1.4, 1e-6
"""Ratio of the energies of pixels at different places of a 2 x 2 mosaic, and of steps at the edges of blocks and elsewhere, from which there is one."""


class NoiseCorrelation(NamedTuple):
    """Correlation of noise at lags of 1 to 3 pixels along each axis."""

    y: tuple[float, ...]
    x: tuple[float, ...]
    mosaic: float = 1.0
    """Ratio of the energies of pixels at the four places of 2 x 2."""
    blocks: float = 1.0
    """Ratio of the steps at one place of every 8 pixels, and at the others."""

    @property
    def is_clear(self) -> bool:
        """True if the noise is clearly not white."""
        return any(lags[0] > CLEAR or min(lags) > CLEAR_FAR for lags in (self.y, self.x))

    def __str__(self) -> str:
        parts = (
            f"{', '.join(f'{r + 0.0:.2f}' for r in np.round(lags, 2))} {direction_text(axis)}"
            for axis, lags in (("y", self.y), ("x", self.x))
        )
        return f"{' and '.join(parts)} at distances of 1, 2 and 3 pixels"

    @property
    def advice(self) -> str:
        """The likely cause, and what helps.

        >>> print(NoiseCorrelation((0.4, 0.4, 0.4), (0.0, 0.0, 0.0)).advice)
        The likely cause is line noise, columns that are off: write input.stripes: auto
        """
        cause, remedy = self._cause()
        return f"The likely cause is {cause}: {remedy}"

    def _cause(self) -> tuple[str, str]:
        axis, most, least = ("y", self.y, self.x) if self.y[0] > self.x[0] else ("x", self.x, self.y)
        smooth = "bin the image by 2, or take a larger strength"
        if most[2] > LEVEL * most[0] and least[0] < CLEAR:
            return f"line noise, {'columns' if axis == 'y' else 'rows'} that are off", "write input.stripes: auto"
        if self.blocks > BLOCKS:
            return (
                "lossy compression in blocks of 8 × 8, as JPEG has",
                "denoise the image from before that, or take a larger strength",
            )
        if self.mosaic > MOSAIC:
            return "colours interpolated from a mosaic", f"denoise the image from before that, {smooth}"
        if least[0] < CLEAR / 2:
            return f"a readout or scan along {axis}", f"train a network with structure: {axis}, {smooth}"
        # A training that hides neighbours along one axis does not help against noise that is shared along both.
        return "resampling, smoothing, or colours interpolated from a mosaic", smooth


def direction_text(axis: str) -> str:
    """An axis in words.

    >>> direction_text("y"), direction_text("x"), direction_text("z")
    ('down the columns (y)', 'along the rows (x)', 'along z')
    """
    return {"y": "down the columns (y)", "x": "along the rows (x)"}.get(axis, f"along {axis}")


def noise_correlation(squares: Sequence[Values]) -> NoiseCorrelation | None:
    """Correlation of noise where an image is quiet; None where too little of it can be compared.

    Differences of fourth order across an axis take away the image; those along it are then correlated as the noise is.

    ``squares``: rows and columns of one plane; NaN in holes.

    >>> noise = np.random.default_rng(0).standard_normal((256, 257))
    >>> found = noise_correlation([noise[:, 1:]]), noise_correlation([noise[:, 1:] + noise[:, :-1]])
    >>> [each.is_clear for each in found], round(found[1].x[0], 1), round(found[1].y[0], 1)
    ([False, True], 0.5, 0.0)
    """
    squares = without_marks(squares[:SQUARES])
    ends = [(end, most) for end, most in zip(saturated_ends(squares), (EMPTY_AT_MOST, SATURATED_AT_MOST), strict=True)]
    parts, around, numbers = [np.zeros((0, WINDOW, WINDOW))], [np.zeros(0)], [np.zeros(0, int)]
    for number, square in enumerate(squares):
        # They begin between those of JPEG, whose edges are then inside.
        square = square[WINDOW // 2 :, WINDOW // 2 :]
        rows, columns = (n // WINDOW for n in square.shape)
        windows = square[: rows * WINDOW, : columns * WINDOW].reshape(rows, WINDOW, columns, WINDOW).swapaxes(1, 2)
        energy = sum(np.square(np.diff(windows, ORDER, axis)).mean((2, 3)) for axis in (2, 3))
        known = energy > 0  # False for NaN
        for end, most in ends:
            known &= (windows == end).mean((2, 3)) <= most
        parts.append(windows[known])
        around.append(mean_beside(np.where(known, energy, np.nan))[known])
        numbers.append(np.full(int(known.sum()), number))
    windows, beside, places = np.concatenate(parts), np.concatenate(around), np.concatenate(numbers)
    if len(windows) < LEAST:
        return None
    chosen = np.argsort(beside, kind="stable")[: max(LEAST, round(QUIETEST * len(windows)))]
    windows, places = windows[chosen], places[chosen]
    across = [np.diff(windows, ORDER, 2), np.diff(windows, ORDER, 1).swapaxes(1, 2)]
    energy = sum(np.square(each).mean((1, 2)) for each in across)
    kept = energy <= OUTLYING * np.median(energy)
    lags = []
    for across_one in across:
        each = across_one[kept]
        if not (square := np.square(each).mean()) > 0:
            return None
        lags.append(tuple(float((each[:, n:] * each[:, :-n]).mean() / square) for n in LAGS))
    mosaic, blocks = _patterns(windows[kept], places[kept])
    return NoiseCorrelation(lags[0], lags[1], mosaic, blocks)


def _patterns(windows: Values, places: Values) -> tuple[float, float]:
    """Ratios of energies: of pixels at the places of a mosaic, and of steps at those of a block; places are the same within a square."""
    beside = windows[:, :-2, 1:-1] + windows[:, 2:, 1:-1] + windows[:, 1:-1, :-2] + windows[:, 1:-1, 2:]
    excess = np.square(windows[:, 1:-1, 1:-1] - beside / 4).reshape(-1, 3, 2, 3, 2).sum((1, 3)).reshape(-1, 4)
    steps = [np.square(np.diff(windows, 1, axis)).sum(3 - axis) for axis in (1, 2)]
    mosaic, blocks = [], []
    for number in np.unique(places):
        at = places == number
        phases, edges = excess[at].sum(0), [step[at].sum(0) for step in steps]
        mosaic += [_ratio(phases.max(), phases.min())] * int(at.sum())
        blocks += [min(_ratio(edge.max(), np.median(edge)) for edge in edges)] * int(at.sum())
    return float(np.median(mosaic)), float(np.median(blocks))


def _ratio(most: float, usual: float) -> float:
    return most / max(usual, TINY * most) if most > 0 else 1.0
