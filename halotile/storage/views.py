"""Readable arrays that present another array, or a constant, in a different shape without copying pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable


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
class Constant:
    """An array with the same value everywhere, which takes no memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    value: float = 0.0

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        return np.full(region.shape, self.value, self.dtype)
