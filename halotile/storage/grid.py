"""Grids that divide an array into blocks, in integer arithmetic without pixels.

A :class:`Grid` divides an array of any number of axes into blocks numbered in C order. Each
:class:`Block` has two regions: its ``core``, which it alone writes, and its ``window``, which it
reads: the core grown by the depth, then outward to the alignment. Blocks are computed on demand:
a grid of a million blocks costs as much as a grid of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import add, mul
from typing import Any, TypeVar

from halotile.errors import ConfigError

T = TypeVar("T")

Depth = tuple[tuple[int, int], ...]  # halo width (before, after) for each axis, in pixels


@dataclass(frozen=True, slots=True)
class Region:
    """A box of pixels: ``start[i] <= coordinate < stop[i]`` on every axis.

    Coordinates are global. A region may extend outside its array, so negative starts are allowed.

    >>> Region((0, 10), (4, 30)).shape
    (4, 20)
    >>> Region((0, 10), (4, 30)).grow(((1, 1), (5, 0)))
    Region(start=(-1, 5), stop=(5, 30))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """The region of all pixels of an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each axis, in pixels."""
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of pixels."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as an array index (valid when no start is negative)."""
        return _per_axis(slice, self.start, self.stop)

    def grow(self, depth: Depth) -> Region:
        """The region extended by ``depth`` on each side."""
        return Region(
            tuple(a - before for a, (before, _) in zip(self.start, depth, strict=True)),
            tuple(b + after for b, (_, after) in zip(self.stop, depth, strict=True)),
        )

    def widen(self, pixels: int) -> Region:
        """The region extended by so many pixels on each side of its last two axes."""
        return self.grow(((0, 0),) * (len(self.start) - 2) + ((pixels, pixels),) * min(2, len(self.start)))

    def clip(self, other: Region) -> Region:
        """The part inside ``other``."""
        start = _per_axis(max, self.start, other.start)
        return Region(start, _per_axis(max, start, _per_axis(min, self.stop, other.stop)))

    def inside(self, other: Region) -> bool:
        """Return True when every pixel is in ``other``."""
        return self.clip(other) == self

    def shift(self, offset: tuple[int, ...]) -> Region:
        """The region moved by ``offset``."""
        return Region(_per_axis(add, self.start, offset), _per_axis(add, self.stop, offset))

    def relative_to(self, origin: Region) -> Region:
        """The region in coordinates relative to the start of ``origin``."""
        return self.shift(tuple(-a for a in origin.start))

    def scale(self, factor: tuple[int, ...]) -> Region:
        """The same region in an image that is ``factor`` times finer along each axis."""
        return Region(_per_axis(mul, self.start, factor), _per_axis(mul, self.stop, factor))


def _per_axis(function: Callable[..., T], *values: tuple[Any, ...]) -> tuple[T, ...]:
    """Apply a function to the entries of each axis."""
    return tuple(itertools.starmap(function, zip(*values, strict=True)))


@dataclass(frozen=True, slots=True)
class Block:
    """One unit of work: it writes ``core`` and reads ``window``."""

    number: int
    index: tuple[int, ...]
    core: Region
    window: Region


@dataclass(frozen=True)
class Grid:
    """An array divided into blocks.

    >>> grid = Grid((100, 100), (64, 64), ((8, 8), (8, 8)))
    >>> len(grid), grid.counts
    (4, (2, 2))
    >>> grid.block_at(3).core
    Region(start=(64, 64), stop=(100, 100))
    >>> grid.block_at(3).window
    Region(start=(56, 56), stop=(108, 108))
    """

    shape: tuple[int, ...]  # shape of the array, in pixels
    # core length along each axis. The last block along an axis is shorter when the array's length is no multiple of
    # it
    block: tuple[int, ...]
    depth: Depth  # halo width before and after, for each axis. It may exceed the block and the array
    # window starts (and stops inside the array) are multiples of this, as strided networks require. 1: no alignment
    align: tuple[int, ...] = ()
    # minimum window length (limited to the array with its halo): a convolution library may round differently on very
    # small inputs
    least: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("align", "least"):
            if not getattr(self, name):
                object.__setattr__(self, name, (1,) * len(self.shape))
        if len({len(v) for v in (self.shape, self.block, self.depth, self.align, self.least)}) != 1:
            raise ConfigError(
                f"shape {self.shape}, block {self.block}, depth {self.depth}, align {self.align} and "
                f"least {self.least} have different numbers of axes. Write one entry for each axis."
            )
        for name in ("shape", "block", "align"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: write at least 1 on each axis.")
        if any(d < 0 for pair in self.depth for d in pair):
            raise ConfigError(f"depth is {self.depth}: a halo cannot be negative. Write 0 or more.")

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks along each axis."""
        return tuple(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __iter__(self) -> Iterator[Block]:
        return (self.block_at(number) for number in range(len(self)))

    def index_of(self, number: int) -> tuple[int, ...]:
        """Position of block ``number`` in the grid."""
        if not 0 <= number < len(self):
            raise IndexError(f"block {number} of a grid of {len(self)} blocks")
        index = []
        for count in reversed(self.counts):
            number, position = divmod(number, count)
            index.append(position)
        return tuple(reversed(index))

    def number_of(self, index: tuple[int, ...]) -> int:
        """Number of the block at a grid position."""
        number = 0
        for position, count in zip(index, self.counts, strict=True):
            if not 0 <= position < count:
                raise IndexError(f"block index {index} of a grid of {self.counts} blocks")
            number = number * count + position
        return number

    def block_at(self, number: int) -> Block:
        """Block ``number``, in C order."""
        index = self.index_of(number)
        core = self.core_at(index)
        return Block(number, index, core, self.window_of(core))

    def core_at(self, index: tuple[int, ...]) -> Region:
        """The core of the block at a grid position."""
        start = _per_axis(mul, index, self.block)
        return Region(start, _per_axis(min, _per_axis(add, start, self.block), self.shape))

    @property
    def middle(self) -> Block:
        """A central block of the largest size.

        >>> Grid((100, 300), (64, 64), ((8, 8), (8, 8))).middle.window
        Region(start=(-8, 120), stop=(72, 200))
        """
        return self.block_at(self.number_of(tuple((count - 1) // 2 for count in self.counts)))

    def window_of(self, core: Region) -> Region:
        """The window to read for ``core``: grown by the depth, to the minimum length and to the alignment."""
        reach = Region.whole(self.shape).grow(self.depth)
        window = core.grow(self.depth)
        start = tuple(
            min(a, max(b - least, r))
            for a, b, least, r in zip(window.start, window.stop, self.least, reach.start, strict=True)
        )
        stop = tuple(
            max(b, min(a + least, r)) for a, b, least, r in zip(start, window.stop, self.least, reach.stop, strict=True)
        )
        return align_outward(Region(start, stop), self.align, self.shape)


def align_outward(window: Region, align: tuple[int, ...], shape: tuple[int, ...]) -> Region:
    """Grow a window so that it starts and stops on multiples of ``align``.

    A stop at or past the end of the array is not moved: the rim rule applies there.
    """
    start = tuple(a // k * k for a, k in zip(window.start, align, strict=True))
    stop = tuple(b if b >= n else min(-(-b // k) * k, n) for b, k, n in zip(window.stop, align, shape, strict=True))
    return Region(start, stop)


def valid_part(window: Region, depth: Depth, image: tuple[int, ...]) -> Region:
    """The part of a window that its ends do not affect, unless they are those of the image.

    >>> valid_part(Region((0, 8), (16, 32)), ((2, 2), (3, 3)), (64, 32))
    Region(start=(0, 11), stop=(14, 32))
    """
    return Region(
        tuple(a + before if a != 0 else a for a, (before, _) in zip(window.start, depth, strict=True)),
        tuple(b - after if b != n else b for b, (_, after), n in zip(window.stop, depth, image, strict=True)),
    )
