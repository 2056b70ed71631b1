"""The loss that the noise of photons alone gives."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halotile.storage.scans.scan import open_scan, open_summary

FEWEST, MANY = 1e-6, 100.0
"""Mean counts between which it is summed over numbers of photons; of fewer it is twice their mean, of more it is LIMIT."""
LIMIT = 0.25


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


def photon_loss_of(path: Path) -> float | None:
    """Return about that of a scan, as if each pixel had its mean count in every pattern.

    None where patterns are no counts, or not there any more.
    """
    with suppress(Exception):  # it is no part of the result
        scan, _ = open_scan(str(path))
        mean, most = open_summary(str(path))
        counted = ... if scan.mask is None else scan.mask
        if np.array_equal(most, np.rint(most)):
            return photon_loss(mean[counted])
    return None
