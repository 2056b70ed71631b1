"""Readable arrays that present another array, or a constant, in a different shape without copying pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import DamagedData, InputError, InputUnreadable
from halotile.storage.grid import Region, align_outward
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
class Viewed:
    """An array of the shape and type of another one."""

    source: Readable

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return self.source.dtype


REMEMBERED_BYTES = 2**26  # the most that is kept of an array that is read in samples


@dataclass(frozen=True, eq=False)
class Remembered(Viewed):
    """An array to be read in samples: chunks that a second one needs are kept as they were decoded. A pickle is the array alone."""

    kept: dict[Region, Pixels] = field(default_factory=dict)
    seen: set[Region] = field(default_factory=set)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.source,)

    def read(self, region: Region) -> Pixels:
        chunks = align_outward(region, chunks_of(self.source), self.shape)
        is_first = chunks not in self.seen
        self.seen.add(chunks)
        if is_first or 2 * region.size > chunks.size or chunks.size * self.dtype.itemsize > REMEMBERED_BYTES:
            return self.source.read(region)
        if (pixels := self.kept.pop(chunks, None)) is None:
            pixels = self.source.read(chunks)
        self.kept[chunks] = pixels  # the last to be discarded
        while sum(each.nbytes for each in self.kept.values()) > REMEMBERED_BYTES:
            del self.kept[next(iter(self.kept))]
        return pixels[region.relative_to(chunks).slices].copy()


def _itself(source: Readable) -> Readable:
    return source


@dataclass(frozen=True, slots=True)
class ChannelAxis(Viewed):
    """An array without channels, viewed with a channel axis of length 1: shape (1, *shape)."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.source.shape)

    def read(self, region: Region) -> Pixels:
        return self.source.read(Region(region.start[1:], region.stop[1:]))[None]


def checked(source: Readable, name: str, *, are_counts: bool = False) -> Readable:
    """The array, refused where it is read with the value that its file names for no measurement; counts also with a number below 0, or none."""
    hole = getattr(source, "nodata", None)
    hole = None if hole is None or np.isnan(hole) else hole
    return source if hole is None and not are_counts else Checked(source, name, hole, are_counts)


@dataclass(frozen=True, slots=True)
class Checked(Viewed):
    """An array that is refused where it is read with a hole, or with what is no count."""

    name: str
    hole: float | None
    are_counts: bool

    def read(self, region: Region) -> Pixels:
        pixels: NDArray[Any] = np.asarray(self.source.read(region))
        if self.hole is not None and np.any(pixels == self.hole):
            raise InputError(
                f"{self.name} has pixels of {self.hole:.10g}, which its file names for no measurement: they would spoil the image around them. "
                "Write a copy that names no such value, with 0 in these pixels, and a mask after the operator: "
                "{name: composition, operators: [..., {name: mask, mask: measured.zarr}]}, where measured.zarr is 0 in these pixels and 1 elsewhere."
            )
        if self.are_counts and not np.all(pixels >= 0):
            raise InputError(
                f"{self.name} has pixels below 0, or that are no numbers: counts have none. Subtract no background from the data, "
                "write it as fidelity.background; or write a fidelity that is not for counts, such as l2."
            )
        return pixels


@dataclass(frozen=True, slots=True)
class WithGaps(Viewed):
    """An array with NaN in some pixels; of floats, whatever it is stored as."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of one pixel: wide enough for every value of the stored type."""
        return np.result_type(self.source.dtype, np.float32)


@dataclass(frozen=True, slots=True)
class WithoutValue(WithGaps):
    """An array with NaN where it has a value that stands for no measurement."""

    value: float

    def read(self, region: Region) -> Pixels:
        pixels = self.source.read(region)
        holes = pixels == pixels.dtype.type(self.value)
        return np.where(holes, np.nan, pixels).astype(self.dtype, copy=False)


@dataclass(frozen=True, slots=True)
class WithMask(WithGaps):
    """An array with NaN where a mask is 0, which has some of its axes or all."""

    mask: Readable
    axes: tuple[int, ...]  # as axes_of_side has them

    def read(self, region: Region) -> Pixels:
        kept = side_at(self.mask, self.axes, region) != 0
        return np.where(kept, self.source.read(region), np.nan).astype(self.dtype, copy=False)


def axes_of_side(side: Readable, spatial: Sequence[int], dims: int) -> tuple[int, ...]:
    """The axes that a side input has of an image, all or the spatial ones, counted from the last one: negative."""
    return tuple(range(-dims, 0)) if len(side.shape) == dims else tuple(axis - dims for axis in spatial)


def side_at(side: Readable, axes: Sequence[int], region: Region) -> Pixels:
    """The pixels of a side input at a region of its image, of a shape that broadcasts with that of the region."""
    place = Region(tuple(region.start[axis] for axis in axes), tuple(region.stop[axis] for axis in axes))
    others = tuple(axis for axis in range(-len(region.start), 0) if axis not in axes)
    return np.expand_dims(side.read(place), others)


def measured(
    source: Readable, value: float | None, mask: Readable | None, spatial: Sequence[int], dims: int
) -> Readable:
    """An array with NaN where it has the value of a hole, or where a mask is 0.

    ``source``: array; of an axis that it lacks, the first, it has one pixel; ``value``: value of a hole; ``mask, with all axes or the spatial ones;
    ``spatial``: positions of the spatial axes, out of `dims`.
    """
    view = source if value is None else WithoutValue(source, value)
    if mask is None:
        return view
    axes = axes_of_side(mask, spatial, dims)
    return WithMask(view, mask, axes) if len(axes) <= len(source.shape) else view


@dataclass(frozen=True, slots=True)
class Constant:
    """An array with the same value everywhere, which takes no memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    value: float = 0.0

    def read(self, region: Region) -> Pixels:
        return np.full(region.shape, self.value, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class PlaneValues:
    """One number for each plane of an image: an array of length 1 on the axes of the planes."""

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
        parts = zip(self.shape, region.slices, strict=True)
        return self.values[tuple(slice(None) if n == 1 else part for n, part in parts)]

    def among(self, axis: int, numbers: Sequence[int], length: int) -> PlaneValues:
        """The same numbers at some indices of a longer axis, with 0 at the others."""
        values = np.zeros((*self.shape[:axis], length, *self.shape[axis + 1 :]), self.dtype)
        np.moveaxis(values, axis, 0)[list(numbers)] = np.moveaxis(self.values, axis, 0)
        return PlaneValues(values)


@dataclass(frozen=True, slots=True, eq=False)
class Replaced(Viewed):
    """An array with other pixels in a region."""

    region: Region
    pixels: Pixels

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of the other pixels."""
        return self.pixels.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``; those of the array are read only where it is larger."""
        common = region.clip(self.region)
        others = self.pixels[common.relative_to(self.region).slices]
        if common == region:
            return others.copy()
        pixels = self.source.read(region).astype(self.dtype)
        pixels[common.relative_to(region).slices] = others
        return pixels
