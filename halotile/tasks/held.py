"""A part of an image held in memory while many read from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable


@dataclass
class Held:
    """Reads what is asked for with some pixels more on each side, and answers from that as long as it will do.

    For one block: operators of a stack ask for nearly the same window of the image, one after the other,
    and a periodic window asks for a slab on either side.

    Parameters
    ----------
    source : Readable
        What is read.
    slack : int
        Pixels more on each side of the last two axes.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory
    >>> held = Held(InMemory(np.arange(100).reshape(10, 10)), slack=2)
    >>> held.read(Region((4, 4), (5, 6))).tolist(), held.read(Region((3, 3), (4, 5))).tolist()
    ([[44, 45]], [[33, 34]])
    >>> held.pixels_read
    30
    """

    source: Readable
    slack: int
    pixels_read: int = 0
    _parts: list[tuple[Region, Pixels]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of one pixel."""
        return self.source.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``; not to be written to."""
        for there, pixels in self._parts:
            if region.inside(there):
                return pixels[region.relative_to(there).slices]
        front = len(self.shape) - 2
        wide = region.grow(((0, 0),) * front + ((self.slack, self.slack),) * 2).clip(Region.whole(self.shape))
        pixels = self.source.read(wide)
        self.pixels_read += wide.size
        self._parts.append((wide, pixels))
        return pixels[region.relative_to(wide).slices]
