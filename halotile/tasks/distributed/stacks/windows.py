"""Blocks of a stack of local operators that are given the windows they need, not whole images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.distributed.transport.calls import Tensors

Array = NDArray[Any]


def windows(region: Region, margin: int, shape: Sequence[int]) -> tuple[Region, ...]:
    """What lies up to ``margin`` pixels from a region of an image whose ends meet: both rims of it, near one of them.

    Only the last two axes have margins.

    Examples
    --------
    >>> [(r.start, r.stop) for r in windows(Region((0, 4), (4, 8)), 2, (12, 30))]
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
    """The span as runs of an axis whose ends meet."""
    if stop - start >= length:
        return [(0, length)]
    inside = (max(0, start), min(length, stop))
    if start < 0 and start + length > stop:
        return [inside, (start + length, length)]
    if stop > length and stop - length < start:
        return [(0, stop - length), inside]
    return [inside] if start >= 0 and stop <= length else [(0, length)]


@dataclass(frozen=True)
class Held:
    """An array of which some windows are there."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[Region, Array], ...]

    def read(self, region: Region) -> Array:
        """The pixels of ``region``.

        Raises
        ------
        InputError
            Where they are not there.
        """
        for window, pixels in self.parts:
            if region.inside(window):
                part: Array = pixels[region.relative_to(window).slices]
                return part
        raise InputError(f"{region} was read, and only {[window for window, _ in self.parts]} is there.")


class Block(Protocol):
    """What computes a block from arrays of which only what it reads has to be there."""

    def of(self, given: Sequence[Readable]) -> Tensors:
        """The block of each of its results."""
        ...


@dataclass(frozen=True)
class Late:
    """A block that is computed when its windows are.

    Parameters
    ----------
    piece : Block
        The block.
    shapes : tuple of tuple of int
        Of the arrays that it reads.
    windows : tuple of tuple of Region
        For each of them, what is given.
    """

    piece: Block
    shapes: tuple[tuple[int, ...], ...]
    windows: tuple[tuple[Region, ...], ...]

    def __call__(self, *pixels: Array) -> list[Array]:
        """The arrays of the block, from the windows of all inputs one after the other."""
        rest = iter(pixels)
        sources = [
            Held(shape, pixels[0].dtype, tuple((region, next(rest)) for region in regions))
            for shape, regions in zip(self.shapes, self.windows, strict=True)
        ]
        return [tensor.numpy() for tensor in self.piece.of(sources) if tensor is not None]
