"""The role of each axis of an array: tiled (spatial), taken whole (channels), or looped over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region


@dataclass(frozen=True, slots=True)
class Roles:
    """The axes of an array and their roles.

    >>> roles = Roles(("t", "y", "x", "c"), spatial=(1, 2), channel=3)
    >>> roles.looped
    (0,)
    >>> roles.arrange(np.zeros((5, 30, 40, 3))).shape
    (5, 3, 30, 40)
    >>> roles.restore(np.zeros((5, 3, 30, 40))).shape
    (5, 30, 40, 3)
    """

    axes: tuple[str, ...]  # one letter for each axis of the array
    spatial: tuple[int, ...]  # positions of the axes that are tiled
    # position of the axis that the denoiser takes whole. None: every plane is denoised by itself
    channel: int | None

    @property
    def looped(self) -> tuple[int, ...]:
        """Positions of the axes that are neither tiled nor channels."""
        return tuple(i for i in range(len(self.axes)) if i not in self.spatial and i != self.channel)

    def arrange(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """A view of shape (*looped, channels, *spatial); never a copy."""
        view = pixels.transpose(self._order)
        return np.expand_dims(view, len(self.looped)) if self.channel is None else view

    def restore(self, arranged: NDArray[Any]) -> NDArray[Any]:
        """Undo :meth:`arrange`; never a copy."""
        view = arranged.squeeze(len(self.looped)) if self.channel is None else arranged
        return view.transpose(np.argsort(self._order))

    @property
    def _order(self) -> tuple[int, ...]:
        channel = () if self.channel is None else (self.channel,)
        return self.looped + channel + self.spatial

    def spatial_part(self, region: Region) -> Region:
        """The region on the tiled axes alone."""
        return Region(tuple(region.start[i] for i in self.spatial), tuple(region.stop[i] for i in self.spatial))

    def per_axis(self, spatial: int, other: int) -> tuple[int, ...]:
        """One number for each axis: ``spatial`` where it is tiled, ``other`` elsewhere."""
        return tuple(spatial if i in self.spatial else other for i in range(len(self.axes)))

    def output_region(self, core: Region, scale: int, channels_out: int) -> Region:
        """The region of the output that ``core`` becomes: scaled in space, with all output channels."""
        region = core.scale(self.per_axis(scale, 1))
        return region if self.channel is None else respanned(region, {self.channel: (0, channels_out)})


def spanned(spans: Iterable[tuple[int, int]]) -> Region:
    """The region with these starts and stops along its axes."""
    starts, stops = zip(*spans, strict=True)
    return Region(starts, stops)


def respanned(region: Region, spans: Mapping[int, tuple[int, int]]) -> Region:
    """The region with other starts and stops on some axes.

    >>> respanned(Region((0, 1), (4, 5)), {1: (2, 9)})
    Region(start=(0, 2), stop=(4, 9))
    """
    own = zip(region.start, region.stop, strict=True)
    return spanned(spans.get(axis, span) for axis, span in enumerate(own))
