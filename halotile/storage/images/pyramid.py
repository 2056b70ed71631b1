"""Resolution levels of planes for an export: those that an output has, or else means over 2 x 2 in a scratch file."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import InputError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from halotile.storage.images.planes import Planes, choose_planes
from halotile.storage.rim import Pixels
from halotile.storage.sharded.layout import read_layout
from halotile.storage.sharded.levels import coarser
from halotile.storage.sharded.output import halve_to

LARGEST_TOP = 512
"""Longest edge in pixels of the coarsest level; validators of GeoTIFFs ask for levels of a larger image."""
_HALF = (2, 2)


def level_shapes(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Height and width of every level, finest first.

    Examples
    --------
    >>> level_shapes((1500, 700)), level_shapes((9, 9))
    ([(1500, 700), (750, 350), (375, 175)], [(9, 9)])
    """
    shapes = [shape]
    while max(shapes[-1]) > LARGEST_TOP:
        shapes.append((-(-shapes[-1][0] // 2), -(-shapes[-1][1] // 2)))
    return shapes


def stored_levels(planes: Planes) -> list[Planes]:
    """The coarser levels that a run wrote with the image, as means over 2 x 2; none of other images, nor of a part of one."""
    source = planes.source
    try:
        layout = read_layout(source.path) if source.format == "ome" else None
    except InputError:
        return []
    shapes = [array.shape for array in layout.arrays] if layout else []
    if layout is None or source.shape not in shapes or planes.shape != source.shape[-2:]:
        return []
    if layout.factor != tuple(2 if axis in "yx" else 1 for axis in source.axes):
        return []
    return [
        choose_planes(open_source(source.path, level=level), planes.at, None)
        for level in range(shapes.index(source.shape) + 1, layout.levels)
    ]


@dataclass(frozen=True)
class NextLevel:
    """A scratch file with the next level of planes, which is written while these are read."""

    path: Path
    planes: Planes
    dtype: np.dtype[Any]
    """Type of the pixels that are added."""
    nodata: float | None
    """Their value without a measurement."""

    def make(self) -> None:
        """Make the file, of the right size. Its room is reserved: writing to a mapped file on a full disk would end the process."""
        shape = coarser(Region.whole(self.planes.shape), _HALF).shape
        samples = (self.planes.samples,) if self.planes.colour else ()
        np.lib.format.open_memmap(self.path, "w+", self.dtype, (*self.planes.counts, *shape, *samples))
        with self.path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, self.path.stat().st_size)

    def add(self, index: tuple[int, ...], part: Region, pixels: Pixels) -> None:
        """Add the means of a part of one plane, which begins at even rows and columns."""
        if (
            not self.path.exists()
        ):  # only once a part of the image could be read: its header may promise anything
            self.make()
        # Opened anew for each part, or the whole file would count as memory of this process.
        array = np.lib.format.open_memmap(self.path, "r+")
        array[index][coarser(part, _HALF).slices] = halve_to(pixels, _HALF, self.dtype, self.nodata)

    def read(self) -> Planes:
        """The planes of the level, when all parts were added."""
        axes = "".join((*self.planes.loops, *"yx", *"c" * self.planes.colour))
        return replace(choose_planes(open_source(self.path, axes=axes), {}, None), colour=self.planes.colour)
