"""The loss that the noise of photons alone gives."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halotile.storage.scans.scan import open_scan, open_summary

FEWEST, MANY = 1e-6, 100.0
"""Mean counts between which it is summed over numbers of photons; of fewer it is their mean, of more it is LIMIT."""
LIMIT = 0.25


def photon_loss(mean: NDArray[np.floating]) -> float:
    """Return the variance of the roots of counts, with which no amplitude agrees better.

    Examples
    --------
    >>> round(photon_loss(np.array([1e-8])), 9), round(photon_loss(np.array([1.0])), 3), photon_loss(np.array([1e6]))
    (1e-08, 0.402, 0.25)
    """
    from scipy.special import gammaln

    means, counts = np.geomspace(FEWEST, MANY, 200), np.arange(300)
    chances = np.exp(counts * np.log(means)[:, None] - means[:, None] - gammaln(counts + 1))
    losses = means - (chances @ np.sqrt(counts)) ** 2
    known = np.interp(np.log(np.maximum(mean, FEWEST)), np.log(means), losses, right=LIMIT)
    return float(np.where(mean < FEWEST, mean, known).mean(dtype=np.float64))


def most_photon_loss(path: Path) -> float | None:
    """Return the most that it is of a scan: where a pixel varies from pattern to pattern it is less than that of its mean.

    None where patterns are no counts, or not there any more.
    """
    with suppress(Exception):  # it is no part of the result
        scan, _ = open_scan(str(path))
        mean, most = open_summary(str(path))
        counted = ... if scan.mask is None else scan.mask
        if np.array_equal(most, np.rint(most)):
            return photon_loss(mean[counted])
    return None
