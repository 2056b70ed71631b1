"""A denoised image with the standard deviation of its error: each block is denoised again on redrawn noise."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halotile.storage.grid import Block, Region
from halotile.storage.rim import Array, Readable
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.views import PlaneValues, Replaced
from halotile.tasks.block import Receipt
from halotile.tasks.denoise_block import DenoiseStages, DenoiseTask, ReadBlock, noise_at
from halotile.tasks.holes import measured_at
from halotile.tasks.posterior.gaussian import normals

REDRAWN = 2**31 + 2
"""Role of random numbers: noise that is drawn again."""


@dataclass(frozen=True, kw_only=True)
class BootstrapTask(DenoiseTask):
    """A denoising job with a map of its error, as a worker needs it for any block."""

    deviation: ShardWriter
    level: PlaneValues  # noise level of each plane, in the units of the file, where the job has no other description
    count: int  # redraws
    seed: int
    factor: float = 1.0  # by which the deviation of the redraws is multiplied

    def stages(self) -> BootstrapStages:
        return BootstrapStages(self)

    def around(self, block: Block) -> Block:
        """The block whose core is all that the redraws of this one read."""
        core = block.window.clip(Region.whole(self.grid.shape))
        return replace(block, core=core, window=self.grid.window_of(core))


class BootstrapStages:
    """Read once, denoise, denoise again on redrawn noise, write both maps."""

    def __init__(self, task: BootstrapTask) -> None:
        self.task, self._own = task, DenoiseStages(task)
        self.check, self.finish = self._own.check, self._own.finish

    def read(self, block: Block) -> Replaced:
        """Read what the redraws and the denoised image need."""
        source = self.task.source
        window = self.task.around(block).window.clip(Region.whole(source.shape))
        return Replaced(source, window, source.read(window))

    def compute(self, block: Block, image: Replaced, receipt: Receipt) -> tuple[ReadBlock, Array, Array]:
        """Denoise the core, and return it with the standard deviation of its error."""
        began, task, roles, around = time.perf_counter(), self.task, self.task.roles, self.task.around(block)
        core = (..., *roles.spatial_part(block.core).relative_to(roles.spatial_part(around.core)).slices)
        denoised = self._denoised(around, image)
        whole, pixels = roles.restore(denoised), image.read(around.core)
        valid = measured_at(task.holes, task.sides.get("mask"), roles.spatial, around.core, pixels)
        noise = noise_at(task, around.core, task.level.read(around.core))
        sigma = np.nan_to_num(np.sqrt(np.maximum(noise.gain * whole + noise.variance, np.square(noise.gain))))
        squares = np.zeros(denoised[core].shape)
        for draw in range(task.count):
            drawn = whole + sigma * normals(around.core, task.seed, REDRAWN, 0, draw)
            redrawn = np.where(valid, drawn, pixels).astype(np.result_type(pixels, np.float32))
            again = self._denoised(block, Replaced(image, around.core, redrawn), defects=None)
            squares += np.square(again.astype(np.float64) - denoised[core])
        deviation = np.where(roles.arrange(valid)[core], task.factor * np.sqrt(squares / task.count), math.nan)
        receipt.pixels += block.core.size
        receipt.read_bytes += image.pixels.nbytes
        receipt.compute_seconds += time.perf_counter() - began
        return self._on(image).read(block), denoised[core], deviation

    def write(self, block: Block, result: tuple[ReadBlock, Array, Array], receipt: Receipt) -> None:
        read, denoised, deviation = result
        mapped = self.task.deviation.write(block.core, self.task.roles.restore(deviation))
        receipt.enter(block.number, [self._own.written(block, denoised, read, receipt), mapped])

    def _on(self, source: Readable, **changes: Any) -> DenoiseStages:
        """The stages of the denoiser on another image."""
        stages = copy.copy(self._own)
        stages.task = replace(self.task, source=source, **changes)
        return stages

    def _denoised(self, block: Block, source: Readable, **changes: Any) -> Array:
        """The core of a block of another image, denoised and arranged."""
        stages = self._on(source, **changes)
        result: Array = stages.compute(block, stages.read(block), Receipt()).computed.collect()
        return result
