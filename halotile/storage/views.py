"""Readable arrays that present another array, or a constant, in a different shape without copying pixels."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import DamagedData, InputUnreadable
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable


def readable_parts(source: Readable, regions: Iterable[Region]) -> list[tuple[Region, Pixels]]:
    """Read regions, without those that cannot be read: a run names the blocks that they belong to."""
    parts = []
    for region in regions:
        with suppress(DamagedData, InputUnreadable):
            parts.append((region, source.read(region)))
    return parts


def chunks_of(view: Readable) -> tuple[int, ...]:
    """Edges of the chunks of the array that a view reads; of single pixels where it has none."""
    stored: Any = view
    while not hasattr(stored, "chunks") and hasattr(stored, "source"):
        stored = stored.source
    chunks = tuple(getattr(stored, "chunks", None) or ())
    return chunks if len(chunks) == len(view.shape) else (1,) * len(view.shape)


@dataclass(frozen=True, slots=True)
class ChannelAxis:
    """An array without channels, viewed with a channel axis of length 1: shape (1, *shape)."""

    source: Readable

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return (1, *self.source.shape)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of one pixel."""
        return self.source.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        return self.source.read(Region(region.start[1:], region.stop[1:]))[None]


@dataclass(frozen=True, slots=True)
class WithoutValue:
    """An array with NaN where it has a value that stands for no measurement; of floats, whatever it is stored as."""

    source: Readable
    value: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of one pixel: wide enough for every value of the stored type."""
        return np.result_type(self.source.dtype, np.float32)

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        pixels = self.source.read(region)
        return np.where(pixels == pixels.dtype.type(self.value), np.nan, pixels).astype(
            self.dtype, copy=False
        )


@dataclass(frozen=True, slots=True)
class Constant:
    """An array with the same value everywhere, which takes no memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    value: float = 0.0

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        return np.full(region.shape, self.value, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class PlaneValues:
    """One number for each plane of an image: an array of length 1 on the axes that the planes lie on."""

    values: NDArray[np.generic]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of planes along each axis, 1 within the planes."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of one number."""
        return self.values.dtype

    def read(self, region: Region) -> Pixels:
        """The numbers of the planes in ``region`` of the image."""
        index = tuple(
            slice(None) if n == 1 else part for n, part in zip(self.shape, region.slices, strict=True)
        )
        return self.values[index]
