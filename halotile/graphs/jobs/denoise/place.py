"""Rows and columns of an image, and what a task makes of them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from halotile.errors import DamagedData, InputUnreadable
from halotile.storage.grid import Block, Region
from halotile.storage.rim import Array, Pixels
from halotile.storage.sharded.output import ShardWriter, WrittenBlock, to_dtype
from halotile.storage.views import Replaced
from halotile.tasks.block import Receipt
from halotile.tasks.denoise_block import AnyDenoiseTask, DenoiseStages, DenoiseTask, noise_at
from halotile.tasks.devices.device import torch_threads
from halotile.tasks.inner_tiles import Roles
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quiet_windows import Values

Spans = Mapping[str, tuple[int, int]]  # first and last pixel, excluding that, along each axis by its letter


class DenoisedPlace:
    """Rows and columns of an image, with one index along each other axis, or several channels, and what a task makes of them.

    Images of the place have the shape (channels, rows, columns).

    Parameters
    ----------
    task : DenoiseTask or ChannelsTask
        The task, as a worker has it; its denoiser keeps the shape of the image.
    place : mapping of str to (int, int)
        The place.
    plane : str
        The axes of rows and columns.
    """

    def __init__(self, task: AnyDenoiseTask, place: Spans, plane: str = "yx") -> None:
        self.region = region_of(task.parts[0].roles, task.parts[0].source.shape, place)
        self.task, self.place, self.plane = task.at(self.region), place, plane

    @cached_property
    def noisy(self) -> Values:
        """The image, with NaN in holes and where a mask keeps it."""
        pixels = np.where(self._measured, self._pixels, np.nan) if not self._measured.all() else self._pixels
        return self.view(pixels).astype(np.float64)

    @cached_property
    def denoised(self) -> Pixels:
        """The pixels that a run writes there."""
        return self.view(self._run(self.task))

    def denoise(self, image: Values) -> Values:
        """Denoise another image at this place, among the pixels around it; unrounded, with NaN in holes."""
        pixels = self._pixels.astype(np.result_type(self._pixels.dtype, np.float32))
        shown, kept = self.view(pixels), self.view(self._measured)
        shown[kept] = image[kept]
        task = replace(self.task, source=Replaced(self.task.source, self.region, pixels))
        return np.where(kept, self.view(self._run(task, "float64")), np.nan)

    def view(self, pixels: Array) -> Array:
        """Arrange pixels of the region as an image of the place; never a copy."""
        axes = self.task.roles.axes
        shown = [axes.index(letter) for letter in f"c{self.plane}" if letter in axes]
        others = [axis for axis in range(len(axes)) if axis not in shown]
        view: Array = pixels.transpose(others + shown)[(0,) * len(others)]
        if "c" not in axes:
            return np.expand_dims(view, 0)
        takes_all = self.task.roles.channel is not None and "c" in self.place
        return view[slice(*self.place["c"])] if takes_all and len(view) > 1 else view

    def noise(self, level: ArrayLike) -> PhotonNoise:
        """The noise of the place, of shapes that broadcast to its images."""
        return PhotonNoise(
            *(self.view(part) if part.ndim else part for part in noise_at(self.task, self.region, level))
        )

    @cached_property
    def _pixels(self) -> Array:
        return self.task.source.read(self.region)

    @cached_property
    def _measured(self) -> Array:
        return self.task.measured(self.region, self._pixels)

    @cached_property
    def _stages(self) -> DenoiseStages:
        stages = DenoiseStages(self.task)
        stages.check()
        return stages

    def _run(self, task: DenoiseTask, dtype: str | None = None) -> Pixels:
        """Read, denoise and keep the region as a worker does, except that nothing is stored."""
        layout = task.writer.layout
        kept = _KeptRegion("", replace(layout, dtype=dtype or layout.dtype))
        block = Block(0, (0,) * len(self.region.start), self.region, task.grid.window_of(self.region))
        receipt = Receipt()
        with torch_threads():
            stages = self._stages
            stages.task = replace(task, writer=kept)
            stages.write(block, stages.compute(block, stages.read(block), receipt), receipt)
        return kept.written[0]


def readable_places(task: AnyDenoiseTask, places: Iterable[Spans], plane: str = "yx") -> list[DenoisedPlace]:
    """Places whose pixels can be read: a run names the blocks that the others belong to."""
    found = []
    for place in places:
        with suppress(DamagedData, InputUnreadable):
            one = DenoisedPlace(task, place, plane)
            found += [one] if one.noisy.size else []
    return found


def spans_of(axes: Sequence[str], region: Region) -> Spans:
    """A region by the letters of its axes."""
    return dict(zip(axes, zip(region.start, region.stop, strict=True), strict=True))


def region_of(roles: Roles, shape: tuple[int, ...], place: Spans) -> Region:
    """The region of an image at a place, with all channels where the denoiser takes them together.

    >>> region_of(Roles(("t", "c", "y", "x"), (2, 3), 1), (5, 3, 60, 70), {"t": (2, 3), "c": (0, 1), "y": (8, 16), "x": (0, 4)})
    Region(start=(2, 0, 8, 0), stop=(3, 3, 16, 4))
    """
    spans = [(0, shape[i]) if i == roles.channel else place.get(letter, (0, 1)) for i, letter in enumerate(roles.axes)]
    return Region(tuple(a for a, _ in spans), tuple(b for _, b in spans))


@dataclass(frozen=True)
class _KeptRegion(ShardWriter):
    """A writer that keeps what it is given, in the type of the output."""

    written: list[Pixels] = field(default_factory=list, compare=False)

    def write(self, region: Region, pixels: Array) -> WrittenBlock:
        self.written.append(to_dtype(pixels, self.layout.dtype))
        return WrittenBlock(0, b"")
