"""Stripes: values that whole lines of an image are off by, estimated from the image and removed while it is read."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.views import WithGaps
from halotile.tasks.inner_tiles import respanned
from halotile.tasks.noise.estimate import NORMAL_MAD
from halotile.tasks.noise.quiet_windows import Values

# Lines that are estimated together, and lines on each side that are read besides: their influence has faded there.
GROUP, MARGIN = 1024, 256
SEGMENTS = 8  # parts of a line that are estimated by themselves: they agree on a stripe, and seldom on the image
RUN, THICK, MOST = 8, 16, 256  # means that are read in one piece, pixels in each at most, and means of a line at most
# Pixels of the shortest line, and the least number of lines, that stripes can be measured on.
LEAST_LENGTH, LEAST_LINES = 32, 32
LAGS = (1, 2, 4, 8, 16, 32, 64)  # distances between the lines that are compared
FAR = 3.0  # noise levels from which a difference does not count: it is an edge of the image
ROUNDS = 5
SMOOTH = 17  # lines whose errors are averaged
# Standard deviation of the image's own change over lag 1, relative to that of the stripes; it grows with the lag to the
# power of 3/4.
DRIFT = 0.1
EVEN = 0.1  # share of the mean contrast below which a line shows little of its gain; both are squared
# Median differences of neighbours from which a line stands alone, and share of such lines up to which they are measured
# by themselves.
LONE, MOST_LONE = 6.0, 0.05
EVERYWHERE = 0.7  # part of the offset of such a line that each of its segments has at least: else it is of the image
# Scatter along a line that stands alone, relative to that of others, below which it is dead: nothing is known of its
# offset.
ALIVE = 0.5
TINY = 1e-12
LARGEST = 1e100  # means from which no squares are computed
MOST_KEPT = 4096  # groups of lines that a reader remembers, of a few kilobytes each


@dataclass(frozen=True)
class StripedLines:
    """The lines of an image."""

    across: int  # position of the axis along which lines differ
    along: int  # position of the axis along a line
    gain: bool = False  # true: lines differ by a factor as well


def line_offsets(means: Values, *, finds_lone: bool = True) -> Values:
    """Estimate the offset of each line from means of its pixels.

    Pairs of lines at several distances are compared place by place. A robust mean of their differences leaves out edges of the image; the scatter
    between segments of the line is its error. The offsets are the most likely ones for these differences, where offsets are independent with the
    variance that segments agree on, and the image drifts slowly: without stripes they are 0.

    ``means``: places along a line, a multiple of ``SEGMENTS``, and lines; NaN where nothing is measured; ``finds_lone``: whether lines may stand alone.
    """
    from scipy.ndimage import uniform_filter1d  # late, as every plan looks for stripes, and few images have some

    unit = _unit(means)
    whole, lines = means / unit, means.shape[1]
    lone = lone_lines(whole) & finds_lone
    means = np.where(lone, np.nan, whole)
    lags = [lag for lag in LAGS if lag <= lines // 2]
    differences = [(means[:, lag:] - means[:, :-lag]).reshape(SEGMENTS, -1, lines - lag) for lag in lags]
    guesses = [_median(part) for part in differences]
    scale = _scale(differences[0] - guesses[0])
    offsets, variance = np.zeros(lines), 0.0
    for _ in range(ROUNDS):
        found = []
        for lag, part, guess in zip(lags, differences, guesses, strict=True):
            weights, sums = _weighed(part - guess, scale)
            total = np.maximum(weights.sum(0), 1e-3)
            off = sums.sum(0) / total
            scatter = np.square(sums - weights * off).sum(0) / total**2 * SEGMENTS / (SEGMENTS - 1)
            if lag == 1:
                each = guess + sums / np.maximum(weights, 1e-3)
                pairs = np.square(each.sum(0)) - np.square(each).sum(0)
                variance = max(float(pairs.mean()) / (SEGMENTS * (SEGMENTS - 1)) / 2, TINY)
            error = np.maximum(uniform_filter1d(scatter, SMOOTH), scale**2 / total)
            found.append((lag, guess + off, 1 / (error + variance * DRIFT**2 * lag**1.5)))
        offsets = _most_likely(found, 1 / variance)
        guesses = [offsets[lag:] - offsets[:-lag] for lag in lags]
    spreads, others = _median(np.abs(whole - _median(whole))), np.flatnonzero(~lone)
    for line in np.flatnonzero(lone & (spreads > ALIVE * np.median(spreads))):
        beside = others[np.searchsorted(others, line) + np.array([-1, 0])]
        away = (whole[:, line] - (whole - offsets)[:, beside].mean(1)).reshape(SEGMENTS, -1)
        each, own = _median(away.T), float(_median(away.reshape(-1, 1))[0])
        offsets[line] = own if own and (each / own > EVERYWHERE).all() else 0.0
    return offsets * unit


def lone_lines(means: Values) -> NDArray[np.bool_]:
    """True for lines, up to three beside each other, that are farther from both sides than stripes are: they would drag their neighbours along."""
    lines, apart = _median(means), np.zeros(means.shape[1])
    for lag in (1, 2, 3):
        inner = lines[lag:-lag]
        before, after = inner - lines[: -2 * lag], inner - lines[2 * lag :]
        near = np.where(before * after > 0, np.minimum(np.abs(before), np.abs(after)), 0.0)
        apart[lag:-lag] = np.maximum(apart[lag:-lag], near)
    found: NDArray[np.bool_] = apart > LONE * np.median(np.abs(np.diff(lines)))
    return found if found.mean() <= MOST_LONE else np.zeros_like(found)


def agreement(means: Values) -> float:
    """Share of the lines that nearly all segments see off in the same direction from the two beside; 0.07 without stripes.

    The lines beside cancel a slope of the image, and an edge seldom runs along a whole line.
    """
    means = means / _unit(means)
    parts = (means[:, 1:-1] - (means[:, :-2] + means[:, 2:]) / 2).reshape(SEGMENTS, -1, means.shape[1] - 2)
    found = np.stack([_median(part) for part in parts])
    scale = _scale(parts - found[:, None])
    for _ in range(2):
        weights, sums = _weighed(parts - found[:, None], scale)
        found = found + sums / np.maximum(weights, 1e-3)
    return float(np.mean(np.abs(np.sign(found).sum(0)) >= SEGMENTS - 2))


def _unit(means: Values) -> float:
    """The standard deviation of what is finite, to the next power of two: a division by it leaves all digits."""
    finite = means[np.isfinite(means)]
    spread = float(finite.std()) if finite.size else 0.0
    return math.ldexp(1.0, math.frexp(spread)[1]) if spread > 0 else 1.0


def _median(values: Values) -> Values:
    """Median of each line, of what is finite; 0 without any."""
    values = values.reshape(-1, values.shape[-1])
    finite = np.isfinite(values)
    if finite.all():
        return np.median(values, 0)
    return np.nanmedian(np.where(finite.any(0), values, 0.0), 0)


def _scale(off: Values) -> float:
    return float(_median(np.abs(off).reshape(-1, 1))[0]) / NORMAL_MAD + TINY


def _weighed(off: Values, scale: float) -> tuple[Values, Values]:
    """Sums over each segment of the weights of Tukey's biweight, and of the weighted values."""
    off = np.where(np.isfinite(off), off, np.inf) if not np.isfinite(off).all() else off
    weights = np.square(np.clip(1 - np.square(off / (FAR * scale)), 0, None))
    return weights.sum(1), (weights * np.where(weights > 0, off, 0.0)).sum(1)


def _most_likely(differences: Sequence[tuple[int, Values, Values]], precision: float) -> Values:
    """Minimise ``sum weight * (o[j + lag] - o[j] - difference)² + precision * sum o²``."""
    from scipy.linalg import solveh_banded

    lines = differences[0][0] + len(differences[0][1])
    bands, pull = np.zeros((1 + differences[-1][0], lines)), np.zeros(lines)
    bands[0] = precision
    for lag, difference, weight in differences:
        bands[lag, :-lag] -= weight
        for part, sign in ((slice(lag, None), 1), (slice(None, -lag), -1)):
            bands[0, part] += weight
            pull[part] += sign * weight * difference
    offsets: Values = solveh_banded(bands, pull, lower=True)
    return offsets


@dataclass(frozen=True, eq=False)
class LineCorrections:
    """The offset of each line of an image, and its gain less 1 where that is wanted: two pixels, or one, along the line.

    Lines are estimated in groups at fixed places, whatever is read, so that the same numbers come out.
    """

    image: Readable  # with NaN in its holes
    lines: StripedLines
    kept: dict[tuple[int, ...], Values] = field(default_factory=dict, repr=False)  # groups that were computed

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 + self.lines.gain if i == self.lines.along else n for i, n in enumerate(self.image.shape))

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.result_type(self.image.dtype, np.float32)

    def read(self, region: Region) -> Pixels:
        across, along = self.lines.across, self.lines.along
        result = np.empty(region.shape, self.dtype)
        numbers = range(region.start[across] // GROUP, -(-region.stop[across] // GROUP))
        for place, number in itertools.product(planes_of(region, self.lines), numbers):
            group = respanned(place, {along: (0, self.shape[along]), across: (number * GROUP, (number + 1) * GROUP)})
            group = group.clip(Region.whole(self.shape))
            if group.start not in self.kept:
                if len(self.kept) >= MOST_KEPT:
                    self.kept.clear()
                self.kept[group.start] = self._computed(group)
            part = group.clip(region)
            result[part.relative_to(region).slices] = self.kept[group.start][part.relative_to(group).slices]
        return result

    def _computed(self, group: Region) -> Values:
        """The numbers of a group of one plane."""
        across, along = self.lines.across, self.lines.along
        start, stop = group.start[across], group.stop[across]
        low, high = max(0, start - MARGIN), min(self.image.shape[across], stop + MARGIN)
        means = means_along(self.image, self.lines, respanned(group, {across: (low, high)}))
        offsets = line_offsets(means)
        found = (with_gains(means, offsets) if self.lines.gain else offsets[None])[:, start - low : stop - low]
        return (found if along < across else found.T).reshape(group.shape)


def with_gains(means: Values, offsets: Values) -> Values:
    """Offsets and gains less 1: the line through the offsets of dark and of bright places, by the brightness of the lines beside."""
    from scipy.ndimage import uniform_filter1d

    plain = means - offsets
    around = uniform_filter1d(np.where(np.isfinite(plain), plain, _median(plain)), SMOOTH, 1)
    is_bright = around > np.median(around, 0)
    (dark_off, dark), (bright_off, bright) = (
        (line_offsets(np.where(chosen, plain, np.nan), finds_lone=False), _median(np.where(chosen, around, np.nan)))
        for chosen in (~is_bright, is_bright)
    )
    apart = bright - dark
    squares = apart**2 + EVEN * np.mean(apart**2)
    gains = np.divide((bright_off - dark_off) * apart, squares, where=squares > 0, out=np.zeros(len(squares)))
    middle = (dark_off + bright_off - gains * (dark + bright)) / 2
    return np.stack([offsets + middle, gains])


def planes_of(region: Region, lines: StripedLines) -> Iterator[Region]:
    """Each plane of a region, with all of its lines."""
    others = [i for i in range(len(region.start)) if i not in (lines.across, lines.along)]
    for index in itertools.product(*(range(region.start[i], region.stop[i]) for i in others)):
        yield respanned(region, {axis: (at, at + 1) for axis, at in zip(others, index, strict=True)})


def means_along(image: Readable, lines: StripedLines, place: Region, most: int = MOST) -> Values:
    """Means of pixels that follow each other along the lines of a place in one plane, spread evenly; NaN where most are not finite.

    Returns
    -------
    ndarray
        Shape (means of a line, lines); at most ``most`` means of at most 16 pixels, in runs of 128 pixels.
    """
    length = image.shape[lines.along]
    thick = max(1, min(THICK, length // LEAST_LENGTH))
    count = min(length // thick, most) // RUN
    parts = []
    for number in range(count):
        start = number * (length - RUN * thick) // max(1, count - 1)
        pixels = image.read(respanned(place, {lines.along: (start, start + RUN * thick)}))
        pixels = np.moveaxis(pixels, (lines.along, lines.across), (0, 1)).reshape(RUN, thick, -1).astype(np.float64)
        known = np.isfinite(pixels).sum(1)
        total = np.where(np.isfinite(pixels), pixels, 0.0).sum(1)
        parts.append(np.where(2 * known >= thick, total / np.maximum(known, 1), np.nan))
    means = np.concatenate(parts)
    return np.where(np.abs(means) < LARGEST, means, np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class WithoutStripes(WithGaps):
    """An image less what its lines are off by; its holes stay as they are."""

    image: Readable  # with NaN in its holes
    corrections: Readable
    lines: StripedLines

    def read(self, region: Region) -> Pixels:
        along = self.lines.along
        numbers = self.corrections.read(respanned(region, {along: (0, self.corrections.shape[along])}))
        pixels: NDArray[Any] = self.image.read(region).astype(self.dtype)
        first, *gains = np.split(numbers, numbers.shape[along], along)
        with np.errstate(invalid="ignore"):
            corrected = pixels - (first + gains[0] * pixels if gains else first)
        holes = ~np.isfinite(pixels)
        return np.where(holes, self.source.read(region).astype(self.dtype), corrected) if holes.any() else corrected
