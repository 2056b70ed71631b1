"""Inner tiles: the pixels of a block are denoised tile by tile, in batches of windows of one shape; the roles of axes: tiled, whole or looped over."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import BlockFailed
from halotile.storage.grid import Depth, Region, align_outward
from halotile.storage.sharded.output import to_dtype
from halotile.tasks.block import Receipt
from halotile.tasks.denoisers.base import CoreModel, Margin, Model, PlaneFilter
from halotile.tasks.devices.device import Device, all_finite
from halotile.tasks.lazy import torch


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

    @property
    def apart(self) -> Roles:
        """The same with every channel by itself."""
        return replace(self, channel=None)

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


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of a block into tiles, and the treatment of their values.

    ``tile``, ``depth``, ``align``, ``least`` and ``image`` have one entry for each tiled axis; windows
    are at least ``least`` long, unless the image is shorter.
    """

    tile: tuple[int, ...]
    depth: Depth
    align: tuple[int, ...]
    least: tuple[int, ...]
    image: tuple[int, ...]
    scale: int
    batch: int
    range: tuple[float, float] | None
    work_dtype: str


@dataclass(frozen=True, slots=True)
class Window:
    """One tile: its plane, its core, and the region read for it (its reach), in global coordinates."""

    plane: tuple[int, ...]
    core: Region
    reach: Region

    @property
    def margin(self) -> Margin:
        """Width of the reach around the core, before and after on each axis."""
        inner = self.core.relative_to(self.reach)
        return tuple((a, n - b) for a, b, n in zip(inner.start, inner.stop, self.reach.shape, strict=True))


def cut_evenly(start: int, stop: int, edge: int, align: int) -> list[tuple[int, int]]:
    """Cut an interval into the fewest parts of at most ``edge``, as equal as ``align`` allows.

    >>> cut_evenly(0, 1030, 512, 1)
    [(0, 344), (344, 688), (688, 1030)]
    """
    parts = -(-(stop - start) // edge)
    edge = -(-(stop - start) // parts)
    edge = -(-edge // align) * align
    return [(a, min(a + edge, stop)) for a in range(start, stop, edge)]


def windows_of(core: Region, available: Region, planes: tuple[int, ...], tiling: Tiling) -> Iterator[Window]:
    """Yield the tiles of ``core``, each for every plane.

    All windows have one shape where possible: a window that would be cut at the edge of the available
    pixels is moved inward, which gives it more context than it needs and costs a few pixels.
    """
    cuts = [cut_evenly(a, b, t, k) for a, b, t, k in zip(core.start, core.stop, tiling.tile, tiling.align, strict=True)]
    full = tuple(
        max(max(b - a for a, b in cut) + before + after + (k if k > 1 else 0), least)
        for cut, (before, after), k, least in zip(cuts, tiling.depth, tiling.align, tiling.least, strict=True)
    )
    for corner in itertools.product(*cuts):
        tile = spanned(corner)
        reach = _move_inward(tile.grow(tiling.depth), available, full, tiling)
        for plane in np.ndindex(*planes):
            yield Window(plane, tile, reach)


def _move_inward(window: Region, available: Region, full: tuple[int, ...], tiling: Tiling) -> Region:
    """The window within what is available, of the full shape if possible."""
    spans = []
    for a, b, low, high, length, k in zip(
        window.start, window.stop, available.start, available.stop, full, tiling.align, strict=True
    ):
        first = min(max(a, low), max(low, high - length)) // k * k
        spans.append((max(first, low), max(min(first + length, high), min(b, high))))
    return align_outward(spanned(spans), tiling.align, tiling.image)


class TileRunner:
    """Denoise the tiles of blocks with one model on one device.

    When the device runs out of memory, the batch is halved from then on.

    ``model``: the model that a denoiser builds; ``device``: the device to run it on; ``tiling``: the cut into tiles; ``name``: name of the denoiser
    in messages.
    """

    def __init__(self, model: Model, device: Device, tiling: Tiling, name: str) -> None:
        self.model = device.place(model)
        self.device = device
        self.tiling = tiling
        self.name = name
        self.batch = tiling.batch
        self._batch_too_large = False
        self._first: tuple[Model, tuple[int, ...], list[str]] | None = None

    @property
    def cpu_model(self) -> Model | None:
        """The model, if it runs on the CPU."""
        return self.model if self.device.kind == "cpu" else None

    def __call__(
        self,
        pixels: NDArray[Any],
        available: Region,
        core: Region,
        channels_out: int,
        sides: Mapping[str, NDArray[Any]],
    ) -> NDArray[Any]:
        """Denoise ``core``: :meth:`stage`, :meth:`launch` and :meth:`QueuedCore.collect` in turn."""
        if self._batch_too_large:
            self._halve_batch()
        return self.launch(self.stage(pixels, sides), available, core, channels_out).collect()

    def stage(self, pixels: NDArray[Any], sides: Mapping[str, NDArray[Any]]) -> StagedBlock:
        """Start to copy the pixels of a block to the device.

        ``pixels``: block with its halo; ``sides``: side inputs, arranged like `pixels`; an axis of length 1 is shared.
        """
        try:
            return StagedBlock(
                self.device.stage(pixels), {name: self.device.stage(side) for name, side in sides.items()}
            )
        except Exception as error:
            if self.device.is_out_of_memory(error):
                self._batch_too_large = True  # for the computing thread; the block is tried again
            raise

    def launch(self, staged: StagedBlock, available: Region, core: Region, channels_out: int) -> QueuedCore:
        """Denoise ``core``; on a GPU, without waiting for the result.

        ``staged``: pixels of `available`; ``available, core``: on the tiled axes, in global coordinates; ``channels_out``: channels of the result.
        """
        if self._batch_too_large:
            self._halve_batch()
        while True:
            try:
                return self._launch(staged, available, core, channels_out)
            except Exception as error:
                if not self.device.is_out_of_memory(error) or self.batch == 1:
                    raise
            # Only once the error is gone, whose frames hold tensors.
            self._halve_batch()

    def _halve_batch(self) -> None:
        """Compute half as many tiles at once from now on: memory ran out."""
        self._batch_too_large, self._first = False, None
        self.batch = max(1, self.batch // 2)
        self.device.release_cache()

    def _launch(self, staged: StagedBlock, available: Region, core: Region, channels_out: int) -> QueuedCore:
        with self.device.computing():
            pixels = self.device.take(staged.pixels)
            sides = {name: self.device.take(side) for name, side in staged.sides.items()}
            planes = tuple(pixels.shape[: pixels.ndim - 1 - len(core.start)])
            work = _Work(pixels, sides, available, core, (*planes, channels_out), self.device.clock())
            windows = windows_of(core, available, planes, self.tiling)
            for _, alike in itertools.groupby(windows, key=self._batch_key):
                for group in _batched(alike, self.batch):
                    self._denoise(group, work)
            return QueuedCore(work, self.device, self.name)

    def finish(self, receipt: Receipt) -> None:
        """Add the batch and the figures of a GPU: its name, its peak of memory, and the bits that it computes now.

        When memory is short, cuDNN may choose another algorithm, with other last bits. torch does not report it, so a fixed batch
        of the shape of the first one is computed again and again.
        """
        receipt.batch = self.batch
        receipt.device_peak_bytes = max(receipt.device_peak_bytes, self.device.peak_bytes())
        if not self.device.one_shape or self._first is None:
            return
        model, shape, sides = self._first
        try:
            with self.device.computing():
                count = torch.arange(math.prod(shape), device=self.device.name)
                batch = count.mul(0.618034).remainder(1).view(shape).to(getattr(torch, self.tiling.work_dtype))
                output = self.device.run(model, batch, {name: torch.ones_like(batch) for name in sides})
                pixels = self.device.fetch(output[:1].contiguous()).pixels()
        except Exception as error:
            if not self.device.is_out_of_memory(error):
                raise
            return
        if not receipt.cpu_kind.endswith(self.device.title):
            receipt.cpu_kind += f", {self.device.title}"
        margin = f", margin {model.keywords['margin']}" if isinstance(self.model, CoreModel) else ""
        which = f", network {len(receipt.bits) + 1}" if receipt.bits else ""  # of channels with networks of their own
        receipt.bits[f"{'×'.join(map(str, shape))}{margin}{which}"] = hashlib.blake2b(
            pixels.tobytes(), digest_size=8
        ).hexdigest()

    def _batch_key(self, window: Window) -> Any:
        """The properties that all windows of a batch share."""
        return window.reach.shape, window.margin if isinstance(self.model, CoreModel) else None

    def _denoise(self, group: list[Window], work: _Work) -> None:
        """Denoise a batch of tiles into the result."""
        missing = self.batch - len(group) if self.device.one_shape else 0
        windows = group + group[-1:] * missing
        batch = self._gather(windows, work.pixels, work.available, self.tiling.range)
        sides = {name: self._gather(windows, side, work.available, None) for name, side in work.sides.items()}
        model, computed = self.model, [window.reach for window in group]
        if isinstance(model, CoreModel):
            model, computed = partial(model.core, margin=group[0].margin), [window.core for window in group]
        output = self.device.run(model, batch, sides)
        self._first = self._first or (model, tuple(batch.shape), list(sides))
        self._check_shape(tuple(output.shape), (*batch.shape[:2], *computed[0].shape), work.leading[-1])
        scale = (self.tiling.scale,) * len(work.core.start)
        for window, region, tile in zip(group, computed, output[: len(group)], strict=True):
            values = tile[(slice(None), *window.core.relative_to(region).scale(scale).slices)]
            self._store(values, work.place_for(window, values, self.tiling.scale))

    def _gather(
        self, group: list[Window], pixels: torch.Tensor, available: Region, value_range: tuple[float, float] | None
    ) -> torch.Tensor:
        """Copy the windows of a group into one contiguous batch of the working dtype."""
        channels = pixels.shape[pixels.ndim - 1 - len(available.start)]
        batch = pixels.new_empty(
            (len(group), channels, *group[0].reach.shape), dtype=getattr(self.device.torch, self.tiling.work_dtype)
        )
        is_uniform = pixels.shape[-len(available.start) :] != available.shape  # one number for a plane
        for slot, window in zip(batch, group, strict=True):
            plane = tuple(min(i, n - 1) for i, n in zip(window.plane, pixels.shape, strict=False))
            place = () if is_uniform else window.reach.relative_to(available).slices
            slot.copy_(pixels[(*plane, slice(None), *place)])
        if value_range is not None:
            low, high = value_range
            batch.sub_(low).div_(high - low)
        return batch

    def _store(self, values: torch.Tensor, place: torch.Tensor) -> None:
        """Store the values of a tile in the result, in the units of the image."""
        if self.tiling.range is None:
            place.copy_(values)
        else:
            low, high = self.tiling.range
            self.device.torch.mul(values, high - low, out=place).add_(low)

    def _check_shape(self, shape: tuple[int, ...], batch: tuple[int, ...], channels_out: int) -> None:
        expected = (batch[0], channels_out, *(n * self.tiling.scale for n in batch[2:]))
        if shape != expected:
            raise BlockFailed(
                f"{self.name} returned shape {shape} for a batch of shape {batch}, where {expected} was declared. "
                "Correct its scale and channels."
            )


STRIP = 256  # rows of a plane that are filtered at once: they stay in the cache


class PlaneRunner:
    """Filter planes of blocks in strips, without tiles and without torch: the bits of a :class:`TileRunner`, which takes what this cannot.

    ``filter_plane``: filter of the denoiser; ``make_tiles``: makes the other runner; ``tiling``: depth, range and batch; ``dtype``: type of the output.
    """

    cpu_model: Model | None = None

    def __init__(
        self, filter_plane: PlaneFilter, make_tiles: Callable[[], TileRunner], tiling: Tiling, dtype: str
    ) -> None:
        self._filter = filter_plane
        self._make_tiles = make_tiles
        self._tiling = tiling
        self._dtype = dtype
        self.device = Device()

    @cached_property
    def _tiles(self) -> TileRunner:
        return self._make_tiles()

    def stage(self, pixels: NDArray[Any], sides: Mapping[str, NDArray[Any]]) -> StagedBlock:
        """The pixels of a block with its halo, as they are."""
        return StagedBlock(pixels, sides)

    def launch(
        self, staged: StagedBlock, available: Region, core: Region, channels_out: int
    ) -> FilteredCore | QueuedCore:
        """Filter ``core``; see :meth:`TileRunner.launch`."""
        began = time.perf_counter()
        pixels = staged.pixels
        if not staged.sides:
            output = np.empty((*pixels.shape[:-2], *core.shape), self._dtype)
            rows = cut_evenly(core.start[0], core.stop[0], STRIP, 1)
            places = itertools.product(np.ndindex(pixels.shape[:-2]), rows)
            if all(self._filter_strip(pixels[at], output[at], available, core, strip) for at, strip in places):
                return FilteredCore(output, time.perf_counter() - began)
            del output
        return self._tiles.launch(self._tiles.stage(pixels, staged.sides), available, core, channels_out)

    def _filter_strip(
        self, plane: NDArray[Any], output: NDArray[Any], available: Region, core: Region, rows: tuple[int, int]
    ) -> bool:
        """Filter rows of a plane of ``available`` into one of ``core``; False where the tiles have to."""
        strip = respanned(core, {0: rows})
        reach = strip.grow(self._tiling.depth).clip(available)
        source, low, width = plane[reach.relative_to(available).slices], np.float32(0), np.float32(1)
        if self._tiling.range is None:
            source = np.ascontiguousarray(source, np.float32)
        else:
            low, width = np.float32(self._tiling.range[0]), np.float32(self._tiling.range[1] - self._tiling.range[0])
            source = np.subtract(source, low, dtype=np.float32)
            source /= width
        filtered = np.empty_like(source)
        if not (self._filter(source, filtered) and all_finite(filtered)):
            return False
        result = filtered[strip.relative_to(reach).slices]
        if self._tiling.range is not None:
            result *= width
            result += low
        output[strip.relative_to(core).slices] = to_dtype(result, self._dtype)
        return True

    def finish(self, receipt: Receipt) -> None:
        """Add the batch."""
        receipt.batch = self._tiling.batch


@dataclass(frozen=True, slots=True)
class FilteredCore:
    """A core that is computed, and the time that it took."""

    pixels: NDArray[Any]
    seconds: float

    @contextmanager
    def borrowed(self) -> Iterator[NDArray[Any]]:
        """The core, as of :meth:`QueuedCore.borrowed`."""
        yield self.pixels

    def collect(self) -> NDArray[Any]:
        """The core."""
        return self.pixels


def _batched(windows: Iterable[Window], count: int) -> Iterator[list[Window]]:
    """Yield groups of at most ``count`` windows."""
    source = iter(windows)
    while group := list(itertools.islice(source, count)):
        yield group


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """Pixels and side inputs of a block, being copied to the device."""

    pixels: Any
    sides: Mapping[str, Any]


class QueuedCore:
    """A core that is computed, or queued for it.

    Its pixels are checked when they are collected, so that the thread that queues the work need not wait for them.
    """

    def __init__(self, work: _Work, device: Device, name: str) -> None:
        assert work.output is not None
        self._work = work
        self._device = device
        self._ended = device.clock()
        self._name = name
        sums = device.torch.stack(work.sums)
        self._output = device.fetch(work.output)
        try:
            self._sums = device.fetch(sums)
        except BaseException:
            self._output.pixels()  # returns its pinned buffer
            raise

    @property
    def seconds(self) -> float:
        """Time that the device took, once the core has been collected."""
        return self._device.seconds(self._work.began, self._ended)

    @contextmanager
    def borrowed(self) -> Iterator[NDArray[Any]]:
        r"""Wait for the core, of shape (\*looped, channels out, \*spatial \* scale), which is valid within the context.

        Raises
        ------
        BlockFailed
            When it holds a NaN or an infinity that none of its inputs holds.
        """
        with self._output.borrowed() as output, self._sums.borrowed() as sums:
            for number in np.flatnonzero(~np.isfinite(sums)):
                # The sum of finite pixels may overflow.
                window, place = self._work.windows[number], self._work.places[number]
                if not all_finite(output[place]) and self._work.was_finite(window):
                    raise BlockFailed(
                        f"{self._name} returned NaN or infinity for finite pixels at {window.core}. "
                        "Check its weights and the range of the input (input.range)."
                    )
            yield output

    def collect(self) -> NDArray[Any]:
        """Wait for the core; in its own memory."""
        with self.borrowed() as pixels:
            return self._device.owned(pixels)


@dataclass(eq=False, slots=True)
class _Work:
    """A core that is being computed."""

    pixels: torch.Tensor
    sides: Mapping[str, torch.Tensor]
    available: Region
    core: Region
    leading: tuple[int, ...]
    began: Any
    output: torch.Tensor | None = None
    windows: list[Window] = field(default_factory=list)
    places: list[tuple[Any, ...]] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)

    def place_for(self, window: Window, values: torch.Tensor, scale: int) -> torch.Tensor:
        """The part of the output for the values of a tile; the first tile decides on the dtype."""
        factor = (scale,) * len(self.core.start)
        if self.output is None:
            self.output = values.new_empty((*self.leading, *self.core.scale(factor).shape))
        place = (*window.plane, slice(None), *window.core.relative_to(self.core).scale(factor).slices)
        self.windows.append(window)
        self.places.append(place)
        self.sums.append(values.sum())
        return self.output[place]

    def was_finite(self, window: Window) -> bool:
        """Return whether all inputs of a tile are finite."""
        reach = (..., *window.reach.relative_to(self.available).slices)
        plane = window.plane
        parts = (
            part[tuple(min(i, n - 1) for i, n in zip(plane, part.shape, strict=False))][reach]
            for part in (self.pixels, *self.sides.values())
        )
        return all(bool(part.isfinite().all()) for part in parts)
