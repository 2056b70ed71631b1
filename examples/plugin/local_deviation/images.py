"""The images of the job, each computed region by region from another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import correlate1d

from halotile.storage.grid import Region
from halotile.storage.rim import Readable


@dataclass(frozen=True, eq=False)
class Squares:
    """``x²``, in double precision."""

    image: Readable

    dtype = np.dtype("float64")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return self.image.shape

    def read(self, region: Region) -> NDArray[Any]:
        """Return the pixels of a region."""
        return np.square(self.image.read(region).astype(np.float64))


@dataclass(frozen=True, eq=False)
class Deviation:
    """``sqrt(mean(x²) - mean(x)²)`` over the square around each pixel; outside, the image is mirrored."""

    image: Readable
    squares: Readable
    radius: int

    dtype = np.dtype("float32")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return self.image.shape

    def read(self, region: Region) -> NDArray[Any]:
        """Return the pixels of a region."""
        window = region.grow(((self.radius, self.radius),) * 2).clip(Region.whole(self.shape))
        mean, mean_of_squares = (
            _mean(each.read(window).astype(np.float64), self.radius) for each in (self.image, self.squares)
        )
        deviation: NDArray[Any] = np.sqrt(np.maximum(mean_of_squares - mean**2, 0.0))
        return deviation[region.relative_to(window).slices].astype(np.float32)


def _mean(pixels: NDArray[Any], radius: int) -> NDArray[Any]:
    """The mean over squares, each added for itself: a running sum, as of ``uniform_filter``, has bits that depend on where it begins."""
    ones = np.ones(2 * radius + 1)
    for axis in range(2):
        pixels = correlate1d(pixels, ones, axis)
    return pixels / ones.size**2


@dataclass(frozen=True, eq=False)
class Halved:
    """Every second pixel along both axes."""

    image: Readable

    dtype = np.dtype("float32")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return tuple(-(-n // 2) for n in self.image.shape)

    def read(self, region: Region) -> NDArray[Any]:
        """Return the pixels of a region."""
        wide = region.scale((2, 2)).clip(Region.whole(self.image.shape))
        pixels: NDArray[Any] = self.image.read(wide)[::2, ::2]
        return pixels.astype(np.float32)
