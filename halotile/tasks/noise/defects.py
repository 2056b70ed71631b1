"""Defects of an image: pixels that the noise of their plane does not explain, or that are known, and what takes their place."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.views import PlaneValues, Viewed, axes_of_side, side_at
from halotile.tasks.holes import Holes, Valid, measured_at

# Noise levels from the median around it beyond which a pixel is an outlier, or medians of such distances around it
# where these are more; and multiple of the largest such distance of a neighbour: the neighbours of a star are bright as
# well.
OUTLYING, ALONE = 6.0, 4.0
LEAST_AROUND = 5  # pixels around the neighbours that are known, at least: as in the corner of an image
# Noise levels between an outlier and each of its neighbours, at least: it follows from the two above, less an allowance
# for float32.
STANDS_OUT = OUTLYING * (1 - 1 / ALONE) - 0.1
AROUND = np.argwhere(np.ones((5, 5))) - 2  # places of 5 x 5 pixels, from the middle one
# The neighbours of the middle one, and those around them.
INNER, OUTER = (np.abs(AROUND).max(1) == reach for reach in (1, 2))
# Pixels around one that decide on its value: those that may take its place, and those that show whether these are good.
MARGIN = 4
AT_ONCE = 1 << 14  # defects that are replaced at once, each with its neighbours
STRIP_PIXELS = 1 << 18  # pixels of a strip, which fits the cache of a core
Places = NDArray[np.intp]  # positions of pixels, one in each row


def stabilised(pixels: Array, gain: float, variance: float) -> Array:
    """The pixels where their noise has a level of 1: after the Anscombe transform for photons.

    >>> stabilised(np.array([0.0, 100.0]), 1.0, 0.0).round(2), stabilised(np.array([3.0]), 0.0, 4.0)
    (array([ 1.22, 20.04]), array([1.5]))
    """
    even: Array = pixels.astype(np.result_type(pixels.dtype, np.float32))
    kind = even.dtype.type
    even *= kind(4 / gain if gain > 0 else variance**-0.5)
    if gain > 0:
        even += kind(4 * (variance / gain**2 + 0.375))
        np.sqrt(np.maximum(even, 0, out=even), out=even)
    return even


def outliers(pixels: Array, gain: float, variance: float, valid: Valid | None = None) -> Places:
    """The row and column of each outlier of the noise, such as a hot or dead pixel or a cosmic ray.

    Noise alone has fewer than one in a million: see docs/design/035-defects.md.

    ``pixels``: rows and columns, finite where they are ``valid``, or NaN where they are not; ``gain, variance``: the noise has variance
    ``gain * z + variance`` at a pixel of mean ``z``; nothing is found where both are 0.

    >>> image = np.random.default_rng(0).standard_normal((64, 64))
    >>> image[3, 5] = 40
    >>> outliers(image, 0.0, 1.0)
    array([[3, 5]])
    """
    rows, columns = pixels.shape
    found = [np.zeros((0, 2), np.intp)]
    height = max(1, STRIP_PIXELS // columns)
    for top in range(0, rows if max(gain, variance) > 0 else 0, height):
        strip = slice(top, top + height)
        with np.errstate(over="ignore"):
            inner = stabilised(pixels[strip], gain, variance)
        if valid is not None:
            inner[~valid[strip]] = np.nan
        even = np.full((len(inner) + 2, columns + 2), np.nan, inner.dtype)
        even[1:-1, 1:-1] = inner
        row, column = np.divmod(_standing_out(even.ravel(), columns + 2), columns + 2)
        at = np.stack([row + top - 1, column - 1], 1)
        found.append(at[_is_outlier(_around(pixels, at, valid), gain, variance)])
    return np.concatenate(found)


def _standing_out(even: Array, width: int) -> Places:
    """Pixels that are higher or lower than all their neighbours, or these are not known; the image is in one line, in lines of that width."""
    is_near = np.abs(even[1:] - even[:-1]) <= STANDS_OUT
    at = np.flatnonzero(~(is_near[1:] | is_near[:-1])) + 1
    at = at[np.isfinite(even[at])]
    beyond = even[at][:, None] - even[at[:, None] + AROUND[INNER] @ (width, 1)]
    found: Places = at[~(beyond <= STANDS_OUT).any(1) | ~(beyond >= -STANDS_OUT).any(1)]
    return found


def _is_outlier(around: Array, gain: float, variance: float) -> Valid:
    """True where the middle of 5 x 5 pixels is an outlier."""
    even, middle = stabilised(around, gain, variance), len(AROUND) // 2
    median = np.add(*_middles(even[:, OUTER]))[:, None] / 2
    away, beside = even[:, [middle]] - median, even[:, INNER] - median
    spread = _middles(np.abs(even[:, OUTER] - median))[0]  # larger in texture than in noise
    least = np.maximum(OUTLYING * np.fmax(spread, 1), ALONE * np.nan_to_num(beside * np.sign(away)).max(-1, initial=0))
    # Few photons are skewed, and the transform overrates what is missing.
    usual = _middles(around[:, OUTER])[0]
    below = (usual - around[:, middle]) / np.sqrt(np.maximum(gain * usual + variance, gain**2))
    is_known = np.isfinite(around[:, OUTER]).sum(-1) >= LEAST_AROUND
    is_outlier: Valid = is_known & (np.abs(away[:, 0]) > least) & ((away[:, 0] > 0) | (below > OUTLYING))
    return is_outlier


def _around(pixels: Array, at: Places, known: Valid | None = None) -> Array:
    """The 5 x 5 pixels around each place, on the last axis; NaN beyond the edge, and where they are not known."""
    places = at[:, None] + AROUND
    rows, columns = np.moveaxis(places.clip(0, np.array(pixels.shape) - 1), -1, 0)
    is_known = ((places >= 0) & (places < pixels.shape)).all(-1)
    if known is not None:
        is_known &= known[rows, columns]
    around: Array = np.where(is_known, pixels[rows, columns].astype(np.float64), np.nan)
    return around


def _middles(pixels: Array) -> tuple[Array, Array]:
    """The two in the middle of the known pixels, on the last axis; NaN where none is."""
    ordered, count = np.sort(pixels, -1), np.isfinite(pixels).sum(-1)
    low, high = (np.take_along_axis(ordered, at[:, None], -1)[:, 0] for at in ((count - 1) // 2, count // 2))
    return low, high


def replacements(pixels: Array, at: Places, valid: Valid) -> tuple[Array, Valid]:
    """The median of the good neighbours of each defect, or else of the good pixels around these; and True where there are some.

    It is the lower of two, so a value of the image.
    """
    good = valid.copy()
    good[tuple(at.T)] = False
    found = np.full(len(at), np.nan)
    for first in range(0, len(at), AT_ONCE):
        around = _around(pixels, at[first : first + AT_ONCE], good)
        near, far = _middles(around[:, INNER])[0], _middles(around)[0]
        found[first : first + AT_ONCE] = np.where(np.isnan(near), far, near)
    is_good = np.isfinite(found)
    return np.where(is_good, found, pixels[tuple(at.T)]), is_good


@dataclass(frozen=True, eq=False)
class Defects:
    """The pixels of an image that are replaced before anything is computed."""

    noise: tuple[PlaneValues, PlaneValues] | None = None  # gain and variance of each plane, whose outliers are replaced
    places: Places | None = None  # further ones, on all axes; -1 for all along an axis
    given: Readable | None = None  # not 0 where a pixel is one: with all axes, the spatial ones, or rows and columns
    are_kept: bool = False  # true if the output has their own values


def axes_of_given(given: Readable, spatial: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """The axes of an image of defects: all, the spatial ones, or rows and columns, counted from the last one."""
    return axes_of_side(given, spatial[-len(given.shape) :], dims)


@dataclass(frozen=True, slots=True)
class Repaired(Viewed):
    """The image of a task with other values in the place of its defects, whatever part of it is read."""

    spatial: tuple[int, ...]
    holes: Holes | None
    mask: Readable | None
    defects: Defects
    # Places and values of the defects in what was read, for each plane that has any.
    found: list[tuple[Places, Array]] = field(default_factory=list, compare=False)

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``; its defects are entered in `found`."""
        plane, dims = self.spatial[-2:], len(self.shape)
        margin = tuple((MARGIN * (axis in plane),) * 2 for axis in range(dims))
        window = region.grow(margin).clip(Region.whole(self.shape))
        stored: Array = self.source.read(window)
        # Without holes, NaN is a value: one that is listed as a defect is replaced.
        present = stored if self.holes else np.nan_to_num(stored)
        replaceable = measured_at(self.holes, self.mask, self.spatial, window, present)
        pixels, valid, bad = stored.copy(), replaceable & np.isfinite(stored), self._known(window)
        noise = [np.broadcast_to(part.read(window), window.shape) for part in self.defects.noise or ()]
        moved = [np.moveaxis(part, plane, (-2, -1)) for part in (pixels, valid, replaceable, bad, *noise)]
        for place in np.ndindex(moved[0].shape[:-2]):
            one, known, possible, marked, *numbers = (part[place] for part in moved)
            if numbers:
                gain, variance = (float(number[0, 0]) for number in numbers)
                marked[tuple(outliers(one, gain, variance, None if known.all() else known).T)] = True
            marked &= possible
            at = np.argwhere(marked)
            one[tuple(at.T)], is_good = replacements(one, at, known)
            marked[tuple(at[~is_good].T)] = False
            # Pixels beside the region may have good ones that are not read.
            lost = at[~is_good] + [window.start[axis] for axis in plane]
            ends = np.array([(region.start[axis], region.stop[axis]) for axis in plane]).T
            lost = lost[((lost >= ends[0]) & (lost < ends[1])).all(1)]
            if self.defects.given is not None and len(lost):
                row, column = lost[0]
                raise InputError(
                    f"input.defects marks row {row}, column {column} and every measured pixel within 2 of it, so none can take its place. "
                    "Write a mask that is 0 there, input.sides.mask."
                )
        inner = region.relative_to(window).slices
        self.found.append((np.argwhere(bad[inner]) + np.array(region.start), stored[inner][bad[inner]]))
        return pixels[inner]

    def _known(self, window: Region) -> Valid:
        """True where a pixel is known to be a defect."""
        bad, defects, dims = np.zeros(window.shape, bool), self.defects, len(window.start)
        for place in [] if defects.places is None else defects.places.tolist():
            spans = [*zip(place, window.start, window.stop, strict=True)]
            if all(index < 0 or start <= index < stop for index, start, stop in spans):
                bad[tuple(slice(None) if index < 0 else index - start for index, start, _ in spans)] = True
        if (given := defects.given) is not None:
            bad |= side_at(given, axes_of_given(given, self.spatial, dims), window) != 0
        return bad

    def defects_of(self, region: Region) -> tuple[Places, Array]:
        """The places of the defects of a region that was read, from its start, and their values."""
        at, values = (np.concatenate(parts) for parts in zip(*self.found, strict=True))
        inside = ((at >= region.start) & (at < region.stop)).all(1)
        places: Places = at[inside] - np.array(region.start)
        return places, values[inside]
