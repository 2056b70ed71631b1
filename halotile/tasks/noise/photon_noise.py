"""Photon noise of an image: its gain, offset and read noise; and planes as samples show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.rim import Readable
from halotile.tasks.noise.estimate import (
    NORMAL_MAD,
    SATURATED,
    Ends,
    PlaneLevel,
    Values,
    finite_values,
    measure_plane,
    plane_level,
    sampled_planes,
)

BLOCK = 16
"""Edge of the blocks whose mean and variance are compared, in pixels."""
CLASSES, LEAST_BLOCKS = 16, 24
"""Classes of like brightness, and blocks in each at least."""
LEAST_MEASURED = 0.2
"""Share of the details of a block that has to be known: those with a hole in their 2 x 2 pixels are not."""
SPREAD = 0.19
"""Standard deviation of the lower quartile of such variances for one block, relative to it."""
SATURATED_AT_MOST, EMPTY_AT_MOST = 0.02, 0.5
"""Share of the pixels of a block that may have the largest value of a plane, and the least, where many pixels have these."""
CERTAIN, CLEAR, CLEAR_RATIO, CLEAR_RESIDUAL = 3.0, 10.0, 1.7, 0.06
"""Gain in standard deviations from which there is one, and is clear; ratio of the variances of bright and dark, at least, and
relative distance of variances from the line, at most, where it is clear."""
EVEN_RATIO, CLEAR_RATIO_EVEN = 1.2, 4.0
"""Ratio of the variances of middling and dark up to which most of a plane is as noisy as the dark, so that one level suits it; and that of
bright and dark, at least, where it is clear all the same."""
DARKEST = 0.005
"""Quantile of the means of blocks that the offset cannot exceed; classes lie between it and that from above."""
SUITS = 2.0
"""Ratio of the variance that other planes predict for one and its own, or the inverse, up to which their noise is taken for it."""


@dataclass(frozen=True)
class PhotonNoise:
    """Noise of an image that counts photons: ``z = gain P(x) + offset + read_sigma n``, P a Poisson count, n standard normal.

    >>> float(PhotonNoise(np.array(2.0), np.array(100.0), np.array(3.0)).variance)
    -191.0
    >>> PhotonNoise.of(np.array(2.0), np.array(-191.0)).to_json()
    {'gain': 2.0, 'offset': 95.5, 'read_sigma': 0.0}
    """

    # value of one photon, in units of the image: one number, or one for each plane. 0 where no photons are counted:
    # noise of one level
    gain: Values
    offset: Values  # value without any photon, of the same shape
    read_sigma: Values  # standard deviation of the noise of the readout, of the same shape

    @classmethod
    def of(cls, gain: Values, variance: Values) -> Self:
        """The noise of variance ``gain * z + variance`` at a pixel of mean ``z``: an image does not tell offset and readout apart."""
        offset = np.maximum(-variance / np.where(gain > 0, gain, 1.0), 0.0) + 0.0
        return cls(gain, offset, np.sqrt(np.maximum(variance, 0.0)))

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """The noise that :meth:`to_json` returned."""
        return cls(*(np.asarray(stored[name], np.float64) for name in ("gain", "offset", "read_sigma")))

    def to_json(self) -> dict[str, Any]:
        """The numbers by name."""
        return {name: getattr(self, name).tolist() for name in ("gain", "offset", "read_sigma")}

    @property
    def variance(self) -> Values:
        """Variance of the noise less ``gain`` times the value of the pixel."""
        variance: Values = self.read_sigma**2 - self.gain * self.offset
        return variance


class Fit(NamedTuple):
    """A line through the variances of blocks over their means."""

    gain: float
    variance: float
    is_clear: bool
    """True if the variances differ much and lie close to the line."""


class Even(NamedTuple):
    """A plane in which noise does not grow with brightness."""

    median: float
    level: float
    """Its noise level; NaN where nothing is measured."""


def estimate_photon_noise(
    source: Readable,  # image
    # spatial, looped: positions of the spatial axes, and of those of which each index is a plane by itself
    spatial: Sequence[int],
    looped: Sequence[int] = (),
    *,
    apart: Sequence[int] = (),  # those of the looped axes whose indices share no noise: channels
    clearly: bool = False,  # require that the noise of every plane clearly grows with brightness
) -> PhotonNoise | None:
    """Estimate the photon noise of every plane from the samples of :func:`~halotile.tasks.noise.estimate.estimate_noise_levels`.

    A plane in which noise does not grow with brightness, such as one of equal brightness, gets the median of the others where
    that is as much noise as it has; else noise of its own level, with a gain of 0.

    Returns
    -------
    PhotonNoise or None
        One number for each index of the looped axes; None where no plane shows such noise.
    """
    fits: dict[tuple[int, ...], Fit] = {}
    evens: dict[tuple[int, ...], Even] = {}
    for place, squares in sampled_planes(source, spatial, looped):
        if fit := fit_photon_noise(squares):
            fits[place] = fit
        else:
            values = finite_values(squares)
            evens[place] = Even(float(np.median(values)) if values.size else 0.0, plane_level(squares))
    if not fits or (clearly and (evens or not all(fit.is_clear for fit in fits.values()))):
        return None
    kept = [number for number, axis in enumerate(looped) if axis in apart]
    for place, even in evens.items():
        like = [fit for other, fit in fits.items() if all(other[i] == place[i] for i in kept)]
        fits[place] = _fit_of_even(even, like)
    lengths = tuple(source.shape[axis] for axis in looped)
    gain, variance = (np.array([fits[at][i] for at in np.ndindex(lengths)]).reshape(lengths) for i in range(2))
    return PhotonNoise.of(gain, variance)


def _fit_of_even(even: Even, others: Sequence[Fit]) -> Fit:
    """Return the noise of a plane whose own does not grow with brightness: that of the others where it suits, else of one level."""
    measured = not math.isnan(even.level)
    if others:
        gain, variance = (float(np.median([fit[i] for fit in others])) for i in range(2))
        predicted = gain * even.median + variance
        suits = even.level > 0 and 1 / SUITS <= predicted / even.level**2 <= SUITS
        if suits or not measured:
            return Fit(gain, variance, is_clear=False)
    return Fit(0.0, even.level**2 if measured else 0.0, is_clear=False)


def fit_photon_noise(squares: Sequence[Values]) -> Fit | None:
    """Fit a line to the variance of noise over brightness; None where it does not rise.

    The variance of a block is that of its Haar diagonal details, at each of its pixels. The lower quartile in a class of blocks of like
    brightness stands for the class, so that structure in most of its blocks does not count for noise. Saturated, empty and
    constant blocks are left out; pixels that are not finite do not count.

    ``squares``: parts of one plane.

    References
    ----------
    A. Foi, M. Trimeche, V. Katkovnik, K. Egiazarian, Practical Poissonian-Gaussian noise modeling and fitting for
    single-image raw-data, IEEE Trans. Image Process. 17 (2008) 1737-1754.

    Examples
    --------
    >>> ramp = np.tile(np.linspace(10.0, 1000.0, 512), (512, 1))
    >>> fit = fit_photon_noise([2.0 * np.random.default_rng(0).poisson(ramp)])
    >>> abs(fit.gain - 2.0) < 0.1, fit.is_clear
    (True, True)
    """
    squares = _without_marks(squares)
    exponent = math.frexp(np.abs(finite_values(squares)).max(initial=0.0))[1]
    # In a unit in which squares neither overflow nor vanish.
    fit = _fit([np.ldexp(square, -exponent) for square in squares])
    unit = math.ldexp(1.0, exponent)
    return fit and Fit(fit.gain * unit, fit.variance * unit * unit, fit.is_clear)


def _fit(squares: Sequence[Values]) -> Fit | None:
    """Fit the line to squares of which no value has to be left out."""
    means, variances, all_means = (np.concatenate(part) for part in zip(*_moments(squares), strict=True))
    classes = _classes(means)
    if len(classes) < 2:
        return None
    x = np.array([np.median(means[c]) for c in classes])
    y = np.array([np.quantile(variances[c], 0.25) for c in classes])
    # The spread of an estimated variance is in proportion to it.
    sizes = np.array([len(c) for c in classes])
    errors = SPREAD * np.maximum(y, 1e-3 * y.max()) / np.sqrt(sizes)
    middle = np.median(x)  # near which a large offset costs no digits
    (gain, variance), covariance = np.polyfit(x - middle, y, 1, w=1 / errors, cov="unscaled")
    variance -= gain * middle
    certainty = gain / math.sqrt(covariance[0, 0])
    offset = np.quantile(all_means, DARKEST)
    if gain * offset + variance < 0:  # nothing is darker than without any photon
        lever = np.square(1 / errors) * (x - offset)
        gain = (lever * y).sum() / (lever * (x - offset)).sum()
        variance = -gain * offset
    dark, usual, bright = (gain * mean + variance for mean in np.quantile(means, [0.02, 0.5, 0.98]))
    if certainty < CERTAIN or bright <= 0:
        return None
    line = np.maximum(gain * x + variance, 1e-3 * bright)
    residual = math.sqrt(np.average(np.square((y - line) / line), weights=sizes))
    least = CLEAR_RATIO if usual > EVEN_RATIO * dark else CLEAR_RATIO_EVEN
    is_clear = certainty > CLEAR and bright > least * dark and residual < CLEAR_RESIDUAL
    return Fit(float(gain), float(variance), bool(is_clear))


def _classes(means: Values) -> list[NDArray[np.intp]]:
    """Indices of the blocks in each class of like brightness that has enough."""
    if not means.size:
        return []
    dark, bright = np.quantile(means, [DARKEST, 1 - DARKEST])
    numbers = np.floor((means - dark) / (bright - dark or 1.0) * CLASSES).clip(0, CLASSES - 1)
    classes = (np.flatnonzero(numbers == number) for number in range(CLASSES))
    return [members for members in classes if len(members) >= LEAST_BLOCKS]


def _moments(squares: Sequence[Values]) -> list[tuple[Values, Values, Values]]:
    """Mean of the blocks of each square that can be compared, their variance by its lower quartile, and the means of all blocks."""
    values = finite_values(squares)
    ends = [
        (end, share)
        for end, share in (
            (values.min(initial=np.inf), EMPTY_AT_MOST),
            (values.max(initial=-np.inf), SATURATED_AT_MOST),
        )
        if (values == end).sum() > SATURATED * values.size
    ]
    moments = []
    for square in squares:
        rows, columns = (n // BLOCK for n in square.shape)
        blocks = square[: rows * BLOCK, : columns * BLOCK].reshape(rows, BLOCK, columns, BLOCK)
        left, right = blocks[:, :, :, :-1], blocks[:, :, :, 1:]
        details = ((left - right)[:, :-1] - (left - right)[:, 1:]) / 2
        means, filled = _measured_means(blocks)
        variances, measured = _measured_means(np.square(details))
        known = (measured >= LEAST_MEASURED) & (variances > 0)
        for end, share in ends:
            known &= (blocks == end).mean((1, 3)) <= share * filled
        quartiles = _quartile(measured[known])
        moments.append((means[known], variances[known] / quartiles, means[filled >= LEAST_MEASURED]))
    return moments


def _without_marks(squares: Sequence[Values]) -> Sequence[Values]:
    """The squares with NaN for a least or largest value that lies farther from all others than these from each other: no light has it."""
    values = np.unique(finite_values(squares))
    if len(values) < 4:
        return squares
    gaps, width = np.diff(values), values[-2] - values[1]
    marks = [end for end, gap in ((values[0], gaps[0]), (values[-1], gaps[-1])) if gap > width]
    return [np.where(np.isin(square, marks), np.nan, square) for square in squares] if marks else squares


def _quartile(measured: Values) -> Values:
    """Lower quartile of the variance of a block of white noise of which a share of the details is known, relative to the true variance.

    It is that of chi square, by Wilson and Hilferty. Details that overlap are worth fewer: ``1 + 1.25`` for each where all are known, the
    sum of their squared correlations.
    """
    freedom = (BLOCK - 1) ** 2 * measured / (1 + 1.25 * measured)
    spread = 2 / (9 * freedom)
    quartile: Values = (1 - spread - NORMAL_MAD * np.sqrt(spread)) ** 3
    return quartile


def _measured_means(blocks: Values) -> tuple[Values, Values]:
    """Mean of the finite pixels of each block, of shape (rows, edge, columns, edge), 0 without any; and their share."""
    shares = np.isfinite(blocks).mean((1, 3))
    means: Values = np.nan_to_num(blocks).mean((1, 3)) / np.where(shares, shares, 1)
    return means, shares


PLANES = 64
"""Planes that are looked at, at most."""
TAIL = 1e-3
"""Share of the samples below the range of values, and above."""


@dataclass(frozen=True)
class PlaneSurvey:
    """A plane as its samples show it."""

    place: tuple[int, ...]  # its index on each looped axis
    # low, high: range of all but the least and largest values, in the units of the file; NaN without any
    low: float
    high: float
    noise: PlaneLevel  # noise level in the same units; 0 or NaN where there is none
    grows: bool  # true if the noise clearly grows with brightness
    ends: Ends  # its least and largest values


def survey_planes(source: Readable, spatial: Sequence[int], looped: Sequence[int] = ()) -> tuple[PlaneSurvey, ...]:
    """Look at samples of the planes, spread evenly where there are many; at none that are too small or cannot be read.

    ``source``: image; ``spatial, looped``: positions of the spatial axes, and of those of which each index is a plane by itself.
    """
    found = []
    with suppress(InputError):  # a run says so, where it matters
        for place, squares in sampled_planes(source, spatial, looped, PLANES):
            found.append(_surveyed(place, squares))
    return tuple(found)


def _surveyed(place: tuple[int, ...], squares: list[Values]) -> PlaneSurvey:
    values = finite_values(squares)
    low, high = np.quantile(values, [TAIL, 1 - TAIL]) if values.size else (math.nan, math.nan)
    fit = fit_photon_noise(squares)
    grows = fit is not None and fit.is_clear
    return PlaneSurvey(place, float(low), float(high), measure_plane(squares), grows, Ends.of(values))
