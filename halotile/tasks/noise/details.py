"""The noise level of a square of pixels, from differences in 2 x 2 of them."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Range = tuple[float, float]

NORMAL = NormalDist()
NORMAL_MAD = 0.6744897501960817
"""Median of |z| for a standard normal z."""
TIED = 0.01
"""Fraction of values that equal their median above which they are those of a rounded image."""
COARSE_STEPS = 3
"""Steps up to which the rounding of a median counts: further up it is at most an eighth off."""
NEAR = 2.5
"""Noise levels between saturated pixels and the mean of their 2 x 2, up to which their noise was cut off: a black or white pixel lies farther from its neighbours."""
FAR = 9.0
"""Standard deviations beyond which nothing is cut off."""


class SquareLevel(NamedTuple):
    """The noise level of a square of pixels."""

    level: float
    """NaN without any details; 0 where most of them are."""
    details: int
    is_coarse: bool
    """True where there is no noise, or of a few steps of a rounded image alone."""


def square_level(square: Values, saturated: Range = (math.nan, math.nan)) -> SquareLevel:
    """Noise level of a square, NaN and saturated pixels left out, as it was before noise was cut off at these values.

    Of 2 x 2 pixels that are left, none was beyond the range, ``(1 - p)^4`` of all where p is the probability of it; one alone is in
    ``4 p (1 - p)^3``. The ratio of these numbers, among 2 x 2 pixels close to an end of the range, tells how much of the noise was cut off there.

    ``square``: rows and columns; ``saturated``: least and the largest value, where pixels are saturated; NaN where they are not.

    References
    ----------
    A. Foi, Clipped noisy images: heteroskedastic modeling and practical denoising, Signal Processing 89 (2009) 2609-2629.

    Examples
    --------
    >>> noise = np.random.default_rng(0).standard_normal((256, 256)).clip(0, None)
    >>> round(square_level(noise).level, 1), round(square_level(noise, (0, math.nan)).level, 1)
    (0.5, 0.9)
    """
    rows, columns = (n // 2 * 2 for n in square.shape)
    square = square[:rows, :columns]
    quads = np.stack([square[::2, ::2], square[1::2, ::2], square[::2, 1::2], square[1::2, 1::2]])
    details = np.abs(quads[0] - quads[1] - quads[2] + quads[3]) / 2
    finite = left = np.isfinite(details)
    is_cut = not np.isnan(saturated).all()
    if is_cut:
        left = finite & ~np.isin(quads, saturated).any(0)
    details = details[left]
    if not details.size:
        return SquareLevel(math.nan, 0, is_coarse=True)
    median, is_grouped = grouped_median(details)
    level = median / NORMAL_MAD
    spread = _spread_of_kept(quads[:, finite], saturated, level) if is_cut else 1.0
    return SquareLevel(level / spread, details.size, is_grouped or not level > 0)


def _spread_of_kept(quads: Values, saturated: Range, level: float) -> float:
    """Standard deviation of the noise in the 2 x 2 pixels (the first axis) that are not saturated, relative to that in all."""
    counts = np.stack([(quads == end).sum(0) for end in saturated])
    whole, single = counts.sum(0) == 0, counts.sum(0) == 1
    near = np.stack([np.abs(quads.mean(0) - end) <= NEAR * level for end in saturated])
    odds = (near & single & (counts == 1)).sum(1) / np.maximum(4 * (near & whole).sum(1), 1)
    (at_low, at_high), (below, above) = near[:, whole], odds
    return sum(
        float(np.mean((at_low == low) & (at_high == high))) * kept_spread(low * below, high * above)
        for low, high in itertools.product((False, True), repeat=2)
    )


def kept_spread(below: float, above: float) -> float:
    """Standard deviation of the values of a normal distribution in a range, relative to that of all.

    ``below, above``: numbers of values below and above the range, relative to that of those in it.

    Examples
    --------
    >>> round(kept_spread(0, 0), 3), round(kept_spread(1, 0) ** 2, 3)
    (1.0, 0.363)
    """
    kept = 1 / (1 + below + above)
    low = NORMAL.inv_cdf(below * kept) if below else -FAR
    high = -NORMAL.inv_cdf(above * kept) if above else FAR
    mean = (NORMAL.pdf(low) - NORMAL.pdf(high)) / kept
    variance = 1 + (low * NORMAL.pdf(low) - high * NORMAL.pdf(high)) / kept - mean**2
    return math.sqrt(variance)


def grouped_median(values: Values) -> tuple[float, bool]:
    """The median of values, and True if it was that of coarsely rounded ones: it then lies within the step that they were rounded to.

    Where more than one in a hundred values equals the median, and it is one of the least values, these are taken as spread evenly
    over their step: the details of small integers would else have one of few levels. A median of 0 stays 0.

    Examples
    --------
    >>> grouped_median(np.array([0.0, 1.0, 1.0, 1.0, 2.0])), grouped_median(np.array([0.0, 1.0, 1.0, 2.0, 2.0]))
    ((1.0, True), (1.25, True))
    """
    median = float(np.median(values))
    tied = np.count_nonzero(values == median)
    if median == 0 or tied <= len(values) * TIED:
        return median, False
    below, above = values[values < median], values[values > median]
    if not below.size or not above.size or len(np.unique(below)) > COARSE_STEPS:
        return median, False
    low, high = (below.max() + median) / 2, (median + above.min()) / 2
    return float(low + (high - low) * (len(values) / 2 - len(below)) / tied), True
