"""The place at which the fine structure of two images fits: where they show the same, that is without a shift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.fft import irfft2, rfft2
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from halotile.tasks.noise.details import Values

FINE, COARSE = 2.0, 16.0
"""Deviations of the blurs, in pixels, between which structure counts: finer is mostly noise, and coarser is illumination, which different images share."""
CLEAR = 8.0
"""Peak of the correlation over its deviation above which it tells a place: of noise it is 4 to 6, and of periodic images, which fit at many places, no more."""
BETTER = 1.1
"""Correlation at its peak, relative to that without a shift, above which there is a shift: without one, noise and repetitions of a texture reach 1.06."""
MEASURED, OVERLAP = 0.5, 0.25
"""Share of the pixels of a square that has to be finite, and share of a square in which shifted ones have to overlap."""

Spectrum = NDArray[np.complexfloating[Any, Any]]


class FineFit(NamedTuple):
    """Correlation of the fine structure of two images.

    Parameters
    ----------
    unshifted, best : float
        Correlation without a shift, and that of the best one.
    shift : (int, int)
        Rows and columns by which the second is shifted at the best one.
    is_clear : bool
        True where the best one is no chance.
    """

    unshifted: float
    best: float
    shift: tuple[int, int]
    is_clear: bool

    @property
    def is_shifted(self) -> bool:
        """True where the second clearly fits at another place."""
        return self.is_clear and self.best > BETTER * max(self.unshifted, 0.0)

    @property
    def is_sure(self) -> bool:
        """True where the second clearly fits as it is."""
        return self.is_clear and not self.is_shifted


@dataclass(frozen=True)
class FineStructure:
    """Squares of an image, all of the same shape, without their noise and illumination as far as these are finer and coarser.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> image, (first, second) = rng.random((96, 96)), rng.random((2, 96, 96))
    >>> FineStructure([image + first]).fit(FineStructure([np.roll(image, 30, 0) + second])).shift
    (30, 0)
    """

    squares: Sequence[Values]  # rows and columns, NaN in holes

    def fit(self, other: FineStructure) -> FineFit:
        """Compare with squares of the same places of another image."""
        cross: Spectrum | float = 0.0
        power = [0.0, 0.0]
        for one, two in zip(self._spectra, other._spectra, strict=True):
            if one is not None and two is not None:
                cross = cross + np.conj(one[0]) * two[0]
                power = [power[0] + one[1], power[1] + two[1]]
        if not all(power):
            return FineFit(0.0, 0.0, (0, 0), is_clear=False)
        overlap = irfft2(np.square(np.abs(rfft2(np.ones(self._shape), self._padded))), self._padded)
        usable = overlap >= OVERLAP * overlap[0, 0]
        summed = irfft2(cross, self._padded) / np.where(usable, overlap, np.inf)
        correlation = summed / math.sqrt(power[0] * power[1])
        rows, columns = self._padded
        row, column = divmod(int(correlation.argmax()), columns)
        best = float(correlation[row, column])
        shift = (row + rows // 2) % rows - rows // 2, (column + columns // 2) % columns - columns // 2
        return FineFit(
            float(correlation[0, 0]), best, shift, is_clear=best > CLEAR * float(correlation[usable].std())
        )

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.squares[0].shape

    @property
    def _padded(self) -> tuple[int, ...]:
        return tuple(2 * n for n in self._shape)

    @cached_property
    def _spectra(self) -> list[tuple[Spectrum, float] | None]:
        """Spectrum of each padded square, and the mean of its squared pixels; None for one with too many holes."""
        return [self._spectrum(square) for square in self.squares]

    def _spectrum(self, square: Values) -> tuple[Spectrum, float] | None:
        known = np.isfinite(square)
        if known.mean() < MEASURED:
            return None
        centred = np.where(known, square - square[known].mean(), 0)
        fine = gaussian_filter(centred, FINE) - gaussian_filter(centred, COARSE)
        return rfft2(fine, self._padded), float(np.square(fine).mean())
