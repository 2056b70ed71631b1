"""Correlation of the noise of neighbouring pixels, its likely cause, and what helps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halotile.tasks.noise.quiet_windows import WINDOW, Values, crowded, cut, mean_beside, without_marks

LAGS = (1, 2, 3)
# Order of the differences across the axis of a correlation: they leave hardly anything of an image, and white noise
# uncorrelated along it.
ORDER = 4
# Share of the windows that are compared, those with the quietest neighbours; their number, at least; and multiple of
# their median energy from which one does not count.
QUIETEST, LEAST, OUTLYING = 0.25, 32, 2.0
SQUARES = 16  # squares of a plane that are sampled
# Correlation at lag 1, and at each of three lags, from which noise is not white: see docs/design/037.
CLEAR, CLEAR_FAR = 0.27, 0.14
LEVEL = 0.6  # ratio of the correlations at lags 3 and 1 from which noise is the same along whole lines


class NoiseCorrelation(NamedTuple):
    """Correlation of noise at lags of 1 to 3 pixels along each axis."""

    y: tuple[float, ...]
    x: tuple[float, ...]

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
    def across(self) -> str:
        """The axis along which lines differ, x or y, where noise is the same along whole lines; else empty."""
        across, most, least = ("x", self.y, self.x) if self.y[0] > self.x[0] else ("y", self.x, self.y)
        return across if most[2] > LEVEL * most[0] and least[0] < CLEAR else ""

    @property
    def advice(self) -> str:
        """The likely cause, and what helps.

        >>> print(NoiseCorrelation((0.4, 0.4, 0.4), (0.0, 0.0, 0.0)).advice)
        The likely cause is line noise, columns that are off: write input.stripes: {axis: x}
        """
        if across := self.across:
            lines = "columns" if across == "x" else "rows"
            return f"The likely cause is line noise, {lines} that are off: write input.stripes: {{axis: {across}}}"
        if min(self.y[0], self.x[0]) >= CLEAR / 2:
            return "The likely cause is resampling, smoothing, demosaicing, or lossy compression: denoise the image as it was before that step, or bin it by 2 × 2 pixels first"
        # A training that hides neighbours along one axis does not help against noise that is shared along both.
        axis = "y" if self.y[0] > self.x[0] else "x"
        return (
            f"The likely cause is a readout or scan along {axis}: train a network with structure: {axis} (job: train)"
        )


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
    parts, around, limits = [np.zeros((0, WINDOW, WINDOW))], [np.zeros(0)], crowded(squares)
    for square in squares:
        # They begin between those of JPEG, whose edges are then inside.
        windows = cut(square[WINDOW // 2 :, WINDOW // 2 :]).swapaxes(1, 2)
        energy = sum(np.square(np.diff(windows, ORDER, axis)).mean((2, 3)) for axis in (2, 3))
        known = energy > 0  # False for NaN
        for end, most in limits:
            known &= (windows == end).mean((2, 3)) <= most
        parts.append(windows[known])
        around.append(mean_beside(np.where(known, energy, np.nan))[known])
    windows, beside = np.concatenate(parts), np.concatenate(around)
    if len(windows) < LEAST:
        return None
    windows = windows[np.argsort(beside, kind="stable")[: max(LEAST, round(QUIETEST * len(windows)))]]
    across = [np.diff(windows, ORDER, 2), np.diff(windows, ORDER, 1).swapaxes(1, 2)]
    energy = sum(np.square(each).mean((1, 2)) for each in across)
    kept = energy <= OUTLYING * np.median(energy)
    lags = []
    for each in across:
        each = each[kept]
        if not (square := np.square(each).mean()) > 0:
            return None
        lags.append(tuple(float((each[:, n:] * each[:, :-n]).mean() / square) for n in LAGS))
    return NoiseCorrelation(*lags)
