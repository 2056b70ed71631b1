"""A block of a denoising job: read core and halo, denoise the tiles, write the core once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Block, Grid
from halotile.storage.output import ShardWriter, to_dtype
from halotile.storage.rim import Pixels, Readable, Rim, read_window
from halotile.tasks.block import Receipt
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.device import Device
from halotile.tasks.probe import check_purity
from halotile.tasks.roles import Roles
from halotile.tasks.sound import check_picture, check_side
from halotile.tasks.window import TileRunner, Tiling


@dataclass(frozen=True)
class DenoiseTask:
    """What a denoising job does to a block."""

    source: Readable
    sides: dict[str, Readable]
    writer: ShardWriter
    grid: Grid
    rim: Rim
    roles: Roles
    denoiser: Denoiser
    tiling: Tiling
    channels_out: int
    precision: str
    on_nan: str
    overlap: bool

    def stages(self) -> DenoiseStages:
        """The stages, with the model loaded."""
        return DenoiseStages(self)


class DenoiseStages:
    """Read, denoise, write."""

    def __init__(self, task: DenoiseTask, device: str = "cpu") -> None:
        self.task = task
        spatial = len(task.roles.spatial)
        channels_last = task.denoiser.convolutional and spatial == 2
        self.tiles = TileRunner(
            task.denoiser.build(),
            Device(device, task.precision, channels_last),
            task.tiling,
            task.denoiser.title,
        )

    @property
    def batch(self) -> int:
        """Tiles that are denoised at once, by now."""
        return self.tiles.batch

    def check(self) -> None:
        """Refuse a denoiser that gives a tile another result after another tile."""
        check_purity(self.task.denoiser, len(self.task.roles.spatial), self.tiles.model)

    def read(self, block: Block) -> tuple[Pixels, dict[str, Pixels]]:
        """The window of the picture, and that of each side input."""
        task = self.task
        pixels = read_window(task.source, block.window, task.rim)
        if task.on_nan == "fail":
            check_picture(pixels, task.source, block.window, task.rim, task.roles.axes)
        return pixels, {name: self._read_side(name, side, block) for name, side in task.sides.items()}

    def compute(
        self, block: Block, what_was_read: tuple[Pixels, dict[str, Pixels]], receipt: Receipt
    ) -> NDArray[Any]:
        """The core, denoised."""
        pixels, sides = what_was_read
        began = time.perf_counter()
        result = self._denoise(block, pixels, sides)
        receipt.compute_seconds += time.perf_counter() - began
        receipt.pixels += block.core.size
        receipt.read_bytes += pixels.nbytes + sum(side.nbytes for side in sides.values())
        return result

    def write(self, block: Block, result: NDArray[Any], receipt: Receipt) -> None:
        """Write the core."""
        region = self.task.roles.output_region(block.core, self.task.tiling.scale, self.task.channels_out)
        receipt.written_bytes += self.task.writer.write(region, result)

    def _read_side(self, name: str, side: Readable, block: Block) -> Pixels:
        """A side input of the picture's shape, or of its tiled axes alone."""
        window, rim, axes = block.window, self.task.rim, self.task.roles.axes
        if len(side.shape) != len(self.task.grid.shape):
            spatial = self.task.roles.spatial
            window = self.task.roles.spatial_part(window)
            rim = Rim(tuple(rim.rules[i] for i in spatial))
            axes = tuple(axes[i] for i in spatial)
        pixels = read_window(side, window, rim)
        check_side(name, pixels, side, window, rim, axes, self.task.tiling.range)
        return pixels

    def _denoise(self, block: Block, pixels: Pixels, sides: dict[str, Pixels]) -> NDArray[Any]:
        task, roles = self.task, self.task.roles
        written = roles.output_region(block.core, task.tiling.scale, task.channels_out)
        result = np.empty(written.shape, task.writer.layout.dtype)
        reach = task.rim.reach(block.window, task.grid.shape)
        arranged = {name: self._arrange_side(side) for name, side in sides.items()}
        mask = arranged.pop("mask", None)
        self.tiles(
            roles.arrange(pixels),
            roles.spatial_part(reach),
            roles.spatial_part(block.core),
            roles.arrange(result),
            arranged,
        )
        if mask is not None:
            inner: tuple[Any, ...] = (
                ...,
                *roles.spatial_part(block.core).relative_to(roles.spatial_part(reach)).slices,
            )
            _keep_masked(roles.arrange(result), roles.arrange(pixels)[inner], mask[inner])
        return result

    def _arrange_side(self, side: Pixels) -> NDArray[Any]:
        roles = self.task.roles
        if side.ndim == len(roles.axes):
            return roles.arrange(side)
        return side[(None,) * (len(roles.looped) + 1)]


def _keep_masked(result: NDArray[Any], original: NDArray[Any], mask: NDArray[Any]) -> None:
    """Where the mask is 0, the pixel stays as it was."""
    kept = np.broadcast_to(mask == 0, result.shape)
    result[kept] = to_dtype(original[kept], result.dtype)
