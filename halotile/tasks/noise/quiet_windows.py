"""Variance of noise over brightness, from windows of a plane in quiet surroundings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
WINDOW = 8  # edge of the windows whose mean and variance are compared, in pixels
LEAST_WINDOWS = 16  # windows that have to count, at least
# Share of the details of a window that has to be known: those with a hole in their 2 x 2 pixels are not.
LEAST_MEASURED = 0.2
# Degrees of freedom of the variance of a window; overlapping details count for less, by the sum of their squared
# correlations.
FREEDOM = (WINDOW - 1) ** 2 / 2.25
# Ranges of brightness of which each has a say in a first guess, if it has half as many windows as have to count; ratio
# of windows by which that has to be better.
RANGES, CLEARLY_MORE = 8, 1.1
# Standard deviations of a window's variance above the line from which it does not count, and steps of the fit at most.
OUTLYING, ROUNDS = 4.0, 30
# Share of the pixels of a window that may have the largest value of a plane, and the least, where many pixels have
# these.
SATURATED_AT_MOST, EMPTY_AT_MOST = 0.02, 0.5
ENOUGH_ARE_WHOLE = 0.1  # share of the windows of a plane that are not saturated, above which they alone count
# Gain in standard deviations from which there is one, and is clear; ratio of the variances of bright and dark, at
# least, where it is.
CERTAIN, CLEAR, CLEAR_RATIO = 3.0, 7.0, 1.6
# Quantile of the means of windows that the offset cannot exceed; bright and dark are compared at that from both ends.
DARKEST = 0.005
# Binary digits of a level, whose square float32 holds exactly: noise without photons has the bits of Gaussian noise.
DIGITS = 11
SATURATED = 1e-3
# A detector saturates at the least or largest value of a plane that more than this fraction of the samples has, and so
# many times as many as the next value.
PILED_UP = 3


class Fit(NamedTuple):
    """Noise of a plane: its variance is ``gain * z + variance`` at a pixel of mean ``z``."""

    gain: float  # 0 where the noise does not grow with brightness
    variance: float
    level: float  # standard deviation, root mean square over the plane
    is_clear: bool  # true if it clearly grows with brightness
    share: float = 1.0  # share of the windows that could be compared


class PlaneWindows(NamedTuple):
    """Windows of one plane or more, in units of ``2**exponent``."""

    exponent: int
    means: Values
    variances: Values
    around: Values  # mean variance of the windows beside each
    all_means: Values  # the means also of windows that cannot be compared
    whole: NDArray[np.bool_]  # true where noise was hardly cut off at the least value

    @property
    def middle(self) -> float:
        """Median brightness, in the units of the file."""
        return math.ldexp(float(np.median(self.means)), self.exponent) if len(self.means) else 0.0

    @classmethod
    def joined(cls, parts: Sequence[PlaneWindows]) -> PlaneWindows:
        """The windows of several planes."""
        exponent = max(part.exponent for part in parts)
        scaled = [
            [np.ldexp(found, n * (part.exponent - exponent)) for found, n in zip(part[1:5], (1, 2, 2, 1), strict=True)]
            for part in parts
        ]
        means, variances, around, all_means = (np.concatenate(found) for found in zip(*scaled, strict=True))
        return cls(exponent, means, variances, around, all_means, np.concatenate([part.whole for part in parts]))


def fit_noise(windows: PlaneWindows | None) -> Fit | None:
    """Fit a line to the variance of noise over brightness; None where too little of a plane can be compared.

    Windows count whose neighbours have no more variance than the line. Neighbours share structure but not noise: so structure is left out, and the
    variance is unbiased.

    References
    ----------
    A. Foi, M. Trimeche, V. Katkovnik, K. Egiazarian, Practical Poissonian-Gaussian noise modeling and fitting for
    single-image raw-data, IEEE Trans. Image Process. 17 (2008) 1737-1754.

    Examples
    --------
    >>> ramp = np.tile(np.linspace(10.0, 1000.0, 512), (512, 1))
    >>> fit = fit_noise(windows_of([2.0 * np.random.default_rng(0).poisson(ramp)]))
    >>> abs(fit.gain - 2.0) < 0.1, round(fit.level / 1000**0.5, 1), fit.is_clear
    (True, 1.4, True)
    """
    if windows is None:
        return None
    exponent, means, variances, around, all_means, whole = windows
    if np.isfinite(around).sum() < LEAST_WINDOWS:
        return None
    unit, share = math.ldexp(1.0, exponent), len(means) / len(all_means)
    middle = float(means.mean())  # near which a large offset costs no digits
    x = means - middle
    level, gain, deviation, quiet = _quiet_line(x[:, None], variances, around)
    offset, end = np.quantile(all_means, [DARKEST, 1 - DARKEST]) - middle
    if gain * offset + level < 0:  # nothing is darker than without any photon
        gain = float(variances[quiet].mean() / (x[quiet].mean() - offset))
        level = -gain * offset
    dark, bright = gain * offset + level, gain * end + level
    if not deviation or gain < CERTAIN * deviation or bright <= 0:
        even, *_ = _quiet_line(np.zeros((len(x), 0)), variances, around)
        fraction, power = math.frexp(math.sqrt(even))
        rounded = math.ldexp(round(fraction * 2**DIGITS), power - DIGITS) * unit
        return Fit(0.0, rounded * rounded, rounded, is_clear=False, share=share)
    mean = float(np.maximum(gain * (all_means - middle) + level, 0).mean())
    is_clear = bool(gain > CLEAR * deviation and bright > CLEAR_RATIO * dark)
    if is_clear and not whole.all() and whole.mean() * share > ENOUGH_ARE_WHOLE:  # or dark noise may have been cut off
        found: Any = (part[whole] for part in (means, variances, around, means, whole))
        is_clear = (rest := fit_noise(PlaneWindows(exponent, *found))) is None or rest.is_clear
    return Fit(gain * unit, (level - gain * middle) * unit * unit, math.sqrt(mean) * unit, is_clear, share)


def windows_of(squares: Sequence[Values], *, whole: bool = False) -> PlaneWindows | None:
    """Measure the windows of a plane; None without any.

    The variance of a window is that of its Haar diagonal details. Saturated, empty and constant windows are left out; pixels that are not finite do not
    count.

    ``squares``: parts of the plane; ``whole``: True without windows in which noise was cut off at the least value of the plane.
    """
    squares = without_marks(squares)
    exponent = math.frexp(np.abs(finite_values(squares)).max(initial=0.0))[1]
    # In a unit in which squares neither overflow nor vanish.
    squares = [np.ldexp(square, -exponent) for square in squares]
    limits, found = crowded(squares), []
    for square in squares:
        windows = cut(square)
        left, right = windows[:, :, :, :-1], windows[:, :, :, 1:]
        details = ((left - right)[:, :-1] - (left - right)[:, 1:]) / 2
        means, filled = _measured_means(windows)
        variances, measured = _measured_means(np.square(details))
        known = (measured >= LEAST_MEASURED) & (variances > 0)
        is_whole = np.ones(known.shape, bool)
        for end, most in limits:
            share = (windows == end).mean((1, 3)) / np.where(filled, filled, 1)
            is_whole &= share <= SATURATED_AT_MOST
            known &= is_whole if whole else share <= most
        around = mean_beside(np.where(known, variances, np.nan))
        parts = (means, variances, around)
        found.append((*(part[known] for part in parts), means[filled >= LEAST_MEASURED], is_whole[known]))
    if not found:
        return None
    return PlaneWindows(exponent, *(np.concatenate(part) for part in zip(*found, strict=True)))


def cut(images: NDArray[Any], edge: int = WINDOW) -> NDArray[Any]:
    """The windows of images, of shape (..., rows, edge, columns, edge)."""
    rows, columns = (n // edge for n in images.shape[-2:])
    return images[..., : rows * edge, : columns * edge].reshape(*images.shape[:-2], rows, edge, columns, edge)


def _quiet_line(x: Values, y: Values, around: Values) -> tuple[float, float, float, NDArray[np.bool_]]:
    """The line through the variances of windows in quiet surroundings, as :func:`_line` returns it, and these windows."""
    quiet, known = np.isfinite(around), dict[bytes, tuple[float, float, float]]()
    for _ in range(ROUNDS):
        if (key := quiet.tobytes()) not in known:  # few windows often go round in circles
            known[key] = _line(x[quiet], y[quiet])
        level, gain, deviation = known[key]
        found = around <= level + gain * x.sum(1)
        if np.array_equal(found, quiet) or found.sum() < LEAST_WINDOWS:
            break
        quiet = found
    return level, gain, deviation, quiet


def _line(x: Values, y: Values) -> tuple[float, float, float]:
    """The likeliest line through variances whose spread is in proportion to them: its value at 0, its slope and the deviation of that.

    It starts at the median, or at medians of several ranges of brightness where clearly fewer windows are outliers then: many dark windows would outvote few bright ones.

    ``x``: one column, or none for a line without slope.
    """
    terms = np.column_stack([np.ones(len(x)), x])
    (number, line), *others = (_line_from(start, terms, y) for start in _starts(x, y))
    return next((other for more, other in others if more > CLEARLY_MORE * number), line)


def _starts(x: Values, y: Values) -> Iterator[Values]:
    """Yield first guesses of the variances: one for all, and a line through the medians of ranges of brightness."""
    yield np.full(len(y), np.median(y))
    edges = np.linspace(x.min(initial=0), x.max(initial=0), RANGES + 1)[1:-1]
    parts = [part for n in range(RANGES) if (part := np.searchsorted(edges, x.sum(1)) == n).sum() >= LEAST_WINDOWS / 2]
    if x.size and len(parts) > 1:
        places, middles = np.array([[x[part].mean(), np.median(y[part])] for part in parts]).T
        slope, level = np.polyfit(places, middles, 1, w=1 / middles)
        yield level + slope * x[:, 0]


def _line_from(line: Values, terms: Values, y: Values) -> tuple[int, tuple[float, float, float]]:
    """The number of windows near the line that is found from this one, and that line as :func:`_line` returns it."""
    least, spread = 1e-3 * float(np.median(y)), math.sqrt(2 / FREEDOM)
    line = np.maximum(line, least)
    for _ in range(ROUNDS):
        near = y < line * (1 + OUTLYING * spread)
        weights = near / line**2
        weighted = (terms * weights[:, None]).T
        normal = weighted @ terms
        if not np.linalg.det(normal):
            return 0, (float(y.mean()), 0.0, 0.0)
        found = np.linalg.solve(normal, weighted @ y)
        before, line = line, np.maximum(terms @ found, least)
        if (np.abs(line - before) <= 1e-6 * np.abs(before)).all():
            break
    level, *gain = found.tolist()
    deviation = spread * math.sqrt(np.linalg.inv(normal)[1, 1]) if gain else 0.0
    return int(near.sum()), (level, gain[0] if gain else 0.0, deviation)


def mean_beside(values: Values) -> Values:
    """Mean of the four neighbours of each value that are known; infinity without any."""
    padded = np.pad(values, 1, constant_values=np.nan)
    beside = np.stack([padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]])
    count = np.isfinite(beside).sum(0)
    return np.where(count, np.nansum(beside, 0) / np.maximum(count, 1), np.inf)


def _measured_means(windows: Values) -> tuple[Values, Values]:
    """Mean of the finite pixels of each window, of shape (rows, edge, columns, edge), 0 without any; and their share."""
    shares = np.isfinite(windows).mean((1, 3))
    means: Values = np.nan_to_num(windows).mean((1, 3)) / np.where(shares, shares, 1)
    return means, shares


def without_marks(squares: Sequence[Values]) -> Sequence[Values]:
    """The squares with NaN for a least or largest value that is farther from all others than these from each other: no light has it."""
    values = finite_values(squares)
    if not len(inner := values[(values > values.min(initial=math.inf)) & (values < values.max(initial=-math.inf))]):
        return squares
    low, high, first, last = float(values.min()), float(values.max()), float(inner.min()), float(inner.max())
    marks = [end for end, gap in ((low, first - low), (high, high - last)) if gap > last - first > 0]
    return [np.where(np.isin(square, marks), np.nan, square) for square in squares] if marks else squares


def finite_values(squares: Sequence[NDArray[Any]]) -> Values:
    """The finite values of squares, in one array."""
    return np.concatenate([np.zeros(0), *(square[np.isfinite(square)] for square in squares)])


def saturated_ends(squares: Sequence[Values]) -> tuple[float, float]:
    """The least and the largest value, where pixels are saturated; NaN where they are not."""
    values = finite_values(squares)
    return (_piled_up(values), -_piled_up(-values) + 0.0)


def crowded(squares: Sequence[Values]) -> list[tuple[float, float]]:
    """The values at which pixels are saturated, with the share of the pixels of a window that may have them."""
    ends = zip(saturated_ends(squares), (EMPTY_AT_MOST, SATURATED_AT_MOST), strict=True)
    return [(end, most) for end, most in ends if not math.isnan(end)]


def _piled_up(values: Values) -> float:
    """The least value if many have it that would be below, else NaN; few counts do not: as many are 1 as 0 at a mean of 1."""
    least = values.min(initial=np.inf)
    others = values[values > least]
    number = values.size - others.size
    if number <= SATURATED * values.size:
        return math.nan
    piled = not others.size or number > PILED_UP * np.count_nonzero(others == others.min())
    return float(least) if piled else math.nan
