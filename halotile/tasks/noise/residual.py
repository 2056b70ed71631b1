"""The residual of a denoised image, what was taken away: its size relative to the noise, and the structure that it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from halotile.tasks.noise.noise_correlation import direction_text
from halotile.tasks.noise.quiet_windows import Values, finite_values

# Edge of the parts whose correlations are measured one by one, in pixels: structure fills a part of an image.
PART = 128
# Correlation above which a residual holds structure: see docs/choosing.md for what it was measured on.
STRUCTURED = 0.15
SHIFTED = 0.5  # mean above which, relative to the noise, brightness was changed: filters keep it
MEASURED = 0.25  # share of the pixels of a part that has to be measured, not holes


@dataclass(frozen=True)
class Residual:
    """Statistics of a residual, ``noisy - denoised``.

    >>> noise = np.random.default_rng(0).standard_normal((256, 256))
    >>> found = Residual.from_images([noise])
    >>> round(found.ratio, 1), abs(found.correlation) < 0.02, found.is_structured
    (1.0, True, False)
    >>> Residual.from_images([noise + np.sin(np.arange(256) / 5)]).is_structured
    True
    >>> Residual.from_images([noise + 1]).is_shifted
    True
    """

    # standard deviation relative to that of the noise: 1 where all noise was taken away and nothing else
    ratio: float
    # correlation of neighbouring pixels along both axes, each exceeded in a quarter of the parts: about
    # 0 for white noise, less where noise was only smoothed, more where the residual holds structure of the image
    correlations: tuple[float, float]
    # mean relative to the noise, or median where that is closer to 0: a few hot pixels have a large mean, skewed
    # noise has a median of its own
    shift: float = 0.0
    axes: tuple[str, str] = ("y", "x")  # letters of both axes

    @classmethod
    def from_images(cls, residuals: Iterable[Values], axes: tuple[str, str] = ("y", "x")) -> Residual:
        """The statistics of places of one image.

        ``residuals``: rows and columns, relative to the standard deviation of the noise; NaN in holes; ``axes``: letters of both axes.
        """
        residuals = list(residuals)
        values, found = finite_values(residuals), []
        for residual in residuals:
            rows, columns = (max(1, round(n / PART)) for n in residual.shape)
            parts = (part for band in np.array_split(residual, rows, 0) for part in np.array_split(band, columns, 1))
            found += [r for part in parts if np.isfinite(r := _correlations(part)).all()]
        if not values.size:
            return cls(0.0, (0.0, 0.0), axes=axes)
        down, along = np.quantile(found, 0.75, axis=0).tolist() if found else (0.0, 0.0)
        shift = float(min(values.mean(), np.median(values), key=abs))
        return cls(float(values.std()), (down, along), shift, axes)

    @property
    def correlation(self) -> float:
        """The larger correlation of both axes."""
        return max(self.correlations)

    @property
    def correlation_text(self) -> str:
        """The larger correlation, and its axis."""
        axis = self.axes[self.correlations.index(self.correlation)]
        return f"{round(self.correlation, 2) + 0.0:.2f} {direction_text(axis)}"

    def structure_json(self) -> dict[str, Any]:
        """The larger correlation, that of each axis, and whether they show structure, for programs."""
        each = dict(zip(self.axes, self.correlations, strict=True))
        return {"correlation": self.correlation, "correlations": each, "holds_structure": self.is_structured}

    @property
    def is_structured(self) -> bool:
        """True if more than noise was taken away."""
        return self.correlation > STRUCTURED

    @property
    def is_shifted(self) -> bool:
        """True if the brightness was changed."""
        return abs(self.shift) > SHIFTED


def _correlations(part: Values) -> Values:
    """Correlation with the next pixel, along each axis; NaN where nothing varies, or most is not finite."""
    finite = np.isfinite(part)
    if finite.mean() < MEASURED:
        return np.full(2, math.nan)
    centred = np.where(finite, part - part[finite].mean(), 0.0)
    variance = np.square(centred).sum() / finite.sum()
    products = [(each[1:] * each[:-1]).sum() for each in (centred, centred.T)]
    pairs = [(each[1:] & each[:-1]).sum() for each in (finite, finite.T)]
    if not variance or not all(pairs):
        return np.full(2, math.nan)
    found: Values = np.divide(products, pairs) / variance
    return found
