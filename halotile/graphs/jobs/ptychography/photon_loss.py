"""The loss that the noise of photons alone gives."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.scans.scan import open_scan, open_summary

FEWEST, MANY = 1e-6, 100.0
"""Mean counts between which it is summed over numbers of photons; of fewer it is twice their mean, of more it is LIMIT."""
LIMIT = 0.25
SHAPES = (0.05, 1e6)
"""Smallest and largest shape of the gamma distributions."""
PARTS = 8
"""Parts of a distribution, each with its mean count."""
SOME_BYTES = 2**27
"""Most bytes of the patterns whose counts are looked at."""


def photon_loss(mean: NDArray[np.floating]) -> float:
    """Return the mean squared difference between roots of counts and the roots of their means.

    Examples
    --------
    >>> round(photon_loss(np.array([1e-8])), 9), round(photon_loss(np.array([1.0])), 3), photon_loss(np.array([1e6]))
    (2e-08, 0.453, 0.25)
    """
    from scipy.special import gammaln

    means, counts = np.geomspace(FEWEST, MANY, 200), np.arange(300)
    chances = np.exp(counts * np.log(means)[:, None] - means[:, None] - gammaln(counts + 1))
    losses = 2 * (means - np.sqrt(means) * (chances @ np.sqrt(counts)))
    known = np.interp(np.log(np.maximum(mean, FEWEST)), np.log(means), losses, right=LIMIT)
    return float(np.where(mean < FEWEST, 2 * mean, known).mean(dtype=np.float64))


def photon_loss_of_varying(mean: NDArray[np.floating], variance: NDArray[np.floating]) -> float:
    """Return the same of pixels whose means vary from pattern to pattern, as a gamma distribution does.

    ``mean, variance``: of the counts of each pixel over all patterns: beyond the mean, the variance is that of the pixel's means.
    """
    from scipy.stats import gamma

    shapes = np.geomspace(*SHAPES, 100)
    factors = gamma.ppf((np.arange(PARTS)[:, None] + 0.5) / PARTS, shapes) / shapes
    beyond = np.maximum(variance - mean, mean**2 / SHAPES[1] + FEWEST**2)
    at = np.log(np.clip(mean**2 / beyond, *SHAPES))
    losses = [photon_loss(mean * np.interp(at, np.log(shapes), each)) for each in factors / factors.mean(0)]
    return float(np.mean(losses))


def mean_count(path: str) -> float | None:
    """Return the mean count of a pixel of a scan; None where patterns are no counts, or not there any more."""
    with suppress(Exception):  # what is damaged is found when it is needed
        scan, _ = open_scan(path)
        mean, most = open_summary(path)
        if np.array_equal(most, np.rint(most)):
            return float(mean[... if scan.mask is None else scan.mask].mean())
    return None


def photon_loss_of(path: str) -> float | None:
    """Return about that of a scan, by some of its patterns; None as of :func:`mean_count`."""
    if mean_count(path) is None:
        return None
    with suppress(Exception):  # it is no part of the result
        scan, patterns = open_scan(path)
        count, *pattern = patterns.shape
        most = max(1, SOME_BYTES // (8 * math.prod(pattern)))
        some = np.linspace(0, count - 1, min(count, most)).astype(int)
        read = [patterns.read(Region((n, 0, 0), (n + 1, *pattern)))[0] for n in some.tolist()]
        counts = np.asarray(read, np.float32)[:, ... if scan.mask is None else scan.mask]
        return photon_loss_of_varying(counts.mean(0), counts.var(0))
    return None
