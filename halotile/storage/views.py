"""Readable arrays that present another array, or a constant, in a different shape without copying pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
class WithMask:
    """An array with NaN where a mask is 0, which has some of its axes or all; of floats, whatever it is stored as."""

    source: Readable
    mask: Readable
    axes: tuple[int, ...]
    """Axes of the mask, counted from the last one of the array: negative."""

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
        place = Region(
            tuple(region.start[axis] for axis in self.axes), tuple(region.stop[axis] for axis in self.axes)
        )
        others = tuple(axis for axis in range(-pixels.ndim, 0) if axis not in self.axes)
        kept = np.expand_dims(self.mask.read(place) != 0, others)
        return np.where(kept, pixels, np.nan).astype(self.dtype, copy=False)


def measured(
    source: Readable, value: float | None, mask: Readable | None, spatial: Sequence[int], dims: int
) -> Readable:
    """An array with NaN where it has the value of a hole, or where a mask is 0.

    Parameters
    ----------
    source : Readable
        The array; of an axis that it lacks, the first, it has one pixel.
    value : float, optional
        The value of a hole.
    mask : Readable, optional
        The mask, with all axes or the spatial ones.
    spatial : sequence of int
        Positions of the spatial axes, out of ``dims``.
    """
    view = source if value is None else WithoutValue(source, value)
    if mask is None:
        return view
    axes = tuple(range(-dims, 0)) if len(mask.shape) == dims else tuple(axis - dims for axis in spatial)
    return WithMask(view, mask, axes) if len(axes) <= len(source.shape) else view


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
