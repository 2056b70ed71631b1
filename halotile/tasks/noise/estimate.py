"""The noise level of a square of pixels, and of each plane of an image, estimated from a fixed set of samples spread over it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Readable
from halotile.storage.views import chunks_of
from halotile.tasks.inner_tiles import respanned, spanned
from halotile.tasks.noise import quiet_windows
from halotile.tasks.noise.quiet_windows import (
    Fit,
    Values,
    crowded,
    finite_values,
    fit_noise,
    saturated_ends,
    windows_of,
)

Range = tuple[float, float]
NORMAL = NormalDist()
NORMAL_MAD = 0.6744897501960817  # median of |z| for a standard normal z
TIED = 0.01  # fraction of values that equal their median above which they are those of a rounded image
COARSE_STEPS = 3  # steps up to which the rounding of a median counts: further up it is at most an eighth off
# Noise levels between saturated pixels and the mean of their 2 x 2, up to which their noise was cut off: a black or
# white pixel is farther from its neighbours.
NEAR = 2.5
FAR = 9.0  # standard deviations beyond which nothing is cut off


class SquareLevel(NamedTuple):
    """The noise level of a square of pixels."""

    level: float  # NaN without any details; 0 where most of them are
    details: int
    is_coarse: bool  # true where there is no noise, or of a few steps of a rounded image alone


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
    """The median of values, and True if it was that of coarsely rounded ones: it is then within the step that they were rounded to.

    Where more than one in a hundred values equals the median, and it is one of the least values, these are taken as spread evenly
    over their step: the details of small integers would else have one of few levels. A median of 0 stays 0.

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


LEAST_SHARE, LEAST_COUNT = 1e-4, 8  # share of the pixels that have the value, and their number, at least


class FarValue(NamedTuple):
    """The least or largest value of an image, farther from the others than these are from each other."""

    value: float
    number: int
    low: float
    high: float  # range of the others


class Ends(NamedTuple):
    """The least two and largest two finite values in parts of an image."""

    counts: Counter[float]  # number of pixels of each; of the least and largest of all parts it is that in all parts
    pixels: int

    @classmethod
    def from_values(cls, values: NDArray[Any]) -> Self:
        """The ends of the finite values of a part."""
        counts: Counter[float] = Counter()
        for end_of in (np.min, np.max):
            rest = values.ravel()
            for _ in range(2):
                if rest.size:
                    end, size = end_of(rest), rest.size
                    rest = rest[rest != end]
                    counts[float(end)] = size - rest.size
        return cls(counts, values.size)

    def joined(self, other: Ends) -> Ends:
        """The ends of both parts together."""
        return Ends(self.counts + other.counts, self.pixels + other.pixels)

    def far_value(self) -> FarValue | None:
        """The value apart from the others, if there is one.

        >>> import numpy as np
        >>> Ends.from_values(np.array([-9999.0] * 10 + [12.0, 13.0, 500.0])).far_value()
        FarValue(value=-9999.0, number=10, low=12.0, high=500.0)
        """
        values = sorted(self.counts)
        for end, others in ((values[:1], values[1:]), (values[-1:], values[:-1])):
            if len(others) < 2 or self.counts[end[0]] < max(LEAST_COUNT, LEAST_SHARE * self.pixels):
                continue
            if min(abs(end[0] - other) for other in others) > others[-1] - others[0]:
                return FarValue(end[0], self.counts[end[0]], others[0], others[-1])
        return None


NO_ENDS = Ends(Counter(), 0)


# Squares of a plane: at most, at least, and of all planes together as far as the least permits.
SAMPLES, LEAST_SAMPLES, ALL_SAMPLES = 64, 4, 4096
AT_ONCE_BYTES = 2**28  # most bytes of samples in memory
EDGE = 256  # edge of a square in pixels
SATURATED_PLANES = 16  # planes that are looked at for values at which pixels are saturated
LEAST_DETAILS = 100  # details that are left of a square in which most pixels are saturated, at least


def estimate_noise_levels(source: Readable, spatial: Sequence[int], looped: Sequence[int] = ()) -> NDArray[np.float64]:
    """Estimate the standard deviation of white noise in every plane: ``median |d| / 0.6745``, d the Haar diagonal details.

    The level of each sample square is estimated by itself; the median of these is that of the plane,
    so that a few busy or empty places do not bias it. Squares without any variation (a mosaic's
    background) do not count, nor do pixels that are not finite or saturated; where noise was cut off at these, the level is the one
    before. The places are the same every time.

    ``source``: image; ``spatial``: positions of the spatial axes; squares span the last two of them; ``looped``: positions of the axes of which
    each index is a plane by itself. Samples are spread over all other axes.

    Returns
    -------
    ndarray
        One number for each index of the looped axes, in the units of the stored pixels; 0 for a plane without noise.

    References
    ----------
    D. L. Donoho, I. M. Johnstone, Ideal spatial adaptation by wavelet shrinkage, Biometrika 81
    (1994) 425-455.
    """
    levels = np.full(tuple(source.shape[axis] for axis in looped), math.nan)
    for place, squares in sampled_planes(source, spatial, looped):
        levels[place] = plane_level(squares)
    if not (levels > 0).any():
        why = "in most places of every sample, 2 x 2 pixels have no diagonal difference, as in a flat image or a ramp"
        if np.isnan(levels).all():
            why = "no 2 x 2 pixels are finite wherever it was sampled"
        stored = getattr(source, "source", source)  # of integers with holes a view has floats
        end = "; or, where the values are classes or labels, do not denoise it: gaussian and median would mix classes"
        raise InputError(
            f"sigma is auto, but no noise could be estimated in {getattr(stored, 'path', 'the image')}: {why}. "
            f"Write the level in the units of the file: noise: {{model: gaussian, read_sigma: ...}}{end if np.dtype(stored.dtype).kind in 'iub' else ''}."
        )
    known: NDArray[np.float64] = np.nan_to_num(levels)
    return known


def sampled_planes(
    source: Readable,
    spatial: Sequence[int],
    looped: Sequence[int] = (),
    most: int | None = None,
    *,
    apart: Sequence[int] = (),
    skips: bool = False,
    squares: int = SAMPLES,
) -> Iterator[tuple[tuple[int, ...], list[NDArray[np.float64]]]]:
    """Yield the place of each plane on the looped axes, with the squares that are sampled of it; NaN where they are not finite.

    Of more planes than ``most``, as many are taken, spread evenly: at each index of the looped axes numbered ``apart``. Planes that cannot be read
    raise, unless ``skips`` is True. ``squares``: the most that are read of a plane.
    """
    square = tuple(spatial[-2:])
    if len(square) < 2 or min(source.shape[axis] for axis in square) < 2:
        raise InputError(
            f"{getattr(source, 'path', 'an image')} of shape {source.shape} has no 2 x 2 pixels to estimate noise from. "
            "Write the level in the units of the file: noise: {model: gaussian, read_sigma: ...} (job: denoise)."
        )
    lengths = tuple(source.shape[axis] for axis in looped)
    samples = max(LEAST_SAMPLES, min(SAMPLES, ALL_SAMPLES // max(1, math.prod(lengths))))
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in np.ndindex(lengths):
        groups.setdefault(tuple(place[n] for n in apart), []).append(place)
    wanted = {each for group in groups.values() for each in spread_evenly(group, most or len(group))}
    regions = plane_regions(source.shape, square, dict.fromkeys(looped, 0), samples)
    regions = regions[:: -(-len(regions) // squares)]
    plane_bytes = sum(region.size for region in regions) * source.dtype.itemsize
    for planes in planes_at_once(source, looped, AT_ONCE_BYTES // plane_bytes):
        places = [place for place in np.ndindex(planes.shape) if tuple(np.add(planes.start, place).tolist()) in wanted]
        if not places:
            continue
        spans = dict(zip(looped, zip(planes.start, planes.stop, strict=True), strict=True))
        try:
            read = [source.read(respanned(region, spans)) for region in regions]
        except InputError:
            if not skips:
                raise
            continue
        moved = [np.moveaxis(pixels, (*looped, *square), (*range(len(looped)), -2, -1)) for pixels in read]
        for place in places:
            yield tuple(np.add(planes.start, place).tolist()), [as_square(pixels[place], (-2, -1)) for pixels in moved]


T = TypeVar("T")


def spread_evenly(things: Sequence[T], count: int) -> list[T]:
    """So many of some things, spread evenly from the first; some twice where there are fewer."""
    return [things[number * len(things) // count] for number in range(count)]


def planes_at_once(source: Readable, looped: Sequence[int], most: int) -> list[Region]:
    """Ranges of at most so many planes in the same chunks, which are decoded once for all of them."""
    lengths = tuple(source.shape[axis] for axis in looped)
    chunks = chunks_of(source)
    edges = [min(n, chunks[axis]) for axis, n in zip(looped, lengths, strict=True)]
    while max(edges, default=1) > 1 and math.prod(edges) > most:
        axis = edges.index(max(edges))
        edges[axis] = -(-edges[axis] // 2)
    return [block.core for block in Grid(lengths, tuple(edges), ((0, 0),) * len(edges))]


def plane_regions(shape: tuple[int, ...], square: tuple[int, ...], at: Mapping[int, int], samples: int) -> list[Region]:
    """Squares of one plane, at these places on the other axes; at the places that they have in an image of this plane alone."""
    inside = [axis for axis in range(len(shape)) if axis not in at]
    fixed = {axis: (index, index + 1) for axis, index in at.items()}
    found = sample_regions(tuple(shape[axis] for axis in inside), samples, tuple(map(inside.index, square)))
    spans = [dict(zip(inside, zip(region.start, region.stop, strict=True), strict=True)) | fixed for region in found]
    return [spanned(each[axis] for axis in range(len(shape))) for each in spans]


def as_square(pixels: NDArray[Any], axes: tuple[int, ...]) -> NDArray[np.float64]:
    """A sample as rows and columns, with infinity as NaN."""
    moved = np.moveaxis(pixels, axes, (-2, -1))
    square: NDArray[np.float64] = moved.astype(np.float64).reshape(moved.shape[-2:])
    square[~np.isfinite(square)] = math.nan
    return square


class PlaneLevel(NamedTuple):
    """The noise level of a plane, and where its noise was cut off so much that it is likely too low."""

    level: float  # NaN if nothing in the plane is finite, 0 if nothing varies
    saturated: Range = (math.nan, math.nan)  # values at which it was cut off
    share: float = 0.0  # share of the pixels that have them


def plane_level(squares: Sequence[Values]) -> float:
    """Noise level of a plane; NaN if nothing in it is finite, 0 if nothing in it varies."""
    return measure_plane(squares).level


def measure_plane(squares: Sequence[Values], fit: Fit | None = None) -> PlaneLevel:
    """Measure the noise of a plane; ``fit``: that of its windows, if all are whole.

    Saturated pixels are left out: in squares with less than half of them; where there are none, in those that have enough others. Else all count.
    """
    saturated = saturated_ends(squares)
    fit = fit or fit_noise(windows_of(squares, whole=True))
    if fit and (fit.share > quiet_windows.ENOUGH_ARE_WHOLE or np.isnan(saturated).all()):
        return PlaneLevel(fit.level)
    shares = [np.isin(square, saturated).sum() / max(np.isfinite(square).sum(), 1) for square in squares]
    found = [square_level(square, saturated) for square in squares]
    if level := _median([each for each, share in zip(found, shares, strict=True) if share < 0.5]):
        return PlaneLevel(level)
    rest = [each for each in found if each.details >= LEAST_DETAILS]
    if _shows_noise(rest) and (level := _median(rest)):
        return PlaneLevel(level)
    whole = [square_level(square) for square in squares]
    level = _median(whole)
    if 0 < level < _median(found) and _shows_noise(found):
        return PlaneLevel(level, saturated, float(np.isin(finite_values(squares), saturated).mean()))
    return PlaneLevel(math.nan if not any(each.details for each in whole) else level)


class ImageValues(NamedTuple):
    """The values of an image by samples of its planes."""

    saturated: tuple[float, ...]  # those at which pixels are saturated
    far: FarValue | None  # one far from all others
    low: float
    high: float  # range of the finite ones; from infinity down to its negative where there are none
    size: float  # mean of their absolute values


UNKNOWN = ImageValues((), None, math.inf, -math.inf, 0.0)  # values of an image that was not looked at


def image_values(source: Readable, spatial: Sequence[int], looped: Sequence[int]) -> ImageValues:
    """Look at samples of the planes of an image, spread evenly where there are many."""
    saturated, ends, total = set[float](), NO_ENDS, 0.0
    for _, squares in sampled_planes(source, spatial, looped, SATURATED_PLANES):
        saturated.update(end for end, _ in crowded(squares))
        values = finite_values(squares)
        ends = ends.joined(Ends.from_values(values))
        total += float(np.abs(values).sum())
    low, high = min(ends.counts, default=math.inf), max(ends.counts, default=-math.inf)
    return ImageValues(tuple(sorted(saturated)), ends.far_value(), low, high, total / max(ends.pixels, 1))


def _median(found: Sequence[SquareLevel]) -> float:
    """The median of the levels above 0; 0 without any."""
    levels = [each.level for each in found if each.level > 0]
    return float(np.median(levels)) if levels else 0.0


def _shows_noise(found: Sequence[SquareLevel]) -> bool:
    """True where most squares have noise that is finer than steps such as those of few counts, of which many are 0 without being cut off."""
    return 2 * sum(each.is_coarse for each in found) < len(found)


def sample_regions(shape: tuple[int, ...], samples: int, square: tuple[int, ...], edge: int = EDGE) -> list[Region]:
    """Squares on two axes, spread evenly over an image by a low-discrepancy sequence.

    >>> sample_regions((40, 50), 64, (0, 1))
    [Region(start=(0, 0), stop=(40, 50))]
    """
    size = tuple(min(edge, n) if axis in square else 1 for axis, n in enumerate(shape))
    room = math.prod(-(-n // s) for n, s in zip(shape, size, strict=True))
    regions = {}
    for number in range(min(samples, room)):
        at = _spread(number, len(shape))
        start = tuple(round(f * (n - s)) for f, n, s in zip(at, shape, size, strict=True))
        regions[start] = Region(start, tuple(a + s for a, s in zip(start, size, strict=True)))
    return list(regions.values())


def _spread(number: int, axes: int) -> tuple[float, ...]:
    """Point ``number`` of a sequence that fills the unit cube evenly (Roberts' R sequence)."""
    ratio = 2.0
    for _ in range(40):
        ratio = (1 + ratio) ** (1 / (axes + 1))
    return tuple((0.5 + number * ratio ** -(axis + 1)) % 1 for axis in range(axes))
