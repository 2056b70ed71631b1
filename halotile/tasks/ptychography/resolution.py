"""Resolution of an object: the Fourier ring correlation of two reconstructions, each of every second position."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from halotile.errors import ConfigError
from halotile.storage.scans.export import RINGS
from halotile.storage.scans.lengths import AT_BEST, AT_WORST, MEASURED
from halotile.tasks.ptychography.recipe import ScanRecipe

Waves = NDArray[np.complexfloating]
LEAST = 16
"""Edge in pixels of the smallest part of an object whose resolution is measured."""
FIRST = 3
"""Rings around the mean that are left out: a gradient of the phase and its slow changes are hardly seen by any pattern."""
FINER = 10
"""Each of two looks finds a peak to so many parts of the one before."""


@dataclass(frozen=True)
class RingCorrelation:
    """Correlation of two images by spatial frequency.

    References
    ----------
    M. van Heel, M. Schatz, Fourier shell correlation threshold criteria, Journal of Structural Biology 151 (2005) 250.
    """

    frequency: NDArray[np.float64]  # middle of each ring, in periods per metre
    # correlation, threshold: correlation of the two images in a ring, and what it is where half a bit of information
    # is left in each pixel
    correlation: NDArray[np.float64]
    threshold: NDArray[np.float64]

    @property
    def resolution(self) -> float:
        """Half of the period, in metres, of the first frequency whose correlation is below the threshold; see ``bound``.

        >>> falling = RingCorrelation(np.arange(8.0), np.linspace(1, 0, 8), np.full(8, 0.5))
        >>> round(1 / falling.resolution / 2, 3)
        3.5
        """
        above, below = self.correlation - self.threshold, self._below
        if not len(below):
            return float(0.5 / (2 * self.frequency[-1] - self.frequency[-2]))
        last = int(below[0])
        if last == FIRST:
            return float(0.5 / self.frequency[last])
        share = above[last - 1] / (above[last - 1] - above[last])
        crossing = self.frequency[last - 1] + share * (self.frequency[last] - self.frequency[last - 1])
        return float(0.5 / crossing)

    @property
    def bound(self) -> float:
        """``AT_WORST`` where no ring is below the threshold, so that the resolution is about a pixel; ``AT_BEST`` where the first one is; else ``MEASURED``.

        >>> RingCorrelation(np.arange(8.0), np.zeros(8), np.full(8, 0.5)).bound == AT_BEST
        True
        """
        if not len(self._below):
            return AT_WORST
        return AT_BEST if self._below[0] == FIRST else MEASURED

    @property
    def _below(self) -> NDArray[np.intp]:
        """Numbers of the rings below the threshold."""
        return np.flatnonzero((self.correlation - self.threshold)[FIRST:] < 0) + FIRST

    def values(self) -> dict[str, Any]:
        """Everything by its name in a file."""
        rings = (self.frequency, self.correlation, self.threshold, self.resolution, self.bound)
        return dict(zip(RINGS, rings, strict=True))


def covered(recipe: ScanRecipe) -> tuple[slice, slice]:
    """The rectangle of the object that the middle of the beam covered."""
    middle = np.array(recipe.frame) / 2
    begins = itertools.accumulate((stage.epochs for stage in recipe.stages[:-1]), initial=0)
    places = recipe.places[np.logical_or.reduce([recipe.used(epoch) for epoch in begins])]
    start = np.ceil(places.min(0) + middle).astype(int).tolist()
    stop = np.floor(places.max(0) + middle).astype(int).tolist()
    rows, columns = (slice(a, b) for a, b in zip(start, stop, strict=True))
    edges = [part.stop - part.start for part in (rows, columns)]
    if min(edges) < LEAST:
        raise ConfigError(
            f"the positions cover {edges[0]} × {edges[1]} pixels of the object, and a resolution needs {LEAST} × {LEAST}. Write resolution: false."
        )
    return rows, columns


def resolution_of(recipe: ScanRecipe, first: Waves, second: Waves) -> RingCorrelation:
    """Compare two objects of a scan."""
    scanned = covered(recipe)
    return ring_correlation(first[scanned], second[scanned], recipe.optics.pixel)


def ring_correlation(first: Waves, second: Waves, pixel: tuple[float, float]) -> RingCorrelation:
    """Correlate two complex images whose pixels have a size in metres.

    A shift, a gradient of the phase and a constant factor between them are taken out first: no pattern tells them.
    """
    window = np.outer(*(np.hanning(n + 2)[1:-1] for n in first.shape))
    second = aligned(first, second, window)
    spectra = []
    for image in (first, second):
        mean = (image * window).sum() / window.sum()
        spectra.append(fft.fft2((image - mean) * window))
    extent = min(n * size for n, size in zip(first.shape, pixel, strict=True))
    row, column = (fft.fftfreq(n, size) for n, size in zip(first.shape, pixel, strict=True))
    ring = np.rint(np.hypot(row[:, None], column) * extent).astype(int).reshape(-1)
    count = int(extent / (2 * max(pixel)))

    def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.bincount(ring, values.reshape(-1), count + 1)[:count])

    common = total((spectra[0] * spectra[1].conj()).real)
    power = [total(np.abs(spectrum) ** 2) for spectrum in spectra]
    correlation = common / np.sqrt(np.maximum(power[0] * power[1], np.finfo(float).tiny))
    # A window makes neighbours in the spectrum alike: fewer of them are independent.
    independent = (window**2).sum() ** 2 / (window.size * (window**4).sum())
    return RingCorrelation(np.arange(count) / extent, correlation, half_bit(total(np.ones(first.shape)) * independent))


def half_bit(count: NDArray[np.float64]) -> NDArray[np.float64]:
    """The correlation of rings of so many independent pixels at which each has half a bit of information.

    >>> half_bit(np.array([16.0, 1e6])).round(3).tolist()
    [0.477, 0.173]
    """
    root = np.sqrt(np.maximum(count, 1))
    return np.asarray((0.2071 + 1.9102 / root) / (1.2071 + 0.9102 / root))


def aligned(first: Waves, second: Waves, window: NDArray[np.float64]) -> Waves:
    """The second image without the shift, the gradient of the phase and the factor between both."""
    shape = first.shape
    for _ in range(2):  # each is found better without the other
        gradient = _peak(second * first.conj() * window)
        ramps = [np.exp(-2j * math.pi * at * np.arange(n)) for at, n in zip(gradient, shape, strict=True)]
        second = second * np.multiply.outer(*ramps)
        spectra = [fft.fft2(image * window) for image in (first, second)]
        cross = spectra[1] * spectra[0].conj()
        cross[0, 0] = 0
        # All frequencies count alike: the strongest ones are the lowest, which tell least of a shift.
        shift = _peak(fft.fftshift(cross / np.maximum(np.abs(cross), np.finfo(float).tiny)))
        moves = [np.exp(-2j * math.pi * at * np.rint(fft.fftfreq(n) * n)) for at, n in zip(shift, shape, strict=True)]
        second = fft.ifft2(fft.fft2(second) * np.multiply.outer(*moves))
    factor = (second.conj() * first * window).sum() / ((np.abs(second) ** 2) * window).sum()
    return np.asarray(factor * second)


def _peak(values: Waves) -> NDArray[np.float64]:
    """The frequency of a plane wave in an image, in periods per pixel along each axis, to 1/100 of its ring."""
    spectrum = np.abs(fft.fft2(values))
    place = np.array(np.unravel_index(spectrum.argmax(), spectrum.shape))
    found = np.array([fft.fftfreq(n)[at] for n, at in zip(values.shape, place, strict=True)])
    step = 1 / np.array(values.shape)
    for _ in range(2):
        near = [at + width * np.arange(-FINER, FINER + 1) / FINER for at, width in zip(found, step, strict=True)]
        waves = [np.exp(-2j * math.pi * np.outer(at, np.arange(n))) for at, n in zip(near, values.shape, strict=True)]
        amount = np.abs(waves[0] @ values @ waves[1].T)
        best = np.unravel_index(amount.argmax(), amount.shape)
        found = np.array([at[number] for at, number in zip(near, best, strict=True)])
        step = step / FINER
    return found
