"""Inner tiles: a block's pixels are denoised tile by tile, in batches of windows of one shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import BlockFailed
from halotile.storage.grid import Depth, Region, align_outward
from halotile.storage.output import to_dtype
from halotile.tasks.denoisers.base import CoreModel, Margin, Model
from halotile.tasks.device import Device, all_finite


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the tiles of a block are cut and what happens to their values.

    ``tile``, ``depth``, ``align``, ``least`` and ``picture`` have one entry for each tiled axis; windows
    are at least ``least`` long where the picture is.
    """

    tile: tuple[int, ...]
    depth: Depth
    align: tuple[int, ...]
    least: tuple[int, ...]
    picture: tuple[int, ...]
    scale: int
    batch: int
    range: tuple[float, float] | None
    work_dtype: str


@dataclass(frozen=True, slots=True)
class Window:
    """One tile of one plane: its plane, its core and what is read for it, in global coordinates."""

    plane: tuple[int, ...]
    core: Region
    reach: Region

    @property
    def margin(self) -> Margin:
        """What is read around the core, before and after on each axis."""
        inner = self.core.relative_to(self.reach)
        return tuple((a, n - b) for a, b, n in zip(inner.start, inner.stop, self.reach.shape, strict=True))


def cut_evenly(start: int, stop: int, edge: int, align: int) -> list[tuple[int, int]]:
    """Cut an interval into the fewest pieces of at most ``edge``, as equal as ``align`` allows.

    Examples
    --------
    >>> cut_evenly(0, 1030, 512, 1)
    [(0, 344), (344, 688), (688, 1030)]
    """
    pieces = -(-(stop - start) // edge)
    edge = -(-(stop - start) // pieces)
    edge = -(-edge // align) * align
    return [(a, min(a + edge, stop)) for a in range(start, stop, edge)]


def windows_of(core: Region, available: Region, planes: tuple[int, ...], tiling: Tiling) -> Iterator[Window]:
    """The tiles of ``core``, tile after tile and plane after plane.

    All windows get one shape where they can: one that would end at the edge of what is
    available is moved inward, which gives it more context than it needs and costs a few pixels.
    """
    cuts = [
        cut_evenly(a, b, t, k)
        for a, b, t, k in zip(core.start, core.stop, tiling.tile, tiling.align, strict=True)
    ]
    full = tuple(
        max(max(b - a for a, b in cut) + before + after + (k if k > 1 else 0), least)
        for cut, (before, after), k, least in zip(cuts, tiling.depth, tiling.align, tiling.least, strict=True)
    )
    for corner in itertools.product(*cuts):
        tile = Region(tuple(a for a, _ in corner), tuple(b for _, b in corner))
        reach = _one_shape(tile.grow(tiling.depth), available, full, tiling)
        for plane in np.ndindex(*planes):
            yield Window(plane, tile, reach)


def _one_shape(window: Region, available: Region, full: tuple[int, ...], tiling: Tiling) -> Region:
    start, stop = [], []
    for a, b, low, high, length, k in zip(
        window.start, window.stop, available.start, available.stop, full, tiling.align, strict=True
    ):
        first = min(max(a, low), max(low, high - length)) // k * k
        start.append(max(first, low))
        stop.append(max(min(first + length, high), min(b, high)))
    return align_outward(Region(tuple(start), tuple(stop)), tiling.align, tiling.picture)


class TileRunner:
    """Denoises the tiles of blocks with one model on one device.

    When the device runs out of memory the batch is halved, and stays so.
    """

    def __init__(self, model: Model, device: Device, tiling: Tiling, name: str) -> None:
        self.model = device.place(model)
        self.device = device
        self.tiling = tiling
        self.name = name
        self.batch = tiling.batch

    def __call__(
        self,
        pixels: NDArray[Any],
        available: Region,
        core: Region,
        result: NDArray[Any],
        sides: Mapping[str, NDArray[Any]],
    ) -> None:
        """Denoise ``core`` into ``result``.

        Parameters
        ----------
        pixels : ndarray, shape (*looped, channels, *spatial)
            What was read: the pixels of ``available``.
        available, core : Region
            On the tiled axes, in global coordinates.
        result : ndarray, shape (*looped, channels out, *spatial * scale)
            Where the pixels of ``core`` go, in the output's dtype.
        sides : mapping of str to ndarray
            Per-pixel side inputs of ``available``, arranged like ``pixels``; an axis of length 1 is shared.
        """
        planes = pixels.shape[: pixels.ndim - 1 - len(core.start)]
        windows = list(windows_of(core, available, planes, self.tiling))
        for _, same in itertools.groupby(windows, key=self._kind):
            queue = list(same)
            while queue:
                group, queue = queue[: self.batch], queue[self.batch :]
                try:
                    self._denoise(group, pixels, available, core, result, sides)
                except Exception as error:
                    if not self.device.is_out_of_memory(error) or self.batch == 1:
                        raise
                    self.device.forget()
                    self.batch = max(1, len(group) // 2)
                    queue = group + queue

    def _kind(self, window: Window) -> Any:
        """What the windows of one batch have in common."""
        return window.reach.shape, window.margin if isinstance(self.model, CoreModel) else None

    def _denoise(
        self,
        group: list[Window],
        pixels: NDArray[Any],
        available: Region,
        core: Region,
        result: NDArray[Any],
        sides: Mapping[str, NDArray[Any]],
    ) -> None:
        batch = self._gather(group, pixels, available, self.tiling.range)
        side_batches = {name: self._gather(group, side, available, None) for name, side in sides.items()}
        model, computed = self.model, [window.reach for window in group]
        if isinstance(model, CoreModel):
            model, computed = partial(model.core, margin=group[0].margin), [window.core for window in group]
        output = self.device.run(
            model,
            self.device.upload(batch),
            {name: self.device.upload(side) for name, side in side_batches.items()},
        )
        self._check_shape(tuple(output.shape), (*batch.shape[:2], *computed[0].shape), result)
        for window, region, tile in zip(group, computed, output, strict=True):
            inner = window.core.relative_to(region).scale((self.tiling.scale,) * len(core.start))
            values = self.device.download(tile[(slice(None), *inner.slices)])
            if not all_finite(values) and all(all_finite(b) for b in (batch, *side_batches.values())):
                raise BlockFailed(
                    f"{self.name} gave NaN or infinity on finite pixels at {window.core}. "
                    "Check its weights and the range of the input (input.range)."
                )
            target = window.core.relative_to(core).scale((self.tiling.scale,) * len(core.start))
            index: tuple[Any, ...] = (*window.plane, slice(None), *target.slices)
            place = result[index]
            place[...] = to_dtype(self._unmap(values), place.dtype)

    def _gather(
        self,
        group: list[Window],
        pixels: NDArray[Any],
        available: Region,
        value_range: tuple[float, float] | None,
    ) -> NDArray[Any]:
        """The windows of a group as one contiguous batch in the working dtype."""
        channels = pixels.shape[pixels.ndim - 1 - len(available.start)]
        batch = np.empty((len(group), channels, *group[0].reach.shape), self.tiling.work_dtype)
        for slot, window in zip(batch, group, strict=True):
            plane = tuple(min(i, n - 1) for i, n in zip(window.plane, pixels.shape, strict=False))
            slot[...] = pixels[(*plane, slice(None), *window.reach.relative_to(available).slices)]
        if value_range is not None:
            low, high = value_range
            batch -= batch.dtype.type(low)
            batch /= batch.dtype.type(high - low)
        return batch

    def _unmap(self, values: NDArray[Any]) -> NDArray[Any]:
        if self.tiling.range is None:
            return values
        low, high = self.tiling.range
        mapped: NDArray[Any] = values * values.dtype.type(high - low) + values.dtype.type(low)
        return mapped

    def _check_shape(self, shape: tuple[int, ...], batch: tuple[int, ...], result: NDArray[Any]) -> None:
        spatial = len(batch) - 2
        expected = (
            batch[0],
            result.shape[result.ndim - 1 - spatial],
            *(n * self.tiling.scale for n in batch[2:]),
        )
        if shape != expected:
            raise BlockFailed(
                f"{self.name} made shape {shape} of a batch of shape {batch}; {expected} was declared. "
                "Declare its scale and channels as they are."
            )
