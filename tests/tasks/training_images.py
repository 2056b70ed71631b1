"""Images in memory that trainings draw patches from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.tasks.training.patches import PatchSource, TrainingImage


@dataclass
class Image:
    """Pixels in memory, with a count of those that were read."""

    pixels: NDArray[Any]
    read_pixels: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return self.pixels.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a pixel."""
        return self.pixels.dtype

    def read(self, region: Region) -> NDArray[Any]:
        """The pixels of a region."""
        self.read_pixels += region.size
        return self.pixels[region.slices]


def source_of(pixels: NDArray[Any], patch: int = 16, **options: Any) -> PatchSource:
    return PatchSource((TrainingImage(Image(pixels), (pixels.ndim - 2, pixels.ndim - 1), **options),), patch)


def numbered(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An image in which every pixel has another value."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
