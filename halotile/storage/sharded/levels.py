"""Resolution levels of an image: each pixel of a level is the mean of 2 x 2 (or 2 x 2 x 2) pixels of the one before.

A block writes its part of every level, so that nothing is read again. For this a block starts at a multiple of the pixels that
one of the coarsest level covers. Only two numbers are added at once: the bits do not depend on the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.disk.object_path import OutputPath, path_of
from halotile.storage.grid import Grid, Region
from halotile.storage.sharded.shards import ShardFormat
from halotile.storage.spacing import voxel_shape

MOST_FILES = 100_000
"""Number of files of an output above which shards grow and levels end: file systems are slow with millions of files."""
LARGEST_TOP = 1024
"""Longest edge in pixels at which an image needs no coarser level."""
SMALLEST_SHARD = 16
"""Shortest edge of a shard, in pixels, for which a level is made: it has one file for each block."""


@dataclass(frozen=True)
class LevelArray:
    """One array of an output."""

    name: str  # folder of the array in the output; empty where the output is the array
    shape: tuple[int, ...]  # shape in pixels
    form: ShardFormat

    @cached_property
    def grid(self) -> Grid:
        """The grid of shards, whose cores are clipped to the array."""
        return Grid(self.shape, self.form.shard, ((0, 0),) * len(self.shape))

    @property
    def folders(self) -> int:
        """Number of folders that hold the shards."""
        counts = self.grid.counts
        return 1 + sum(math.prod(counts[:depth]) for depth in range(1, len(counts)))

    def path(self, root: str | OutputPath) -> OutputPath:
        """Path of the array in an output at ``root``."""
        return path_of(root) / self.name

    def shards(self, region: Region) -> Iterator[tuple[str, Region]]:
        """Path relative to the array of each shard that a region overlaps, with the part of the array that it holds."""
        for index in self.indices(region):
            yield "/".join(["c", *map(str, index)]), self.grid.core_at(index)

    def indices(self, region: Region) -> Iterator[tuple[int, ...]]:
        """Index of each shard that a region overlaps."""
        edges = zip(region.start, region.stop, self.form.shard, strict=True)
        return itertools.product(*(range(a // s, -(-b // s)) for a, b, s in edges))


def level_factor(axes: Sequence[str], scale: Sequence[float], units: Sequence[str | None]) -> tuple[int, ...]:
    """Number of pixels along each axis that one of the next level covers: 2 along y, x, and along z if voxels are cubes.

    >>> level_factor("czyx", (1.0, 0.2, 0.1, 0.1), (None, "micrometer", "micrometer", "micrometer"))
    (1, 1, 2, 2)
    >>> level_factor("zyx", (0.1,) * 3, ("micrometer",) * 3)
    (2, 2, 2)
    """
    space = [i for i, axis in enumerate(axes) if axis in "zyx"]
    voxel = voxel_shape([scale[i] for i in space], [units[i] for i in space])
    halved = "zyx" if voxel is not None and set(voxel) == {1.0} else "yx"
    return tuple(2 if axis in halved else 1 for axis in axes)


def possible_levels(shape: Sequence[int], block: Sequence[int], factor: Sequence[int]) -> int:
    """Number of levels, the finest included, that blocks can write: until an image of :data:`LARGEST_TOP` is left.

    >>> possible_levels((5000, 3000), (2048, 2048), (2, 2)), possible_levels((5000, 3000), (1000, 1000), (2, 2))
    (4, 4)
    >>> possible_levels((99_000, 99_000), (500, 500), (2, 2))
    3
    """
    halved = [i for i, f in enumerate(factor) if f == 2]
    for level in itertools.count(1):
        part = 2**level
        if max(-(-shape[i] // (part // 2)) for i in halved) <= LARGEST_TOP or not all(
            block[i] >= shape[i] or (block[i] % part == 0 and block[i] // part >= SMALLEST_SHARD) for i in halved
        ):
            return level
    raise AssertionError


def level_arrays(
    shape: tuple[int, ...], form: ShardFormat, count: int, factor: Sequence[int], block: Sequence[int]
) -> Iterator[LevelArray]:
    """The arrays of a group, from the finest one: no shard holds pixels of two blocks.

    >>> form = ShardFormat((1024, 1024), (256, 256), "uint8", "lz4")
    >>> [(a.shape, a.form.shard) for a in level_arrays((5001, 6000), form, 3, (2, 2), (3072, 3072))]
    [((5001, 6000), (1024, 1024)), ((2501, 3000), (768, 768)), ((1251, 1500), (768, 768))]
    """
    for level in range(count):
        parts = [f**level for f in factor]
        lengths = tuple(-(-n // part) for n, part in zip(shape, parts, strict=True))
        sizes = zip(shape, lengths, form.shard, form.chunk, block, parts, strict=True)
        cut = [_cut(n, at, shard, chunk, b, part) for n, at, shard, chunk, b, part in sizes]
        shards, chunks = zip(*cut, strict=True)
        yield LevelArray(str(level), lengths, ShardFormat(shards, chunks, form.dtype, form.codec))


def _cut(whole: int, length: int, shard: int, chunk: int, block: int, part: int) -> tuple[int, int]:
    """Edge of a shard and of a chunk along one axis of a level whose pixel covers ``part``."""
    if part == 1:
        return shard, chunk
    if block < whole:
        edge = _divisor(block // part, shard)
        return edge, _divisor(edge, chunk)
    piece = min(chunk, length)
    return min(shard // piece * piece or piece, -(-length // piece) * piece), piece


def _divisor(length: int, most: int) -> int:
    """The longest of equal parts of a length that are no longer than ``most``."""
    return next(length // n for n in itertools.count(-(-length // most)) if length % n == 0)


def coarser(region: Region, factor: Sequence[int]) -> Region:
    """The part of the next level that a block covers."""
    return Region(
        tuple(a // f for a, f in zip(region.start, factor, strict=True)),
        tuple(-(-b // f) for b, f in zip(region.stop, factor, strict=True)),
    )


def halve(pixels: NDArray[Any], factor: Sequence[int], nodata: float | None) -> NDArray[Any]:
    """The means of pairs of pixels along each axis where ``factor`` is 2, as floats; the last of an odd number is by itself.

    Pixels that are not finite, or have the value ``nodata``, are left out; without any other a mean is NaN.

    >>> halve(np.array([[1, 3, 8], [5, 7, 8]], "uint8"), (2, 2), None)
    array([[4., 8.]], dtype=float32)
    >>> halve(np.array([[np.nan, 3.0], [np.nan, np.inf]]), (1, 2), None)
    array([[ 3.],
           [nan]])
    """
    axes = [axis for axis, f in enumerate(factor) if f == 2]
    small = pixels.dtype.itemsize <= 2 or pixels.dtype == np.float32
    means = _means(pixels, axes, np.dtype(np.float32 if small else np.float64))
    if nodata is None and (pixels.dtype.kind in "iu" or np.isfinite(means).all()):
        return means
    valid = np.isfinite(pixels)
    if nodata is not None:
        valid &= pixels != pixels.dtype.type(nodata)
    share = _means(valid, axes, np.dtype(np.float64))
    values = _means(np.where(valid, pixels, pixels.dtype.type(0)), axes, np.dtype(np.float64))
    partial = (share < 1) | ~np.isfinite(means)
    with np.errstate(invalid="ignore", over="ignore"):
        filled = np.where(share > 0, values / share, math.nan)
        means[partial] = filled[partial]
    return means


def avoid_value(pixels: NDArray[Any], value: float) -> None:
    """Give measured pixels that have come out as the value of a hole the next one, as GDAL does.

    >>> pixels = np.array([0, 7, 255], "uint8")
    >>> avoid_value(pixels, 255)
    >>> pixels.tolist()
    [0, 7, 254]
    """
    same = pixels == pixels.dtype.type(value)
    if pixels.dtype.kind == "f":
        pixels[same] = np.nextafter(pixels.dtype.type(value), pixels.dtype.type(math.inf))
    else:
        pixels[same] = value + 1 if value < np.iinfo(pixels.dtype).max else value - 1


def _means(pixels: NDArray[Any], axes: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    for axis in axes:
        length = pixels.shape[axis]
        at: list[slice] = [slice(None)] * pixels.ndim
        first, second = list(at), list(at)
        first[axis], second[axis] = slice(0, length - 1, 2), slice(1, length, 2)
        with np.errstate(over="ignore", invalid="ignore"):
            means = np.add(pixels[tuple(first)], pixels[tuple(second)], dtype=dtype)
            means *= dtype.type(0.5)
        if length % 2:
            at[axis] = slice(length - 1, length)
            means = np.concatenate([means, pixels[tuple(at)].astype(dtype)], axis)
        pixels = means
    return pixels
