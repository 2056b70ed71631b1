"""The residual of a denoised image, what was taken away: its size relative to the noise, and the structure that it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.noise.details import Values

PART = 128
"""Edge of the parts whose correlations are measured one by one, in pixels: structure fills a part of an image."""
STRUCTURED = 0.12
"""Correlation above which a residual holds structure: see docs/denoisers.md for what it was measured on."""
SHIFTED = 0.5
"""Mean above which, relative to the noise, brightness was changed: filters keep it."""
MEASURED = 0.25
"""Share of the pixels of a part that has to be measured, not holes."""


@dataclass(frozen=True)
class Residual:
    """Statistics of a residual, ``noisy - denoised``.

    Parameters
    ----------
    ratio : float
        Standard deviation relative to that of the noise: 1 where all noise was taken away and nothing else.
    correlation : float
        Correlation of neighbouring pixels, the mean of both directions, exceeded in a quarter of the parts: about 0 for white noise,
        less where noise was only smoothed, more where the residual holds structure of the image.
    shift : float
        Mean relative to the noise, or median where that is closer to 0: a few hot pixels have a large mean, skewed noise has a median of its own.

    Examples
    --------
    >>> noise = np.random.default_rng(0).standard_normal((256, 256))
    >>> found = Residual.of([noise])
    >>> round(found.ratio, 1), abs(found.correlation) < 0.01, found.is_structured
    (1.0, True, False)
    >>> Residual.of([noise + np.sin(np.arange(256) / 5)]).is_structured
    True
    >>> Residual.of([noise + 1]).is_shifted
    True
    """

    ratio: float
    correlation: float
    shift: float = 0.0

    @classmethod
    def of(cls, residuals: Iterable[Values]) -> Residual:
        """The statistics of places of one image.

        Parameters
        ----------
        residuals : iterable of ndarray
            Rows and columns, relative to the standard deviation of the noise; NaN in holes.
        """
        residuals = list(residuals)
        values = np.concatenate([residual[np.isfinite(residual)] for residual in residuals])
        found = [r for part in _parts(residuals) if math.isfinite(r := _correlation(part))]
        if not values.size:
            return cls(0.0, 0.0)
        correlation = float(np.quantile(found, 0.75)) if found else 0.0
        return cls(float(values.std()), correlation, float(min(values.mean(), np.median(values), key=abs)))

    @property
    def is_structured(self) -> bool:
        """True if more than noise was taken away."""
        return self.correlation > STRUCTURED

    @property
    def is_shifted(self) -> bool:
        """True if the brightness was changed."""
        return abs(self.shift) > SHIFTED


def local_mean(pixels: NDArray[Any], reach: int = 2) -> Values:
    """Mean of the finite pixels around each pixel of an image of rows and columns, on squares of ``2 * reach + 1`` pixels; NaN without any."""
    windows = [_window_sums(part, reach) for part in (np.nan_to_num(pixels), np.isfinite(pixels))]
    with np.errstate(invalid="ignore"):
        mean: Values = windows[0] / windows[1]
    return mean


def _window_sums(pixels: NDArray[Any], reach: int) -> Values:
    sums = pixels.astype(np.float64)
    for axis in (0, 1):
        width = [(reach, reach) if i == axis else (0, 0) for i in (0, 1)]
        padded = np.pad(sums, width)
        sums = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1, axis).sum(-1)
    return sums


def _parts(residuals: Iterable[Values]) -> Iterator[Values]:
    for residual in residuals:
        rows, columns = (max(1, round(n / PART)) for n in residual.shape)
        for band in np.array_split(residual, rows, 0):
            yield from np.array_split(band, columns, 1)


def _correlation(part: Values) -> float:
    """Mean correlation with the next pixel along both axes; NaN where nothing varies, or most is not finite."""
    finite = np.isfinite(part)
    if finite.mean() < MEASURED:
        return math.nan
    centred = np.where(finite, part - part[finite].mean(), 0.0)
    variance = np.square(centred).sum() / finite.sum()
    products = [(centred[1:] * centred[:-1]).sum(), (centred[:, 1:] * centred[:, :-1]).sum()]
    pairs = [(finite[1:] & finite[:-1]).sum(), (finite[:, 1:] & finite[:, :-1]).sum()]
    if not variance or not all(pairs):
        return math.nan
    return float(np.mean(np.divide(products, pairs)) / variance)
