"""Blocks of a stack of local operators that get the windows they read instead of whole images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Array

if TYPE_CHECKING:
    from halotile.tasks.distributed.stacks.blockwise import BlockCall


def wrapped_windows(region: Region, margin: int, shape: Sequence[int]) -> tuple[Region, ...]:
    """List the windows up to ``margin`` pixels around a region of a periodic image.

    Near a rim there are several.

    Only the last two axes have margins.

    Examples
    --------
    >>> [(r.start, r.stop) for r in wrapped_windows(Region((0, 4), (4, 8)), 2, (12, 30))]
    [((0, 2), (6, 10)), ((10, 2), (12, 10))]
    """
    front = [[(0, n)] for n in shape[:-2]]
    near = [
        _runs(start - margin, stop + margin, length)
        for start, stop, length in zip(region.start[-2:], region.stop[-2:], shape[-2:], strict=True)
    ]
    return tuple(
        Region(tuple(a for a, _ in spans), tuple(b for _, b in spans))
        for spans in itertools.product(*front, *near)
    )


def _runs(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """Split a span of a periodic axis into runs."""
    if stop - start >= length:
        return [(0, length)]
    inside = (max(0, start), min(length, stop))
    if start < 0 and start + length > stop:
        return [inside, (start + length, length)]
    if stop > length and stop - length < start:
        return [(0, stop - length), inside]
    return [inside] if start >= 0 and stop <= length else [(0, length)]


@dataclass(frozen=True)
class PartialArray:
    """An array of which only some windows are present."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[Region, Array], ...]

    def read(self, region: Region) -> Array:
        """Read the pixels of ``region``."""
        for window, pixels in self.parts:
            if region.inside(window):
                part: Array = pixels[region.relative_to(window).slices]
                return part
        raise InputError(f"{region} was read, but only {[window for window, _ in self.parts]} are present.")


@dataclass(frozen=True)
class LazyBlock:
    """A block that is computed once its windows are."""

    call: BlockCall  # call that computes the block
    shapes: tuple[tuple[int, ...], ...]  # shapes of the arrays that it reads
    windows: tuple[tuple[Region, ...], ...]  # for each of these arrays, the windows that are present

    def __call__(self, *pixels: Array) -> list[Array]:
        """Compute the arrays of the block from the windows of all inputs, one after the other."""
        remaining = iter(pixels)
        sources = [
            PartialArray(shape, pixels[0].dtype, tuple((region, next(remaining)) for region in regions))
            for shape, regions in zip(self.shapes, self.windows, strict=True)
        ]
        return [tensor.numpy() for tensor in self.call.compute(sources) if tensor is not None]
