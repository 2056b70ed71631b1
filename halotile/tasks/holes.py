"""Holes of an image: pixels without a measurement, which must neither be denoised nor reach those that were measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.storage.views import axes_of_side, side_at
from halotile.tasks.devices.device import all_finite

# Farthest pixel from which a hole is filled in each of two sweeps, by number of tiled axes.
SWEEP = {1: 64, 2: 16, 3: 4}

# Pixels of a strip that is filled at once, where that is longer than the reach; 40 bytes for each, and for those
# around.
STRIP_PIXELS = 1 << 20
Valid = NDArray[np.bool_]  # true where a pixel was measured


@dataclass(frozen=True)
class Holes:
    """Values that stand for a hole."""

    value: float | None  # a value besides NaN and infinity; None if there is none
    # Mean of the measured pixels: it fills what is deep inside a hole, for a denoiser that needs a value everywhere.
    mean: float
    share: float = 0.0  # share of the pixels that are holes, by samples
    nan: bool = True  # true if NaN or infinity stands for a hole

    @property
    def are_likely(self) -> bool:
        """True if the file names a value or a sample held a hole."""
        return self.value is not None or self.share > 0

    def valid(self, pixels: NDArray[Any]) -> Valid | None:
        """The pixels that were measured; None where all are.

        >>> Holes(-9999.0, 0.0).valid(np.array([1, -9999], "int16"))
        array([ True, False])
        """
        valid: Valid | None = None
        if self.value is not None:
            valid = pixels != pixels.dtype.type(self.value)
        if self.nan and pixels.dtype.kind == "f" and not all_finite(pixels):
            measured = np.isfinite(pixels)
            valid = measured if valid is None else valid & measured
        return None if valid is None or valid.all() else valid


def measured_at(
    holes: Holes | None, mask: Readable | None, spatial: Sequence[int], region: Region, pixels: NDArray[Any]
) -> Valid:
    """The pixels of a region that are finite, no holes, and that no mask keeps as they are."""
    valid = holes.valid(pixels) if holes else None
    kept: Valid = np.isfinite(pixels)
    if mask is not None:
        kept = kept & (side_at(mask, axes_of_side(mask, spatial, len(region.start)), region) != 0)
    return kept if valid is None else kept & valid


def fill_reach(dims: int) -> int:
    """Distance of the farthest pixel along an axis that :func:`fill_from_nearest` takes a value from."""
    return 2 * SWEEP[dims]


def fill_from_nearest(pixels: NDArray[Any], valid: Valid, dims: int, mean: float) -> NDArray[Any]:
    """A copy with each hole filled from the nearest measured pixel along an axis, in a second sweep from what was filled in the first.

    A filled value depends on the pixels within :func:`fill_reach` alone, so it is the same whatever part of an image is read.

    ``pixels``: spatial axes are the last ones; ``valid``: true where a pixel was measured, shaped like `pixels`; ``dims``: number of spatial axes;
    ``mean``: value beyond that reach.

    >>> row = np.array([[1.0, np.nan, np.nan, 4.0]])
    >>> fill_from_nearest(row, ~np.isnan(row), 1, 0.0)
    array([[1., 1., 4., 4.]])
    """
    filled, first = pixels.copy(), pixels.ndim - dims
    rows = max(fill_reach(dims), STRIP_PIXELS * pixels.shape[first] // max(1, pixels.size))
    before: tuple[slice, ...] = (slice(None),) * first
    for start in range(0, pixels.shape[first], rows):
        top = max(0, start - fill_reach(dims))
        strip = (*before, slice(start, start + rows))
        near = (*before, slice(top, start + rows + fill_reach(dims)))
        if not valid[strip].all():
            inner = (*before, slice(start - top, start - top + rows))
            filled[strip] = _filled(pixels[near], valid[near], dims, mean)[inner]
    return filled


def _filled(pixels: NDArray[Any], known: Valid, dims: int, mean: float) -> NDArray[Any]:
    for _ in range(2):
        pixels, known = _swept(pixels, known, dims)
    pixels[~known] = mean if pixels.dtype.kind == "f" else round(mean)
    return pixels


def _swept(pixels: NDArray[Any], known: Valid, dims: int) -> tuple[NDArray[Any], Valid]:
    """The pixels with unknown ones filled from the nearest known one along an axis; those that are known then."""
    result = pixels.copy()
    distance = np.where(known, 0, SWEEP[dims] + 1)
    for axis in range(pixels.ndim - dims, pixels.ndim):
        length = pixels.shape[axis]
        place = np.arange(length).reshape(-1, *[1] * (pixels.ndim - 1 - axis))
        before = np.maximum.accumulate(np.where(known, place, -1), axis)
        after = np.flip(np.minimum.accumulate(np.flip(np.where(known, place, length), axis), axis), axis)
        for nearest, is_there in ((before, before >= 0), (after, after < length)):
            away = np.where(is_there, np.abs(nearest - place), SWEEP[dims] + 1)
            closer = away < distance
            values = np.take_along_axis(pixels, nearest.clip(0, length - 1), axis)
            result[closer], distance[closer] = values[closer], away[closer]
    return result, distance <= SWEEP[dims]


def describe_value(value: float | None, dtype: np.dtype[Any]) -> str:
    """The values that stand for a hole, in words.

    >>> describe_value(-9999.0, np.dtype("float32")), describe_value(None, np.dtype("float32"))
    ('-9999, NaN or infinity', 'NaN or infinity')
    """
    names = [] if value is None or math.isnan(value) else [f"{value:.10g}"]
    return ", ".join([*names, *["NaN or infinity"] * (dtype.kind == "f")])
